"""Frozen parameters, by requires_grad=False or by where=, are constants: shared, never copied,
drawn or stored.
"""

import pytest
import torch
from torch import nn

import bayou

X = torch.randn(30, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
START = bayou.MAP(steps=3)
FAMILIES = {
    "MeanField": bayou.MeanField(),
    "HalfCauchy": bayou.guides.HalfCauchy(),
    "LowRank": bayou.LowRank(2),
    "Inducing": bayou.Inducing(4),
    "MNF": bayou.MNF(),
    "Dropout": bayou.Dropout(0.5),
    "JointFlow": bayou.JointFlow(),
    "by name": {"0.weight": bayou.MNF(), "*": bayou.MeanField()},
}
METHODS = {
    "IVON": bayou.IVON(steps=3),
    "MAP": START,
    "Laplace": bayou.Laplace(start=START),
    "SWAG": bayou.SWAG(start=START, epochs=3),
    "SGLD": bayou.SGLD(steps=4, draws=2, start=START),
    "HMC": bayou.HMC(draws=2, warmup=2, leapfrogs=2, start=START),
    "ensemble": bayou.Ensemble(2, bayou.VI(steps=3)),
} | {f"VI {name}": bayou.VI(family, steps=3, lr=0.1) for name, family in FAMILIES.items()}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


def fit(network, method):
    return bayou.fit(network, (X, Y), method, progress=False)


def half_frozen():
    network = net()
    network[0].requires_grad_(False)
    return network


@pytest.mark.parametrize("name", METHODS)
def test_a_frozen_layer_is_neither_drawn_nor_moved(name):
    network = half_frozen()
    posterior = fit(network, METHODS[name])
    stack = posterior.sample(4, seed=0)
    assert {key for key in stack if key[0] in "02"} == {"2.weight", "2.bias"}
    assert not torch.equal(stack["2.weight"][0], network[2].weight)
    plain = posterior.to_module(seed=0)
    assert plain[0].weight.data_ptr() == network[0].weight.data_ptr()
    assert torch.equal(plain[0].weight, net()[0].weight)


@pytest.mark.parametrize("name", FAMILIES)
def test_in_a_loop_of_ones_own_it_has_no_guide_and_no_gradient(name):
    network = half_frozen()
    bnn = bayou.bayesianize(network, FAMILIES[name], example=X)
    draw = bnn.draw()
    (draw(X).sum() + draw.kl).backward()
    assert {name for guide in bnn.guides for name in guide.names} == {"2.weight", "2.bias"}
    assert network[0].weight.grad is None
    assert torch.equal(bnn.net[0].weight, network[0].weight)
    assert set(bnn.sample(2, seed=0)) == {"2.weight", "2.bias"}


class Spare(nn.Module):
    """Has a layer that it never uses."""

    def __init__(self):
        super().__init__()
        self.used, self.spare = nn.Linear(3, 2), nn.Linear(5, 5)

    def forward(self, x):
        return self.used(x)


def test_a_frozen_tensor_that_is_never_used_is_no_error():
    network = Spare()
    with pytest.raises(
        ValueError, match="'spare.bias' is never used by Spare; remove it .* or freeze it"
    ):
        bayou.bayesianize(network, bayou.MeanField(), example=X)
    network.spare.requires_grad_(False)
    posterior = fit(network, bayou.VI(steps=2))
    assert set(posterior.sample(1)) == {"used.weight", "used.bias"}


@pytest.mark.parametrize(
    "method", [bayou.VI(steps=2), bayou.VI({"*": bayou.MNF()}, steps=2), bayou.IVON(steps=2)]
)
def test_a_network_that_is_frozen_altogether_is_a_clear_error(method):
    with pytest.raises(ValueError, match="every parameter of Sequential is frozen"):
        fit(net().requires_grad_(False), method)


def test_a_file_is_what_it_was_whatever_is_frozen_now(tmp_path):
    """The file decides which parameters are random."""
    for fitted, loaded in ((half_frozen(), net()), (net(), half_frozen())):
        one = fit(fitted, bayou.VI(bayou.MNF(), steps=2))
        one.save(tmp_path / "a")
        for network in (loaded, net().requires_grad_(False)):
            for rules in (None, bayou.MNF()):
                two = bayou.load(tmp_path / "a", network, **({"rules": rules} if rules else {}))
                assert torch.equal(
                    two.predict(X, 3, seed=0).outputs, one.predict(X, 3, seed=0).outputs
                )

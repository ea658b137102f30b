"""Initial values and learning rates of families, and correlated gains."""

import math

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou import flows
from bayou.guides import HalfCauchy, NormalJeffreys
from bayou.guides.gain import GainFlow
from bayou.guides.joint import push
from bayou.methods.vi import parameter_groups

F64 = torch.float64


def gain(components=1, mixing=True, dim=4):
    torch.manual_seed(0)
    made = GainFlow(dim, flows.gated(dim, hidden=(5,)), 0.3, components, mixing).double()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


@pytest.mark.parametrize("components", [1, 3])
@pytest.mark.parametrize("mixing", [True, False])
def test_the_density_of_a_gain_is_that_of_its_base_over_the_jacobian(components, mixing):
    """log q(z) = log q0(z0) − log|det ∂z/∂z0|, by autograd through the map of one draw."""
    made = gain(components, mixing)
    z0 = made.base.draw(3, (), seed=0).detach()
    z, log_q = made.draw(3, seed=0)
    assert_close(made.log_prob(z), log_q, rtol=1e-9, atol=1e-9)

    def whole(one):
        center, std = made.frame()
        u, _ = push(made.transform, (one.unsqueeze(0) - center) / std)
        lower = torch.zeros(4, 4, dtype=F64) if made.lower is None else made.lower.tril(-1)
        return (center + std * (u @ (torch.eye(4, dtype=F64) + lower).mT))[0]

    for i in range(3):
        assert_close(whole(z0[i]), z[i])
        jacobian = torch.autograd.functional.jacobian(whole, z0[i])
        want = made.base.log_prob(z0[i]) - torch.linalg.slogdet(jacobian)[1]
        assert_close(log_q[i], want, rtol=1e-9, atol=1e-9)


def test_the_triangular_map_correlates_gains():
    """Cov z = s ⊙ L·Lᵀ ⊙ s where the flow is the identity."""
    made = GainFlow(3, flows.Permutation(range(3)), 0.5, mixing=True).double()
    with torch.no_grad():
        made.lower.copy_(
            torch.tensor([[9.0, 9.0, 9.0], [0.8, 9.0, 9.0], [-0.5, 0.4, 9.0]])
        )  # the upper part is unused
        z, _ = made.draw(100_000, seed=0)
    lower = torch.tensor([[1.0, 0.0, 0.0], [0.8, 1.0, 0.0], [-0.5, 0.4, 1.0]], dtype=F64)
    assert_close(torch.cov(z.mT), 0.25 * lower @ lower.mT, rtol=0, atol=0.01)
    assert_close(z.mean(0), torch.ones(3, dtype=F64), rtol=0, atol=0.01)


def test_rates():
    """Scales have their own; columns that mix noise have it over the root of their length; factors
    at most lr, and so have the matrices of a flow's networks with their inputs."""
    net = nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 2))
    wide = nn.Linear(300, 2)
    for module in (net, wide):
        for spec in (
            bayou.MNF(), bayou.LowRank(), bayou.JointFlow(flow=None), NormalJeffreys(), HalfCauchy(),
        ):  # fmt: skip
            bnn = bayou.bayesianize(module, spec)
            found = {
                id(p): group["lr"]
                for group in parameter_groups(bnn, 1e-3, 1e-2)
                for p in group["params"]
            }
            assert len(found) == sum(1 for p in bnn.parameters() if p.requires_grad)
            for name, parameter in bnn.named_parameters():
                leaf, mixed = name.rpartition(".")[2], 1e-2 / math.sqrt(len(parameter))
                mixing = {"lower": mixed, "upper": mixed, "factor": min(1e-3, mixed)}
                if ".transform." in name and parameter.ndim == 2:
                    mixing["weight"] = min(1e-3, 1e-2 / math.sqrt(parameter.shape[1]))
                want = mixing.get(leaf, 1e-2 if leaf in ("log_std", "z_log_std") else 1e-3)
                assert found[id(parameter)] == pytest.approx(want), name


FAMILIES = {
    "MeanField": bayou.MeanField(),
    "LowRank": bayou.LowRank(),
    "MNF": bayou.MNF(),
    "SparseVD": bayou.SparseVD(),
    "NormalJeffreys": NormalJeffreys(),
    "HalfCauchy": HalfCauchy(),
    "NodeNoise": bayou.NodeNoise(),
    "NodeFlow": bayou.NodeFlow(),
    "NodeFlow, both": bayou.NodeFlow(where="both"),
}


def digits(hidden, rows):
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))
    return net, (torch.tensor(x[:rows] / 16, dtype=torch.float32), torch.tensor(y[:rows]))


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(name, marks=[] if name == "MeanField" else pytest.mark.slow)
        for name in FAMILIES
    ],
)
def test_no_family_diverges(family):
    """200 steps on 300 digits at a large lr: what is learned predicts the very rows far better than
    chance, log 10 = 2.3 nats.
    """
    net, (x, y) = digits(50, 300)
    method = bayou.VI(FAMILIES[family], steps=200, lr=1e-2, batch_size=100)
    prior = bayou.Normal("fan_in", gain=3.0)
    posterior = bayou.fit(net, (x, y), method=method, prior=prior, seed=0, progress=False)
    assert -float(posterior.predict(x, samples=20, seed=0).log_prob(y).mean()) < 1.5


@pytest.mark.slow
def test_the_elbo_of_mnf_is_not_below_that_of_mean_field():
    """At equal settings: a family that holds another must not end below it."""
    elbos = {}
    for name in ("MeanField", "MNF"):
        net, data = digits(20, 300)
        method = bayou.VI(FAMILIES[name], steps=1000, lr=1e-2, batch_size=100)
        posterior = bayou.fit(net, data, method=method, seed=0, progress=False)
        elbos[name] = bayou.elbo(posterior, data, samples=100, seed=1)
    noise = math.hypot(elbos["MeanField"].standard_error, elbos["MNF"].standard_error)
    assert elbos["MNF"].value > elbos["MeanField"].value - 2 * noise

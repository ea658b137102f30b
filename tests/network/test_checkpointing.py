"""Networks with gradient checkpointing: layers that are computed again in the backward pass."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import bayou

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = X[:, :1] * X[:, 1:2]
CALLS = []


class Net(nn.Module):
    """Three layers, of which the second and third are recomputed: not at all, without or with a
    second graph.
    """

    def __init__(self, reentrant):
        super().__init__()
        torch.manual_seed(0)
        self.reentrant = reentrant
        self.one, self.two, self.three, self.drop = (
            nn.Linear(3, 6),
            nn.Linear(6, 5),
            nn.Linear(5, 1),
            nn.Dropout(0.2),
        )
        self.double()

    def block(self, h):
        CALLS.append(len(h))
        return self.drop(self.two(h).tanh())

    def forward(self, x):
        h = self.one(x).tanh()
        if self.reentrant is None:
            return self.three(self.block(h))
        return self.three(checkpoint(self.block, h, use_reentrant=self.reentrant))


def fit(net, method):
    options = {"likelihood": bayou.Gaussian(0.3), "prior": bayou.Normal(1.0)}
    return bayou.fit(net, (X, Y), method=method, progress=False, **options)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "method",
    [
        bayou.VI(bayou.MeanField(0.1, local=False), steps=4),
        bayou.VI(bayou.MeanField(0.1, local=False), steps=4, samples=3),
        bayou.VI(bayou.JointFlow(), steps=4),
        bayou.IVON(steps=4),
        bayou.MAP(steps=4),
    ],
    ids=["VI", "three draws", "flow", "IVON", "MAP"],
)
def test_posterior_of_a_checkpointed_network_is_that_of_the_network_without(method, reentrant):
    expected = fit(Net(None), method).predict(X, 3, seed=0).outputs
    CALLS.clear()
    found = fit(Net(reentrant), method)
    steps = [rows for rows in CALLS if rows == len(X)]
    torch.testing.assert_close(
        found.predict(X, 3, seed=0).outputs, expected, rtol=1e-10, atol=1e-10
    )
    assert len(steps) >= 2 * 4  # the layers were computed again in every step


def test_noise_is_drawn_for_weights_where_outputs_would_be_recomputed():
    for reentrant in (None, False, True):
        bnn = bayou.bayesianize(Net(reentrant), bayou.MNF(), example=X)
        assert bool(bnn.local_names) is (reentrant is None)
        draw = bnn.draw(2)
        (draw(X).square().sum() + draw.kl).backward()
        assert all(p.grad is not None for p in bnn.parameters())


@pytest.mark.parametrize("structure", ["kronecker", "diagonal", "full"])
def test_laplace_has_the_same_curvature_and_linearized_functions(structure):
    nets = [Net(None), Net(False)]
    for net in nets:
        net.drop.p = 0.0
    one, two = (fit(net, bayou.Laplace(structure, start=None)) for net in nets)
    for of in (
        lambda posterior: posterior.covariance.variance(),
        lambda posterior: posterior.function(X),
        lambda posterior: posterior.predict(X, 2, seed=0).outputs,
        lambda posterior: posterior.call(
            {k: v[0] for k, v in posterior.sample(1, seed=0).items()}, X
        ),
    ):
        torch.testing.assert_close(of(two), of(one), rtol=1e-10, atol=1e-10)
    with pytest.raises(ValueError, match="uses 'two.weight' without.*use_reentrant=False"):
        fit(Net(True), bayou.Laplace(structure, start=None))


def test_a_second_derivative_raises():
    bnn = bayou.bayesianize(Net(False), bayou.MeanField(0.1, local=False), example=X)
    parameters = [p for p in bnn.parameters() if p.requires_grad]
    draw = bnn.draw(2)
    loss = draw(X).square().sum() + draw.kl  # the second derivatives of the KL exist
    with pytest.raises(NotImplementedError, match="turn checkpointing off"):
        torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)

"""What lies below the first random tensor is computed once for all draws."""

import pytest
import torch
from torch import nn

import bayou
from bayou.posteriors import Mixture

N, WIDTH, CLASSES = 24, 12, 3
X = torch.randn(N, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = (X.sum(1) > 0).long() + (X[:, 0] > 1).long()
POINT = bayou.MAP(steps=2)


class Counting(nn.Module):
    """A body with attention that counts its calls on whole batches, and a last layer."""

    calls = 0

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Linear(2, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        )
        self.head = nn.Linear(WIDTH, CLASSES)
        self.double()

    def forward(self, x):
        Counting.calls += len(x) == N
        h = self.body(x.unflatten(1, (3, 2)))
        return self.head(nn.functional.scaled_dot_product_attention(h, h, h).mean(1))


class Branching(Counting):
    """The head looks at its values, which vmap does not support."""

    def forward(self, x):
        f = super().forward(x)
        return f if bool(f.detach().abs().max() < 1e9) else -f


METHODS = {
    "mnf": (bayou.VI(bayou.MNF(), steps=2), "last"),
    "points below": (bayou.VI({"head.*": bayou.MeanField(), "*": bayou.Delta()}, steps=2), None),
    "sgld": (bayou.SGLD(steps=12, draws=6, start=POINT), "last"),
    "ensemble": (bayou.Ensemble(6, POINT, init="reset"), "last"),
    "laplace of a part": (bayou.Laplace(where="last", start=POINT, predictive="sampled"), None),
    "linearized": (bayou.Laplace(start=POINT), "last"),
}


def fitted(method, where, net=Counting):
    torch.manual_seed(0)
    return bayou.fit(net(), (X, Y), method, where=where, progress=False)


def calls(run):
    Counting.calls = 0
    run()
    return Counting.calls


@pytest.mark.filterwarnings("ignore::bayou.BayouWarning")  # short runs
@pytest.mark.parametrize("name", METHODS)
def test_predictions_compute_the_body_once(name):
    posterior = fitted(*METHODS[name])
    p = posterior.predict(X, 6, seed=0)
    assert calls(lambda: posterior.predict(X, 6, seed=0)) == 1
    stack = posterior.sample(6, 0)
    each = [posterior.call({k: v[s] for k, v in stack.items()}, X) for s in range(6)]
    torch.testing.assert_close(p.outputs, torch.stack(each).detach(), rtol=1e-12, atol=1e-12)


def test_network_with_random_first_layer_is_called_for_every_draw():
    posterior = fitted(bayou.VI(bayou.MeanField(), steps=2), None)
    assert calls(lambda: posterior.predict(X, 6, seed=0)) >= 6


def test_members_of_a_mixture_compute_the_body_once_each():
    posterior = fitted(bayou.Ensemble(2, bayou.VI(bayou.MeanField(), steps=2), init="keep"), "last")
    assert isinstance(posterior, Mixture)
    posterior.predict(X, 8, seed=0)
    assert calls(lambda: posterior.predict(X, 8, seed=0)) == 2


def test_operation_without_a_batching_rule_uses_a_loop():
    method = bayou.VI(bayou.MeanField(), steps=2, samples=3)
    posterior, same = fitted(method, "last", Branching), fitted(method, "last")
    got, want = posterior.predict(X, 6, seed=0), same.predict(X, 6, seed=0)
    assert got.outputs.shape == want.outputs.shape == (6, N, CLASSES)
    assert calls(lambda: posterior.predict(X, 6, seed=0)) >= 6
    assert not posterior.bayesian.shares
    assert same.bayesian.shares


FAMILIES = {
    "local noise": bayou.MeanField(1e-9),
    "weights": bayou.MeanField(0.3, local=False),
    "gains": bayou.MNF(std=1e-9),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_draws_of_a_training_step_compute_the_body_once(family):
    torch.manual_seed(0)
    net = Counting()
    net.body.requires_grad_(False)
    bnn = bayou.bayesianize(net, FAMILIES[family], example=X)
    assert calls(lambda: bnn.draw(5)(X)) == 1

    def gradient(shares):
        bnn.shares = shares
        out = bnn.draw(5, seed=0)(X)
        return out, list(
            torch.autograd.grad(out.square().sum(), bnn.guides.parameters(), allow_unused=True)
        )

    torch.testing.assert_close(
        gradient(True), gradient(False), rtol=1e-6, atol=1e-6
    )  # noise at an output is 1e-9

"""A posterior as a BoTorch model: the functions are those of predict, joint over points,
differentiable, batched.
"""

import sys
from typing import Any

import pytest
import torch
from torch import nn

import bayou

X = torch.rand(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
Y = torch.stack((torch.sin(3 * X[:, 0]) + X[:, 1], X[:, 1].square()), -1)
START = bayou.MAP(steps=30)
METHODS = {
    "point": START,
    "ensemble": bayou.Ensemble(3, START),
    "MNF": bayou.VI(bayou.MNF(options={"hidden": [6]}), steps=20),
    "ensemble of VI": bayou.Ensemble(2, bayou.VI(steps=20)),
    "Laplace": bayou.Laplace("full", start=START),
    "dropout": bayou.MCDropout(START),
    "wide": bayou.methods.Wide(draws=2, passes=20),
}


def fitted(method, likelihood=None, outputs=2):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, outputs)).double()
    likelihood = likelihood or bayou.Gaussian(0.1, learn=True)
    return bayou.fit(net, (X, Y), method=method, likelihood=likelihood, progress=False)


@pytest.mark.peers
@pytest.mark.parametrize("name", METHODS)
def test_the_functions_of_predict_joint_batched_and_differentiable(name: str) -> None:
    from bayou.adapters.botorch import PosteriorModel

    # With a noise to learn "wide" interpolates these y, too ill-conditioned for gradcheck.
    posterior = fitted(METHODS[name], bayou.Gaussian(0.1) if name == "wide" else None)
    model = PosteriorModel(posterior, X, 6, seed=3)
    count = min(6, posterior.draws or 6)
    expected = posterior.predict(X, count, seed=3).means  # (S, 20, 2)
    assert model.num_outputs == 2
    assert model.batch_shape == ()
    at = model.posterior(X)
    torch.testing.assert_close(at.values, expected, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(at.mean, expected.mean(0), rtol=1e-10, atol=1e-10)
    batched = model.posterior(X.reshape(5, 2, 2, 2))  # (b, c, q, d)
    torch.testing.assert_close(
        batched.values.movedim(-3, 0).reshape(count, 20, 2), expected, rtol=1e-10, atol=1e-10
    )
    draws = batched.rsample(torch.Size((7,)))
    assert draws.shape == (7, 5, 2, 2, 2)
    for draw in at.rsample(torch.Size((5,))):  # one function at all points
        assert min(float((draw - f).abs().max()) for f in expected) < 1e-10
    assert model.posterior(X[:3], output_indices=[1]).mean.shape == (3, 1)
    near = X[:2].clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda x: model.posterior(x).values.sum(-3), near, atol=1e-6)


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::Warning:botorch")
@pytest.mark.filterwarnings("ignore::Warning:linear_operator")
def test_expected_improvement_finds_the_top_of_what_was_learned() -> None:
    from botorch.acquisition import qLogExpectedImprovement, qSimpleRegret
    from botorch.models.transforms import Normalize, Standardize
    from botorch.optim import optimize_acqf

    from bayou.adapters.botorch import PosteriorModel

    scale = Standardize(1)
    y = 100 + 10 * Y[:, :1]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    method = bayou.Ensemble(3, bayou.MAP(steps=300))
    likelihood = bayou.Gaussian(0.05)
    posterior = bayou.fit(
        net, (X, scale(y)[0]), method=method, likelihood=likelihood, progress=False
    )
    model = PosteriorModel(posterior, X, outcome_transform=scale.eval())
    units = posterior.predict(X).mean * scale.stdvs + scale.means  # those of y
    torch.testing.assert_close(model.posterior(X).mean, units)
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    wide = PosteriorModel(
        posterior,
        X,
        outcome_transform=scale.eval(),
        input_transform=Normalize(2, bounds=9 * bounds),
    )
    torch.testing.assert_close(wide.posterior(9 * X).mean, model.posterior(X).mean)
    options: dict[str, Any] = {
        "bounds": bounds,
        "num_restarts": 2,
        "raw_samples": 32,
        "options": {"maxiter": 20},
    }
    found, value = optimize_acqf(qSimpleRegret(model), q=1, **options)
    grid = torch.cartesian_prod(*[torch.linspace(0, 1, 21, dtype=torch.float64)] * 2)
    assert float(value) >= float(model.posterior(grid).mean.max()) - 0.5
    assert bool(((found >= 0) & (found <= 1)).all())
    pair, improvement = optimize_acqf(
        qLogExpectedImprovement(model, best_f=y.max()), q=2, **options
    )
    assert pair.shape == (2, 2)
    assert bool(improvement.isfinite())


@pytest.mark.peers
def test_other_likelihoods_dtypes_and_refusals() -> None:
    from bayou.adapters.botorch import PosteriorModel

    model = PosteriorModel(fitted(START, bayou.HeteroscedasticGaussian(), 4), X)
    assert model.num_outputs == 2
    single = bayou.fit(
        nn.Linear(2, 2),
        (X.float(), Y.float()),
        method=START,
        likelihood=bayou.Gaussian(),
        progress=False,
    )
    assert PosteriorModel(single, X.float()).posterior(X).mean.dtype == torch.float64
    for bad in (X.reshape(5, 2, 2, 2), X.tolist()):
        with pytest.raises(ValueError, match=r"rows \(B, d\)"):
            PosteriorModel(single, bad)


def test_without_botorch_it_says_what_to_install(monkeypatch):
    monkeypatch.delitem(sys.modules, "bayou.adapters.botorch", raising=False)
    monkeypatch.setitem(sys.modules, "botorch.models.ensemble", None)
    with pytest.raises(ImportError, match=r"pip install 'bayou\[botorch\]'"):
        import bayou.adapters.botorch  # noqa: F401

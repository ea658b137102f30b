"""Conditional flows as density estimators of sbi."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Independent, MultivariateNormal, Normal

from bayou import flows

pytestmark = [
    pytest.mark.peers,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


def simulate(count: int) -> tuple[Tensor, Tensor]:
    """θ ~ N(0, 1)², x = 10 + 5·θ + 2.5·noise."""
    torch.manual_seed(0)
    theta = torch.randn(count, 2)
    return theta, 10 + 5 * theta + 2.5 * torch.randn(count, 2)


@pytest.mark.parametrize("density", ["posterior", "likelihood"])
def test_shapes_and_densities_of_one_estimator(density: str) -> None:
    from bayou.adapters.sbi import flow_builder

    theta, x = (value.double() for value in simulate(50))
    estimator = flow_builder(density=density)(theta, x)
    inputs, conditions = (theta, x) if density == "posterior" else (x, theta)
    assert estimator.log_prob(inputs[:5], conditions[:5]).shape == (1, 5)
    draws, log_prob = estimator.sample_and_log_prob(torch.Size((3, 2)), conditions[:5])
    assert draws.shape == (3, 2, 5, 2)
    assert estimator.sample(torch.Size((7,)), conditions[:5]).shape == (7, 5, 2)
    again = estimator.log_prob(draws.flatten(0, 1), conditions[:5]).reshape(3, 2, 5)
    torch.testing.assert_close(again, log_prob, rtol=1e-6, atol=1e-8)
    loss = estimator.loss(inputs[:5], conditions[:5])
    torch.testing.assert_close(-loss, estimator.log_prob(inputs[:5], conditions[:5])[0])
    # ∫ q(input | condition) = 1 by a grid of ten standard deviations.
    axes = [
        torch.linspace(-5, 5, 161, dtype=torch.float64) * s + m
        for m, s in zip(inputs.mean(0), inputs.std(0), strict=True)
    ]
    grid = torch.cartesian_prod(*axes)
    cell = (axes[0][1] - axes[0][0]) * (axes[1][1] - axes[1][0])
    total = estimator.log_prob(grid.unsqueeze(1), conditions[:1]).detach().exp().sum() * cell
    assert float(total) == pytest.approx(1.0, abs=2e-3)


def test_npe_finds_a_gaussian_posterior(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # sbi writes its logs to the working folder
    from sbi.inference import NPE

    from bayou.adapters.sbi import flow_builder

    theta, x = simulate(2000)
    prior = Independent(Normal(torch.zeros(2), torch.ones(2)), 1)
    maf = flow_builder(lambda dim, context: flows.maf(dim, 2, (16,), context_dim=context))
    inference = NPE(prior, density_estimator=maf, show_progress_bars=False)
    inference.append_simulations(theta, x)
    inference.train(max_num_epochs=25, learning_rate=5e-3, training_batch_size=200)
    posterior = inference.build_posterior()
    observed = torch.tensor([[12.0, 4.0]])
    # Conjugate: precision 1 + 5²/2.5² = 5, mean 5·(x − 10)/2.5²/5.
    truth = MultivariateNormal(0.16 * (observed[0] - 10), torch.eye(2) / 5)
    draws = posterior.sample((2000,), x=observed, show_progress_bars=False)
    assert (draws.mean(0) - truth.mean).abs().max() < 0.1
    assert (draws.std(0) - 0.2**0.5).abs().max() < 0.1
    exact = truth.sample((500,))
    gap = truth.log_prob(exact) - posterior.log_prob(exact, x=observed)
    assert gap.mean() < 0.1  # KL(truth, q) in nats


def test_pictures_take_an_embedding() -> None:
    from bayou.adapters.sbi import flow_builder

    theta = torch.randn(20, 3)
    pictures = torch.randn(20, 1, 4, 4)
    net = nn.Sequential(nn.Flatten(), nn.Linear(16, 5))
    estimator = flow_builder(embedding_net=net)(theta, pictures)
    assert estimator.embedding_net is net
    assert estimator.loss(theta, pictures).shape == (20,)
    with pytest.raises(ValueError, match="density must be one of posterior, likelihood"):
        flow_builder(density="prior")
    with pytest.raises(ValueError, match="Dimensionality of condition is too small"):
        estimator.log_prob(theta, pictures.flatten(1))

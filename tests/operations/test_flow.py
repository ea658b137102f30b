"""A chain as a density: moments that are known, what is not Gaussian, files, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import bayou
from bayou import flows
from bayou.guides.joint import JointFlowGuide
from bayou.operations.flow import whiten
from bayou.posteriors import Empirical, Guided
from bayou.target import Target


def regression() -> tuple[nn.Linear, Tensor, Tensor, float]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    x[:, 1] += 0.9 * x[:, 0]  # so that weights are correlated
    y = x @ torch.tensor([[1.0], [-0.5], [0.3]]).double() + 0.3 * torch.randn(30, 1, generator=generator).double()
    return nn.Linear(3, 1).double(), x, y, 0.3


def conjugate(x: Tensor, y: Tensor, noise: float) -> tuple[Tensor, Tensor]:
    """Mean and covariance of (bias, weights) under N(0, 1) priors."""
    design = torch.cat([torch.ones(len(x), 1).double(), x], 1)
    covariance = torch.linalg.inv(design.T @ design / noise**2 + torch.eye(4).double())
    return covariance @ design.T @ y.squeeze(1) / noise**2, covariance


def chain(n: int = 4000) -> tuple[Empirical, Tensor, Tensor]:
    """Draws of the conjugate posterior, as those of a perfect sampler."""
    net, x, y, noise = regression()
    mean, covariance = conjugate(x, y, noise)
    eps = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    w = mean + eps @ torch.linalg.cholesky(covariance).T
    target = Target.build(net, bayou.Gaussian(noise), None, len(x))
    return Empirical(target, target.network, {"weight": w[:, None, 1:], "bias": w[:, :1]}), mean, covariance


@pytest.mark.parametrize("family", [None, bayou.JointFlow(None), bayou.JointFlow("realnvp")], ids=str)
def test_a_flow_of_conjugate_draws_has_the_moments_and_the_density_of_the_posterior(
    family: bayou.JointFlow | None, tmp_path: Path
) -> None:
    posterior, mean, covariance = chain()
    found = bayou.operations.to_flow(posterior, family, steps=150, progress=False)
    assert isinstance(found, Guided)
    n = 4000
    drawn = found.sample(n, seed=0)
    w = torch.cat([drawn["bias"], drawn["weight"].flatten(1)], 1)
    std = covariance.diagonal().sqrt()
    assert ((w.mean(0) - mean).abs() < 0.1 * std).all()
    assert ((w.T.cov() - covariance).abs() < 0.12 * std * std[:, None]).all()
    truth = torch.distributions.MultivariateNormal(mean, covariance)
    held = truth.sample((500,))
    params = {"bias": held[:, :1], "weight": held[:, None, 1:]}
    gap = truth.log_prob(held) - found.log_prob(params).detach()
    assert abs(gap.mean().item()) < 0.1  # nats: KL(p ‖ q)
    found.save(tmp_path / "flow.bayou")
    again = bayou.load(tmp_path / "flow.bayou", nn.Linear(3, 1).double())
    assert torch.equal(again.sample(3, seed=5)["weight"], found.sample(3, seed=5)["weight"])


@pytest.mark.slow
def test_matching_learns_what_is_not_gaussian() -> None:
    net = nn.Linear(1, 1)
    generator = torch.Generator().manual_seed(0)
    side = torch.where(torch.rand(4000, generator=generator) < 0.5, -1.0, 1.0)
    weight = 2 * side + 0.3 * torch.randn(4000, generator=generator)  # two modes
    bias = weight.square() / 4 + 0.1 * torch.randn(4000, generator=generator)
    target = Target.build(net, bayou.Gaussian(1.0), None, 10)
    points = Empirical(target, target.network, {"weight": weight.reshape(-1, 1, 1), "bias": bias.reshape(-1, 1)})
    found, gaussian = (
        bayou.operations.to_flow(points, family, steps=600, progress=False)
        for family in (bayou.JointFlow("continuous"), bayou.JointFlow(None))
    )
    drawn = found.sample(1000, seed=0)["weight"].flatten()
    assert ((drawn.abs() > 1).float().mean() > 0.9).item()
    few = {name: value[:500] for name, value in points.stack.items()}
    assert (found.log_prob(few).mean() > gaussian.log_prob(few).mean() + 1.0).item()  # nats


def test_few_draws_of_many_weights_have_correlations_that_are_shrunk() -> None:
    spec = bayou.JointFlow(None)
    bnn = bayou.bayesianize(nn.Linear(30, 1).double(), spec)
    (guide,) = bnn.guides
    assert isinstance(guide, JointFlowGuide)
    w = torch.randn(12, 31, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    rest = whiten(guide, w)
    assert rest.shape == (12, 31)
    assert rest.isfinite().all()
    draws = guide.join(guide.draw(4000, seed=0).parts)
    off = draws.T.corrcoef() - torch.eye(31)
    assert off.abs().mean() < 0.1  # of those of the draws, .24 by chance alone, little is left


def test_parts_that_are_no_draws_stay_points() -> None:
    posterior, _, _ = chain(50)
    posterior.stack["bias"] = posterior.stack["bias"][:1].expand(50, 1)
    found = bayou.operations.to_flow(posterior, bayou.JointFlow(None), progress=False)
    assert torch.equal(found.sample(3, seed=0)["bias"], posterior.stack["bias"][:3])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:the chains of HMC have not mixed")
def test_a_noise_that_was_drawn_is_kept_at_its_mean() -> None:
    net, x, y, _ = regression()
    hmc = bayou.fit(
        net,
        (x, y),
        method=bayou.HMC(chains=1, draws=40, warmup=40),
        likelihood=bayou.Gaussian(0.5, learn=True),
        progress=False,
    )
    found = bayou.operations.to_flow(hmc, bayou.JointFlow(None), progress=False)
    drawn = hmc.sample(40, seed=0)["likelihood.log_scale"]
    assert found.target.likelihood.log_scale.item() == pytest.approx(drawn.mean().item())
    assert math.isfinite(bayou.elbo(found, (x, y), samples=50, seed=0).value)


def test_what_is_refused() -> None:
    posterior, _, _ = chain(50)
    with pytest.raises(ValueError, match="fits a JointFlow"):
        bayou.operations.to_flow(posterior, bayou.MeanField())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a posterior, got Flow"):
        bayou.operations.to_flow(flows.Flow(flows.StandardNormal(2), flows.realnvp(2)))  # type: ignore[arg-type]
    point = Empirical(posterior.target, posterior.network, {k: v[:1] for k, v in posterior.stack.items()})
    with pytest.raises(ValueError, match="all 1 draws are one point"):
        bayou.operations.to_flow(point)


def test_options_of_a_family_follow_its_flow() -> None:
    assert bayou.JointFlow().options == bayou.JointFlow("residual").options == {"layers": 2}
    assert bayou.JointFlow("continuous").options == {"steps": 8}
    assert bayou.JointFlow("lu_linear").options == {}
    assert bayou.JointFlow("iaf", {"hidden": [4]}).options == {"hidden": [4]}

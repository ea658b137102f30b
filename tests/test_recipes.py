"""The recipes of CONTRIBUTING.md for a guide, a likelihood, a prior and a metric, compared with
scipy.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.integrate
import scipy.optimize
import scipy.stats
import torch
from numpy.testing import assert_allclose
from torch import nn

import bayou
from bayou import metrics
from bayou.core import rng
from bayou.curvature import information
from bayou.likelihoods import BoundLikelihood, FiniteLikelihood, Likelihood
from bayou.likelihoods.base import MONTE_CARLO_DRAWS as DRAWS
from bayou.likelihoods.predictive import Predictive
from tests.test_likelihoods import F64, noise, predictive


def recipes():
    """The names that the code of the sections defines."""
    text = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
    namespace = {}
    for section in re.findall(
        r"## Add a (?:guide|likelihood|prior|metric).*?(?=\n## )", text, re.DOTALL
    ):
        for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
            exec(compile(block, "CONTRIBUTING.md", "exec"), namespace)
    return SimpleNamespace(**namespace)


recipe = recipes()
SCALE = 0.4
ENTROPY = math.log(SCALE) + 2
OUTPUTS = 2 * noise(6, 5, 1)  # (S, B, 1)
ROOT = math.sqrt(DRAWS)


def predicted(spec=None, outputs=OUTPUTS):
    return predictive(spec or recipe.Logistic(SCALE), outputs)


def mixture(row):
    return scipy.stats.logistic(OUTPUTS[:, row, 0].numpy(), SCALE)


def integral(function):
    return float(scipy.integrate.quad(function, -30, 30, limit=500)[0])


def test_a_new_guide_draws_from_its_density():
    """Means within five standard errors; E[kl] = log q − E[log p] with E[w²] = center² + width²/3
    under N(0, 1).
    """
    torch.manual_seed(0)
    bayesian = bayou.bayesianize(nn.Linear(3, 2, bias=False).double(), recipe.Uniform(0.2))
    (guide,), n = bayesian.guides, 4000
    w, center, std = (
        values["weight"] for values in (bayesian.sample(n, seed=0), guide.mean(), guide.std())
    )
    assert ((w.mean(0) - center).abs() < 5 * std / math.sqrt(n)).all()
    assert ((w - center).abs() <= 0.2).all()
    kl, center = guide.draw(n, seed=0).kl.detach(), center.detach()
    expected = (
        -math.log(0.4) * 6 + 0.5 * (center.square() + 0.2**2 / 3 + math.log(2 * math.pi)).sum()
    )
    assert abs(float(kl.mean() - expected)) < 5 * float(kl.std()) / math.sqrt(n)


def test_sampled_moments_of_a_new_likelihood():
    """Standard errors of n = 2,048 draws: std/√n of a mean, √((κ − 1)/n)·var of a variance, κ =
    4.2; five of them.
    """
    p, std = predicted(), SCALE * math.pi / math.sqrt(3)
    assert ((p.means - OUTPUTS).abs() < 5 * std / ROOT).all()
    assert ((p.aleatoric_std.square() / std**2 - 1).abs() < 5 * math.sqrt(3.2 / DRAWS)).all()
    assert ((p.likelihood.entropy(OUTPUTS) - ENTROPY).abs() < 5 / ROOT).all()
    torch.testing.assert_close(
        p.epistemic_std, OUTPUTS.std(0, correction=0)
    )  # every sample has the same noise


def test_sampled_mixtures_of_a_new_likelihood():
    p = predicted()
    cdf = p.cdf(torch.zeros(5, 1, dtype=F64))
    low, high = p.interval(0.8)
    for row in range(5):
        law = mixture(row)
        entropy = integral(lambda y, law=law: scipy.special.entr(law.pdf(y).mean()))
        assert p.entropy[row] == pytest.approx(entropy, abs=5 / ROOT)
        assert p.mutual_information[row] == pytest.approx(entropy - ENTROPY, abs=2 / ROOT)
        assert cdf[row] == pytest.approx(law.cdf(0).mean(), abs=5 * math.sqrt(0.25 / DRAWS))
        for q, y in ((0.1, low), (0.9, high)):
            assert law.cdf(y[row].numpy()).mean() == pytest.approx(
                q, abs=5 * math.sqrt(q * (1 - q) / DRAWS)
            )


def test_scores_of_a_new_likelihood():
    """CRPS of a logistic: s·(z − 2·log F(z) − 1) (Jordan et al. 2019); 20,000 draws, five standard
    errors.
    """
    p, y = predicted(outputs=OUTPUTS[:1]), torch.linspace(-2, 2, 5, dtype=F64).unsqueeze(1)
    law = scipy.stats.logistic(OUTPUTS[0].numpy(), SCALE)
    assert metrics.nll(p, y) == pytest.approx(-law.logpdf(y.numpy()).mean(), rel=1e-9)
    z = ((y - OUTPUTS[0]) / SCALE).numpy()
    crps = (SCALE * (z - 2 * scipy.stats.logistic.logcdf(z) - 1)).mean()
    assert metrics.crps(p, y, draws=20_000) == pytest.approx(
        crps, abs=5 * SCALE * 2 / math.sqrt(20_000)
    )
    assert all(math.isfinite(value) for value in metrics.summary(p, y, p, scale=3.0).values())
    d = y.numpy() - p.quantile(0.3).numpy()
    assert recipe.pinball(p, y, 0.3) == pytest.approx(
        np.mean([max(0.3 * e, -0.7 * e) for e in d.flatten()]), rel=1e-9
    )


def test_a_new_likelihood_is_fitted_saved_and_has_a_curvature(tmp_path):
    """A line through the origin: the mode by scipy, the precision Σ x²/(3·scale²) + 1 of the Fisher
    information.
    """
    x = torch.linspace(-1, 1, 50, dtype=F64).unsqueeze(1)
    y = 1.5 * x + 0.3 * noise(50, 1, seed=1)
    net = nn.Linear(1, 1, bias=False).double()
    likelihood = recipe.Logistic(SCALE)
    method = bayou.Laplace("full", start=bayou.MAP(steps=300, lr=0.05))
    posterior = bayou.fit(net, (x, y), method=method, likelihood=likelihood, progress=False)

    def loss(w):
        return 0.5 * w**2 - scipy.stats.logistic.logpdf(y.numpy(), w * x.numpy(), SCALE).sum()

    assert float(posterior.mean()["weight"]) == pytest.approx(
        scipy.optimize.minimize_scalar(loss).x, abs=1e-3
    )
    precision = float(x.square().sum()) / (3 * SCALE**2) + 1
    assert float(posterior.covariance.log_det) == pytest.approx(-math.log(precision), abs=0.05)
    h = sum(s.square() for s in information(likelihood.bind(), x, y, seed=0).columns())
    assert h.mean() == pytest.approx(1 / (3 * SCALE**2), rel=5 * math.sqrt(2 / DRAWS / len(x)))
    posterior.save(tmp_path / "file.bayou")
    again = bayou.load(tmp_path / "file.bayou", net)
    assert torch.equal(again.predict(x, seed=0).outputs, posterior.predict(x, seed=0).outputs)


def test_a_new_prior_is_scipys_and_is_fitted():
    bound = recipe.LogisticPrior(0.7).bind((3, 2), dtype=F64)
    w = noise(4, 3, 2)
    expected = scipy.stats.logistic(0, 0.7).logpdf(w.numpy()).sum((1, 2))
    assert_allclose(bound.log_prob(w).numpy(), expected, rtol=1e-12)
    draws = bound.sample(5000, seed=0)
    std = 0.7 * math.pi / math.sqrt(3)
    assert ((draws.mean(0)).abs() < 5 * std / math.sqrt(5000)).all()
    x = torch.linspace(-1, 1, 20).unsqueeze(1)
    method = bayou.VI(bayou.MeanField(), steps=5)
    options = {"likelihood": recipe.Logistic(), "prior": recipe.LogisticPrior()}
    posterior = bayou.fit(nn.Linear(1, 1), (x, x), method=method, **options, progress=False)
    assert posterior.predict(x, 3, seed=0).mean.isfinite().all()


# --- more formulas, other supports --------------------------------------------------------------


class Gumbel(BoundLikelihood):
    """P(Y ≤ y) = exp(−exp(−(y − f))): skewed, and with a cdf."""

    def pointwise(self, f, y):
        return f - y - torch.exp(f - y)

    def sample(self, f, n=None, seed=None):
        return f - torch.log(
            -torch.log(self.draw_noise(rng.uniform, f, n, seed).clamp(1e-12, 1 - 1e-12))
        )

    def cdf(self, f, y):
        return torch.exp(-torch.exp(f - y))


@pytest.mark.parametrize("q", [1e-6, 0.05, 0.5, 0.9, 1 - 1e-6])
@pytest.mark.parametrize("samples", [1, 6])
def test_with_a_cdf_quantiles_are_solved_for(q, samples):
    found = Predictive(Gumbel(), OUTPUTS[:samples]).quantile(q)
    for row in range(5):
        law = scipy.stats.gumbel_r(OUTPUTS[:samples, row, 0].numpy())
        root = scipy.optimize.brentq(lambda y, law=law: law.cdf(y).mean() - q, -60, 60, xtol=1e-13)
        assert found[row].item() == pytest.approx(root, rel=1e-8, abs=1e-9)


class BoundBinomial(FiniteLikelihood):
    """Successes in n trials, logit f: counts with an end."""

    support = "counts"

    def __init__(self, n):
        super().__init__()
        self.n = n

    def log_pmf(self, f):
        k = torch.arange(self.n + 1, dtype=f.dtype, device=f.device)
        ways = math.lgamma(self.n + 1) - torch.lgamma(k + 1) - torch.lgamma(self.n - k + 1)
        success, failure = (nn.functional.logsigmoid(sign * f).unsqueeze(-1) for sign in (1, -1))
        return ways + k * success + (self.n - k) * failure


@dataclass(frozen=True)
class Binomial(Likelihood):
    n: int = 7

    def bind(self, *, dtype=None, device=None):
        return BoundBinomial(self.n)


def test_a_finite_likelihood_is_its_probabilities():
    p, chance = predicted(Binomial()), OUTPUTS.sigmoid().numpy()
    law = scipy.stats.binom(7, chance)
    pmf = law.pmf(np.arange(8)).mean(0)  # (B, K)
    assert_allclose(p.means, law.mean())
    assert_allclose(p.aleatoric_std, np.sqrt(law.var().mean(0)))
    assert_allclose(p.probabilities[:, 0], pmf)
    entropy = scipy.special.entr(pmf).sum(-1)
    assert_allclose(p.entropy, entropy)
    assert_allclose(p.mutual_information, entropy - law.entropy().mean(0)[:, 0])
    low, high = p.interval(0.9)
    for found, level in ((low, 0.05), (high, 0.95)):
        assert found.flatten().tolist() == (pmf.cumsum(-1) < level).sum(-1).tolist()
    y = p.sample(1, seed=0)[0]
    assert_allclose(p.log_prob(y), np.log(pmf[np.arange(5), y.flatten()]))
    assert next(iter(metrics.summary(p, y))) == "rmse"
    h = sum(s.square() for s in information(p.likelihood, OUTPUTS[0], y).columns())
    assert_allclose(h, (7 * chance * (1 - chance))[0])
    with pytest.raises(ValueError, match="scale"):
        metrics.nll(p, y, scale=2.0)

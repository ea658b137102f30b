"""Equal scores stay inside a threshold that is one of them, whatever their rounding."""

import pytest
import torch

import bayou
from bayou.likelihoods.predictive import Predictive
from bayou.operations import control_risk
from tests.operations.conformal.simulated import F64, generator


class Constant:
    """Says N(center, std²) for every row."""

    def __init__(self, center, std):
        self.center = center
        self.likelihood = bayou.Gaussian(std).bind(dtype=center.dtype)

    def predict(self, x, samples=None, *, seed=0):
        return Predictive(self.likelihood, self.center.expand(1, len(x), 1))


class RoundedByBatch:
    """Four probabilities, whose last bits depend on the number of rows, as those of a network do.

    The row i of the held-out rows and a new row with the same x differ by a few eps.
    """

    likelihood = bayou.Categorical().bind()

    def predict(self, x, samples=None, *, seed=0):
        table = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.1, 0.6, 0.2, 0.1], [0.2, 0.2, 0.5, 0.1]])
        change = 0.0 if len(x) == 1 else 4e-7
        probabilities = table[x[:, 0].long()]
        probabilities = probabilities + change * torch.tensor([1.0, 1.0, 1.0, -3.0])
        return Predictive(self.likelihood, probabilities.log().unsqueeze(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("score", ["split", "cqr"])
def test_every_y_with_the_score_of_the_threshold_is_inside(score, dtype):
    for seed in range(100):
        g = generator(seed)
        y = 0.1 * torch.randint(0, 11, (99, 1), generator=g).to(dtype)
        center = torch.rand(1, generator=g, dtype=dtype) + 0.1
        posterior = Constant(center, 0.07 * float(torch.rand(1, generator=g)) + 0.01)
        x = torch.zeros(99, 1, dtype=dtype)
        c = bayou.conformal(posterior, (x, y), score=score)
        lower, upper = c.interval(x)
        is_scored = c.score.of(posterior.predict(x), y, 0) <= c.thresholds[0]
        is_inside = (lower <= y) & (y <= upper)
        assert bool(is_inside[is_scored].all()), seed


def test_ends_are_rounded_by_a_few_eps_only():
    y = torch.linspace(-1, 1, 99, dtype=F64).unsqueeze(1)
    c = bayou.conformal(Constant(torch.zeros(1, dtype=F64), 1.0), (y, y), score="split")
    lower, upper = c.interval(y[:1])
    assert float(upper) == pytest.approx(float(c.thresholds), rel=1e-14)
    assert float(lower) == pytest.approx(-float(c.thresholds), rel=1e-14)


@pytest.mark.parametrize("options", [{}, {"weights": lambda x: torch.ones(len(x))}])
def test_sets_of_one_row_at_a_time_have_the_coverage_of_all_at_once(options):
    g = generator(1)
    x = torch.randint(0, 3, (900, 1), generator=g).float()
    y = (x[:, 0].long() + (torch.rand(900, generator=g) < 0.3).long()) % 3
    c = bayou.conformal(RoundedByBatch(), (x[:300], y[:300]), level=0.9, **options)
    one_by_one = torch.cat([c.set(row) for row in x[300:].split(1)])
    assert torch.equal(one_by_one, c.set(x[300:]))
    covered = one_by_one.gather(-1, y[300:].unsqueeze(-1)).double().mean()
    assert float(covered) > 0.9 - 4 * (0.09 / 300 + 0.09 / 600) ** 0.5


@pytest.mark.parametrize("loss", ["miscoverage", "size"])
def test_controlled_sets_of_one_row_at_a_time_are_those_of_all_at_once(loss):
    g = generator(2)
    x = torch.randint(0, 3, (600, 1), generator=g).float()
    y = (x[:, 0].long() + (torch.rand(600, generator=g) < 0.3).long()) % 3
    control = control_risk(
        RoundedByBatch(), (x[:300], y[:300]), loss, 1.2 if loss == "size" else 0.1
    )
    one_by_one = torch.cat([control.predict(row) for row in x[300:].split(1)])
    assert torch.equal(one_by_one, control.predict(x[300:]))


@pytest.mark.parametrize("scale", [1e-320, 1e-200, 1e200, 1e308])
def test_only_ratios_of_weights_count(scale):
    g = generator(3)
    y = torch.randn(200, 1, generator=g, dtype=F64)
    weights = torch.rand(200, generator=g, dtype=F64).add(0.5).mul(64).round() / 64
    posterior = Constant(torch.zeros(1, dtype=F64), 1.0)
    expected = bayou.conformal(posterior, (y, y), weights=weights)
    scaled = bayou.conformal(posterior, (y, y), weights=weights * scale)
    assert scaled.effective_rows == pytest.approx(expected.effective_rows, rel=1e-2)
    ends = expected.interval(y[:1], weights=weights[:1])
    for end, expected_end in zip(
        scaled.interval(y[:1], weights=weights[:1] * scale), ends, strict=True
    ):
        assert end.isfinite().all()
        assert float((end - expected_end).abs()) < 0.02


def test_levels_and_groups_that_are_no_numbers_and_no_labels():
    y = torch.linspace(-1, 1, 99, dtype=F64).unsqueeze(1)
    posterior = Constant(torch.zeros(1, dtype=F64), 1.0)
    with pytest.raises(ValueError, match="strictly between 0 and 1, got 'high'"):
        bayou.conformal(posterior, (y, y), "high")
    with pytest.raises(ValueError, match="a number or a string and not NaN"):
        bayou.conformal(posterior, (y, y), groups=torch.full((99,), torch.nan))

"""Risk control: the smallest threshold by enumeration, and the risk of new rows in simulations."""

import pytest
import torch

import bayou
from bayou.likelihoods.predictive import Predictive
from bayou.operations import control_risk
from tests.operations.conformal.simulated import F64, Forecast, Logits, assert_mean, generator

WEIGHT = torch.randn(3, 6, generator=generator(9), dtype=F64)


class Labels:
    """Probabilities of six labels that are nearer to 1/2 than those of the truth."""

    likelihood = bayou.likelihoods.Bernoulli().bind()

    def predict(self, x, samples=None, *, seed=0):
        return Predictive(self.likelihood, (0.4 * x @ WEIGHT - 0.5).unsqueeze(0))


def draw(rows, g):
    x = torch.randn(rows, 3, generator=g, dtype=F64)
    return x, (torch.rand(rows, 6, generator=g, dtype=F64) < torch.sigmoid(x @ WEIGHT - 1)).double()


def false_negatives(mask, y):
    return ((y > 0) & ~mask).sum(-1) / y.sum(-1).clamp_min(1)


def test_the_threshold_is_the_smallest_with_the_risk():
    held_out = draw(60, generator(0))
    x, y = held_out
    control = control_risk(Labels(), held_out, "false negatives", 0.2)
    probabilities = Labels().predict(x).mean
    limit = 0.2 + 1e-12
    risks = {
        t: float(false_negatives(1 - probabilities <= t, y).mean())
        for t in (1 - probabilities).unique().tolist()
    }
    expected = min(t for t, r in risks.items() if 60 / 61 * r + 1 / 61 <= limit)
    assert control.threshold == expected
    assert control.held_out_risk == pytest.approx(risks[expected])
    by_function = control_risk(Labels(), held_out, lambda mask, y: false_negatives(mask, y), 0.2)
    assert by_function.threshold == expected


def test_miscoverage_of_classes_is_conformal_prediction():
    """LAC at 1 − risk has the same threshold: ⌈(n + 1)(1 − risk)⌉ of n scores."""
    for rows in (19, 40, 99):
        x = torch.randn(rows, 4, generator=generator(rows), dtype=F64)
        y = torch.randint(4, (rows,), generator=generator(rows + 1))
        control = control_risk(Logits(), (x, y), "miscoverage", 0.1)
        c = bayou.conformal(Logits(), (x, y), 0.9)
        assert control.threshold == float(c.thresholds)
        assert torch.equal(control.predict(x), c.set(x))
        assert torch.equal(
            control_risk(Logits(), (x, y), "false negatives", 0.1).predict(x), c.set(x)
        )


@pytest.mark.parametrize(
    ("loss", "risk", "slack"), [("false negatives", 0.1, 0.02), ("miscoverage", 0.2, 0.02)]
)
def test_the_risk_of_new_rows(loss, risk, slack):
    """At most the risk, and at least risk − 2B/(n + 1) for losses without jumps."""
    risks = []
    for seed in range(100):
        g = generator(seed)
        control = control_risk(Labels(), draw(150, g), loss, risk)
        new, y = draw(200, g)
        mask = control.predict(new)
        losses = false_negatives(mask, y)
        risks.append(float((losses if loss == "false negatives" else (losses > 0).double()).mean()))
    assert_mean(risks, risk - slack, risk)


def test_the_expected_size_of_sets():
    sizes = []
    for seed in range(60):
        g = generator(seed)
        control = control_risk(Labels(), draw(200, g), "size", 2.0)
        sizes.append(float(control.predict(draw(200, g)[0]).double().sum(-1).mean()))
    assert sum(sizes) / 60 <= 2.0
    assert sum(sizes) / 60 > 2.0 - 2 * 6 / 201 - 0.02


def test_a_loss_and_a_family_of_the_user():
    """Intervals ±λ for y ~ N(0, 1): how far y is outside, at most 3."""

    def outside(interval, y):
        low, high = interval
        return torch.maximum(low - y, y - high).clamp(0.0, 3.0)[:, 0]

    def intervals(p, width):
        return p.mean - width * p.std, p.mean + width * p.std

    losses = []
    for seed in range(60):
        y = torch.randn(500, 1, generator=generator(seed), dtype=F64)
        control = control_risk(
            Forecast(),
            (y[:200], y[:200]),
            outside,
            0.1,
            bound=3.0,
            family=intervals,
            thresholds=torch.linspace(0, 5, 501),
        )
        losses.append(float(outside(control.predict(y[200:]), y[200:]).mean()))
    assert_mean(losses, 0.1 - 2 * 3 / 201 - 0.01, 0.1)


def test_invalid_arguments_raise():
    held_out = draw(50, generator(0))
    x, y = held_out
    grid = torch.linspace(0, 1, 11)

    def above(p, threshold):
        return p.mean > threshold

    for call, message in {
        lambda: control_risk(Labels(), (x[:5], y[:5]), "false negatives"): "needs at least 9",
        lambda: control_risk(Labels(), held_out, "recall"): "false negatives, miscoverage, size",
        lambda: control_risk(Labels(), held_out, "size", 0.0): "risk must be a positive number",
        lambda: control_risk(Labels(), held_out, "size", 0.01): "needs at least 599",
        lambda: control_risk(
            Forecast(), (x, x[:, :1]), "miscoverage"
        ): "predicts numbers; give family",
        lambda: control_risk(
            Labels(), held_out, lambda mask, y: mask.double().mean(-1)
        ): "increases by .* with the threshold",
        lambda: control_risk(
            Labels(), held_out, false_negatives, family=above, thresholds=grid
        ): "increases by",
        lambda: control_risk(
            Labels(), held_out, lambda mask, y: 9.0 - mask.sum(-1)
        ): "at most bound=1, got 9",
        lambda: control_risk(
            Labels(), held_out, lambda mask, y: y.mean()
        ): "one number for each of 50",
        lambda: control_risk(Labels(), held_out, false_negatives, thresholds=grid): "give both",
        lambda: control_risk(
            Labels(), held_out, "size", family=above, thresholds=grid
        ): "losses by name are of sets",
        lambda: control_risk(
            Labels(),
            held_out,
            lambda mask, y: torch.full((50,), 0.5),
            family=above,
            thresholds=grid,
        ): "the largest threshold 1 has the risk 0.5",
        lambda: control_risk(
            Labels(), held_out, "miscoverage", bound=-1.0
        ): "bound must be a positive",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()

"""Costs of decisions on test rows: the curves of a report by hand."""

from dataclasses import replace

import pytest
import scipy.stats
import torch

import bayou
from bayou.app.report.decision_curves import decision_curves, describe_costs
from bayou.app.report.results import Results
from bayou.app.report.sections import decisions
from bayou.data import load
from bayou.likelihoods.predictive import Predictive

F64 = torch.float64


@pytest.fixture(scope="module")
def classes():
    """Return two classes, of which the first is rare."""
    data = load("moons")
    y = torch.arange(len(data.train[1])) % 4 > 0
    return replace(data, train=(data.train[0], y.long()))


def two_classes(p_rare):
    p = torch.tensor(p_rare, dtype=F64)
    return Predictive(bayou.Categorical().bind(), torch.stack((p, 1 - p), -1).log().unsqueeze(0))


def test_costs_of_flags_are_those_by_hand(classes):
    p_rare = [0.02, 0.08, 0.2, 0.6, 0.95, 0.04]
    y = torch.tensor([1, 1, 0, 1, 0, 0])
    curves = decision_curves(two_classes(p_rare), y, classes)
    assert curves["positive"] == classes.class_names[0]
    for k, ratio in enumerate(curves["ratio"]):
        flagged = [p * ratio > 1 - p for p in p_rare]
        expected = sum(min(p * ratio, 1 - p) for p in p_rare) / 6
        cost = sum(
            ratio * (label == 0 and not flag) + (label == 1 and flag)
            for label, flag in zip(y.tolist(), flagged, strict=True)
        )
        missed = sum(
            label == 0 and not flag for label, flag in zip(y.tolist(), flagged, strict=True)
        )
        assert curves["expected"][k] == pytest.approx(expected)
        assert curves["realized"][k] == pytest.approx(cost / 6)
        assert curves["flagged"][k] == pytest.approx(sum(flagged) / 6)
        assert curves["missed"][k] == pytest.approx(missed / 3)
        assert (curves["none"][k], curves["all"][k]) == pytest.approx((ratio / 2, 1 / 2))
    sentence = describe_costs("MAP", curves)
    assert "would flag 50.0 % of the rows and miss 33.3 % of those" in sentence


def test_costs_of_plans_are_those_of_the_newsvendor():
    """Of a correct normal prediction, the mean cost is (1 + r)·σ·φ(z) up to chance."""
    data = load("two-bumps")
    generator = torch.Generator().manual_seed(0)
    mean = torch.randn(900, 1, generator=generator, dtype=F64)
    y = mean + 0.3 * torch.randn(900, 1, generator=generator, dtype=F64)
    data = replace(data, train=(data.train[0], y))
    predictive = Predictive(bayou.Gaussian(0.3).bind(dtype=F64), mean.unsqueeze(0))
    curves = decision_curves(predictive, y, data)
    for k, ratio in enumerate(curves["ratio"]):
        z = scipy.stats.norm.ppf(ratio / (1 + ratio))
        cost = data.y_scale * (1 + ratio) * 0.3 * scipy.stats.norm.pdf(z)
        assert curves["expected"][k] == pytest.approx(cost, rel=0.03)
        assert curves["realized"][k] == pytest.approx(cost, rel=0.3)
        assert curves["realized"][k] < curves["constant"][k]
        residual = data.y_scale * (y - mean)
        by_mean = (ratio * residual.clamp_min(0) + (-residual).clamp_min(0)).mean()
        assert curves["mean"][k] == pytest.approx(float(by_mean))
    assert "the 90 % quantile costs" in describe_costs("MAP", curves)


def test_other_targets_have_no_such_section(classes):
    three = Predictive(bayou.Categorical().bind(), torch.zeros(2, 4, 3))
    assert decision_curves(three, torch.zeros(4).long(), load("digits")) is None
    censored = bayou.likelihoods.Censored(bayou.likelihoods.Weibull(2.0)).bind()
    y = torch.ones(4, 2)
    assert decision_curves(Predictive(censored, torch.zeros(2, 4, 1)), y, load("cubic")) is None
    result = {"label": "MAP", "seed": 0, "split": 0, "metrics": {"error": 0.1}, "checks": []}
    assert decisions(Results([result | {"task": "classification", "seconds": 1.0}], {}, {})) is None


def test_the_section_compares_with_decisions_that_ignore_x(classes):
    p_rare = [0.02, 0.08, 0.2, 0.6, 0.95, 0.04]
    y = torch.tensor([1, 1, 0, 1, 0, 0])
    curves = decision_curves(two_classes(p_rare), y, classes)
    result = {"label": "MAP", "method": "map", "seed": 0, "split": 0, "metrics": {"error": 0.1}}
    result |= {"task": "classification", "decisions": curves, "seconds": 1.0, "checks": []}
    section = decisions(Results([result], {}, {}))
    (figure,) = section.figures
    assert figure.title == "Costs on the test rows"
    assert section.about == {"task": "classes"}
    assert section.notes == [describe_costs("MAP", curves)]

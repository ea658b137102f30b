"""Weights of labels by a confusion matrix, and thresholds by class: coverage where labels shift."""

import pytest
import torch
from torch.testing import assert_close

import bayou
from bayou.operations import label_ratio
from bayou.operations.conformal import EffectiveRowsWarning
from tests.operations.conformal.simulated import (
    F64,
    Forecast,
    Logits,
    assert_mean,
    contained,
    generator,
)

BEFORE = torch.tensor([0.7, 0.2, 0.1], dtype=F64)
AFTER = torch.tensor([0.1, 0.3, 0.6], dtype=F64)
CENTERS = 1.5 * torch.eye(3, dtype=F64)


def draw(rows, frequencies, g):
    """Logits are those of Bayes' rule before the shift."""
    y = torch.multinomial(frequencies, rows, replacement=True, generator=g)
    x = CENTERS[y] + torch.randn(rows, 3, generator=g, dtype=F64)
    return 1.5 * x + BEFORE.log(), y


def test_weights_solve_the_confusion_equations():
    """Of ten rows: predictions 0 0 0 1 | 1 1 1 0 | 1 0 for the labels 0 ×4, 1 ×4, 0, 1."""
    y = torch.tensor([0, 0, 0, 0, 1, 1, 1, 1, 0, 1])
    predicted = torch.tensor([0, 0, 0, 1, 1, 1, 1, 0, 0, 1])
    logits = 9 * torch.nn.functional.one_hot(predicted, 2).double()
    # C = [[.4, .1], [.1, .4]]; 3 of 4 new rows are predicted as 0: w = C⁻¹·(3/4, 1/4).
    new = logits[[0, 1, 2, 3]]
    assert_close(label_ratio(Logits(), (logits, y), new), torch.tensor([11 / 6, 1 / 6], dtype=F64))
    all_ones = logits[[3, 4, 5]]  # w = C⁻¹·(0, 1) = (−2/3, 8/3)
    expected = torch.tensor([0.0, 8 / 3], dtype=F64)
    assert_close(label_ratio(Logits(), (logits, y), all_ones), expected)
    hard = label_ratio(Logits(), (logits, y), new)
    assert_close(label_ratio(Logits(), (9 * logits, y), 9 * new, soft=True), hard)


@pytest.mark.parametrize("soft", [False, True])
def test_estimated_weights_are_near_the_true_ones(soft):
    held_out, (new, _) = draw(20_000, BEFORE, generator(0)), draw(20_000, AFTER, generator(1))
    weights = label_ratio(Logits(), held_out, new, soft=soft)
    assert_close(weights, AFTER / BEFORE, rtol=0.1, atol=0.03)


def test_coverage_under_a_label_shift():
    options = {
        "plain": lambda held_out, new: {},
        "known": lambda held_out, new: {"label_weights": AFTER / BEFORE},
        "estimated": lambda held_out, new: {"shift": "label", "unlabeled": new},
        "by class": lambda held_out, new: {"by_class": True},
    }
    coverage = {name: [] for name in options}
    by_class = [[], [], []]
    for seed in range(80):
        g = generator(seed)
        held_out, (unlabeled, _) = draw(600, BEFORE, g), draw(400, AFTER, g)
        new, y = draw(400, AFTER, g)
        for name, arguments in options.items():
            c = bayou.conformal(Logits(), held_out, 0.9, **arguments(held_out, unlabeled))
            mask = c.set(new)
            coverage[name].append(contained(mask, y))
        for k in range(3):
            by_class[k].append(contained(mask[y == k], y[y == k]))
    assert sum(coverage["plain"]) / 80 < 0.75
    assert_mean(coverage["known"], 0.9, 0.92)
    assert_mean(coverage["estimated"], 0.88, 0.92)  # weights with errors: no guarantee
    assert_mean(coverage["by class"], 0.9, 0.92)
    for values in by_class:  # each class has 60 rows or more
        assert_mean(values, 0.9, 0.9 + 1 / 50)


def test_equal_weights_of_labels_are_the_plain_method():
    held_out, (new, _) = draw(200, BEFORE, generator(0)), draw(50, BEFORE, generator(1))
    plain = bayou.conformal(Logits(), held_out)
    weighted = bayou.conformal(Logits(), held_out, label_weights=torch.full((3,), 2.0))
    assert torch.equal(weighted.thresholds, plain.thresholds.expand(3))
    assert torch.equal(weighted.set(new), plain.set(new))


def test_thresholds_by_class_of_several_coordinates():
    """Two coordinates of y with three classes each: the thresholds of each are its own."""
    x = torch.randn(200, 2, 3, generator=generator(0), dtype=F64)
    y = torch.randint(3, (200, 2), generator=generator(1))
    c = bayou.conformal(Logits(), (x, y), 0.8, by_class=True)
    assert c.thresholds.shape == (3, 2)
    for j in range(2):
        alone = bayou.conformal(Logits(), (x[:, j], y[:, j]), 0.8, by_class=True)
        assert torch.equal(alone.thresholds, c.thresholds[:, j])
        assert torch.equal(alone.set(x[:, j]), c.set(x)[:, j])


def test_what_cannot_be_estimated_is_an_error():
    held_out, (new, _) = draw(300, BEFORE, generator(0)), draw(300, AFTER, generator(1))
    x, labels = held_out
    useless = torch.randn(300, 3, generator=generator(2), dtype=F64)
    constant = torch.zeros(300, 3, dtype=F64) + torch.tensor([1.0, 0.0, 0.0], dtype=F64)
    few = (torch.cat([x, x[:5]]), torch.cat([labels.clamp_max(1), torch.full((5,), 2)]))
    for call, message in {
        lambda: label_ratio(Logits(), (useless, labels), new): "cannot be told from a singular",
        lambda: label_ratio(Logits(), (constant, labels), new): "confusion matrix .* is singular",
        lambda: label_ratio(
            Logits(), (x, labels.clamp_max(1)), new
        ): "No held-out row has the class 2",
        lambda: label_ratio(
            Logits(), held_out, new[:0]
        ): "unlabeled has no rows|at least one row|no rows",
        lambda: label_ratio(Forecast(), (x, x[:, :1]), new): "posterior predicts numbers",
        lambda: bayou.conformal(Forecast(), (x, x[:, :1]), by_class=True): "y are numbers",
        lambda: bayou.conformal(Logits(), few, by_class=True): "5 held-out rows of the class 2",
        lambda: bayou.conformal(
            Logits(), held_out, label_weights=torch.ones(2)
        ): r"\(3,\), got \(2,\)",
        lambda: bayou.conformal(
            Logits(), held_out, by_class=True, groups=labels
        ): "leave out groups, weights and shift",
        lambda: bayou.conformal(
            Logits(), held_out, label_weights=torch.ones(3), groups=labels
        ): "cannot be combined with groups",
    }.items():
        with pytest.raises(ValueError, match=message):
            call()
    rare = torch.tensor([0.0, 0.0, 50.0])
    with pytest.warns(EffectiveRowsWarning, match="of 300 held-out rows"):
        bayou.conformal(Logits(), held_out, label_weights=rare)

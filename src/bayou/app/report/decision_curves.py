"""What decisions by the predictions cost on the test rows, for several ratios of costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bayou.data import DataSet
from bayou.likelihoods import Newsvendor
from bayou.likelihoods.predictive import Predictive

CLASS_RATIOS = (1.0, 2.0, 3.0, 5.0, 10.0, 20.0, 50.0, 100.0)  # of a miss to a false alarm
NUMBER_RATIOS = (1.0, 2.0, 4.0, 9.0, 19.0, 99.0)  # of a unit short to a unit left over
EXAMPLE_RATIOS = {"classes": 10.0, "numbers": 9.0}  # of which the report has a sentence
MAX_ROWS = 1000  # test rows of a regression, evenly spaced
EXPECTATION_DRAWS = 1000  # of y, for the expected cost of a regression


def decision_curves(predictive: Predictive, y: Tensor, data: DataSet) -> dict[str, Any] | None:
    """Return expected and realized costs for every ratio; JSON-able.

    Of two classes, a miss of the rarer one costs r and a false alarm 1: rows are flagged where this
    class has a probability above 1/(1 + r). Of a number, a unit by which y exceeds the plan costs r
    and a unit below it 1: the plan is the quantile r/(1 + r).

    Args:
        predictive: of the test rows.
        y: their targets.
        data: the names of the classes and the scale of y.

    Returns:
        The ratios, mean costs per row by the model (``expected``) and on the test rows
        (``realized``), and realized costs of decisions without the predictions; None for more than
        two classes, and for a y that is more than one number.
    """
    if data.task == "classification":
        if data.output_size != 2:
            return None
        return _class_curves(predictive, y, data)
    if predictive.mean.shape != y.shape or y.shape[1:] != (1,):  # censored targets, for example
        return None
    return _number_curves(predictive, y, data)


def _class_curves(predictive: Predictive, y: Tensor, data: DataSet) -> dict[str, Any]:
    """Return the costs of flagging rows, of flagging none and of flagging all."""
    train = data.train[1]
    positive = int(2 * int((train == 1).sum()) <= len(train))  # the rarer class
    is_positive = (y == positive).double()
    prevalence = float(is_positive.mean())
    curves: dict[str, list[float]] = {"expected": [], "realized": [], "flagged": [], "missed": []}
    for ratio in CLASS_RATIOS:
        costs = torch.zeros(2, 2, dtype=torch.float64)  # leave, flag; by class
        costs[0, positive] = ratio
        costs[1, 1 - positive] = 1.0
        decision = predictive.decide(-costs)
        is_flagged = (decision.action == 1).double()
        missed = is_positive * (1 - is_flagged)
        cost = ratio * missed + (1 - is_positive) * is_flagged
        curves["expected"].append(-float(decision.expected_utility.double().mean()))
        curves["realized"].append(float(cost.mean()))
        curves["flagged"].append(float(is_flagged.mean()))
        curves["missed"].append(float(missed.sum() / is_positive.sum().clamp_min(1.0)))
    return {
        "task": "classes",
        "positive": data.class_names[positive],
        "ratio": list(CLASS_RATIOS),
        "none": [ratio * prevalence for ratio in CLASS_RATIOS],
        "all": [1 - prevalence] * len(CLASS_RATIOS),
    } | curves


def _number_curves(predictive: Predictive, y: Tensor, data: DataSet) -> dict[str, Any]:
    """Return the costs of plans by quantiles, by the mean, and by one quantile for all rows."""
    rows = torch.linspace(0, len(y) - 1, min(len(y), MAX_ROWS), device=y.device).round().long()
    y = y[rows].double()
    predictive = Predictive(predictive.likelihood, predictive.outputs[:, rows])
    draws = predictive.sample(EXPECTATION_DRAWS, seed=0).double()
    mean = predictive.mean.double()
    train = data.train[1].double().to(y.device)
    curves: dict[str, list[float]] = {"expected": [], "realized": [], "mean": [], "constant": []}
    for ratio in NUMBER_RATIOS:
        utility = Newsvendor(shortage=ratio, surplus=1.0)
        level = ratio / (1 + ratio)
        plan = predictive.quantile(level).double()
        plans = {"realized": plan, "mean": mean, "constant": train.quantile(level)}
        for name, action in plans.items():
            curves[name].append(-data.y_scale * float(utility(action, y).mean()))
        curves["expected"].append(-data.y_scale * float(utility(plan, draws).mean()))
    return {
        "task": "numbers",
        "target": getattr(data.preprocessor, "target", "y"),
        "ratio": list(NUMBER_RATIOS),
    } | curves


def describe_costs(label: str, curves: dict[str, Any]) -> str:
    """Return a sentence about one ratio of costs.

    Args:
        label: of the method.
        curves: as returned by ``decision_curves``.
    """
    ratio = EXAMPLE_RATIOS[curves["task"]]
    at = curves["ratio"].index(ratio)
    realized = curves["realized"][at]
    expected = curves["expected"][at]
    if curves["task"] == "classes":
        positive = curves["positive"]
        return (
            f"{label}: at a cost of 1 for a false alarm and {ratio:g} for a missed “{positive}”, "
            f"it would flag {100 * curves['flagged'][at]:.1f} % of the rows and miss "
            f"{100 * curves['missed'][at]:.1f} % of those that are “{positive}”. That costs "
            f"{realized:.3g} per row (it expected {expected:.3g}); flagging none costs "
            f"{curves['none'][at]:.3g}, and flagging all {curves['all'][at]:.3g}."
        )
    return (
        f"{label}: if a unit of {curves['target']} above the plan costs {ratio:g} and a unit below "
        f"it 1, planning with the {100 * ratio / (1 + ratio):g} % quantile costs {realized:.3g} "
        f"per row (it expected {expected:.3g}); planning with the mean costs "
        f"{curves['mean'][at]:.3g}, and with one quantile for all rows "
        f"{curves['constant'][at]:.3g}."
    )

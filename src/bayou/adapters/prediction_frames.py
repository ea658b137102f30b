"""Predictions as data frames of pandas: one row for each input, named columns."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from bayou.core.extras import extra
from bayou.likelihoods import FiniteLikelihood
from bayou.likelihoods.predictive import Predictive, check_level

if TYPE_CHECKING:
    import pandas as pd

Columns = dict[str, np.ndarray]


def prediction_frame(
    predictives: Iterable[Predictive],
    level: float = 0.9,
    *,
    classes: Sequence[Any] | None = None,
    index: Any = None,
) -> pd.DataFrame:
    """Return predictions as a data frame of pandas.

    The columns of numbers are "mean", "std", "epistemic_std", "lower" and "upper", the ends of the
    central interval; with D > 1 targets "mean[0]", "mean[1]", ... The columns of classes are
    "class", "probability" of this class, its "epistemic_std", "lower" and "upper" over the
    functions of the posterior, "entropy" and "mutual_information" in nats, and "p[LABEL]" for each
    class.

    Args:
        predictives: batches of rows, at least one.
        level: the probability of the interval. Default: 0.9.
        classes: the labels of the classes in the order of the likelihood; None (the default) for
            0, 1, ...
        index: of the rows; None (the default) for 0, 1, ...

    Returns:
        A frame with one row for each row of the inputs.

    Raises:
        ImportError: if pandas is not installed.
        ValueError: for a prediction that has several classes for each row, such as a sequence.
    """
    check_level(level)
    with extra("pandas", "A frame of predictions"):
        import pandas as pd
    batches = [_columns(predictive, level, classes) for predictive in predictives]
    columns = {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
    return pd.DataFrame(columns, index=index)


def _columns(p: Predictive, level: float, classes: Sequence[Any] | None) -> Columns:
    """Return the columns of one batch."""
    if isinstance(p.likelihood, FiniteLikelihood):
        return _class_columns(p, p.likelihood, level, classes)
    return _number_columns(p, level)


def _number_columns(p: Predictive, level: float) -> Columns:
    """Return moments and the interval of every target."""
    lower, upper = p.interval(level)
    values = {
        "mean": p.mean,
        "std": p.std,
        "epistemic_std": p.epistemic_std,
        "lower": lower,
        "upper": upper,
    }
    columns: Columns = {}
    for name, value in values.items():
        targets = _to_numpy(value.reshape(len(value), -1))
        if targets.shape[1] == 1:
            columns[name] = targets[:, 0]
            continue
        for number in range(targets.shape[1]):
            columns[f"{name}[{number}]"] = targets[:, number]
    return columns


@torch.no_grad()
def _class_columns(
    p: Predictive, likelihood: FiniteLikelihood, level: float, classes: Sequence[Any] | None
) -> Columns:
    """Return the most probable class, its probability over the functions, and all probabilities."""
    probabilities = p.probabilities
    rows = len(probabilities)
    count = probabilities.shape[-1]
    if probabilities.numel() != rows * count:
        raise ValueError(
            f"predictions have shape {tuple(probabilities.shape)}, several classes for each row; "
            "a frame needs one: use posterior.predict(x)"
        )
    labels = list(range(count)) if classes is None else list(classes)
    if len(labels) != count:
        raise ValueError(f"classes has {len(labels)} labels, and predictions have {count} classes")
    probabilities = probabilities.reshape(rows, count)
    code = probabilities.argmax(-1)
    draws = likelihood.log_pmf(p.outputs).exp().reshape(-1, rows, count)
    of_class = draws.gather(-1, code.expand(len(draws), rows).unsqueeze(-1)).squeeze(-1)
    levels = torch.tensor([0.5 - level / 2, 0.5 + level / 2], dtype=of_class.dtype)
    lower, upper = of_class.quantile(levels.to(of_class.device), dim=0)
    values = {
        "probability": probabilities.gather(-1, code.unsqueeze(-1)).squeeze(-1),
        "epistemic_std": of_class.std(0, correction=0),
        "lower": lower,
        "upper": upper,
        "entropy": p.entropy,
        "mutual_information": p.mutual_information,
    }
    columns: Columns = {"class": np.asarray(labels)[code.cpu().numpy()]}
    columns |= {name: _to_numpy(value) for name, value in values.items()}
    for number, label in enumerate(labels):
        columns[f"p[{label}]"] = _to_numpy(probabilities[:, number])
    return columns


def _to_numpy(value: Tensor) -> np.ndarray:
    """Return a tensor as an array of float64."""
    array: np.ndarray = value.detach().double().cpu().numpy()
    return array

"""The evaluation of a posterior on a data set as plain values, from which reports are made."""

from __future__ import annotations

import base64
import io
import math
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bayou import diagnostics, metrics
from bayou.app.report.bootstrap import LEVEL, row_errors
from bayou.app.report.decision_curves import decision_curves
from bayou.core.extras import extra
from bayou.data import DataSet
from bayou.diagnostics.baselines import Baseline
from bayou.likelihoods.predictive import Predictive
from bayou.posteriors import Posterior

BATCH_ROWS = 2048  # predicted at a time
HISTOGRAM_BINS = 24
MAX_PIT_BINS = 20
MIN_BIN_LEVELS = 5  # expected in each of them
DEGREES = tuple(range(0, 181, 5))
STRIP_PICTURES = 10
LEVELS = tuple(round(0.05 + 0.1 * k, 2) for k in range(10))
MAX_CURVE_POINTS = 400  # training rows drawn in a picture of a curve
MAX_TEST_POINTS = 60  # test rows drawn with their bands
Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)  # 1.64 standard deviations of a Gaussian


def judge(
    posterior: Posterior,
    data: DataSet,
    *,
    samples: int = 100,
    seed: int = 0,
    baselines: dict[str, Baseline] | None = None,
) -> dict[str, Any]:
    """Evaluate a posterior on the test part of a data set; JSON-able.

    Args:
        posterior: of a network for this data set.
        data: the data set.
        samples: functions averaged for a prediction, or all draws, if there are fewer; a posterior
            with a closed form is evaluated by it.
        seed: of the predictions.
        baselines: fitted to the training rows, for the checks.

    Returns:
        The number of samples (None for a closed form), the scores (``metrics``), the checks, the
        scores of rows, and the curves of the report by name.
    """
    options = prediction_options(posterior, samples, seed)
    predictive, ood_predictive, scores = score(
        posterior, data.test, data.ood, data.y_scale, options
    )
    y = data.test[1].to(predictive.outputs.device)
    checks = diagnostics.check(
        posterior,
        data.train,
        data.test,
        seed=seed,
        batch_size=BATCH_ROWS,
        scale=data.y_scale,
        against=baselines,
        predictive=predictive,
    )
    evaluation: dict[str, Any] = {
        "samples": options["samples"],
        "metrics": scores,
        "checks": checks.to_json(),
    }
    evaluation |= row_errors(predictive, y, data.y_scale)
    mixing = getattr(posterior, "mixing", None)
    if mixing:
        evaluation["mixing"] = mixing
    if data.task == "classification":
        scores["error"] = 1 - scores["accuracy"]
        evaluation |= _class_curves(predictive, ood_predictive, y, data)
        if len(data.input_shape) == 3 and "3" in data.class_names:
            evaluation["rotation"] = rotation_curve(posterior, data, "3", options)
    else:
        evaluation |= _number_curves(posterior, predictive, y, data, options)
        if ood_predictive is not None:
            evaluation["entropy"] = _std_histograms(predictive, ood_predictive, data.y_scale)
    evaluation["error_rejection"] = _error_rejection(predictive, y, data)
    costs = decision_curves(predictive, y, data)
    if costs is not None:
        evaluation["decisions"] = costs
    return evaluation


def judge_baselines(baselines: dict[str, Baseline], data: DataSet) -> dict[str, Any]:
    """Score baselines on the test rows; JSON-able.

    Args:
        baselines: by name.
        data: the rows.
    """
    evaluations = {}
    for name, baseline in baselines.items():
        predictive = baseline(data.test[0])
        ood_predictive = None if data.ood is None else baseline(data.ood)
        scores = metrics.summary(predictive, data.test[1], ood_predictive, scale=data.y_scale)
        if data.task == "classification":
            scores["error"] = 1 - scores["accuracy"]
        errors = row_errors(predictive, data.test[1], data.y_scale)
        evaluations[name] = {"metrics": scores} | errors
    return evaluations


def prediction_options(posterior: Posterior, samples: int, seed: int) -> dict[str, Any]:
    """Return the arguments of ``predict``.

    Args:
        posterior: has all its draws averaged if there are fewer than ``samples``, and its closed
            form computed if there is one.
        samples: functions averaged for a prediction.
        seed: of the predictions.
    """
    count = posterior.draws_to_average(samples)
    return {"samples": count, "seed": seed, "batch_size": BATCH_ROWS}


def score(
    posterior: Posterior,
    test: tuple[Tensor, Tensor],
    ood: Tensor | None,
    scale: float,
    options: dict[str, Any],
) -> tuple[Predictive, Predictive | None, dict[str, float]]:
    """Predict test rows and out-of-distribution inputs, and score the predictions.

    Args:
        posterior: makes the predictions.
        test: inputs and targets.
        ood: out-of-distribution inputs, if any.
        scale: of y, in original units for one standardized unit.
        options: as returned by ``prediction_options``.

    Returns:
        Predictions of the test rows, those of the out-of-distribution inputs, and the scores.
    """
    predictive = posterior.predict(test[0], **options)
    ood_predictive = None if ood is None else posterior.predict(ood, **options)
    y = test[1].to(predictive.outputs.device)
    return predictive, ood_predictive, metrics.summary(predictive, y, ood_predictive, scale=scale)


def _number_curves(
    posterior: Posterior,
    predictive: Predictive,
    y: Tensor,
    data: DataSet,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return the reliability, the levels of y and the bands of a regression."""
    curves: dict[str, Any] = {
        "reliability": _interval_reliability(predictive, y),
        "pit": _level_histogram(predictive, y),
    }
    if data.input_shape == (1,):
        curves["curve"] = curve_bands(posterior, data, options)
    else:
        curves["observed"] = observed_bands(predictive, y, data)
    return curves


def _class_curves(
    predictive: Predictive,
    ood_predictive: Predictive | None,
    y: Tensor,
    data: DataSet,
) -> dict[str, Any]:
    """Return the histograms of the entropy and the reliability diagram of a classification."""
    ood_entropy = None if ood_predictive is None else ood_predictive.entropy
    bins = metrics.reliability(predictive, y)
    return {
        "entropy": _histograms(predictive.entropy, ood_entropy, math.log(data.output_size)),
        "reliability": {
            "confidence": _to_list(bins.confidence.nan_to_num()),
            "accuracy": _to_list(bins.accuracy.nan_to_num()),
            "count": _to_list(bins.count),
        },
    }


def _interval_reliability(predictive: Predictive, y: Tensor) -> dict[str, Any]:
    """Return the coverage of central intervals of several probabilities."""
    return {
        "confidence": list(LEVELS),
        "accuracy": [metrics.coverage(predictive, y, level) for level in LEVELS],
        "count": [len(y)] * len(LEVELS),
    }


def _level_histogram(predictive: Predictive, y: Tensor) -> dict[str, Any]:
    """Return the density of the levels F(y) in bins, and the p-value of their uniformity."""
    bins = max(2, min(MAX_PIT_BINS, len(y) // MIN_BIN_LEVELS))
    histogram = metrics.pit_histogram(predictive, y, bins)
    return {
        "edges": _to_list(histogram.edges),
        "density": _to_list(histogram.density),
        "p_value": histogram.p_value,
    }


def _std_histograms(
    predictive: Predictive,
    ood_predictive: Predictive,
    scale: float,
) -> dict[str, Any]:
    """Return histograms of the standard deviation inside and outside the distribution."""
    std = scale * predictive.std[:, 0]
    ood_std = scale * ood_predictive.std[:, 0]
    finite = torch.cat([std, ood_std]).double().nan_to_num(posinf=0.0)
    top = float(finite.quantile(0.98)) or 1.0
    return _histograms(std, ood_std, top) | {"label": "standard deviation, units of y"}


def _to_list(x: Tensor) -> list[float]:
    """Return numbers to six digits."""
    return [float(f"{value:.6g}") for value in x.detach().double().flatten().tolist()]


def _histograms(test: Tensor, ood: Tensor | None, top: float) -> dict[str, Any]:
    """Return shares of uncertainties in bins from 0 to ``top``.

    The last bin includes all larger values.
    """
    edges = torch.linspace(0, top, HISTOGRAM_BINS + 1, dtype=torch.float64)

    def shares(values: Tensor) -> list[float]:
        values = values.detach().double().cpu().nan_to_num(nan=top, posinf=top)
        values = values.clamp(0, float(edges[-1]))
        return _to_list(torch.histogram(values, edges).hist / len(values))

    histograms = {"edges": _to_list(edges), "in": shares(test)}
    if ood is not None:
        histograms["ood"] = shares(ood)
    return histograms


def _error_rejection(predictive: Predictive, y: Tensor, data: DataSet) -> dict[str, Any]:
    """Return the error of the predictions that are kept, on a grid of rejected shares.

    For regression it is the RMSE in original units.
    """
    curve = metrics.error_rejection(predictive, y)
    rejected = [share / 100 for share in range(0, 96, 5)]
    error = [curve.at(1 - share) for share in rejected]
    if data.task == "regression":
        error = [data.y_scale * math.sqrt(value) for value in error]
    return {"rejected": rejected, "error": error}


def rotation_curve(
    posterior: Posterior,
    data: DataSet,
    digit: str,
    options: dict[str, Any],
) -> dict[str, Any]:
    """Return class probabilities of one test image rotated from 0° to 180°.

    The figure of Louizos & Welling (2017). The image is that of the digit nearest to their mean
    image, so that the choice does not depend on the method.

    Args:
        posterior: makes the predictions.
        data: images with class names.
        digit: the name of the class.
        options: as returned by ``prediction_options``.
    """
    x, y = data.test
    images = x[y == data.class_names.index(digit)]
    typical = images[(images - images.mean(0)).flatten(1).norm(dim=1).argmin()]
    rotations = torch.stack([turn(typical, degrees) for degrees in DEGREES])
    predictive = posterior.predict(rotations, **options)
    step = (len(DEGREES) - 1) / (STRIP_PICTURES - 1)
    strip = [rotations[round(i * step)] for i in range(STRIP_PICTURES)]
    low = float(typical.min())
    high = float(typical.max())
    return {
        "digit": digit,
        "classes": list(data.class_names),
        "degrees": list(DEGREES),
        "probabilities": [_to_list(row) for row in predictive.mean],
        "entropy": _to_list(predictive.entropy),
        "images": [png(((image - low) / (high - low)).clamp(0, 1)) for image in strip],
    }


def turn(image: Tensor, degrees: float) -> Tensor:
    """Rotate an image counterclockwise about its center, bilinear; new pixels have its minimum.

    Args:
        image: (C, H, W).
        degrees: the angle.
    """
    angle = math.radians(degrees)
    matrix = torch.tensor(
        [
            [math.cos(angle), -math.sin(angle), 0.0],
            [math.sin(angle), math.cos(angle), 0.0],
        ]
    )
    grid = F.affine_grid(matrix.unsqueeze(0).to(image), [1, *image.shape], align_corners=False)
    floor = image.amin()
    out: Tensor = F.grid_sample((image - floor).unsqueeze(0), grid, align_corners=False)[0] + floor
    return out


def png(image: Tensor) -> str:
    """Return a picture as a data URL, 8 bits a channel.

    Args:
        image: (1 or 3, H, W) with values in [0, 1].
    """
    with extra("lab", "A picture of an image"):
        from PIL import Image

    pixels = (image * 255).round().to(torch.uint8).movedim(0, -1).squeeze(-1).cpu().numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def curve_bands(posterior: Posterior, data: DataSet, options: dict[str, Any]) -> dict[str, Any]:
    """Return the mean and its bands over a range half as wide again as the data.

    Args:
        posterior: of a network with one input.
        data: its training rows are the points of the picture.
        options: as returned by ``prediction_options``.
    """
    x, y = data.train
    low = float(x.min())
    high = float(x.max())
    margin = 0.25 * (high - low)
    grid = torch.linspace(low - margin, high + margin, 161, dtype=x.dtype).unsqueeze(1)
    drawn = _evenly_spaced(len(x), MAX_CURVE_POINTS)
    points = (original_inputs(data, x[drawn]), y[drawn, 0])
    names = ((data.feature_names or ("x",))[0], _target_name(data))
    predictive = posterior.predict(grid, **options)
    return _bands(predictive, original_inputs(data, grid), points, len(x), names, data)


def observed_bands(predictive: Predictive, y: Tensor, data: DataSet) -> dict[str, Any]:
    """Return the same bands for some test rows, sorted by their mean: for any number of inputs.

    Args:
        predictive: of all test rows.
        y: their targets.
        data: the scale of y.
    """
    drawn = _evenly_spaced(len(y), MAX_TEST_POINTS).to(y.device)
    order = drawn[predictive.mean[drawn, 0].argsort()]
    drawn_predictive = Predictive(predictive.likelihood, predictive.outputs[:, order])
    position = torch.arange(1.0, len(order) + 1)
    names = ("test rows, sorted by prediction", _target_name(data))
    return _bands(drawn_predictive, position, (position, y[order, 0]), len(y), names, data)


def _evenly_spaced(rows: int, most: int) -> Tensor:
    """Return the indices of at most ``most`` rows."""
    return torch.linspace(0, rows - 1, min(most, rows)).round().long()


def _target_name(data: DataSet) -> str:
    """Return the name of the target column."""
    return getattr(data.preprocessor, "target", "y")


def _bands(
    predictive: Predictive,
    x: Tensor,
    points: tuple[Tensor, Tensor],
    count: int,
    names: tuple[str, str],
    data: DataSet,
) -> dict[str, Any]:
    """Return central intervals of y, and mean ± z·epistemic std.

    Args:
        predictive: of the rows at ``x``.
        x: positions in the picture.
        points: x and y of the data that are drawn.
        count: of the data of which the points are a part.
        names: of the two axes.
        data: the scale of y.
    """
    curves = (predictive.mean, Z * predictive.epistemic_std, *predictive.interval(LEVEL))
    mean, epistemic, low, high = (curve.detach().double().cpu()[:, 0] for curve in curves)

    def to_units(values: Tensor) -> list[float]:
        return _to_list(values.double().cpu() * data.y_scale + data.y_mean)

    return {
        "x": _to_list(x),
        "x_label": names[0],
        "y_label": names[1],
        "mean": to_units(mean),
        "low": to_units(low),
        "high": to_units(high),
        "epistemic_low": to_units(mean - epistemic),
        "epistemic_high": to_units(mean + epistemic),
        "points": {"x": _to_list(points[0]), "y": to_units(points[1]), "of": count},
    }


def original_inputs(data: DataSet, x: Tensor) -> Tensor:
    """Return inputs of one feature in original units.

    Args:
        data: its preprocessor has the scale.
        x: (N, 1), standardized.
    """
    column = getattr(data.preprocessor, "columns", [None])[0]
    mean = getattr(column, "mean", 0.0)
    scale = getattr(column, "scale", 1.0)
    return x.double() * scale + mean

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
from bayou.data import DataSet
from bayou.diagnostics.baselines import Baseline
from bayou.extras import extra
from bayou.posteriors import Posterior
from bayou.predictive import Predictive
from bayou.report.bootstrap import LEVEL, row_errors

BATCH = 2048  # rows predicted at a time
BINS = 24  # of an entropy histogram
DEGREES = tuple(range(0, 181, 5))
SHOWN = 10  # pictures in a strip
LEVELS = tuple(round(0.05 + 0.1 * k, 2) for k in range(10))
POINTS = 400  # data drawn in a picture of a curve
ROWS = 60  # test rows drawn with their bands
Z = NormalDist().inv_cdf(0.5 + LEVEL / 2)  # 1.64 standard deviations of a Gaussian


def judge(
    posterior: Posterior,
    data: DataSet,
    *,
    samples: int = 100,
    seed: int = 0,
    against: dict[str, Baseline] | None = None,
) -> dict[str, Any]:
    """All numbers and curves of one posterior on the test part of a data set; JSON-able.

    Every prediction averages ``samples`` functions (or all draws, if there are fewer). ``against``:
    fitted baselines.
    """
    options = prediction(posterior, samples, seed)
    p, away, scores = score(posterior, data.test, data.ood, data.y_scale, options)
    y = data.test[1].to(p.outputs.device)
    checks = diagnostics.check(
        posterior, data.train, data.test, seed=seed, batch_size=BATCH, scale=data.y_scale, against=against,
        predictive=p,
    )  # fmt: skip
    found: dict[str, Any] = {
        "samples": options["samples"],
        "metrics": scores,
        "checks": checks.to_json(),
    }
    found |= row_errors(p, y, data.y_scale)
    if mixing := getattr(posterior, "mixing", None):
        found["mixing"] = mixing
    if data.task == "classification":
        found["metrics"]["error"] = 1 - found["metrics"]["accuracy"]
        found["entropy"] = _histograms(
            p.entropy, None if away is None else away.entropy, math.log(data.output_size)
        )
        bins = metrics.reliability(p, y)
        found["reliability"] = {
            "confidence": _list(bins.confidence.nan_to_num()),
            "accuracy": _list(bins.accuracy.nan_to_num()),
            "count": _list(bins.count),
        }
        if len(data.input_shape) == 3 and "3" in data.class_names:
            found["rotation"] = rotation(posterior, data, "3", options)
    else:
        shares = [metrics.coverage(p, y, level) for level in LEVELS]
        found["reliability"] = {
            "confidence": list(LEVELS),
            "accuracy": shares,
            "count": [len(y)] * len(LEVELS),
        }
        if data.input_shape == (1,):
            found["curve"] = curve(posterior, data, options)
        else:
            found["observed"] = observed(p, y, data)
        if away is not None:
            inside, outside = (data.y_scale * one.std[:, 0] for one in (p, away))
            top = (
                float(torch.cat([inside, outside]).double().nan_to_num(posinf=0.0).quantile(0.98))
                or 1.0
            )
            found["entropy"] = _histograms(inside, outside, top) | {
                "label": "standard deviation, units of y"
            }
    found["error_rejection"] = _rejection(p, y, data)
    return found


def judge_baselines(fitted: dict[str, Baseline], data: DataSet) -> dict[str, Any]:
    """Scores of the baselines on the test rows; JSON-able."""
    found = {}
    for name, baseline in fitted.items():
        p, away = baseline(data.test[0]), None if data.ood is None else baseline(data.ood)
        scores = metrics.summary(p, data.test[1], away, scale=data.y_scale)
        if data.task == "classification":
            scores["error"] = 1 - scores["accuracy"]
        found[name] = {"metrics": scores} | row_errors(p, data.test[1], data.y_scale)
    return found


def prediction(posterior: Posterior, samples: int, seed: int) -> dict[str, Any]:
    """Options of ``predict``: ``samples`` draws, or all if there are fewer."""
    return {"samples": min(samples, posterior.draws or samples), "seed": seed, "batch_size": BATCH}


def score(
    posterior: Posterior,
    test: tuple[Tensor, Tensor],
    ood: Tensor | None,
    scale: float,
    options: dict[str, Any],
) -> tuple[Predictive, Predictive | None, dict[str, float]]:
    """Predictions for test rows and for out-of-distribution inputs, and their scores."""
    p = posterior.predict(test[0], **options)
    away = None if ood is None else posterior.predict(ood, **options)
    return p, away, metrics.summary(p, test[1].to(p.outputs.device), away, scale=scale)


def _list(x: Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in x.detach().double().flatten().tolist()]


def _histograms(inside: Tensor, outside: Tensor | None, top: float) -> dict[str, Any]:
    """Shares of the uncertainties in bins from 0 to ``top``; the last bin includes all larger
    values.
    """
    edges = torch.linspace(0, top, BINS + 1, dtype=torch.float64)

    def shares(values: Tensor) -> list[float]:
        kept = (
            values.detach()
            .double()
            .cpu()
            .nan_to_num(nan=top, posinf=top)
            .clamp(0, float(edges[-1]))
        )
        return _list(torch.histogram(kept, edges).hist / len(kept))

    return {"edges": _list(edges), "in": shares(inside)} | (
        {} if outside is None else {"ood": shares(outside)}
    )


def _rejection(p: Predictive, y: Tensor, data: DataSet) -> dict[str, Any]:
    """The error of the predictions kept, on a grid of rejected shares; for regression the RMSE in
    original units.
    """
    found = metrics.error_rejection(p, y)
    rejected = [share / 100 for share in range(0, 96, 5)]
    error = [found.at(1 - share) for share in rejected]
    if data.task == "regression":
        error = [data.y_scale * math.sqrt(value) for value in error]
    return {"rejected": rejected, "error": error}


def rotation(
    posterior: Posterior, data: DataSet, digit: str, options: dict[str, Any]
) -> dict[str, Any]:
    """Class probabilities of one test image rotated from 0° to 180° (the figure of Louizos &
    Welling 2017).

    The image of that digit nearest to their mean image, so that the choice does not depend on the
    method.
    """
    x, y = data.test
    same = x[y == data.class_names.index(digit)]
    typical = same[(same - same.mean(0)).flatten(1).norm(dim=1).argmin()]
    turned = torch.stack([turn(typical, degrees) for degrees in DEGREES])
    p = posterior.predict(turned, **options)
    strip = [turned[round(i * (len(DEGREES) - 1) / (SHOWN - 1))] for i in range(SHOWN)]
    low, high = float(typical.min()), float(typical.max())
    return {
        "digit": digit,
        "classes": list(data.class_names),
        "degrees": list(DEGREES),
        "probabilities": [_list(row) for row in p.mean],
        "entropy": _list(p.entropy),
        "images": [png(((image - low) / (high - low)).clamp(0, 1)) for image in strip],
    }


def turn(image: Tensor, degrees: float) -> Tensor:
    """An image (C, H, W) rotated counterclockwise about its center, bilinear; new pixels have its
    minimum.
    """
    angle = math.radians(degrees)
    matrix = torch.tensor(
        [[math.cos(angle), -math.sin(angle), 0.0], [math.sin(angle), math.cos(angle), 0.0]]
    )
    grid = F.affine_grid(matrix.unsqueeze(0).to(image), [1, *image.shape], align_corners=False)
    floor = image.amin()
    out: Tensor = F.grid_sample((image - floor).unsqueeze(0), grid, align_corners=False)[0] + floor
    return out


def png(image: Tensor) -> str:
    """A picture (1 or 3, H, W) with values in [0, 1] as a data URL, 8 bits a channel."""
    with extra("lab", "A picture of an image"):
        from PIL import Image

    pixels = (image * 255).round().to(torch.uint8).movedim(0, -1).squeeze(-1).cpu().numpy()
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()


def curve(posterior: Posterior, data: DataSet, options: dict[str, Any]) -> dict[str, Any]:
    """Mean, epistemic and total bands of probability ``LEVEL`` over a range half as wide again as
    the data.
    """
    x, y = data.train
    low, high = float(x.min()), float(x.max())
    margin = 0.25 * (high - low)
    grid = torch.linspace(low - margin, high + margin, 161, dtype=x.dtype).unsqueeze(1)
    pick = torch.linspace(0, len(x) - 1, min(POINTS, len(x))).round().long()
    points = original_inputs(data, x[pick]), y[pick, 0]
    names = (data.feature_names or ("x",))[0], getattr(data.preprocessor, "target", "y")
    return _bands(
        posterior.predict(grid, **options), original_inputs(data, grid), points, len(x), names, data
    )


def observed(p: Predictive, y: Tensor, data: DataSet) -> dict[str, Any]:
    """The same bands for some test rows, sorted by their mean: for any number of inputs."""
    some = torch.linspace(0, len(y) - 1, min(ROWS, len(y))).round().long().to(y.device)
    order = some[p.mean[some, 0].argsort()]
    part, place = Predictive(p.likelihood, p.outputs[:, order]), torch.arange(1.0, len(order) + 1)
    names = "test rows, sorted by prediction", getattr(data.preprocessor, "target", "y")
    return _bands(part, place, (place, y[order, 0]), len(y), names, data)


def _bands(
    p: Predictive,
    x: Tensor,
    points: tuple[Tensor, Tensor],
    count: int,
    names: tuple[str, str],
    data: DataSet,
) -> dict[str, Any]:
    """Central intervals of y, and mean ± z·epistemic std; ``points``: those drawn of ``count``."""
    ends = p.mean, Z * p.epistemic_std, *p.interval(LEVEL)
    mean, epistemic, low, high = (t.detach().double().cpu()[:, 0] for t in ends)

    def units(values: Tensor) -> list[float]:
        return _list(values.double().cpu() * data.y_scale + data.y_mean)

    return {
        "x": _list(x),
        "x_label": names[0],
        "y_label": names[1],
        "mean": units(mean),
        "low": units(low),
        "high": units(high),
        "epistemic_low": units(mean - epistemic),
        "epistemic_high": units(mean + epistemic),
        "points": {"x": _list(points[0]), "y": units(points[1]), "of": count},
    }


def original_inputs(data: DataSet, x: Tensor) -> Tensor:
    """Inputs of one feature in original units."""
    column = getattr(data.preprocessor, "columns", [None])[0]
    mean, scale = (
        getattr(column, name, default) for name, default in (("mean", 0.0), ("scale", 1.0))
    )
    return x.double() * scale + mean

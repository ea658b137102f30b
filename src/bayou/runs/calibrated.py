"""``--calibrate``: rows held out of training, by which predictions are calibrated."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from bayou import metrics, operations, rng
from bayou.data import DataSet
from bayou.posteriors import Posterior
from bayou.report.judge import prediction

Held = tuple[Tensor, Tensor]


def hold_out(data: DataSet, fraction: float, seed: int) -> tuple[DataSet, Held | None]:
    """The data with fewer training rows, and the others; all of them, and None, for a fraction of 0."""
    if not fraction:
        return data, None
    x, y = data.train
    count = round(fraction * len(x))
    if not 0 < count < len(x):
        raise ValueError(f"calibrate={fraction:g} of {len(x)} training rows leaves none on one side")
    order = rng.permutation(len(x), rng.fold(seed, "calibrate"))
    held, rest = order[:count].sort().values, order[count:].sort().values
    return replace(data, train=(x[rest], y[rest])), (x[held], y[held])


def calibrate(posterior: Posterior, held: Held, data: DataSet, samples: int, seed: int) -> tuple[str, dict[str, Any]]:
    """Calibrate by held-out rows: a sentence, and the NLL of the test rows before and after."""
    options = prediction(posterior, samples, seed)
    y = data.test[1]

    def nll() -> float:
        p = posterior.predict(data.test[0], **options)
        return metrics.nll(p, y.to(p.outputs.device), data.y_scale)

    before, what = nll(), "temperature" if data.task == "classification" else "factor of the noise"
    try:
        found = operations.calibrate(posterior, held, samples=options["samples"], seed=seed)
    except ValueError as error:
        return f"not calibrated: {error}", {}
    after = nll()
    said = f"a {what} of {found.temperature:.3g}, learned from {len(held[0]):,} held-out rows, changes the NLL "
    numbers = {"temperature": found.temperature, "rows": len(held[0]), "before": before, "after": after}
    return f"{said}of the test rows from {before:.4g} to {after:.4g}", numbers

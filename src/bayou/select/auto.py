"""A method selected by the NLL of held-out rows."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from bayou.files import StrPath
from bayou.inference.method import Method
from bayou.metrics import row_nll, standard_error
from bayou.posteriors import Posterior
from bayou.progress import BayouWarning, Show, stage
from bayou.target import Target
from bayou.training.data import Rows
from bayou.training.seeds import part_seed

CANDIDATES = ("map", "ensemble", "laplace", "nodeflow", "mnf")  # presets, the simplest first
HELD_OUT_FRACTION = 0.2  # of the training rows


@final
@dataclass(frozen=True)
class Auto(Method):
    """The method with the lowest NLL on a fifth of the rows, fitted again to all of them.

    Args:
        methods: name → method, the simplest first; one that raises an error on these data is left out.

    Cost: one fit of every method to four fifths of the rows, and one of the best to all rows. ``posterior.choice``
    states the selected method and the paired differences of the others.

    >>> list(bayou.select.by_name("auto").methods)
    ['map', 'ensemble', 'laplace', 'nodeflow', 'mnf']
    """

    methods: Mapping[str, Method]
    chooses_prior: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.methods, Mapping) or not self.methods:
            raise ValueError(f"Auto needs a dict of names and methods, got {self.methods!r}")

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return next(iter(self.methods.values())).batch_size

    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Posterior:
        """The posterior of the selected method."""
        if not isinstance(data, Rows):
            raise ValueError(
                f"auto holds out some of the rows, which {type(data).__name__} does not support; give (x, y)"
            )
        began = time.perf_counter()
        rest, held = data.split(HELD_OUT_FRACTION, part_seed(seed, "auto"))
        nll: dict[str, Tensor] = {}
        failures: dict[str, str] = {}
        count = len(self.methods) + 1
        for number, (name, method) in enumerate(self.methods.items(), 1):
            file = None if checkpoint is None else f"{os.fspath(checkpoint)}.{name}"
            try:
                with stage(number, count, name), warnings.catch_warnings():
                    warnings.simplefilter("ignore", BayouWarning)  # what a method that is not selected warns of
                    posterior = method.fit(target.copy(rest.n), rest, seed=seed, checkpoint=file, progress=progress)
            except (ValueError, FloatingPointError, RuntimeError) as error:
                failures[name] = str(error)
                continue
            if posterior.stopped == "interrupted":
                return posterior
            each = torch.cat([row_nll(posterior.predict(x, seed=seed), y) for x, y in held.ordered()])
            nll[name] = each.nan_to_num(nan=torch.inf)
        if not nll:
            raise ValueError(f"no method could be fitted: {failures}")
        best = min(nll, key=lambda name: float(nll[name].mean()))
        trials = [{"method": name, "nll": float(each.mean())} for name, each in nll.items()]
        log = {"stage": "method", "seconds": time.perf_counter() - began, "trials": trials}
        with stage(count, count, f"{best}, all rows"):
            posterior = self.methods[best].fit(target, data, seed=seed, checkpoint=checkpoint, progress=progress)
        posterior.choice = _why(best, nll, failures)
        posterior.selection = [log, *posterior.selection]
        return posterior


def _why(best: str, nll: dict[str, Tensor], failures: dict[str, str]) -> str:
    """A sentence: the selected method, and the differences of the others, paired over rows."""
    others = [
        f"{name} {float((each - nll[best]).mean()):+.3f} ± {standard_error(each - nll[best]):.3f}"
        for name, each in nll.items()
        if name != best
    ]
    failed = "".join(f"; {name} failed: {why}" for name, why in failures.items())
    beside = f", differences {', '.join(others)}" if others else ""
    rows = f"{len(nll[best]):,} held-out training rows"
    return f"{best} was selected: the lowest NLL on {rows}{beside} nats{failed}; then fitted to all rows"

"""A method selected by the NLL of held-out rows."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from bayou.files import StrPath
from bayou.inference.method import Method
from bayou.inference.start import network_at, starting_point
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
        methods: name → method, the simplest first; one that raises an error on these data is left
            out.
        start: finds the mode at which all methods start, which is evaluated too; None: each has its
            own start.
        errors: the first method that none, nor the mode, is better than by so many paired standard
            errors is selected.
        trials: the methods that are compared, by the same names, such as shorter ones; None:
            ``methods`` themselves.

    Cost: one fit of every method to four fifths of the rows, and one of the best to all rows.
    ``posterior.choice`` states the selected method and the paired differences of the others.

    >>> list(bayou.select.by_name("auto").methods)
    ['map', 'ensemble', 'laplace', 'nodeflow', 'mnf']
    """

    methods: Mapping[str, Method]
    start: Method | None = None
    errors: float = 0.0
    trials: Mapping[str, Method] | None = None
    chooses_prior: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not isinstance(self.methods, Mapping) or not self.methods:
            raise ValueError(f"Auto needs a dict of names and methods, got {self.methods!r}")

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        return next(iter(self.methods.values())).batch_size

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """The posterior of the selected method."""
        if not isinstance(data, Rows):
            raise ValueError(
                f"auto holds out some of the rows, which {type(data).__name__} does not support; give (x, y)"
            )
        began = time.perf_counter()
        rest, held = data.split(HELD_OUT_FRACTION, part_seed(seed, "auto"))
        count, failures, nll = len(self.methods) + 1, dict[str, str](), dict[str, Tensor]()

        def beside(ending: str) -> str | None:
            return None if checkpoint is None else f"{os.fspath(checkpoint)}.{ending}"

        def judge(name: str, posterior: Posterior) -> None:
            each = [row_nll(posterior.predict(x, seed=seed), y) for x, y in held.ordered()]
            nll[name] = torch.cat(each).nan_to_num(nan=torch.inf)

        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore", BayouWarning
            )  # what a method that is not selected warns of
            tried = replace(self, methods=self.trials or self.methods)
            own, methods, mode = tried._at_mode(
                target.copy(rest.n), rest, seed, beside("mode"), progress
            )
            if mode and mode.stopped == "interrupted":
                return mode
            if self.trials is not None:
                methods = {
                    name: method.with_planned_length(rest) for name, method in methods.items()
                }
            for number, (name, method) in enumerate(methods.items(), 1):
                try:
                    with stage(number, count, name):
                        posterior = method.fit(
                            own.copy(), rest, seed=seed, checkpoint=beside(name), progress=progress
                        )
                except (ValueError, FloatingPointError, RuntimeError) as error:
                    failures[name] = str(error)
                    continue
                if posterior.stopped == "interrupted":
                    return posterior
                judge(name, posterior)
        if not nll:
            raise ValueError(f"no method could be fitted: {failures}")
        best, names = min(nll, key=lambda name: float(nll[name].mean())), list(nll)
        if mode:
            judge("mode", mode)
        for name in reversed(names):
            more = [nll[name] - other for other in nll.values()]
            best = (
                name
                if all(float(one.mean()) <= self.errors * standard_error(one) for one in more)
                else best
            )
        trials = [{"method": name, "nll": float(each.mean())} for name, each in nll.items()]
        log = {"stage": "method", "seconds": time.perf_counter() - began, "trials": trials}
        with stage(count, count, f"{best}, all rows"):
            own, methods, mode = self._at_mode(target, data, seed, beside("start"), progress)
            if mode and mode.stopped == "interrupted":
                return mode
            posterior = methods[best].fit(
                own, data, seed=seed, checkpoint=checkpoint, progress=progress
            )
        posterior.choice = _why(best, nll, failures, self.errors)
        posterior.selection = [log, *posterior.selection]
        return posterior

    def _at_mode(
        self, target: Target, rows: Rows, seed: int, file: str | None, progress: Show
    ) -> tuple[Target, Mapping[str, Method], Posterior | None]:
        """Target and methods at the mode of these rows, and this mode; without a start, as they
        are.
        """
        if self.start is None:
            return target, self.methods, None
        mode = starting_point(
            self.start, target, rows, seed=seed, checkpoint=file, progress=progress
        )
        at_mode = {name: method.at_mode(1.0, rows) for name, method in self.methods.items()}
        return replace(mode.target, net=network_at(mode)), at_mode, mode


def _why(best: str, nll: dict[str, Tensor], failures: dict[str, str], errors: float) -> str:
    """A sentence: the selected method, and the differences of the others, paired over rows."""
    others = [
        f"{name} {float((each - nll[best]).mean()):+.3f} ± {standard_error(each - nll[best]):.3f}"
        for name, each in nll.items()
        if name != best
    ]
    failed = "".join(f"; {name} failed: {why}" for name, why in failures.items())
    beside = f", differences {', '.join(others)}" if others else ""
    within = f"{errors:g} standard error{'s' if errors != 1 else ''}"
    lowest = (
        f"the first that none is better than by more than {within}, or the best"
        if errors
        else "the lowest NLL"
    )
    rows = f"{len(nll[best]):,} held-out training rows"
    return f"{best} was selected: {lowest} on {rows}{beside} nats{failed}; then fitted to all rows"

"""The best of several fits by the NLL of held-out rows."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch
from torch import Tensor

from bayou.core.progress import BayouWarning, stage
from bayou.metrics import row_nll, standard_error
from bayou.posteriors import Posterior
from bayou.select.folds import is_within_chance
from bayou.select.search_run import raise_if_stopped
from bayou.training.data import Rows

HELD_OUT_FRACTION: Final = 0.2  # of the training rows
# Of a fit that is left out of a comparison or a mixture; all others end the search.
FIT_ERRORS: Final = (ValueError, FloatingPointError, RuntimeError)


@final
@dataclass(frozen=True)
class FitComparison:
    """Several posteriors on the same held-out rows.

    Args:
        nll: −log p of every row, (M,), by the name of the method; the simplest first.
        failures: why a method could not be fitted, by its name.
        errors: a method is within chance of another one if its NLL is higher by at most so many
            paired standard errors; 0 for the lowest NLL.
        mode: −log p of every row under the mode at which all start, if there is one.
    """

    nll: dict[str, Tensor]
    failures: dict[str, str] = field(default_factory=dict)
    errors: float = 0.0
    mode: Tensor | None = None

    @property
    def rivals(self) -> dict[str, Tensor]:
        """The NLLs of all methods, and of the mode."""
        return self.nll if self.mode is None else self.nll | {"mode": self.mode}

    @property
    def best(self) -> str:
        """The first method that none, nor the mode, is better than beyond chance."""
        names = list(self.nll)
        best = min(names, key=lambda name: float(self.nll[name].mean()))
        for name in reversed(names):
            rivals = self.rivals.values()
            if all(is_within_chance(self.nll[name], rival, self.errors) for rival in rivals):
                best = name
        return best

    @property
    def trials(self) -> list[dict[str, Any]]:
        """The mean NLL of every method, for the record of the stage."""
        return [
            {"method": name, "nll": float(losses.mean())} for name, losses in self.rivals.items()
        ]

    def describe(self) -> str:
        """Return a sentence: the selected method, and the paired differences of the others."""
        best = self.best
        differences = [
            f"{name} {float((losses - self.nll[best]).mean()):+.3f} ± "
            f"{standard_error(losses - self.nll[best]):.3f}"
            for name, losses in self.rivals.items()
            if name != best
        ]
        failed = "".join(f"; {name} failed: {why}" for name, why in self.failures.items())
        beside = f", differences {', '.join(differences)}" if differences else ""
        rule = "the lowest NLL"
        if self.errors:
            within = f"{self.errors:g} standard error{'s' if self.errors != 1 else ''}"
            rule = f"the first that none is better than by more than {within}, or the best"
        rows = f"{len(self.nll[best]):,} held-out training rows"
        return (
            f"{best} was selected: {rule} on {rows}{beside} nats{failed}; then fitted to all rows"
        )


def compare_fits(
    fits: Mapping[str, Callable[[], Posterior]],
    held_out: Rows,
    seed: int,
    *,
    stages: tuple[int, int],
    errors: float = 0.0,
    mode: Posterior | None = None,
) -> FitComparison:
    """Fit several methods and predict held-out rows; one that raises an error is left out.

    Args:
        fits: fits each method, without the held-out rows; the simplest first.
        held_out: the rows.
        seed: of the draws.
        stages: the number of the first fit among all stages, and their count, for the progress.
        errors: see ``FitComparison``.
        mode: the mode at which all start; it is evaluated too.

    Raises:
        ValueError: if no method could be fitted.
        SearchInterrupted: after Ctrl-C, with the posterior so far.
    """
    nll: dict[str, Tensor] = {}
    failures: dict[str, str] = {}
    first, count = stages
    for number, (name, fit) in enumerate(fits.items(), first):
        try:
            with stage(number, count, name), without_warnings():
                posterior = fit()
        except FIT_ERRORS as error:
            failures[name] = str(error)
            continue
        raise_if_stopped(posterior)
        nll[name] = held_out_nll(posterior, held_out, seed)
    if not nll:
        raise ValueError(f"no method could be fitted: {failures}")
    of_mode = None if mode is None else held_out_nll(mode, held_out, seed)
    return FitComparison(nll, failures, errors, of_mode)


@contextmanager
def without_warnings() -> Iterator[None]:
    """Inside, nothing warns of a fit that is only compared with others."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", BayouWarning)
        yield


def held_out_nll(posterior: Posterior, held_out: Rows, seed: int) -> Tensor:
    """Return −log p of every row, infinite where it is not a number.

    Args:
        posterior: predicts the rows.
        held_out: the rows.
        seed: of the draws.
    """
    losses = [row_nll(posterior.predict(x, seed=seed), y) for x, y in held_out.epoch()]
    return torch.cat(losses).nan_to_num(nan=torch.inf)

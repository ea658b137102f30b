"""The column ``unusual`` of predictions: how rare inputs like these are among the run's rows."""

from __future__ import annotations

import warnings
from typing import final

import torch
from torch import Tensor

from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.predictions import UNUSUAL
from bayou.operations.ood import Detector, InexactRanksWarning, fit
from bayou.posteriors import Posterior

LEVEL = 0.01  # below which a row is named in the notes
MIN_TEST_ROWS = 100  # for p-values of .01; else training rows are held out


def fit_detector(run: Run, posterior: Posterior, samples: int | None) -> Detector:
    """Fit a detector of unusual inputs to the training rows of a run.

    Its p-values are ranks among the test rows, which no posterior of the run has seen.

    Args:
        run: has the data.
        posterior: of the run.
        samples: draws of a prediction; None for the default.

    Raises:
        RunError: if the data are no longer available.
    """
    try:
        data = run.load_data()
    except ValueError as error:
        raise RunError(f"--ood needs the training rows of the run: {error}") from None
    held_out = data.test if len(data.test[0]) >= MIN_TEST_ROWS else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", InexactRanksWarning)  # it is among the notes
        if samples is None:  # a closed form
            return fit(posterior, data.train, held_out=held_out)
        return fit(posterior, data.train, held_out=held_out, samples=samples)


@final
class UnusualColumn:
    """The p-values of rows that are predicted batch by batch.

    Args:
        detector: of the posterior that predicts the rows.
    """

    def __init__(self, detector: Detector) -> None:
        self._detector = detector
        self._rows = 0
        self._unusual_count = 0

    def cells(self, x: Tensor) -> list[str]:
        """Return the p-values of a batch as text.

        Args:
            x: inputs of the network (B, ...).
        """
        p_value = self._detector.score(x).p_value
        self._rows += len(p_value)
        self._unusual_count += int(torch.count_nonzero(p_value <= LEVEL))
        return [f"{value:.4g}" for value in p_value.tolist()]

    def notes(self) -> list[str]:
        """Return notes about the p-values, and about small ones, of all batches so far."""
        notes = []
        if not self._detector.is_exact:
            notes.append(
                f"the column {UNUSUAL} ranks rows among training rows, since the run has fewer "
                f"than {MIN_TEST_ROWS} test rows; its p-values are too small."
            )
        if self._unusual_count:
            expected = LEVEL * self._rows
            notes.append(
                f"{self._unusual_count} of {self._rows} rows have a p-value of {LEVEL:g} at most "
                f"in the column {UNUSUAL}, where {expected:.3g} are expected of rows like those of "
                "the run."
            )
        return notes

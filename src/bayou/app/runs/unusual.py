"""The column ``unusual`` of predictions: how rare inputs like these are among the run's rows."""

from __future__ import annotations

import warnings

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


def unusual_column(detector: Detector, x: Tensor) -> tuple[list[str], list[str]]:
    """Return the p-values of rows as text, and notes about rare ones.

    Args:
        detector: of the posterior that predicts the rows.
        x: inputs of the network (B, ...).
    """
    p_value = detector.score(x).p_value
    notes = []
    if not detector.is_exact:
        notes.append(
            f"the column {UNUSUAL} ranks rows among training rows, since the run has fewer than "
            f"{MIN_TEST_ROWS} test rows; its p-values are too small."
        )
    count = int(torch.count_nonzero(p_value <= LEVEL))
    expected = LEVEL * len(p_value)
    if count:
        notes.append(
            f"{count} of {len(p_value)} rows have a p-value of {LEVEL:g} at most in the column "
            f"{UNUSUAL}, where {expected:.3g} are expected of rows like those of the run."
        )
    return [f"{value:.4g}" for value in p_value.tolist()], notes

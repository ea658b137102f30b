"""Conformal intervals or sets of a run folder, by a file of labeled rows that it has not seen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from torch import Tensor

import bayou
from bayou.app.runs.folder import Run, RunError
from bayou.app.runs.learned_rows import check_not_learned
from bayou.core.files import StrPath
from bayou.core.progress import spell
from bayou.data import reading
from bayou.data.preprocess import Preprocessor
from bayou.likelihoods.predictive import Predictive
from bayou.posteriors import Posterior

if TYPE_CHECKING:  # the operations are imported when there is a guarantee to fit
    from bayou.operations.conformal import ConformalPredictor, Shift

SHIFTS = ("covariate", "label")


@final
@dataclass(frozen=True)
class GuaranteeRequest:
    """What a user wants to be guaranteed.

    Args:
        source: a file of labeled rows that were not used in training; None for no guarantee.
        shift: "covariate" or "label" if the rows to predict differ from these; None if not.
        groups: the column of both files whose values have a guarantee each; None for none.
    """

    source: StrPath | None = None
    shift: str | None = None
    groups: str | None = None

    def check(self) -> None:
        """Raise a RunError for settings that do not fit each other."""
        if self.shift is not None and self.shift not in SHIFTS:
            name = spell("conformal_shift", "--conformal-shift")
            raise RunError(f"{name} must be covariate or label, got {self.shift!r}")
        for value, python, command in (
            (self.shift, "conformal_shift", "--conformal-shift"),
            (self.groups, "conformal_groups", "--conformal-groups"),
        ):
            if value is not None and self.source is None:
                raise RunError(
                    f"{spell(python, command)} needs labeled rows: give "
                    f"{spell('conformal', '--conformal FILE')}, too"
                )


@final
@dataclass(frozen=True, eq=False)
class Guarantee:
    """A conformal guarantee with what it needs to know of the rows to predict.

    Args:
        predictor: gives intervals or sets.
        preprocessor: holds the task, the class names and the scale of y.
        groups: the group of each row to predict; None without groups.
        weights: the weight of each row to predict, (N,); None without weights.
        notes: sentences about the held-out rows.
    """

    predictor: ConformalPredictor
    preprocessor: Preprocessor
    groups: list[str] | None
    weights: Tensor | None
    notes: list[str]

    def columns(self, predictive: Predictive, start: int) -> dict[str, list[str] | Tensor]:
        """Return the ends of conformal intervals, or conformal sets as text.

        Args:
            predictive: of a batch of rows.
            start: the number of its first row.
        """
        stop = start + predictive.outputs.shape[1]
        groups = None if self.groups is None else self.groups[start:stop]
        weights = None if self.weights is None else self.weights[start:stop]
        if self.preprocessor.task == "classification":
            sets = []
            mask = self.predictor.set(predictive, groups, weights=weights, start=start)
            for memberships in mask.tolist():
                pairs = zip(self.preprocessor.class_names, memberships, strict=True)
                sets.append("|".join(name for name, is_member in pairs if is_member))
            return {"conformal_set": sets}
        low, high = self.predictor.interval(predictive, groups, weights=weights)
        return {
            "conformal_lower": self.preprocessor.original(low[:, 0].double()),
            "conformal_upper": self.preprocessor.original(high[:, 0].double()),
        }


def fit_guarantee(
    request: GuaranteeRequest,
    run: Run,
    posterior: Posterior,
    preprocessor: Preprocessor,
    new_source: StrPath,
    level: float,
    samples: int | None,
) -> Guarantee:
    """Return the conformal guarantee by the rows of a file, which must not be training rows.

    Args:
        request: the file, the shift and the column of groups.
        run: the run folder.
        posterior: one of its posteriors.
        preprocessor: of its data.
        new_source: the file of the rows to predict, all of which are read for weights or groups.
        level: the coverage.
        samples: number of averaged networks.

    Raises:
        RunError: for a missing target or column of groups, and for rows that an update learned.
    """
    source = request.source
    if source is None:
        raise RunError("a guarantee needs a file of labeled rows")
    held_out_rows = preprocessor.rows(source, need_target=True)
    if held_out_rows.y is None:
        raise RunError("conformal rows need the target column")
    x, y = run.convert(held_out_rows.x, held_out_rows.y)
    check_not_learned(run, x, y, source)
    new_x = None
    held_out_groups = None
    new_groups = None
    if request.groups is not None or request.shift is not None:
        new_rows = preprocessor.rows(new_source)
        new_x = new_rows.x.to(x.dtype)
    if request.groups is not None:
        held_out_groups = _read_groups(source, request.groups, held_out_rows.kept)
        new_groups = _read_groups(new_source, request.groups, new_rows.kept)
    shift: Shift | None = None
    if request.shift is not None:
        shift = "covariate" if request.shift == "covariate" else "label"
    predictor = bayou.operations.conformal(
        posterior,
        (x, y),
        level,
        groups=held_out_groups,
        shift=shift,
        unlabeled=None if shift is None else new_x,
        samples=samples,
        seed=0,
        train=_training_rows(run),
    )
    notes = [f"{source}: {note}" for note in held_out_rows.notes]
    weights = predictor.weights_of(new_x)
    if weights is not None:
        counts = ", ".join(f"{count:.0f}" for count in predictor.effective_rows)
        notes.append(
            f"{source}: the weights of the {shift} shift leave an effective sample of {counts} of "
            f"{len(x)} rows."
        )
    return Guarantee(predictor, preprocessor, new_groups, weights, notes)


def _training_rows(run: Run) -> tuple[Tensor, Tensor] | None:
    """Return the training rows of a run; None if they are no longer available."""
    try:
        return run.load_data().train
    except ValueError:
        return None


def _read_groups(source: StrPath, name: str, kept: list[int]) -> list[str]:
    """Return the group of each row of a file that is used."""
    table = reading.read(str(source), (name,))
    if name not in table.columns:
        raise RunError(
            f"{source} has no column {name!r} of groups; its columns are "
            f"{reading.quote_names(table.columns)}"
        )
    column = table.columns[name]
    groups = [column.text(row).strip() for row in kept]
    if "" in groups:
        row = kept[groups.index("")] + 1
        raise RunError(f"row {row} of {source} has no group: its cell of {name!r} is empty")
    return groups

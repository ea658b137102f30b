"""The data set that ``load`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from bayou.data.catalogue import Task

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

    from bayou.data.preprocess import Preprocessor

Pair = tuple[Any, Any]  # x, y


@final
@dataclass(frozen=True, repr=False)
class DataSet:
    """Inputs and targets, ready for a network.

    A pair (x, y) has x float32 (N, *shape), and y int64 (N,) for classes or float32 (N, 1) for
    numbers, standardized by the training rows: y in original units is y·y_scale + y_mean.

    Args:
        name: of the data set or the file.
        train: the training rows, x and y.
        test: the test rows, x and y.
        preprocessor: makes inputs of new rows.
        ood: out-of-distribution inputs of the same shape, if any.
        ood_name: what they are.
        notes: sentences about the preprocessing.
        groups: the group of each training row, which ``bayou.fit`` does not divide; None for none.
        times: the time of each training row, of which ``bayou.fit`` holds out the latest; None for
            none.
        split_notes: sentences about the split, and what changes with another.

    Example:
        >>> from bayou.data import load
        >>> x, y = load("two-bumps").train
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    preprocessor: Preprocessor
    ood: Tensor | None = None
    ood_name: str | None = None
    notes: list[str] = field(default_factory=list)
    groups: Tensor | None = None
    times: Tensor | None = None
    split_notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        name: str,
        preprocessor: Preprocessor,
        train: Pair,
        test: Pair,
        ood: NDArray[Any] | Tensor | None,
        ood_name: str | None,
        notes: list[str],
    ) -> DataSet:
        """Return a data set of arrays of network inputs.

        Args:
            name: of the data set or the file.
            preprocessor: makes inputs of new rows.
            train: x and y.
            test: x and y.
            ood: out-of-distribution inputs, or None.
            ood_name: what they are; ignored without them.
            notes: sentences about the preprocessing.
        """
        import torch

        has_ood = ood is not None
        return DataSet(
            name,
            (torch.as_tensor(train[0]), torch.as_tensor(train[1])),
            (torch.as_tensor(test[0]), torch.as_tensor(test[1])),
            preprocessor,
            torch.as_tensor(ood) if has_ood else None,
            ood_name if has_ood else None,
            notes,
        )

    @property
    def task(self) -> Task:
        """classification or regression."""
        return self.preprocessor.task

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes; empty for numbers."""
        return self.preprocessor.class_names

    @property
    def feature_names(self) -> tuple[str, ...]:
        """A name for every number of an input; empty for images."""
        return self.preprocessor.feature_names

    @property
    def n(self) -> int:
        """The number of training examples."""
        return len(self.train[1])

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input: (features,) or (channels, height, width)."""
        return tuple(self.train[0].shape[1:])

    @property
    def output_size(self) -> int:
        """The number of network outputs: one per class, or one."""
        if self.task == "classification":
            return len(self.class_names)
        return int(self.train[1].shape[1])

    @property
    def y_mean(self) -> float:
        """What was subtracted from a regression target; 0 for classes."""
        return self.preprocessor.y_mean

    @property
    def y_scale(self) -> float:
        """What a regression target was divided by; 1 for classes."""
        return self.preprocessor.y_scale

    def __repr__(self) -> str:
        """Return the name, the task and the sizes."""
        task = "regression"
        if self.task == "classification":
            task = f"{len(self.class_names)} classes"
        shape = "×".join(map(str, self.input_shape))
        ood = "" if self.ood is None else f", {len(self.ood)} {self.ood_name} out of distribution"
        rows = f"{self.n} train, {len(self.test[1])} test{ood}"
        return f"DataSet({self.name!r}: {task}, inputs {shape}, {rows})"

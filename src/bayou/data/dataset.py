"""The data set that ``load`` returns."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from bayou.data.catalogue import Task

if TYPE_CHECKING:
    from torch import Tensor

    from bayou.data.preprocess import Preprocessor

Pair = tuple[Any, Any]  # x, y


@final
@dataclass(frozen=True, repr=False)
class DataSet:
    """Inputs and targets, ready for a network.

    ``train`` and ``test`` are pairs (x, y): x float32 (N, *shape); y int64 (N,) classes, or float32
    (N, 1) standardized
    by the training rows: y in original units is y·y_scale + y_mean. ``ood``: out-of-distribution
    inputs of the same
    shape. ``notes``: sentences about the preprocessing.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    preprocessor: Preprocessor
    ood: Tensor | None = None
    ood_name: str | None = None
    notes: list[str] = field(default_factory=list)

    @staticmethod
    def of(
        name: str,
        preprocessor: Preprocessor,
        train: Pair,
        test: Pair,
        ood: Any,
        ood_name: str | None,
        notes: list[str],
    ) -> DataSet:
        """Arrays of network inputs; without ``ood`` its name is ignored."""
        import torch

        (x, y), (x_test, y_test) = (tuple(map(torch.as_tensor, pair)) for pair in (train, test))
        away = None if ood is None else torch.as_tensor(ood)
        return DataSet(
            name,
            (x, y),
            (x_test, y_test),
            preprocessor,
            away,
            None if ood is None else ood_name,
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
        return (
            len(self.class_names) if self.task == "classification" else int(self.train[1].shape[1])
        )

    @property
    def y_mean(self) -> float:
        """What was subtracted from a regression target; 0 for classes."""
        return self.preprocessor.y_mean

    @property
    def y_scale(self) -> float:
        """What a regression target was divided by; 1 for classes."""
        return self.preprocessor.y_scale

    def __repr__(self) -> str:
        shape = "×".join(map(str, self.input_shape))
        what = f"{len(self.class_names)} classes" if self.task == "classification" else "regression"
        ood = "" if self.ood is None else f", {len(self.ood)} {self.ood_name} out of distribution"
        return f"DataSet({self.name!r}: {what}, inputs {shape}, {self.n} train, {len(self.test[1])} test{ood})"

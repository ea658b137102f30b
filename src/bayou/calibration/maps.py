"""The interface of calibration maps, and what a file needs to restore one."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from bayou.core.specs import nearest
from bayou.likelihoods import BoundLikelihood, FiniteLikelihood
from bayou.likelihoods.predictive import Predictive

CLASS_MAPS = ("temperature", "vector", "matrix", "dirichlet", "isotonic", "spline")
NUMBER_MAPS = ("temperature", "isotonic")
MAPS = ("auto", "none", *CLASS_MAPS)


class CalibrationMap(ABC):
    """A map of predictive distributions, with parameters that held-out rows determine.

    A subclass is a frozen dataclass whose arguments are tensors: they are its state in files.

    Attributes:
        name: of the map in ``bayou.calibrate(posterior, rows, map=name)``.
        key: its name in files.
        support: of the y that it is for.
        is_traceable: whether a program of a posterior can apply it.
    """

    name: ClassVar[str]
    key: ClassVar[str]
    support: ClassVar[Literal["classes", "real"]]
    is_traceable: ClassVar[bool] = True

    @abstractmethod
    def apply(self, likelihood: BoundLikelihood, outputs: Tensor) -> tuple[BoundLikelihood, Tensor]:
        """Return the likelihood and the outputs of the calibrated prediction.

        Args:
            likelihood: p(y | f).
            outputs: of S functions, (S, B, *out).

        Raises:
            ValueError: if the map is not for such predictions.
        """

    @classmethod
    @abstractmethod
    def fit(cls, p: Predictive, y: Tensor) -> Self:
        """Return the map with the parameters that suit some rows best.

        Args:
            p: predictions of B rows, not calibrated.
            y: their targets, (B, *event).

        Raises:
            ValueError: if the map is not for such predictions, or there are too few rows.
        """

    def __call__(self, p: Predictive) -> Predictive:
        """Return the calibrated prediction.

        Args:
            p: a prediction.
        """
        return Predictive(*self.apply(p.likelihood, p.outputs))

    def state(self) -> dict[str, Tensor]:
        """Return the tensors of the map by name."""
        return {name: getattr(self, name) for name in _tensor_names(type(self))}

    def __eq__(self, value: object) -> bool:
        """Return whether another map has the same tensors."""
        if not isinstance(value, CalibrationMap) or value.key != self.key:
            return False
        tensors = value.state()
        return all(torch.equal(tensor, tensors[name]) for name, tensor in self.state().items())

    def __hash__(self) -> int:
        """Return the hash of the object."""
        return id(self)

    def __repr__(self) -> str:
        shapes = (f"{name} {tuple(value.shape)}" for name, value in self.state().items())
        return f"{type(self).__name__}({', '.join(shapes)})"


def _map_classes() -> list[type[CalibrationMap]]:
    """Return all maps: the subclasses, at any depth, that have a key."""
    classes = []
    waiting = CalibrationMap.__subclasses__()
    while waiting:
        subclass = waiting.pop(0)
        waiting += subclass.__subclasses__()
        if "key" in vars(subclass):
            classes.append(subclass)
    return classes


def map_named(name: str, support: str) -> type[CalibrationMap] | None:
    """Return the class of a map by name; None for a temperature, which is a number.

    Args:
        name: one of ``CLASS_MAPS`` for classes, of ``NUMBER_MAPS`` for numbers.
        support: of y, "classes", "counts" or "real".

    Raises:
        ValueError: for another name.
    """
    names = CLASS_MAPS if support == "classes" else NUMBER_MAPS
    if name not in names:
        wanted = "classes" if support == "classes" else "numbers"
        raise ValueError(
            f"map must be 'auto', 'none' or, for {wanted}, one of {', '.join(names)}; got {name!r}"
            f"{nearest(str(name), names)}"
        )
    for cls in _map_classes():
        if cls.name == name and (cls.support == "classes") == (support == "classes"):
            return cls
    return None


def restore_map(key: Any, tensors: dict[str, Tensor]) -> CalibrationMap:
    """Return the map with a state.

    Args:
        key: of the map.
        tensors: its ``state()``.

    Raises:
        ValueError: for another key, or tensors that are not those of the map.
    """
    classes = {cls.key: cls for cls in _map_classes()}
    if key not in classes:
        raise ValueError(f"a calibration map must be one of {', '.join(classes)}, got {key!r:.60}")
    cls = classes[key]
    names = _tensor_names(cls)
    if sorted(tensors) != sorted(names):
        raise ValueError(f"the map {key} has the tensors {names}, got {sorted(tensors)}")
    return cls(**{name: tensors[name].cpu() for name in names})


def _tensor_names(cls: type[CalibrationMap]) -> list[str]:
    """Return the names of the tensors that a map is made of."""
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]  # subclasses are dataclasses
    return [field.name for field in fields if field.init]


def class_log_pmf(likelihood: BoundLikelihood, outputs: Tensor) -> tuple[FiniteLikelihood, Tensor]:
    """Return the likelihood of classes, and log-probabilities (S, B, *event, C).

    Args:
        likelihood: p(y | f).
        outputs: of S functions, (S, B, *out).

    Raises:
        ValueError: if y are no classes, or its outputs cannot have any probabilities.
    """
    if not isinstance(likelihood, FiniteLikelihood) or likelihood.support != "classes":
        raise ValueError(
            f"a map of probabilities is for classes, got {type(likelihood).__name__}; numbers have "
            f"the maps {', '.join(NUMBER_MAPS)}"
        )
    log_pmf = likelihood.log_pmf(outputs)
    likelihood.outputs_of(log_pmf[:1, :1])  # raises if it has none
    return likelihood, log_pmf


def labeled_log_pmf(p: Predictive, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probabilities and labels of the coordinates that are not ignored.

    Args:
        p: predictions of B rows.
        y: their targets, (B, *event).

    Returns:
        (S, N, C) in float64 and (N,).

    Raises:
        ValueError: if there are none, or a class has the probability 0.
    """
    likelihood, log_pmf = class_log_pmf(p.likelihood, p.outputs.detach().double())
    likelihood.validate(p.outputs.shape[1:], y)
    labels, is_labeled = likelihood.labels(y.to(p.outputs.device))
    if not bool(is_labeled.any()):
        raise ValueError("there are no labeled rows to calibrate by")
    log_pmf = log_pmf[:, is_labeled]
    if not bool(log_pmf.isfinite().all()):
        raise ValueError(
            "logits are infinite or NaN, so that there is nothing to map; use map='temperature'"
        )
    return log_pmf, labels[is_labeled].long()


def check_classes(count: int, log_pmf: Tensor, name: str) -> None:
    """Raise a ValueError unless predictions have as many classes as a map.

    Args:
        count: the classes of the map.
        log_pmf: log-probabilities, (..., C).
        name: of the map.
    """
    if log_pmf.shape[-1] != count:
        raise ValueError(
            f"the {name} map has {count} classes, but the predictions have {log_pmf.shape[-1]}; "
            "calibrate this posterior itself"
        )

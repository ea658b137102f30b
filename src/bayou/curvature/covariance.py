"""N(0, Σ) over named tensors, by the structure of Σ: what Laplace, SWAG and IVON end in."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, final

import torch
from torch import Tensor

from bayou import rng
from bayou.params import Params

LOG_2PI = math.log(2 * math.pi)


class Covariance(ABC):
    """Σ of a Gaussian over tensors of known shapes, made of ``tensors`` alone, so that a file can hold it."""

    kind: ClassVar[str]

    def __init__(self, shapes: Mapping[str, torch.Size], tensors: Mapping[str, Tensor]) -> None:
        self.shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self.tensors = {name: value.detach() for name, value in tensors.items()}

    @property
    def size(self) -> int:
        """D: how many numbers the tensors have together."""
        return sum(shape.numel() for shape in self.shapes.values())

    @abstractmethod
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws start .. start + n − 1 from N(0, Σ), (n, *shape) each; with an int seed, draw i depends on it alone."""

    @abstractmethod
    def mahalanobis(self, deviation: Params) -> Tensor:
        """dᵀ Σ⁻¹ d for tensors (..., *shape): (...)."""

    @property
    @abstractmethod
    def log_det(self) -> Tensor:
        """log |Σ|."""

    def log_prob(self, deviation: Params) -> Tensor:
        """log N(d; 0, Σ) = −½·(dᵀ Σ⁻¹ d + log |Σ| + D·log 2π)."""
        return -0.5 * (self.mahalanobis(deviation) + self.log_det + self.size * LOG_2PI)

    def sum(self, name: str, value: Tensor) -> Tensor:
        """The sum over the axes of one tensor: (..., *shape) to (...)."""
        axes = len(self.shapes[name])
        return value.flatten(value.ndim - axes).sum(-1) if axes else value


@final
class Diagonal(Covariance):
    """Σ = diag(std²); ``tensors`` has the standard deviation of every tensor under its name."""

    kind = "diagonal"

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        return {
            name: std * rng.normal(n, shape, std, rng.fold(seed, name), start)
            for name, shape in self.shapes.items()
            for std in (self.tensors[name],)
        }

    def mahalanobis(self, deviation: Params) -> Tensor:
        parts = [self.sum(name, (deviation[name] / std).square()) for name, std in self.tensors.items()]
        return torch.stack(parts).sum(0)

    @property
    def log_det(self) -> Tensor:
        return torch.stack([2 * std.log().sum() for std in self.tensors.values()]).sum()

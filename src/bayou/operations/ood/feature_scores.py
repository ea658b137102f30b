"""Scores of features, each fitted to the features of the training rows in one pass."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import ClassVar, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor

from bayou.core import rng

MIN_SHRINKAGE = 1e-6  # of a covariance, so that constant features have a variance
MAX_REFERENCES = 20_000  # training rows among which neighbors are searched
MAX_DENSITY_NUMBERS = 2**28  # in the covariances of all classes
MIN_RESIDUAL = 1e-9  # of the norm of features, below which there is no null space


class UnsupportedScore(ValueError):
    """A score that a posterior or its features do not have."""


@final
@dataclass(frozen=True, eq=False)
class TrainingFeatures:
    """Features of the training rows in one function.

    Args:
        values: z, (N, D) in float64.
        classes: the class of each row, 0 .. C − 1 without gaps, (N,); None for numbers.
        weight: of the linear layer that makes the logits of them, (O, D); None without one.
        bias: of this layer, (O,); None without one.
        neighbors: k of ``NearestNeighbors``.
        seed: of random choices.
    """

    values: Tensor
    classes: Tensor | None
    weight: Tensor | None = None
    bias: Tensor | None = None
    neighbors: int = 10
    seed: int = 0

    def require_classes(self, name: str) -> Tensor:
        """Return the classes.

        Args:
            name: of the score that needs them.

        Raises:
            UnsupportedScore: if y are numbers, or several classes for each row.
        """
        if self.classes is None:
            raise UnsupportedScore(
                f"the score {name!r} needs one class for each row, which these y are not; use "
                "'mahalanobis' or 'knn', or 'std' for numbers"
            )
        return self.classes


class FeatureScore(ABC):
    """A score of features: how unlike those of the training rows they are.

    Attributes:
        name: of the score.
    """

    name: ClassVar[str]

    @classmethod
    @abstractmethod
    def fit(cls, rows: TrainingFeatures) -> Self:
        """Fit the score.

        Args:
            rows: the features of the training rows.

        Raises:
            UnsupportedScore: if the features do not have this score.
        """

    @abstractmethod
    def of(self, z: Tensor) -> Tensor:
        """Return the score of each row, (B,); higher is more unusual.

        Args:
            z: features (B, D) in float64.
        """

    def state(self) -> dict[str, Tensor]:
        """Return the tensors from which ``restore`` makes the score again."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def restore(cls, tensors: dict[str, Tensor]) -> Self:
        """Return the score with a ``state``.

        Args:
            tensors: the state.
        """
        return cls(**tensors)


def shrunk_covariance(z: Tensor) -> Tensor:
    """Return the covariance of centered rows, shrunk towards a multiple of the identity.

    (1 − λ)·S + λ·(tr S/D)·I, where λ has the smallest expected squared error (Ledoit & Wolf 2004),
    and is 1e-6 at least.

    Args:
        z: rows with the mean 0, (N, D).

    Raises:
        UnsupportedScore: if all rows are equal.
    """
    rows, size = z.shape
    covariance = z.mT @ z / rows
    mean_variance = covariance.diagonal().mean()
    if not float(mean_variance) > 0:
        raise UnsupportedScore(
            "the features of the training rows do not vary, so that they have no covariance"
        )
    squares = covariance.square().sum()
    distance = (squares - size * mean_variance.square()) / size
    error = (z.square().sum(1).square().mean() - squares) / (rows * size)
    shrinkage = 0.0
    if float(distance) > 0:
        shrinkage = float((error / distance).clamp(0.0, 1.0))
    shrinkage = max(shrinkage, MIN_SHRINKAGE)
    identity = torch.eye(size, dtype=z.dtype, device=z.device)
    return (1 - shrinkage) * covariance + shrinkage * mean_variance * identity


def _class_means(z: Tensor, classes: Tensor) -> Tensor:
    """Return the mean of the rows of every class, (C, D)."""
    counts = classes.bincount().unsqueeze(1)
    sums = z.new_zeros(len(counts), z.shape[1]).index_add_(0, classes, z)
    return sums / counts


def _whiten(root: Tensor, z: Tensor) -> Tensor:
    """Return L⁻¹·z of every row, (B, D)."""
    return torch.linalg.solve_triangular(root, z.mT, upper=False).mT


@final
@dataclass(frozen=True, eq=False)
class Mahalanobis(FeatureScore):
    """min_c (z − μ_c)ᵀ·Σ⁻¹·(z − μ_c), with class means and one covariance (Lee et al. 2018).

    Of numbers y there is one mean. Σ is that of ``shrunk_covariance``.

    Args:
        root: L with Σ = L·Lᵀ, (D, D).
        means: L⁻¹·μ_c, (C, D).
    """

    name = "mahalanobis"
    root: Tensor
    means: Tensor

    @classmethod
    def fit(cls, rows: TrainingFeatures) -> Mahalanobis:
        classes = rows.classes
        if classes is None:
            classes = torch.zeros(len(rows.values), dtype=torch.long, device=rows.values.device)
        means = _class_means(rows.values, classes)
        root = torch.linalg.cholesky(shrunk_covariance(rows.values - means[classes]))
        return cls(root, _whiten(root, means))

    def of(self, z: Tensor) -> Tensor:
        distances = torch.cdist(_whiten(self.root, z), self.means)
        return distances.amin(1).square()


@final
@dataclass(frozen=True, eq=False)
class RelativeMahalanobis(FeatureScore):
    """min_c d_c(z) − d_0(z): Mahalanobis distances less that to all rows (Ren et al. 2021).

    d_0 has the mean and the covariance of all rows, so that directions in which the classes do not
    differ cancel.

    Args:
        root: of the covariance around the class means, (D, D).
        means: of the classes, whitened, (C, D).
        total_root: of the covariance of all rows, (D, D).
        total_mean: of all rows, whitened, (1, D).
    """

    name = "relative_mahalanobis"
    root: Tensor
    means: Tensor
    total_root: Tensor
    total_mean: Tensor

    @classmethod
    def fit(cls, rows: TrainingFeatures) -> RelativeMahalanobis:
        classes = rows.require_classes(cls.name)
        within = Mahalanobis.fit(rows)
        total = Mahalanobis.fit(TrainingFeatures(rows.values, torch.zeros_like(classes)))
        return cls(within.root, within.means, total.root, total.means)

    def of(self, z: Tensor) -> Tensor:
        within = Mahalanobis(self.root, self.means)
        total = Mahalanobis(self.total_root, self.total_mean)
        return within.of(z) - total.of(z)


@final
@dataclass(frozen=True, eq=False)
class NearestNeighbors(FeatureScore):
    """The distance of z/|z| to its k-th nearest neighbor among training rows (Sun et al. 2022).

    Features of one dimension are not divided by their norm, which would leave a sign. Of more than
    20,000 training rows a random choice is kept.

    Args:
        references: features of training rows, (N, D).
        neighbors: k, a whole number.
    """

    name = "knn"
    references: Tensor
    neighbors: Tensor

    @classmethod
    def fit(cls, rows: TrainingFeatures) -> NearestNeighbors:
        count = len(rows.values)
        if not 1 <= rows.neighbors <= count:
            raise ValueError(
                f"neighbors must lie between 1 and the {count} training rows, got {rows.neighbors}"
            )
        values = rows.values
        if count > MAX_REFERENCES:
            order = rng.permutation(count, rng.fold(rows.seed, "neighbors"))
            values = values[order[:MAX_REFERENCES].to(values.device)]
        return cls(cls._normalize(values), torch.tensor(rows.neighbors))

    @staticmethod
    def _normalize(z: Tensor) -> Tensor:
        """Return z/|z|."""
        return z if z.shape[1] == 1 else F.normalize(z, dim=1)

    def of(self, z: Tensor) -> Tensor:
        distances = torch.cdist(self._normalize(z), self.references)
        return distances.kthvalue(int(self.neighbors), dim=1).values


@final
@dataclass(frozen=True, eq=False)
class VirtualLogit(FeatureScore):
    """ViM: α·|P·(z − o)| − logsumexp_c(f_c), a virtual logit against the others (Wang et al. 2022).

    f = W·z + b is the last layer, o = −W⁺·b its origin, P the projection on all but the first ⌊D/2⌋
    eigenvectors of Σ (z − o)·(z − o)ᵀ, and α = Σ max_c f_c/Σ |P·(z − o)| over the training rows.

    Args:
        weight: W, (C, D).
        bias: b, (C,).
        origin: o, (D,).
        residual: orthonormal columns R with P = R·Rᵀ, (D, D − ⌊D/2⌋).
        scale: α.
    """

    name = "vim"
    weight: Tensor
    bias: Tensor
    origin: Tensor
    residual: Tensor
    scale: Tensor

    @classmethod
    def fit(cls, rows: TrainingFeatures) -> VirtualLogit:
        rows.require_classes(cls.name)
        weight = rows.weight
        size = rows.values.shape[1]
        if weight is None or size < 2 or len(weight) < 2:
            raise UnsupportedScore(
                "the score 'vim' needs features of two dimensions or more, of which the last layer "
                "makes a logit for each class; use 'energy' and 'mahalanobis'"
            )
        bias = rows.bias if rows.bias is not None else weight.new_zeros(len(weight))
        origin = -torch.linalg.pinv(weight) @ bias
        centered = rows.values - origin
        _, vectors = torch.linalg.eigh(centered.mT @ centered)  # in increasing order
        residual = vectors[:, : size - size // 2].contiguous()
        norms = (centered @ residual).norm(dim=1)
        if float(norms.mean()) <= MIN_RESIDUAL * float(centered.norm(dim=1).mean()):
            raise UnsupportedScore(
                f"the score 'vim' needs features that vary in more than {size // 2} of {size} "
                "directions, and those of the training rows do not; use 'energy' and 'mahalanobis'"
            )
        largest = F.linear(rows.values, weight, bias).amax(1)
        return cls(weight, bias, origin, residual, largest.mean() / norms.mean())

    def of(self, z: Tensor) -> Tensor:
        norms = ((z - self.origin) @ self.residual).norm(dim=1)
        return self.scale * norms - F.linear(z, self.weight, self.bias).logsumexp(1)


@final
@dataclass(frozen=True, eq=False)
class ClassDensity(FeatureScore):
    """−log Σ_c π_c·N(z; μ_c, Σ_c), a Gaussian for each class (DDU, Mukhoti et al. 2023).

    Of numbers y there is one Gaussian. Σ_c are those of ``shrunk_covariance``.

    Args:
        means: μ_c, (C, D).
        roots: L_c with Σ_c = L_c·L_cᵀ, (C, D, D).
        log_weights: log π_c, (C,).
    """

    name = "density"
    means: Tensor
    roots: Tensor
    log_weights: Tensor

    @classmethod
    def fit(cls, rows: TrainingFeatures) -> ClassDensity:
        z = rows.values
        classes = rows.classes
        if classes is None:
            classes = torch.zeros(len(z), dtype=torch.long, device=z.device)
        counts = classes.bincount()
        if int(counts.min()) < 2:
            raise UnsupportedScore(
                "the score 'density' needs two rows of each class at least; a class has one"
            )
        numbers = len(counts) * z.shape[1] ** 2
        if numbers > MAX_DENSITY_NUMBERS:
            raise UnsupportedScore(
                f"the score 'density' would have {len(counts)} covariances of {z.shape[1]} "
                "features, which is too much memory; use 'mahalanobis', which has one"
            )
        means = _class_means(z, classes)
        covariances = [
            shrunk_covariance(z[classes == label] - mean) for label, mean in enumerate(means)
        ]
        roots = torch.linalg.cholesky(torch.stack(covariances))
        return cls(means, roots, (counts.double() / len(z)).log())

    def of(self, z: Tensor) -> Tensor:
        constant = 0.5 * z.shape[1] * math.log(2 * math.pi)
        terms = []
        for mean, root, log_weight in zip(self.means, self.roots, self.log_weights, strict=True):
            squares = _whiten(root, z - mean).square().sum(1)
            log_det = root.diagonal().log().sum()
            terms.append(log_weight - 0.5 * squares - log_det - constant)
        return -torch.stack(terms, 1).logsumexp(1)

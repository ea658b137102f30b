r"""Two-dimensional densities to try a flow on: four unnormalized potentials and three data sets.

The potentials p̃(z) = exp(−U(z)) are table 1 of Rezende & Mohamed 2015, Variational Inference with
Normalizing Flows:

    U1 = ½((‖z‖ − 2)/0.4)² − log(exp(−½((z₁ − 2)/0.6)²) + exp(−½((z₁ + 2)/0.6)²))
    U2 = ½((z₂ − w₁)/0.4)²
    U3 = −log(exp(−½((z₂ − w₁)/0.35)²) + exp(−½((z₂ − w₁ + w₂)/0.35)²))
    U4 = −log(exp(−½((z₂ − w₁)/0.4)²) + exp(−½((z₂ − w₁ + w₃)/0.35)²))
    w₁ = sin(π z₁/2),  w₂ = 3 exp(−½((z₁ − 1)/0.6)²),  w₃ = 3 sigmoid((z₁ − 1)/0.3)

U2, U3 and U4 as printed do not fall off along z₁, so Z is infinite. The paper's figure shows |z₁| ≤
4; here a wall ½(max(|z₁| − 4, 0)/0.4)² is added, which leaves that window as it is and makes Z
finite and known in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bayou import rng

EDGE, WALL = 4.0, 0.4
_ROOT = math.sqrt(2 * math.pi)
_WIDTH = 2 * EDGE + _ROOT * WALL  # ∫ exp(−wall(z₁)) dz₁


def u1(z: Tensor) -> Tensor:
    """log p̃ = −U1(z), a ring with two heavy sides: (..., 2) → (...)."""
    ring = _energy(torch.linalg.vector_norm(z, dim=-1) - 2, 0.4)
    return torch.logaddexp(-_energy(z[..., 0] - 2, 0.6), -_energy(z[..., 0] + 2, 0.6)) - ring


def u2(z: Tensor) -> Tensor:
    """log p̃ = −U2(z) − wall, a sine wave: (..., 2) → (...)."""
    return -_energy(_height(z), 0.4) - _wall(z)


def u3(z: Tensor) -> Tensor:
    """log p̃ = −U3(z) − wall, a sine wave that splits and joins again: (..., 2) → (...)."""
    dip = 3 * torch.exp(-_energy(z[..., 0] - 1, 0.6))
    return torch.logaddexp(-_energy(_height(z), 0.35), -_energy(_height(z) + dip, 0.35)) - _wall(z)


def u4(z: Tensor) -> Tensor:
    """log p̃ = −U4(z) − wall, a sine wave that splits in two: (..., 2) → (...)."""
    drop = 3 * torch.sigmoid((z[..., 0] - 1) / 0.3)
    return torch.logaddexp(-_energy(_height(z), 0.4), -_energy(_height(z) + drop, 0.35)) - _wall(z)


def _energy(distance: Tensor, scale: float) -> Tensor:
    return 0.5 * (distance / scale).square()


def _height(z: Tensor) -> Tensor:
    return z[..., 1] - torch.sin(0.5 * math.pi * z[..., 0])


def _wall(z: Tensor) -> Tensor:
    return _energy((z[..., 0].abs() - EDGE).clamp_min(0), WALL)


@dataclass(frozen=True)
class Potential:
    """An unnormalized log-density and the logarithm of its integral."""

    name: str
    log_density: Callable[[Tensor], Tensor]
    log_z: float


POTENTIALS: dict[str, Potential] = {
    "u1": Potential("U1", u1, 1.877502),
    "u2": Potential("U2", u2, math.log(_ROOT * 0.4 * _WIDTH)),
    "u3": Potential("U3", u3, math.log(_ROOT * (0.35 + 0.35) * _WIDTH)),
    "u4": Potential("U4", u4, math.log(_ROOT * (0.4 + 0.35) * _WIDTH)),
}


def two_moons(
    n: int, noise: float = 0.08, seed: rng.Seed = 0, like: Tensor | None = None
) -> Tensor:
    """Two interleaving half circles of radius 1 around (±½, ±¼), blurred by Gaussian noise: (n,
    2).
    """
    like = _check(n, noise, like)
    u = rng.uniform(n, (2,), like, rng.fold(seed, "place"))
    angle, side = math.pi * u[:, 0], (u[:, 1] < 0.5).to(u) * 2 - 1
    arc = torch.stack([torch.cos(angle) - 0.5, torch.sin(angle) - 0.25], -1)
    return side[:, None] * arc + noise * rng.normal(n, (2,), like, rng.fold(seed, "noise"))


def rings(
    n: int, count: int = 3, noise: float = 0.08, seed: rng.Seed = 0, like: Tensor | None = None
) -> Tensor:
    """Concentric circles of radius 1, 2, ..., count, equally likely, blurred by Gaussian noise: (n,
    2).
    """
    like = _check(n, noise, like)
    if count < 1:
        raise ValueError(f"rings needs count ≥ 1, got {count}")
    u = rng.uniform(n, (2,), like, rng.fold(seed, "place"))
    angle, radius = 2 * math.pi * u[:, 0], 1 + (count * u[:, 1]).floor().clamp_max(count - 1)
    circle = torch.stack([torch.cos(angle), torch.sin(angle)], -1)
    return radius[:, None] * circle + noise * rng.normal(n, (2,), like, rng.fold(seed, "noise"))


def checkerboard(n: int, cells: int = 4, seed: rng.Seed = 0, like: Tensor | None = None) -> Tensor:
    """Uniform on the dark squares of a cells × cells board over [−4, 4]²: (n, 2). Its entropy is
    log 32.
    """
    like = _check(n, 0.0, like)
    if cells < 2 or cells % 2:
        raise ValueError(f"checkerboard needs an even number of cells, got {cells}")
    u = rng.uniform(n, (2,), like, rng.fold(seed, "place"))
    column = (cells * u[:, 0]).floor().clamp_max(cells - 1)
    pair = (cells // 2 * u[:, 1]).floor().clamp_max(cells // 2 - 1)
    row = 2 * pair + column % 2
    inside = rng.uniform(n, (2,), like, rng.fold(seed, "inside"))
    return (torch.stack([column, row], -1) + inside) * (8 / cells) - 4


SAMPLERS: dict[str, Callable[..., Tensor]] = {
    "two moons": two_moons,
    "rings": rings,
    "checkerboard": checkerboard,
}


def _check(n: int, noise: float, like: Tensor | None) -> Tensor:
    if n < 0:
        raise ValueError(f"cannot draw {n} points; pass zero or more")
    if not noise >= 0:
        raise ValueError(f"noise is a standard deviation, got {noise}; pass zero or more")
    return torch.zeros(()) if like is None else like

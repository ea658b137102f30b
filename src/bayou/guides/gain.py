"""q(z) of a random gain: a Gaussian or a mixture around 1, optionally transformed by a flow."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from bayou import flows
from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.flows import Label, Map
from bayou.flows.layers.coupling import can_couple_together, couple_together
from bayou.guides.factors import GaussianFactor
from bayou.guides.guide import Gain, GuideSpec
from bayou.guides.joint import FlowName, make_transform, push


class GainFlow(nn.Module):
    """q(z): z = c + s ⊙ L·T((z0 − c)/s), z0 from a learned Gaussian around 1 or a mixture.

    (c, s) is the Gaussian itself, (1, std) for a mixture: the flow T and the unit triangular L,
    which correlates all entries, act on standardized values, so that their effect scales with the
    spread of z. Without a flow z = z0.

    Args:
        dim: the number of entries of z.
        transform: T, or None.
        std: the initial standard deviation of z0.
        components: the number of Gaussians of q(z0).
        mixing: whether there is an L, for a flow that keeps the dimension.
    """

    lower: nn.Parameter | None

    def __init__(
        self, dim: int, transform: Map | None, std: float, components: int = 1, mixing: bool = False
    ) -> None:
        super().__init__()
        inner = dim if transform is None else transform.event_in[0] or dim  # None: any size
        self.std = std
        if components > 1:
            self.base: flows.Base = flows.GaussianMixture(inner, components, spread=std)
            with torch.no_grad():
                self.base.mean.add_(1.0)
                self.base.log_std.fill_(math.log(std))
        else:
            self.base = flows.DiagonalNormal(inner, mean=1.0, std=std)
        self.transform = transform
        self.label: Label = Label() if transform is None else transform.label
        self.square: bool = transform is not None and inner == dim
        self.lower = nn.Parameter(torch.zeros(dim, dim)) if self.square and mixing else None

    def frame(self) -> tuple[Tensor | float, Tensor | float]:
        """Return c and s; (0, 1) for a flow that changes the dimension."""
        if not self.square and self.transform is not None:
            return 0.0, 1.0
        base = self.base
        if isinstance(base, flows.DiagonalNormal):
            return base.mean, base.log_std.exp()
        return 1.0, self.std

    @property
    def locations(self) -> tuple[nn.Parameter, ...]:
        """Return the means of a mixture, in units of z: (K, D).

        There are none for a flow of another dimension, and for a Gaussian, which is a factor.
        """
        has_units_of_z = self.square or self.transform is None
        if not has_units_of_z or not isinstance(self.base, flows.GaussianMixture):
            return ()
        return (self.base.mean,)

    @property
    def factors(self) -> tuple[GaussianFactor, ...]:
        """Return q(z0), if it is a Gaussian."""
        if not isinstance(self.base, flows.DiagonalNormal):
            return ()
        return (GaussianFactor(self.base.mean, self.base.log_std),)

    def draw(self, n: int, seed: rng.Seed = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """Draw z (n, D), with log q(z) (n,).

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        z0 = self.base.draw(n, (), seed, start)
        z, ladj = self.push(z0, seed, start)
        return z, self.base.log_prob(z0) - ladj

    @property
    def is_standardized(self) -> bool:
        """Return whether z = c + s ⊙ L·T(ε) with ε ~ N(0, I), which ``gains_at_noise`` needs."""
        if self.transform is None or self.transform.takes_noise:
            return False
        return self.square and isinstance(self.base, flows.DiagonalNormal)

    def noise(self, n: int, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """Draw ε of a gain that ``is_standardized``: (n, D).

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        return rng.normal(n, self.base.event_shape, self.base.anchor, seed, start)

    def push(self, z0: Tensor, seed: rng.Seed = None, start: int = 0) -> tuple[Tensor, Tensor]:
        """Return z (n, D) at z0 (n, D), and log |∂z/∂z0| (n,).

        Args:
            z0: draws of the base distribution.
            seed: the seed of the flow's noise; None uses torch's global stream.
            start: the index of the first row.
        """
        if self.transform is None:
            return z0, z0.new_zeros(len(z0))
        center, std = self.frame()
        u, ladj = push(self.transform, (z0 - center) / std, seed, start)
        if self.lower is not None:
            u = u + u @ self.lower.tril(-1).mT
        return center + std * u, ladj

    def moments(self) -> tuple[Tensor, Tensor] | None:
        """Return E[z] and Var[z], (D,) each; None with a flow, which has no closed form."""
        if self.transform is not None:
            return None
        base = self.base
        if isinstance(base, flows.GaussianMixture):
            weights = base.logits.softmax(-1).unsqueeze(-1)
            mean = (weights * base.mean).sum(0)
            variance = (2 * base.log_std).exp() + (base.mean - mean).square()
            return mean, (weights * variance).sum(0)
        if isinstance(base, flows.DiagonalNormal):
            return base.mean, (2 * base.log_std).exp()
        return None

    def log_prob(self, z: Tensor) -> Tensor:
        """Compute log q(z) of any z (..., D): (...).

        It needs the inverse of the transform, which ``draw`` does not.

        Args:
            z: gains.
        """
        if self.transform is None:
            return self.base.log_prob(z)
        center, std = self.frame()
        u = (z - center) / std
        if self.lower is not None:
            flat = torch.linalg.solve_triangular(
                self.lower.mT, u.flatten(0, -2), upper=True, left=False, unitriangular=True
            )
            u = flat.reshape(u.shape)
        eps, ladj = push(self.transform, u, inverse=True)
        return self.base.log_prob(center + std * eps) + ladj


def gains_at_noise(
    gains: Sequence[GainFlow], noises: Sequence[Tensor]
) -> tuple[Sequence[Tensor], Tensor]:
    """Return z of G gains that are ``is_standardized``, and log q(z).

    All gains are one vector: an operation on small vectors takes as long for one as for many.

    Args:
        gains: the gains.
        noises: ε of each, (n, D) with the same n.

    Returns:
        z of each, (n, D), and log q(z) of all, (G, n).
    """
    sizes = [noise.shape[-1] for noise in noises]
    eps = torch.cat(list(noises), -1)
    bases = [gain.base for gain in gains if isinstance(gain.base, flows.DiagonalNormal)]
    center = torch.cat([base.mean for base in bases])
    log_std = torch.cat([base.log_std for base in bases])
    transforms = [gain.transform for gain in gains if gain.transform is not None]
    u, ladj = _transform_together(transforms, eps, sizes)
    if any(gain.lower is not None for gain in gains):
        pieces = [
            piece if gain.lower is None else piece.addmm(piece, gain.lower.tril(-1).mT)
            for gain, piece in zip(gains, u.split(sizes, -1), strict=True)
        ]
        u = torch.cat(pieces, -1)
    z = torch.addcmul(center, log_std.exp(), u)
    # ε does not depend on the parameters: log N(z0; c, s²) = log N(ε) − Σ log s
    log_base = -0.5 * (eps.square() + LOG_2PI) - log_std
    return z.split(sizes, -1), sum_pieces(log_base, sizes) - ladj


def sum_pieces(x: Tensor, sizes: Sequence[int]) -> Tensor:
    """Sum the pieces of vectors: (..., ΣD) to (G, ...).

    Args:
        x: the vectors.
        sizes: D of each of the G pieces.
    """
    return torch.stack([piece.sum(-1) for piece in x.split(list(sizes), -1)])


def _transform_together(
    transforms: Sequence[Map], x: Tensor, sizes: list[int]
) -> tuple[Tensor, Tensor]:
    """Apply a transform to each of the vectors in x, (n, ΣD), with the ladj of each, (G, n)."""
    if len(transforms) == 1:
        y, ladj_of_one = push(transforms[0], x)
        return y, ladj_of_one.unsqueeze(0)
    chains = [t.transforms if isinstance(t, flows.Chain) else [t] for t in transforms]
    is_alike = len({len(chain) for chain in chains}) == 1
    if is_alike and all(can_couple_together(links) for links in zip(*chains, strict=True)):
        ladj: Tensor | float = 0.0
        for links in zip(*chains, strict=True):
            x, term = couple_together(links, x)
            ladj = ladj + term
        return x, ladj  # type: ignore[return-value]
    pairs = [push(t, part) for t, part in zip(transforms, x.split(sizes, -1), strict=True)]
    return torch.cat([y for y, _ in pairs], -1), torch.stack([term for _, term in pairs])


class GainSpec(GuideSpec):
    """Settings of q(z) that families with gains share.

    Args:
        flow: a name of ``flows.registry("vector")``, a callable dim → Map, or None.
        options: keyword arguments of a flow by name.
        z_std: the initial standard deviation of z.
        components: the number of Gaussians of q(z0).
        mixing: the maximum number of entries that a triangular map correlates.
    """

    flow: FlowName
    options: dict[str, Any]
    z_std: float
    components: int
    mixing: int

    def make_gain(self, weight: Tensor, axis: int) -> GainFlow:
        """Make q(z) for a gain along one axis of a weight.

        A coupling needs two entries, so a single one has a sigmoidal flow instead.

        Args:
            weight: the weight.
            axis: the axis of the gain.
        """
        dim = weight.shape[axis]
        if dim == 1 and isinstance(self.flow, str):
            transform: Map | None = flows.naf(1, layers=1)
        else:
            transform = make_transform(self.flow, dim, self.options)
        has_mixing = 1 < dim <= self.mixing
        return GainFlow(dim, transform, self.z_std, self.components, has_mixing).to(weight)


def product_moments(center: Tensor, gains: Mapping[int, GainFlow]) -> tuple[Tensor, Tensor] | None:
    """Compute mean and variance of M ⊙ z_1 ⊙ z_2 .. for independent gains; None with a flow.

    E[XY] = E[X]·E[Y], Var[XY] = Var[X]·(Var[Y] + E[Y]²) + E[X]²·Var[Y].

    Args:
        center: M.
        gains: the gains by axis of M.
    """
    mean = center
    variance = torch.zeros_like(center)
    for axis, gain in gains.items():
        moments = gain.moments()
        if moments is None:
            return None
        gain_mean, gain_variance = (Gain(axis, moment).on(center)[0] for moment in moments)
        variance = variance * (gain_variance + gain_mean.square()) + mean.square() * gain_variance
        mean = mean * gain_mean
    return mean, variance

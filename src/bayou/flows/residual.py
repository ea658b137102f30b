"""Residual flows: y = x + g(x) with a g that contracts (Behrmann et al. 2019; Chen et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.nn.functional import linear, sigmoid, softplus

from bayou.flows.compose import Chain
from bayou.flows.linear import positive, wide
from bayou.flows.transform import Cost, InversionError, Ladj, Pair, Rows, Transform, known

Determinant = Literal["exact", "roulette"]
FEW = 8  # dimensions up to which the Jacobian is written out
ORDER = 7  # squarings: the Schatten norm of order 2·2⁷ is within d^(1/256) of the largest singular value
SWISH = 1.0998393  # the largest slope of x·sigmoid(x)


class LipSwish(nn.Module):
    """x·sigmoid(β·x)/1.1, with slopes in [−1, 1] for every β > 0, which is learned (Chen et al. 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = nn.Parameter(torch.tensor(math.log(math.expm1(1.0))))

    def forward(self, x: Tensor) -> Tensor:
        return x * sigmoid(softplus(self.raw) * x) / SWISH


class Contracting(nn.Linear):
    """x·Wᵀ·min(1, L/‖W‖) + b: its Lipschitz constant is L at most.

    ‖W‖ is the Schatten norm (Σ σ^256)^(1/256), which is never below the largest singular value σ and above it by a
    factor d^(1/256) at most, 1.6 % for d = 64. Power iteration is cheaper for large layers, but under-estimates, and
    then nothing contracts for sure.
    """

    def __init__(self, inputs: int, outputs: int, lipschitz: float) -> None:
        super().__init__(inputs, outputs)
        self.lipschitz = lipschitz

    def forward(self, x: Tensor) -> Tensor:
        scale = (self.lipschitz / schatten(self.weight)).clamp_max(1.0)
        return linear(x, self.weight * scale.to(self.weight.dtype), self.bias)


def schatten(weight: Tensor) -> Tensor:
    """(Σ σ_i^p)^(1/p), p = 2^(ORDER + 1), of the singular values of a matrix: never below the largest."""
    w = wide(weight)
    gram = w @ w.mT if w.shape[-2] <= w.shape[-1] else w.mT @ w
    log_norm = gram.new_zeros(())
    for i in range(ORDER + 1):
        trace = gram.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(torch.finfo(gram.dtype).tiny)
        log_norm = log_norm + trace.log() / 2 ** (i + 1)
        gram = gram / trace[..., None, None]
        if i < ORDER:
            gram = gram @ gram
    return log_norm.exp()


def contracting_mlp(dim: int, hidden: Sequence[int], lipschitz: float) -> nn.Sequential:
    """A network of z with Lipschitz constant ``lipschitz`` at most, shared out evenly among its layers."""
    each = lipschitz ** (1 / (len(hidden) + 1))
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([dim, *hidden]):
        layers += [Contracting(fan_in, fan_out, each), LipSwish()]
    return nn.Sequential(*layers, Contracting([dim, *hidden][-1], dim, each))


class Residual(Transform):
    r"""y = x + g(x), ‖∂g/∂x‖ ≤ L < 1, with ladj = log det(I + J) = Σ_k (−1)^{k+1} tr J^k / k.

    ``determinant`` "exact" writes J out, for few dimensions; "roulette" draws how many terms of the series count for a
    row, N ~ geometric(1 − L), and weighs term k by 1/P(N ≥ k) = L^{1−k}: unbiased, with a variance that is finite for
    this rate (for a Poisson it never is). Its gradient is that of one product of J, drawn likewise, so that memory does
    not grow with N (Chen et al. 2019). The inverse is a fixed point, x ← y − g(x); where it misses its tolerance that
    is an ``InversionError``.
    """

    inverse_kind = Cost.iterative

    def __init__(self, dim: int, g: nn.Module, lipschitz: float, determinant: Determinant | None = None) -> None:
        super().__init__()
        if not 0 < lipschitz < 1:
            raise ValueError(f"a residual flow needs a Lipschitz constant between 0 and 1, got {lipschitz}")
        if determinant not in (None, "exact", "roulette"):
            raise ValueError(f'determinant must be "exact" or "roulette", got {determinant!r}')
        self.event_shape = (positive(dim, "the dimension"),)
        self.g, self.lipschitz = g, lipschitz
        self.exact = dim <= FEW if determinant is None else determinant == "exact"
        self.takes_noise = not self.exact
        self.ladj_kind = Ladj.exact if self.exact else Ladj.estimate

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        dim = self.event_shape[0]
        probe = torch.where(rows.uniform(dim) < 0.5, -1.0, 1.0).to(rows.like)  # type: ignore[arg-type]
        return probe, rows.fold("terms").uniform()

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Tensor) -> Pair:
        value, ladj = self._term(x, *noise)
        return x + value, ladj

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Tensor) -> Pair:
        with torch.no_grad():
            x = self._solved(y)
        x = self._attached(x, y)
        return x, -self._term(x, *noise)[1]

    def _solved(self, y: Tensor) -> Tensor:
        """x with x + g(x) = y, to a few units in the last place."""
        eps = torch.finfo(y.dtype).eps
        limit = 8 * eps * (1 + y.abs().amax(-1, keepdim=True))
        most = math.ceil(math.log(eps / 4) / math.log(self.lipschitz)) + 8
        x = y
        for _ in range(most):
            step = y - self.g(x) - x
            x = x + step
            if known((step.abs() <= limit).all()):
                break
        else:
            gap = (y - self.g(x) - x).abs()
            if known((gap <= 64 * limit).all()) is False:
                raise InversionError(
                    f"x + g(x) = y was not found in {most} steps, off by {gap.max().item():.1e}: g does not contract "
                    f"by {self.lipschitz:g}; use layers that do (Contracting, LipSwish)"
                )
        return x

    def _attached(self, x: Tensor, y: Tensor) -> Tensor:
        """x with the gradient of the implicit function: dx = (I + J)⁻¹·(dy − dg)."""
        if not torch.is_grad_enabled():
            return x
        residual = y - x - self.g(x)  # 0, with the gradient of dy − dg at a fixed x
        if self.exact:
            jacobian = self._jacobian(x).detach()
            eye = torch.eye(x.shape[-1], dtype=wide(x).dtype, device=x.device)
            return x + torch.linalg.solve(eye + wide(jacobian), wide(residual).unsqueeze(-1)).squeeze(-1).to(x.dtype)
        return x + Neumann.apply(residual, self, x)  # type: ignore[no-untyped-call]

    def _jacobian(self, x: Tensor) -> Tensor:
        """∂g/∂x of every row: (..., D, D)."""
        dim = x.shape[-1]
        _, pull = vjp(self.g, x)  # type: ignore[misc]
        basis = torch.eye(dim, dtype=x.dtype, device=x.device).reshape(dim, *[1] * (x.ndim - 1), dim)
        return vmap(pull)(basis.expand(dim, *x.shape))[0].movedim(0, -2)

    def _term(self, x: Tensor, *noise: Tensor) -> Pair:
        """g(x) and log det(I + J)."""
        if self.exact:
            eye = torch.eye(x.shape[-1], dtype=wide(x).dtype, device=x.device)
            return self.g(x), torch.linalg.slogdet(eye + wide(self._jacobian(x)))[1].to(x.dtype)
        probe, u = noise
        x = x.expand(torch.broadcast_shapes(x.shape, probe.shape))
        # P(N ≥ k) = L^(k − 1): N = 1 + ⌊log u / log L⌋
        count = 1 + (u.clamp_min(torch.finfo(u.dtype).tiny).log() / math.log(self.lipschitz)).floor()
        value, pull = vjp(self.g, x)  # type: ignore[misc]
        with torch.no_grad():
            _, plain = vjp(self.g, x.detach())  # type: ignore[misc]
            term, series, slope = probe, x.new_zeros(x.shape[:-1]), probe  # Σ (−1)^k (Jᵀ)^k ε / P(N ≥ k)
            for k in range(1, (int(count.max()) if count.numel() else 0) + 1):
                term = plain(term)[0]
                weight = (count >= k) * (-1.0) ** (k + 1) * self.lipschitz ** (1 - k)
                series = series + weight / k * (term * probe).sum(-1)
                slope = slope - weight.unsqueeze(-1) * term
        surrogate = (pull(slope)[0] * probe).sum(-1)
        return value, series + surrogate - surrogate.detach()


class Neumann(torch.autograd.Function):
    """The identity, whose gradient u is multiplied by (I + Jᵀ)⁻¹: v ← u − Jᵀ·v until it stands still."""

    @staticmethod
    def forward(ctx: Any, residual: Tensor, flow: Residual, x: Tensor) -> Tensor:
        ctx.flow, ctx.x = flow, x
        return residual.clone()

    @staticmethod
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None, None]:
        with torch.no_grad():
            _, pull = vjp(ctx.flow.g, ctx.x)  # type: ignore[misc]
            v = u
            for _ in range(math.ceil(math.log(torch.finfo(u.dtype).eps) / math.log(ctx.flow.lipschitz)) + 1):
                new = u - pull(v)[0]
                if bool(((new - v).abs() <= torch.finfo(u.dtype).eps * (1 + new.abs())).all()):
                    break
                v = new
        return v, None, None


def residual(
    dim: int,
    layers: int = 4,
    hidden: Sequence[int] = (64, 64),
    lipschitz: float = 0.9,
    determinant: Determinant | None = None,
) -> Chain:
    """A stack of residual flows whose networks contract by ``lipschitz`` (Chen et al. 2019)."""
    positive(dim, "the dimension")
    return Chain(
        *(
            Residual(dim, contracting_mlp(dim, hidden, lipschitz), lipschitz, determinant)
            for _ in range(positive(layers, "the number of layers"))
        )
    )

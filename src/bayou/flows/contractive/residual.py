"""Residual flows: y = x + g(x) with a contractive g (Behrmann et al. 2019; Chen et al. 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call, vjp, vmap

from bayou.core import rng
from bayou.flows.contractive.contracting import FixedNet, Pullback, contracting_cnn, contracting_mlp
from bayou.flows.core.arguments import as_event, check_size, promote
from bayou.flows.core.compose import Chain
from bayou.flows.core.implicit import Equation, attach_solution, with_derivatives
from bayou.flows.core.transform import (
    Cost,
    InversionError,
    Ladj,
    Pair,
    Rows,
    Transform,
    is_recorded,
    read_flag,
    sum_event,
)

Determinant = Literal["exact", "roulette"]
MAX_EXACT_DIM = 16  # dimensions up to which the exact Jacobian costs no more than roulette
UNROLLED_NEWTON_STEPS = (
    16  # in the inverse where convergence cannot be tested (compiled or recorded)
)


class Residual(Transform):
    r"""y = x + g(x), ‖∂g/∂x‖ ≤ L < 1, with ladj = log det(I + J) = Σ_k (−1)^{k+1} tr J^k / k.

    The roulette estimator draws the number of terms of the series for every row, N ~ geometric(1 −
    L), and weights term k by 1/P(N ≥ k) = L^{1−k}: unbiased, with finite variance (which a Poisson
    N does not have). Its gradient is that of a single product with J, so that memory does not grow
    with N (Chen et al. 2019). The inverse is the fixed point of x ← y − g(x), found by Newton's
    method if J is explicit.

    Args:
        event: the size of a vector, or the shape of an event.
        g: a network from events to events with Lipschitz constant at most ``lipschitz``; if it has
            a method ``fixed()``, as those of ``residual``, its norms are computed once per pass.
        lipschitz: L.
        determinant: "exact" computes the whole Jacobian, "roulette" estimates the series; by
            default exact up to 16 dimensions.

    Shapes: x, y (..., \*event), ladj (...).

    Raises:
        InversionError: if the inverse does not reach its tolerance, or g is found not to be
            contractive.
    """

    inverse_kind = Cost.iterative

    def __init__(
        self,
        event: int | Sequence[int],
        g: nn.Module,
        lipschitz: float,
        determinant: Determinant | None = None,
    ) -> None:
        super().__init__()
        if not 0 < lipschitz < 1:
            raise ValueError(
                f"a residual flow needs a Lipschitz constant between 0 and 1, got {lipschitz}"
            )
        if determinant not in (None, "exact", "roulette"):
            raise ValueError(f'determinant must be "exact" or "roulette", got {determinant!r}')
        self.event_shape = shape = as_event(event, "the dimension")
        self.g, self.lipschitz = g, lipschitz
        self.exact = (
            math.prod(shape) <= MAX_EXACT_DIM if determinant is None else determinant == "exact"
        )
        self.takes_noise = not self.exact
        self.recordable = self.exact  # the number of rows in the series varies
        self.ladj_kind = Ladj.exact if self.exact else Ladj.estimate

    @torch.no_grad()
    def jacobian_norm(self, x: Tensor, iterations: int = 30) -> Tensor:
        r"""‖∂g/∂x‖ at the rows of x (..., \*event): (...). By power iteration, a lower bound; L is
        an upper bound.
        """
        _, pull = self._fixed().pullback(x)
        v = rng.normal(1, x.shape, x, 0)[0]
        axes, tiny = tuple(range(-len(self.event_shape), 0)), torch.finfo(x.dtype).tiny
        for _ in range(iterations):
            v = v / torch.linalg.vector_norm(v, dim=axes, keepdim=True).clamp_min(tiny)
            u = pull(v)  # Jᵀv, linear in v: its own product is J·u
            v = vjp(pull, v)[1](u)[0]
        return torch.linalg.vector_norm(u, dim=axes)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        probe = torch.where(rows.uniform(*self.event_shape) < 0.5, -1.0, 1.0).to(rows.like)  # type: ignore[arg-type]
        terms = rows.fold("terms").uniform()
        return probe, terms if terms.is_meta or is_recorded(
            terms
        ) else terms.cpu()  # Python sorts the rows by it

    def _fixed(self) -> Net:
        """g with norms computed once, for one pass, as a function of explicit tensors."""
        if not hasattr(self.g, "fixed"):
            return ModuleNet(self.g, dict(self.g.named_parameters()))
        fixed: Net = self.g.fixed()  # type: ignore[operator]
        return fixed

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Tensor) -> Pair:
        if not x.numel():
            return x, sum_event(x, len(self.event_shape))
        value, ladj = self._term(self._fixed(), x, *noise)
        return x + value, ladj

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Tensor) -> Pair:
        if not y.numel():
            return y, sum_event(y, len(self.event_shape))
        g = self._fixed()
        with torch.no_grad():
            x = self._fixed_point(g, y)
        x = self._with_gradient(g, x, y)
        return x, -self._term(g, x, *noise)[1]

    def _flat(self, x: Tensor) -> Tensor:
        return x.flatten(-len(self.event_shape))

    def _fixed_point(self, g: Net, y: Tensor) -> Tensor:
        """x with x + g(x) = y, to a few units in the last place."""
        eps = torch.finfo(y.dtype).eps
        size = self._flat(y).abs().amax(-1)
        limit = 8 * eps * (1 + size.reshape(*size.shape, *[1] * len(self.event_shape)))
        most = math.ceil(math.log(eps / 4) / math.log(self.lipschitz)) + 8
        if self.exact and read_flag(limit.isfinite().all()) is None:
            most = UNROLLED_NEWTON_STEPS
        x, step = y, -g(y)
        x, gap = x + step, g(y) - g(x + step)
        self._check_contraction(gap, step, limit)
        for _ in range(most):
            if read_flag((gap.abs() <= limit).all()):
                break
            if self.exact:
                x, gap = self._newton(g, x, y, gap)
            else:
                x = x + gap
                gap = y - g(x) - x
        found = (
            (gap.abs() <= 64 * limit * self._tolerance_factor(y))
            .flatten(-len(self.event_shape))
            .all(-1)
        )
        if read_flag(found.all()) is False:
            raise InversionError(
                f"x + g(x) = y did not converge in {most} steps, with a residual of {gap.abs().max().item():.1e}: the "
                f"Lipschitz constant of g is above {self.lipschitz:g}; use Contracting, ContractingConv, LipSwish"
            )
        return torch.where(found.reshape(limit.shape), x, torch.nan)

    def _tolerance_factor(self, x: Tensor) -> float:
        """A larger tolerance for convolutions that round their inputs to 11 bits, on a GPU in
        float32.
        """
        rounds = x.is_cuda and x.dtype == torch.float32 and len(self.event_shape) == 3
        return 2.0**-10 / (64 * 8 * torch.finfo(x.dtype).eps) if rounds else 1.0

    def _check_contraction(self, gap: Tensor, step: Tensor, limit: Tensor) -> None:
        """Raise unless |g(x₁) − g(x₀)| ≤ L·|x₁ − x₀| in the first step; Newton's method may
        converge without it.
        """
        far, near = (
            torch.linalg.vector_norm(self._flat(promote(part)), dim=-1) for part in (step, gap)
        )
        slack = (
            64
            * self._tolerance_factor(step)
            * self._flat(limit).amax(-1)
            * math.sqrt(self._flat(step).shape[-1])
        )
        if read_flag((near <= self.lipschitz * far + slack).all()) is False:
            raise InversionError(
                f"the Lipschitz constant of g is above {self.lipschitz:g}: it increased the distance of two points "
                f"{(near / far).nan_to_num().max().item():.3g} times; use Contracting, ContractingConv, LipSwish"
            )

    def _newton(self, g: Net, x: Tensor, y: Tensor, gap: Tensor) -> Pair:
        """x ← x + (I + J)⁻¹·gap, or x + gap where that step does not reduce |gap| by the factor
        L.
        """
        _, jacobian = self._jacobian(g, x)
        step = _solve(jacobian, self._flat(gap)).reshape(x.shape)
        new = y - g(x + step) - (x + step)
        worse = self._flat(new).square().sum(-1) > self.lipschitz**2 * self._flat(gap).square().sum(
            -1
        )
        worse = worse.reshape(*worse.shape, *[1] * len(self.event_shape))
        if read_flag(worse.any()) is False:
            return x + step, new
        x = x + torch.where(worse, gap, step)
        return x, y - g(x) - x

    def _with_gradient(self, g: Net, x: Tensor, y: Tensor) -> Tensor:
        """Return x with its implicit derivatives, dx = (I + J)⁻¹·(dy − dg)."""
        if self.exact:
            return attach_solution(_FixedPoint(self, g), x, y, *g.tensors())

        def pull(
            value: Tensor, gradient: Tensor, y: Tensor, *tensors: Tensor
        ) -> tuple[Tensor, ...]:
            _, pull_g = g.with_tensors(tensors).pullback(value)
            solved = _solve_transposed(pull_g, gradient, self.lipschitz)
            linear: Any = vjp(lambda y, *values: y - g.with_tensors(values)(value), y, *tensors)
            gradients: tuple[Tensor, ...] = linear[1](solved)
            return gradients

        first = x
        if torch.is_grad_enabled():
            residual = y - x - g(x)  # 0, with the gradient of dy − dg at a fixed x
            first = x + Neumann.apply(residual, g, x, self.lipschitz)  # type: ignore[no-untyped-call]
        return with_derivatives(first, pull, y, *g.tensors())

    def _jacobian(self, g: Net, x: Tensor) -> Pair:
        """g(x), and ∂g/∂x of every row: (..., D, D)."""
        dims = len(self.event_shape)
        event, size = x.shape[x.ndim - dims :], math.prod(x.shape[x.ndim - dims :])
        value, pull = g.pullback(x)
        basis = torch.eye(size, dtype=x.dtype, device=x.device).reshape(
            size, *[1] * (x.ndim - dims), *event
        )
        return value, self._flat(pull(basis.expand(size, *x.shape))).movedim(0, -2)

    def _term(self, g: Net, x: Tensor, *noise: Tensor) -> Pair:
        """g(x) and log det(I + J)."""
        if self.exact:
            value, jacobian = self._jacobian(g, x)
            return value, torch.linalg.slogdet(_plus_eye(jacobian))[1].to(x.dtype)
        probe, u = noise
        dims = len(self.event_shape)
        shape = torch.broadcast_shapes(x.shape, probe.shape)
        batch, event = shape[: len(shape) - dims], shape[len(shape) - dims :]
        x, probe = (part.expand(shape).reshape(-1, *event) for part in (x, probe))
        # P(N ≥ k) = L^(k − 1): N = 1 + ⌊log u / log L⌋
        count = (
            1 + (u.clamp_min(torch.finfo(u.dtype).tiny).log() / math.log(self.lipschitz)).floor()
        )
        value, pull = g.pullback(x)
        with torch.no_grad():
            series, slope = self._roulette(pull, probe, count.expand(batch).flatten())
        if torch.is_grad_enabled():
            surrogate = sum_event(pull(slope) * probe, dims)
            series = series + surrogate - surrogate.detach()
        rows = count.expand(batch).flatten()
        series = with_derivatives(
            series, partial(self._pull_series, g), probe, rows, x, *g.tensors()
        )
        return value.reshape(shape), series.reshape(batch)

    def _pull_series(
        self,
        g: Net,
        _: Tensor,
        gradient: Tensor,
        probe: Tensor,
        count: Tensor,
        x: Tensor,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of the roulette estimate in (probe, count, x, tensors of g), as
        functions of them.
        """
        _, pull = g.with_tensors(tensors).pullback(x)
        _, slope = self._masked_series(pull, probe, count)

        def surrogate(x: Tensor, *tensors: Tensor) -> Tensor:
            _, pull = g.with_tensors(tensors).pullback(x)
            return sum_event(pull(slope) * probe, probe.ndim - 1)

        gradients = vjp(surrogate, x, *tensors)[1](gradient)
        return torch.zeros_like(probe), torch.zeros_like(count), *gradients

    def _most_terms(self, count: Tensor) -> int:
        """Return a bound of the number of terms of any row."""
        if read_flag(count.isfinite().all()) is not None:
            return int(count.max())
        return math.ceil(1 + math.log(torch.finfo(count.dtype).eps / 2) / math.log(self.lipschitz))

    def _masked_series(self, pull: Pull, probe: Tensor, count: Tensor) -> Pair:
        """Return the sums of ``_roulette``, where all rows take part in all terms."""
        dims = probe.ndim - 1
        term = probe
        total = torch.zeros_like(probe)
        slope = probe
        for k in range(self._most_terms(count)):
            weight = (-self.lipschitz) ** -k
            term = pull(term) * (count.to(probe) > k).reshape(-1, *[1] * dims)
            total = total + weight / (k + 1) * term
            slope = slope - weight * term
        return sum_event(total * probe, dims), slope

    def _roulette(self, pull: Pull, probe: Tensor, count: Tensor) -> Pair:
        """Σ_k ±εᵀJᵏε/(k·P(N ≥ k)) up to the count of every row, and Σ_k ±(Jᵀ)ᵏε/P(N ≥ k) for the
        gradient.

        Rows are sorted by their count, and finished ones are dropped, down to powers of two, since
        kernels of a GPU are tuned for every new size.
        """
        if read_flag(count.isfinite().all()) is None:
            return self._masked_series(pull, probe, count)
        dims = probe.ndim - 1
        left = (len(count) - count.long().bincount().cumsum(0)).tolist()[
            :-1
        ]  # rows with N > k for k = 0, 1, ...
        weights = [(-self.lipschitz) ** -k for k in range(len(left))]
        order = count.argsort(descending=True)
        back, order = order.argsort().to(probe.device), order.to(probe.device)
        pull, probe = pull.rows(order), probe[order]
        term = pull(probe)
        total, slope = term.clone(), probe - term
        for k, weight in enumerate(weights[1:], 1):
            now, rows = left[k], 1 << (left[k] - 1).bit_length()
            if rows < len(term):
                pull, term = pull.rows(slice(rows)), term[:rows]
            term = pull(term)
            total[:now].add_(term[:now], alpha=weight / (k + 1))
            slope[:now].sub_(term[:now], alpha=weight)
        return sum_event(total * probe, dims)[back], slope[back]


@dataclass(frozen=True)
class _FixedPoint(Equation):
    """x + g(x) − y = 0, for the tensors y and those of g."""

    layer: Residual
    g: Net

    def linearize(self, x: Tensor, *theta: Tensor) -> Pair:
        y, *tensors = theta
        value, jacobian = self.layer._jacobian(self.g.with_tensors(tensors), x)
        return x + value - y, jacobian

    def solve(self, derivative: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
        jacobian = derivative.mT if transposed else derivative
        return _solve(jacobian, self.layer._flat(right)).reshape(right.shape)


@dataclass(frozen=True)
class Vjp:
    """The product with the Jacobian of any g, by autograd."""

    g: Callable[[Tensor], Tensor]
    x: Tensor
    product: Callable[[Tensor], tuple[Tensor, ...]]

    def __call__(self, u: Tensor) -> Tensor:
        found: Tensor = self.product(u)[0] if u.ndim == self.x.ndim else vmap(self.product)(u)[0]
        return found

    def rows(self, which: Tensor | slice) -> Pull:
        """The product at some of the rows of x, without gradients, by a new pass of g."""
        return pullback(self.g, self.x.detach()[which])[1]


@dataclass(frozen=True)
class ModuleNet:
    """Any network as a function of its parameters."""

    module: nn.Module
    parameters: dict[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        value: Tensor = functional_call(self.module, self.parameters, (x,))
        return value

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the network is a function of."""
        return list(self.parameters.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> ModuleNet:
        """Return the network with other values of its ``tensors``."""
        return ModuleNet(self.module, dict(zip(self.parameters, tensors, strict=True)))

    def pullback(self, x: Tensor) -> tuple[Tensor, Pull]:
        """Return g(x), and the product with its Jacobian."""
        return pullback(self, x)


Net = FixedNet | ModuleNet
Pull = Pullback | Vjp  # u ↦ uᵀ ∂g/∂x for u with any additional leading dimensions


def pullback(g: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Pull]:
    """Return g(x), and the product with its Jacobian, by autograd."""
    result: Any = vjp(g, x)
    return result[0], Vjp(g, x, result[1])


def _plus_eye(jacobian: Tensor) -> Tensor:
    jacobian = promote(jacobian)
    return torch.eye(jacobian.shape[-1], dtype=jacobian.dtype, device=jacobian.device) + jacobian


def _solve(jacobian: Tensor, right: Tensor) -> Tensor:
    """(I + J)⁻¹·right for rows (..., D)."""
    return (
        torch.linalg.solve(_plus_eye(jacobian), promote(right).unsqueeze(-1))
        .squeeze(-1)
        .to(right.dtype)
    )


class Neumann(torch.autograd.Function):
    """The identity, whose gradient u is multiplied by (I + Jᵀ)⁻¹, without a graph for second
    derivatives.
    """

    @staticmethod
    def forward(ctx: Any, residual: Tensor, g: Net, x: Tensor, lipschitz: float) -> Tensor:
        ctx.g, ctx.x, ctx.lipschitz = g, x, lipschitz
        return residual.clone()

    @staticmethod
    @torch.no_grad()
    def backward(ctx: Any, u: Tensor) -> tuple[Tensor, None, None, None]:
        _, pull = ctx.g.pullback(ctx.x)
        return _solve_transposed(pull, u, ctx.lipschitz), None, None, None


def _solve_transposed(pull: Pull, u: Tensor, lipschitz: float) -> Tensor:
    """Return v = (I + Jᵀ)⁻¹·u, by v ← u − Jᵀ·v until it converges."""
    eps = torch.finfo(u.dtype).eps
    v = u
    for _ in range(math.ceil(math.log(eps) / math.log(lipschitz)) + 1):
        new = u - pull(v)
        if read_flag(((new - v).abs() <= eps * (1 + new.abs())).all()):
            break
        v = new
    return v


def residual(
    event: int | Sequence[int],
    layers: int = 4,
    hidden: Sequence[int] = (64, 64),
    lipschitz: float = 0.9,
    determinant: Determinant | None = None,
) -> Chain:
    """A stack of residual flows with contractive networks (Chen et al. 2019).

    Args:
        event: a dimension, or the shape (C, H, W) of images. For images the networks are
            convolutions, in turn on pixels and on blocks of 2×2 and 4×4 pixels, if these divide the
            image.
        layers: the number of flows.
        hidden: units, or channels, of the hidden layers.
        lipschitz: the Lipschitz constant of the networks.
        determinant: as for ``Residual``.
    """
    if not isinstance(event, int) and len(event) != 3:
        raise ValueError(
            f"residual takes a dimension, or the shape (C, H, W) of images, got {tuple(event)}"
        )
    check_size(event if isinstance(event, int) else min(event), "the dimension")
    made: list[Residual] = []
    for i in range(check_size(layers, "the number of layers")):
        if isinstance(event, int):
            g = contracting_mlp(event, hidden, lipschitz)
        else:
            channels, height, width = event
            squares = [s for s in (1, 2, 4) if height % s == 0 and width % s == 0]
            g = contracting_cnn(channels, hidden, lipschitz, squares[i % len(squares)])
        made.append(Residual(event, g, lipschitz, determinant))
    return Chain(*made)

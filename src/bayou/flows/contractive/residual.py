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
from bayou.flows.contractive.contracting import (
    ContractingNet,
    FrozenNet,
    Pullback,
    contracting_cnn,
    contracting_mlp,
)
from bayou.flows.core.arguments import as_event, check_size, promote
from bayou.flows.core.compose import Chain
from bayou.flows.core.implicit import Equation, attach_solution, with_derivatives
from bayou.flows.core.transform import (
    Cost,
    Event,
    InversionError,
    Ladj,
    Pair,
    Rows,
    Transform,
    batch_shape,
    is_recorded,
    read_flag,
    sum_event,
)

Determinant = Literal["exact", "roulette"]

MAX_EXACT_DIM = 16  # up to which the exact Jacobian costs no more than roulette
UNROLLED_NEWTON_STEPS = 16  # where convergence cannot be tested (compiled or recorded)
EXTRA_FIXED_POINT_STEPS = 8  # beyond those that a contraction by L needs
GAP_TOLERANCE = 8  # of |y − g(x) − x| at which the iteration stops, in units of the last place
MAX_GAP_FACTOR = 64  # of a solution, in multiples of that tolerance
IMAGE_BLOCKS = (1, 2, 4)  # sizes of the blocks of pixels that the networks of images read in turn
REMEDY = "use Contracting, ContractingConv, LipSwish"


class Residual(Transform):
    r"""A residual flow, y = x + g(x) with ‖∂g/∂x‖ ≤ L < 1.

    ladj = log det(I + J) = Σ_k (−1)^{k+1} tr J^k / k with J = ∂g/∂x. The roulette estimator draws
    the number of terms of the series for every row, N ~ geometric(1 − L), and weights term k by
    1/P(N ≥ k) = L^{1−k}: unbiased, with finite variance (which a Poisson N does not have). Its
    gradient is that of a single product with J, so that memory does not grow with N (Chen et al.
    2019). The inverse is the fixed point of x ← y − g(x), found by Newton's method if J is
    explicit.

    Args:
        event: the size of a vector, or the shape of an event.
        g: a network from events to events with Lipschitz constant at most ``lipschitz``. Of the
            networks of ``residual``, norms are computed once per pass.
        lipschitz: L.
        determinant: "exact" computes the whole Jacobian, "roulette" estimates the series; by
            default exact up to 16 dimensions.

    Shapes: x, y (..., \*event), ladj (...).

    Raises:
        InversionError: if the inverse does not reach its tolerance, or g is found not to be
            contractive.

    Example:
        >>> import torch
        >>> from bayou.flows import Contracting, LipSwish, Residual
        >>> g = torch.nn.Sequential(Contracting(2, 8, 0.9), LipSwish(), Contracting(8, 2, 0.9))
        >>> y, ladj = Residual(2, g, lipschitz=0.81)(torch.zeros(10, 2))
        >>> y.shape, ladj.shape
        (torch.Size([10, 2]), torch.Size([10]))
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
        shape = as_event(event, "the dimension")
        if determinant is None:
            determinant = "exact" if math.prod(shape) <= MAX_EXACT_DIM else "roulette"
        self.event_shape: Event = shape
        self.g = g
        self.lipschitz = lipschitz
        self.exact: bool = determinant == "exact"
        self.takes_noise: bool = not self.exact
        self.recordable: bool = self.exact  # the number of rows in the series varies
        self.ladj_kind = Ladj.exact if self.exact else Ladj.estimate

    @torch.no_grad()
    def jacobian_norm(self, x: Tensor, iterations: int = 30) -> Tensor:
        r"""Estimate ‖∂g/∂x‖ at the rows of x by power iteration.

        The estimate is a lower bound; L is an upper bound.

        Args:
            x: (..., \*event).
            iterations: of the power iteration; 30 by default.

        Returns:
            Norms (...).
        """
        _, pull = self._freeze().pullback(x)
        v = rng.normal(1, x.shape, x, 0)[0]
        axes = tuple(range(-len(self.event_shape), 0))
        tiny = torch.finfo(x.dtype).tiny
        for _ in range(iterations):
            v = v / torch.linalg.vector_norm(v, dim=axes, keepdim=True).clamp_min(tiny)
            u = pull(v)  # Jᵀv, linear in v: its own product is J·u
            v = vjp(pull, v)[1](u)[0]
        return torch.linalg.vector_norm(u, dim=axes)

    def _noise(self, rows: Rows, inverse: bool) -> tuple[Any, ...]:
        """Draw a probe ±1 (*batch, *event), and uniform numbers (*batch,) for the terms."""
        probe = rows.signs(*self.event_shape)  # type: ignore[arg-type]
        terms = rows.fold("terms").uniform()
        if not terms.is_meta and not is_recorded(terms):
            terms = terms.cpu()  # Python sorts the rows by it
        return probe, terms

    def _freeze(self) -> Net:
        """Return g with norms computed once, for one pass, as a function of explicit tensors."""
        if isinstance(self.g, ContractingNet):
            return self.g.freeze()
        return ModuleNet(self.g, dict(self.g.named_parameters()))

    def _forward(self, x: Tensor, context: Tensor | None, *noise: Tensor) -> Pair:
        if not x.numel():
            return x, sum_event(x, len(self.event_shape))
        value, ladj = self._value_and_ladj(self._freeze(), x, *noise)
        return x + value, ladj

    def _inverse(self, y: Tensor, context: Tensor | None, *noise: Tensor) -> Pair:
        if not y.numel():
            return y, sum_event(y, len(self.event_shape))
        g = self._freeze()
        with torch.no_grad():
            x = self._solve_fixed_point(g, y)
        x = self._attach_gradient(g, x, y)
        return x, -self._value_and_ladj(g, x, *noise)[1]

    def _flatten(self, x: Tensor) -> Tensor:
        """Return events as vectors (..., D)."""
        return x.flatten(-len(self.event_shape))

    def _per_row(self, values: Tensor) -> Tensor:
        """Return values (...) of rows with axes of size 1 for the event."""
        return values.reshape(*values.shape, *[1] * len(self.event_shape))

    def _solve_fixed_point(self, g: Net, y: Tensor) -> Tensor:
        """Return x with x + g(x) = y, to a few units in the last place."""
        eps = torch.finfo(y.dtype).eps
        magnitude = self._flatten(y).abs().amax(-1)
        limit = GAP_TOLERANCE * eps * (1 + self._per_row(magnitude))
        contraction_steps = math.ceil(math.log(eps / 4) / math.log(self.lipschitz))
        max_steps = contraction_steps + EXTRA_FIXED_POINT_STEPS
        if self.exact and read_flag(limit.isfinite().all()) is None:
            max_steps = UNROLLED_NEWTON_STEPS
        step = -g(y)
        x = y + step
        gap = g(y) - g(x)
        self._check_contraction(gap, step, limit)
        for _ in range(max_steps):
            if read_flag((gap.abs() <= limit).all()):
                break
            if self.exact:
                x, gap = self._newton_step(g, x, y, gap)
            else:
                x = x + gap
                gap = y - g(x) - x
        max_gap = MAX_GAP_FACTOR * limit * self._tolerance_factor(y)
        has_converged = self._flatten(gap.abs() <= max_gap).all(-1)
        if read_flag(has_converged.all()) is False:
            raise InversionError(
                f"x + g(x) = y did not converge in {max_steps} steps, with a residual of "
                f"{gap.abs().max().item():.1e}: the Lipschitz constant of g is above "
                f"{self.lipschitz:g}; {REMEDY}"
            )
        return torch.where(has_converged.reshape(limit.shape), x, torch.nan)

    def _tolerance_factor(self, x: Tensor) -> float:
        """Return the factor of the tolerance, for convolutions that round their inputs.

        On a GPU in float32 they round to 11 bits.
        """
        rounds_inputs = x.is_cuda and x.dtype == torch.float32 and len(self.event_shape) == 3
        if not rounds_inputs:
            return 1.0
        return 2.0**-10 / (MAX_GAP_FACTOR * GAP_TOLERANCE * torch.finfo(x.dtype).eps)

    def _check_contraction(self, gap: Tensor, step: Tensor, limit: Tensor) -> None:
        """Raise unless |g(x₁) − g(x₀)| ≤ L·|x₁ − x₀| in the first step.

        Newton's method may converge without it.

        Args:
            gap: g(x₀) − g(x₁).
            step: x₁ − x₀.
            limit: the tolerance of each row.
        """
        flat_step = self._flatten(step)
        input_distance = torch.linalg.vector_norm(promote(flat_step), dim=-1)
        output_distance = torch.linalg.vector_norm(promote(self._flatten(gap)), dim=-1)
        rounding = (
            MAX_GAP_FACTOR
            * self._tolerance_factor(step)
            * self._flatten(limit).amax(-1)
            * math.sqrt(flat_step.shape[-1])
        )
        is_contracted = output_distance <= self.lipschitz * input_distance + rounding
        if read_flag(is_contracted.all()) is False:
            expansion = (output_distance / input_distance).nan_to_num().max().item()
            raise InversionError(
                f"the Lipschitz constant of g is above {self.lipschitz:g}: it increased the "
                f"distance of two points {expansion:.3g} times; {REMEDY}"
            )

    def _newton_step(self, g: Net, x: Tensor, y: Tensor, gap: Tensor) -> Pair:
        """Return the next x and its gap y − g(x) − x.

        x ← x + (I + J)⁻¹·gap, or x + gap where that step does not reduce |gap| by the factor L.
        """
        _, jacobian = self._jacobian(g, x)
        step = _solve(jacobian, self._flatten(gap)).reshape(x.shape)
        new_gap = y - g(x + step) - (x + step)
        squared_gap = self._flatten(gap).square().sum(-1)
        is_worse = self._flatten(new_gap).square().sum(-1) > self.lipschitz**2 * squared_gap
        if read_flag(is_worse.any()) is False:
            return x + step, new_gap
        x = x + torch.where(self._per_row(is_worse), gap, step)
        return x, y - g(x) - x

    def _attach_gradient(self, g: Net, x: Tensor, y: Tensor) -> Tensor:
        """Return x with its implicit derivatives, dx = (I + J)⁻¹·(dy − dg)."""
        if self.exact:
            return attach_solution(_FixedPointEquation(self, g), x, y, *g.tensors())

        def pull(
            value: Tensor,
            gradient: Tensor,
            y: Tensor,
            *tensors: Tensor,
        ) -> tuple[Tensor, ...]:
            _, pull_g = g.with_tensors(tensors).pullback(value)
            solution = _solve_transposed(pull_g, gradient, self.lipschitz)
            linear: Any = vjp(lambda y, *values: y - g.with_tensors(values)(value), y, *tensors)
            gradients: tuple[Tensor, ...] = linear[1](solution)
            return gradients

        first = x
        if torch.is_grad_enabled():
            residual = y - x - g(x)  # 0, with the gradient of dy − dg at a fixed x
            solve: Any = NeumannSolve.apply
            first = x + solve(residual, g, x, self.lipschitz)
        return with_derivatives(first, pull, y, *g.tensors())

    def _jacobian(self, g: Net, x: Tensor) -> Pair:
        """Return g(x), and ∂g/∂x of every row: (..., D, D)."""
        value, pull = g.pullback(x)
        return value, self._flatten(pull(unit_events(x, self.event_shape))).movedim(0, -2)

    def _value_and_ladj(self, g: Net, x: Tensor, *noise: Tensor) -> Pair:
        """Return g(x) and log det(I + J)."""
        if self.exact:
            value, jacobian = self._jacobian(g, x)
            return value, torch.linalg.slogdet(_plus_eye(jacobian))[1].to(x.dtype)
        return self._value_and_series(g, x, *noise)

    def _value_and_series(self, g: Net, x: Tensor, probe: Tensor, u: Tensor) -> Pair:
        """Return g(x) and the roulette estimate of log det(I + J).

        Args:
            g: the network.
            x: (..., *event).
            probe: ±1 (..., *event).
            u: uniform numbers (...) that set the number of terms.
        """
        dims = len(self.event_shape)
        x, probe = torch.broadcast_tensors(x, probe)
        shape = x.shape
        batch = shape[:-dims]
        event = shape[-dims:]
        x = x.reshape(-1, *event)
        probe = probe.reshape(-1, *event)
        # P(N ≥ k) = L^(k − 1): N = 1 + ⌊log u / log L⌋
        log_u = u.clamp_min(torch.finfo(u.dtype).tiny).log()
        count = (1 + (log_u / math.log(self.lipschitz)).floor()).expand(batch).flatten()
        value, pull = g.pullback(x)
        with torch.no_grad():
            series, slope = self._sum_series(pull, probe, count)
        if torch.is_grad_enabled():
            surrogate = sum_event(pull(slope) * probe, dims)
            series = series + surrogate - surrogate.detach()
        series = with_derivatives(
            series, partial(self._pull_series, g), probe, count, x, *g.tensors()
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
        """Return the gradients of the roulette estimate in (probe, count, x, tensors of g).

        They are functions of these tensors, so that they can be differentiated again.
        """
        _, pull = g.with_tensors(tensors).pullback(x)
        _, slope = self._sum_masked_series(pull, probe, count)

        def surrogate(x: Tensor, *tensors: Tensor) -> Tensor:
            _, pull = g.with_tensors(tensors).pullback(x)
            return sum_event(pull(slope) * probe, probe.ndim - 1)

        gradients = vjp(surrogate, x, *tensors)[1](gradient)
        return torch.zeros_like(probe), torch.zeros_like(count), *gradients

    def _max_terms(self, count: Tensor) -> int:
        """Return a bound of the number of terms of any row."""
        if read_flag(count.isfinite().all()) is not None:
            return int(count.max())
        return math.ceil(1 + math.log(torch.finfo(count.dtype).eps / 2) / math.log(self.lipschitz))

    def _sum_masked_series(self, pull: Pull, probe: Tensor, count: Tensor) -> Pair:
        """Return the sums of ``_sum_series``, where all rows take part in all terms."""
        dims = probe.ndim - 1
        term = probe
        total = torch.zeros_like(probe)
        slope = probe
        for k in range(self._max_terms(count)):
            weight = (-self.lipschitz) ** -k
            term = pull(term) * (count.to(probe) > k).reshape(-1, *[1] * dims)
            total = total + weight / (k + 1) * term
            slope = slope - weight * term
        return sum_event(total * probe, dims), slope

    def _sum_series(self, pull: Pull, probe: Tensor, count: Tensor) -> Pair:
        """Return the roulette estimate of every row, and the vector of its gradient.

        Σ_k ±εᵀJᵏε/(k·P(N ≥ k)) up to the count of every row, and Σ_k ±(Jᵀ)ᵏε/P(N ≥ k). Rows are
        sorted by their count, and finished ones are dropped, down to powers of two, since kernels
        of a GPU are tuned for every new size.

        Args:
            pull: u ↦ uᵀJ.
            probe: ε (n, *event).
            count: N (n,).
        """
        if read_flag(count.isfinite().all()) is None:
            return self._sum_masked_series(pull, probe, count)
        dims = probe.ndim - 1
        # rows with N > k for k = 0, 1, ...
        active_rows = (len(count) - count.long().bincount().cumsum(0)).tolist()[:-1]
        weights = [(-self.lipschitz) ** -k for k in range(len(active_rows))]
        order = count.argsort(descending=True)
        back = order.argsort().to(probe.device)
        order = order.to(probe.device)
        pull = pull.rows(order)
        probe = probe[order]
        term = pull(probe)
        total = term.clone()
        slope = probe - term
        for k, weight in enumerate(weights[1:], 1):
            active = active_rows[k]
            rows = 1 << (active - 1).bit_length()
            if rows < len(term):
                pull = pull.rows(slice(rows))
                term = term[:rows]
            term = pull(term)
            total[:active].add_(term[:active], alpha=weight / (k + 1))
            slope[:active].sub_(term[:active], alpha=weight)
        return sum_event(total * probe, dims)[back], slope[back]


@dataclass(frozen=True)
class _FixedPointEquation(Equation):
    """x + g(x) − y = 0, for the tensors y and those of g."""

    layer: Residual
    g: Net

    def linearize(self, x: Tensor, *theta: Tensor) -> Pair:
        y, *tensors = theta
        value, jacobian = self.layer._jacobian(self.g.with_tensors(tensors), x)
        return x + value - y, jacobian

    def solve(self, derivative: Tensor, right: Tensor, transposed: bool = False) -> Tensor:
        jacobian = derivative.mT if transposed else derivative
        return _solve(jacobian, self.layer._flatten(right)).reshape(right.shape)


@dataclass(frozen=True)
class AutogradPullback:
    """The product with the Jacobian of any g, by autograd.

    Args:
        g: the function.
        x: the point.
        product: u ↦ (uᵀ ∂g/∂x,) for u in the shape of g(x).
    """

    g: Callable[[Tensor], Tensor]
    x: Tensor
    product: Callable[[Tensor], tuple[Tensor, ...]]

    def __call__(self, u: Tensor) -> Tensor:
        product = self.product if u.ndim == self.x.ndim else vmap(self.product)
        gradient: Tensor = product(u)[0]
        return gradient

    def rows(self, index: Tensor | slice) -> Pull:
        """Return the product at some of the rows of x, without gradients, by a new pass of g.

        Args:
            index: of the rows.
        """
        return pullback(self.g, self.x.detach()[index])[1]


@dataclass(frozen=True)
class ModuleNet:
    """Any network as a function of its parameters.

    Args:
        module: the network.
        parameters: their values, by name.
    """

    module: nn.Module
    parameters: dict[str, Tensor]

    def __call__(self, x: Tensor) -> Tensor:
        value: Tensor = functional_call(self.module, self.parameters, (x,))
        return value

    def tensors(self) -> list[Tensor]:
        """Return all tensors that the network is a function of."""
        return list(self.parameters.values())

    def with_tensors(self, tensors: Sequence[Tensor]) -> ModuleNet:
        """Return the network with other values of its ``tensors``.

        Args:
            tensors: the values, in the same order.
        """
        return ModuleNet(self.module, dict(zip(self.parameters, tensors, strict=True)))

    def pullback(self, x: Tensor) -> tuple[Tensor, Pull]:
        """Return g(x), and the product with its Jacobian.

        Args:
            x: the input of the network.
        """
        return pullback(self, x)


Net = FrozenNet | ModuleNet
Pull = Pullback | AutogradPullback  # u ↦ uᵀ ∂g/∂x for u with any additional leading dimensions


def pullback(g: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Pull]:
    """Return g(x), and the product with its Jacobian, by autograd.

    Args:
        g: a function of one tensor.
        x: its input.
    """
    value_and_product: Any = vjp(g, x)
    value, product = value_and_product
    return value, AutogradPullback(g, x, product)


def unit_events(x: Tensor, event: Event) -> Tensor:
    """Return the D unit vectors of the space of events, for every row.

    Args:
        x: rows (..., *event), with D entries of the event.
        event: the shape of an event.

    Returns:
        Unit vectors (D, ..., *event).
    """
    batch = batch_shape(x, event)
    sizes = x.shape[len(batch) :]
    basis = torch.eye(sizes.numel(), dtype=x.dtype, device=x.device)
    return basis.reshape(-1, *[1] * len(batch), *sizes).expand(-1, *x.shape)


def _plus_eye(jacobian: Tensor) -> Tensor:
    """Return I + J, in a dtype of linear algebra."""
    jacobian = promote(jacobian)
    return torch.eye(jacobian.shape[-1], dtype=jacobian.dtype, device=jacobian.device) + jacobian


def _solve(jacobian: Tensor, right: Tensor) -> Tensor:
    """Return (I + J)⁻¹·right for rows (..., D)."""
    columns = promote(right).unsqueeze(-1)
    solution = torch.linalg.solve(_plus_eye(jacobian), columns)
    return solution.squeeze(-1).to(right.dtype)


class NeumannSolve(torch.autograd.Function):
    """The identity, whose gradient u is multiplied by (I + Jᵀ)⁻¹.

    It has no graph for second derivatives.
    """

    @staticmethod
    def forward(ctx: Any, residual: Tensor, g: Net, x: Tensor, lipschitz: float) -> Tensor:
        ctx.g = g
        ctx.x = x
        ctx.lipschitz = lipschitz
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
        new_v = u - pull(v)
        if read_flag(((new_v - v).abs() <= eps * (1 + new_v.abs())).all()):
            break
        v = new_v
    return v


def residual(
    event: int | Sequence[int],
    layers: int = 4,
    hidden: Sequence[int] = (64, 64),
    lipschitz: float = 0.9,
    determinant: Determinant | None = None,
) -> Chain:
    """Build a stack of residual flows with contractive networks.

    Each layer is y = x + g(x) with ‖∂g/∂x‖ ≤ L < 1 and ladj = log det(I + ∂g/∂x), which is exact in
    few dimensions and an unbiased estimate in many. Every coordinate depends on all coordinates;
    the inverse is a fixed-point iteration.

    Args:
        event: a dimension, or the shape (C, H, W) of images. For images the networks are
            convolutions, in turn on pixels and on blocks of 2×2 and 4×4 pixels, if these divide the
            image.
        layers: the number of flows; 4 by default.
        hidden: units, or channels, of the hidden layers; (64, 64) by default.
        lipschitz: the Lipschitz constant L of the networks; 0.9 by default.
        determinant: "exact" or "roulette", an estimate; by default exact up to 16 dimensions.

    Returns:
        A transform of x, y (..., *event).

    Example:
        >>> import torch, bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(2), flows.residual(2, layers=2))
        >>> flow.kind
        <Ladj.exact: 0>
        >>> flow.log_prob(torch.zeros(100, 2)).shape
        torch.Size([100])

    References:
        Chen, Behrmann, Duvenaud & Jacobsen 2019, Residual Flows for Invertible Generative Modeling.
    """
    if not isinstance(event, int) and len(event) != 3:
        raise ValueError(
            f"residual takes a dimension, or the shape (C, H, W) of images, got {tuple(event)}"
        )
    check_size(event if isinstance(event, int) else min(event), "the dimension")
    check_size(layers, "the number of layers")
    maps: list[Residual] = []
    for i in range(layers):
        if isinstance(event, int):
            g = contracting_mlp(event, hidden, lipschitz)
        else:
            channels, height, width = event
            blocks = [size for size in IMAGE_BLOCKS if height % size == 0 and width % size == 0]
            g = contracting_cnn(channels, hidden, lipschitz, blocks[i % len(blocks)])
        maps.append(Residual(event, g, lipschitz, determinant))
    return Chain(*maps)

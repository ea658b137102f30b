"""The properties that ``check`` measures, each a generator of rows."""

from __future__ import annotations

import copy
import math
import types
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor
from torch.func import functional_call, vmap
from torch.utils._pytree import tree_map, tree_map_only

from bayou import rng
from bayou.flows.checking.case import DIRECTIONS, Case, distance, distances
from bayou.flows.checking.derivatives import gradcheck, gradgradcheck
from bayou.flows.checking.integral import density
from bayou.flows.checking.report import Result
from bayou.flows.checking.terms import gradient, ladj
from bayou.flows.contractive.residual import Residual
from bayou.flows.core.compose import Direction
from bayou.flows.core.transform import Map, Pair


@torch.no_grad()
def inverse(case: Case) -> Iterator[Result]:
    """f⁻¹(f(x)) = x and f(f⁻¹(y)) = y, if the second step is not random."""
    layers = [part for part in case.transform.modules() if isinstance(part, Residual)]
    if layers:
        norms = []
        for part in layers:
            x = rng.normal(case.rows, part.event_shape, case.like, rng.fold(case.seed, "norm"))  # type: ignore[arg-type]
            norms.append(part.jacobian_norm(x).max().item() / part.lipschitz)
        yield Result.of(
            "lipschitz", max(norms), 1.0, f"the largest ‖∂g/∂x‖/L of {len(norms)} layers"
        )
    for first, second in (DIRECTIONS, DIRECTIONS[::-1]):
        trip, name = case.round_trip(first, second), f"{second} of {first}"
        if trip is None:
            yield Result.skipped(name, f"{second} is random")
        else:
            yield Result.of(
                name,
                distance(trip[1][0], trip[0][0]),
                case.with_solver_error(case.tolerance("inverse")),
            )


def compiled(case: Case) -> Iterator[Result]:
    """One graph without breaks, with the values and gradients of eager mode."""
    for name, f, x, context, noise in case.pairs():
        leaves = [x.requires_grad_(), *(p for p in f.parameters() if p.requires_grad)]

        def run(x: Tensor, context: Tensor | None, noise: Any, f: Direction = f) -> Pair:
            return f(x, context, noise=noise)

        # Compiled code is cached by code object: a new one evicts nothing from the caller's cache.
        own = types.FunctionType(
            run.__code__.replace(), run.__globals__, run.__name__, run.__defaults__
        )
        with warnings.catch_warnings():  # of the compiler, also in the backward pass
            warnings.simplefilter("ignore")
            got = torch.compile(own, fullgraph=True, dynamic=False, backend=case.backend)(
                x, context, noise
            )
            got_slopes = gradient(got[0].sum() + got[1].sum(), leaves)
        expected = f(x, context, noise=noise)
        values = max(distance(a.detach(), b.detach()) for a, b in zip(got, expected, strict=True))
        yield Result.of(f"compile {name}", values, case.tolerance("equal"), case.backend)
        slopes = gradient(expected[0].sum() + expected[1].sum(), leaves)
        yield Result.of(
            f"compile {name} gradient",
            distance(got_slopes, slopes),
            case.tolerance("equal"),
            case.backend,
        )


@torch.no_grad()
def vmapped(case: Case) -> Iterator[Result]:
    """``vmap`` over stacked parameters is equal to a loop."""
    copies = 3
    for name, f, _, context, _ in case.pairs():
        stack = {
            key: p + 0.05 * rng.normal(copies, p.shape, p, rng.fold(case.seed, "vmap", key))
            for key, p in f.named_parameters()
        }
        x = torch.stack([case.inputs(name, part=f"copy {i}") for i in range(copies)])
        noises = [case.noise(name, row, context) for row in x]

        def call(
            values: dict[str, Tensor],
            x: Tensor,
            noise: Any,
            f: Direction = f,
            context: Tensor | None = context,
        ) -> Pair:
            return functional_call(f, values, (x, context), {"noise": noise})

        got = vmap(call)(stack, x, tree_map(lambda *parts: torch.stack(parts), *noises))
        loop = [
            call({key: p[i] for key, p in stack.items()}, x[i], noises[i]) for i in range(copies)
        ]
        expected = (torch.stack([y for y, _ in loop]), torch.stack([ladj for _, ladj in loop]))
        note = "" if stack else "no parameters: over inputs only"
        yield Result.of(f"vmap {name}", distances(got, expected), case.tolerance("equal"), note)


@torch.no_grad()
def dtype(case: Case) -> Iterator[Result]:
    """float64, float32 and bfloat16 are preserved, with results close to those of float64."""
    for kind in (torch.float64, torch.float32, torch.bfloat16):
        title = str(kind).removeprefix("torch.")
        low = copy.deepcopy(case.transform).to(kind)
        if case.whole:  # half precision may round a shift, but the inverse must be exact
            x, context = (
                None if t is None else t.to(kind) for t in (case.inputs("forward"), case.context())
            )
            y, term = low.forward(x, context)  # type: ignore[arg-type]
            kept = {y.dtype, term.dtype} == {kind} and torch.equal(y, y.round())
            back = torch.equal(low.inverse(y, context)[0], x)  # type: ignore[arg-type]
            yield Result(title, kept and back, note="" if kept else "other dtype, or not integers")
            continue
        exact = copy.deepcopy(low).to(torch.float64)  # the same rounded parameters
        for name in DIRECTIONS:
            x, context = case.inputs(name), case.context()
            inputs = tree_map_only(
                Tensor, partial(Tensor.to, dtype=kind), (x, context, case.noise(name, x, context))
            )
            x, context, noise = inputs
            got = Direction(low, name)(x, context, noise=noise)
            kept = all(t.dtype == kind for t in got)
            if not kept or not all(t.isfinite().all() for t in got):
                what = (
                    "values that are not finite"
                    if kept
                    else "(y, ladj) of " + ", ".join(str(t.dtype) for t in got)
                )
                yield Result(f"{title} {name}", False, note=f"{kind} in gave {what}")
                continue
            x, context, noise = tree_map_only(Tensor, Tensor.double, inputs)
            expected = Direction(exact, name)(x, context, noise=noise)
            limit = 0.0 if kind is torch.float64 else case.tolerances[title]
            yield Result.of(f"{title} {name}", distances(got, expected), limit)


@torch.no_grad()
def state_dict(case: Case) -> Iterator[Result]:
    """A saved state, loaded into a copy with other values, gives bitwise equal results."""
    saved = save(
        {key: tensor.contiguous().clone() for key, tensor in case.transform.state_dict().items()}
    )
    other = copy.deepcopy(case.transform) if case.fresh is None else case.fresh().to(case.like)
    other.train()
    for name in DIRECTIONS:  # training mode may change running statistics or initialize from data
        Direction(other, name)(case.inputs(name, part="other"), case.context())
    for key, tensor in other.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor) and tensor.is_floating_point():
            tensor.add_(
                0.1 * rng.normal(1, tensor.shape, tensor, rng.fold(case.seed, "perturb", key))[0]
            )
    other.load_state_dict(load(saved))
    other.eval()
    for name, f, x, context, noise in case.pairs():
        got, expected = (g(x, context, noise=noise) for g in (Direction(other, name), f))
        equal = all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
        yield Result(
            f"state_dict {name}",
            equal,
            note="" if equal else f"differs by {distances(got, expected):.1e}",
        )


def _is_valid(map_: Map, x: Tensor, context: Tensor | None) -> bool:
    """Whether x is a valid input of forward; that of an inverse sort must be sorted."""
    try:
        map_.validate(x, context)
    except ValueError:
        return False
    return True


@torch.no_grad()
def tails(case: Case) -> Iterator[Result]:
    """Far from the origin, in one coordinate or all, results are finite and, if the image is
    unbounded, inverted.
    """
    if case.whole:
        yield Result.skipped("tails", "integers")
        return
    limit = case.with_solver_error(case.tolerances["tails"])
    for name, other in (DIRECTIONS, DIRECTIONS[::-1]):
        interval, image = case.transform.domain, case.transform.codomain
        if name == "inverse":
            interval, image = image, interval
        near = rng.normal(1, (case.size,), case.like, rng.fold(case.seed, "tails"))[0]
        single = torch.eye(case.size).to(near).bool()
        masks = torch.cat(
            [single, torch.ones_like(single[:1])]
        )  # each coordinate by itself, then all
        x = torch.cat([torch.where(masks, far, near) for far in (1e3, -1e3, 1e4, -1e4)])
        x = x.reshape(-1, *case.event)
        context = None if not case.transform.context_dim else case.context(1)
        if not case.bijective and _is_valid(case.transform, x, context) == (name == "inverse"):
            x = case.result(other, _inside(x, image), context)[0]
        x = _inside(x, interval)
        y, ladj = case.result(name, x, context)
        finite = bool(y.isfinite().all() and ladj.isfinite().all())
        if not finite:
            count = int((~y.isfinite()).sum() + (~ladj.isfinite()).sum())
            yield Result(f"tails {name}", False, note=f"{count} values are not finite")
            continue
        if not case.bijective:
            yield Result(f"tails {name}", True, note="finite")
            continue
        if any(math.isfinite(end) for end in (*interval, *image)):
            yield Result(
                f"tails {name}", True, note="finite; not inverted, since the image is bounded"
            )
            continue
        back, opposite = case.result(other, y, context)
        error = _relative(back, x)
        # Slopes may be as small as e⁻³⁰, where no float can be inverted. Where a change of y in its
        # last digits changes the inverse by as much as the error, the image of the inverse is
        # compared with y instead.
        noise = rng.normal(len(y), case.event, y, rng.fold(case.seed, "rounding"))
        nearby = case.result(other, y * (1 + 64 * torch.finfo(y.dtype).eps * noise), context)[0]
        excused = (
            (error > limit)
            & (error <= 100 * _relative(nearby, back))
            & back.isfinite().flatten(1).all(-1)
        )
        flags = excused.reshape(-1, *[1] * (x.ndim - 1))
        again = case.result(name, torch.where(flags, back, x), context)[0]
        gap = torch.where(excused, _relative(again, y), error).max().item()
        finite = bool(opposite.isfinite().all()) and not math.isnan(gap)
        note = (
            f"ill-conditioned: {int(excused.sum())} of {len(x)} compared by their image"
            if excused.any()
            else ""
        )
        yield Result.of(f"tails {name}", gap if finite else math.inf, limit, note)


def _relative(got: Tensor, expected: Tensor) -> Tensor:
    """The largest difference in each event, relative to its largest magnitude: (n,)."""
    size = expected.flatten(1).abs().amax(-1)
    return (got - expected).flatten(1).abs().amax(-1) / size


def _inside(x: Tensor, interval: tuple[float, float]) -> Tensor:
    """Points clamped into the interval, close to its ends."""
    low, high = interval
    width = high - low if math.isfinite(high - low) else 1.0
    return x.clamp(low + 1e-6 * width, high - 1e-6 * width)


@torch.no_grad()
def batch(case: Case) -> Iterator[Result]:
    """Any batch axes, also none or empty ones; rows are independent, with their noise; contexts
    broadcast.
    """
    limit = case.tolerance("equal")
    for name, f, x, context, _ in case.pairs(6):
        taken, given = case.events(name), case.events(DIRECTIONS[name == "forward"])
        call = partial(f, seed=case.seed)
        whole = call(x, context)
        gap = 0.0
        for i in range(len(x)):
            alone = call(x[i], None if context is None else context[i], start=i)
            gap = max(gap, distances(alone, (whole[0][i], whole[1][i])))
        yield Result.of(f"batch {name} rows", gap, limit, "each row alone and in the batch")
        wrong = []
        for shape in ((6,), (2, 3), (1, 2, 1, 3), (0,), (2, 0)):
            n = math.prod(shape)
            c = None if context is None else context[:n].reshape(*shape, context.shape[-1])
            try:
                y, ladj = call(x[:n].reshape(*shape, *taken), c)
            except Exception as error:  # the other shapes are still measured
                wrong.append(f"batch {shape} raised {type(error).__name__}: {error}")
                continue
            if y.shape != (*shape, *given) or ladj.shape != shape:
                wrong.append(f"batch {shape} gave y {tuple(y.shape)}, ladj {tuple(ladj.shape)}")
            elif (
                distances((y.reshape(n, *given), ladj.reshape(n)), (whole[0][:n], whole[1][:n]))
                > limit
            ):
                wrong.append(f"batch {shape} gave other values")
        yield Result(f"batch {name} shapes", not wrong, note="; ".join(wrong))
        if context is None:
            continue
        y, ladj = call(x[:2, None], context[:3])  # (2, 1, *event) with (3, C)
        grid = [call(x[i], context[j], start=3 * i + j) for i in range(2) for j in range(3)]
        expected = tuple(
            torch.stack(part).reshape(2, 3, *part[0].shape) for part in zip(*grid, strict=True)
        )
        yield Result.of(f"batch {name} context", distances((y, ladj), expected), limit, "broadcast")  # type: ignore[arg-type]


PROPERTIES: dict[str, Callable[[Case], Iterator[Result]]] = {
    "inverse": inverse,
    "ladj": ladj,
    "density": density,
    "gradcheck": gradcheck,
    "gradgradcheck": gradgradcheck,
    "compile": compiled,
    "vmap": vmapped,
    "dtype": dtype,
    "state_dict": state_dict,
    "tails": tails,
    "batch": batch,
}

"""Export of a flow as graphs of its log-density and of its sampler, for use without bayou.

program = export_flow(flow, "log_prob")
torch.export.save(program, "density.pt2")                      # later, with torch only:
answers = torch.export.load("density.pt2").module()(y)         # {"log_prob"}

export_flow_onnx(flow, "sampler.onnx", "sampler")              # later, with onnxruntime only:
y, log_prob = InferenceSession("sampler.onnx").run(["y", "log_prob"], {"normal0": noise})
"""

from __future__ import annotations

import math
import operator
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, final, get_args

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from bayou.core import rng
from bayou.flows.core.bases import NoiseBase
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Cost, Map, Rows
from bayou.network import evaluating
from bayou.operations.onnx_files import require_onnx, write_onnx

Part = Literal["log_prob", "sampler"]
ANSWERS: dict[Part, tuple[str, ...]] = {"log_prob": ("log_prob",), "sampler": ("y", "log_prob")}
# Rows of the inputs that are traced. No axis of an event should have this size by chance.
EXAMPLE_ROWS = 7


@torch.no_grad()
def export_flow(flow: Flow, part: Part = "log_prob") -> ExportedProgram:
    """Export the log-density or the sampler of a flow as a program, for use with torch alone.

    "log_prob" maps y (B, *event) to {"log_prob"} (B,). "sampler" maps noise to {"y", "log_prob"},
    a draw and its log-density, which needs no inversion. B is free in the program. A flow with a
    context takes it as an input (B, context_dim); the sampler has one draw for each of its rows.

    Noise is an input of the program, which is thereby a function: ``normal0`` takes standard normal
    numbers, ``uniform0`` numbers that are uniform on [0, 1), each (B, ...). ``flow_inputs`` draws
    them as ``flow.sample(n, seed=seed)`` does; any other generator will do. A map that is random in
    the inverse, such as dequantization, has noise in its "log_prob" too, which is then that of
    ``flow.log_prob(y, seed=seed)``: one sample of a bound.

    The inputs of a program are not checked for NaN and values outside the support, which need
    Python.

    Args:
        flow: the flow, which is exported in eval mode.
        part: "log_prob" (the default) or "sampler".

    Returns:
        A program that gives a dict of the answers.

    Raises:
        ValueError: if the direction that the part needs is found by iteration, whose steps depend
            on the values: inverses by root finding, adaptive ODE solvers, random series; and if
            torch.export cannot trace the flow.

    Example:
        >>> program = export_flow(flow, "sampler")
        >>> torch.export.save(program, "sampler.pt2")
    """
    _check_part(flow, part)
    with evaluating(flow):
        inputs = tuple(flow_inputs(flow, EXAMPLE_ROWS, part, seed=0).values())
        module = _FlowModule(flow, part).eval()
        axis = Dim("rows")
        sizes = (tuple({0: axis} for _ in inputs),)
        try:
            program = torch.export.export(module, inputs, dynamic_shapes=sizes, strict=False)
            if _has_linear_algebra(program):
                folded = _fold_constants(program)
                program = torch.export.export(folded, inputs, dynamic_shapes=sizes[0], strict=False)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"torch.export cannot take the {part} of {_describe(flow)} as one graph for every "
                f"number of rows: {reason}"
            ) from error
    return program


def export_flow_onnx(flow: Flow, path: str | os.PathLike[str], part: Part = "log_prob") -> Path:
    """Write the program of ``export_flow`` as an ONNX file, with named inputs and outputs.

    Inputs are "y" (of the log-density), "context" if the flow has one, and its noise, "normal0",
    "uniform1", ...; outputs are "log_prob", or "y" and "log_prob". Needs onnx and onnxscript (``pip
    install 'bayou[onnx]'``); running the file needs neither.

    Args:
        flow: the flow, which is exported in eval mode.
        path: the file to write.
        part: "log_prob" (the default) or "sampler".

    Returns:
        The path of the file.

    Raises:
        ImportError: if onnx or onnxscript is not installed.
        ValueError: as of ``export_flow``, and for operations that ONNX does not have.

    Example:
        >>> export_flow_onnx(flow, "sampler.onnx", "sampler")
        >>> session = onnxruntime.InferenceSession("sampler.onnx")
        >>> noise = numpy.random.default_rng(0).standard_normal((1000, 2), dtype="float32")
        >>> y, log_prob = session.run(["y", "log_prob"], {"normal0": noise})
    """
    require_onnx("export_flow_onnx")
    program = export_flow(flow, part)
    if _has_linear_algebra(program):
        program = program.run_decompositions(_onnx_decompositions())
    names = list(flow_inputs(flow, EXAMPLE_ROWS, part, seed=0))
    try:
        return write_onnx(program, path, names, ANSWERS[part], "export_flow_onnx")
    except torch.onnx.errors.OnnxExporterError as error:
        raise ValueError(
            f"ONNX cannot take the {part} of {_describe(flow)}: {_first_reason(error)}; "
            "export_flow makes a program for torch"
        ) from error


@torch.no_grad()
def flow_inputs(
    flow: Flow,
    rows: int,
    part: Part = "sampler",
    *,
    context: Tensor | None = None,
    seed: rng.Seed = None,
    start: int = 0,
) -> dict[str, Tensor]:
    """Draw the inputs of an exported program, by name.

    With them the sampler gives ``flow.sample(rows, seed=seed, start=start)``, or with a context
    ``flow.sample((), context, seed=seed, start=start)``, up to rounding. The inputs of "log_prob"
    are draws y of the flow, and the noise of ``flow.log_prob(y, context, seed=seed, start=start)``.

    Args:
        flow: the flow that was exported.
        rows: their number, B.
        part: "sampler" (the default) or "log_prob".
        context: (B, context_dim), for a flow with a context; by default zeros.
        seed: an int, a generator, or None for torch's generator.
        start: the index of the first draw; 0 by default.

    Returns:
        Tensors (B, ...) by the names of the inputs, in their order.

    Raises:
        ValueError: for a context of other rows.
    """
    transform = flow.transform
    if transform.context_dim and context is None:
        context = flow.base.anchor.new_zeros(rows, transform.context_dim)
    if context is not None and len(context) != rows:
        raise ValueError(f"{rows} rows need a context of as many rows, got {len(context)}")
    shape = rows if context is None else ()
    recorded: list[tuple[str, Tensor]] = []
    inputs: dict[str, Tensor] = {}
    if part == "sampler":
        base = _RecordingRows((rows,), flow.base.anchor, seed, start, recorded)
        batch: tuple[int, ...] = ()
        if context is not None:  # one draw for each row of the context
            base = _RecordingRows((1,), flow.base.anchor, seed, start, recorded)
            batch = (rows,)
        _noise_base(flow)._draw(base, batch)
        recorded = [(name, noise.flatten(0, len(batch))) for name, noise in recorded]
        like = flow.base.anchor
    else:
        inputs["y"] = flow.sample(shape, context, seed=seed, start=start)
        like = inputs["y"]
    if context is not None:
        inputs["context"] = context
    if transform.takes_noise:
        is_inverse = part == "log_prob"
        direction = "inverse" if is_inverse else "forward"
        first = start * rows if context is not None and not is_inverse else start
        maps = _RecordingRows((rows,), like, rng.fold(seed, direction), first, recorded)
        transform._noise(maps, is_inverse)
    for number, (distribution, noise) in enumerate(recorded):
        inputs[f"{distribution}{number}"] = noise
    return inputs


@dataclass(frozen=True)
class _RecordingRows(Rows):
    """Rows that record the noise that is drawn of them, with its distribution."""

    recorded: list[tuple[str, Tensor]] = field(default_factory=list)

    def _draw(self, sampler: Callable[..., Tensor], event: tuple[int, ...]) -> Tensor:
        noise = super()._draw(sampler, event)
        distribution = "normal" if sampler is rng.normal else "uniform"
        self.recorded.append((distribution, noise))
        return noise


@dataclass(frozen=True)
class _GivenRows(Rows):
    """Rows whose noise is given, in the order in which it is drawn."""

    given: Iterator[Tensor] = field(default_factory=lambda: iter(()))

    def _draw(self, sampler: Callable[..., Tensor], event: tuple[int, ...]) -> Tensor:
        return next(self.given)


@final
class _FlowModule(nn.Module):
    """One part of a flow as a function of its inputs and of noise."""

    def __init__(self, flow: Flow, part: Part) -> None:
        super().__init__()
        self.flow = flow
        self.part = part

    def forward(self, *inputs: Tensor) -> dict[str, Tensor]:
        """Return the answers by name."""
        flow = self.flow
        rows = (inputs[0].shape[0],)
        remaining = iter(inputs)
        y = next(remaining) if self.part == "log_prob" else None
        context = next(remaining) if flow.transform.context_dim else None
        if y is not None:
            noise = self._noise(rows, y, remaining)
            x, ladj = flow.transform._inverse(y, context, *noise)
            return {"log_prob": flow.base.log_prob(x) + ladj}
        given = _GivenRows(rows, flow.base.anchor, 0, 0, remaining)
        x = _noise_base(flow)._draw(given, ())
        noise = self._noise(rows, x, remaining)
        y, ladj = flow.transform._forward(x, context, *noise)
        return {"y": y, "log_prob": flow.base.log_prob(x) - ladj}

    def _noise(
        self, rows: tuple[int, ...], like: Tensor, remaining: Iterator[Tensor]
    ) -> tuple[Any, ...]:
        """Return the noise of the map, from the inputs that are left."""
        transform = self.flow.transform
        if not transform.takes_noise:
            return ()
        given = _GivenRows(rows, like, 0, 0, remaining)
        return transform._noise(given, self.part == "log_prob")


def _check_part(flow: Flow, part: Part) -> None:
    """Raise a ValueError for a part that is no graph of a fixed number of operations."""
    if part not in get_args(Part):
        raise ValueError(f"a flow has the parts {', '.join(get_args(Part))}, got {part!r}")
    if part == "sampler":
        _noise_base(flow)
    transform = flow.transform
    kind = transform.inverse_kind if part == "log_prob" else transform.forward_kind
    other: Part = "sampler" if part == "log_prob" else "log_prob"
    other_kind = transform.forward_kind if part == "log_prob" else transform.inverse_kind
    if kind is Cost.iterative and not _has_fixed_steps(transform):
        direction = "inverse" if part == "log_prob" else "forward"
        advice = "use flow itself, with bayou"
        if other_kind is not Cost.iterative:
            advice = f"its {other} can be exported"
        raise ValueError(
            f"the {part} of {_describe(flow)} cannot be exported: its {direction} is found by "
            f"iteration, whose number of steps depends on the values; {advice}"
        )


def _noise_base(flow: Flow) -> NoiseBase:
    """Return the base of a flow, or raise a ValueError if its draws are no function of noise."""
    if not isinstance(flow.base, NoiseBase):
        raise ValueError(
            f"the sampler of {type(flow.base).__name__} is not a function of noise, so that it "
            "cannot be exported; use a base that is a NoiseBase, such as StandardNormal"
        )
    return flow.base


def _has_fixed_steps(transform: Map) -> bool:
    """Return whether all iterations of a map take the same steps for all values."""
    links = [link for link in transform.modules() if isinstance(link, Map)]
    leaves = [link for link in links if not any(isinstance(m, Map) for m in link.children())]
    return all(
        link.has_fixed_steps
        for link in leaves
        if Cost.iterative in (link.forward_kind, link.inverse_kind)
    )


def _describe(flow: Flow) -> str:
    """Return the types of a flow, for errors."""
    return f"Flow({type(flow.base).__name__}, {type(flow.transform).__name__})"


def _first_reason(error: BaseException) -> str:
    """Return the first line of the error that an error of the exporter came from."""
    while error.__cause__ is not None:
        error = error.__cause__
    return str(error).strip().splitlines()[0]


def _has_linear_algebra(program: ExportedProgram) -> bool:
    """Return whether a graph has operations such as QR, which ONNX does not have."""
    return any("linalg" in str(node.target) for node in program.graph.nodes)


def _fold_constants(program: ExportedProgram) -> nn.Module:
    """Return the module of a program, in which what depends on parameters alone is a buffer."""
    module = program.module()
    if not isinstance(module, GraphModule):
        raise TypeError(f"torch.export gave a {type(module).__name__}")
    values: dict[Node, Any] = {}
    for node in module.graph.nodes:
        if node.op == "get_attr":
            values[node] = operator.attrgetter(node.target)(module)
        elif _is_constant(node, values):
            arguments = map_arg(node.args, values.__getitem__)
            options = map_arg(node.kwargs, values.__getitem__)
            values[node] = node.target(*arguments, **options)
    constants = [
        node
        for node, value in values.items()
        if node.op == "call_function"
        and isinstance(value, Tensor)
        and any(user not in values for user in node.users)
    ]
    for number, node in enumerate(constants):
        name = f"constant{number}"
        module.register_buffer(name, values[node].detach().clone())
        with module.graph.inserting_before(node):
            constant = module.graph.get_attr(name)
        node.replace_all_uses_with(constant)
    for node in reversed(values):  # checks of what is known now, and what nothing else uses
        if node.op == "call_function" and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.recompile()
    return module


def _onnx_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return functions of operations that ONNX has, by the operation that they replace."""
    aten: Any = torch.ops.aten
    return {
        aten.linalg_solve_triangular.default: _solve_triangular_by_halves,
        aten.linalg_slogdet.default: _slogdet_by_det,
    }


def _is_constant(node: Node, values: Mapping[Node, Any]) -> bool:
    """Return whether a node computes numbers from known ones alone."""
    is_pure = isinstance(node.target, OpOverload) or node.target is operator.getitem
    return is_pure and all(source in values for source in node.all_input_nodes)


def _slogdet_by_det(a: Tensor) -> tuple[Tensor, Tensor]:
    """Return sign and log|det| of matrices (..., D, D) by the determinant, which ONNX has."""
    determinant = torch.linalg.det(a)
    return determinant.sign(), determinant.abs().log()


def _solve_triangular_by_halves(
    a: Tensor,
    b: Tensor,
    *,
    upper: bool,
    left: bool = True,
    unitriangular: bool = False,
) -> Tensor:
    """Solve a·x = b for a triangular a by substitution of blocks, in operations that ONNX has.

    Args:
        a: (..., D, D).
        b: (..., D, K), or (..., K, D) if a is on the right.
        upper: whether a is an upper triangle; otherwise a lower one.
        left: whether a is on the left; otherwise x·a = b.
        unitriangular: whether the diagonal of a counts as ones.
    """
    if not left:  # aᵀ·xᵀ = bᵀ
        x = _solve_triangular_by_halves(a.mT, b.mT, upper=not upper, unitriangular=unitriangular)
        return x.mT
    size = a.shape[-1]
    if size == 1:
        return b.clone() if unitriangular else b / a
    half = math.ceil(size / 2)
    first, second = slice(0, half), slice(half, size)
    if upper:
        first, second = second, first
    options = {"upper": upper, "unitriangular": unitriangular}
    solved = _solve_triangular_by_halves(a[..., first, first], b[..., first, :], **options)
    rest = b[..., second, :] - a[..., second, first] @ solved
    others = _solve_triangular_by_halves(a[..., second, second], rest, **options)
    halves = (others, solved) if upper else (solved, others)
    return torch.cat(halves, -2)

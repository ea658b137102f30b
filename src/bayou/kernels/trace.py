"""Tracing of densities that a chain evaluates very often to a graph of their operations.

On a small network most of the time is spent in Python, ``vmap`` and autograd, which are the same in
every call.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from bayou.kernels.hmc import Density

# without effect if shape and strides are the same
VIEWS = ("detach", "alias", "view", "_unsafe_view", "expand")


def trace_density(function: Density, w: Tensor) -> Density:
    """Return a faster function for all tensors of the shape of w.

    Only for functions that support ``vmap`` along the first axis of w, so that no branch depends on
    values of w. If tracing fails, the function itself is returned.

    Args:
        function: a density and its gradient.
        w: an example, (C, D).
    """
    # Imported here because it takes a second.
    from torch.fx.experimental.proxy_tensor import make_fx

    try:
        module = make_fx(function)(w)
    except Exception:  # tracing only saves time
        return function
    with torch.no_grad():
        _simplify(module, w)
    run: Density = torch.no_grad()(module.forward)
    return run


def _simplify(module: fx.GraphModule, w: Tensor) -> None:
    """Fold constants, remove views that change nothing, and replace overloads of functions.

    A function of torch takes less time than its overload; it is used only if the result at w is
    identical. A graph with in-place operations is not changed, since folded constants must not be
    modified.
    """
    graph = module.graph
    graph.eliminate_dead_code()
    if any(_name(node).endswith("_") for node in graph.nodes if node.op == "call_function"):
        module.recompile()
        return
    values: dict[fx.Node, Any] = {}
    constants: set[fx.Node] = set()
    for node in list(graph.nodes):
        if node.op == "placeholder":
            values[node] = w
        elif node.op == "get_attr":
            values[node] = getattr(module, str(node.target))
            constants.add(node)
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), values.__getitem__)
            target: Any = node.target
            out = target(*args, **kwargs)
            values[node] = out
            if constants.issuperset(node.all_input_nodes):
                constants.add(node)
            elif _name(node) in VIEWS and _same_layout(args[0], out):
                node.replace_all_uses_with(node.all_input_nodes[0])
            else:
                node.target = _shortest(target, _name(node), args, kwargs, out)
    folded = [node for node in graph.nodes if node in constants and node.op == "call_function"]
    for number, node in enumerate(folded):
        if isinstance(values[node], Tensor):
            module.register_buffer(f"_constant{number}", values[node])
            with graph.inserting_before(node):
                node.replace_all_uses_with(graph.get_attr(f"_constant{number}"))
    graph.eliminate_dead_code()
    module.recompile()


def _name(node: fx.Node) -> str:
    """Return the name of an operation without its overload: "sum" of aten.sum.dim_IntList."""
    return str(getattr(node.target, "__name__", "")).partition(".")[0]


def _same_layout(a: Any, b: Any) -> bool:
    """Return whether two values are tensors of the same shape and strides."""
    if not isinstance(a, Tensor) or not isinstance(b, Tensor):
        return False
    return a.shape == b.shape and a.stride() == b.stride()


def _shortest(target: Any, name: str, args: Any, kwargs: Any, out: Any) -> Any:
    """Return the function or method of torch with this name, if its result is identical."""
    for namespace in (torch, Tensor):
        short = getattr(namespace, name, None)
        if short is not None and isinstance(out, Tensor):
            try:
                value = short(*args, **kwargs)
            except Exception:  # another signature
                continue
            if _same_layout(value, out) and value.dtype == out.dtype and torch.equal(value, out):
                return short
    return target

"""A network as a function of its named tensors; in eval mode it is pure, and threads may call it
concurrently.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bayou import rng
from bayou.files import no_grad_state
from bayou.network.inputs import adapted
from bayou.network.mapping import PlainAttention
from bayou.network.sharded import is_sharded, resharded, share_sharded
from bayou.params import Params
from bayou.training.data import rows_of

MAX_DRAWN_PART = (
    0.25  # of the numbers that a network computes, up to which draws are mapped to share the rest
)


class Network:
    """f(w, x): a copy of the network without weights of its own, called with named tensors.

    ``net`` is the copy; its free parameters (``names``) are empty placeholders, its frozen ones
    (those that require no gradient) are shared with the given network, and its buffers (running
    statistics) are its own. ``call`` takes the free parameters and, if wanted, other values of
    frozen ones and buffers. Tied weights have one name. ``recomputes``: whether it is known to use
    gradient checkpointing (``find_recomputation``).
    """

    recomputes = False

    def __init__(self, net: nn.Module) -> None:
        self.names = [name for name, parameter in net.named_parameters() if parameter.requires_grad]
        self.frozen = any(not parameter.requires_grad for parameter in net.parameters())
        self.net, self.aliases = skeleton(net)
        blanks = dict(self.net.named_buffers(remove_duplicate=False))
        seen = {id(blanks[name]) for name in self.names}
        self._tied: dict[
            str, str
        ] = {}  # aliases that are tensors of their own; those of a module used twice are not
        for alias, name in self.aliases.items():
            if id(blanks[alias]) not in seen:
                seen.add(id(blanks[alias]))
                self._tied[alias] = name
        self._recurrent = tuple(
            module for module in self.net.modules() if isinstance(module, nn.RNNBase)
        )
        self._shells: list[Shell] = []  # those that are not in use
        self._dry_runs: dict[Any, DryRun] = {}
        self._drawn_parts: dict[Any, float] = {}

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"_shells": [], "_dry_runs": {}, "_drawn_parts": {}}

    def call(self, params: Params, *inputs: Any) -> Tensor:
        """The outputs with these tensors, in the mode (train or eval) that the parts of ``net``
        have; one at a time.
        """
        if self.recomputes and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            made: Tensor = _Recomputing.apply(self, inputs, [*params], *params.values())  # type: ignore[no-untyped-call]
            return made
        return self._with(params, self.net, inputs)

    def _with(
        self, params: Params, module: nn.Module, inputs: tuple[Any, ...], prefix: str = ""
    ) -> Any:
        """``module(*inputs)`` with these tensors of ``net``, which is this module, or a part of it
        by this prefix.
        """
        tied = {alias: params[name] for alias, name in self._tied.items()}
        tensors = (
            params | tied
            if not prefix
            else {prefix + name: value for name, value in (params | tied).items()}
        )
        out = functional_call(module, tensors, inputs, tie_weights=False)
        for rnn in self._recurrent:
            forget(rnn)
        return out

    def find_recomputation(self, params: Params, inputs: tuple[Any, ...]) -> None:
        """Test by a pass over three rows whether a backward pass calls modules again: gradient
        checkpointing.
        """
        calls: list[nn.Module] = []
        net = self._in_training(
            {name: value.detach().requires_grad_() for name, value in params.items()}
        )
        for module in net.modules():
            module.register_forward_pre_hook(lambda module, _: calls.append(module))
        with (
            rng.isolated(0, inputs[0].device),
            torch.enable_grad(),
            suppress(Exception),
        ):  # the real call raises it
            out = net(*_rows(inputs, 3))
            forward = len(calls)
            if out.requires_grad:
                out.sum().backward()
            self.recomputes = len(calls) > forward

    def _in_training(self, params: Params) -> nn.Module:
        """A copy of the network in training mode with these tensors and with buffers of its own."""
        shell = Shell(self.net, self.aliases)
        shell.net.train()
        shell.fill(params | {name: buffer.clone() for name, buffer in self.buffers().items()})
        return shell.net

    def evaluate(self, params: Params, *inputs: Any) -> Tensor:
        """The outputs with these tensors in eval mode: a pure function, which threads may call
        concurrently.

        Each call uses its own shell of the network; ``net`` is not changed.
        """
        if torch.compiler.is_compiling():  # a trace needs the modules themselves
            return self.call(params, *inputs)
        try:
            shell = self._shells.pop()
        except IndexError:
            shell = Shell(self.net, self.aliases)
        try:
            shell.fill(params)
            out: Tensor = shell.net(*inputs)
            return out
        finally:
            shell.empty()
            self._shells.append(shell)

    def dry_run(self, like: Callable[[], Params], inputs: tuple[Any, ...]) -> DryRun:
        """The result of a dry run in eval mode with the tensors ``like()``, for inputs of these
        shapes.
        """
        kinds = _kinds(inputs)
        if kinds not in self._dry_runs:
            given = like()
            params = {name: given[name] for name in self.names}
            try:
                images = any(isinstance(module, nn.Conv2d) for module in self.net.modules())
                self._dry_runs[kinds] = _dry_run(
                    lambda *few: self.evaluate(params, *few), inputs, images
                )
            except Exception:  # the real call raises it again
                return DryRun()
        return self._dry_runs[kinds]

    @torch.no_grad()
    def drawn_part(self, names: Collection[str], params: Params, inputs: tuple[Any, ...]) -> float:
        """The fraction of the numbers computed by the network that depends on these tensors.

        A map over draws computes the rest once. 1 where that is not worth it, or not possible.
        """
        if not self.frozen and set(names) >= set(self.names):
            return 1.0
        key = (frozenset(names), _kinds(inputs))
        if key not in self._drawn_parts:
            own, sizes = {name: params[name].unsqueeze(0) for name in names}, _Sizes()
            few, part = _rows(inputs, 2), 1.0

            def call(drawn: Params) -> Tensor:
                with sizes:
                    return self.evaluate(params | drawn, *few)

            with (
                rng.isolated(0, inputs[0].device),
                PlainAttention(),
                suppress(Exception),
            ):  # then there is no map
                vmap(call, randomness="different")(own)
                part = sizes.drawn / sum(sizes.sizes)
            self._drawn_parts[key] = part if part <= MAX_DRAWN_PART else 1.0
        return self._drawn_parts[key]

    def cut_off(self, params: Params, names: Collection[str], inputs: tuple[Any, ...]) -> list[str]:
        """Those of the names whose tensors no gradient of the outputs reaches.

        Tested with two rows in eval mode and, for the names that remain, with all rows in training
        mode, which may use more heads or experts.
        """
        leaves = {name: params[name].detach().requires_grad_(name in names) for name in self.names}
        with rng.isolated(0, inputs[0].device), torch.enable_grad():
            found = _reached(self.evaluate(leaves, *_rows(inputs, 2)), leaves)
            if not found.issuperset(names):
                outputs = self._in_training(leaves)(*inputs)
                found |= _reached(outputs, leaves)
                if (
                    not found.issuperset(names) and outputs.requires_grad
                ):  # checkpointing hides a part of the graph
                    outputs.sum().backward()
                    found |= {name for name, leaf in leaves.items() if leaf.grad is not None}
        return [name for name in names if name not in found]

    def buffers(self) -> Params:
        """The persistent buffers of the network, without constants."""
        return no_grad_state(self.net)


class _Backward(nn.Module):
    """The backward pass as a module, so that ``functional_call`` gives ``net`` its tensors
    meanwhile.
    """

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, outputs: Tensor, grad: Tensor) -> None:
        torch.autograd.backward(outputs, grad)


class _Recomputing(torch.autograd.Function):
    """A call of a network that computes parts of itself again in the backward pass: it has its
    tensors there, too.

    Its gradients have no graph, so that a derivative which is to be differentiated again raises an
    error.
    """

    @staticmethod
    def forward(
        ctx: Any, network: Network, inputs: tuple[Any, ...], names: list[str], *values: Tensor
    ) -> Tensor:
        ctx.network = network
        ctx.leaves = {
            n: v.detach().requires_grad_(v.requires_grad)
            for n, v in zip(names, values, strict=True)
        }
        with torch.enable_grad():
            ctx.out = network._with(ctx.leaves, network.net, inputs)
        out: Tensor = ctx.out.detach()
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        if (
            torch.is_grad_enabled()
        ):  # create_graph=True; torch's once_differentiable does not notice autograd.grad
            raise NotImplementedError(
                "a network with gradient checkpointing has only first derivatives; create_graph=True was requested: "
                "turn checkpointing off"
            )
        ctx.network._with(ctx.leaves, _Backward(ctx.network.net), (ctx.out, grad), "net.")
        return None, None, None, *(leaf.grad for leaf in ctx.leaves.values())


class Shell:
    """A copy of the modules of a skeleton in eval mode, with the same tensors, that one caller
    fills and empties.

    ``functional_call`` without the name lookups of every call, on private modules.
    """

    def __init__(self, net: nn.Module, aliases: dict[str, str]) -> None:
        shared = [
            value
            for module in net.modules()
            for value in (*vars(module).values(), *module._buffers.values())
        ]
        self.net = copy.deepcopy(
            net, {id(value): value for value in shared if isinstance(value, Tensor)}
        ).eval()
        pairs = zip(self.net.modules(), net.modules(), strict=True)
        self.buffers = [
            (mine._buffers, theirs._buffers) for mine, theirs in pairs if theirs._buffers
        ]
        self.places: dict[str, list[tuple[dict[str, Any], str]]] = {}  # where a name goes
        for prefix, module in self.net.named_modules(remove_duplicate=False):
            for leaf in module._buffers:
                name = f"{prefix}.{leaf}" if prefix else leaf
                self.places.setdefault(aliases.get(name, name), []).append((module._buffers, leaf))
        self.recurrent = [module for module in self.net.modules() if isinstance(module, nn.RNNBase)]

    def fill(self, params: Params) -> None:
        """Set these tensors, and the current buffers of the network."""
        for mine, theirs in self.buffers:
            mine.update(theirs)
        for name, value in params.items():
            for buffers, leaf in self.places[name]:
                buffers[leaf] = value

    def empty(self) -> None:
        """Release the tensors."""
        for mine, theirs in self.buffers:
            mine.update(theirs)
        for rnn in self.recurrent:
            forget(rnn)


@dataclass(frozen=True)
class DryRun:
    """The result of a dry run in eval mode.

    ``numbers``: the size of the largest tensor per input row. ``rows_apart``: rows do not interact,
    as they do in a batch norm without running statistics. ``random``: the network draws random
    numbers. ``channels_last``: it supports images in this memory format, up to three times as fast
    on a CPU. ``writes``: it changes its input in place.
    """

    numbers: int = 1
    rows_apart: bool = True
    random: bool = False
    channels_last: bool = False
    writes: bool = False


def channels_last(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Inputs with images (B, C, H, W) in the order of memory B, H, W, C."""

    def laid(item: Any) -> Any:
        if not isinstance(item, Tensor) or item.ndim != 4:
            return item
        return torch.empty_like(item, memory_format=torch.channels_last).copy_(
            item
        )  # where C = 1 too

    return tuple(map(laid, inputs))


class _Sizes(TorchFunctionMode):
    """Notes how large the tensors are that operations make."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.drawn = 0  # the total size of those that depend on a draw, inside vmap

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        self.sizes += [leaf.numel() for leaf in leaves]
        self.drawn += sum(
            leaf.numel() for leaf in leaves if torch._C._functorch.is_batchedtensor(leaf)
        )
        return out


@torch.no_grad()
def _dry_run(call: Callable[..., Tensor], inputs: tuple[Any, ...], images: bool) -> DryRun:
    """Two passes with two rows and with three: what grows with them is activations, the rest are
    weights.
    """
    device, noted, outputs = inputs[0].device, [], []
    with rng.isolated(0, device):
        before = rng.states(device)
        for n in (2, 3):
            few = _rows(inputs, n)
            versions = [item._version for item in few if isinstance(item, Tensor)]
            with _Sizes() as mode, PlainAttention():  # which shows its weights
                outputs.append(call(*few))
            noted.append(mode.sizes)
        writes = versions != [item._version for item in few if isinstance(item, Tensor)]
        random = not all(map(torch.equal, before, rng.states(device)))
    two, three = noted
    grown = (
        [b - a for a, b in zip(two, three, strict=True)]
        if len(two) == len(three)
        else [sum(three) - sum(two)]
    )
    last = (
        images
        and device.type == "cpu"
        and not random
        and _takes_channels_last(call, few, outputs[1])
    )
    unknown = random or not bool(outputs[0].isfinite().all())
    return DryRun(
        max([1, *grown]), unknown or close(outputs[0], outputs[1][:2]), random, last, writes
    )


def _kinds(inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """The shapes of one row and the dtypes of the inputs."""
    return tuple(
        (item.shape[1:], item.dtype) if isinstance(item, Tensor) else repr(item) for item in inputs
    )


def _rows(inputs: tuple[Any, ...], n: int) -> tuple[Any, ...]:
    """Copies of the first row, the last and the one between: of the first n of these."""
    index = torch.tensor([0, -1, len(inputs[0]) // 2][:n], device=inputs[0].device)
    return rows_of(inputs, index)


def _reached(outputs: Tensor, leaves: Params) -> set[str]:
    """The names of the leaves in the autograd graph of the outputs; no gradient is computed."""
    names, found, seen, nodes = (
        {id(leaf): name for name, leaf in leaves.items()},
        set(),
        set(),
        [outputs.grad_fn],
    )
    while nodes:
        node = nodes.pop()
        if node is not None and node not in seen:
            seen.add(node)
            found.add(names.get(id(getattr(node, "variable", None)), ""))
            nodes += [after for after, _ in node.next_functions]
    return found


def _takes_channels_last(
    call: Callable[..., Tensor], inputs: tuple[Any, ...], outputs: Tensor
) -> bool:
    """Whether the outputs are the same in channels-last memory format, where a ``view`` raises an
    error.
    """
    try:
        return close(call(*channels_last(inputs)), outputs)
    except RuntimeError:
        return False


def close(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are equal up to rounding."""
    if not a.is_floating_point():
        return torch.equal(a, b)
    return (
        bool((a - b).abs().max() <= 1e4 * torch.finfo(a.dtype).eps * a.abs().max())
        if a.numel()
        else True
    )


def check_network(net: Any) -> None:
    """A ValueError unless this is a module with parameters, all of them real, dense and with
    values.
    """
    if not isinstance(net, nn.Module):
        raise ValueError(
            f"net must be an nn.Module, got {type(net).__name__}; pass the network itself: Net(...)"
        )
    who = type(net).__name__
    if isinstance(net, torch.jit.ScriptModule):
        raise ValueError(
            f"{who} is compiled by torch.jit and cannot be given other weights; pass the module it is of"
        )
    if any(_is_exported(module) for module in net.modules()):
        raise ValueError(
            f"{who} is a program of torch.export, whose graph is fixed: it has no training mode and takes only as many "
            "rows as it was exported with; pass the module that was exported"
        )
    if next(net.parameters(), None) is None:
        raise ValueError(
            f"{who} has no parameters, so there is nothing to learn; give it a layer that has some"
        )
    resharded(net)
    for name, parameter in net.named_parameters():
        if is_lazy(parameter):
            raise ValueError(
                f"{name!r} of {who} is lazy and has no shape yet; call the network once on a batch: net(x)"
            )
        if is_sharded(parameter) and parameter.requires_grad:
            raise ValueError(
                f"{name!r} of {who} is sharded (fully_shard); freeze it, or add it to ignored_params"
            )
        _check_has_values(name, parameter, who)
        if parameter.is_complex() or parameter.layout != torch.strided:
            what = f"{parameter.dtype}" if parameter.is_complex() else f"{parameter.layout}"
            way = (
                "keep its real and imaginary parts as two"
                if parameter.is_complex()
                else "use to_dense()"
            )
            raise ValueError(
                f"{name!r} of {who} is {what}; parameters must be real and dense tensors: {way}"
            )
    for name, buffer in net.named_buffers():
        _check_has_values(name, buffer, who)


def _is_exported(module: nn.Module) -> bool:
    """Return whether a module is ``ExportedProgram.module()``, whose graph replaces the method
    ``train``.
    """
    return isinstance(module, fx.GraphModule) and "train" in vars(module)


def _check_has_values(name: str, value: Tensor, who: str) -> None:
    """Raise a ValueError for a parameter or buffer on the meta device."""
    if value.is_meta:
        raise ValueError(
            f"{name!r} of {who} is on the meta device and has no values; use net.to_empty(device='cpu') and "
            "load_state_dict, or build the network on a device"
        )


def is_constant(buffer: Tensor) -> bool:
    """Whether a buffer is a mask or a quantized weight: of bools, or of integers below 64 bits,
    which count nothing.
    """
    return not (buffer.is_floating_point() or buffer.is_complex() or buffer.dtype == torch.int64)


def shared_copy(
    net: nn.Module, free: Collection[str] | None = None, *, clone: bool = False
) -> nn.Module:
    """A copy of the modules of a network that shares the values of its parameters.

    Constants are shared, too; other buffers, which may be running statistics, are copied.

    Args:
        net: the network; it is not changed.
        free: the names of the parameters that require gradients in the copy, by default those that
            do in ``net``.
        clone: copy the free parameters; only frozen ones are shared.
    """
    sharded = resharded(net)
    memo: dict[int, Any] = {
        id(value): value.detach() for value in net.buffers() if is_constant(value)
    }
    for name, value in net.named_parameters():
        needed = value.requires_grad if free is None else name in free
        if (
            type(value) is not nn.Parameter and not needed
        ):  # of another library, with attributes of its own
            memo[id(value)] = value
        elif not (needed and clone):
            memo[id(value)] = nn.Parameter(value.detach(), needed)
    share_sharded(sharded, memo)
    return copy.deepcopy(net, memo)


def skeleton(net: nn.Module) -> tuple[nn.Module, dict[str, str]]:
    """A copy of the network with empty placeholders for free parameters, and their tied names:
    alias → name.

    Frozen parameters become buffers that share their values. Neither they nor constants are in its
    ``state_dict``.
    """
    net = adapted(shared_copy(net))
    canonical = {
        id(parameter): name for name, parameter in net.named_parameters() if parameter.requires_grad
    }
    aliases = {
        name: canonical[id(parameter)]
        for name, parameter in net.named_parameters(remove_duplicate=False)
        if canonical.get(id(parameter), name) != name
    }
    for module in net.modules():
        for leaf, parameter in list(module._parameters.items()):
            if parameter is not None:
                del module._parameters[leaf]
                plain = parameter.detach() if type(parameter) is nn.Parameter else parameter
                value = plain.new_empty(0) if parameter.requires_grad else plain
                module.register_buffer(leaf, value, persistent=False)
        for leaf, buffer in list(module._buffers.items()):
            if buffer is not None and is_constant(buffer):
                module.register_buffer(leaf, buffer, persistent=False)
        if isinstance(module, nn.RNNBase):
            forget(module)
    return net, aliases


def forget(rnn: nn.RNNBase) -> None:
    """Release the weights of the last call, which a recurrent layer keeps in a list, with their
    graph.
    """
    rnn._flat_weights = [getattr(rnn, name) for name in rnn._flat_weights_names]
    rnn._flat_weight_refs = [
        None if weight is None else weakref.ref(weight) for weight in rnn._flat_weights
    ]

"""The units of a network and the layers that read them, by a trace of its graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

Kind = Literal[
    "last", "channels", "flat"
]  # units on the last axis, on axis 1, on axis 1 that was flattened
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
SAME = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
ELEMENTWISE = (
    nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Softsign,
    nn.Tanh, nn.Sigmoid, nn.LogSigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid,
)  # fmt: skip
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)
MEAN_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
DROPOUT_CALLS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
ELEMENTWISE_CALLS = {
    F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish, F.softplus, F.softsign, F.tanh,
    F.sigmoid, F.logsigmoid, F.hardtanh, F.hardswish, torch.relu, torch.tanh, torch.sigmoid, torch.sin,
    "relu", "tanh", "sigmoid", "sin",
}  # fmt: skip
MAX_POOL_CALLS = {
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    F.adaptive_max_pool1d,
    F.adaptive_max_pool2d,
}
MEAN_POOL_CALLS = {
    F.avg_pool1d,
    F.avg_pool2d,
    F.avg_pool3d,
    F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
}
BINARY: dict[Any, Any] = {
    operator.add: torch.add,
    operator.iadd: torch.add,
    torch.add: torch.add,
    "add": torch.add,
}
BINARY |= {
    operator.sub: torch.sub,
    torch.sub: torch.sub,
    operator.mul: torch.mul,
    torch.mul: torch.mul,
}
Constants = dict[fx.Node, Tensor]


def unknown(c: Tensor) -> Tensor:
    """NaN for values that are not constant any more; 0 stays 0."""
    return torch.where(c == 0, c, torch.nan)


@final
class Group:
    """n units that are removed together: those of one layer, or of several whose outputs are
    added.
    """

    def __init__(self, n: int) -> None:
        self.n, self.whole = n, ""  # why no unit may be removed
        self._into: Group | None = None

    def find(self) -> Group:
        """The group that this one is part of."""
        return self if self._into is None else self._into.find()

    def tie(self, other: Group) -> None:
        """Merge the two groups."""
        a, b = self.find(), other.find()
        if a is not b:
            a.whole = a.whole or b.whole
            b._into = a


@dataclass(frozen=True)
class Value:
    """A tensor of the graph whose units are known."""

    group: Group
    kind: Kind
    space: int = 0  # axes behind the units

    def columns(self, total: int) -> Tensor:
        """The unit that each of ``total`` features, in the order of the tensor, belongs to."""
        index = torch.arange(total)
        return (
            index % self.group.n if self.kind == "last" else index // max(1, total // self.group.n)
        )


def _has_no_padding(module: Any) -> bool:
    return set(module.padding) <= {0}  # it may be a word


@dataclass
class Layer:
    """A linear layer or a convolution: what it reads, and the units that it makes."""

    name: str
    module: Any
    made: Group
    source: fx.Node | None = None  # the tensor that it reads, if its units are known
    read: Value | None = None

    @property
    def units(self) -> Group:
        """The group of the units that it makes."""
        return self.made.find()

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of the weight that count outputs and inputs."""
        return (1, 0) if isinstance(self.module, TRANSPOSED) else (0, 1)

    @property
    def inputs(self) -> int:
        """The number of its inputs."""
        return int(self.module.weight.shape[self.axes[1]])

    @property
    def folds(self) -> bool:
        """Whether a constant input can be added to the bias: not with zero padding."""
        if isinstance(self.module, nn.Linear):
            return True
        return isinstance(self.module, CONVOLUTIONS) and _has_no_padding(self.module)


@dataclass
class Depthwise:
    """A convolution with a filter for each channel: it reads and makes the same units."""

    name: str
    module: Any
    value: Value

    def constant_outputs(self, constant: Tensor) -> Tensor:
        """Return the output of every unit that is constant, NaN for the others, given the same of
        its input.

        A filter of zeros gives its bias. Another one gives a constant for a constant input without
        zeros around it.
        """
        weight = self.module.weight.flatten(1)
        bias = weight.new_zeros(len(weight)) if self.module.bias is None else self.module.bias
        is_padded = not _has_no_padding(self.module)
        response = unknown(constant) if is_padded else constant * weight.sum(1)
        is_zero = (weight == 0).all(1) | (constant == 0)
        return bias + torch.where(is_zero, 0.0, response)


@dataclass
class Followed:
    """The followed part of a network. ``rules``: the value of each unit of a tensor that is
    constant, else NaN.
    """

    layers: dict[str, Layer] = field(default_factory=dict)
    depthwise: dict[str, Depthwise] = field(default_factory=dict)
    norms: dict[str, Value] = field(default_factory=dict)
    rules: list[tuple[fx.Node, Callable[[Constants], Tensor]]] = field(default_factory=list)
    whole: dict[str, str] = field(default_factory=dict)  # what could not be followed, and why


@final
class _Tracer(fx.Tracer):
    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return m in self.opaque or super().is_leaf_module(m, module_qualified_name)


def trace(net: nn.Module) -> fx.Graph:
    """The graph of a network; parts with branches on values are one node each."""
    opaque: set[nn.Module] = set()
    graph, problem = None, ""
    for part in reversed(list(net.modules())):  # children first
        if part is not net and type(part).__module__.startswith("torch.nn"):
            continue
        try:
            graph = _Tracer(opaque).trace(part)
        except Exception as error:
            opaque.add(part)
            graph, problem = (
                None,
                str(error).splitlines()[0] if str(error) else type(error).__name__,
            )
    if graph is None:
        raise ValueError(
            f"the forward of {type(net).__name__} cannot be followed by torch.fx: {problem}; move what branches on "
            "values into a submodule, which is then left whole"
        )
    return graph


def follow(
    net: nn.Module, outputs: Callable[[Layer, Constants], Tensor], matrices: Collection[str] = ()
) -> Followed:
    """The layers of a network with the units that they read and make.

    Args:
        net: the network.
        outputs: those of a layer that are constant, NaN for the others, given constants so far.
        matrices: the modules known to read (N, units). Of (N, units, length) a batch norm has its
            numbers for axis 1.
    """
    return _Follower(net, outputs, matrices).run()


@final
class _Follower:
    def __init__(
        self,
        net: nn.Module,
        outputs: Callable[[Layer, Constants], Tensor],
        matrices: Collection[str],
    ) -> None:
        self.graph, self.outputs, self.matrices = trace(net), outputs, matrices
        self.modules = dict(net.named_modules(remove_duplicate=False))
        self.values: dict[fx.Node, Value] = {}
        self.found = Followed()
        uses = Counter(id(p) for _, p in net.named_parameters(remove_duplicate=False))
        uses += Counter(id(p) for node in self.graph.nodes if node.op == "call_module"
                        for p in self.modules[str(node.target)].parameters())  # fmt: skip
        for node in self.graph.nodes:
            if node.op == "get_attr":
                uses.update(id(p) for n, p in net.named_parameters() if n == node.target)
        self.shared = {
            key for key, count in uses.items() if count > 2
        }  # once by name, once by call

    def run(self) -> Followed:
        for node in self.graph.nodes:
            if node.op == "call_module":
                self._module(node, self.modules[str(node.target)])
            elif node.op in ("call_function", "call_method"):
                self._call(node)
            elif node.op == "output":
                self._stop(node, "the output of the network")
        return self.found

    def _stop(self, node: fx.Node, why: str) -> None:
        for value in (self.values[item] for item in node.all_input_nodes if item in self.values):
            group = value.group.find()
            group.whole = group.whole or why

    def _leave(self, node: fx.Node, what: str) -> None:
        """Stop at this node: its inputs stay whole."""
        if node.op == "call_module":
            self.found.whole[str(node.target)] = what
        self._stop(node, f"read by {what if node.op != 'call_module' else node.target}")

    def _pass(
        self, node: fx.Node, rule: Callable[[Tensor], Tensor], kind: Kind | None = None
    ) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        value = self.values[source]
        self.values[node] = Value(value.group, kind or value.kind, 0 if kind else value.space)

        def propagate(constants: Constants) -> Tensor:
            constant = constants[source]
            return torch.where(constant.isnan(), torch.nan, rule(constant))

        self.found.rules.append((node, propagate))

    def _module(self, node: fx.Node, module: Any) -> None:
        value = (
            self.values.get(node.args[0])
            if node.args and isinstance(node.args[0], fx.Node)
            else None
        )
        name = str(node.target)
        plain = "weight" in module._parameters and not any(
            id(p) in self.shared for p in module.parameters()
        )
        if isinstance(module, LAYERS):
            if plain and value is not None and len(node.args) == 1 and _is_depthwise(module, value):
                self._depthwise(node, Depthwise(name, module, value))
            elif not plain or getattr(module, "groups", 1) != 1 or len(node.args) != 1:
                self._leave(
                    node, f"{type(module).__name__} with groups, tied or reparametrized weights"
                )
            else:
                self._layer(node, name, module, value)
        elif (
            value is None
            or len(node.args) != 1
            or node.kwargs
            or _changes_what_others_read(node, module)
        ):
            if any(True for _ in module.parameters()):
                self.found.whole[name] = f"{type(module).__name__} is not followed"
            self._stop(node, f"read by {name}")
        elif (
            isinstance(module, NORMS)
            and (plain or not module.affine)
            and self._fits(name, module, value)
        ):
            self.found.norms[name] = value
            self._pass(node, lambda c: _normalized(module, c))
        elif isinstance(module, ELEMENTWISE) or (
            isinstance(module, nn.PReLU) and module.num_parameters == 1
        ):
            self._pass(node, lambda c: module(c.clone()))
        elif isinstance(module, SAME):
            self._pass(node, lambda c: c)
        elif isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
            self._pass(node, lambda c: c, "flat" if value.kind == "channels" else None)
        elif (
            isinstance(module, MAX_POOLS)
            and value.kind == "channels"
            and not getattr(module, "return_indices", 0)
        ):
            self._pass(node, lambda c: c)
        elif isinstance(module, MEAN_POOLS) and value.kind == "channels":
            self._pass(node, lambda c: unknown(c) if _changes_means(module) else c)
        else:
            where = (
                ", but for (N, units): pass an example_x of such"
                if isinstance(module, nn.BatchNorm1d)
                else ""
            )
            self._leave(node, f"{type(module).__name__} is not followed{where}")

    def _fits(self, name: str, module: Any, value: Value) -> bool:
        """Whether a batch norm has numbers for these units."""
        if value.kind == "channels":
            return bool(module.num_features == value.group.n)
        known = value.kind == "flat" or name in self.matrices
        return (
            known
            and isinstance(module, nn.BatchNorm1d)
            and module.num_features % value.group.n == 0
        )

    def _layer(self, node: fx.Node, name: str, module: Any, value: Value | None) -> None:
        linear = isinstance(module, nn.Linear)
        total = module.in_features if linear else module.in_channels
        layer = Layer(name, module, Group(module.out_features if linear else module.out_channels))
        if (
            value is not None
            and (value.kind == "channels") != linear
            and total % value.group.n == 0
        ):
            layer.source, layer.read = node.args[0], value  # type: ignore[assignment]
        else:
            self._stop(node, f"read by {layer.name} on another axis")
        self.values[node] = Value(
            layer.made, "last" if linear else "channels", module.weight.ndim - 2
        )
        self.found.layers[layer.name] = layer
        self.found.rules.append((node, lambda constants: self.outputs(layer, constants)))

    def _depthwise(self, node: fx.Node, layer: Depthwise) -> None:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        self.values[node] = layer.value
        self.found.depthwise[layer.name] = layer
        self.found.rules.append((node, lambda constants: layer.constant_outputs(constants[source])))

    def _call(self, node: fx.Node) -> None:
        target: Any = node.target
        known = [item for item in node.all_input_nodes if item in self.values]
        if not known or _asks_rows(node):
            return
        value = self.values[known[0]]
        first = bool(node.args) and node.args[0] is known[0]
        alone = first and len(node.all_input_nodes) == 1
        if _changes_what_others_read(node):
            self._leave(node, f"{getattr(target, '__name__', target)}() in place")
        elif target in BINARY and len(node.args) == 2 and not node.kwargs:
            self._binary(node, BINARY[target])
        elif alone and target in ELEMENTWISE_CALLS:
            function = getattr(torch, target) if isinstance(target, str) else target
            self._pass(node, lambda c: function(c.clone(), *node.args[1:], **node.kwargs))
        elif alone and target in DROPOUT_CALLS:
            self._pass(node, lambda c: c if node.kwargs.get("training") is False else unknown(c))
        elif first and _flattens(node):
            self._pass(node, lambda c: c, "flat" if value.kind == "channels" else None)
        elif (
            alone
            and target in MAX_POOL_CALLS
            and value.kind == "channels"
            and not node.kwargs.get("return_indices")
        ):
            self._pass(node, lambda c: c)
        elif alone and target in MEAN_POOL_CALLS and value.kind == "channels":
            self._pass(node, lambda c: c if "adaptive" in target.__name__ else unknown(c))
        elif alone and value.kind == "channels" and _means_over(node, value.space):
            self._pass(node, lambda c: c, "last")
        else:
            self._leave(node, f"{getattr(target, '__name__', target)}()")

    def _binary(self, node: fx.Node, function: Callable[..., Tensor]) -> None:
        sides: tuple[Any, ...] = node.args
        plain = all(isinstance(side, fx.Node | int | float) for side in sides)
        values = [self.values[side] for side in sides if side in self.values] if plain else []
        numbers = [side for side in sides if isinstance(side, int | float)]
        same = len({(value.group.n, value.kind, value.space) for value in values}) == 1
        if not values or len(values) + len(numbers) < 2 or not same:
            return self._leave(node, f"{function.__name__}() with what has other units")
        for value in values[1:]:
            values[0].group.tie(value.group)
        self.values[node] = values[0]

        def rule(constants: Constants) -> Tensor:
            return function(
                *(constants[s] if isinstance(s, fx.Node) else torch.as_tensor(s) for s in sides)
            )

        self.found.rules.append((node, rule))


def _is_depthwise(module: Any, value: Value) -> bool:
    """Return whether a convolution has one filter for each of these units."""
    if not isinstance(module, CONVOLUTIONS) or value.kind != "channels":
        return False
    return bool(module.groups == module.in_channels == module.out_channels == value.group.n)


def _changes_what_others_read(node: fx.Node, module: Any = None) -> bool:
    """Whether an operation in place has a source that something else reads as well."""
    place = (
        node.target is operator.iadd
        or getattr(module, "inplace", False)
        or node.kwargs.get("inplace", False)
    )
    place = place or (node.target is F.relu and node.args[1:] == (True,))
    return bool(place) and isinstance(node.args[0], fx.Node) and len(node.args[0].users) > 1


def _changes_means(module: Any) -> bool:
    """Whether the mean over a window of a constant is another number: zeros are padded, or the
    divisor is given.
    """
    padding = getattr(module, "padding", 0)  # adaptive pooling has none
    padded = any(padding) if isinstance(padding, tuple) else padding
    return bool(padded) or getattr(module, "divisor_override", None) is not None


def _normalized(module: Any, c: Tensor) -> Tensor:
    if module.running_mean is None or len(module.running_mean) != len(c):
        return torch.full_like(c, torch.nan)
    out = (c - module.running_mean) * (module.running_var + module.eps).rsqrt()
    return out * module.weight + module.bias if module.affine else out


def _asks_rows(node: fx.Node) -> bool:
    """x.size(0) or x.shape[0]."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    if node.target is getattr and node.args[1:] == ("shape",):
        return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return False


def _flattens(node: fx.Node) -> bool:
    """flatten(x, 1), x.flatten(1), x.view(x.size(0), -1) or the like."""
    if node.target in (torch.flatten, "flatten"):
        options: Any = (
            dict(zip(("start_dim", "end_dim"), node.args[1:], strict=False)) | node.kwargs
        )
        return (options.get("start_dim", 0), options.get("end_dim", -1)) == (1, -1)
    if node.target not in ("view", "reshape", torch.reshape) or node.kwargs:
        return False
    sizes: Any = node.args[1:]
    sizes = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], tuple | list) else sizes
    return len(sizes) == 2 and isinstance(sizes[0], fx.Node) and sizes[1] == -1


def _means_over(node: fx.Node, space: int) -> bool:
    """x.mean((2, 3)) for images."""
    if node.target not in (torch.mean, "mean"):
        return False
    options: Any = dict(zip(("dim", "keepdim"), node.args[1:], strict=False)) | node.kwargs
    dims = options.get("dim")
    return (
        not options.get("keepdim")
        and isinstance(dims, tuple | list)
        and {d % (space + 2) for d in dims} == {*range(2, space + 2)}
    )

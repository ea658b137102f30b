"""The units of a network and the layers that read them, by a trace of its graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

# Units on the last axis, on axis 1, or on axis 1 that was flattened with the axes behind it.
Layout = Literal["last", "channels", "flat"]
WeightedModule = nn.Linear | _ConvNd
Constants = dict[fx.Node, Tensor]
ConstantRule = Callable[[Tensor], Tensor]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
IDENTITIES = (nn.Identity, nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
ELEMENTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Softplus,
    nn.Softsign,
    nn.Tanh,
    nn.Sigmoid,
    nn.LogSigmoid,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
)
MAX_POOLS = (nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d)
MEAN_POOLS = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d)
DROPOUT_CALLS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
ELEMENTWISE_CALLS = {
    F.relu,
    F.relu6,
    F.leaky_relu,
    F.elu,
    F.celu,
    F.selu,
    F.gelu,
    F.silu,
    F.mish,
    F.softplus,
    F.softsign,
    F.tanh,
    F.sigmoid,
    F.logsigmoid,
    F.hardtanh,
    F.hardswish,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    torch.sin,
    "relu",
    "tanh",
    "sigmoid",
    "sin",
}
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
BINARY_CALLS: dict[Any, Callable[..., Tensor]] = {
    operator.add: torch.add,
    operator.iadd: torch.add,
    torch.add: torch.add,
    "add": torch.add,
    operator.sub: torch.sub,
    torch.sub: torch.sub,
    operator.mul: torch.mul,
    torch.mul: torch.mul,
}


@final
class UnitGroup:
    """The units that are removed together: those of one layer, or of layers that are added.

    Args:
        size: the number of units.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.reason_to_stay = ""  # why no unit may be removed; empty where units may be
        self._parent: UnitGroup | None = None

    def root(self) -> UnitGroup:
        """Return the group into which this one was merged, or the group itself."""
        if self._parent is None:
            return self
        return self._parent.root()

    def merge(self, group: UnitGroup) -> None:
        """Merge the units of another group with those of this one."""
        root = self.root()
        merged = group.root()
        if root is not merged:
            root.reason_to_stay = root.reason_to_stay or merged.reason_to_stay
            merged._parent = root


@dataclass(frozen=True)
class UnitTensor:
    """A tensor of the graph whose units are known.

    Args:
        group: its units.
        layout: the axis that they lie on.
        spatial_axes: the number of axes behind the units.
    """

    group: UnitGroup
    layout: Layout
    spatial_axes: int = 0

    def units_of_features(self, total: int) -> Tensor:
        """Return the unit to which each of ``total`` features belongs, in the tensor's order."""
        index = torch.arange(total)
        if self.layout == "last":
            return index % self.group.size
        return index // max(1, total // self.group.size)


@dataclass
class UnitLayer:
    """A linear layer or a convolution: the tensor that it reads, and the units of its output.

    Args:
        name: the path of the module in the network.
        module: the layer itself.
        outputs: its units, before groups are merged.
        source: the node that it reads, if the units of that node are known.
        read: the units that it reads.
    """

    name: str
    module: WeightedModule
    outputs: UnitGroup
    source: fx.Node | None = None
    read: UnitTensor | None = None

    @property
    def units(self) -> UnitGroup:
        """The group of the units of its output."""
        return self.outputs.root()

    @property
    def axes(self) -> tuple[int, int]:
        """The axes of the weight that count outputs and inputs."""
        return (1, 0) if isinstance(self.module, TRANSPOSED) else (0, 1)

    @property
    def inputs(self) -> int:
        """The number of its inputs."""
        return int(self.module.weight.shape[self.axes[1]])

    @property
    def can_absorb_constants(self) -> bool:
        """Whether a constant input can be added to the bias: not with zero padding."""
        if isinstance(self.module, nn.Linear):
            return True
        return isinstance(self.module, CONVOLUTIONS) and _has_no_padding(self.module)


@dataclass
class DepthwiseLayer:
    """A convolution with a filter for each channel: its inputs and outputs are the same units.

    Args:
        name: the path of the module in the network.
        module: the convolution.
        tensor: the units that it reads, which are those of its output.
    """

    name: str
    module: _ConvNd
    tensor: UnitTensor

    @property
    def units(self) -> UnitGroup:
        """The group of the units that it reads and returns."""
        return self.tensor.group.root()

    def constant_outputs(self, constant: Tensor) -> Tensor:
        """Return the constant output of each unit, NaN where it varies, from those of the input.

        A filter of zeros gives its bias. Another one gives a constant for a constant input without
        zeros around it.
        """
        weight = self.module.weight.flatten(1)
        bias = self.module.bias
        if bias is None:
            bias = weight.new_zeros(len(weight))
        has_no_padding = _has_no_padding(self.module)
        response = constant * weight.sum(1) if has_no_padding else mark_varying(constant)
        is_zero = (weight == 0).all(1) | (constant == 0)
        return bias + torch.where(is_zero, 0.0, response)


@dataclass
class UnitGraph:
    """The layers of a network whose units are known.

    Args:
        layers: linear layers and convolutions by name.
        depthwise: depthwise convolutions by name.
        norms: the units of each batch norm by name.
        rules: for each node, in order, the function from the constants of the nodes before it to
            its own: a number for each unit that is constant, NaN for the others.
        unchanged: modules whose units are not known, and why.
    """

    layers: dict[str, UnitLayer] = field(default_factory=dict)
    depthwise: dict[str, DepthwiseLayer] = field(default_factory=dict)
    norms: dict[str, UnitTensor] = field(default_factory=dict)
    rules: list[tuple[fx.Node, Callable[[Constants], Tensor]]] = field(default_factory=list)
    unchanged: dict[str, str] = field(default_factory=dict)

    def constants(self) -> Constants:
        """Compute the constant units of every node, NaN for the units that vary."""
        constants: Constants = {}
        for node, rule in self.rules:
            constants[node] = rule(constants)
        return constants


def build_unit_graph(
    net: nn.Module,
    constant_outputs: Callable[[UnitLayer, Constants], Tensor],
    matrix_norms: Collection[str] = (),
) -> UnitGraph:
    """Find the layers of a network with the units that they read and those of their outputs.

    Args:
        net: the network.
        constant_outputs: gives the constant outputs of a layer, NaN for those that vary, from the
            constants of the nodes before it.
        matrix_norms: names of the batch norms that are known to read (N, units). For
            (N, units, length) a batch norm has its numbers for axis 1.

    Raises:
        ValueError: if torch.fx cannot trace the network.
    """
    return _UnitGraphBuilder(net, constant_outputs, matrix_norms).build()


def mark_varying(constant: Tensor) -> Tensor:
    """Return NaN for numbers other than 0, which are not constant any more; 0 stays 0."""
    return torch.where(constant == 0, constant, torch.nan)


@final
class _OpaqueTracer(fx.Tracer):
    """A tracer that leaves some modules as one node each."""

    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one node of the graph."""
        return m in self.opaque or super().is_leaf_module(m, module_qualified_name)


def trace(net: nn.Module) -> fx.Graph:
    """Trace a network; modules that branch on values are one node each.

    Raises:
        ValueError: if the forward of the network itself cannot be traced.
    """
    opaque: set[nn.Module] = set()
    graph: fx.Graph | None = None
    problem = ""
    for module in reversed(list(net.modules())):  # children first
        if module is not net and type(module).__module__.startswith("torch.nn"):
            continue
        try:
            graph = _OpaqueTracer(opaque).trace(module)
        except Exception as error:
            opaque.add(module)
            graph = None
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    if graph is None:
        raise ValueError(
            f"the forward of {type(net).__name__} cannot be followed by torch.fx: {problem}; "
            "move what branches on values into a submodule, which is then left whole"
        )
    return graph


class _Step(NamedTuple):
    """An operation on known units: its effect on constants, and the new layout if it changes."""

    rule: ConstantRule
    layout: Layout | None = None


@final
class _UnitGraphBuilder:
    """Visits the nodes of a traced network and records which units each of them has."""

    def __init__(
        self,
        net: nn.Module,
        constant_outputs: Callable[[UnitLayer, Constants], Tensor],
        matrix_norms: Collection[str],
    ) -> None:
        self.trace = trace(net)
        self.constant_outputs = constant_outputs
        self.matrix_norms = matrix_norms
        self.modules = dict(net.named_modules(remove_duplicate=False))
        self.tensors: dict[fx.Node, UnitTensor] = {}
        self.graph = UnitGraph()
        self.shared_parameters = self._find_shared_parameters(net)

    def _find_shared_parameters(self, net: nn.Module) -> set[int]:
        """Return the ids of parameters that are used more than once."""
        uses = Counter(id(value) for _, value in net.named_parameters(remove_duplicate=False))
        for node in self.trace.nodes:
            if node.op == "call_module":
                uses.update(id(value) for value in self.modules[str(node.target)].parameters())
            elif node.op == "get_attr":
                uses.update(
                    id(value) for name, value in net.named_parameters() if name == node.target
                )
        # A parameter that is used once counts two: by its name and by the call of its module.
        return {key for key, count in uses.items() if count > 2}

    def build(self) -> UnitGraph:
        """Visit all nodes in their order."""
        for node in self.trace.nodes:
            if node.op == "call_module":
                self._visit_module(node, self.modules[str(node.target)])
            elif node.op in ("call_function", "call_method"):
                self._visit_call(node)
            elif node.op == "output":
                self._keep_inputs(node, "the output of the network")
        return self.graph

    def _keep_inputs(self, node: fx.Node, reason: str) -> None:
        """Forbid the removal of the units that a node reads."""
        for source in node.all_input_nodes:
            if source in self.tensors:
                group = self.tensors[source].group.root()
                group.reason_to_stay = group.reason_to_stay or reason

    def _reject_module(self, node: fx.Node, reason: str) -> None:
        """Leave a module unchanged, with all units that it reads."""
        name = str(node.target)
        self.graph.unchanged[name] = reason
        self._keep_inputs(node, f"read by {name}")

    def _reject_call(self, node: fx.Node, call: str) -> None:
        """Leave all units that a function reads."""
        self._keep_inputs(node, f"read by {call}")

    def _propagate(self, node: fx.Node, step: _Step) -> None:
        """Record that a node has the units of its first argument."""
        source = _source(node)
        tensor = self.tensors[source]
        if step.layout is None:
            self.tensors[node] = UnitTensor(tensor.group, tensor.layout, tensor.spatial_axes)
        else:
            self.tensors[node] = UnitTensor(tensor.group, step.layout)

        def apply_rule(constants: Constants) -> Tensor:
            constant = constants[source]
            return torch.where(constant.isnan(), torch.nan, step.rule(constant))

        self.graph.rules.append((node, apply_rule))

    def _visit_module(self, node: fx.Node, module: nn.Module) -> None:
        """Record the units of the output of a module."""
        tensor: UnitTensor | None = None
        if node.args and isinstance(node.args[0], fx.Node):
            tensor = self.tensors.get(node.args[0])
        name = str(node.target)
        if isinstance(module, LAYERS):
            self._visit_weighted_module(node, module, tensor)
            return
        has_one_input = len(node.args) == 1 and not node.kwargs
        if tensor is None or not has_one_input or _changes_shared_input(node, module):
            if any(True for _ in module.parameters()):
                self.graph.unchanged[name] = f"{type(module).__name__} is not followed"
            self._keep_inputs(node, f"read by {name}")
            return
        if isinstance(module, NORMS) and self._is_norm_of_units(name, module, tensor):
            self.graph.norms[name] = tensor
            self._propagate(node, _Step(lambda constant: _normalize(module, constant)))
            return
        step = _module_step(module, tensor)
        if step is not None:
            self._propagate(node, step)
            return
        hint = ""
        if isinstance(module, nn.BatchNorm1d):
            hint = ", but for (N, units): pass an example_x of such"
        self._reject_module(node, f"{type(module).__name__} is not followed{hint}")

    def _has_only_own_parameters(self, module: nn.Module) -> bool:
        """Return whether the weight is a parameter that no other module uses."""
        if "weight" not in module._parameters:
            return False
        return not any(id(value) in self.shared_parameters for value in module.parameters())

    def _visit_weighted_module(
        self, node: fx.Node, module: WeightedModule, tensor: UnitTensor | None
    ) -> None:
        """Record a linear layer or a convolution, or why its units stay."""
        name = str(node.target)
        is_plain = self._has_only_own_parameters(module) and len(node.args) == 1
        if (
            is_plain
            and tensor is not None
            and isinstance(module, CONVOLUTIONS)
            and _is_depthwise(module, tensor)
        ):
            self._add_depthwise(node, DepthwiseLayer(name, module, tensor))
        elif is_plain and getattr(module, "groups", 1) == 1:
            self._add_layer(node, name, module, tensor)
        else:
            self._reject_module(
                node, f"{type(module).__name__} with groups, tied or reparametrized weights"
            )

    def _add_layer(
        self, node: fx.Node, name: str, module: WeightedModule, tensor: UnitTensor | None
    ) -> None:
        """Record a linear layer or a convolution without groups, whose outputs are new units."""
        if isinstance(module, nn.Linear):
            layer = UnitLayer(name, module, UnitGroup(module.out_features))
            layout: Layout = "last"
        else:
            layer = UnitLayer(name, module, UnitGroup(module.out_channels))
            layout = "channels"
        if (
            tensor is not None
            and (tensor.layout == "channels") == (layout == "channels")
            and _input_width(module) % tensor.group.size == 0
        ):
            layer.source = _source(node)
            layer.read = tensor
        else:
            self._keep_inputs(node, f"read by {name} on another axis")
        self.tensors[node] = UnitTensor(layer.outputs, layout, module.weight.ndim - 2)
        self.graph.layers[name] = layer
        self.graph.rules.append((node, lambda constants: self.constant_outputs(layer, constants)))

    def _add_depthwise(self, node: fx.Node, layer: DepthwiseLayer) -> None:
        """Record a depthwise convolution, whose outputs are the units that it reads."""
        source = _source(node)
        self.tensors[node] = layer.tensor
        self.graph.depthwise[layer.name] = layer
        self.graph.rules.append((node, lambda constants: layer.constant_outputs(constants[source])))

    def _is_norm_of_units(self, name: str, module: Any, tensor: UnitTensor) -> bool:
        """Return whether a batch norm has numbers of its own for these units."""
        if module.affine and not self._has_only_own_parameters(module):
            return False
        if tensor.layout == "channels":
            return bool(module.num_features == tensor.group.size)
        reads_matrix = tensor.layout == "flat" or name in self.matrix_norms
        is_multiple = module.num_features % tensor.group.size == 0
        return reads_matrix and isinstance(module, nn.BatchNorm1d) and is_multiple

    def _visit_call(self, node: fx.Node) -> None:
        """Record the units of the result of a function or a method."""
        target: Any = node.target
        known_sources = [source for source in node.all_input_nodes if source in self.tensors]
        if not known_sources or _asks_row_count(node):
            return
        call = f"{getattr(target, '__name__', target)}()"
        if _changes_shared_input(node):
            self._reject_call(node, f"{call} in place")
            return
        if target in BINARY_CALLS and len(node.args) == 2 and not node.kwargs:
            self._visit_binary_call(node, BINARY_CALLS[target])
            return
        step: _Step | None = None
        if node.args and node.args[0] is known_sources[0]:
            step = _call_step(node, self.tensors[known_sources[0]])
        if step is None:
            self._reject_call(node, call)
        else:
            self._propagate(node, step)

    def _visit_binary_call(self, node: fx.Node, function: Callable[..., Tensor]) -> None:
        """Record a sum, difference or product of tensors with the same units, or of numbers."""
        operands: tuple[Any, ...] = node.args
        tensors: list[UnitTensor] = []
        if all(isinstance(operand, fx.Node | int | float) for operand in operands):
            tensors = [self.tensors[operand] for operand in operands if operand in self.tensors]
        numbers = [operand for operand in operands if isinstance(operand, int | float)]
        shapes = {(tensor.group.size, tensor.layout, tensor.spatial_axes) for tensor in tensors}
        if len(shapes) != 1 or len(tensors) + len(numbers) < 2:
            self._reject_call(node, f"{function.__name__}() with what has other units")
            return
        for tensor in tensors[1:]:
            tensors[0].group.merge(tensor.group)
        self.tensors[node] = tensors[0]

        def apply_rule(constants: Constants) -> Tensor:
            return function(
                *(
                    constants[operand] if isinstance(operand, fx.Node) else torch.as_tensor(operand)
                    for operand in operands
                )
            )

        self.graph.rules.append((node, apply_rule))


def _module_step(module: nn.Module, tensor: UnitTensor) -> _Step | None:
    """Return the step of a module without weights; None for modules that are not known."""
    if isinstance(module, ELEMENTWISE):
        return _Step(lambda constant: module(constant.clone()))
    if isinstance(module, nn.PReLU) and module.num_parameters == 1:
        return _Step(lambda constant: module(constant.clone()))
    if isinstance(module, IDENTITIES):
        return _Step(_keep_constant)
    if isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1):
        return _flatten_step(tensor)
    if tensor.layout != "channels":
        return None
    if isinstance(module, MAX_POOLS) and not getattr(module, "return_indices", False):
        return _Step(_keep_constant)
    if isinstance(module, MEAN_POOLS):
        return _Step(mark_varying if _changes_constant_means(module) else _keep_constant)
    return None


def _call_step(node: fx.Node, tensor: UnitTensor) -> _Step | None:
    """Return the step of a function of the units in its first argument; None if not known."""
    target: Any = node.target
    if len(node.all_input_nodes) > 1:
        return _flatten_step(tensor) if _is_flattening(node) else None
    if target in ELEMENTWISE_CALLS:
        function = getattr(torch, target) if isinstance(target, str) else target
        return _Step(lambda constant: function(constant.clone(), *node.args[1:], **node.kwargs))
    if target in DROPOUT_CALLS:
        is_off = node.kwargs.get("training") is False
        return _Step(_keep_constant if is_off else mark_varying)
    if _is_flattening(node):
        return _flatten_step(tensor)
    if tensor.layout != "channels":
        return None
    if target in MAX_POOL_CALLS and not node.kwargs.get("return_indices"):
        return _Step(_keep_constant)
    if target in MEAN_POOL_CALLS:
        is_adaptive = "adaptive" in target.__name__
        return _Step(_keep_constant if is_adaptive else mark_varying)
    if _is_mean_over_space(node, tensor.spatial_axes):
        return _Step(_keep_constant, "last")
    return None


def _keep_constant(constant: Tensor) -> Tensor:
    """Return a constant as it is."""
    return constant


def _flatten_step(tensor: UnitTensor) -> _Step:
    """Return the step that flattens all axes but the first."""
    return _Step(_keep_constant, "flat" if tensor.layout == "channels" else None)


def _source(node: fx.Node) -> fx.Node:
    """Return the node that is the first argument."""
    source = node.args[0]
    if not isinstance(source, fx.Node):
        raise TypeError(f"the first argument of {node} is not a tensor of the graph")
    return source


def _has_no_padding(module: _ConvNd) -> bool:
    """Return whether a convolution pads nothing; padding may be a word."""
    return set(module.padding) <= {0}


def _input_width(module: WeightedModule) -> int:
    """Return the number of features or channels that a layer reads."""
    return module.in_features if isinstance(module, nn.Linear) else module.in_channels


def _is_depthwise(module: _ConvNd, tensor: UnitTensor) -> bool:
    """Return whether a convolution has one filter for each of these units."""
    if tensor.layout != "channels":
        return False
    return bool(module.groups == module.in_channels == module.out_channels == tensor.group.size)


def _changes_shared_input(node: fx.Node, module: nn.Module | None = None) -> bool:
    """Return whether an operation in place has an input that another node reads as well."""
    is_in_place = (
        node.target is operator.iadd
        or getattr(module, "inplace", False)
        or node.kwargs.get("inplace", False)
        or (node.target is F.relu and node.args[1:] == (True,))
    )
    return bool(is_in_place) and isinstance(node.args[0], fx.Node) and len(node.args[0].users) > 1


def _changes_constant_means(module: nn.Module) -> bool:
    """Return whether the mean of a constant over a window is another number.

    It is if zeros are padded, or if the divisor is an argument.
    """
    padding = getattr(module, "padding", 0)  # adaptive pooling has none
    is_padded = any(padding) if isinstance(padding, tuple) else padding
    return bool(is_padded) or getattr(module, "divisor_override", None) is not None


def _normalize(module: Any, constant: Tensor) -> Tensor:
    """Apply a batch norm in eval mode to constants; NaN without running statistics of them."""
    if module.running_mean is None or len(module.running_mean) != len(constant):
        return torch.full_like(constant, torch.nan)
    out = (constant - module.running_mean) * (module.running_var + module.eps).rsqrt()
    return out * module.weight + module.bias if module.affine else out


def _asks_row_count(node: fx.Node) -> bool:
    """Return whether a node is x.size(0) or x.shape[0]."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    if node.target is getattr and node.args[1:] == ("shape",):
        return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return False


def _is_flattening(node: fx.Node) -> bool:
    """Return whether a node is flatten(x, 1), x.flatten(1) or x.view(x.size(0), -1)."""
    if node.target in (torch.flatten, "flatten"):
        options = _named_arguments(node, ("start_dim", "end_dim"))
        return (options.get("start_dim", 0), options.get("end_dim", -1)) == (1, -1)
    if node.target not in ("view", "reshape", torch.reshape) or node.kwargs:
        return False
    sizes: Any = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = sizes[0]
    return len(sizes) == 2 and isinstance(sizes[0], fx.Node) and sizes[1] == -1


def _is_mean_over_space(node: fx.Node, spatial_axes: int) -> bool:
    """Return whether a node is a mean over all axes behind the units, as x.mean((2, 3))."""
    if node.target not in (torch.mean, "mean"):
        return False
    options = _named_arguments(node, ("dim", "keepdim"))
    axes = options.get("dim")
    if options.get("keepdim") or not isinstance(axes, tuple | list):
        return False
    return {axis % (spatial_axes + 2) for axis in axes} == {*range(2, spatial_axes + 2)}


def _named_arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments behind the first one by name."""
    return dict(zip(names, node.args[1:], strict=False)) | node.kwargs

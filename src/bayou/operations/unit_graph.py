"""The units of a network and the layers that read them, by a trace of its graph."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from typing import Any, Literal, final

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.nn.modules.conv import _ConvNd

# Units on the last axis, on axis 1, or on axis 1 that was flattened with the axes behind it.
Layout = Literal["last", "channels", "flat"]
WeightedModule = nn.Linear | _ConvNd
BatchNorm = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d
Constants = dict[fx.Node, Tensor]
ConstantRule = Callable[[Tensor], Tensor]

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
LAYERS = (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
ELEMENTWISE = {
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
    F.hardsigmoid,
    torch.relu,
    torch.tanh,
    torch.sigmoid,
    torch.sin,
}
BINARY = {
    operator.add,
    operator.iadd,
    operator.sub,
    operator.mul,
    torch.add,
    torch.sub,
    torch.mul,
}
DROPOUTS = {F.dropout, F.dropout1d, F.dropout2d, F.dropout3d}
MAX_POOLS = {
    F.max_pool1d,
    F.max_pool2d,
    F.max_pool3d,
    F.adaptive_max_pool1d,
    F.adaptive_max_pool2d,
}
MEAN_POOLS = {
    F.avg_pool1d,
    F.avg_pool2d,
    F.avg_pool3d,
    F.adaptive_avg_pool1d,
    F.adaptive_avg_pool2d,
}
# The arguments of a mean pool behind the first one; an adaptive one has none of those that count.
MEAN_POOL_ARGUMENTS = (
    "kernel_size",
    "stride",
    "padding",
    "ceil_mode",
    "count_include_pad",
    "divisor_override",
)


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
        """Merge the units of another group with those of this one.

        Args:
            group: the other group.
        """
        root = self.root()
        merged = group.root()
        if root is not merged:
            root.reason_to_stay = root.reason_to_stay or merged.reason_to_stay
            merged._parent = root


@dataclass(frozen=True)
class UnitTensor:
    """A tensor of the graph whose units are known.

    Args:
        node: the node of the graph that gives it.
        group: its units.
        layout: the axis that they lie on.
        spatial_axes: the number of axes behind the units.
    """

    node: fx.Node
    group: UnitGroup
    layout: Layout
    spatial_axes: int = 0

    def units_of_features(self, total: int) -> Tensor:
        """Return the unit to which each of ``total`` features belongs, in the tensor's order.

        Args:
            total: the number of features.
        """
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
        read: the tensor that it reads, if the units of that tensor are known.
    """

    name: str
    module: WeightedModule
    read: UnitTensor | None = None

    def __post_init__(self) -> None:
        self.outputs: UnitGroup = UnitGroup(
            self.module.weight.shape[self.axes[0]]
        )  # before groups are merged

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

    def constant_outputs(self, constants: Constants) -> Tensor:
        """Return the constant output of each unit, NaN where it varies, from those of the input.

        A filter of zeros gives its bias. Another one gives a constant for a constant input without
        zeros around it.

        Args:
            constants: those of the nodes before it.
        """
        constant = constants[self.tensor.node]
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
    """Return NaN for numbers other than 0, which are not constant any more; 0 stays 0.

    Args:
        constant: the constants, NaN for units that vary.
    """
    return torch.where(constant == 0, constant, torch.nan)


@final
class _Tracer(fx.Tracer):
    """A tracer that leaves some modules as one node each.

    These are modules of torch with parameters or buffers, and ``opaque`` ones. Modules of torch
    without any, such as ``nn.ReLU``, are traced to the functions that they call.
    """

    def __init__(self, opaque: set[nn.Module]) -> None:
        super().__init__()
        self.opaque = opaque

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Return whether a module is one node of the graph."""
        if m in self.opaque:
            return True
        has_state = any(True for _ in m.parameters()) or any(True for _ in m.buffers())
        return has_state and super().is_leaf_module(m, module_qualified_name)


def trace(net: nn.Module) -> fx.Graph:
    """Trace a network; modules that branch on values are one node each.

    Args:
        net: the network.

    Raises:
        ValueError: if the forward of the network itself cannot be traced.
    """
    tracer = _Tracer(set())
    graph: fx.Graph | None = None
    problem = ""
    for module in reversed(list(net.modules())):  # children first
        if module is not net and tracer.is_leaf_module(module, ""):
            continue
        try:
            graph = _Tracer(tracer.opaque).trace(module)
        except Exception as error:
            tracer.opaque.add(module)
            graph = None
            problem = str(error).splitlines()[0] if str(error) else type(error).__name__
    if graph is None:
        raise ValueError(
            f"the forward of {type(net).__name__} cannot be followed by torch.fx: {problem}; "
            "move what branches on values into a submodule, which is then left whole"
        )
    return graph


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
                uses[id(operator.attrgetter(str(node.target))(net))] += 1
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

    def _propagate(
        self,
        node: fx.Node,
        tensor: UnitTensor,
        rule: ConstantRule,
        layout: Layout | None = None,
    ) -> None:
        """Record that a node has the units of a tensor.

        Args:
            node: the node.
            tensor: its first argument.
            rule: gives its constants by those of the tensor.
            layout: the axis of its units, if that is another one than in the tensor.
        """
        self.tensors[node] = replace(tensor, node=node)
        if layout is not None:
            self.tensors[node] = UnitTensor(node, tensor.group, layout)

        def apply_rule(constants: Constants) -> Tensor:
            constant = constants[tensor.node]
            return torch.where(constant.isnan(), torch.nan, rule(constant.clone()))

        self.graph.rules.append((node, apply_rule))

    def _visit_module(self, node: fx.Node, module: nn.Module) -> None:
        """Record the units of the output of a module."""
        tensor: UnitTensor | None = None
        if node.args and isinstance(node.args[0], fx.Node):
            tensor = self.tensors.get(node.args[0])
        name = str(node.target)
        has_one_input = len(node.args) == 1 and not node.kwargs
        if isinstance(module, LAYERS):
            self._visit_layer(node, module, tensor)
        elif tensor is None or not has_one_input:
            self._reject_module(node, module)
        elif isinstance(module, NORMS) and self._is_norm_of_units(name, module, tensor):
            self.graph.norms[name] = tensor
            self._propagate(node, tensor, lambda constant: _normalize(module, constant))
        elif isinstance(module, nn.PReLU) and module.num_parameters == 1:
            self._propagate(node, tensor, module)
        elif isinstance(module, nn.BatchNorm1d):
            reason = "is not followed, but for (N, units): pass an example_x of such"
            self._reject_module(node, module, reason)
        else:
            self._reject_module(node, module)

    def _reject_module(
        self, node: fx.Node, module: nn.Module, reason: str = "is not followed"
    ) -> None:
        """Leave a module unchanged, with all units that it reads."""
        name = str(node.target)
        if any(True for _ in module.parameters()):
            self.graph.unchanged[name] = f"{type(module).__name__} {reason}"
        self._keep_inputs(node, f"read by {name}")

    def _has_only_own_parameters(self, module: nn.Module) -> bool:
        """Return whether the weight is a parameter that no other module uses."""
        if "weight" not in module._parameters:
            return False
        return not any(id(value) in self.shared_parameters for value in module.parameters())

    def _visit_layer(
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
            self._reject_module(node, module, "with groups, tied or reparametrized weights")

    def _add_layer(
        self, node: fx.Node, name: str, module: WeightedModule, tensor: UnitTensor | None
    ) -> None:
        """Record a linear layer or a convolution without groups, whose outputs are new units."""
        layout: Layout = "last" if isinstance(module, nn.Linear) else "channels"
        layer = UnitLayer(name, module)
        if (
            tensor is not None
            and (tensor.layout == "channels") == (layout == "channels")
            and layer.inputs % tensor.group.size == 0
        ):
            layer.read = tensor
        else:
            self._keep_inputs(node, f"read by {name} on another axis")
        self.tensors[node] = UnitTensor(node, layer.outputs, layout, module.weight.ndim - 2)
        self.graph.layers[name] = layer
        self.graph.rules.append((node, lambda constants: self.constant_outputs(layer, constants)))

    def _add_depthwise(self, node: fx.Node, layer: DepthwiseLayer) -> None:
        """Record a depthwise convolution, whose outputs are the units that it reads."""
        self.tensors[node] = replace(layer.tensor, node=node)
        self.graph.depthwise[layer.name] = layer
        self.graph.rules.append((node, layer.constant_outputs))

    def _is_norm_of_units(self, name: str, module: BatchNorm, tensor: UnitTensor) -> bool:
        """Return whether a batch norm has numbers of its own for these units."""
        if module.affine and not self._has_only_own_parameters(module):
            return False
        if tensor.layout == "channels":
            return module.num_features == tensor.group.size
        reads_matrix = tensor.layout == "flat" or name in self.matrix_norms
        is_multiple = module.num_features % tensor.group.size == 0
        return reads_matrix and isinstance(module, nn.BatchNorm1d) and is_multiple

    def _visit_call(self, node: fx.Node) -> None:
        """Record the units of the result of a function or a method."""
        sources = [source for source in node.all_input_nodes if source in self.tensors]
        if not sources or _is_row_count(node):
            return
        function = _called_function(node)
        tensor = self.tensors[sources[0]]
        has_channels = tensor.layout == "channels"
        if _changes_shared_input(node):
            self._reject_call(node, " in place")
        elif function in BINARY and len(node.args) == 2 and not node.kwargs:
            self._visit_binary_call(node, function)
        elif not node.args or node.args[0] is not sources[0]:
            self._reject_call(node)
        elif _is_flattening(node):
            self._propagate(node, tensor, _keep_constant, "flat" if has_channels else None)
        elif len(node.all_input_nodes) > 1:
            self._reject_call(node)
        elif function in ELEMENTWISE:
            self._propagate(
                node, tensor, lambda constant: function(constant, *node.args[1:], **node.kwargs)
            )
        elif function in DROPOUTS:
            is_off = node.kwargs.get("training") is False
            self._propagate(node, tensor, _keep_constant if is_off else mark_varying)
        elif function in MAX_POOLS and has_channels:
            self._propagate(node, tensor, _keep_constant)
        elif function in MEAN_POOLS and has_channels:
            rule = mark_varying if _changes_constant(node) else _keep_constant
            self._propagate(node, tensor, rule)
        elif has_channels and _is_mean_over_space(node, tensor.spatial_axes):
            self._propagate(node, tensor, _keep_constant, "last")
        else:
            self._reject_call(node)

    def _reject_call(self, node: fx.Node, reason: str = "") -> None:
        """Keep all units that a function reads."""
        name = getattr(node.target, "__name__", node.target)
        self._keep_inputs(node, f"read by {name}(){reason}")

    def _visit_binary_call(self, node: fx.Node, function: Callable[..., Tensor]) -> None:
        """Record a sum, difference or product of tensors with the same units, or of numbers."""
        sources = [operand for operand in node.args if isinstance(operand, fx.Node)]
        tensors = [self.tensors[source] for source in sources if source in self.tensors]
        numbers = [operand for operand in node.args if isinstance(operand, int | float)]
        shapes = {(tensor.group.size, tensor.layout, tensor.spatial_axes) for tensor in tensors}
        if len(shapes) != 1 or len(tensors) + len(numbers) < 2:
            self._reject_call(node, " with what has other units")
            return
        for tensor in tensors[1:]:
            tensors[0].group.merge(tensor.group)
        self.tensors[node] = replace(tensors[0], node=node)

        def apply_rule(constants: Constants) -> Tensor:
            return function(*fx.map_arg(node.args, lambda source: constants[source].clone()))

        self.graph.rules.append((node, apply_rule))


def _called_function(node: fx.Node) -> Callable[..., Any]:
    """Return the function that a node calls; for a method that of torch, if there is one."""
    if not isinstance(node.target, str):
        return node.target
    method: Callable[..., Any] = getattr(Tensor, node.target)
    return getattr(torch, node.target, method)


def _keep_constant(constant: Tensor) -> Tensor:
    """Return a constant as it is."""
    return constant


def _has_no_padding(module: _ConvNd) -> bool:
    """Return whether a convolution pads nothing; padding may be a word."""
    return set(module.padding) <= {0}


def _is_depthwise(module: _ConvNd, tensor: UnitTensor) -> bool:
    """Return whether a convolution has one filter for each of these units."""
    if tensor.layout != "channels":
        return False
    return module.groups == module.in_channels == module.out_channels == tensor.group.size


def _changes_shared_input(node: fx.Node) -> bool:
    """Return whether an operation in place has an input that another node reads as well."""
    is_in_place = node.target is operator.iadd or node.kwargs.get("inplace", False)
    return bool(is_in_place) and isinstance(node.args[0], fx.Node) and len(node.args[0].users) > 1


def _changes_constant(node: fx.Node) -> bool:
    """Return whether a mean over windows of a constant is another number.

    It is if zeros are padded, or if the divisor is an argument.
    """
    options = _named_arguments(node, MEAN_POOL_ARGUMENTS)
    padding = options.get("padding", 0)
    is_padded = any(padding) if isinstance(padding, tuple | list) else padding
    return bool(is_padded) or options.get("divisor_override") is not None


def _normalize(module: BatchNorm, constant: Tensor) -> Tensor:
    """Apply a batch norm in eval mode to constants; NaN without running statistics of them."""
    mean = module.running_mean
    variance = module.running_var
    if mean is None or variance is None or len(mean) != len(constant):
        return torch.full_like(constant, torch.nan)
    out = (constant - mean) * (variance + module.eps).rsqrt()
    if module.affine:
        out = out * module.weight + module.bias
    return out


def _is_row_count(node: fx.Node) -> bool:
    """Return whether a node is x.size(0) or x.shape[0]."""
    if node.op == "call_method" and node.target == "size":
        return node.args[1:] == (0,)
    if node.target is getattr and node.args[1:] == ("shape",):
        return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)
    return False


def _is_flattening(node: fx.Node) -> bool:
    """Return whether a node is flatten(x, 1), x.flatten(1) or x.view(x.size(0), -1)."""
    function = _called_function(node)
    if function is torch.flatten:
        options = _named_arguments(node, ("start_dim", "end_dim"))
        return (options.get("start_dim", 0), options.get("end_dim", -1)) == (1, -1)
    if function not in (Tensor.view, torch.reshape) or node.kwargs:
        return False
    sizes = node.args[1:]
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = tuple(sizes[0])
    return len(sizes) == 2 and isinstance(sizes[0], fx.Node) and bool(sizes[1] == -1)


def _is_mean_over_space(node: fx.Node, spatial_axes: int) -> bool:
    """Return whether a node is a mean over all axes behind the units, as x.mean((2, 3))."""
    if _called_function(node) is not torch.mean:
        return False
    options = _named_arguments(node, ("dim", "keepdim"))
    axes = options.get("dim")
    if options.get("keepdim") or not isinstance(axes, tuple | list):
        return False
    return {axis % (spatial_axes + 2) for axis in axes} == {*range(2, spatial_axes + 2)}


def _named_arguments(node: fx.Node, names: tuple[str, ...]) -> dict[str, Any]:
    """Return the arguments behind the first one by name."""
    return dict(zip(names, node.args[1:], strict=False)) | node.kwargs

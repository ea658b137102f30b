"""Autoregressive conditioners: parameters of a coordinate from the coordinates before it.

A conditioner computes the parameters of all coordinates in one pass, where all coordinates are
known, or one coordinate after another, where they are not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.core.modules import Modules
from bayou.flows.core.arguments import check_size
from bayou.flows.core.nets import zero_init
from bayou.flows.core.transform import Cost, embed_angles
from bayou.flows.layers.linear import is_permutation

Order = Sequence[int] | Tensor | None


class CoordinateSteps(Protocol):
    """The evaluation of a conditioner one coordinate at a time, in its order."""

    def params(self) -> Tensor:
        """Return the parameters (..., P) of the next coordinate."""
        ...

    def push(self, x: Tensor) -> None:
        """Set the value (...) of that coordinate."""
        ...


class Conditioner(nn.Module, ABC):
    """A network (x, context) → (..., D, P) whose row d depends only on x_{<d}.

    "Before d" refers to ``order``. A subclass implements ``forward``; ``steps`` evaluates one
    coordinate at a time, for an inverse, and by default calls the whole network D times.

    Args:
        dim: the number of coordinates D.
        params: the number of parameters P per coordinate.
        order: each of 0 .. D − 1 once; by default 0, 1, ...
        context_dim: the size of the context; 0, the default, for none.

    Shapes: x (..., D), context (..., context_dim), output (..., D, P).
    """

    axis = -1  # the axis of the coordinates in x
    circular: bool = False  # whether the coordinates are angles, read as (cos, sin)
    pass_cost: Cost = Cost.analytic  # how ``forward`` is computed
    order: Tensor  # order[k]: the k-th coordinate
    coordinates: tuple[int, ...]  # the order as numbers
    event: tuple[int, ...]  # the shape that is flattened to the D coordinates

    def __init__(self, dim: int, params: int, order: Order = None, context_dim: int = 0) -> None:
        super().__init__()
        self.dim: int = check_size(dim, type(self).__name__)
        self.out = params
        self.context_dim = context_dim
        self.event = (dim,)
        index = torch.arange(dim)
        if order is not None:
            index = torch.as_tensor(order, dtype=torch.long)
        if not is_permutation(index, dim):
            raise ValueError(f"order must hold each of 0..{dim - 1} once, got {index.tolist()}")
        self.register_buffer("order", index)
        self.coordinates = tuple(index.tolist())

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Return the parameters (..., D, P) of all coordinates.

        Args:
            x: coordinates (..., D).
            context: contexts (..., context_dim), or None.
        """

    def steps(self, like: Tensor, context: Tensor | None = None) -> CoordinateSteps:
        """Start an evaluation with the first coordinate.

        Args:
            like: a tensor of the shape, dtype and device of x (..., D).
            context: contexts (..., context_dim), or None.
        """
        return _RepeatedPasses(self, like, context)


class _RepeatedPasses:
    """A pass of the whole network for every coordinate."""

    def __init__(self, net: Conditioner, template: Tensor, context: Tensor | None) -> None:
        self.net = net
        self.context = context
        self.columns = [torch.zeros_like(template.select(net.axis, 0))] * net.dim
        self.position = 0

    def params(self) -> Tensor:
        out: Tensor = self.net(torch.stack(self.columns, self.net.axis), self.context)
        return out[..., self.net.coordinates[self.position], :]

    def push(self, x: Tensor) -> None:
        self.columns[self.net.coordinates[self.position]] = x
        self.position += 1


class MaskedLinear(nn.Linear):
    """A linear map with some weights held at 0, x ↦ (W ⊙ mask)·x + b.

    Args:
        mask: (outputs, inputs), True or 1 where a weight is used.
    """

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.to(self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class MADE(Conditioner):
    """A masked autoregressive network (Germain et al. 2015).

    Every hidden unit has a degree, the number of leading coordinates that it depends on, and masks
    remove the weights between units that would break the order. Hidden units are sorted by degree,
    so that ``steps`` computes each unit once, when its last input is known: D steps together cost
    about as much as one pass.

    Args:
        dim: the number of coordinates D.
        params: the number of parameters P per coordinate.
        hidden: the widths of the hidden layers, (64, 64) by default.
        order: each of 0 .. D − 1 once; by default 0, 1, ...
        residual: whether the hidden layers are residual, h ← h + layer(relu(h)), which needs layers
            of one width; False by default.
        context_dim: the size of the context; 0, the default, for none.
        circular: whether to read every angle x_d as (cos x_d, sin x_d), so that the output is
            continuous on the circle; False by default.

    Shapes: x (..., D), context (..., context_dim), output (..., D, P).

    Example:
        >>> import torch
        >>> from bayou.flows import MADE
        >>> net = MADE(4, params=2, hidden=(32, 32))
        >>> net(torch.zeros(10, 4)).shape
        torch.Size([10, 4, 2])
    """

    def __init__(
        self,
        dim: int,
        params: int,
        hidden: Sequence[int] = (64, 64),
        order: Order = None,
        residual: bool = False,
        context_dim: int = 0,
        circular: bool = False,
    ) -> None:
        super().__init__(dim, params, order, context_dim)
        widths = tuple(hidden)
        if not widths or any(width < 1 for width in widths):
            raise ValueError(f"MADE needs hidden layers of positive width, got {widths}")
        if residual and len(set(widths)) > 1:
            raise ValueError(f"a residual MADE needs hidden layers of one width, got {widths}")
        self.residual = residual
        self.circular = circular
        # Degree: the number of leading coordinates that a unit depends on; with degree 0, only on
        # the context.
        input_degrees = self.order.argsort() + 1
        lowest = 0 if context_dim or dim == 1 else 1
        degrees = [lowest + (torch.arange(width) * (dim - lowest)) // width for width in widths]
        # _ends[layer][k]: the number of units of the layer with degree <= k.
        self._ends = [[int((d <= k).sum()) for k in range(dim)] for d in degrees]
        first = input_degrees
        if circular:
            first = input_degrees.repeat_interleave(2)
        masks = [
            after[:, None] >= before
            for before, after in zip([first, *degrees], degrees, strict=False)
        ]
        self.layers: Modules[MaskedLinear] = nn.ModuleList(  # type: ignore[assignment]
            MaskedLinear(mask) for mask in masks
        )
        last_mask = (input_degrees[:, None] > degrees[-1]).repeat_interleave(params, 0)
        self.last: MaskedLinear = zero_init(MaskedLinear(last_mask))
        self.from_context: nn.Linear | None = None
        if context_dim:
            self.from_context = nn.Linear(context_dim, widths[0], bias=False)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.circular:
            x = embed_angles(x)
        h = self.layers[0](x)
        if self.from_context is not None:
            h = h + self.from_context(context)
        for layer in self.layers[1:]:
            update = layer(F.relu(h))
            h = h + update if self.residual else update
        out: Tensor = self.last(F.relu(h))
        return out.unflatten(-1, (self.dim, self.out))

    def steps(self, like: Tensor, context: Tensor | None = None) -> CoordinateSteps:
        return _MadeSteps(self, like, context)


class _MadeSteps:
    """The evaluation of a ``MADE`` that computes every hidden unit once.

    Attributes:
        inputs: the coordinates known so far, in order, as the network reads them.
        activations: of every layer, relu of the units whose inputs are known.
    """

    def __init__(self, net: MADE, template: Tensor, context: Tensor | None) -> None:
        self.net = net
        self.position = 0
        self.inputs = template[..., :0]
        self.activations: list[Tensor] = [template[..., :0] for _ in net.layers]
        first = net.layers[0]
        self.first_weight = first.weight.unflatten(1, (net.dim, -1))[:, net.order].flatten(1)
        self.first_bias = first.bias.expand(*template.shape[:-1], -1)
        if net.from_context is not None:
            self.first_bias = self.first_bias + net.from_context(context)
        self.last_weight = net.last.weight.unflatten(0, (net.dim, net.out))
        self.last_bias = net.last.bias.unflatten(0, (net.dim, net.out))
        self._add_units()

    def _add_units(self) -> None:
        """Compute the units whose degree is the number of known coordinates."""
        net = self.net
        degree = self.position
        previous_units: Tensor | None = None  # new units of the layer before, for a residual net
        for i in range(len(net.layers)):
            start = net._ends[i][degree - 1] if degree else 0
            end = net._ends[i][degree]
            if start == end:
                continue
            units = self._units(i, start, end)
            if i and net.residual and previous_units is not None:
                units = units + previous_units
            previous_units = units
            self.activations[i] = torch.cat([self.activations[i], F.relu(units)], -1)

    def _units(self, i: int, start: int, end: int) -> Tensor:
        """Return units start .. end − 1 of layer i, without the residual connection."""
        if i == 0:
            weight = self.first_weight[start:end, : self.inputs.shape[-1]]
            return self.inputs @ weight.mT + self.first_bias[..., start:end]
        layer = self.net.layers[i]
        inputs = self.net._ends[i - 1][self.position]
        return F.linear(
            self.activations[i - 1],
            layer.weight[start:end, :inputs],
            layer.bias[start:end],
        )

    def params(self) -> Tensor:
        d = self.net.coordinates[self.position]
        end = self.net._ends[-1][self.position]
        return F.linear(self.activations[-1], self.last_weight[d, :, :end], self.last_bias[d])

    def push(self, x: Tensor) -> None:
        self.position += 1
        if self.position == self.net.dim:
            return
        inputs = x.unsqueeze(-1)
        if self.net.circular:
            inputs = embed_angles(inputs)
        self.inputs = torch.cat([self.inputs, inputs], -1)
        self._add_units()


class Recurrent(Conditioner):
    """A gated recurrent unit that reads the coordinates in order (Oliva et al. 2018, TAN).

    The parameters of a coordinate are a linear map of the state after the coordinates before it,
    and of a vector learned for that coordinate.

    Args:
        dim: the number of coordinates D.
        params: the number of parameters P per coordinate.
        hidden: the size of the state; 32 by default.
        order: each of 0 .. D − 1 once; by default 0, 1, ...
        context_dim: the size of a context that sets the initial state; 0, the default, for none.

    Shapes: x (..., D), context (..., context_dim), output (..., D, P).
    """

    pass_cost = Cost.autoregressive

    def __init__(
        self,
        dim: int,
        params: int,
        hidden: int = 32,
        order: Order = None,
        context_dim: int = 0,
    ) -> None:
        super().__init__(dim, params, order, context_dim)
        self.hidden: int = check_size(hidden, "the hidden state of Recurrent")
        self.read: nn.Linear = nn.Linear(1, 3 * hidden)
        self.carry: nn.Linear = nn.Linear(hidden, 3 * hidden)
        self.place: nn.Parameter = nn.Parameter(torch.zeros(dim, hidden))  # of the next coordinate
        self.from_context: nn.Linear | None = (
            nn.Linear(context_dim, hidden) if context_dim else None
        )
        self.last: nn.Linear = zero_init(nn.Linear(hidden, params))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        steps = self.steps(x, context)
        params_of: dict[int, Tensor] = {}
        for d in self.coordinates:
            params_of[d] = steps.params()
            steps.push(x[..., d])
        return torch.stack([params_of[d] for d in range(self.dim)], -2)

    def steps(self, like: Tensor, context: Tensor | None = None) -> CoordinateSteps:
        return _RecurrentSteps(self, like, context)


class _RecurrentSteps:
    """The evaluation of a ``Recurrent`` network, with its state (..., hidden)."""

    def __init__(self, net: Recurrent, template: Tensor, context: Tensor | None) -> None:
        self.net = net
        self.position = 0
        self.state = torch.zeros_like(template[..., :1]).expand(*template.shape[:-1], net.hidden)
        if net.from_context is not None:
            self.state = torch.tanh(net.from_context(context)) + self.state

    def params(self) -> Tensor:
        d = self.net.coordinates[self.position]
        out: Tensor = self.net.last(torch.tanh(self.state + self.net.place[d]))
        return out

    def push(self, x: Tensor) -> None:
        reset_x, update_x, proposal_x = self.net.read(x.unsqueeze(-1)).chunk(3, -1)
        reset_h, update_h, proposal_h = self.net.carry(self.state).chunk(3, -1)
        reset = torch.sigmoid(reset_x + reset_h)
        update = torch.sigmoid(update_x + update_h)
        proposal = torch.tanh(proposal_x + reset * proposal_h)
        self.state = proposal + update * (self.state - proposal)
        self.position += 1

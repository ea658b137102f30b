"""Autoregressive conditioners: parameters of a coordinate from the preceding ones, in one pass or
step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.flows.core.arguments import positive
from bayou.flows.core.nets import zeroed
from bayou.flows.core.transform import on_circle
from bayou.modules import Modules

Order = Sequence[int] | Tensor | None


class Steps(Protocol):
    """The evaluation of a conditioner one coordinate at a time, in its order."""

    def params(self) -> Tensor:
        """Parameters (..., P) of the next coordinate."""
        ...

    def push(self, x: Tensor) -> None:
        """Set the value (...) of that coordinate."""
        ...


class Conditioner(nn.Module, ABC):
    """net(x, context) → (..., D, P); row d depends only on the coordinates before d in ``order``.

    ``steps`` evaluates one coordinate at a time, for an inverse; by default it calls the whole
    network D times.

    Args:
        dim: D.
        params: P, the number of parameters per coordinate.
        order: each of 0 .. D − 1 once; by default 0, 1, ...
        context_dim: the size of the context, 0 for none.
    """

    axis = -1  # of the coordinates in x
    circular: bool = False  # whether the coordinates are angles, read as (cos, sin)
    order: Tensor  # order[k]: the k-th coordinate
    event: tuple[int, ...]  # the shape that is flattened to the D coordinates

    def __init__(self, dim: int, params: int, order: Order = None, context_dim: int = 0) -> None:
        super().__init__()
        self.dim, self.out, self.context_dim = (
            positive(dim, type(self).__name__),
            params,
            context_dim,
        )
        self.event = (dim,)
        index = torch.arange(dim) if order is None else torch.as_tensor(order, dtype=torch.long)
        if index.shape != (dim,) or not torch.equal(index.sort().values, torch.arange(dim)):
            raise ValueError(f"order must hold each of 0..{dim - 1} once, got {index.tolist()}")
        self.register_buffer("order", index)
        self._order = tuple(index.tolist())

    @abstractmethod
    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        """(..., D) and (..., context_dim) to (..., D, P)."""

    def steps(self, like: Tensor, context: Tensor | None = None) -> Steps:
        """Start with the first coordinate, for a batch shaped like ``like`` (..., D)."""
        return _WholePasses(self, like, context)


class _WholePasses:
    def __init__(self, net: Conditioner, like: Tensor, context: Tensor | None) -> None:
        self.net, self.context = net, context
        self.columns = [torch.zeros_like(like.select(net.axis, 0))] * net.dim
        self.position = 0

    def params(self) -> Tensor:
        out: Tensor = self.net(torch.stack(self.columns, self.net.axis), self.context)
        return out[..., self.net._order[self.position], :]

    def push(self, x: Tensor) -> None:
        self.columns[self.net._order[self.position]] = x
        self.position += 1


class MaskedLinear(nn.Linear):
    """x ↦ (W ⊙ mask)·x + b."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__(mask.shape[1], mask.shape[0])
        self.register_buffer("mask", mask.to(self.weight.dtype))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.mask, self.bias)


class MADE(Conditioner):
    """A masked autoregressive network (Germain et al. 2015).

    Hidden units are sorted by degree, so that ``steps`` computes each unit once, when its last
    input is known: D steps together cost about as much as one pass.

    Args:
        dim, params, order, context_dim: as for ``Conditioner``.
        hidden: the widths of the hidden layers.
        residual: residual layers, h ← h + layer(relu(h)).
        circular: read every angle x_d as (cos x_d, sin x_d), so that the output is continuous on
            the circle.

    Shapes: x (..., D), context (..., context_dim), output (..., D, P).
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
        self.residual, self.circular = residual, circular
        # Degree: the number of leading coordinates that a unit depends on; with degree 0, only on
        # the context.
        degree_in = self.order.argsort() + 1
        lowest = 0 if context_dim or dim == 1 else 1
        degrees = [lowest + (torch.arange(width) * (dim - lowest)) // width for width in widths]
        # _ends[layer][k]: the number of units of the layer with degree <= k.
        self._ends = [[int((d <= k).sum()) for k in range(dim)] for d in degrees]
        before = [degree_in.repeat_interleave(2) if circular else degree_in, *degrees]
        self.layers: Modules[MaskedLinear] = nn.ModuleList(  # type: ignore[assignment]
            MaskedLinear(after[:, None] >= previous)
            for previous, after in zip(before, degrees, strict=False)
        )
        self.last = zeroed(
            MaskedLinear((degree_in[:, None] > degrees[-1]).repeat_interleave(params, 0))
        )
        self.from_context = nn.Linear(context_dim, widths[0], bias=False) if context_dim else None

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.layers[0](on_circle(x) if self.circular else x)
        if self.from_context is not None:
            h = h + self.from_context(context)
        for layer in self.layers[1:]:
            h = h + layer(F.relu(h)) if self.residual else layer(F.relu(h))
        out: Tensor = self.last(F.relu(h))
        return out.unflatten(-1, (self.dim, self.out))

    def steps(self, like: Tensor, context: Tensor | None = None) -> Steps:
        return _MadeSteps(self, like, context)


class _MadeSteps:
    def __init__(self, net: MADE, like: Tensor, context: Tensor | None) -> None:
        self.net = net
        self.position = 0
        self.known = like[..., :0]  # coordinates so far, in order
        self.hidden: list[Tensor] = [
            like[..., :0] for _ in net.layers
        ]  # relu of the units that are complete
        self.first = net.layers[0].weight.unflatten(1, (net.dim, -1))[:, net.order].flatten(1)
        self.bias = net.layers[0].bias.expand(*like.shape[:-1], -1)
        if net.from_context is not None:
            self.bias = self.bias + net.from_context(context)
        self.last = net.last.weight.unflatten(0, (net.dim, net.out))
        self.last_bias = net.last.bias.unflatten(0, (net.dim, net.out))
        self._complete()

    def _complete(self) -> None:
        """Compute the units whose degree is the number of coordinates known."""
        net, k = self.net, self.position
        carried: Tensor | None = None
        for i, layer in enumerate(net.layers):
            start, end = net._ends[i][k - 1] if k else 0, net._ends[i][k]
            if start == end:
                continue
            if i == 0:
                new = (
                    self.known @ self.first[start:end, : self.known.shape[-1]].mT
                    + self.bias[..., start:end]
                )
            else:
                new = F.linear(
                    self.hidden[i - 1],
                    layer.weight[start:end, : net._ends[i - 1][k]],
                    layer.bias[start:end],
                )
                if net.residual and carried is not None:
                    new = new + carried
            carried = new
            self.hidden[i] = torch.cat([self.hidden[i], F.relu(new)], -1)

    def params(self) -> Tensor:
        d = self.net._order[self.position]
        end = self.net._ends[-1][self.position]
        return F.linear(self.hidden[-1], self.last[d, :, :end], self.last_bias[d])

    def push(self, x: Tensor) -> None:
        self.position += 1
        if self.position < self.net.dim:
            new = x.unsqueeze(-1)
            self.known = torch.cat([self.known, on_circle(new) if self.net.circular else new], -1)
            self._complete()


class Recurrent(Conditioner):
    """A gated recurrent unit over the coordinates in order (Oliva et al. 2018, TAN).

    Args:
        dim, params, order, context_dim: as for ``Conditioner``.
        hidden: the size of the state.
    """

    def __init__(
        self, dim: int, params: int, hidden: int = 32, order: Order = None, context_dim: int = 0
    ) -> None:
        super().__init__(dim, params, order, context_dim)
        self.hidden = positive(hidden, "the hidden state of Recurrent")
        self.read = nn.Linear(1, 3 * hidden)
        self.carry = nn.Linear(hidden, 3 * hidden)
        self.place = nn.Parameter(torch.zeros(dim, hidden))  # of the next coordinate
        self.from_context = nn.Linear(context_dim, hidden) if context_dim else None
        self.last = zeroed(nn.Linear(hidden, params))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        steps, rows = self.steps(x, context), []
        for d in self._order:
            rows.append(steps.params())
            steps.push(x[..., d])
        by_coordinate = [
            row for _, row in sorted(zip(self._order, rows, strict=True), key=lambda pair: pair[0])
        ]
        return torch.stack(by_coordinate, -2)

    def steps(self, like: Tensor, context: Tensor | None = None) -> Steps:
        return _RecurrentSteps(self, like, context)


class _RecurrentSteps:
    def __init__(self, net: Recurrent, like: Tensor, context: Tensor | None) -> None:
        self.net, self.position = net, 0
        zero = torch.zeros_like(like[..., :1]).expand(*like.shape[:-1], net.hidden)
        self.state = (
            zero if net.from_context is None else torch.tanh(net.from_context(context)) + zero
        )

    def params(self) -> Tensor:
        out: Tensor = self.net.last(
            torch.tanh(self.state + self.net.place[self.net._order[self.position]])
        )
        return out

    def push(self, x: Tensor) -> None:
        read = self.net.read(x.unsqueeze(-1)).chunk(3, -1)
        carry = self.net.carry(self.state).chunk(3, -1)
        reset, update = torch.sigmoid(read[0] + carry[0]), torch.sigmoid(read[1] + carry[1])
        proposal = torch.tanh(read[2] + reset * carry[2])
        self.state = proposal + update * (self.state - proposal)
        self.position += 1

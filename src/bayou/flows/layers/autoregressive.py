"""Autoregressive flows: the map of a coordinate depends on the coordinates before it."""

from __future__ import annotations

import torch
from torch import Tensor

from bayou.flows.core.transform import ANGLES, Cost, Event, Pair, Transform, broadcast_context
from bayou.flows.layers.conditioners import Conditioner
from bayou.flows.layers.elementwise import Elementwise


class Autoregressive(Transform):
    """An autoregressive map, y_d = g(x_d; net(x_{<d}, context)) for an elementwise g.

    Its Jacobian is triangular: ladj = Σ_d log ∂y_d/∂x_d. Forward is one pass of the network; the
    inverse computes one coordinate after another. This is an inverse autoregressive flow (Kingma et
    al. 2016, IAF); its ``Inverse`` is a masked autoregressive flow (Papamakarios et al. 2017, MAF),
    with fast densities and slow draws.

    Args:
        elementwise: g.
        conditioner: the autoregressive network, with ``elementwise.params`` outputs per coordinate.

    Shapes: x, y (..., *event), context (..., context_dim), ladj (...).

    Example:
        >>> import torch
        >>> from bayou.flows import MADE, Affine, Autoregressive
        >>> g = Affine()
        >>> transform = Autoregressive(g, MADE(4, g.params, hidden=(32,)))
        >>> y, ladj = transform(torch.zeros(10, 4))
        >>> y.shape, ladj.shape
        (torch.Size([10, 4]), torch.Size([10]))
    """

    codomain: tuple[float, float]

    def __init__(self, elementwise: Elementwise, conditioner: Conditioner) -> None:
        super().__init__()
        if conditioner.out != elementwise.params:
            raise ValueError(
                f"{type(elementwise).__name__} takes {elementwise.params} parameters per "
                f"coordinate but the conditioner returns {conditioner.out}; build it with "
                f"params={elementwise.params}"
            )
        if elementwise.circular:
            if not conditioner.circular:
                raise ValueError(
                    f"{type(conditioner).__name__} does not read angles; use MADE(..., "
                    "circular=True)"
                )
            self.domain = self.codomain = ANGLES
        self.elementwise = elementwise
        self.conditioner = conditioner
        self.event_shape: Event = conditioner.event
        self.context_dim: int = conditioner.context_dim
        self.forward_kind: Cost = conditioner.pass_cost
        self.inverse_kind: Cost = max(Cost.autoregressive, elementwise.inverse_kind)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        x, context = broadcast_context(x.flatten(-len(self.event_shape)), context)
        y, log_slope = self.elementwise.forward(x, self.conditioner(x, context))
        return y.reshape(*y.shape[:-1], *self.event_shape), log_slope.sum(-1)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        y, context = broadcast_context(y.flatten(-len(self.event_shape)), context)
        steps = self.conditioner.steps(y, context)
        columns: list[Tensor] = [y] * self.conditioner.dim
        log_slopes = []
        for d in self.conditioner.coordinates:
            columns[d], log_slope = self.elementwise.inverse(y[..., d], steps.params())
            log_slopes.append(log_slope)
            steps.push(columns[d])
        x = torch.stack(columns, -1)
        return x.reshape(*x.shape[:-1], *self.event_shape), torch.stack(log_slopes, -1).sum(-1)

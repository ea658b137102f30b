"""One normalizing flow over all weights of a small network."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayou import flows, rng
from bayou.flows import Chain, LULinear, Map
from bayou.guides.guide import KL, Draw, GuideSpec, Tensors, VectorGuide
from bayou.params import Params, flatten
from bayou.specs import nearest

FlowName = str | Callable[[int], Map] | None


def make_transform(flow: FlowName, dim: int, options: dict[str, Any]) -> Map | None:
    """A map of that dimension: by its name in ``flows.registry("vector")``, from a callable, or
    None for none.
    """
    if flow is None:
        return None
    if not isinstance(flow, str):
        made = flow(dim)
        if not isinstance(made, Map) or made.event_out not in ((dim,), (None,)):
            got = f"events {made.event_out}" if isinstance(made, Map) else type(made).__name__
            raise ValueError(f"flow({dim}) must make a map whose events are ({dim},), got {got}")
        return made
    known = flows.registry("vector")
    if flow not in known:
        raise ValueError(
            f"there is no flow {flow!r}{nearest(flow, list(known))}; the flows are {', '.join(sorted(known))}"
        )
    return known[flow].build(dim, **options)


def push(
    transform: Map, x: Tensor, seed: rng.Seed = None, start: int = 0, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """One direction of a map, without the checks of its public methods."""
    noise = transform.noise(x, inverse=inverse, seed=seed, start=start)
    return (transform._inverse if inverse else transform._forward)(x, None, *noise)


class JointFlowGuide(VectorGuide):
    """w = center + exp(log_std) ⊙ T(ε), ε ~ N(0, I), for all tensors of the group as one vector
    w.
    """

    def __init__(self, tensors: Tensors, transform: Map | None, std: float) -> None:
        super().__init__(tensors)
        start = flatten(tensors.values)
        linear = LULinear(len(start))
        self.transform: Map = (linear if transform is None else Chain(transform, linear)).to(start)
        self.kl_kind, self.kl_side = KL.of(self.transform.label.kind), self.transform.label.forward
        self.base = flows.StandardNormal(self.transform.event_in).to(start)  # type: ignore[arg-type]
        self.center = nn.Parameter(start.clone())
        self.log_std = nn.Parameter(torch.full_like(start, math.log(std)))

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        eps = self.base.draw(n, (), seed, start)
        x, ladj = push(self.transform, eps, seed, start)
        params = self.split(self.center + self.log_std.exp() * x)
        log_q = self.base.log_prob(eps) - ladj - self.log_std.sum()
        return Draw(dict(params), log_q - self.log_prior(params))

    def log_prob(self, params: Params) -> Tensor:
        w = self.join(params)
        eps, ladj = push(self.transform, (w - self.center) * (-self.log_std).exp(), inverse=True)
        return self.base.log_prob(eps) + ladj - self.log_std.sum()

    def mean(self) -> Params:
        linear = self.transform
        return self.split(
            self.center + self.log_std.exp() * linear.shift
            if isinstance(linear, LULinear)
            else self.center
        )

    def std(self) -> Params | None:
        linear = self.transform
        if not isinstance(linear, LULinear):
            return None
        columns = linear.weight.multiply(
            torch.eye(len(self.center)).to(self.center)
        )  # columns of the matrix, as rows
        return self.split(self.log_std.exp() * columns.square().sum(0).sqrt())


@dataclass(frozen=True)
class JointFlow(GuideSpec):
    """One flow over all matched tensors, followed by a linear map: w = center + std ⊙ A·T(ε), ε ~
    N(0, I).

    It has O(D²) parameters for D weights (Rezende & Mohamed 2015).

    Args:
        flow: a name of ``flows.registry("vector")``, a callable dim → Map, or None for T(ε) = ε.
        options: keyword arguments of a flow by name; by default two layers, and eight steps of
            "continuous".
        std: the initial standard deviation of q.
    """

    flow: FlowName = "iaf"
    options: dict[str, Any] | None = None
    std: float = 0.01
    joint: ClassVar[bool] = True
    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_positive("std")
        if self.options is None:
            object.__setattr__(self, "options", _defaults(self.flow))

    def build(self, tensors: Tensors) -> JointFlowGuide:
        dim = sum(value.numel() for value in tensors.values.values())
        if dim > 5000:
            raise ValueError(
                f"JointFlow has D² parameters and got D = {dim} weights; use MNF, LowRank or fewer tensors"
            )
        transform = make_transform(self.flow, dim, self.options or {})
        return JointFlowGuide(tensors, transform, self.std)


def _defaults(flow: FlowName) -> dict[str, Any]:
    """Default options of a flow by name: small, since the posterior also has a linear map."""
    if flow == "continuous":
        return {"steps": 8}
    made = flows.registry("vector").get(flow) if isinstance(flow, str) else None
    return (
        {"layers": 2}
        if made is None or "layers" in inspect.signature(made.build).parameters
        else {}
    )

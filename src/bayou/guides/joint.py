"""One normalizing flow over all weights of a small network."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayou import flows
from bayou.core import rng
from bayou.core.params import Params, flatten
from bayou.core.specs import nearest
from bayou.flows import Chain, LULinear, Map
from bayou.flows.core.bases import StandardNormal
from bayou.flows.core.transform import Side
from bayou.guides.guide import KL, Draw, GuideSpec, Tensors, VectorGuide

FlowName = str | Callable[[int], Map] | None
MAX_WEIGHTS = 5000  # of a joint flow, which has O(D²) parameters


def make_transform(flow: FlowName, dim: int, options: dict[str, Any]) -> Map | None:
    """Make a map of vectors; None for no flow.

    Args:
        flow: a name of ``flows.registry("vector")``, a callable dim → Map, or None.
        dim: the size of the vectors.
        options: keyword arguments of a flow by name.
    """
    if flow is None:
        return None
    if not isinstance(flow, str):
        transform = flow(dim)
        if not isinstance(transform, Map):
            got = type(transform).__name__
        elif transform.event_out not in ((dim,), (None,)):
            got = f"events {transform.event_out}"
        else:
            return transform
        raise ValueError(f"flow({dim}) must make a map whose events are ({dim},), got {got}")
    known = flows.registry("vector")
    if flow not in known:
        raise ValueError(
            f"there is no flow {flow!r}{nearest(flow, list(known))}; "
            f"the flows are {', '.join(sorted(known))}"
        )
    return known[flow].build(dim, **options)


def push(
    transform: Map, x: Tensor, seed: rng.Seed = None, start: int = 0, inverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Apply one direction of a map, without the checks of its public methods.

    Args:
        transform: the map.
        x: its inputs.
        seed: the seed of its noise; None uses torch's global stream.
        start: the index of the first row.
        inverse: whether to apply the inverse.

    Returns:
        The outputs and the log-determinants.
    """
    noise = transform.noise(x, inverse=inverse, seed=seed, start=start)
    apply = transform._inverse if inverse else transform._forward
    return apply(x, None, *noise)


class JointFlowGuide(VectorGuide):
    """w = center + exp(log_std) ⊙ T(ε), ε ~ N(0, I), for the tensors of a group as one vector w.

    Args:
        tensors: the tensors with their priors.
        transform: the flow before the linear map; None for none.
        std: the initial standard deviation.
    """

    def __init__(self, tensors: Tensors, transform: Map | None, std: float) -> None:
        super().__init__(tensors)
        start = flatten(tensors.values)
        linear = LULinear(len(start))
        self.transform: Map = (linear if transform is None else Chain(transform, linear)).to(start)
        self.kl_kind: KL = KL.of(self.transform.label.kind)
        self.kl_side: Side = self.transform.label.forward
        base = flows.StandardNormal(self.transform.event_in)  # type: ignore[arg-type]
        self.base: StandardNormal = base.to(start)
        self.center: nn.Parameter = nn.Parameter(start.clone())
        self.log_std: nn.Parameter = nn.Parameter(torch.full_like(start, math.log(std)))

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
        """Return the mean without a flow, and the center with one."""
        linear = self.transform
        if isinstance(linear, LULinear):
            return self.split(self.center + self.log_std.exp() * linear.shift)
        return self.split(self.center)

    def std(self) -> Params | None:
        linear = self.transform
        if not isinstance(linear, LULinear):
            return None
        # Columns of the matrix, as rows.
        columns = linear.weight.multiply(torch.eye(len(self.center)).to(self.center))
        return self.split(self.log_std.exp() * columns.square().sum(0).sqrt())


@dataclass(frozen=True)
class JointFlow(GuideSpec):
    """One normalizing flow over all matched tensors (Rezende & Mohamed 2015, arXiv:1505.05770).

    w = center + std ⊙ A·T(ε), ε ~ N(0, I), for the tensors as one vector w of D entries, a flow T
    and a linear map A. The KL is log q(w) − log p(w) at the draws, with
    log q(w) = log N(ε; 0, I) − log |∂w/∂ε|. It has O(D²) parameters, and D is at most 5,000.

    Args:
        flow: a name of ``flows.registry("vector")`` (default "iaf"), a callable dim → Map, or None
            for T(ε) = ε.
        options: keyword arguments of a flow by name; by default two layers, and eight steps of
            "continuous".
        std: the initial standard deviation of q (default 0.01).

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.JointFlow("realnvp")))
    """

    flow: FlowName = "iaf"
    options: dict[str, Any] | None = None
    std: float = 0.01
    joint: ClassVar[bool] = True
    dense: ClassVar[bool] = True

    def __post_init__(self) -> None:
        self._check_positive("std")
        if self.options is None:
            object.__setattr__(self, "options", _default_options(self.flow))

    def build(self, tensors: Tensors) -> JointFlowGuide:
        dim = sum(value.numel() for value in tensors.values.values())
        if dim > MAX_WEIGHTS:
            raise ValueError(
                f"JointFlow has D² parameters and got D = {dim} weights; "
                "use MNF, LowRank or fewer tensors"
            )
        transform = make_transform(self.flow, dim, self.options or {})
        return JointFlowGuide(tensors, transform, self.std)


def _default_options(flow: FlowName) -> dict[str, Any]:
    """Return default options of a flow by name: small, since q also has a linear map."""
    if flow == "continuous":
        return {"steps": 8}
    entry = flows.registry("vector").get(flow) if isinstance(flow, str) else None
    if entry is None or "layers" in inspect.signature(entry.build).parameters:
        return {"layers": 2}
    return {}

"""The unnormalized posterior: network, likelihood, prior and how many data. The one place that scales by N/M."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from bayou.likelihoods import BoundLikelihood, Likelihood
from bayou.priors import Normal, Prior

PriorRules = Prior | Mapping[str, Prior]


@dataclass(frozen=True)
class Target:
    """p(w) Π_n p(y_n | x_n, w) for a network with weights w and N data."""

    net: nn.Module
    likelihood_spec: Likelihood
    likelihood: BoundLikelihood
    prior: PriorRules
    n: int

    @staticmethod
    def build(net: nn.Module, likelihood: Likelihood, prior: PriorRules | None, n: int) -> Target:
        """Bind the likelihood to the dtype and device of the network."""
        if not isinstance(net, nn.Module):
            raise ValueError(f"net must be an nn.Module, got {type(net).__name__}")
        if not isinstance(likelihood, Likelihood):
            raise ValueError(f"likelihood must be a Likelihood such as Categorical(), got {likelihood!r}")
        if n < 1:
            raise ValueError(f"there are no data to learn from: n = {n}")
        first = next(net.parameters(), None)
        if first is None:
            raise ValueError(f"{type(net).__name__} has no parameters")
        bound = likelihood.bind(dtype=first.dtype, device=first.device)
        return Target(net, likelihood, bound, Normal(1.0) if prior is None else prior, n)

    def scale(self, each: Tensor) -> Tensor:
        """(N/M)·Σ over a batch of M: (..., M) to (...), the estimate for all N data."""
        return each.sum(-1) * (self.n / each.shape[-1])

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(N/M)·Σ_m log p(y_m | f_m) for outputs (..., M, *out): (...)."""
        return self.scale(self.likelihood.log_prob(outputs, y))


def forward_inputs(x: Any) -> tuple[Any, ...]:
    """The arguments of the network: a tuple of inputs as it is, anything else alone."""
    return tuple(x) if isinstance(x, tuple | list) else (x,)

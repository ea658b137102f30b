"""The unnormalized posterior: network, likelihood, prior and number of data. Scaling by N/M happens
only here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core.files import no_grad_state, packed_state
from bayou.core.params import Params, match
from bayou.likelihoods import BoundLikelihood, Likelihood
from bayou.network import (
    Network,
    check_network,
    fan_ins,
    forward_inputs,
    is_constant,
    layouts,
    shared_copy,
)
from bayou.priors import BoundPrior, Coupling, JointPrior, Normal, Prior, check_priors, couplings
from bayou.training.inputs import digest

PriorRules = Prior | Mapping[str, Prior]


@dataclass(frozen=True)
class Target:
    """p(w) Π_n p(y_n | x_n, w) for a network with weights w and N data.

    ``net`` shares the values of the user's network. Its frozen parameters (``requires_grad=False``)
    are constants: no draw and no file has them.
    """

    net: nn.Module
    likelihood_spec: Likelihood
    likelihood: BoundLikelihood
    prior: PriorRules
    n: int
    prior_given: bool = (
        True  # whether the user gave this prior; otherwise a method may select another
    )
    prior_selected: bool = (
        False  # whether its scale was selected, and a method may select that of some tensors again
    )

    @staticmethod
    def build(
        net: nn.Module,
        likelihood: Likelihood,
        prior: PriorRules | None,
        n: int,
        where: str | Sequence[str] | None = None,
    ) -> Target:
        """Bind the likelihood to the dtype and device of the network.

        ``where``: patterns of the parameters that are free, by default all that require gradients;
        the rest is frozen.
        """
        check_network(net)
        check_priors(prior)
        if not isinstance(likelihood, Likelihood):
            raise ValueError(
                f"likelihood must be a Likelihood such as Categorical() or Gaussian(0.1), got {likelihood!r}"
            )
        if n < 1:
            raise ValueError(f"there are no data: n = {n}; give at least one row")
        net = shared_copy(net, None if where is None else free_names(net, where))
        first = next(
            (value for value in net.parameters() if value.requires_grad), next(net.parameters())
        )
        bound = likelihood.bind(dtype=first.dtype, device=first.device)
        return Target(
            net, likelihood, bound, Normal(1.0) if prior is None else prior, n, prior is not None
        )

    def copy(self, n: int | None = None) -> Target:
        """The same target for n data, with its own copy of the likelihood, whose parameters may
        change.
        """
        return replace(
            self, likelihood=copy.deepcopy(self.likelihood), n=self.n if n is None else n
        )

    def in_units(self, scale: Tensor) -> Target:
        """Return the target for shift + scale·y instead of y, and a network whose outputs have
        these units.

        Args:
            scale: one positive number, or one for each coordinate of the last axis of y.
        """
        spec = self.likelihood_spec.in_units(scale)
        if spec is None:
            raise ValueError(f"{type(self.likelihood_spec).__name__} has no units of y to change")
        first = next(self.net.parameters())
        likelihood = spec.bind(dtype=first.dtype, device=first.device)
        likelihood.load_state_dict(self.likelihood.state_dict())
        return replace(self, likelihood_spec=spec, likelihood=likelihood)

    @cached_property
    def network(self) -> Network:
        """The network as a function of its tensors: a copy, with its current buffers."""
        return Network(self.net)

    @cached_property
    def priors(self) -> dict[str, BoundPrior]:
        """The prior of every free tensor, bound to its shape, fan-in, dtype and device."""
        values = dict(self.net.named_parameters())
        fans, axes = fan_ins(self.net), layouts(self.net, values)
        return {
            name: spec.bind(
                (value := values[name]).shape,
                fan_in=fans[name], dtype=value.dtype, device=value.device, axes=axes[name].axes,
            )
            for name, spec in prior_specs(self.prior, self.net).items()
        }  # fmt: skip

    @cached_property
    def couplings(self) -> list[Coupling]:
        """The terms of joint priors of several tensors, in addition to those of each tensor."""
        given = self.prior.values() if isinstance(self.prior, Mapping) else [self.prior]
        if not any(isinstance(prior, JointPrior) for prior in given):
            return []
        return couplings(self.priors)

    @property
    def free(self) -> list[str]:
        """The names of the parameters that are not frozen (``requires_grad``)."""
        return [name for name, parameter in self.net.named_parameters() if parameter.requires_grad]

    def start(self) -> Params:
        """A copy of the network's current free parameters."""
        return {
            name: value.detach().clone()
            for name, value in self.net.named_parameters()
            if value.requires_grad
        }

    @property
    def frozen(self) -> Params:
        """The frozen parameters, shared with the user's network."""
        return {
            name: value.detach()
            for name, value in self.net.named_parameters()
            if not value.requires_grad
        }

    def base(self) -> dict[str, str]:
        """Return a digest of every tensor that no file has.

        These are frozen parameters, constants, packed weights of quantized layers, and with frozen
        parameters all buffers. The first 64 bits of SHA-256, about a second per GB. Buffers are
        those before the fit.
        """
        frozen, state = self.frozen, no_grad_state(self.net)
        buffers = (
            n
            for n, value in self.net.named_buffers()
            if n in state and (frozen or is_constant(value))
        )
        constants = frozen | {n: state[n] for n in buffers} | packed_state(self.net)
        return {name: digest(value) for name, value in constants.items()}

    def forward(self, params: Params, x: Any) -> Tensor:
        """The network's outputs with these parameters: (M, *out)."""
        return self.network.call(params, *forward_inputs(x))

    def log_prior(self, params: Params) -> Tensor:
        """Σ log p(w) over the given tensors; tensors (..., *shape) give (...)."""
        parts = [
            prior.log_prob(params[name]) for name, prior in self.priors.items() if name in params
        ]
        parts += [coupling(params) for coupling in self.couplings]
        return torch.stack(parts).sum(0)

    def log_joint(self, params: Params, x: Any, y: Tensor) -> Tensor:
        """log p(w) + (N/M)·Σ_m log p(y_m | x_m, w): a scalar, whose mean over batches is exact."""
        return self.log_prior(params) + self.log_likelihood(self.forward(params, x), y)

    @property
    def learned_priors(self) -> list[str]:
        """The names of the tensors whose prior has hyperparameters to learn."""
        return [
            name for name, prior in self.priors.items() if any(True for _ in prior.parameters())
        ]

    def with_fixed_priors(self) -> Target:
        """The same target with every prior fixed at its initial hyperparameters."""

        def fixed(prior: Prior) -> Prior:
            return replace(prior, learn=False) if getattr(prior, "learn", False) else prior  # type: ignore[type-var]

        given = self.prior
        rules = (
            {key: fixed(prior) for key, prior in given.items()}
            if isinstance(given, Mapping)
            else fixed(given)
        )
        return replace(self, prior=rules)

    def require_fixed_priors(self, who: str) -> None:
        """A ValueError if a prior has hyperparameters to learn, which ``who`` cannot do."""
        if learned := self.learned_priors:
            raise ValueError(
                f"{who} cannot learn a prior (learn= for {learned[0]!r}): its density has no maximum; "
                "give the prior a fixed scale, or use VI or Laplace, which learn it by the evidence"
            )

    def scale(self, each: Tensor) -> Tensor:
        """(N/M)·Σ over a batch of M: (..., M) to (...), the estimate for all N data."""
        return each.sum(-1) * (self.n / each.shape[-1])

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """(N/M)·Σ_m log p(y_m | f_m) for outputs (..., M, *out): (...)."""
        return self.scale(self.likelihood.log_prob(outputs, y))


def free_names(net: nn.Module, where: str | Sequence[str]) -> list[str]:
    """The names of the parameters that match a pattern; a ValueError for one that matches only
    frozen ones, or none.
    """
    patterns = (
        [where] if isinstance(where, str) else list(where) if isinstance(where, Iterable) else []
    )
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            f"where must be a pattern of names such as 'head.*', a list of them or 'last', got {where!r}"
        )
    named = dict(net.named_parameters())
    wanted = match(named, dict.fromkeys(patterns, True), default=False)
    free = [name for name, value in named.items() if value.requires_grad]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in free):
            frozen = next(name for name in named if fnmatchcase(name, pattern))
            raise ValueError(
                f"where={pattern!r} matches only frozen parameters such as {frozen!r} (requires_grad=False); unfreeze "
                "what shall be random: requires_grad_()"
            )
    return [name for name in free if wanted[name]]


def prior_specs(prior: PriorRules, net: nn.Module) -> dict[str, Prior]:
    """The prior of each free parameter by name: one for all, or by the first pattern that
    matches.
    """
    frozen = {name: not parameter.requires_grad for name, parameter in net.named_parameters()}
    rules = prior if isinstance(prior, Mapping) else {"*": prior}
    return match(frozen, rules, frozen=[name for name, still in frozen.items() if still])

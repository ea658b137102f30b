"""The unnormalized posterior: network, likelihood, prior and number of data.

Scaling by N/M happens only here.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property

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
from bayou.priors import (
    BoundPrior,
    JointCorrection,
    JointPrior,
    Normal,
    Prior,
    check_priors,
    couplings,
)
from bayou.training.inputs import digest

PriorRules = Prior | Mapping[str, Prior]


@dataclass(frozen=True)
class Target:
    """p(w) Π_n p(y_n | x_n, w) for a network with weights w and N data.

    The frozen parameters of the network (``requires_grad=False``) are constants: no draw and no
    file has them.

    Args:
        net: the network, which shares the values of the user's network.
        likelihood_spec: the likelihood as the user gave it.
        likelihood: the likelihood in the dtype and on the device of the network.
        prior: one prior for all tensors, or priors by patterns of names.
        n: the number of data.
        prior_given: whether the user gave this prior; otherwise a method may select another.
            Default: True.
        prior_selected: whether its scale was selected, and a method may select that of some tensors
            again. Default: False.
    """

    net: nn.Module
    likelihood_spec: Likelihood
    likelihood: BoundLikelihood
    prior: PriorRules
    n: int
    prior_given: bool = True
    prior_selected: bool = False

    @staticmethod
    def build(
        net: nn.Module,
        likelihood: Likelihood,
        prior: PriorRules | None,
        n: int,
        where: str | Sequence[str] | None = None,
    ) -> Target:
        """Build a target, with the likelihood in the dtype and on the device of the network.

        Args:
            net: the network.
            likelihood: the likelihood.
            prior: one prior, or priors by patterns of names; None: standard normal.
            n: the number of data.
            where: patterns of the parameters that are free, by default all that require gradients;
                the rest is frozen.

        Raises:
            ValueError: for a network, likelihood or prior that bayou cannot work with, and for no
                data.
        """
        check_network(net)
        check_priors(prior)
        if not isinstance(likelihood, Likelihood):
            raise ValueError(
                "likelihood must be a Likelihood such as Categorical() or Gaussian(0.1), got "
                f"{likelihood!r}"
            )
        if n < 1:
            raise ValueError(f"there are no data: n = {n}; give at least one row")
        net = shared_copy(net, None if where is None else free_names(net, where))
        parameters = list(net.parameters())
        first = next((value for value in parameters if value.requires_grad), parameters[0])
        return Target(
            net=net,
            likelihood_spec=likelihood,
            likelihood=likelihood.bind(dtype=first.dtype, device=first.device),
            prior=Normal(1.0) if prior is None else prior,
            n=n,
            prior_given=prior is not None,
        )

    def copy(self, n: int | None = None) -> Target:
        """Return the same target with its own copy of the likelihood, whose parameters may change.

        Args:
            n: another number of data; None: the same.
        """
        likelihood = copy.deepcopy(self.likelihood)
        return replace(self, likelihood=likelihood, n=self.n if n is None else n)

    def in_units(self, scale: Tensor, *, is_log: bool = False) -> Target:
        """Return the target for shift + scale·y instead of y, or for exp(shift + scale·y).

        The outputs of its network have these units, too.

        Args:
            scale: one positive number, or one for each coordinate of the last axis of y.
            is_log: whether the new y are exponentials.
        """
        spec = self.likelihood_spec.in_units(scale)
        if spec is None:
            raise ValueError(f"{type(self.likelihood_spec).__name__} has no units of y to change")
        if is_log:
            spec = spec.of_exp()
        first = next(self.net.parameters())
        likelihood = spec.bind(dtype=first.dtype, device=first.device)
        # The parameters have other names inside of another likelihood, in the same order.
        old_values = self.likelihood.state_dict().values()
        new_names = likelihood.state_dict()
        likelihood.load_state_dict(dict(zip(new_names, old_values, strict=True)))
        return replace(self, likelihood_spec=spec, likelihood=likelihood)

    @cached_property
    def network(self) -> Network:
        """The network as a function of its tensors: a copy, with its current buffers."""
        return Network(self.net)

    @cached_property
    def priors(self) -> dict[str, BoundPrior]:
        """The prior of every free tensor, bound to its shape, fan-in, dtype and device."""
        return bind_priors(prior_specs(self.prior, self.net), self.net)

    @cached_property
    def couplings(self) -> list[JointCorrection]:
        """The terms of joint priors of several tensors, in addition to those of each tensor."""
        specs = self.prior.values() if isinstance(self.prior, Mapping) else [self.prior]
        if not any(isinstance(prior, JointPrior) for prior in specs):
            return []
        return couplings(self.priors)

    @property
    def free(self) -> list[str]:
        """The names of the parameters that are not frozen (``requires_grad``)."""
        return [name for name, parameter in self.net.named_parameters() if parameter.requires_grad]

    def start(self) -> Params:
        """Return a copy of the network's current free parameters."""
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
        frozen = self.frozen
        state = no_grad_state(self.net)
        buffers = {
            name: state[name]
            for name, value in self.net.named_buffers()
            if name in state and (frozen or is_constant(value))
        }
        constants = frozen | buffers | packed_state(self.net)
        return {name: digest(value) for name, value in constants.items()}

    def forward(self, params: Params, x: object) -> Tensor:
        """Return the network's outputs with these parameters: (M, *out).

        Args:
            params: the free parameters.
            x: the inputs of M rows.
        """
        return self.network.call(params, *forward_inputs(x))

    def log_prior(self, params: Params) -> Tensor:
        """Compute Σ log p(w) over tensors.

        Args:
            params: tensors (..., *shape) by name.

        Returns:
            A tensor (...).
        """
        terms = [
            prior.log_prob(params[name]) for name, prior in self.priors.items() if name in params
        ]
        terms += [coupling(params) for coupling in self.couplings]
        return torch.stack(terms).sum(0)

    def log_joint(self, params: Params, x: object, y: Tensor) -> Tensor:
        """Compute log p(w) + (N/M)·Σ_m log p(y_m | x_m, w), whose mean over batches is exact.

        Args:
            params: the free parameters.
            x: the inputs of M rows.
            y: their targets.
        """
        return self.log_prior(params) + self.log_likelihood(self.forward(params, x), y)

    @property
    def learned_priors(self) -> list[str]:
        """The names of the tensors whose prior has hyperparameters to learn."""
        return [
            name for name, prior in self.priors.items() if any(True for _ in prior.parameters())
        ]

    def with_fixed_priors(self) -> Target:
        """Return the same target with every prior fixed at its initial hyperparameters."""
        if isinstance(self.prior, Mapping):
            rules: PriorRules = {key: _fix(prior) for key, prior in self.prior.items()}
        else:
            rules = _fix(self.prior)
        return replace(self, prior=rules)

    def require_fixed_priors(self, who: str) -> None:
        """Raise a ValueError if a prior has hyperparameters to learn.

        Args:
            who: the method that cannot do this.
        """
        learned = self.learned_priors
        if learned:
            raise ValueError(
                f"{who} cannot learn a prior (learn= for {learned[0]!r}): its density has no "
                "maximum; give the prior a fixed scale, or use VI or Laplace, which learn it by "
                "the evidence"
            )

    def scale(self, values: Tensor) -> Tensor:
        """Compute (N/M)·Σ over a batch, the estimate of the sum over all N data.

        Args:
            values: one value for each row of a batch of M, (..., M).

        Returns:
            The estimate, (...).
        """
        return values.sum(-1) * (self.n / values.shape[-1])

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Compute (N/M)·Σ_m log p(y_m | f_m).

        Args:
            outputs: the outputs for a batch, (..., M, *out).
            y: its targets.

        Returns:
            A tensor (...).
        """
        return self.scale(self.likelihood.log_prob(outputs, y))


def _fix(prior: Prior) -> Prior:
    """Return a prior without hyperparameters to learn."""
    if getattr(prior, "learn", False):
        return replace(prior, learn=False)  # type: ignore[type-var]
    return prior


def free_names(net: nn.Module, where: str | Sequence[str]) -> list[str]:
    """Return the names of the free parameters that match a pattern.

    Args:
        net: the network.
        where: a pattern of names, or a list of them.

    Raises:
        ValueError: for a pattern that matches only frozen parameters, or none.
    """
    patterns: list[str] = []
    if isinstance(where, str):
        patterns = [where]
    elif isinstance(where, Iterable):
        patterns = list(where)
    if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
        raise ValueError(
            "where must be a pattern of names such as 'head.*', a list of them or 'last', got "
            f"{where!r}"
        )
    parameters = dict(net.named_parameters())
    is_matched = match(parameters, dict.fromkeys(patterns, True), default=False)
    free = [name for name, value in parameters.items() if value.requires_grad]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in free):
            frozen = next(name for name in parameters if fnmatchcase(name, pattern))
            raise ValueError(
                f"where={pattern!r} matches only frozen parameters such as {frozen!r} "
                "(requires_grad=False); unfreeze what shall be random: requires_grad_()"
            )
    return [name for name in free if is_matched[name]]


def bind_priors(specs: Mapping[str, Prior], net: nn.Module) -> dict[str, BoundPrior]:
    """Return priors bound to the shapes, fan-ins, dtypes and devices of their tensors.

    Args:
        specs: the prior of every tensor, by name.
        net: the network with these tensors.
    """
    values = dict(net.named_parameters())
    fans = fan_ins(net)
    axes = layouts(net, values)
    bound_priors: dict[str, BoundPrior] = {}
    for name, spec in specs.items():
        value = values[name]
        bound_priors[name] = spec.bind(
            value.shape,
            fan_in=fans[name],
            dtype=value.dtype,
            device=value.device,
            axes=axes[name].axes,
        )
    return bound_priors


def prior_specs(prior: PriorRules, net: nn.Module) -> dict[str, Prior]:
    """Return the prior of each free parameter by name.

    Args:
        prior: one for all, or by patterns, of which the first that matches counts.
        net: the network.
    """
    parameters = dict(net.named_parameters())
    frozen = [name for name, parameter in parameters.items() if not parameter.requires_grad]
    rules = prior if isinstance(prior, Mapping) else {"*": prior}
    return match(parameters, rules, frozen=frozen)

"""The parameters of a likelihood, such as a noise or a shape, that suit held-out rows."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.inference.rounded_targets import rounding_noise, rounding_noises
from bayou.likelihoods import BoundHomoscedastic, BoundLikelihood, Likelihood
from bayou.network import forward_inputs
from bayou.network.target import Target
from bayou.select.noise import UNITS_OF_FIT
from bayou.training.data import Rows
from bayou.training.loop import move

MAX_ITERATIONS: Final = 100  # of L-BFGS for the few parameters of a likelihood
# A factor of a parameter from its initial value: a negative binomial that is a Poisson has a shape
# without bounds.
MAX_FACTOR: Final = 1000.0
DECIMALS: Final = 3  # of its logarithm, so that it does not depend on the last digits of the rows


def learned_parameters(target: Target) -> Params:
    """Return the parameters of the likelihood that a fit would learn, by name.

    Args:
        target: has the likelihood.
    """
    return {name: value.detach() for name, value in target.likelihood.named_parameters()}


def with_fixed_parameters(target: Target, parameters: Mapping[str, Tensor] | None = None) -> Target:
    """Return the target whose likelihood has nothing to learn.

    Args:
        target: has the likelihood.
        parameters: their values by name, by default the current ones.

    Returns:
        The target itself if there is nothing to learn, or if the parameters cannot be fixed.
    """
    learned = learned_parameters(target)
    if not learned:
        return target
    spec = target.likelihood_spec.fixed_at(learned if parameters is None else parameters)
    if spec is None:
        return target
    like = next(iter(learned.values()))
    return replace(
        target, likelihood_spec=spec, likelihood=spec.bind(dtype=like.dtype, device=like.device)
    )


def has_parameters_to_select(target: Target) -> bool:
    """Return whether the likelihood has learned parameters that can be fixed.

    Args:
        target: has the likelihood.
    """
    return with_fixed_parameters(target) is not target


def likeliest_parameters(likelihood: BoundLikelihood, outputs: Tensor, y: Tensor) -> Params:
    """Return the parameters θ that maximize Σ_n log p(y_n | f_n, θ) of held-out rows.

    Args:
        likelihood: with parameters to learn, which are logarithms.
        outputs: f of the rows, (M, *out), by weights that have not learned from them.
        y: their targets.

    Returns:
        The parameters by name, within a factor of 1,000 from those of the likelihood. A noise is
        not below that of the rounding of y.
    """
    trial = copy.deepcopy(likelihood).double()
    initial = learned = {name: value.detach().clone() for name, value in trial.named_parameters()}
    outputs = outputs.detach().double()
    y = y.double()
    optimizer = torch.optim.LBFGS(
        list(trial.parameters()), max_iter=MAX_ITERATIONS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = -trial.log_prob(outputs, y).mean()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    limit = math.log(MAX_FACTOR)
    learned = {name: value.detach() for name, value in trial.named_parameters()}
    if not all(bool(value.isfinite().all()) for value in learned.values()):
        return initial
    rounded = {
        name: (initial[name] + (value - initial[name]).clamp(-limit, limit)).round(
            decimals=DECIMALS
        )
        for name, value in learned.items()
    }
    if not isinstance(trial, BoundHomoscedastic):
        return rounded
    return {name: value.clamp_min(_least_log_scale(trial, y)) for name, value in rounded.items()}


def _least_log_scale(likelihood: BoundHomoscedastic, y: Tensor) -> Tensor:
    """Return the logs of the scales of the rounding of y, −∞ for none, as in ``log_scale``."""
    standard = y / likelihood.log_units.exp()
    if likelihood.log_scale.numel() > 1:
        return rounding_noises(standard).log().to(likelihood.log_scale)
    least = standard.new_tensor(rounding_noise(standard)).log()
    return least.to(likelihood.log_scale)


@torch.no_grad()
def outputs_of_rows(target: Target, rows: Rows, weights: Params) -> tuple[Tensor, Tensor]:
    """Return the outputs and the targets of rows.

    Args:
        target: has the network.
        rows: the rows.
        weights: of the network.
    """
    outputs = []
    targets = []
    for batch in rows.epoch():
        x, y = move(batch, next(iter(weights.values())))
        outputs.append(target.network.evaluate(weights, *forward_inputs(x)))
        targets.append(y)
    return torch.cat(outputs), torch.cat(targets)


def describe_parameters(likelihood: Likelihood) -> str:
    """Return the noise or the shape of a likelihood in words.

    Args:
        likelihood: with a ``parameter``, or one that has such a likelihood inside.
    """
    name = likelihood.parameter
    while not hasattr(likelihood, name):
        likelihood = likelihood.of  # type: ignore[attr-defined]
    value = getattr(likelihood, name)
    values = value if isinstance(value, tuple) else (value,)
    text = f"{name} {', '.join(f'{item:.3g}' for item in values)}"
    return f"{text} {UNITS_OF_FIT}" if name in ("noise", "scale") else text

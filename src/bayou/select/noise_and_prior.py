"""The settings that a search selects: the noise, and factors of the prior scales."""

from __future__ import annotations

import glob
import math
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final, final

from torch import Tensor

from bayou.inference.prior_scale import require_normal, rescale_priors
from bayou.likelihoods import Gaussian
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.network.target import Target, prior_specs
from bayou.priors import Normal, UnitNormal
from bayou.select.regularization_path import Multipliers

# Initial gains of the fan-in prior where none was given. Regression targets are standardized, so
# that a function drawn from the prior should not be much wider than 1; logits of a certain class
# are far from 0.
GAIN_OF_CLASSES: Final = 3.0
GAIN_OF_NUMBERS: Final = 2.0


@final
@dataclass(frozen=True)
class NoiseAndPrior:
    """Settings of a regression, selected on held-out rows.

    Args:
        noise: the standard deviation of the noise.
        scale: the factor of all prior scales.
        bias_factor: the further factor of the prior scales of biases.
        first_layer_divisor: the prior scales of the first layer are divided by it and those of all
            other layers multiplied: units with small inputs are nearly linear.
        fold_error: the mean squared residual of the mode on the first fold.
        is_corrected: whether the noise is that of the method itself, not only of its mode.
        input_scales: factors of the prior scales of the first layer by input; none for equal ones.
        fold_input_scales: those without the rows that the first fold holds out.
        spread: how far the members of an ensemble are randomized (``Method.with_spread``).
    """

    noise: float
    scale: float = 1.0
    bias_factor: float = 1.0
    first_layer_divisor: float = 1.0
    fold_error: float = 1.0
    is_corrected: bool = False
    input_scales: tuple[float, ...] = ()
    fold_input_scales: tuple[float, ...] = ()
    spread: float = 0.0

    def scale_both(self, factor: float) -> NoiseAndPrior:
        """Return the settings with noise and prior scale multiplied, so that their ratio stays.

        Args:
            factor: the factor of both, which makes the noise that of the method itself.
        """
        return replace(
            self, noise=factor * self.noise, scale=factor * self.scale, is_corrected=True
        )

    def multipliers(self, target: Target) -> Multipliers:
        """Return the multipliers of the prior precisions by tensor.

        Args:
            target: before the search.
        """
        first = first_layer(target)
        precisions: Multipliers = {}
        for name in target.free:
            factor = self.scale
            if name.rpartition(".")[2] == "bias" and target.net.get_parameter(name).ndim == 1:
                factor *= self.bias_factor
            if name in first:
                factor *= 1 / self.first_layer_divisor
            else:
                factor *= self.first_layer_divisor
            precisions[name] = factor**-2
        if self.input_scales:
            weight = first_weight(target)
            scales = target.net.get_parameter(weight).new_tensor(self.input_scales)
            precisions[weight] *= scales**-2
        return precisions

    def apply(self, target: Target) -> Target:
        """Return the target with this noise and these priors, all of them fixed.

        Args:
            target: before the search.
        """
        equal = replace(self, input_scales=()).multipliers(target)
        fixed = Target.build(target.net, Gaussian(self.noise), target.prior, target.n)
        fixed = rescale_priors(
            fixed, {name: factor for name, factor in equal.items() if factor != 1.0}
        )
        if not self.input_scales:
            return fixed
        weight = first_weight(target)
        prior = require_normal(fixed.priors, [weight])[weight]
        # the factors of the prior by unit have a geometric mean of 1
        scale = math.exp(float(prior.log_scale) + fmean(map(math.log, self.input_scales)))
        spec = UnitNormal(scale, float(prior.mean), inputs=self.input_scales)
        rules = prior_specs(fixed.prior, fixed.net) | {weight: spec}
        return replace(fixed, prior={glob.escape(name): rule for name, rule in rules.items()})


def with_default_prior(target: Target) -> Target:
    """Return the target itself if its prior was given, else with the initial prior of the search.

    Args:
        target: as given.
    """
    if target.prior_given:
        return target
    gain = GAIN_OF_CLASSES if isinstance(target.likelihood, FiniteLikelihood) else GAIN_OF_NUMBERS
    return replace(target, prior=Normal("fan_in", gain=gain), prior_given=True, prior_selected=True)


def first_weight(target: Target) -> str:
    """Return the name of the first weight matrix.

    Args:
        target: has the network.
    """
    return next(name for name in target.free if target.net.get_parameter(name).ndim > 1)


def first_layer(target: Target) -> frozenset[str]:
    """Return the names of the tensors of the layer with the first weight matrix.

    Args:
        target: has the network.
    """
    weights = [name for name in target.free if target.net.get_parameter(name).ndim > 1]
    layer = weights[0].rpartition(".")[0] if weights else None
    return frozenset(name for name in target.free if name.rpartition(".")[0] == layer)


def takes_columns(target: Target, x: Any) -> bool:
    """Return whether the first layer has a weight for every column of x, and one prior scale.

    With a single column there are no scales to compare.

    Args:
        target: network and prior.
        x: the inputs.
    """
    if not isinstance(x, Tensor) or x.ndim != 2 or x.shape[1] < 2:
        return False
    weight = first_weight(target)
    prior = require_normal(target.priors, [weight])[weight]
    return (
        len(prior.shape) == 2
        and prior.shape[1] == x.shape[1]
        and prior.log_scale.numel() == prior.mean.numel() == 1
    )

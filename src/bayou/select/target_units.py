"""Units of y for methods by name: what is subtracted, what y is divided by, and its logarithm."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from bayou.likelihoods import Likelihood
from bayou.likelihoods.logarithm import check_positive
from bayou.network.units import Standardization, TargetMap
from bayou.select.column_scales import column_scales, is_standard
from bayou.select.far_values import flag_sentinels


@final
@dataclass(frozen=True)
class TargetUnits:
    """The standardization of the values of y, or of their logarithms.

    Args:
        values: the standardization, which the outputs of the network have, too.
        y: the targets.
        likelihood: the likelihood as given; None for the default one.
    """

    values: Standardization
    y: Tensor
    likelihood: Likelihood | None

    def target_map(self) -> TargetMap | None:
        """Return the map of y to standard units; None where it is that of the outputs."""
        if self.likelihood is None:
            return None
        is_log = self.likelihood.of_log() is not None
        companion = self.likelihood.companion
        if companion == "none" and not is_log:
            return None
        values, companions = _split(self.y.detach().double(), self.likelihood)
        columns = values.shape[-1] if is_log else 0
        scale = self.values.scale.double()
        per_value = scale.log().expand_as(values)
        if is_log:
            per_value = per_value + values.log()
        if companion == "flag":
            per_value = per_value * companions
        log_scale = float(per_value.flatten(1).sum(1).mean())
        return TargetMap(self._affine(values, companion), columns, log_scale)

    def _affine(self, values: Tensor, companion: str) -> Standardization:
        """Return the standardization of all numbers of y."""
        if companion == "none":
            return self.values
        shift = self.values.shift
        scale = self.values.scale.expand(values.shape[1:])
        companion_scale = scale if companion == "noise" else torch.ones_like(scale)
        shifts = torch.cat((shift, torch.zeros_like(shift)), -1)
        return Standardization(shifts, torch.cat((scale, companion_scale), -1))


def _split(y: Tensor, likelihood: Likelihood | None) -> tuple[Tensor, Tensor]:
    """Return the values of y, and what follows them on its last axis, if anything."""
    if likelihood is None or likelihood.companion == "none":
        return y, y[..., :0]
    if y.ndim < 2 or y.shape[-1] % 2:
        raise ValueError(
            f"{type(likelihood).__name__} has two numbers for each value on the last axis of y, "
            f"such as (N, 2), got y of shape {tuple(y.shape)}"
        )
    values, companions = y.chunk(2, -1)
    return values, companions


def describe_targets(
    y: Tensor, likelihood: Likelihood | None, *, shares_scale: bool = True
) -> TargetUnits | None:
    """Return the units of y, or None for classes, counts and likelihoods without units.

    Args:
        y: the targets of all rows.
        likelihood: the likelihood as given; None for the default one.
        shares_scale: whether all outputs share one scale under a given likelihood, which may have
            one noise for all of them.
    """
    if not y.is_floating_point():
        return None
    values, _ = _split(y, likelihood)
    in_units = likelihood
    if likelihood is not None and likelihood.of_log() is not None:
        check_positive(values, "the logarithm of y")
        values = values.detach().double().log()
        in_units = likelihood.of_log()
    columns = values.detach().double()
    columns = columns.reshape(len(y), -1) if y.ndim <= 2 else columns.reshape(-1, 1)
    shift = columns.mean(0)
    scale = columns.std(0, correction=0)
    if bool(flag_sentinels(columns).any()):
        shift, scale = column_scales(columns)
    is_constant = (columns == columns[0]).all(0)
    scale = torch.where(is_constant, 1.0, scale)
    is_as_given = in_units is likelihood
    if bool(is_standard(shift, scale).all()) and is_as_given:
        return None
    row_shape = values.shape[1:] if y.ndim <= 2 else ()
    shift = shift.reshape(row_shape)
    if in_units is None:
        return TargetUnits(Standardization(shift, scale.reshape(row_shape)), y, None)
    scale = scale.square().mean().sqrt() if shares_scale else scale.reshape(row_shape)
    if in_units.in_units(scale) is None:
        return None
    return TargetUnits(Standardization(shift, scale), y, likelihood)

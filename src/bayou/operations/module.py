"""A posterior as a plain network, which needs only torch."""

from __future__ import annotations

from torch import nn

from bayou.params import Params
from bayou.posteriors import Posterior


def to_module(posterior: Posterior, params: Params | None = None) -> nn.Module:
    """A copy of the user's network, in eval mode, with tensors of the posterior: ``posterior.to_module(params)``."""
    return posterior.to_module(params)

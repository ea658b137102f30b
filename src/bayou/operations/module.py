"""A posterior as a plain network, which needs only torch."""

from __future__ import annotations

from torch import nn

from bayou.params import Params
from bayou.posteriors import Posterior


def to_module(posterior: Posterior, params: Params | None = None) -> nn.Module:
    """A network of the user's class with tensors of a posterior: ``posterior.to_module(params)``."""
    return posterior.to_module(params)

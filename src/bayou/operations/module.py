"""A posterior as a plain network, which needs only torch."""

from __future__ import annotations

import copy

import torch
from torch import nn

from bayou.params import Params
from bayou.posteriors import Posterior
from bayou.posteriors.state import with_dtypes

DRAW = "pass a draw: to_module(posterior, {name: value[0] for name, value in posterior.sample(1, seed=0).items()})"


@torch.no_grad()
def to_module(posterior: Posterior, params: Params | None = None) -> nn.Module:
    """A copy of the user's network, in eval mode, with tensors of the posterior: one function out of many.

    Other random quantities (masks, noise of the likelihood) and a temperature are not part of the network; the draw of
    a linearized Laplace is the network with these weights, as with ``using("sampled")``.

    Args:
        posterior: what has the tensors.
        params: a draw, ``{name: value[0] for name, value in posterior.sample(1, seed=0).items()}``. Without it, a
            single representative set of weights: the point of MLE and MAP; the mode of Laplace and the average of SWAG;
            the mean of VI and IVON; the weights of MC dropout, which is then off. Several points, a mixture and
            families whose mean has no closed form (MNF) have none and raise a ValueError; pass a draw instead.
    """
    if params is None and posterior.members > 1:
        raise ValueError(f"{posterior!r} has no one network: the mean of its weights is none of them; {DRAW}")
    if params is None:
        try:
            params = posterior.mean()
        except ValueError as error:
            raise ValueError(f"{error}; for a network {DRAW}") from None
    network = posterior.component(params).network
    buffers = network.buffers()
    known = {*network.names, *buffers}
    state = buffers | {name: value for name, value in params.items() if name in known}
    net = with_dtypes(copy.deepcopy(posterior.target.net).to(params[network.names[0]].device), state)
    net.load_state_dict(state, strict=False)  # a tied weight is stored once, under one of its names
    return net.eval()

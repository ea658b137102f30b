"""A posterior as a plain network: torch and nothing else."""

from __future__ import annotations

import copy

import torch
from torch import nn

from bayou.params import Params
from bayou.posteriors import Mixture, Posterior
from bayou.posteriors.mixture import MEMBER


@torch.no_grad()
def to_module(posterior: Posterior, params: Params | None = None) -> nn.Module:
    """A copy of the user's network, in eval mode, with tensors of the posterior: one function out of many.

    ``params``: a draw, ``{name: value[0] for name, value in posterior.sample(1, seed=0).items()}``. Without it, the one
    set of weights that stands for a posterior: the point of MLE and MAP; the mode of Laplace and the average of SWAG
    (``mean``); the mean of a Gaussian by VI or IVON; the weights of MC dropout, which is then off. Several points, a
    mixture, and families whose mean has no closed form (MNF) have none: a ValueError, and the way out is a draw. What
    is drawn beside tensors of the network (masks, noise of the likelihood) is left out, a temperature too.
    """
    if params is None:
        if isinstance(posterior, Mixture) or (posterior.draws or 1) > 1:
            raise ValueError(
                f"{posterior!r} has no one network: the mean of its weights is none of them; pass a draw, "
                "to_module(posterior, {name: value[0] for name, value in posterior.sample(1, seed=0).items()})"
            )
        params = posterior.mean()
    member = posterior.components[int(params[MEMBER])] if isinstance(posterior, Mixture) else posterior
    buffers = member.network.buffers()
    known = {*member.network.names, *buffers}
    like = params[member.network.names[0]]
    net = copy.deepcopy(posterior.target.net).to(device=like.device, dtype=like.dtype)
    # Not strict: a tied weight comes once, under one of its names.
    net.load_state_dict(buffers | {name: value for name, value in params.items() if name in known}, strict=False)
    return net.eval()

"""Parameters away from their initial values, where many maps are the identity."""

import torch

from bayou.core import rng


def perturb(module, scale=0.3):
    """Return the module in double precision, with noise added to its parameters.

    Args:
        module: the module, which is changed in place.
        scale: the standard deviation of the noise.
    """
    module.double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.add_(scale * rng.normal(1, p.shape, p, rng.fold(0, name))[0])
    return module

"""Random data of the tests of methods, which are the same at every call."""

import torch


def normal(*shape, seed=0):
    """Standard normals in float64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=torch.float64)

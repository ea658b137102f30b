"""What tests of flows share: numbers, modules with parameters of their own, and comparisons."""

import math

import pytest
import torch

from bayou.core import rng
from bayou.flows import Flow, StandardNormal

LIKE = torch.zeros((), dtype=torch.float64)


def double(values):
    """Return a tensor in double precision."""
    return torch.tensor(values, dtype=torch.float64)


def seeded(seed):
    """Return a generator of random numbers with a seed."""
    return torch.Generator().manual_seed(seed)


def built(make, seed=0):
    """Return what a function makes, with the same weights at every call."""
    with rng.isolated(seed, torch.device("cpu")):
        return make()


def standard(transform):
    """Return the flow of a transform of standard normal numbers."""
    return Flow(StandardNormal(transform.event_in), transform)


def derivative(value, x, **options):
    """Return the gradient of a number in one tensor."""
    return torch.autograd.grad(value, x, **options)[0]


def perturb(module, scale=0.3):
    """Return the module in double precision, with noise added to its parameters.

    Many maps are the identity at their initial values.

    Args:
        module: the module, which is changed in place.
        scale: the standard deviation of the noise.
    """
    module.double()
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.add_(scale * rng.normal(1, p.shape, p, rng.fold(0, name))[0])
    return module


def close(found, expected, rtol=1e-5, atol=1e-12):
    """Assert that a tensor agrees with another one or with a number, entry by entry."""
    if not isinstance(expected, torch.Tensor):
        expected = torch.tensor(expected, dtype=found.dtype)
    assert torch.allclose(found, expected, rtol, atol), (found - expected).abs().max()


def identical(found, expected):
    """Assert that two tensors are equal, bit for bit."""
    assert torch.equal(found, expected)


def item_is(found, expected, **tolerance):
    """Assert that a tensor with one entry is a number, to the tolerance of ``pytest.approx``."""
    assert found.item() == pytest.approx(expected, **tolerance)


def near(values, expected, tolerance=1e-12):
    """Assert that the mean of draws is the expected one within five standard errors."""
    error = values.std().item() / math.sqrt(values.numel())
    assert abs(values.mean().item() - expected) < 5 * error + tolerance


def failed(report):
    """Return the names of the rows of a report that failed."""
    return {result.name for result in report.failures}


def refuses(*cases):
    """Return a test that each call is a ``ValueError`` with a message.

    Args:
        cases: pairs of a call and a part of the message.
    """

    @pytest.mark.parametrize(("call", "message"), cases)
    def test(call, message):
        with pytest.raises(ValueError, match=message):
            call()

    return test

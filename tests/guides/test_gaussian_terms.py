"""The terms of Gaussian weights, against operations of torch."""

import pytest
import torch
from torch.testing import assert_close

from bayou.guides import gaussian_terms
from bayou.guides.gaussian_terms import gain_terms, has_simple_prior
from bayou.priors import Normal

SHAPES = [(4, 3), (5,), (3, 2, 2), ()]
GAINS = [((4, 3), 0), ((4, 3), 1), ((5,), 0), ((3, 2, 2), 0), ((3, 2, 2), 1)]


def plain_terms(center, log_std, prior, axis=None):
    """Center, std, KL (at z = 0), Σ_j M²/s² and Σ_j M²/σ²."""
    std = log_std.exp()
    if axis is None:
        return center, std, prior.kl(center, std)
    others = [i for i in range(center.ndim) if i != axis]
    squares = [center.square(), (center / std).square()]
    if others:
        squares = [square.sum(others) for square in squares]
    precision = (-2 * prior.log_scale).exp()
    kl = prior.kl(torch.zeros_like(center), std)
    return center, std, kl, squares[0] * precision, squares[1]


@pytest.fixture(params=["one block", "blocks", "small tensors"], autouse=True)
def passes(request, monkeypatch):
    monkeypatch.setattr(gaussian_terms, "BLOCK_SIZE", 4 if request.param == "blocks" else 2**17)
    is_small = request.param == "small tensors"
    monkeypatch.setattr(gaussian_terms, "MAX_SMALL_SIZE", 2**15 if is_small else 0)


def case(shape, axis, learn):
    torch.manual_seed(0)
    prior = Normal(0.7, learn=learn).bind(shape, dtype=torch.float64)
    center = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    log_std = (0.3 * torch.randn(shape, dtype=torch.float64) - 1).requires_grad_()
    parameters = [center, log_std, *prior.parameters()]

    def terms():
        if axis is not None:
            return tuple(gain_terms(center, log_std, prior, axis))
        copies = ([center, center.detach()], [log_std, log_std.detach()], [prior, prior])
        return tuple(gaussian_terms.gaussian_terms(*copies)[0])

    return terms, lambda: plain_terms(center, log_std, prior, axis), parameters


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [*((shape, None) for shape in SHAPES), *GAINS])
def test_terms_and_gradients_are_those_of_plain_operations(shape, axis, learn):
    terms, plain, parameters = case(shape, axis, learn)
    values, expected = terms(), plain()
    assert_close(values, expected)
    weights = [torch.randn_like(value) for value in expected]
    for used in [range(len(weights)), *([i] for i in range(len(weights)))]:
        gradients = []
        for outputs in (values, expected):
            loss = sum((outputs[i] * weights[i]).sum() for i in used)
            options = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
            gradients.append(torch.autograd.grad(loss, parameters, **options))
        assert_close(*gradients)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize(("shape", "axis"), [((4, 3), None), ((4, 3), 1), ((3, 2, 2), 0)])
def test_second_derivatives_are_those_of_plain_operations(shape, axis, learn):
    terms, plain, parameters = case(shape, axis, learn)
    seconds = []
    for outputs in (terms(), plain()):
        loss = sum(value.square().sum() for value in outputs)
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        seconds.append(torch.autograd.grad(sum(g.sin().sum() for g in first), parameters))
    assert_close(*seconds, rtol=1e-6, atol=1e-7)


def test_other_priors_keep_plain_operations():
    assert has_simple_prior(Normal(0.5).bind((3,)))
    for prior in (Normal(0.5, mean=0.1), Normal(0.5, learn="units")):
        assert not has_simple_prior(prior.bind((3, 2)))

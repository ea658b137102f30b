"""Draws of all guides at once, against the draws of each."""

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.core import rng
from bayou.flows import Affine, Chain, Coupling, Gate
from bayou.flows.layers.coupling import can_couple_together, couple_together


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(3 * 9, 6), nn.Tanh(), nn.Linear(6, 2)
    ).double()


SPECS = {
    "MeanField": bayou.MeanField(),
    "MNF": bayou.MNF(),
    "MNF per example": bayou.MNF(z="example"),
    "MNF without flow": bayou.MNF(None),
    "MNF with splines": bayou.MNF("spline_coupling"),
    "MNF as published": bayou.MNF(auxiliary="paper"),
    "both": {"0.*": bayou.MNF(mixing=0), "2.weight": bayou.MNF(), "*": bayou.MeanField()},
}


@pytest.mark.parametrize("local", [False, True])
@pytest.mark.parametrize("prior", [bayou.Normal(0.5), bayou.Normal(0.5, mean=0.1)])
@pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
def test_draws_and_gradients_are_those_of_each_guide(spec, prior, local):
    x = torch.randn(4, 1, 5, 5, dtype=torch.float64)
    bnn = bayou.bayesianize(network(), spec, prior=prior, example=x)
    for parameter in bnn.parameters():  # flows start at the identity
        parameter.data += 0.1 * torch.randn_like(parameter)
    together = bnn.draw(3, examples=4, local=local, seed=5, start=2)
    results = []
    for index, guide in enumerate(bnn.guides):
        is_local = local and bnn.local_names >= set(guide.names)
        n = 12 if is_local and bnn.specs[guide.names[0]].per_example else 3
        alone = guide.draw(n, local=is_local, seed=rng.fold(5, *guide.names), start=2)
        pair = []
        for draw in (together.draws[index], alone):
            values = [draw.kl]
            for value in draw.parts.values():
                if isinstance(value, torch.Tensor):
                    values.append(value)
                else:
                    values += [value.mean, value.std, *(gain.z for gain in value.gains)]
            if draw.gains is not None:
                values += [draw.gains.z, draw.gains.kl]
            loss = sum(
                (value * value.detach().cos()).sum() for value in values if value is not None
            )
            parameters = list(guide.parameters())
            gradients = torch.autograd.grad(
                loss, parameters, retain_graph=True, allow_unused=True, materialize_grads=True
            )
            pair.append(([v for v in values if v is not None], gradients))
        results.append(pair)
    for one, two in results:
        assert_close(one, two)


@pytest.mark.parametrize("mask", ["half", "alternate"])
def test_couplings_together_are_those_of_each(mask):
    torch.manual_seed(0)
    sizes = [2, 5, 4]
    flips = [False, True, True]
    couplings = [
        Coupling(size, Affine(), mask, flip, hidden=(7,)).double()
        for size, flip in zip(sizes, flips, strict=True)
    ]
    for coupling in couplings:
        for parameter in coupling.parameters():
            nn.init.normal_(parameter, std=0.3)
    assert can_couple_together(couplings)
    x = torch.randn(6, sum(sizes), dtype=torch.float64)
    y, ladj = couple_together(couplings, x)
    for piece, part, term, coupling in zip(
        x.split(sizes, -1), y.split(sizes, -1), ladj, couplings, strict=True
    ):
        assert_close((part, term), coupling(piece))


def test_unlike_couplings_are_not_together():
    affine = Coupling(4, Affine())
    mask = torch.tensor([True, False, False, True])
    others = [
        Coupling(4, Gate()),
        Coupling(4, Affine(), mask),
        Coupling(4, Affine(), context_dim=2),
        Chain(affine),
    ]
    for other in others:
        assert not can_couple_together([affine, other])
        assert not can_couple_together([other, affine])

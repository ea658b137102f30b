"""Fitted flows approach log Z of Rezende & Mohamed's U1 from below."""

import torch

from bayou.core import rng
from bayou.flows import Flow, StandardNormal, planar, realnvp
from bayou.flows.fitting.fit import fit
from experiments.densities import POTENTIALS


def _bound(family, size, steps, samples):
    with rng.isolated(0, torch.device("cpu")):
        transform = {"planar": planar, "realnvp": realnvp}[family](2, **size)
    flow = Flow(StandardNormal(2), transform)
    result = fit(
        flow,
        POTENTIALS["u1"].log_density,
        steps=steps,
        samples=samples,
        warmup=0.4,
        patience=None,
        lr=0.01,
    )
    assert result.bound is not None
    assert result.standard_error is not None
    return result.bound, result.standard_error


# A short fit varies with its seed, mostly by losing one of the two modes (log 2 = 0.69 nats): over
# 10 and 12 seeds the bounds were 1.21 to 1.62 (planar) and 1.14 to 1.73 (RealNVP). The margin
# covers the worst of them, not seed 0 alone.
def test_bound_on_u1_after_a_short_fit():
    bound, standard_error = _bound(
        "realnvp", {"layers": 4, "hidden": (32,)}, steps=300, samples=128
    )
    assert POTENTIALS["u1"].log_z - 0.9 < bound < POTENTIALS["u1"].log_z + 3 * standard_error

"""The evidence lower bound of a variational posterior, estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch

from bayou import rng
from bayou.guides.guide import KL
from bayou.network import check_dtype, clear_errors, evaluating, forward_inputs
from bayou.posteriors.guided import Guided
from bayou.training.data import as_data
from bayou.training.loop import move


@dataclass(frozen=True)
class Elbo:
    """ELBO = log_likelihood − kl: sums in nats over all data and weights; the KL is never rescaled.

    ``value``: the mean over draws, with its ``standard_error``.

    ``kind``: "exact"; "bound" for families with an auxiliary and for flows whose log q is a bound;
    "estimate" for flows whose log q is an unbiased estimate; "up to a constant" where a family has
    no density, so that the value must not be compared with an evidence. ``side``: the relation of
    the expected value to the ELBO. "equal" and "lower" are bounds of the log evidence; "upper" and
    "unknown" (a flow whose forward log q is too low) are not.
    """

    value: float
    standard_error: float
    log_likelihood: float
    kl: float
    kind: str
    side: str = "equal"

    def __str__(self) -> str:
        kind = (
            self.kind
            if self.side in ("equal", "lower")
            else f"{self.kind}, no evidence bound: {self.side}"
        )
        return (
            f"ELBO {self.value:.4f} ± {self.standard_error:.4f} nats ({kind}): "
            f"log-likelihood {self.log_likelihood:.4f}, KL {self.kl:.4f}"
        )


@torch.no_grad()
def elbo(
    posterior: Guided,
    data: Any,
    samples: int = 100,
    *,
    seed: rng.Seed = None,
    batch_size: int = 1024,
) -> Elbo:
    """E_q[Σ_n log p(y_n | x_n, w)] − KL(q ‖ p) from ``samples`` function draws, each with the KL of
    that draw.

    Of an ensemble of variational posteriors, 1/C Σ q_c, the mean of those of its ``components`` is
    a bound of the ELBO, since KL(1/C Σ q_c ‖ p) ≤ 1/C Σ KL(q_c ‖ p), and no more than log C nats
    below it.

    Args:
        posterior: what VI or IVON found.
        data: the training data, as ``bayou.fit`` takes them.
        seed: of the draws.
        batch_size: rows that go through the network at a time.
    """
    if samples < 2:
        raise ValueError(f"samples must be at least 2 for a standard error, got {samples}")
    if not isinstance(posterior, Guided):
        raise ValueError(
            f"elbo needs a variational posterior (of an ensemble, a component), got {posterior!r}"
        )
    bayesian, target = posterior.bayesian, posterior.target
    batches = as_data(data, batch_size)
    like = next(bayesian.parameters())
    seed = rng.integer(seed)
    log_likelihood, kl = (torch.zeros(samples, dtype=torch.float64) for _ in range(2))
    with evaluating(bayesian):
        for s in range(samples):
            draw = bayesian.draw(1, local=False, seed=rng.fold(seed, s), start=s % bayesian.members)
            params = {name: part[0] for name, part in draw.parts.items()}  # type: ignore[index]
            kl[s] = float(draw.kl)
            for raw in batches.ordered():
                if s == 0:
                    check_dtype(raw[0], like)
                x, y = move(raw, like)
                with clear_errors(x):
                    outputs = bayesian.call(params, *forward_inputs(x))
                if s == 0:
                    target.likelihood.validate(outputs.shape, y)
                log_likelihood[s] += float(target.likelihood.log_prob(outputs, y).sum())
    value = log_likelihood - kl
    side = reduce(or_, (guide.kl_side for guide in bayesian.guides)).opposite
    return Elbo(
        float(value.mean()),
        float(value.std()) / math.sqrt(samples),
        float(log_likelihood.mean()),
        float(kl.mean()),
        KL.worst(guide.kl_kind for guide in bayesian.guides).value,
        side.name,  # type: ignore[arg-type]
    )

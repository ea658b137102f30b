"""The evidence lower bound of a variational posterior, estimated."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Any

import torch

from bayou.core import rng
from bayou.core.params import Params
from bayou.guides.guide import KL
from bayou.network import check_dtype, clear_errors, evaluating, forward_inputs
from bayou.posteriors.guided import Guided
from bayou.training.data import Data, as_data
from bayou.training.loop import move


@dataclass(frozen=True)
class Elbo:
    """An estimate of ELBO = log_likelihood − kl, in nats for all data and all weights.

    The KL is never rescaled. Values of side "equal" and "lower" are bounds of the log evidence;
    "upper" and "unknown" (a flow whose forward log q is too low) are not.

    Args:
        value: the mean over draws.
        standard_error: of ``value``.
        log_likelihood: E_q[Σ_n log p(y_n | x_n, w)].
        kl: KL(q ‖ p).
        kind: "exact"; "bound" for families with an auxiliary and for flows whose log q is a bound;
            "estimate" for flows whose log q is an unbiased estimate; "up to a constant" where a
            family has no density, so that the value must not be compared with an evidence.
        side: the relation of the expected value to the ELBO: "equal" (the default), "lower",
            "upper" or "unknown".
    """

    value: float
    standard_error: float
    log_likelihood: float
    kl: float
    kind: str
    side: str = "equal"

    def __str__(self) -> str:
        description = self.kind
        if self.side not in ("equal", "lower"):
            description = f"{self.kind}, no evidence bound: {self.side}"
        return (
            f"ELBO {self.value:.4f} ± {self.standard_error:.4f} nats ({description}): "
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
    """Estimate the evidence lower bound, E_q[Σ_n log p(y_n | x_n, w)] − KL(q ‖ p).

    It is the mean over function draws, each with the KL of that draw. Of an ensemble of variational
    posteriors, 1/C Σ q_c, the mean of those of its ``components`` is a bound of the ELBO, since
    KL(1/C Σ q_c ‖ p) ≤ 1/C Σ KL(q_c ‖ p), and no more than log C nats below it.

    Args:
        posterior: the posterior of VI or IVON.
        data: the training data, as ``bayou.fit`` takes them.
        samples: the number of draws, at least 2; 100 by default.
        seed: of the draws; None takes them from torch's global stream.
        batch_size: rows that go through the network at a time.

    Returns:
        The estimate with its standard error.

    Raises:
        ValueError: for another kind of posterior, or fewer than two samples.

    Example::

        posterior = bayou.fit(net, (x, y), method=bayou.VI(), seed=0)
        print(bayou.elbo(posterior, (x, y), seed=0))
    """
    if samples < 2:
        raise ValueError(f"samples must be at least 2 for a standard error, got {samples}")
    if not isinstance(posterior, Guided):
        raise ValueError(
            f"elbo needs a variational posterior (of an ensemble, a component), got {posterior!r}"
        )
    bayesian = posterior.bayesian
    batches = as_data(data, batch_size)
    seed = rng.integer(seed)
    log_likelihood = torch.zeros(samples, dtype=torch.float64)
    kl = torch.zeros(samples, dtype=torch.float64)
    with evaluating(bayesian):
        for index in range(samples):
            draw = bayesian.draw(
                1, local=False, seed=rng.fold(seed, index), start=index % bayesian.members
            )
            params = {name: values[0] for name, values in draw.parts.items()}  # type: ignore[index]
            kl[index] = float(draw.kl)
            log_likelihood[index] = _log_likelihood(posterior, params, batches, check=index == 0)
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


def _log_likelihood(posterior: Guided, params: Params, batches: Data, *, check: bool) -> float:
    """Compute the log-likelihood of all rows with one draw of the weights.

    Args:
        posterior: has the network and the likelihood.
        params: the draw.
        batches: all rows.
        check: whether dtypes and shapes of the batches are checked.
    """
    bayesian = posterior.bayesian
    likelihood = posterior.target.likelihood
    parameter = next(bayesian.parameters())
    total = 0.0
    for batch in batches.epoch():
        if check:
            check_dtype(batch[0], parameter)
        x, y = move(batch, parameter)
        with clear_errors(x):
            outputs = bayesian.call(params, *forward_inputs(x))
        if check:
            likelihood.validate(outputs.shape, y)
        total += float(likelihood.log_prob(outputs, y).sum())
    return total

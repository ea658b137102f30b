"""Active learning: the rows to label next, those whose y is most informative about the weights.

found = bayou.acquire(posterior, pool, 10, score="batchbald")
pool[found.indices]                 # rows to label, the best first
"""

from __future__ import annotations

import math
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bayou import rng
from bayou.likelihoods import FiniteLikelihood, entr
from bayou.network import forward_inputs
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import check_count
from bayou.predictive import Predictive

Score = Literal["bald", "batchbald", "variance", "entropy", "random"]
SCORES = get_args(Score)
CONFIGURATIONS = (
    1024  # joint outcomes of the selected rows, up to which all are enumerated; more are sampled
)
CHUNK = 2**24  # numbers held at a time


class Acquired(NamedTuple):
    """Rows of the pool, the best first, (n,), and their scores, (n,): see ``acquire``."""

    indices: Tensor
    scores: Tensor


@torch.no_grad()
def acquire(
    posterior: Posterior,
    pool: Any,
    n: int,
    score: Score = "bald",
    *,
    samples: int | None = None,
    seed: rng.Seed = 0,
) -> Acquired:
    """The n rows of ``pool`` (a tensor, or a tuple of inputs) to label next.

    ``score``, each in nats except for the variance. "bald": I[y; w], the mutual information of y
    and the weights (Houlsby 2011), for each row separately. "batchbald": I[y_1 .. y_n; w] of all
    rows jointly, selected greedily (Kirsch 2019); classes only. A score is the increase by a row,
    so that of two similar rows only one is selected; exact while the selected rows have up to 1,024
    joint outcomes, then by as many samples. "variance": Σ_i Var_s E[y_i given f_s], the epistemic
    variance. "entropy": H[y], aleatoric and epistemic. "random": 0, a baseline.

    A point (MAP) has no epistemic uncertainty: only "entropy" and "random" are defined for it.

    Args:
        posterior: what predicts y.
        n: the number of rows to select.
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws.
    """
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    check_count(n, "n", 1)
    inputs = forward_inputs(pool)
    rows = len(inputs[0]) if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim else 0
    if rows < n:
        raise ValueError(f"the pool has {rows:,} rows, but n = {n:,}; request fewer")
    seed = rng.integer(seed)
    if score == "random":
        return Acquired(rng.permutation(rows, seed)[:n], torch.zeros(n))
    if score != "entropy" and (posterior.draws == 1 or samples == 1):
        raise ValueError(
            f"{score!r} needs several networks, and this posterior has one; use score='entropy', or a method with "
            "several, such as Ensemble(5)"
        )
    p = posterior.predict(pool, samples, seed=seed)
    if score == "batchbald":
        return batch_bald(p, n, rng.fold(seed, "configurations"))
    scores = {
        "bald": lambda: p.mutual_information,
        "variance": lambda: p.epistemic_std.square().flatten(1).sum(1),
        "entropy": lambda: p.entropy,
    }[score]()
    best = scores.sort(descending=True, stable=True)
    return Acquired(best.indices[:n], best.values[:n])


def batch_bald(p: Predictive, n: int, seed: rng.Seed, limit: int = CONFIGURATIONS) -> Acquired:
    """Rows one after the other, with the largest I[y_b; w | y_1 .. y_b−1] = H[y_b | y_1 .. y_b−1] −
    E_s H[y_b | f_s].

    Their sum is I[y_1 .. y_n; w]. An outcome c of the earlier rows has a probability π_c and gives
    each draw the weight q_cs ∝ Π_i p(y_i | f_s); H[y | y_1 ..] = Σ_c π_c·H[Σ_s q_cs·p(y | f_s)]. Of
    more than ``limit`` outcomes as many are drawn, by systematic sampling from π.
    """
    if not isinstance(p.likelihood, FiniteLikelihood):
        raise ValueError(
            f"batchbald is for classes, and y has {type(p.likelihood).__name__}; use 'bald' or 'variance'"
        )
    pmf = p.likelihood.log_pmf(p.outputs.double()).exp()  # (S, B, K)
    if pmf.ndim != 3:
        raise ValueError(
            f"batchbald is for one class in each row, got outputs {tuple(p.outputs.shape)}; use 'bald'"
        )
    samples, _, classes = pmf.shape
    noise = entr(pmf).sum(-1).mean(0)  # (B,)
    weight, draws = pmf.new_ones(1), pmf.new_full((1, samples), 1 / samples)  # π (C,), q (C, S)
    chosen, gains = list[int](), list[float]()
    for step in range(n):
        parts = pmf.split(max(1, CHUNK // (len(weight) * classes)), 1)
        entropy = torch.cat(
            [entr(torch.einsum("cs,sbk->bck", draws, part)).sum(-1) @ weight for part in parts]
        )
        gain = entropy - noise
        gain[chosen] = -math.inf
        best = int(gain.argmax())
        chosen.append(best)
        gains.append(max(0.0, float(gain[best])))
        outcomes = (weight.unsqueeze(1) * (draws @ pmf[:, best])).flatten()  # (C·K,)
        if len(outcomes) > limit:
            index = _systematic(outcomes, limit, rng.fold(seed, step))
            weight = pmf.new_full((limit,), 1 / limit)
        else:
            index = outcomes.nonzero().flatten()
            weight = outcomes[index]
        draws = draws[index // classes] * pmf[:, best, index % classes].T
        draws = draws / draws.sum(1, keepdim=True)
    return Acquired(torch.tensor(chosen, device=pmf.device), pmf.new_tensor(gains))


def _systematic(weights: Tensor, count: int, seed: rng.Seed) -> Tensor:
    """``count`` indices by systematic sampling from the weights (Kitagawa 1996)."""
    ends = weights.cumsum(0)
    places = (
        torch.arange(count, device=weights.device) + rng.uniform(1, (), weights, seed)
    ) / count
    return torch.searchsorted(ends, places * ends[-1], right=True).clamp_max(
        int(weights.nonzero().max())
    )

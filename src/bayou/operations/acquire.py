"""Active learning: the rows to label next, those whose y is most informative about the weights.

acquired = bayou.acquire(posterior, pool, 10, score="batchbald")
pool[acquired.indices]              # rows to label, the best first
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods import FiniteLikelihood, entr
from bayou.likelihoods.predictive import Predictive
from bayou.network import forward_inputs
from bayou.operations.batch_scores import epig, select_by_clusters, select_by_determinant
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import DEFAULT_SAMPLES, check_count

Score = Literal["bald", "batchbald", "epig", "lcmd", "determinant", "variance", "entropy", "random"]
SCORES = get_args(Score)
MAX_TARGETS = 500  # rows of the pool that stand for the rows to predict, of "epig"
# Joint outcomes of the selected rows up to which all are enumerated; of more, so many are sampled.
MAX_OUTCOMES = 1024
MAX_CHUNK_NUMBERS = 2**24  # numbers held at a time
JOINT_SCORES = ("batchbald", "epig", "lcmd", "determinant")
# The scores of each row separately: (B,).
ROW_SCORES: dict[str, Callable[[Predictive], Tensor]] = {
    "bald": lambda predictive: predictive.mutual_information,
    "variance": lambda predictive: predictive.epistemic_std.square().flatten(1).sum(1),
    "entropy": lambda predictive: predictive.entropy,
}


class Acquired(NamedTuple):
    """Rows of the pool, the best first, and their scores: see ``acquire``.

    Args:
        indices: the numbers of the rows, (n,).
        scores: their scores, (n,).
    """

    indices: Tensor
    scores: Tensor


@torch.no_grad()
def acquire(
    posterior: Posterior,
    pool: object,
    n: int,
    score: Score = "bald",
    *,
    samples: int | None = None,
    seed: rng.Seed = 0,
    targets: object = None,
) -> Acquired:
    """Select the n rows of a pool to label next.

    Scores, in nats except for "variance" and "lcmd":

    "bald": I[y; w] = H[E_s p(y | f_s)] − E_s H[p(y | f_s)], the mutual information of y and the
    weights, for each row separately. "batchbald": I[y_1 .. y_n; w] of all rows jointly, selected
    greedily; classes only. A score is the increase by a row, so that of two similar rows only one
    is selected; exact while the selected rows have up to 1,024 joint outcomes, then by as many
    samples. "epig": the mean of I[y; y*] over rows x* that are to be predicted, for each row
    separately: information about predictions instead of weights; exact for classes, by the
    covariances of the functions for numbers (``bayou.operations.batch_scores.epig``).
    "determinant": numbers only, the greedy choice of rows with the largest
    ½·log det(I + Σ^−½·K·Σ^−½), K the joint covariances of the functions and Σ the noise; a score is
    the increase by a row. "lcmd": numbers only, the farthest row of the largest cluster; a score is
    the squared distance in the squared units of y. "variance": Σ_i Var_s E[y_i | f_s], the
    epistemic variance. "entropy": H[y], aleatoric and epistemic. "random": 0, a baseline.

    "batchbald", "determinant" and "lcmd" look at the rows jointly and avoid similar ones; the
    others score each row separately.

    A point (MAP) has no epistemic uncertainty: only "entropy" and "random" are defined for it.

    Args:
        posterior: what predicts y.
        pool: inputs (B, ...) without y, or a tuple of several.
        n: how many rows to select.
        score: "bald" (default), "batchbald", "epig", "lcmd", "determinant", "variance", "entropy"
            or "random".
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws.
        targets: inputs (M, ...) that are to be predicted, for "epig"; None (the default) for the
            pool, of which at most 500 random rows are used.

    Returns:
        The indices and scores of n rows, the best first.

    Raises:
        ValueError: if the pool has fewer than n rows, or the score is not defined for the
            posterior or its likelihood.

    Example:
        >>> acquired = bayou.acquire(posterior, pool, 10, score="batchbald")
        >>> pool[acquired.indices]  # rows to label

    References:
        Houlsby, Huszár, Ghahramani, Lengyel: Bayesian active learning for classification and
        preference learning, 2011 (BALD). Kirsch, van Amersfoort, Gal: BatchBALD, NeurIPS 2019.
        Bickford Smith et al.: Prediction-oriented Bayesian active learning, AISTATS 2023 (EPIG).
        Holzmüller et al.: A framework and benchmark for deep batch active learning for regression,
        JMLR 2023 (LCMD).
    """
    if score not in SCORES:
        raise ValueError(f"score must be one of {', '.join(SCORES)}, got {score!r}")
    check_count(n, "n", 1)
    inputs = forward_inputs(pool)
    rows = 0
    if inputs and isinstance(inputs[0], Tensor) and inputs[0].ndim:
        rows = len(inputs[0])
    if rows < n:
        raise ValueError(f"the pool has {rows:,} rows, but n = {n:,}; request fewer")
    if targets is not None and score != "epig":
        raise ValueError(f"targets are for score='epig', got score={score!r}")
    seed = rng.integer(seed)
    if score == "random":
        return Acquired(rng.permutation(rows, seed)[:n], torch.zeros(n))
    if score != "entropy" and (posterior.draws == 1 or samples == 1):
        raise ValueError(
            f"{score!r} needs several networks, and this posterior has one; use score='entropy', "
            "or a method with several, such as Ensemble(5)"
        )
    if score in JOINT_SCORES:  # of functions at several rows, which a closed form does not have
        samples = samples or min(DEFAULT_SAMPLES, posterior.draws or DEFAULT_SAMPLES)
    predictive = posterior.predict(pool, samples, seed=seed)
    if score == "batchbald":
        return batch_bald(predictive, n, rng.fold(seed, "configurations"))
    if score == "determinant":
        return Acquired(*select_by_determinant(predictive, n))
    if score == "lcmd":
        return Acquired(*select_by_clusters(predictive, n))
    if score == "epig":
        if targets is None:
            subset = rng.permutation(rows, rng.fold(seed, "targets"))[:MAX_TARGETS]
            outputs = predictive.outputs[:, subset.to(predictive.outputs.device)]
            target_predictive = Predictive(predictive.likelihood, outputs)
        else:
            target_predictive = posterior.predict(targets, samples, seed=seed)
        scores = epig(predictive, target_predictive)
    else:
        scores = ROW_SCORES[score](predictive)
    best = scores.sort(descending=True, stable=True)
    return Acquired(best.indices[:n], best.values[:n])


def batch_bald(p: Predictive, n: int, seed: rng.Seed, limit: int = MAX_OUTCOMES) -> Acquired:
    """Select rows one after the other, with the largest I[y_b; w | y_1 .. y_b−1].

    I[y_b; w | y_1 ..] = H[y_b | y_1 .. y_b−1] − E_s H[y_b | f_s]; the sum of these is
    I[y_1 .. y_n; w]. An outcome c of the earlier rows has a probability π_c and gives each draw the
    weight q_cs ∝ Π_i p(y_i | f_s); H[y | y_1 ..] = Σ_c π_c·H[Σ_s q_cs·p(y | f_s)]. Of more than
    ``limit`` outcomes as many are drawn, by systematic sampling from π.

    Args:
        p: the predictions of the pool, one class in each row.
        n: how many rows to select.
        seed: of the drawn outcomes.
        limit: the largest number of joint outcomes.
    """
    if not isinstance(p.likelihood, FiniteLikelihood):
        raise ValueError(
            f"batchbald is for classes, and y has {type(p.likelihood).__name__}; "
            "use 'bald' or 'variance'"
        )
    pmf = p.likelihood.log_pmf(p.outputs.double()).exp()  # (S, B, K)
    if pmf.ndim != 3:
        raise ValueError(
            "batchbald is for one class in each row, got outputs "
            f"{tuple(p.outputs.shape)}; use 'bald'"
        )
    samples, _, classes = pmf.shape
    noise_entropy = entr(pmf).sum(-1).mean(0)  # (B,)
    outcome_weights = pmf.new_ones(1)  # π: (C,)
    draw_weights = pmf.new_full((1, samples), 1 / samples)  # q: (C, S)
    indices: list[int] = []
    gains: list[float] = []
    for step in range(n):
        gain = _joint_entropy(pmf, outcome_weights, draw_weights) - noise_entropy
        gain[indices] = -math.inf
        best = int(gain.argmax())
        indices.append(best)
        gains.append(max(0.0, float(gain[best])))
        joint = outcome_weights.unsqueeze(1) * (draw_weights @ pmf[:, best])
        outcomes = joint.flatten()  # (C·K,)
        if len(outcomes) > limit:
            kept = _sample_systematically(outcomes, limit, rng.fold(seed, step))
            outcome_weights = pmf.new_full((limit,), 1 / limit)
        else:
            kept = outcomes.nonzero().flatten()
            outcome_weights = outcomes[kept]
        draw_weights = draw_weights[kept // classes] * pmf[:, best, kept % classes].T
        draw_weights = draw_weights / draw_weights.sum(1, keepdim=True)
    return Acquired(torch.tensor(indices, device=pmf.device), pmf.new_tensor(gains))


def _joint_entropy(pmf: Tensor, outcome_weights: Tensor, draw_weights: Tensor) -> Tensor:
    """Compute H[y | outcomes of the earlier rows] of each row, in chunks of rows: (B,)."""
    classes = pmf.shape[2]
    chunk_rows = max(1, MAX_CHUNK_NUMBERS // (len(outcome_weights) * classes))
    entropies = []
    for chunk in pmf.split(chunk_rows, 1):
        mixture = torch.einsum("cs,sbk->bck", draw_weights, chunk)
        entropies.append(entr(mixture).sum(-1) @ outcome_weights)
    return torch.cat(entropies)


def _sample_systematically(weights: Tensor, count: int, seed: rng.Seed) -> Tensor:
    """Draw ``count`` indices by systematic sampling from the weights (Kitagawa 1996)."""
    ends = weights.cumsum(0)
    offsets = torch.arange(count, device=weights.device) + rng.uniform(1, (), weights, seed)
    positions = offsets / count * ends[-1]
    last_index = int(weights.nonzero().max())
    return torch.searchsorted(ends, positions, right=True).clamp_max(last_index)

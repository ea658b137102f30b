"""Scores of rows to label that look at several rows jointly, by the functions of a prediction.

Each takes predictions of the rows by S functions and returns the numbers of the selected rows and
their scores.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bayou.likelihoods import FiniteLikelihood, entr
from bayou.likelihoods.predictive import Predictive

MAX_CHUNK_NUMBERS = 2**24  # numbers held at a time

Selection = tuple[Tensor, Tensor]  # numbers of n rows, the best first, and their scores


def epig(pool: Predictive, targets: Predictive) -> Tensor:
    """Compute the mean over the targets x* of I[y; y*], of every row of the pool: (B,).

    I[y; y*] = H[y] + H[y*] − H[y, y*] is what the label of a row says about that of x*. Both are
    predicted by the same functions, p(y, y* | x, x*) = 1/S Σ_s p(y | f_s(x))·p(y* | f_s(x*)). For
    classes it is exact; for numbers −½·log(1 − ρ²), where ρ is the correlation of y and y*: exact
    if these are jointly Gaussian, as for functions that are linear in Gaussian weights with
    Gaussian noise. Of several numbers in a row it is the sum over them.

    Args:
        pool: predictions of B rows by S functions.
        targets: predictions of M rows by the same functions.

    References:
        Bickford Smith, Kirsch, Farquhar, Gal, Foster, Rainforth: Prediction-oriented Bayesian
        active learning, AISTATS 2023.
    """
    if pool.likelihood.support == "classes":
        return _epig_of_classes(_class_probabilities(pool), _class_probabilities(targets))
    pool_functions, pool_noise = _functions(pool, "epig")
    target_functions, target_noise = _functions(targets, "epig")
    score = torch.zeros_like(pool_noise[:, 0])
    for k in range(pool_functions.shape[-1]):
        row = pool_functions[..., k]
        total = row.square().sum(0) + pool_noise[:, k]
        target = target_functions[..., k]
        target_total = target.square().sum(0) + target_noise[:, k]
        informations = []
        chunk_rows = max(1, MAX_CHUNK_NUMBERS // max(1, target.shape[1]))
        for block, block_total in zip(
            row.split(chunk_rows, 1), total.split(chunk_rows), strict=True
        ):
            variances = block_total.unsqueeze(1) * target_total
            share = (block.T @ target).square() / variances.clamp_min(_tiny(variances))
            # A row is its own target: without noise its label would be known exactly.
            share = share.clamp_max(1 - torch.finfo(share.dtype).eps)
            informations.append((-0.5 * torch.log1p(-share)).mean(1))
        score = score + torch.cat(informations)
    return score


def _epig_of_classes(pmf: Tensor, target_pmf: Tensor) -> Tensor:
    """Compute the mean of I[y; y*] by all pairs of classes, of (S, B, K) and (S, M, K)."""
    samples, targets, classes = target_pmf.shape
    target_entropy = entr(target_pmf.mean(0)).sum(-1).mean()
    flat_targets = target_pmf.reshape(samples, -1)
    scores = []
    for block in pmf.split(max(1, MAX_CHUNK_NUMBERS // (targets * classes**2)), 1):
        joint = block.reshape(samples, -1).T @ flat_targets / samples  # (b·K, M·K)
        joint_entropy = entr(joint).reshape(block.shape[1], classes, targets, classes)
        entropy = entr(block.mean(0)).sum(-1)
        scores.append(entropy + target_entropy - joint_entropy.sum((1, 3)).mean(1))
    return torch.cat(scores).clamp_min(0.0)


def select_by_determinant(pool: Predictive, n: int) -> Selection:
    """Select rows one after the other with the largest information about the functions.

    With the covariances V of the functions at a row given the labels of the earlier rows, and the
    variances Σ of its noise, the score is ½·log det(I + Σ^−½·V·Σ^−½): the information of its label
    in nats, for Gaussian functions and noise. The sum of the scores is ½·log det(I + Σ^−½·K·Σ^−½)
    of all selected rows, with their joint covariances K. For one number in each row and equal noise
    the next row is that of the largest conditional variance, found by a pivoted Cholesky
    factorization of K + Σ.

    Args:
        pool: predictions of B rows by S functions.
        n: how many rows to select.

    References:
        Seo, Wallat, Graepel, Obermayer: Gaussian process regression: active data selection and
        test point rejection, IJCNN 2000.
    """
    functions, noise = _functions(pool, "determinant")
    if not bool((noise > 0).all()):
        raise ValueError(
            "determinant compares the variance of the functions with the noise, which is 0 here; "
            "use 'lcmd' or 'variance'"
        )
    # Unit noise: y = φᵀα + ε with α ~ N(0, I_S), whose covariance given labels is I − U·Uᵀ.
    features = (functions / noise.sqrt()).permute(1, 2, 0)  # (B, D, S)
    outputs = features.shape[1]
    eye = torch.eye(outputs, dtype=features.dtype, device=features.device)
    is_selected = torch.zeros(len(features), dtype=torch.bool, device=features.device)
    covariances = features @ features.mT  # (B, D, D), given the labels so far
    directions = features.new_zeros(features.shape[-1], 0)  # U
    indices: list[int] = []
    scores: list[float] = []
    for _ in range(n):
        gains = 0.5 * torch.linalg.slogdet(eye + covariances).logabsdet
        gains = gains.masked_fill(is_selected, -math.inf)
        best = int(gains.argmax())
        indices.append(best)
        scores.append(max(0.0, float(gains[best])))
        is_selected[best] = True
        remaining = features[best] - (features[best] @ directions) @ directions.T  # (D, S)
        root = torch.linalg.cholesky(eye + covariances[best])
        new_directions = torch.linalg.solve_triangular(root, remaining, upper=False).T  # (S, D)
        explained = features @ new_directions  # (B, D, D)
        covariances = covariances - explained @ explained.mT
        directions = torch.cat((directions, new_directions), 1)
    return torch.tensor(indices, device=features.device), functions.new_tensor(scores)


def select_by_clusters(pool: Predictive, n: int) -> Selection:
    """Select rows by the largest cluster's maximum distance (LCMD).

    A row is the point φ(x) = (f_s(x) − mean_s f_s(x))/√S, so that the squared distance of two rows
    is the posterior variance of the difference of their functions. The training rows, at which
    this variance is small, are one center at 0; each selected row becomes a center. The next row is
    the farthest from its center in the cluster with the largest sum of squared distances. Its score
    is the squared distance, in the squared units of y.

    Args:
        pool: predictions of B rows by S functions.
        n: how many rows to select.

    References:
        Holzmüller, Zaverkin, Kästner, Steinwart: A framework and benchmark for deep batch active
        learning for regression, JMLR 2023.
    """
    functions, _ = _functions(pool, "lcmd")
    points = functions.permute(1, 0, 2).flatten(1)  # (B, S·D)
    distance = points.square().sum(1)  # from the center of each row's cluster
    cluster = torch.zeros(len(points), dtype=torch.long, device=points.device)
    is_selected = torch.zeros_like(cluster, dtype=torch.bool)
    indices: list[int] = []
    scores: list[float] = []
    for step in range(n):
        sizes = distance.new_zeros(step + 1).index_add(0, cluster, distance)
        has_rows = torch.zeros_like(sizes, dtype=torch.bool)
        has_rows[cluster[~is_selected]] = True
        largest = int(sizes.masked_fill(~has_rows, -math.inf).argmax())
        candidates = (cluster == largest) & ~is_selected
        best = int(distance.masked_fill(~candidates, -math.inf).argmax())
        indices.append(best)
        scores.append(float(distance[best]))
        is_selected[best] = True
        new_distance = (points - points[best]).square().sum(1)
        is_nearer = new_distance < distance
        is_nearer[best] = True
        distance = torch.where(is_nearer, new_distance, distance)
        cluster = cluster.masked_fill(is_nearer, step + 1)
    return torch.tensor(indices, device=points.device), distance.new_tensor(scores)


def _functions(predictive: Predictive, score: str) -> tuple[Tensor, Tensor]:
    """Return (f_s − mean_s f_s)/√S, (S, B, D), and the variances of the noise, (B, D)."""
    if predictive.likelihood.support == "classes":
        raise ValueError(
            f"{score} is for numbers, and y has {type(predictive.likelihood).__name__}; use "
            "'batchbald' or 'epig'"
        )
    _check_functions(predictive, score)
    values = predictive.means.double()
    noise = predictive.aleatoric_std.double().square()
    if not bool(noise.isfinite().all()) or not bool(values.isfinite().all()):
        raise ValueError(
            f"{score} needs finite means and variances of y, which "
            f"{type(predictive.likelihood).__name__} does not have here; use 'bald'"
        )
    values = (values - values.mean(0)) / math.sqrt(len(values))
    return values.reshape(*values.shape[:2], -1), noise.reshape(len(noise), -1)


def _class_probabilities(predictive: Predictive) -> Tensor:
    """Return the probabilities of one class in each row by every function: (S, B, K)."""
    likelihood = predictive.likelihood
    if not isinstance(likelihood, FiniteLikelihood):
        raise ValueError(f"{type(likelihood).__name__} has no probabilities of classes")
    pmf = likelihood.log_pmf(predictive.outputs.double()).exp()
    if pmf.ndim != 3:
        raise ValueError(
            f"epig is for one class in each row, got outputs {tuple(predictive.outputs.shape)}; "
            "use 'bald'"
        )
    return pmf


class ClosedFormError(ValueError):
    """A score needs functions at all rows, and predictions are closed forms for single rows."""


def _check_functions(predictive: Predictive, score: str) -> None:
    """Raise a ClosedFormError for a closed form, which has no function in common for all rows."""
    variance = predictive.likelihood.function_variance(predictive.outputs)
    if bool(torch.as_tensor(variance).any()):
        raise ClosedFormError(
            f"{score} needs functions at all rows, and some of these predictions are closed forms "
            "for single rows (of a mixture with such a component, for example); use 'bald' or "
            "'variance'"
        )


def _tiny(x: Tensor) -> float:
    """Return the smallest positive normal number of a dtype."""
    return torch.finfo(x.dtype).tiny

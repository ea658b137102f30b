"""The curvature of −log p(y | f) in the outputs f, which a Gauss-Newton matrix is made of."""

from __future__ import annotations

from typing import Final, Literal

from torch import Tensor

from bayou.core import rng
from bayou.likelihoods import BoundLikelihood, Information, Scores, Weighted, score

CurvatureType = Literal["ggn", "fisher", "sampled"]
CURVATURE_TYPES: Final[tuple[CurvatureType, ...]] = ("ggn", "fisher", "sampled")


def information(
    likelihood: BoundLikelihood,
    f: Tensor,
    y: Tensor,
    kind: CurvatureType = "ggn",
    samples: int = 1,
    seed: rng.Seed = None,
) -> Information:
    """Return H_n for every row, by one of three estimates.

    * ``"ggn"``: the Fisher information of p(y | f) in f, E_y[∇log p·∇log pᵀ] (Martens 2020). For a
      categorical, Bernoulli, Poisson or Gaussian y it *is* the Hessian of −log p(y | f) for all y;
      for Student's t and a heteroscedastic Gaussian it is not: their Hessian is indefinite far from
      the data.
    * ``"fisher"``: ∇log p(y_n | f_n)·(...)ᵀ with the labels of the data, the empirical Fisher.
    * ``"sampled"``: the same with ``samples`` labels drawn from p(y | f), an unbiased estimate of
      the Fisher.

    Coordinates of y that are ignored have H = 0, those with a weight a have a·H.

    Args:
        likelihood: p(y | f).
        f: outputs, (B, *out).
        y: targets of B rows.
        kind: "ggn" (default), "fisher" or "sampled".
        samples: labels drawn for each row, if "sampled"; 1 by default.
        seed: of these labels.
    """
    f = f.detach()
    if kind == "fisher":
        return Scores([score(likelihood.log_prob, f, y)])
    likelihood, weight = likelihood.without_weights(f, y)
    if kind == "ggn":
        h = likelihood.information(f, seed)
    else:
        labels = likelihood.sample(f, samples, rng.fold(seed, "labels"))
        scores = score(likelihood.log_prob, f.expand(samples, *f.shape), labels)
        h = Scores(scores.div_(samples**0.5).unbind())
    return h if weight is None else Weighted(h, weight)

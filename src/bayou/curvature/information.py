"""The curvature of −log p(y | f) in the outputs f that a Gauss-Newton matrix is made of, by the
kind of it.
"""

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
    """H_n for outputs f (B, *out) and targets y.

    * ``"ggn"``: the Fisher information of p(y | f) in f, E_y[∇log p·∇log pᵀ] (Martens 2020). For a
      categorical, Bernoulli, Poisson or Gaussian y it *is* the Hessian of −log p(y | f) for all y;
      for Student's t and a heteroscedastic Gaussian it is not: their Hessian is indefinite far from
      the data.
    * ``"fisher"``: ∇log p(y_n | f_n)·(...)ᵀ with the labels of the data, the empirical Fisher.
    * ``"sampled"``: the same with ``samples`` labels drawn from p(y | f), an unbiased estimate of
      the Fisher.

    Coordinates of y that are ignored have H = 0, those with a weight a have a·H.
    """
    f = f.detach()
    if kind == "fisher":
        return Scores([score(likelihood.log_prob, f, y)])
    likelihood, weight = likelihood.unweighted(f, y)
    if kind == "ggn":
        h = likelihood.information(f, seed)
    else:
        drawn = likelihood.sample(f, samples, rng.fold(seed, "labels"))
        h = Scores(
            score(likelihood.log_prob, f.expand(samples, *f.shape), drawn)
            .div_(samples**0.5)
            .unbind()
        )
    return h if weight is None else Weighted(h, weight)

"""Estimates for samplers: the curvature of the target at the positions of the chains, and their
mixing.
"""

from __future__ import annotations

import math
import warnings
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bayou import rng
from bayou.kernels import Joint
from bayou.metrics.chains import MIN_DRAWS, ess_bulk, rhat
from bayou.network import forward_inputs, rows_of
from bayou.posteriors.empirical import Empirical
from bayou.progress import BayouWarning
from bayou.training.data import Data
from bayou.training.loop import move
from bayou.training.seeds import part_seed

ROWS, FUNCTIONS = (
    1024,
    64,
)  # rows for the estimate of a log joint, and for the comparison of functions
ITERATIONS = 20  # of the power method
MIN_CHAIN_DRAWS = 20  # for a decision whether chains have mixed
RHAT, ESS = 1.1, 50.0


class MixingWarning(BayouWarning):
    """The chains do not agree, have too few independent draws, or are far below where they
    began.
    """


def typical_fall(weights: int) -> float:
    """D + 5·√(D/2) nats: draws of a Gaussian posterior lie D/2 ± √(D/2) nats below the mode, not as
    far as this.
    """
    return weights + 5 * math.sqrt(weights / 2)


class Probe:
    """Some batches of the data, about 1,024 rows, for estimates of log joints and curvatures."""

    def __init__(self, joint: Joint, data: Data, seed: int, like: Tensor) -> None:
        self.joint, self.n, self.seed = joint, data.n, seed
        count = max(1, ROWS * data.batches // data.n)
        batches = islice(data.epoch(part_seed(seed, "probe")), count)
        self.batches = [move(batch, like) for batch in batches]
        self.rows = sum(len(y) for _, y in self.batches)

    def __call__(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """log p(w, D) by these rows, its gradient, and its spread from batch to batch: (C,), (C,
        D), (C,).
        """
        found = [(*self.joint(w, x, y), len(y) / self.rows) for x, y in self.batches]
        value = sum((v * share for v, _, share in found), start=torch.zeros_like(found[0][0]))
        gradient = sum((g * share for _, g, share in found), start=torch.zeros_like(w))
        each = torch.stack([v for v, _, _ in found])
        if len(found) > 1:
            return value, gradient, each.std(0)
        return value, gradient, torch.full_like(value, 0.0 if self.rows == self.n else math.inf)

    def curvature(self, w: Tensor, first: int, metric: Tensor | None = None) -> Tensor:
        """The largest |eigenvalue| λ of G^½·∇²log p(w, D)·G^½ at w (C, D), G = ``metric`` (C, D) or
        I: (C,).

        Power iterations on the change of the gradient over one standard deviation of the posterior,
        Hv ≈ (∇log p(w + εv) − ∇log p(w − εv))/2ε with ε = λ^−½. ``first``: the number of the first
        chain.
        """
        root = torch.ones_like(w) if metric is None else metric.sqrt()
        v = rng.normal(len(w), w.shape[1:], w, part_seed(self.seed, "curvature"), first)
        v = v / v.norm(dim=-1, keepdim=True)
        reach = 0.01 / (root * v).norm(dim=-1, keepdim=True)
        size = torch.zeros_like(reach)
        for _ in range(ITERATIONS):
            shift = reach * root * v
            ahead, behind = self(torch.cat((w + shift, w - shift)))[1].chunk(2)
            change = root * (ahead - behind) / (2 * reach)
            size = change.norm(dim=-1, keepdim=True)
            v, reach = change / size, size.rsqrt()
        return size.squeeze(-1)

    @torch.no_grad()
    def mixing(self, draws: Tensor, start: Tensor, temperature: float) -> dict[str, Any]:
        """How well chains mixed whose draws are (C, K, D), and how they compare with their start
        (D,).

        R-hat and bulk ESS over the functions E[y | x, w] at up to 64 rows and the log joint: the
        worst and the median. If a noise is sampled there is no comparison with the start: a joint
        mode of weights and noise is unbounded.
        """
        chains, count, weights = draws.shape
        x, _ = self.batches[0]
        inputs = rows_of(forward_inputs(x), slice(FUNCTIONS))
        log_joints, functions = [], []
        for w in draws.unbind(1):  # (C, D)
            log_joints.append(self(w)[0])
            functions.append(self.joint.means(w, inputs).flatten(1))
        values = torch.stack(functions, 1)  # (C, K, F)
        values = values[..., :: max(1, values.shape[-1] // 512)]
        values = torch.cat((torch.stack(log_joints, 1).unsqueeze(-1), values), -1)
        fall = float(self(start.unsqueeze(0))[0]) - float(values[..., 0].mean())
        found = {
            "draws": count,
            "chains": chains,
            "enough": count >= MIN_CHAIN_DRAWS,
            "below_start": fall,
        }
        lost = not self.joint.noisy and not fall <= temperature * typical_fall(weights)
        moving = values[..., values.flatten(0, 1).amax(0) > values.flatten(0, 1).amin(0)]
        if count >= MIN_DRAWS and moving.shape[-1] and bool(moving.isfinite().all()):
            worst, size = rhat(moving), ess_bulk(moving)
            found |= {"r_hat": float(worst.max()), "r_hat_median": float(worst.median())}
            found |= {"ess": float(size.min()), "ess_median": float(size.median())}
        if found["enough"]:
            good = found.get("r_hat", math.inf) <= RHAT and found.get("ess", 0.0) >= ESS
            found |= {"lost": lost, "mixed": good and not lost}
        return found


def warn_unless_mixed(name: str, posterior: Empirical) -> None:
    """A ``MixingWarning`` with the reasons and what to do; none if there are too few draws."""
    mixing = posterior.mixing or {}
    if mixing.get("mixed", True):
        return
    found = []
    if mixing.get("r_hat", 0.0) > RHAT:
        found.append(f"R-hat is {mixing['r_hat']:.2f} (over {RHAT})")
    if mixing.get("ess", 0.0) < ESS:
        found.append(f"the effective sample size is {mixing.get('ess', 0.0):.0f} (under {ESS:.0f})")
    if mixing["lost"]:
        found.append(f"the draws lie {mixing['below_start']:,.0f} nats below the start on average")
    warnings.warn(
        f"the chains of {name} have not mixed: {', '.join(found)}. The draws are not a sample of the posterior, and "
        "their spread is not its uncertainty; run longer or use larger batches (see posterior.mixing)",
        MixingWarning,
        stacklevel=4,
    )

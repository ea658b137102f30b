"""Estimates for samplers: the curvature at the positions of chains, and how well chains mix."""

from __future__ import annotations

import math
import warnings
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.progress import BayouWarning
from bayou.kernels import Joint
from bayou.metrics.chains import MIN_DRAWS, ess_bulk, rhat
from bayou.network import forward_inputs, rows_of
from bayou.posteriors.checks import WARNING_RHAT
from bayou.posteriors.empirical import Empirical
from bayou.training.data import Data
from bayou.training.loop import move
from bayou.training.seeds import part_seed

PROBE_ROWS = 1024  # for the estimate of a log joint
COMPARED_ROWS = 64  # whose functions are compared between chains
MAX_COMPARED_VALUES = 512  # of these functions, about
POWER_ITERATIONS = 20
MIN_CHAIN_DRAWS = 20  # for a decision whether chains have mixed
MIN_ESS = 50.0  # of chains that have mixed


class MixingWarning(BayouWarning):
    """Chains do not agree, have few independent draws, or are far below their start."""


def typical_fall(weights: int) -> float:
    """Compute D + 5·√(D/2) nats, beyond which draws do not lie below the mode.

    Draws of a Gaussian posterior lie D/2 ± √(D/2) nats below it.

    Args:
        weights: D, the number of weights.
    """
    return weights + 5 * math.sqrt(weights / 2)


class ChainProbe:
    """Some batches of the data, about 1,024 rows, for estimates of log joints and curvatures.

    Args:
        joint: the log joint density of weights and data.
        data: the rows of a fit.
        seed: of the fit; it selects the batches.
        position: a tensor on the device of the chains.
    """

    def __init__(self, joint: Joint, data: Data, seed: int, position: Tensor) -> None:
        self.joint = joint
        self.n: int = data.n
        self.seed = seed
        count = max(1, PROBE_ROWS * data.batches // data.n)
        batches = islice(data.epoch(part_seed(seed, "probe")), count)
        self.batches: list[tuple[Any, Tensor]] = [move(batch, position) for batch in batches]
        self.rows: int = sum(len(y) for _, y in self.batches)

    def __call__(self, w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Estimate log p(w, D) at positions (C, D).

        Returns:
            The value, (C,), its gradient, (C, D), and its spread from batch to batch, (C,).
        """
        values: list[Tensor] = []
        value = w.new_zeros(len(w))
        gradient = torch.zeros_like(w)
        for x, y in self.batches:
            batch_value, batch_gradient = self.joint(w, x, y)
            share = len(y) / self.rows
            value = value + batch_value * share
            gradient = gradient + batch_gradient * share
            values.append(batch_value)
        if len(values) > 1:
            return value, gradient, torch.stack(values).std(0)
        spread = 0.0 if self.rows == self.n else math.inf
        return value, gradient, torch.full_like(value, spread)

    def curvature(self, w: Tensor, first: int, metric: Tensor | None = None) -> Tensor:
        """Estimate the largest |eigenvalue| λ of G^½·∇²log p(w, D)·G^½.

        Power iterations on the change of the gradient over one standard deviation of the posterior,
        Hv ≈ (∇log p(w + εv) − ∇log p(w − εv))/2ε with ε = λ^−½.

        Args:
            w: the positions of the chains, (C, D).
            first: the number of the first chain.
            metric: the diagonal of G, (C, D); None for I.

        Returns:
            λ of each chain, (C,).
        """
        root = torch.ones_like(w) if metric is None else metric.sqrt()
        direction = rng.normal(len(w), w.shape[1:], w, part_seed(self.seed, "curvature"), first)
        direction = direction / direction.norm(dim=-1, keepdim=True)
        distance = 0.01 / (root * direction).norm(dim=-1, keepdim=True)
        eigenvalue = torch.zeros_like(distance)
        for _ in range(POWER_ITERATIONS):
            shift = distance * root * direction
            ahead, behind = self(torch.cat((w + shift, w - shift)))[1].chunk(2)
            change = root * (ahead - behind) / (2 * distance)
            eigenvalue = change.norm(dim=-1, keepdim=True)
            direction = change / eigenvalue
            distance = eigenvalue.rsqrt()
        return eigenvalue.squeeze(-1)

    @torch.no_grad()
    def mixing(self, draws: Tensor, start: Tensor, temperature: float) -> dict[str, Any]:
        """Compute how well chains mixed, and how they compare with their start.

        R-hat and bulk ESS over the functions E[y | x, w] at up to 64 rows and the log joint: the
        worst and the median. If a noise is sampled there is no comparison with the start: a joint
        mode of weights and noise is unbounded.

        Args:
            draws: of the chains, (C, K, D).
            start: the position at which they began, (D,).
            temperature: of the posterior.

        Returns:
            The entries of ``posterior.mixing``.
        """
        chains, count, weights = draws.shape
        values = self._compared_values(draws)
        fall = float(self(start.unsqueeze(0))[0]) - float(values[..., 0].mean())
        has_enough = count >= MIN_CHAIN_DRAWS
        mixing: dict[str, Any] = {
            "draws": count,
            "chains": chains,
            "enough": has_enough,
            "below_start": fall,
        }
        is_varying = values.flatten(0, 1).amax(0) > values.flatten(0, 1).amin(0)
        varying = values[..., is_varying]
        if count >= MIN_DRAWS and varying.shape[-1] and bool(varying.isfinite().all()):
            r_hat = rhat(varying)
            ess = ess_bulk(varying)
            mixing["r_hat"] = float(r_hat.max())
            mixing["r_hat_median"] = float(r_hat.median())
            mixing["ess"] = float(ess.min())
            mixing["ess_median"] = float(ess.median())
        if has_enough:
            is_lost = not self.joint.noisy and not fall <= temperature * typical_fall(weights)
            has_low_rhat = mixing.get("r_hat", math.inf) <= WARNING_RHAT
            has_high_ess = mixing.get("ess", 0.0) >= MIN_ESS
            mixing["lost"] = is_lost
            mixing["mixed"] = has_low_rhat and has_high_ess and not is_lost
        return mixing

    def _compared_values(self, draws: Tensor) -> Tensor:
        """Compute the numbers that are compared between chains, (C, K, F): the log joint first."""
        x, _ = self.batches[0]
        inputs = rows_of(forward_inputs(x), slice(COMPARED_ROWS))
        log_joints = []
        functions = []
        for w in draws.unbind(1):  # (C, D)
            log_joints.append(self(w)[0])
            functions.append(self.joint.means(w, inputs).flatten(1))
        values = torch.stack(functions, 1)
        values = values[..., :: max(1, values.shape[-1] // MAX_COMPARED_VALUES)]
        return torch.cat((torch.stack(log_joints, 1).unsqueeze(-1), values), -1)


def warn_unless_mixed(name: str, posterior: Empirical) -> None:
    """Warn, with the reasons and a remedy, if chains have not mixed.

    Chains with too few draws for a decision give no warning.

    Args:
        name: of the method.
        posterior: the draws of the chains.
    """
    mixing = posterior.mixing or {}
    if mixing.get("mixed", True):
        return
    reasons = []
    if mixing.get("r_hat", 0.0) > WARNING_RHAT:
        reasons.append(f"R-hat is {mixing['r_hat']:.2f} (over {WARNING_RHAT})")
    if mixing.get("ess", 0.0) < MIN_ESS:
        ess = mixing.get("ess", 0.0)
        reasons.append(f"the effective sample size is {ess:.0f} (under {MIN_ESS:.0f})")
    if mixing["lost"]:
        fall = mixing["below_start"]
        reasons.append(f"the draws lie {fall:,.0f} nats below the start on average")
    warnings.warn(
        f"the chains of {name} have not mixed: {', '.join(reasons)}. The draws are not a sample "
        "of the posterior, and their spread is not its uncertainty; run longer or use larger "
        "batches (see posterior.mixing)",
        MixingWarning,
        stacklevel=4,
    )

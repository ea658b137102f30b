"""Training-free Bayesianization: the variance of a low-rank adapter that held-out rows tolerate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.curvature.covariance import Diagonal
from bayou.inference.method import BatchedMethod, FitArguments, Method
from bayou.inference.start import starting_point
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.posterior import Posterior
from bayou.training.data import Data, Rows
from bayou.training.loop import move
from bayou.training.seeds import part_seed

MAX_LOG_STD = 30.0  # log₂ σ is searched in ±MAX_LOG_STD
LOG_STD_PRECISION = 0.014  # of log₂ σ: 1 % of σ
# of the largest singular value: below it an update of A changes nothing, whatever its scale
MIN_SINGULAR_VALUE = 1e-4


@final
@dataclass(frozen=True)
class TFB(BatchedMethod[Posterior]):
    """Training-free Bayesianization of low-rank adapters: the largest noise that rows tolerate.

        q(B·A) = B·A + σ·U·Z,    Z standard normal,    B = U·diag(d)·Vᵀ

    A network W = W₀ + B·A is the same with B·V for B and Vᵀ·A for A. In these coordinates, which
    the posterior has, q(A_ij) = N(A_ij, (σ/d_i)²), and everything else is a point. σ, the same for
    all adapters, is the largest value (to 1 %, by bisection) whose NLL on anchor rows is worse than
    that of the point by a fraction ``tolerance`` at most.

    Args:
        start: the method that trains the adapters, ``MAP()`` by default; None: the network as it
            is.
        names: what the names of A, (r, in, ...), and of B, (out, r, ...), contain, as in peft;
            ("lora_A", "lora_B") by default.
        tolerance: the relative increase of the NLL; 0.003 by default.
        samples: draws whose average predicts the anchor rows, 10 by default; they are the same for
            every σ.
        validation: the fraction of rows that ``start`` does not see, the anchor rows (all without
            it, or of a loader); 0.2 by default.
        batch_size: rows in one pass; 128 by default.

    Returns:
        ``fit`` returns a ``GaussianPosterior`` with a diagonal covariance of the tensors A.

    Raises:
        ValueError: for a network without trained adapters, and anchor rows of another task.

    Paper: Shi et al. 2024, https://arxiv.org/abs/2412.05723.
    """

    start: Method | None = field(default_factory=MAP)
    names: tuple[str, str] = ("lora_A", "lora_B")
    tolerance: float = 0.003
    samples: int = 10
    validation: float = 0.2
    batch_size: int = 128

    def __post_init__(self) -> None:
        self._check_start()
        self._check_positive("tolerance")
        self._check_whole("samples", "batch_size")
        self._check_interval("(0, 1)", "validation")

    def _fit(self, arguments: FitArguments) -> Posterior:
        """Train the adapters, if ``start`` is given, and find σ."""
        target = arguments.target
        seed = arguments.seed
        pairs = self._pairs(target)
        rows = arguments.data
        anchors = rows
        if self.start is not None and isinstance(rows, Rows):
            rows, anchors = rows.split(self.validation, part_seed(seed, "validation"))
        point = starting_point(
            self.start,
            target,
            rows,
            seed=seed,
            checkpoint=arguments.checkpoint,
            progress=arguments.progress,
        )
        if point.stopped == "interrupted":
            return point
        params = {name: point.stack[name][0] for name in point.network.names}
        family = RotatedAdapters(point, *rotate(params, pairs))
        posterior, record = self._widen(family, anchors, part_seed(seed, "draws"))
        last_steps = [0.0, *(old["step"] + 1 for old in point.history)]
        posterior.history = [*point.history, {"step": max(last_steps), **record}]
        posterior.stopped = point.stopped or "finished"
        return posterior

    def _widen(
        self, family: RotatedAdapters, anchors: Data, seed: int
    ) -> tuple[GaussianPosterior, dict[str, float]]:
        """Return the posterior of the largest σ that is tolerated, and its numbers."""
        point_nll = self._nll(family.point, family.like, anchors, seed)
        max_nll = point_nll + self.tolerance * abs(point_nll)
        low = -MAX_LOG_STD
        high = MAX_LOG_STD
        while high - low > LOG_STD_PRECISION:
            middle = (low + high) / 2
            nll = self._nll(family.posterior(2**middle), family.like, anchors, seed)
            if nll <= max_nll:
                low = middle
            else:
                high = middle
        if -low == MAX_LOG_STD or high == MAX_LOG_STD:
            reason = "random adapters are as good on"
            if high < MAX_LOG_STD:
                reason = "no σ is small enough for"
            raise ValueError(
                f"{reason} the anchor rows of TFB; "
                "give rows of the task that the adapter was trained for"
            )
        posterior = family.posterior(2**low)
        return posterior, {
            "std": 2**low,
            "anchor_nll": self._nll(posterior, family.like, anchors, seed) / anchors.n,
            "point_nll": point_nll / anchors.n,
        }

    def _nll(self, posterior: Posterior, like: Tensor, anchors: Data, seed: int) -> float:
        """Return the negative log-likelihood of the anchor rows."""
        samples = posterior.draws or self.samples
        log_likelihoods = []
        for batch in anchors.epoch():
            x, y = move(batch, like)
            log_prob = posterior.predict(x, samples, seed=seed).log_prob(y)
            log_likelihoods.append(float(log_prob.sum()))
        return -sum(log_likelihoods)

    def _pairs(self, target: Target) -> list[tuple[str, str]]:
        """Return the names of A and B of every adapter."""
        first, second = self.names
        pairs = [(name, name.replace(first, second)) for name in target.free if first in name]
        if not pairs or any(b not in target.free for _, b in pairs):
            raise ValueError(
                f"TFB needs pairs of free tensors, {first!r} and {second!r} of adapters, "
                f"got {', '.join(target.free)[:200]}; "
                "give names=(that of A, that of B), or use Laplace()"
            )
        return pairs


@dataclass(frozen=True)
class RotatedAdapters:
    """The posteriors of trained adapters as a function of σ.

    Args:
        point: the trained network.
        center: its tensors, with rotated adapters.
        inverse_scale: 1/d_i in the shape of every A.
    """

    point: Empirical
    center: Params
    inverse_scale: Params

    @property
    def like(self) -> Tensor:
        """Return a tensor of the network."""
        return next(iter(self.center.values()))

    def posterior(self, std: float) -> GaussianPosterior:
        """Return the posterior with standard deviations σ/d_i.

        Args:
            std: σ.
        """
        shapes = {name: value.shape for name, value in self.inverse_scale.items()}
        stds = {name: std * value for name, value in self.inverse_scale.items()}
        covariance = Diagonal(shapes, stds)
        return GaussianPosterior(self.point.target, self.point.network, self.center, covariance)


def rotate(params: Params, pairs: list[tuple[str, str]]) -> tuple[Params, Params]:
    """Return the tensors with Vᵀ·A for A and B·V for B, and 1/d_i in the shape of every A.

    Args:
        params: of a network with adapters.
        pairs: the names of A and B.
    """
    params = dict(params)
    inverse_scale = {}
    for first, second in pairs:
        a = params[first]
        b = params[second]
        columns = b.flatten(1).double().cpu()
        squares, v = torch.linalg.eigh(columns.mT @ columns)  # d² and V
        # a sign that is the same on every machine
        v = v * v.gather(0, v.abs().argmax(0, keepdim=True)).sign()
        d = squares.clamp_min(MIN_SINGULAR_VALUE**2 * squares.max()).sqrt()
        if not bool(d.all()):
            raise ValueError(
                f"{second!r} is zero, as before training; train the adapter: TFB(start=MAP())"
            )
        params[first] = (v.mT @ a.flatten(1).double().cpu()).to(a).view_as(a)
        params[second] = (columns @ v).to(b).view_as(b)
        inverse_scale[first] = (1 / d).to(a).view(-1, *[1] * (a.ndim - 1)).expand_as(a)
    return params, inverse_scale

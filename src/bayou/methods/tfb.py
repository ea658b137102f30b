"""Training-free Bayesianization: the variance of a low-rank adapter that held-out rows tolerate."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import torch

from bayou.curvature.covariance import Diagonal
from bayou.files import StrPath
from bayou.inference.method import Method
from bayou.inference.start import starting_point
from bayou.methods.point import MAP
from bayou.params import Params
from bayou.posteriors.gaussian import GaussianPosterior
from bayou.posteriors.posterior import Posterior
from bayou.progress import Show
from bayou.target import Target
from bayou.training.data import Rows, as_data
from bayou.training.loop import move
from bayou.training.seeds import as_int_seed, part_seed

LIMIT = 30.0  # log₂ σ is searched in ±LIMIT
FLOOR = 1e-4  # of the largest singular value: below it an update of A changes nothing, whatever its scale


@final
@dataclass(frozen=True)
class TFB(Method):
    """q(B·A) = B·A + σ·U·Z, Z standard normal, of trained adapters with B = U·diag(d)·Vᵀ (Shi et
    al. 2024).

    A network W = W₀ + B·A is the same with B·V for B and Vᵀ·A for A. In these coordinates, which
    the posterior has, q(A_ij) = N(A_ij, (σ/d_i)²), and everything else is a point. σ, the same for
    all adapters, is the largest value (to 1 %, by bisection) whose NLL on anchor rows is worse than
    that of the point by a fraction ``tolerance`` at most.

    Args:
        start: the method that trains the adapters; None: the network as given.
        names: what the names of A, (r, in, ...), and of B, (out, r, ...), contain, as in peft.
        tolerance: the relative increase of the NLL.
        samples: draws whose average predicts the anchor rows; they are the same for every σ.
        validation: the fraction of rows that ``start`` does not see, the anchor rows (all without
            it, or of a loader).
        batch_size: rows in one pass.
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
        self._check(("validation",), lambda value: 0 < value < 1, "between 0 and 1")

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Train the adapters, if ``start`` is given, and find σ."""
        seed, pairs = as_int_seed(seed), self._pairs(target)
        rows, held = as_data(data, self.batch_size), None
        if self.start is not None and isinstance(rows, Rows):
            rows, held = rows.split(self.validation, part_seed(seed, "validation"))
        point = starting_point(
            self.start, target, rows, seed=seed, checkpoint=checkpoint, progress=progress
        )
        if point.stopped == "interrupted":
            return point
        center, unit = rotated({name: point.stack[name][0] for name in point.network.names}, pairs)
        anchors, like = held or rows, next(iter(center.values()))

        def at(std: float) -> GaussianPosterior:
            covariance = Diagonal(
                {n: v.shape for n, v in unit.items()}, {n: std * v for n, v in unit.items()}
            )
            return GaussianPosterior(point.target, point.network, center, covariance)

        def nll(posterior: Posterior) -> float:
            samples, draws = posterior.draws or self.samples, part_seed(seed, "draws")
            each = (move(batch, like) for batch in anchors.ordered())
            return -sum(
                float(posterior.predict(x, samples, seed=draws).log_prob(y).sum()) for x, y in each
            )

        before, low, high = nll(point), -LIMIT, LIMIT
        while high - low > 0.014:  # σ to 1 %
            middle = (low + high) / 2
            allowed = nll(at(2**middle)) <= before + self.tolerance * abs(before)
            low, high = (middle, high) if allowed else (low, middle)
        if -low == LIMIT or high == LIMIT:
            why = "no σ is small enough for" if high < LIMIT else "random adapters are as good on"
            raise ValueError(
                f"{why} the anchor rows of TFB; give rows of the task that the adapter was trained for"
            )
        posterior = at(2**low)
        found = {
            "std": 2**low,
            "anchor_nll": nll(posterior) / anchors.n,
            "point_nll": before / anchors.n,
        }
        posterior.history = [
            *point.history,
            {"step": max([0.0, *(r["step"] + 1 for r in point.history)]), **found},
        ]
        posterior.stopped = point.stopped or "finished"
        return posterior

    def _pairs(self, target: Target) -> list[tuple[str, str]]:
        """The names of A and B of every adapter."""
        first, second = self.names
        pairs = [(name, name.replace(first, second)) for name in target.free if first in name]
        if not pairs or any(b not in target.free for _, b in pairs):
            got = f"got {', '.join(target.free)[:200]}; give names=(that of A, that of B), or use Laplace()"
            raise ValueError(
                f"TFB needs pairs of free tensors, {first!r} and {second!r} of adapters, {got}"
            )
        return pairs


def rotated(params: Params, pairs: list[tuple[str, str]]) -> tuple[Params, Params]:
    """The tensors with Vᵀ·A for A and B·V for B, and 1/d_i in the shape of every A."""
    params, unit = dict(params), {}
    for first, second in pairs:
        a, b = params[first], params[second]
        columns = b.flatten(1).double().cpu()
        squares, v = torch.linalg.eigh(columns.mT @ columns)  # d² and V
        v = (
            v * v.gather(0, v.abs().argmax(0, keepdim=True)).sign()
        )  # a sign that is the same on every machine
        d = squares.clamp_min(FLOOR**2 * squares.max()).sqrt()
        if not bool(d.all()):
            raise ValueError(
                f"{second!r} is zero, as before training; train the adapter: TFB(start=MAP())"
            )
        params[first] = (v.mT @ a.flatten(1).double().cpu()).to(a).view_as(a)
        params[second] = (columns @ v).to(b).view_as(b)
        unit[first] = (1 / d).to(a).view(-1, *[1] * (a.ndim - 1)).expand_as(a)
    return params, unit

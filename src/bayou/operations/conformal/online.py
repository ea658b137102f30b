"""Adaptive conformal prediction online: the level follows the errors, for any sequence of rows."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.files import making, read_file, write_file
from bayou.core.params import under
from bayou.likelihoods.predictive import Predictive
from bayou.operations.conformal.prediction import check_coverage
from bayou.operations.conformal.quantiles import ROUNDING
from bayou.operations.conformal.scores import (
    SETS,
    Score,
    ScoreName,
    check_has_classes,
    check_has_order,
    choose_score,
)

ADAPTATION_ROWS = 100  # the length of the stretches in which the aggregate competes with each
STATE = ("scores", "alphas", "log_weights", "error_counts")


@final
class OnlineConformal:
    """Intervals or sets for rows in the order of time, whose level follows the errors.

    The interval of row t is {y: s(x_t, y) ≤ quantile of the last scores at 1 − α_t}. Afterwards

        α_{t+1} = α_t + γ·(α − err_t),  α = 1 − level,  err_t = 1 if y_t was outside,

    so that errors widen the next intervals (Gibbs & Candès 2021). For any sequence of T rows, with
    any drift, |mean err − α| ≤ (max(α_1, 1 − α_1) + γ)/(γ·T). This needs no exchangeability, and
    says nothing about a single row. With α_t ≤ 0 the interval is infinite, with α_t ≥ 1 a point
    (a set: empty), which counts as an error. A call for B rows uses one α_t for all; γ in the
    numerator is then B·γ.

    With γ = 0 the quantile of the last ``window`` scores remains: the intervals of EnbPI (Xu & Xie
    2021), right if scores change slowly. Several γ are run side by side and α_t is their mean with
    weights w_i ∝ exp(−η·Σ pinball loss), which are mixed with equal ones (DtACI, Gibbs & Candès
    2024); the bound then holds for each γ, and in the long run for the mean.

    With several coordinates of y each has its own α_t.

    Args:
        level: the fraction of rows to cover, strictly between 0 and 1.
        step_size: γ ≥ 0, or several: ``OnlineConformal.STEP_SIZES``. Default: 0.05.
        window: how many of the last scores the quantile is of. Default: 500.
        score: as in ``conformal``: by default "cqr" for numbers and counts, "lac" for classes.
        randomized: whether "aps" uses a random fraction of the probability of y itself.
        seed: of these fractions.

    Raises:
        ValueError: for a level, step size or window out of range.

    Example:
        >>> online = bayou.operations.OnlineConformal(level=0.9)
        >>> online.calibrate(posterior.predict(x_held), y_held)
        >>> for x, y in stream:
        ...     lower, upper = online.interval(posterior.predict(x))
        ...     online.observe(y)
        >>> online.save("online.bayou")

    References:
        Gibbs, Candès: Adaptive conformal inference under distribution shift, NeurIPS 2021. Gibbs,
        Candès: Conformal inference for online prediction with arbitrary distribution shifts, JMLR
        2024. Xu, Xie: Conformal prediction interval for dynamic time-series, ICML 2021.
    """

    STEP_SIZES = (0.005, 0.01, 0.02, 0.04, 0.08, 0.16)

    def __init__(
        self,
        level: float = 0.9,
        *,
        step_size: float | Sequence[float] = 0.05,
        window: int = 500,
        score: ScoreName | None = None,
        randomized: bool = True,
        seed: int = 0,
    ) -> None:
        check_coverage(level)
        step_sizes = (step_size,) if isinstance(step_size, int | float) else tuple(step_size)
        if not step_sizes or not all(0 <= size < math.inf for size in step_sizes):
            raise ValueError(f"step_size must be a number ≥ 0, or several, got {step_size!r}")
        if isinstance(window, bool) or not isinstance(window, int) or window < 1:
            raise ValueError(f"window must be a number of rows of 1 or more, got {window!r}")
        self.level = float(level)
        self.step_sizes = tuple(map(float, step_sizes))
        self.window = window
        self.score = score
        self.randomized = randomized
        self.seed = rng.integer(seed)
        self.rows = 0  # observed
        self._state: dict[str, Tensor] = {}
        self._pending: dict[str, Tensor] = {}

    @property
    def alpha(self) -> Tensor:
        """The current α_t of each coordinate of y, (*event,)."""
        alphas = self._require_state()["alphas"]
        return (self._weights() * alphas).sum(0)

    @property
    def coverage(self) -> Tensor:
        """The fraction of observed rows that were covered, of each coordinate of y: (*event,)."""
        if not self.rows:
            raise ValueError("no rows were observed yet; call observe(y) after interval or set")
        return 1 - self._require_state()["error_counts"] / self.rows

    @torch.no_grad()
    def calibrate(self, p: Predictive, y: Tensor) -> None:
        """Add the scores of labeled rows to the window; α_t stays as it is.

        Args:
            p: predictions of rows that are not training rows, in the order of time.
            y: their targets, (B, *event).
        """
        p.likelihood.validate(p.outputs.shape[1:], y)
        rule = self._start(p)
        seed = rng.fold(self.seed, "calibration")
        self._append(rule.of(p, y.to(p.outputs.device), seed).cpu())

    @torch.no_grad()
    def interval(self, p: Predictive) -> tuple[Tensor, Tensor]:
        """Return the interval of the next rows; call ``observe`` with their y afterwards.

        Args:
            p: predictions of the next rows, usually of one.

        Returns:
            Lower and upper end, (B, *event) each.

        Raises:
            ValueError: if y are classes.
        """
        rule = self._start(p)
        check_has_order(rule.kind)
        low, high, unit = (end.cpu() for end in rule.ends(p))
        thresholds = self._thresholds()
        self._pending = {"low": low, "high": high, "unit": unit, "thresholds": thresholds}
        return rule.interval(p, thresholds[0].to(p.outputs.device).expand(low.shape))

    @torch.no_grad()
    def set(self, p: Predictive) -> Tensor:
        """Return the set of classes of the next rows; call ``observe`` with their y afterwards.

        Args:
            p: predictions of the next rows, usually of one.

        Returns:
            A mask, (B, *event, K).

        Raises:
            ValueError: if y are numbers.
        """
        rule = self._start(p)
        check_has_classes(rule.kind)
        scores = rule.of_classes(p, rng.fold(self.seed, "new rows", self.rows))
        thresholds = self._thresholds()
        self._pending = {"class_scores": scores.cpu(), "thresholds": thresholds}
        return scores <= thresholds[0].unsqueeze(-1).to(scores.device)

    @torch.no_grad()
    def observe(self, y: Tensor) -> Tensor:
        """Compare y with the last interval or set, and adapt α_t.

        Args:
            y: targets of the rows of the last call of ``interval`` or ``set``, (B, *event).

        Returns:
            Which were covered, (B, *event).

        Raises:
            ValueError: if there was no such call, or y has another shape or invalid values.
        """
        if not self._pending:
            raise ValueError("call interval(p) or set(p) for the rows before observe(y)")
        scores = self._observed_scores(torch.as_tensor(y).cpu())  # (B, *event)
        thresholds = self._pending["thresholds"]  # (1 + M, *event), the aggregate first
        window = self._state["scores"]
        below = (window.unsqueeze(0) < scores.unsqueeze(1)).sum(1)
        largest_alpha = 1 - below / (len(window) + 1)  # at which y is covered, below this α
        for row_scores, row_largest in zip(scores, largest_alpha.double(), strict=True):
            self._adapt(row_scores, row_largest, thresholds)
        self._append(scores)
        self.rows += len(scores)
        self._pending = {}
        return scores <= thresholds[0]

    def save(self, path: str | os.PathLike[str]) -> None:
        """Save settings and state to one file: atomic, checksummed, without code.

        A loaded object continues bit for bit, also between ``interval`` and ``observe``.

        Args:
            path: the file, for ``OnlineConformal.load``.
        """
        config = {
            "kind": "online conformal",
            "level": self.level,
            "step_size": list(self.step_sizes),
            "window": self.window,
            "score": self.score,
            "randomized": self.randomized,
            "seed": self.seed,
            "rows": self.rows,
        }
        pending = {f"pending.{name}": value for name, value in self._pending.items()}
        write_file(path, self._state | pending, config)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> OnlineConformal:
        """Load a saved file.

        Args:
            path: the file.

        Raises:
            FileError: if the file is damaged or of another type.
        """
        tensors, config = read_file(path, "online conformal")
        with making("online conformal prediction", path):
            names = ("level", "step_size", "window", "score", "randomized", "seed")
            settings: dict[str, Any] = {name: config[name] for name in names}
            online = OnlineConformal(**settings)
            online.rows = config["rows"]
            online._state = {name: tensors[name] for name in STATE if name in tensors}
            online._pending = under("pending.", tensors)
        return online

    def _start(self, p: Predictive) -> Score:
        """Return the score; at the first prediction make the state for its shape."""
        self.score = choose_score(self.score, p)
        event = tuple(p.likelihood.target_shape(p.outputs.shape[1:]))[1:]
        if not self._state:
            experts = len(self.step_sizes)
            self._state = {
                "scores": torch.zeros(0, *event, dtype=torch.float64),
                "alphas": torch.full((experts, *event), 1 - self.level, dtype=torch.float64),
                "log_weights": torch.zeros(experts, *event, dtype=torch.float64),
                "error_counts": torch.zeros(event, dtype=torch.long),
            }
        expected = tuple(self._state["error_counts"].shape)
        if event != expected:
            raise ValueError(f"y of one row had the shape {expected} before, got {event}")
        return Score(self.score, self.level, self.randomized)

    def _require_state(self) -> dict[str, Tensor]:
        """Return the state, or raise a ValueError before the first prediction."""
        if not self._state:
            raise ValueError("there is no state yet; call calibrate, interval or set first")
        return self._state

    def _weights(self) -> Tensor:
        """Return the weights of the step sizes, (M, *event), which sum to 1."""
        return self._state["log_weights"].softmax(0)

    def _append(self, scores: Tensor) -> None:
        """Add scores (B, *event) to the window."""
        self._state["scores"] = torch.cat([self._state["scores"], scores])[-self.window :]

    def _thresholds(self) -> Tensor:
        """Return the threshold at the mean of all α_t, then at each of them: (1 + M, *event)."""
        alphas = torch.cat([self.alpha.unsqueeze(0), self._state["alphas"]])
        scores = self._state["scores"]
        infinity = scores.new_full((1, *scores.shape[1:]), torch.inf)
        ordered = torch.cat([-infinity, scores.sort(0).values, infinity])
        rank = ((len(scores) + 1) * (1 - alphas) - ROUNDING).ceil().long()
        thresholds = ordered.gather(0, rank.clamp(0, len(scores) + 1))
        return torch.where(alphas <= 0, torch.inf, thresholds)

    def _observed_scores(self, y: Tensor) -> Tensor:
        """Return the scores of y under the last predictions, (B, *event)."""
        pending = self._pending
        is_class = self.score in SETS
        shape = pending["class_scores"].shape[:-1] if is_class else pending["low"].shape
        if y.shape != shape:
            raise ValueError(f"y must have the shape {tuple(shape)}, got {tuple(y.shape)}")
        if is_class:
            classes = pending["class_scores"].shape[-1]
            if y.is_floating_point() or not bool(((y >= 0) & (y < classes)).all()):
                raise ValueError(f"y must be classes from 0 to {classes - 1}, as whole numbers")
            return pending["class_scores"].gather(-1, y.long().unsqueeze(-1)).squeeze(-1)
        numbers = y.double()
        if not bool(numbers.isfinite().all()):
            raise ValueError("y must be finite; leave out rows without a target")
        return torch.maximum(pending["low"] - numbers, numbers - pending["high"]) / pending["unit"]

    def _adapt(self, scores: Tensor, largest_alpha: Tensor, thresholds: Tensor) -> None:
        """Update α_t, weights and error counts by one row."""
        state = self._state
        alpha = 1 - self.level
        is_error = scores > thresholds
        step_sizes = torch.tensor(self.step_sizes, dtype=torch.float64)
        step_sizes = step_sizes.reshape(-1, *(1 for _ in scores.shape))
        if len(self.step_sizes) > 1:
            difference = largest_alpha - state["alphas"]
            loss = alpha * difference - difference.clamp_max(0.0)
            weights = (state["log_weights"] - self._learning_rate() * loss).softmax(0)
            mixing = 1 / (2 * ADAPTATION_ROWS)
            state["log_weights"] = ((1 - mixing) * weights + mixing / len(weights)).log()
        state["alphas"] = state["alphas"] + step_sizes * (alpha - is_error[1:].double())
        state["error_counts"] = state["error_counts"] + is_error[0]

    def _learning_rate(self) -> float:
        """Return η of the weights of step sizes (Gibbs & Candès 2024, section 3)."""
        alpha = 1 - self.level
        spread = (1 - alpha) ** 2 * alpha**3 + alpha**2 * (1 - alpha) ** 3
        complexity = math.log(ADAPTATION_ROWS * len(self.step_sizes)) + 2
        return math.sqrt(3 / ADAPTATION_ROWS * complexity / spread)

"""L-BFGS on many small problems at once: every pass evaluates one trial point of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

HISTORY: Final = 10  # pairs of differences (s, y)
ARMIJO: Final = 1e-4  # fraction of the decrease that the slope predicts
WOLFE: Final = 0.9  # fraction of the slope that may be left
GAIN_TEST_PASSES: Final = 25  # passes between two tests of the gain
MAX_TRIALS: Final = 20  # points on one line, after which the problem has ended
MIN_CURVATURE: Final = 1e-10  # s·y/y·y of a pair that is used


class Lbfgs:
    """K minimizations over P variables each, with L-BFGS directions and steps by bisection.

    The directions are those of Nocedal (1980). A trial point x + t·d is accepted under the weak
    Wolfe conditions; otherwise t is doubled or the bracket halved (Lewis & Overton 2013), which
    needs no continuous gradient: ReLU networks are covered. In every pass each problem that has not
    ended evaluates one point, whichever stage its own line search has reached.

    Args:
        function: (points (A, P), problems (A,)) → values (A,) and gradients (A, P).
        start: the initial points, (K, P).
        enough: the gain within 25 passes below which a problem has ended, (K,).
    """

    def __init__(
        self,
        function: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        start: Tensor,
        enough: Tensor,
    ) -> None:
        count, size = start.shape
        problems = torch.arange(count, device=start.device)
        values, gradients = function(start, problems)
        zeros = torch.zeros_like(enough, dtype=start.dtype)
        self.function = function
        self.points: Tensor = start.clone()
        self.passes: int = 1
        self.evaluations: int = count  # of all problems
        # The state of the problems that have not ended, in the order of ``problems``.
        self.problems = problems
        self.min_gain = enough
        self.x: Tensor = start.clone()
        self.value: Tensor = values.double()
        self.gradient: Tensor = gradients
        self.reference_value: Tensor = self.value.clone()  # at the last test of the gain
        self.direction: Tensor = -gradients
        self.step: Tensor = 1 / gradients.abs().sum(1).clamp_min(1.0)
        self.low: Tensor = zeros.clone()
        self.high: Tensor = zeros + math.inf
        self.trials: Tensor = zeros.clone()
        self.s: Tensor = start.new_zeros(HISTORY, count, size)
        self.y: Tensor = start.new_zeros(HISTORY, count, size)
        self.rho: Tensor = start.new_zeros(HISTORY, count)  # 1/(s·y); 0 where there is no pair
        self.gamma: Tensor = zeros + 1  # of the initial matrix γ·I
        self._keep(self.value.isfinite() & (gradients.abs().amax(1) > 0))

    def run(self, passes: int, report: Callable[[int], None] | None = None) -> Tensor:
        """Return the points after at most ``passes`` evaluations in all, (K, P).

        Args:
            passes: evaluations of each problem, including those of earlier calls.
            report: called with the number of passes so far after every pass.
        """
        while self.passes < passes and len(self.problems):
            self._evaluate_trial_points()
            if report is not None:
                report(self.passes)
        self.points[self.problems] = self.x
        return self.points

    @torch.no_grad()
    def _evaluate_trial_points(self) -> None:
        """Evaluate one trial point of each problem, and accept it or search its line further."""
        trial = torch.addcmul(self.x, self.step[:, None], self.direction)
        value, gradient = self.function(trial, self.problems)
        value = value.double()
        self.passes += 1
        self.evaluations += len(trial)
        slope = (self.gradient * self.direction).sum(1)
        # The comparison is negated so that NaN is too far.
        is_too_far = ~(value <= self.value + ARMIJO * self.step * slope)
        trial_slope = (gradient * self.direction).sum(1)
        is_too_near = ~is_too_far & (trial_slope < WOLFE * slope)
        is_accepted = ~is_too_far & (~is_too_near | (self.trials >= MAX_TRIALS // 2))
        self._bracket(is_too_far, is_too_near)
        self._accept(is_accepted, trial, value, gradient)
        has_ended = self.trials >= MAX_TRIALS
        if self.passes % GAIN_TEST_PASSES == 0:
            has_ended |= self.reference_value - self.value < self.min_gain
            self.reference_value = self.value.clone()
        self._keep(~has_ended)

    def _bracket(self, is_too_far: Tensor, is_too_near: Tensor) -> None:
        """Choose the next step on the same line."""
        self.high = torch.where(is_too_far, self.step, self.high)
        self.low = torch.where(is_too_near, self.step, self.low)
        middle = (self.low + self.high) / 2
        self.step = torch.where(self.high.isfinite(), middle, 2 * self.step)
        self.trials += 1

    def _accept(
        self, is_accepted: Tensor, points: Tensor, values: Tensor, gradients: Tensor
    ) -> None:
        """Move to accepted points, add to the history, and set new directions."""
        slot = self.passes % HISTORY
        is_accepted_row = is_accepted[:, None]
        s = points - self.x
        y = gradients - self.gradient
        curvature = (s * y).sum(1)
        square = y.square().sum(1)
        is_useful = is_accepted & (curvature > MIN_CURVATURE * square)
        self.s[slot] = s
        self.y[slot] = y.nan_to_num(0.0)
        self.rho[slot] = torch.where(is_useful, 1 / curvature, 0.0)
        self.gamma = torch.where(is_useful, curvature / square, self.gamma)
        self.x = torch.where(is_accepted_row, points, self.x)
        self.value = torch.where(is_accepted, values, self.value)
        self.gradient = torch.where(is_accepted_row, gradients, self.gradient)
        direction = -self._inverse_hessian_product(self.gradient)
        self.direction = torch.where(is_accepted_row, direction, self.direction)
        self.step = torch.where(is_accepted, 1.0, self.step)
        self.low = self.low.masked_fill(is_accepted, 0.0)
        self.trials = self.trials.masked_fill(is_accepted, 0.0)
        self.high = self.high.masked_fill(is_accepted, math.inf)

    def _inverse_hessian_product(self, q: Tensor) -> Tensor:
        """Compute H·q by the two-loop recursion."""
        pairs = range(min(HISTORY, self.passes - 1))
        slots = [(self.passes - k) % HISTORY for k in pairs]  # the newest first
        alpha = {}
        for k in slots:
            alpha[k] = self.rho[k] * torch.linalg.vecdot(self.s[k], q)
            q = torch.addcmul(q, alpha[k][:, None], self.y[k], value=-1)
        q = q * self.gamma[:, None]
        for k in reversed(slots):
            beta = self.rho[k] * torch.linalg.vecdot(self.y[k], q)
            q = torch.addcmul(q, (alpha[k] - beta)[:, None], self.s[k])
        return q

    def _keep(self, is_kept: Tensor) -> None:
        """Drop the problems that have ended."""
        if bool(is_kept.all()):
            return
        self.points[self.problems[~is_kept]] = self.x[~is_kept]
        state_names = (
            "problems",
            "min_gain",
            "x",
            "value",
            "gradient",
            "reference_value",
            "direction",
            "step",
            "low",
            "high",
            "trials",
            "gamma",
        )
        for name in state_names:
            setattr(self, name, getattr(self, name)[is_kept])
        self.s = self.s[:, is_kept]
        self.y = self.y[:, is_kept]
        self.rho = self.rho[:, is_kept]

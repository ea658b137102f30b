"""L-BFGS on many small problems at once: every pass evaluates one trial point of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor

HISTORY: Final = 10  # pairs of differences (s, y)
ARMIJO: Final = 1e-4  # of the decrease that the slope predicts
WOLFE: Final = 0.9  # of the slope that may be left
WINDOW: Final = 25  # passes between two tests of the gain
MAX_TRIALS: Final = 20  # points on one line, after which the problem has ended


class Lbfgs:
    """K minimizations over P variables each, with L-BFGS directions (Nocedal 1980) and steps by
    bisection.

    A trial point x + t·d is accepted under the weak Wolfe conditions; otherwise t is doubled or the
    bracket halved (Lewis & Overton 2013), which needs no continuous gradient: ReLU networks are
    covered. In every pass each problem that has not ended evaluates one point, whichever stage its
    own line search has reached.

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
        self.function, self.points, self.passes = function, start.clone(), 1
        self.evaluations = len(start)  # of all problems
        count, size = start.shape
        problems = torch.arange(count, device=start.device)
        values, gradients = function(start, problems)
        zeros = torch.zeros_like(enough, dtype=start.dtype)
        # the state of the problems that have not ended, in the order of ``problems``
        self.problems, self.enough, self.x = problems, enough, start.clone()
        self.value, self.gradient = values.double(), gradients
        self.reference = self.value.clone()  # the value at the last test of the gain
        self.direction = -gradients
        self.step = 1 / gradients.abs().sum(1).clamp_min(1.0)
        self.low, self.high, self.trials = zeros.clone(), zeros + math.inf, zeros.clone()
        self.s, self.y = (
            start.new_zeros(HISTORY, count, size),
            start.new_zeros(HISTORY, count, size),
        )
        self.rho = start.new_zeros(HISTORY, count)  # 1/(s·y); 0 where there is no pair
        self.gamma = zeros + 1  # of the initial matrix γ·I
        self._keep(self.value.isfinite() & (gradients.abs().amax(1) > 0))

    def run(self, passes: int, report: Callable[[int], None] | None = None) -> Tensor:
        """The points after at most ``passes`` evaluations in all, (K, P).

        Args:
            passes: evaluations of each problem, including those of earlier calls.
            report: called with the number of passes so far after every pass.
        """
        while self.passes < passes and len(self.problems):
            self._pass()
            if report is not None:
                report(self.passes)
        self.points[self.problems] = self.x
        return self.points

    @torch.no_grad()
    def _pass(self) -> None:
        trial = torch.addcmul(self.x, self.step[:, None], self.direction)
        value, gradient = self.function(trial, self.problems)
        value = value.double()
        self.passes += 1
        self.evaluations += len(trial)
        slope = (self.gradient * self.direction).sum(1)
        far = ~(value <= self.value + ARMIJO * self.step * slope)  # NaN is too far
        near = ~far & ((gradient * self.direction).sum(1) < WOLFE * slope)
        accepted = ~far & (~near | (self.trials >= MAX_TRIALS // 2))
        self._bracket(far, near)
        self._move(accepted, trial, value, gradient)
        ended = self.trials >= MAX_TRIALS
        if self.passes % WINDOW == 0:
            ended |= self.reference - self.value < self.enough
            self.reference = self.value.clone()
        self._keep(~ended)

    def _bracket(self, far: Tensor, near: Tensor) -> None:
        """The next step on the same line."""
        self.high = torch.where(far, self.step, self.high)
        self.low = torch.where(near, self.step, self.low)
        self.step = torch.where(self.high.isfinite(), (self.low + self.high) / 2, 2 * self.step)
        self.trials += 1

    def _move(self, accepted: Tensor, points: Tensor, values: Tensor, gradients: Tensor) -> None:
        """Accept points, add to the history, and set new directions."""
        slot, yes = self.passes % HISTORY, accepted[:, None]
        s, y = points - self.x, gradients - self.gradient
        curvature, square = (s * y).sum(1), y.square().sum(1)
        useful = accepted & (curvature > 1e-10 * square)
        self.s[slot], self.y[slot] = s, y.nan_to_num(0.0)
        self.rho[slot] = torch.where(useful, 1 / curvature, 0.0)
        self.gamma = torch.where(useful, curvature / square, self.gamma)
        self.x = torch.where(yes, points, self.x)
        self.value = torch.where(accepted, values, self.value)
        self.gradient = torch.where(yes, gradients, self.gradient)
        self.direction = torch.where(yes, -self._inverse_hessian(self.gradient), self.direction)
        self.step = torch.where(accepted, 1.0, self.step)
        self.low, self.trials = (
            self.low.masked_fill(accepted, 0.0),
            self.trials.masked_fill(accepted, 0.0),
        )
        self.high = self.high.masked_fill(accepted, math.inf)

    def _inverse_hessian(self, q: Tensor) -> Tensor:
        """H·q by the two-loop recursion."""
        slots = [
            (self.passes - k) % HISTORY for k in range(min(HISTORY, self.passes - 1))
        ]  # the newest first
        alpha = {}
        for k in slots:
            alpha[k] = self.rho[k] * torch.linalg.vecdot(self.s[k], q)
            q = torch.addcmul(q, alpha[k][:, None], self.y[k], value=-1)
        q = q * self.gamma[:, None]
        for k in reversed(slots):
            beta = self.rho[k] * torch.linalg.vecdot(self.y[k], q)
            q = torch.addcmul(q, (alpha[k] - beta)[:, None], self.s[k])
        return q

    def _keep(self, left: Tensor) -> None:
        """Drop the problems that have ended."""
        if bool(left.all()):
            return
        self.points[self.problems[~left]] = self.x[~left]
        for name in ("problems", "enough", "x", "value", "gradient", "reference", "direction", "step", "low", "high",
                     "trials", "gamma"):  # fmt: skip
            setattr(self, name, getattr(self, name)[left])
        self.s, self.y, self.rho = self.s[:, left], self.y[:, left], self.rho[:, left]

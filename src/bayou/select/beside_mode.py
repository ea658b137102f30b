"""A method that predicts held-out rows worse than its mode becomes a mixture with the mode."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Final, final

from torch import Tensor

from bayou.core.progress import stage
from bayou.inference.baseline_checks import MIN_EXCESS
from bayou.inference.method import Method
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.select.best_method import HELD_OUT_FRACTION, held_out_nll, without_warnings
from bayou.select.full_batch import FullBatchModes
from bayou.select.judgment import Residuals
from bayou.select.noise import least_noise
from bayou.select.noise_and_prior import NoiseAndPrior
from bayou.select.plans import Fitted, Plan
from bayou.select.search_run import SearchRun, target_at
from bayou.select.stacked import Stacked
from bayou.select.stacking import stacking_weights
from bayou.training.data import Data, Rows

# Pseudo-rows with equal weights, fewer than for a stack: a mode is what a method must not lose to,
# and with 24 held-out rows a pull of two rows would cost .04 nats.
PULL: Final = 0.2
MIN_SHARE: Final = 0.01  # of the method; 99 % of a mode cost at most .01 nats
MAX_SHARE: Final = 0.95  # of the method, above which it is not mixed
MIN_JUDGING_ROWS: Final = 20  # held-out rows, fewer of which say nothing about a mixture
MIN_TRIAL_ROWS: Final = 100  # rows, with fewer of which too few are held out to compare
MIN_FINAL_ROWS: Final = 2000  # rows, from which the compared fit is not repeated with all rows
FINAL_FRACTION: Final = 0.05  # of these, held out


@final
@dataclass(frozen=True)
class ModeShare:
    """The weight of a method in its mixture with the mode, by held-out rows.

    Args:
        weight: of the method; 1 for the method alone.
        excess: mean NLL of the method minus that of the mode, in nats.
        rows: the number of held-out rows.
        mode_noise: the noise of a regression that is likeliest for the mode; None where it is not
            selected.
    """

    weight: float = 1.0
    excess: float = 0.0
    rows: int = 0
    mode_noise: float | None = None

    @classmethod
    def of(cls, losses: Tensor, of_mode: Tensor, mode_noise: float | None = None) -> ModeShare:
        """Return the share of a method: 1 if it is at most .01 nats worse than its mode.

        With fewer than 20 rows it is 1 as well. A method that is worse has the weight that predicts
        the rows best (``bayou.stack``).

        Args:
            losses: −log p of every row under the method, (N,).
            of_mode: that under the mode.
            mode_noise: see ``ModeShare``.
        """
        excess = float((losses - of_mode).mean())
        weight = 1.0
        if excess > MIN_EXCESS and len(losses) >= MIN_JUDGING_ROWS:
            weights = stacking_weights({"method": losses, "mode": of_mode}, PULL)
            weight = max(MIN_SHARE, float(weights[0]))
        if weight > MAX_SHARE:
            weight = 1.0
        return cls(weight, excess, len(losses), mode_noise)

    @classmethod
    def of_residuals(cls, residuals: Residuals, of_mode: Residuals) -> ModeShare:
        """Return the share in a regression, each with the noise that is likeliest for it.

        Args:
            residuals: of the method on held-out rows.
            of_mode: of the mode on the same rows.
        """
        mode_noise = of_mode.likeliest_noise()
        losses = residuals.log_density_loss(residuals.likeliest_noise())
        return cls.of(losses, of_mode.log_density_loss(mode_noise), mode_noise)

    def describe(self, method: Method | None) -> str:
        """Return a sentence about the mixture.

        Args:
            method: the method.
        """
        name = type(method).__name__
        return (
            f"a mixture of {self.weight:.2f} {name} and {1 - self.weight:.2f} its mode: {name} "
            f"alone is {self.excess:.3f} nats worse than its mode on {self.rows:,} held-out rows"
        )


def plan_beside_mode(plan: Plan, share: ModeShare, mode: Posterior) -> Plan:
    """Return the plan of a method, or of its mixture with the mode.

    Args:
        plan: of the method.
        share: its weight.
        mode: the mode of the rows of the plan.
    """
    if share.weight == 1:
        return plan
    if share.mode_noise is not None:
        mode = copy.copy(mode)
        noise = max(share.mode_noise, least_noise(plan.rows))
        mode.target = NoiseAndPrior(noise).apply(mode.target)
    method = plan.method.method if isinstance(plan.method, Fitted) else plan.method
    name = type(method).__name__
    component = replace(plan, stages=(), decisions=(), choice="", progress_stage=None)
    plans = {name: component, "mode": Fitted.plan(None, mode, plan.rows, plan.seed)}
    weights = {name: share.weight, "mode": 1 - share.weight}
    mixture = Stacked.plan(plans, weights, plan.target, plan.rows, plan.seed)
    sentence = share.describe(method)
    return replace(
        plan,
        method=mixture.method,
        decisions=(*plan.decisions, sentence),
        choice=f"{plan.choice}; {sentence}" if plan.choice else sentence,
    )


def has_not_converged(posterior: Posterior) -> bool:
    """Return whether the objective of the last run was still rising at its end.

    Args:
        posterior: has the history.
    """
    return bool(posterior.history) and posterior.history[-1].get("rising") is not None


def compare_with_mode(plan: Plan, target: Target, rows: Data, run: SearchRun) -> Plan:
    """Fit a method and its mode without some rows, and plan their mixture if that is better.

    Below 2,000 rows a fifth is held out, and the plan is for all rows. Above, a twentieth is, and
    the plan has the posterior of the others: it is not fitted again. A method whose own selection
    includes its mode is not compared.

    Args:
        plan: of the method for all rows.
        target: before the fit.
        rows: all rows.
        run: of the search.

    Raises:
        SearchInterrupted: after Ctrl-C, with the posterior so far.
    """
    if not isinstance(rows, Rows) or rows.n < MIN_TRIAL_ROWS:
        return plan
    if plan.method.selects_narrow_priors:
        return plan
    is_final = rows.n >= MIN_FINAL_ROWS
    fraction = FINAL_FRACTION if is_final else HELD_OUT_FRACTION
    training, held_out = rows.split(fraction, run.part_seed("beside"))
    modes = FullBatchModes(run.start)
    with stage(1, 3, "mode, held out"), without_warnings():
        mode = run.fit(modes, target.copy(training.n), training, "beside.mode")
    trial_target = target.copy(training.n) if plan.start is None else target_at(mode)
    trial = plan.method if is_final else plan.method.with_planned_length(training)
    # Warnings of a fit that becomes the posterior are shown.
    with stage(2, 3, "held out"), nullcontext() if is_final else without_warnings():
        posterior = run.fit(trial, trial_target, training, "beside")
        # A longer fit may be farther from the mode.
        if trial != plan.method and has_not_converged(posterior):
            posterior = run.fit(plan.method, trial_target, training, "beside.longer")
    losses = held_out_nll(posterior, held_out, run.seed)
    share = ModeShare.of(losses, held_out_nll(mode, held_out, run.seed))
    if is_final:
        posterior.held_out_index = held_out.index
        mode.held_out_index = held_out.index
        fitted = Fitted.plan(plan.method, posterior, training, run.seed)
        plan = replace(plan, target=fitted.target, method=fitted.method, rows=training)
    elif share.weight < 1:
        with stage(3, 3, "mode"):
            mode = plan.start or run.fit(modes, target.copy(), rows, "beside.all")
    return plan_beside_mode(plan, share, mode)

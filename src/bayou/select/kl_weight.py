"""The weight β of the KL of variational inference, selected on held-out rows."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Final

from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.select.best_method import HELD_OUT_FRACTION, FitComparison, compare_fits
from bayou.select.plans import Plan
from bayou.select.search_run import SearchRun, stage_record
from bayou.training.data import Data, Rows

# From the ELBO on: the posterior of the prior that was given, then colder ones.
KL_WEIGHTS: Final = (1.0, 0.3, 0.1, 0.03, 0.01)
MIN_ROWS: Final = 50  # of which ten are held out
# Paired standard errors by which another β must be better than a larger one.
MAX_STANDARD_ERRORS: Final = 1.0

# From β, a target, rows and a run to the plan of a fit with this β.
PlanOfWeight = Callable[[float, Target, Data, SearchRun], Plan]


def compare_kl_weights(
    plan_of: PlanOfWeight, target: Target, rows: Rows, run: SearchRun
) -> FitComparison:
    """Fit each β to four fifths of the rows, and predict the others.

    Everything else that is selected, such as the noise and the prior scale of a method by name, is
    selected again for each β, without the held-out rows.

    Args:
        plan_of: makes the plan of a β.
        target: network, likelihood and prior.
        rows: all rows.
        run: of the search.

    Returns:
        −log p of the held-out rows by β, the largest first, under the names "β = 1", ...

    Raises:
        SearchInterrupted: after Ctrl-C, with the posterior so far.
    """
    training, held_out = rows.split(HELD_OUT_FRACTION, run.part_seed("beta"))

    def fit(beta: float) -> Posterior:
        part = replace(run, checkpoint=run.file(f"beta-{beta:g}"))
        selected = plan_of(beta, target.copy(training.n), training, part)
        return selected.fit(checkpoint=part.checkpoint, progress=run.progress)

    fits = {_name(beta): partial(fit, beta) for beta in KL_WEIGHTS}
    stages = (1, len(fits) + 1)
    return compare_fits(fits, held_out, run.seed, stages=stages, errors=MAX_STANDARD_ERRORS)


def plan_kl_weight(plan_of: PlanOfWeight, target: Target, data: Data, run: SearchRun) -> Plan:
    """Select β on held-out rows, and plan the fit to all rows with it.

    It is the largest of 1, 0.3, 0.1, 0.03 and 0.01 that no other β is better than by more than one
    standard error of the paired difference: below 1 the optimum is no longer the best bound, so
    that chance must not lead there.

    Args:
        plan_of: makes the plan of a β.
        target: network, likelihood and prior.
        data: all rows.
        run: of the search.

    Returns:
        The plan, with the NLL of every β in its stages.

    Raises:
        ValueError: for fewer than 50 rows, and for data of which no rows can be held out.
        SearchInterrupted: after Ctrl-C, with the posterior so far.
    """
    if not isinstance(data, Rows) or data.n < MIN_ROWS:
        given = f"{data.n:,} rows" if isinstance(data, Rows) else "batches in their own order"
        raise ValueError(
            'beta="validation" holds out rows: it needs tensors or a Dataset with '
            f"{MIN_ROWS} rows or more, got {given}; give beta a number, such as 1.0 or 0.1"
        )
    started = time.perf_counter()
    comparison = compare_kl_weights(plan_of, target, data, run)
    weights = {_name(beta): beta for beta in KL_WEIGHTS}
    trials = [
        {"beta": weights[name], "nll": float(nll.mean())} for name, nll in comparison.nll.items()
    ]
    record = stage_record("weight of the KL", started, trials)
    best = comparison.best
    selected = plan_of(weights[best], target, data, run)
    held_out_rows = len(comparison.nll[best])
    decision = f"{best}, chosen from {len(trials)} on {held_out_rows:,} held-out rows"
    sentences = [comparison.describe(), selected.choice]
    return replace(
        selected,
        stages=(record, *selected.stages),
        decisions=(decision, *selected.decisions),
        choice="; ".join(sentence for sentence in sentences if sentence),
    )


def _name(beta: float) -> str:
    """Return the name of a trial."""
    return f"β = {beta:g}"

"""The recipe of an ensemble that shares its weights: early stopping and noise by held-out rows."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from glob import escape
from typing import Final, final

from torch import nn

from bayou.core.progress import stage
from bayou.guides import Delta, RankOne
from bayou.guides.rules import Rules
from bayou.methods.vi import VI
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.select.noise import describe_likeliest, has_noise_to_select, match_noise
from bayou.select.noise_and_prior import NoiseAndPrior, with_default_prior
from bayou.select.plans import Fitted, Plan
from bayou.select.search_run import SearchRun, stage_record
from bayou.training.data import Data, Rows, as_data

HELD_OUT_FRACTION: Final = 0.2  # of the rows: they stop the fit and decide on the noise
LARGE_HELD_OUT_FRACTION: Final = 0.1  # where the fit is not repeated with all rows
MAX_REFITTED_ROWS: Final = 5_000  # with more rows a second fit, to all of them, would gain little
MIN_ROWS: Final = 10  # with fewer rows none are held out
# Of one fit to many rows, whose learning rate falls at the end; whichever is more.
LARGE_STEPS: Final = 6000
LARGE_EPOCHS: Final = 40
PATIENCE: Final = 16  # epochs without a lower loss of the held-out rows
PATIENCE_STEPS: Final = 300  # the least number of steps of these epochs
MAX_EPOCHS: Final = 400
BATCHES_OF_EPOCH: Final = 8  # at least, so that few rows have enough steps
BATCH_ROWS: Final = (32, 512)  # of the default batch: the least and the most
# A regression of fewer rows begins at a mode: from random weights, with the noise learned beside
# them, members would interpolate the rows before they have learned the function.
MIN_ROWS_WITHOUT_MODE: Final = 2000
# Of members around a mode. Chosen on generated tables: in a longer fit they overfit few rows.
SPREAD_AT_MODE: Final = 0.1
STEPS_AT_MODE: Final = 300
SAMPLES_AT_MODE: Final = 4  # members for every row of a batch


@final
@dataclass(frozen=True)
class MembersLength:
    """What held-out rows have decided about a fit of members.

    Args:
        epochs: with the lowest loss of these rows.
        noise: of a regression; None where it is not selected.
    """

    epochs: int
    noise: float | None = None


def share_members(family: RankOne, target: Target) -> Rules:
    """Return the guides of a network: members of linear layers and convolutions, points elsewhere.

    Args:
        family: of the weights that can have members.
        target: has the network.
    """
    layers = (nn.Linear, nn.modules.conv._ConvNd)
    leaves = ("weight", "bias") if family.biases else ("weight",)
    with_members = {
        f"{name}.{leaf}" if name else leaf
        for name, module in target.net.named_modules()
        for leaf in leaves
        if isinstance(module, layers)
    }
    others = [name for name in target.free if name not in with_members]
    return dict.fromkeys(map(escape, others), Delta(family.penalty)) | {"*": family}


def plan_shared_members(
    method: VI,
    family: RankOne,
    target: Target,
    data: Data,
    run: SearchRun,
    *,
    length: MembersLength | None = None,
) -> tuple[Plan, MembersLength | None]:
    """Plan the fit of all members at once, with its length and noise decided by held-out rows.

    Each row of a batch is passed through one member, so that a step costs that of one network. The
    fit stops when the loss of a fifth of the rows has stopped falling, and in a regression the
    noise is the likeliest for these rows; the plan is a fit to all rows, with this noise, as many
    epochs as the best and a learning rate that falls at the end. Of more than
    ``MAX_REFITTED_ROWS`` rows a tenth is held out of a fit of a planned length, which is the
    result. A length that was given is kept.

    Args:
        method: has the settings of training.
        family: of the members.
        target: network, likelihood and prior.
        data: the training rows.
        run: seed, files and progress.
        length: of the fit, if a search of other rows of the same table has selected it.

    Returns:
        The plan, and the length of the fit; None where it was not selected.

    Raises:
        SearchInterrupted: after Ctrl-C, with the members so far.
    """
    target = with_default_prior(target)
    rows = as_data(data, method.batch_size)
    method = replace(method, guide=share_members(family, target), start="network")
    if not isinstance(rows, Rows) or rows.n < MIN_ROWS:
        return Plan(target, method, rows, run.seed), None
    if method.batch_size == VI.batch_size:
        least, most = BATCH_ROWS
        method = replace(method, batch_size=max(least, min(most, rows.n // BATCHES_OF_EPOCH)))
        rows = rows.with_batch_size(method.batch_size)
    is_large = rows.n > MAX_REFITTED_ROWS
    is_refitted = method.open_ended and not method.validation and not is_large
    if is_refitted and length is not None:
        return _plan_length(length, method, family, target, rows, run), length
    trial = with_length_of_many(method, rows) if is_large else with_early_stopping(method, rows)
    started = time.perf_counter()
    with stage(1, 1 + is_refitted, "held out" if is_refitted else ""):
        posterior = run.fit(trial, target, rows, "members")
    training, held_out = trial.split(rows, run.seed)
    if not isinstance(held_out, Rows):
        raise TypeError("rows are split into rows")
    noise = None
    decisions = [describe_members(family)]
    if has_noise_to_select(target):
        noise = match_noise(posterior, held_out, run.seed)
        target = NoiseAndPrior(noise).apply(target)
        decisions.append(describe_likeliest(noise, held_out))
    if not is_refitted:
        posterior.held_out_index = held_out.index
        plan = Fitted.plan(trial, posterior, rows, run.seed)
        return replace(plan, decisions=tuple(decisions)), None
    epochs = best_epoch(posterior, training.batches)
    decisions.append(f"{epochs} epochs, the best for {held_out.n:,} held-out rows")
    record = stage_record("epochs and noise", started, [{"epochs": epochs}])
    plan = Plan(target, replace(method, epochs=epochs), rows, run.seed, stages=(record,))
    plan = replace(plan, decisions=tuple(decisions), progress_stage=(2, 2, ""))
    return plan, MembersLength(epochs, noise)


def _plan_length(
    length: MembersLength,
    method: VI,
    family: RankOne,
    target: Target,
    rows: Rows,
    run: SearchRun,
) -> Plan:
    """Return the plan of a fit whose length and noise were selected by other rows of the table."""
    if length.noise is not None:
        target = NoiseAndPrior(length.noise).apply(target)
    decisions = (
        describe_members(family),
        f"{length.epochs} epochs, as for other rows of this table",
    )
    return Plan(target, replace(method, epochs=length.epochs), rows, run.seed, decisions=decisions)


def describe_members(family: RankOne) -> str:
    """Return the number of members in words.

    Args:
        family: of the members.
    """
    return f"{family.members} members that share their weights"


def begins_at_mode(method: VI, target: Target, data: Data) -> bool:
    """Return whether few rows of a regression are fitted from a mode, by ``around_mode``.

    Args:
        method: a given length or held-out fraction decides against it.
        target: with a noise to select.
        data: the training rows.
    """
    if not method.open_ended or method.validation or not isinstance(data, Rows):
        return False
    return MIN_ROWS <= data.n < MIN_ROWS_WITHOUT_MODE and has_noise_to_select(target)


def around_mode(method: VI, family: RankOne, target: Target) -> VI:
    """Return the short fit of members around a mode, whose noise and priors are selected.

    Args:
        method: has the settings of training.
        family: of the members.
        target: has the network.
    """
    close = replace(family, spread=min(family.spread, SPREAD_AT_MODE))
    return replace(
        method,
        guide=share_members(close, target),
        samples=max(method.samples, SAMPLES_AT_MODE),
        steps=max(1, round(method.effort * STEPS_AT_MODE)),
    )


def with_length_of_many(method: VI, rows: Rows) -> VI:
    """Return a method for many rows, which keeps the best epoch for a tenth of them.

    Its learning rate falls over the last quarter of a planned length: that gains more than a fit
    at a constant rate until the loss has stopped falling.

    Args:
        method: a length or a fraction that was given is kept.
        rows: all rows.
    """
    method = replace(method, validation=method.validation or LARGE_HELD_OUT_FRACTION)
    if not method.open_ended:
        return method
    steps = max(LARGE_STEPS, LARGE_EPOCHS * rows.batches)
    return replace(method, steps=max(1, round(method.effort * steps)))


def with_early_stopping(method: VI, rows: Rows) -> VI:
    """Return a method that holds rows out and stops when their loss has stopped falling.

    Args:
        method: a length or a fraction that was given is kept.
        rows: all rows; epochs of a few steps do not stop it before ``PATIENCE_STEPS``.
    """
    method = replace(method, validation=method.validation or HELD_OUT_FRACTION)
    if not method.open_ended:
        return method
    training, _ = method.split(rows, 0)
    patience = max(PATIENCE, math.ceil(PATIENCE_STEPS / training.batches))
    return replace(
        method,
        epochs=max(1, round(method.effort * MAX_EPOCHS)),
        patience=method.patience or max(2, round(method.effort * patience)),
        schedule="constant",
    )


def best_epoch(posterior: Posterior, batches: int) -> int:
    """Return the number of epochs with the lowest validation loss.

    Args:
        posterior: of a fit with held-out rows.
        batches: of an epoch.
    """
    records = [record for record in posterior.history if "validation" in record]
    best = min(records, key=lambda record: record["validation"])
    return max(1, round((best["step"] + 1) / batches))

"""Checks of a posterior: its predictions against simple models and its mode, and calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from bayou import metrics
from bayou.core import rng
from bayou.core.progress import spell
from bayou.diagnostics.baselines import Baseline, baselines
from bayou.inference.baseline_checks import Comparison
from bayou.likelihoods.predictive import Predictive
from bayou.metrics import row_nll
from bayou.metrics.chains import ess_bulk, rhat
from bayou.network import forward_inputs, rows_of
from bayou.posteriors import Posterior
from bayou.posteriors.checks import (
    LARGE_EXCESS,
    Check,
    Checks,
    check_history,
    check_mixing,
)
from bayou.posteriors.posterior import NOISE
from bayou.training.rows import all_rows, some_rows

# At most 5 % of correct fits are flagged, and at least 95 % of wrong ones:
# experiments/measure/gate.py measures these rates.
SURE = 2.5  # standard errors of a significant difference
SMALL_DIFFERENCE = 0.01  # nats per example: negligible
LEVEL = 0.9  # of intervals
COVERAGE_WARNING = 0.05  # distance of the coverage from LEVEL
COVERAGE_FAILURE = 0.15
MAX_EXCESS_BY_SHAPE = 0.075  # of the coverage above LEVEL, if the noise has the right variance
# Of residuals to predicted standard deviations: if it is less, the noise is too large.
MIN_RESIDUAL_RATIO = 0.85
ECE_WARNING = 0.02  # expected calibration errors
ECE_FAILURE = 0.1
ECE_BINS = 15
CHANCE_QUANTILE = 0.99  # of the ECE by chance alone, above which an ECE is flagged
MIN_VARIANCE_SHARE = 0.01  # of the variance of y: predictions that vary less do not depend on x
RESAMPLES = 400
MAX_COMPARED_FUNCTIONS = 20  # of a posterior without a mean, whose average NLL it is compared with
MAX_CHECKED_ROWS = 256  # after a fit
MAX_BASELINE_ROWS = 1000  # training rows to which the baselines are fitted after a fit
MAX_CHECK_DRAWS = 32  # functions of the posterior after a fit
MIN_CHAIN_DRAWS = 4  # for R-hat
MAX_CHAIN_ROWS = 100  # rows for the R-hat of predictions
MIN_CHAIN_STD = 1e-6  # of predictions: chains that vary less have not moved
POINTS_PER_EVALUATION = 100  # of a chain


@torch.no_grad()
def check(
    posterior: Posterior,
    train: Any = None,
    held_out: Any = None,
    *,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    scale: float = 1.0,
    against: dict[str, Baseline] | None = None,
    predictive: Predictive | None = None,
) -> Checks:
    """Check a posterior; the result is also stored as ``posterior.checks``.

    Without data, only its history is checked. With ``train``: its NLL is compared with that of a
    constant and of a linear model, paired over rows with a tolerance of 2.5 standard errors
    (sampling of the training rows included), on the ``held_out`` rows or, if there are none, on the
    training rows; R-hat of the predictions of chains. With ``held_out``: also the comparison with
    its own mean network, and the coverage of 90 % intervals, or the calibration error of classes,
    compared with chance.

    Args:
        posterior: what to check.
        train: the training data, as of ``fit``.
        held_out: rows (x, y), a Dataset or a DataLoader, that the fit has not seen.
        samples: draws of the weights; None: as many as ``predict`` takes.
        seed: of the draws.
        batch_size: rows of an evaluation of the network; None: all.
        scale: the number that y was divided by, for numbers in original units.
        against: baselines by name, if they are fitted already (``baselines``).
        predictive: the posterior's prediction for these rows, if there is one already.

    Returns:
        The checks by name, each "ok", "warning" or "failed" with a text.

    Example:
        >>> print(bayou.diagnostics.check(posterior, (x, y), (x_held, y_held)))
    """
    checks = list(check_history(posterior))
    data = train if held_out is None else held_out
    if data is not None:
        x, y = all_rows(data)
        if predictive is None:
            predictive = posterior.predict(x, samples=samples, seed=seed, batch_size=batch_size)
        y = y.to(predictive.outputs.device)
        if against is None and train is not None:
            against = baselines(
                posterior.target.likelihood, *all_rows(train), predictive.outputs.shape[2:], seed
            )
        rows = _CheckedRows(x, y, predictive, held_out is not None, scale, batch_size)
        nll = {name: row_nll(predict(x), y, scale) for name, predict in (against or {}).items()}
        known_names = {known.name for known in checks}
        checks += _check_nll(posterior, rows, nll, has_mode="mode" in known_names)
        if posterior.stack is not None and "mixing" not in known_names:
            checks += _check_mixing(posterior, x)
        if held_out is not None and predictive.likelihood.support == "classes":
            checks.append(_check_calibration(predictive, y, seed))
        elif held_out is not None:
            checks.append(_check_coverage(predictive, y))
    # A later check replaces an earlier one of the same name.
    posterior.checks = Checks(tuple({item.name: item for item in checks}.values()))
    return posterior.checks


def check_after_fit(
    posterior: Posterior, train: Any, held_out: Any = None, *, seed: int = 0
) -> Checks:
    """Check a posterior on some rows, at a cost that is small next to that of a fit.

    The result is also stored as ``posterior.checks``.

    Args:
        posterior: the posterior.
        train: training rows, as of ``fit``; the baselines are fitted to at most 1,000 of them.
        held_out: rows that the fit did not use, or None to check on training rows; at most 256 are
            used.
        seed: the seed of the draws of the posterior.
    """
    try:
        draws = posterior.draws_to_average(MAX_CHECK_DRAWS)
        x, y = some_rows(train, MAX_BASELINE_ROWS, seed)
        held_out = None if held_out is None else some_rows(held_out, MAX_CHECKED_ROWS, seed)
        outputs = posterior.predict(_first_rows(x, 1), 1, seed=seed).outputs.shape[2:]
        against = baselines(posterior.target.likelihood, x, y, outputs, seed)
        first_rows = (_first_rows(x, MAX_CHECKED_ROWS), y[:MAX_CHECKED_ROWS])
        return check(posterior, first_rows, held_out, samples=draws, seed=seed, against=against)
    except Exception as error:  # whatever is wrong with a check must not cost the user the fit
        text = (
            f"the posterior could not be compared with baselines: {type(error).__name__}: {error}"
        )
        posterior.checks = Checks((*check_history(posterior), Check("baselines", "warning", text)))
        return posterior.checks


def _first_rows(x: Any, count: int) -> Any:
    """Return the first rows of an input, or of several."""
    inputs = rows_of(forward_inputs(x), slice(count))
    return inputs if isinstance(x, tuple | list | Mapping) else inputs[0]


@dataclass(frozen=True)
class _CheckedRows:
    """The rows on which a posterior is checked, with its prediction.

    Args:
        x: the inputs.
        y: the targets.
        predictive: the posterior's prediction.
        is_held_out: whether the fit has not seen these rows.
        scale: the number that y was divided by.
        batch_size: rows of an evaluation of the network.
    """

    x: Any
    y: Tensor
    predictive: Predictive
    is_held_out: bool
    scale: float
    batch_size: int | None

    def describe(self) -> str:
        """Return the number and the type of the rows as words."""
        return f"{len(self.y):,} {'held-out' if self.is_held_out else 'training'} rows"


def _check_nll(
    posterior: Posterior, rows: _CheckedRows, baseline_nll: dict[str, Tensor], has_mode: bool
) -> list[Check]:
    """Compare the NLL of the posterior with that of baselines and of its mode.

    ``has_mode``: whether the history compared it with the mode already.
    """
    nll = row_nll(rows.predictive, rows.y, rows.scale)
    is_finite = nll.isfinite()
    if not bool(is_finite.all()):
        missing = int((~is_finite).sum())
        text = f"{missing:,} of {rows.describe()} have no finite likelihood; do not use it"
        return [Check("finite", "failed", text)]
    output_count = rows.predictive.outputs[0, 0].numel()
    training_error = _training_row_error(rows.x, output_count, posterior.target.n)
    comparison = _CheckedNll(nll, training_error, rows.describe())
    checks = _compare_with_baselines(comparison, baseline_nll)
    is_variational = posterior.bayesian is not None
    if is_variational and "linear" in baseline_nll and _is_flat(rows.predictive, rows.y):
        checks += _check_collapse(baseline_nll)
    if rows.is_held_out or not has_mode:
        checks += _compare_with_mode(posterior, comparison, rows)
    return checks


@final
@dataclass(frozen=True)
class _CheckedNll:
    """The NLL of a posterior, to be compared with that of other predictions of the same rows.

    Args:
        nll: of each row, (B,).
        training_error: the standard error of a difference due to the training rows.
        rows: the number and the type of the rows in words.
    """

    nll: Tensor
    training_error: float
    rows: str

    def excess(self, other_nll: Tensor) -> tuple[float, float]:
        """Return the difference in NLL, and its standard error over test and training rows."""
        comparison = Comparison.of(self.nll, other_nll)
        return comparison.excess, math.hypot(comparison.error, self.training_error)

    def describe(self, other_nll: Tensor, other_model: str) -> str:
        """Return both NLLs and their difference as words."""
        difference, error = self.excess(other_nll)
        nll = f"NLL {float(self.nll.mean()):.3f}, {other_model} {float(other_nll.mean()):.3f}"
        return f"{nll} (difference {difference:+.3f} ± {error:.3f}, {self.rows})"

    def check(
        self,
        other_nll: Tensor,
        name: str,
        other_model: str,
        advice: str,
        allowance: float = SMALL_DIFFERENCE,
    ) -> Check:
        """Warn, or fail, if the NLL exceeds another one by more than chance and the allowance.

        Args:
            other_nll: of each row, (B,).
            name: of the check.
            other_model: what has this NLL, in words.
            advice: what to do if the posterior is worse.
            allowance: in nats.
        """
        excess, error = self.excess(other_nll)
        description = self.describe(other_nll, other_model)
        if not excess > SURE * error + allowance:
            return Check(name, "ok", description)
        is_large = excess > LARGE_EXCESS + allowance
        text = f"worse than {other_model}: {description}; {advice}"
        return Check(name, "failed" if is_large else "warning", text)

    def check_constant(self, constant_nll: Tensor) -> Check:
        """Warn if it is as good as a constant; there is no warning if rows are too few to tell."""
        excess, error = self.excess(constant_nll)
        description = self.describe(constant_nll, "a constant")
        if excess > SURE * error:
            text = f"worse than a constant: {description}; do not use it; train longer"
            return Check("constant", "failed", text)
        if excess > max(-SMALL_DIFFERENCE, SURE * error - LARGE_EXCESS):
            text = f"no better than a constant: {description}; x may have no information about y"
            return Check("constant", "warning", text)
        return Check("constant", "ok", description)


def _training_row_error(x: Any, outputs: int, rows: int) -> float:
    """Return the standard error of a difference of two fits due to their common training rows.

    It is ½·√(D/2)/N nats: the estimation error of D weights costs χ²_D/2N nats, with a standard
    deviation of √(D/2)/N, of which two fits share about a half; D is that of a linear model.
    """
    inputs = x[0] if isinstance(x, tuple) else x
    weights = outputs
    if isinstance(inputs, Tensor) and len(inputs):
        weights = inputs[0].numel() * outputs
    return 0.5 * math.sqrt(min(weights, rows) / 2) / max(rows, 1)


def _compare_with_baselines(
    comparison: _CheckedNll, baseline_nll: dict[str, Tensor]
) -> list[Check]:
    """Compare the posterior with a constant and a linear model."""
    checks = []
    if "constant" in baseline_nll:
        checks.append(comparison.check_constant(baseline_nll["constant"]))
    if "linear" in baseline_nll:
        advice = "use the linear model, more data, another network or longer training"
        checks.append(comparison.check(baseline_nll["linear"], "linear", "a linear model", advice))
    return checks


def _compare_with_mode(
    posterior: Posterior, comparison: _CheckedNll, rows: _CheckedRows
) -> list[Check]:
    """Compare the posterior with the network at its mean, or with its single functions.

    On training rows a mode is favored: the average over the functions of a linear model is up to
    ½·log(1 + h) worse there, with the leverage h of a row, ≤ 1 and D/N on average. This much is
    allowed. An average over functions is never worse than its functions on average. A single point
    has nothing to compare with.
    """
    advice = spell(
        'use the mode; for Laplace try prior="validation", for VI train longer or with a warm-up',
        "use the mode (--method map); for a variational method give more --steps or --warmup 0.4",
    )
    mean_network = _predict_at_mean(posterior, rows.x, rows.batch_size)
    if mean_network is not None:
        weights = sum(value.numel() for value in posterior.template().values())
        leverage = min(1.0, weights / posterior.target.n)
        allowance = SMALL_DIFFERENCE
        if not rows.is_held_out:
            allowance = max(LARGE_EXCESS, 0.5 * math.log1p(leverage))
        nll = row_nll(mean_network, rows.y, rows.scale)
        return [comparison.check(nll, "mode", "the network at its own mean", advice, allowance)]
    predictive = rows.predictive
    count = min(len(predictive.outputs), MAX_COMPARED_FUNCTIONS)
    if count < 2:
        return []
    functions = [
        Predictive(predictive.likelihood, predictive.outputs[s : s + 1]) for s in range(count)
    ]
    function_nll = [row_nll(function, rows.y, rows.scale) for function in functions]
    nll = torch.stack(function_nll).mean(0)
    return [comparison.check(nll, "mode", "its single functions on average", advice)]


def _check_collapse(baseline_nll: dict[str, Tensor]) -> list[Check]:
    """Fail predictions that do not depend on x, if a linear model is better than a constant."""
    comparison = Comparison.of(baseline_nll["linear"], baseline_nll["constant"])
    if not comparison.excess < -SURE * comparison.error:
        return []
    text = (
        "the predictions hardly depend on x, but those of a linear model do: q has collapsed; "
        "start at the mode, or use a warm-up"
    )
    return [Check("collapse", "failed", text)]


def _predict_at_mean(posterior: Posterior, x: Any, rows: int | None) -> Predictive | None:
    """Return the prediction of the network at the mean of q; None for a mixture of points."""
    if not posterior.centered:
        return None
    stack = {
        name: value.unsqueeze(0)
        for name, value in posterior.template().items()
        if not name.startswith(NOISE)
    }
    inputs = posterior.place(x)
    with posterior.seed_network(inputs, 0):
        outputs = posterior.outputs(stack, inputs, rows).detach()
        return posterior.apply_temperature(posterior.target.likelihood, outputs)


def _is_flat(p: Predictive, y: Tensor) -> bool:
    """Return whether the predictions hardly depend on x."""
    mean = p.mean.detach().double().flatten(1)
    if p.likelihood.support == "classes":
        mean_distance = (mean - mean.mean(0)).abs().sum(1).mean()
        return bool(mean_distance < 2 * MIN_VARIANCE_SHARE)
    values = p.likelihood.labels(y)[0].double().reshape(len(y), -1)
    target_variance = values.var(0).mean()
    return bool(mean.var(0).mean() < MIN_VARIANCE_SHARE * target_variance)


def _check_mixing(posterior: Posterior, x: Any) -> list[Check]:
    """Check R-hat of the predictions E[y | f] of some rows.

    Weights are not checked: with permutation symmetries they need not mix.
    """
    if posterior.chains < 2 or (posterior.draws or 0) < MIN_CHAIN_DRAWS * posterior.chains:
        return []
    inputs = rows_of(posterior.place(x), slice(MAX_CHAIN_ROWS))
    outputs = _outputs_by_chain(posterior, inputs).flatten(0, 1)
    means = posterior.target.likelihood.mean(outputs)
    means = means.unflatten(0, (posterior.chains, -1)).flatten(2)
    varying_means = means[..., means.flatten(0, 1).double().std(0) > MIN_CHAIN_STD]
    if not varying_means.shape[-1]:
        return [Check("mixing", "failed", "the chains did not move; use a larger step size")]
    # R̂² ≈ 1 + χ²₃/(3·n) for independent draws, n = half a chain, and the worst of many rows is
    # taken.
    chance = 5 / means.shape[1]
    worst_rhat = float(rhat(varying_means).max())
    worst_ess = float(ess_bulk(varying_means).min())
    return [check_mixing(worst_rhat, worst_ess, " of a prediction", chance)]


def _outputs_by_chain(posterior: Posterior, inputs: tuple[Any, ...]) -> Tensor:
    """Return the outputs of all points, some at a time: (chains, draws, B, *out)."""
    points = posterior.stack or {}
    stack = {name: value for name, value in points.items() if not name.startswith(NOISE)}
    outputs = []
    for start in range(0, posterior.draws or 0, POINTS_PER_EVALUATION):
        end = start + POINTS_PER_EVALUATION
        batch = {name: value[start:end] for name, value in stack.items()}
        outputs.append(posterior.outputs(batch, inputs))
    return torch.cat(outputs).unflatten(0, (posterior.chains, -1))


def _check_coverage(p: Predictive, y: Tensor) -> Check:
    """Compare the coverage of intervals with their level."""
    values, is_known = p.likelihood.labels(y)
    if not bool(is_known.all()):
        censored = float((~is_known).double().mean())
        description = f"not compared with the level, since {censored:.0%} of the rows are censored"
        return Check("coverage", "ok", description)
    p = Predictive(*p.likelihood.for_targets(p.outputs, y))
    y = values
    share = metrics.coverage(p, y, LEVEL)
    rows = len(y)
    error = math.sqrt(LEVEL * (1 - LEVEL) / rows)
    description = (
        f"{share:.1%} of {rows:,} held-out rows lie in their {LEVEL:.0%} intervals "
        f"(chance: ± {error:.1%})"
    )
    excess = share - LEVEL
    is_explained_by_steps = excess > 0 and p.likelihood.support != "real"
    if abs(excess) <= max(COVERAGE_WARNING, SURE * error) or is_explained_by_steps:
        return Check("coverage", "ok", description)
    if excess > 0:
        return _explain_wide_coverage(p, y, description, excess)
    text = (
        f"intervals are too narrow: {description}; use a larger noise, or select it on held-out "
        "rows"
    )
    return Check("coverage", "failed" if excess < -COVERAGE_FAILURE else "warning", text)


def _explain_wide_coverage(p: Predictive, y: Tensor, description: str, excess: float) -> Check:
    """Tell intervals of a noise that is too large from those of residuals that are not normal.

    A normal distribution with the right variance covers more than ``LEVEL`` of bounded or of
    heavy-tailed residuals. This errs on the safe side; a smaller noise would be wrong.
    """
    variance = p.std.detach().double().reshape(len(y), -1).square()
    mean = p.mean.detach().double().reshape(len(y), -1)
    residual = y.detach().double().reshape(len(y), -1) - mean
    ratio = math.sqrt(float((residual.square() / variance).mean()))
    if not ratio >= MIN_RESIDUAL_RATIO:
        text = f"intervals are too wide: {description}; use a smaller noise, or learn it"
        return Check("coverage", "warning", text)
    shape = f"residuals are {ratio:.2f} times as large as predicted, but not normal"
    advice = spell("bayou.conformal", "`bayou predict --conformal FILE`")
    text = (
        f"intervals are wider than they claim: {description}, since {shape}; {advice} gives "
        "intervals of the right width"
    )
    return Check("coverage", "ok" if excess <= MAX_EXCESS_BY_SHAPE else "warning", text)


def _check_calibration(p: Predictive, y: Tensor, seed: int) -> Check:
    """Compare the ECE and the mean confidence with those of classes drawn from the predictive.

    With few rows an ECE is never 0. Classes of all rows are drawn given one function, so that
    confidences may be off together as far as functions differ.
    """
    confidence, hits = metrics.confidence_and_hits(p, y)
    confidence = confidence.cpu()
    hits = hits.cpu()
    edges = torch.linspace(0, 1, ECE_BINS + 1, dtype=torch.float64)[1:-1].contiguous()
    bins = torch.bucketize(confidence, edges)
    is_labeled = p.likelihood.labels(y)[1]
    unweighted = p.likelihood.without_weights(p.outputs[0], y)[0]
    log_confidence = unweighted.pointwise(p.outputs, p.probabilities.argmax(-1))
    function_confidence = log_confidence[:, is_labeled].detach().exp().double().cpu()
    u = rng.uniform(RESAMPLES, confidence.shape, confidence, rng.fold(seed, "calibration"))
    function_index = torch.arange(RESAMPLES) % len(function_confidence)
    resampled_hits = (u < function_confidence[function_index]).double()
    all_hits = torch.cat([hits.unsqueeze(0), resampled_hits])  # those of y first
    gaps = torch.zeros(len(all_hits), ECE_BINS, dtype=torch.float64)
    gaps = gaps.index_add_(1, bins, all_hits - confidence)
    eces = gaps.abs().sum(1) / len(hits)
    ece = float(eces[0])
    chance = float(eces[1:].quantile(CHANCE_QUANTILE))
    # One number has less noise than one for each bin.
    excess = float((confidence - hits).mean())
    spread = float(all_hits[1:].mean(1).std())
    description = f"ECE {ece:.3f} on {len(hits):,} held-out rows (chance alone: up to {chance:.3f})"
    if ece <= max(chance, ECE_WARNING) and abs(excess) <= max(SURE * spread, ECE_WARNING):
        return Check("calibration", "ok", description)
    direction = "under"
    advice = "train longer, or use a wider prior"
    if excess > 0:
        direction = "over"
        advice = "average more networks, or use a narrower prior"
    text = (
        f"{direction}confident: {description}, mean confidence {float(confidence.mean()):.3f}, "
        f"accuracy {float(hits.mean()):.3f}; {advice}"
    )
    return Check("calibration", "failed" if ece > ECE_FAILURE else "warning", text)

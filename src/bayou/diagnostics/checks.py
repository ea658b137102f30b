"""Checks after a fit: comparison with a linear model and with the posterior's own mode, and
calibration.
"""

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
from bayou.metrics import row_nll
from bayou.metrics.chains import ess_bulk, rhat
from bayou.network import forward_inputs, rows_of
from bayou.posteriors import Posterior
from bayou.posteriors.checks import LARGE_EXCESS, Check, Checks, mixed, of_history
from bayou.posteriors.posterior import NOISE
from bayou.predictive import Predictive
from bayou.training.rows import all_rows, some_rows

# At most 5 % of correct fits are flagged, and at least 95 % of wrong ones: experiments/measure/gate.py
# measures these rates.
SURE = 2.5  # standard errors of a significant difference
SMALL_DIFFERENCE = 0.01  # nats per example: negligible
LEVEL = 0.9  # of intervals
COVERAGE_WARNING, COVERAGE_FAILURE = 0.05, 0.15  # distance of the coverage from LEVEL
WIDE_BY_SHAPE = 0.075  # of the coverage above LEVEL, where the noise has the right variance
MIN_RESIDUAL_RATIO = (
    0.85  # of residuals to predicted standard deviations: less, and the noise is too large
)
ECE_WARNING, ECE_FAILURE = 0.02, 0.1  # expected calibration errors
CHANCE = 0.99  # quantile of the ECE by chance alone above which an ECE is flagged
MIN_VARIANCE_SHARE = 0.01  # of the variance of y: predictions that vary less do not depend on x
RESAMPLES = 400
MAX_COMPARED_FUNCTIONS = 20  # of a posterior without a mean, whose average NLL it is compared with
MAX_CHECKED_ROWS = 256  # after a fit
MAX_BASELINE_ROWS = 1000  # training rows to which the baselines are fitted after a fit
MAX_CHECK_DRAWS = 32  # functions of the posterior after a fit
MIN_CHAIN_DRAWS = 4  # for R-hat
CHAIN_ROWS = 100  # rows for the R-hat of predictions


@torch.no_grad()
def check(
    posterior: Posterior,
    train: Any = None,
    held: Any = None,
    *,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    scale: float = 1.0,
    against: dict[str, Baseline] | None = None,
    predictive: Predictive | None = None,
) -> Checks:
    """Check a posterior; the result is also stored as ``posterior.checks``.

    Without data, only its history is checked. With ``train``, data as of ``fit``: its NLL compared
    with that of a constant and of a linear model, paired over rows with a tolerance of 2.5 standard
    errors (sampling of the training rows included), on the ``held`` rows or, if there are none, on
    the training rows; R-hat of the predictions of
    chains. With ``held``: also the comparison with its own mean network, and the coverage of 90 %
    intervals, or the calibration error of classes, compared with chance.

    ``scale``: the divisor of y in standardization, for numbers in original units. ``against``:
    fitted baselines;
    ``predictive``: the posterior's prediction for these rows.
    """
    found = list(of_history(posterior))
    rows = held if held is not None else train
    if rows is not None:
        x, y = all_rows(rows)
        options: dict[str, Any] = {"samples": samples, "seed": seed, "batch_size": batch_size}
        p = posterior.predict(x, **options) if predictive is None else predictive
        y = y.to(p.outputs.device)
        where = f"{len(y):,} {'held-out' if held is not None else 'training'} rows"
        if against is None and train is not None:
            against = baselines(
                posterior.target.likelihood, *all_rows(train), p.outputs.shape[2:], seed
            )
        own, nll = (
            row_nll(p, y, scale),
            {n: row_nll(made(x), y, scale) for n, made in (against or {}).items()},
        )
        if not bool(own.isfinite().all()):
            missing = int((~own.isfinite()).sum())
            found.append(
                Check(
                    "finite",
                    "failed",
                    f"{missing:,} of {where} have no finite likelihood; do not use it",
                )
            )
        else:
            beside = _Beside(own, _luck(x, p.outputs[0, 0].numel(), posterior.target.n), where)
            found += _beside_baselines(beside, nll)
            if posterior.bayesian is not None and "linear" in nll and _flat(p, y):
                found += _collapse(nll)
            if held is not None or not any(one.name == "mode" for one in found):
                found += _beside_mode(
                    posterior, beside, p, x, y, scale, batch_size, is_held_out=held is not None
                )
        if posterior.stack is not None and not any(one.name == "mixing" for one in found):
            found += _mixing(posterior, x)
        if held is not None:
            found.append(
                _calibration(p, y, seed) if p.likelihood.support == "classes" else _coverage(p, y)
            )
    posterior.checks = Checks(
        tuple({one.name: one for one in found}.values())
    )  # a later check replaces an earlier one
    return posterior.checks


def check_after_fit(posterior: Posterior, train: Any, held: Any = None, *, seed: int = 0) -> Checks:
    """Check a posterior on some rows, at a cost that is small beside a fit; the result is
    ``posterior.checks``.

    Args:
        posterior: the posterior.
        train: training rows, as of ``fit``; the baselines are fitted to at most 1,000 of them.
        held: rows that the fit did not use, or None to check on training rows; at most 256 are
            used.
        seed: the seed of the draws of the posterior.
    """
    try:
        draws = None
        if not posterior.predicts_without_draws:
            draws = min(MAX_CHECK_DRAWS, posterior.draws or MAX_CHECK_DRAWS)
        x, y = some_rows(train, MAX_BASELINE_ROWS, seed)
        held = None if held is None else some_rows(held, MAX_CHECKED_ROWS, seed)
        outputs = posterior.predict(_first_rows(x, 1), 1, seed=seed).outputs.shape[2:]
        against = baselines(posterior.target.likelihood, x, y, outputs, seed)
        few = (_first_rows(x, MAX_CHECKED_ROWS), y[:MAX_CHECKED_ROWS])
        return check(posterior, few, held, samples=draws, seed=seed, against=against)
    except Exception as error:  # whatever is wrong with a check must not cost the user the fit
        text = (
            f"the posterior could not be compared with baselines: {type(error).__name__}: {error}"
        )
        posterior.checks = Checks((*of_history(posterior), Check("baselines", "warning", text)))
        return posterior.checks


def _first_rows(x: Any, count: int) -> Any:
    """Return the first rows of an input, or of several."""
    inputs = rows_of(forward_inputs(x), slice(count))
    return inputs if isinstance(x, tuple | list | Mapping) else inputs[0]


@final
@dataclass(frozen=True)
class _Beside:
    """NLL of the posterior (B,), the error of a difference due to its training rows, and a
    description of the rows.
    """

    own: Tensor
    luck: float
    where: str

    def excess(self, other: Tensor) -> tuple[float, float]:
        """The difference in NLL, and its standard error over test rows and training rows."""
        difference, error = _excess(self.own, other)
        return difference, math.hypot(error, self.luck)

    def words(self, other: Tensor, what: str) -> str:
        difference, error = self.excess(other)
        values = f"NLL {float(self.own.mean()):.3f}, {what} {float(other.mean()):.3f} "
        return f"{values}(difference {difference:+.3f} ± {error:.3f}, {self.where})"

    def __call__(
        self, other: Tensor, name: str, what: str, advice: str, allowance: float = SMALL_DIFFERENCE
    ) -> Check:
        """Warn, or fail, if the NLL exceeds that of ``other`` by more than chance and the
        allowance, in nats.
        """
        excess, error = self.excess(other)
        values = self.words(other, what)
        if not excess > SURE * error + allowance:
            return Check(name, "ok", values)
        is_large = excess > LARGE_EXCESS + allowance
        return Check(
            name, "failed" if is_large else "warning", f"worse than {what}: {values}; {advice}"
        )

    def constant(self, other: Tensor) -> Check:
        """A warning if it is as good as a constant; none if there are too few rows to tell."""
        excess, error = self.excess(other)
        values = self.words(other, "a constant")
        if excess > SURE * error:
            text = f"worse than a constant: {values}; do not use it; train longer"
            return Check("constant", "failed", text)
        if excess > max(-SMALL_DIFFERENCE, SURE * error - LARGE_EXCESS):
            text = f"no better than a constant: {values}; x may have no information about y"
            return Check("constant", "warning", text)
        return Check("constant", "ok", values)


def _luck(x: Any, outputs: int, rows: int) -> float:
    """½·√(D/2)/N nats: the standard error of the difference of two fits due to their common N
    training rows.

    The estimation error of D weights costs χ²_D/2N nats, with a standard deviation of √(D/2)/N, of
    which two fits share about a half; D is that of a linear model.
    """
    inputs = x[0] if isinstance(x, tuple) else x
    weights = inputs[0].numel() * outputs if isinstance(inputs, Tensor) and len(inputs) else outputs
    return 0.5 * math.sqrt(min(weights, rows) / 2) / max(rows, 1)


def _beside_baselines(beside: _Beside, nll: dict[str, Tensor]) -> list[Check]:
    found = [beside.constant(nll["constant"])] if "constant" in nll else []
    if "linear" in nll:
        advice = "use the linear model, more data, another network or longer training"
        found.append(beside(nll["linear"], "linear", "a linear model", advice))
    return found


def _beside_mode(
    posterior: Posterior,
    beside: _Beside,
    predictive: Predictive,
    x: Any,
    y: Tensor,
    scale: float,
    batch_size: int | None,
    is_held_out: bool,
) -> list[Check]:
    """Compare the posterior with the network at its mean or, without a mean, with its single
    functions on average.

    On training rows a mode is favored: the average over the functions of a linear model is up to
    ½·log(1 + h) worse there, with the leverage h of a row, ≤ 1 and D/N on average. This much is
    allowed. An average over functions is never worse than its functions on average. A single point
    has nothing to compare with.
    """
    advice = spell(
        'use the mode; for Laplace try prior="validation", for VI train longer or with a warm-up',
        "use the mode (--method map); for a variational method give more --steps or --warmup 0.4",
    )
    point = _mean_network(posterior, x, batch_size)
    if point is not None:
        weights = sum(value.numel() for value in posterior.like().values())
        leverage = min(1.0, weights / posterior.target.n)
        allowance = (
            SMALL_DIFFERENCE if is_held_out else max(LARGE_EXCESS, 0.5 * math.log1p(leverage))
        )
        nll = row_nll(point, y, scale)
        return [beside(nll, "mode", "the network at its own mean", advice, allowance)]
    count = min(len(predictive.outputs), MAX_COMPARED_FUNCTIONS)
    if count < 2:
        return []
    functions = [
        Predictive(predictive.likelihood, predictive.outputs[s : s + 1]) for s in range(count)
    ]
    nll = torch.stack([row_nll(function, y, scale) for function in functions]).mean(0)
    return [beside(nll, "mode", "its single functions on average", advice)]


def _collapse(nll: dict[str, Tensor]) -> list[Check]:
    """Predictions that do not depend on x are a collapse if a linear model is better than a
    constant.
    """
    gain, error = _excess(nll["linear"], nll["constant"])
    if not gain < -SURE * error:
        return []
    text = "the predictions hardly depend on x, but those of a linear model do: q has collapsed; start at the mode, "
    return [Check("collapse", "failed", f"{text}or use a warm-up")]


def _excess(own: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean of paired differences, own − other, and its standard error."""
    return float((own - other).mean()), metrics.standard_error(own - other) if len(
        own
    ) > 1 else math.inf


def _mean_network(posterior: Posterior, x: Any, rows: int | None) -> Predictive | None:
    """The prediction of the network at the mean of q; a mixture of points is never worse than its
    points on average.
    """
    if not posterior.centered:
        return None
    stack = {
        name: v.unsqueeze(0) for name, v in posterior.like().items() if not name.startswith(NOISE)
    }
    inputs = posterior.place(x)
    with posterior.isolated(inputs, 0):
        return posterior.tempered(
            posterior.target.likelihood, posterior.outputs(stack, inputs, rows).detach()
        )


def _flat(p: Predictive, y: Tensor) -> bool:
    mean = p.mean.detach().double().flatten(1)
    if p.likelihood.support == "classes":
        return bool((mean - mean.mean(0)).abs().sum(1).mean() < 2 * MIN_VARIANCE_SHARE)
    return bool(
        mean.var(0).mean() < MIN_VARIANCE_SHARE * y.double().reshape(len(y), -1).var(0).mean()
    )


def _mixing(posterior: Posterior, x: Any) -> list[Check]:
    """R-hat of predictions, E[y | f] of some rows: weights with permutation symmetries need not
    mix.
    """
    if posterior.chains < 2 or (posterior.draws or 0) < MIN_CHAIN_DRAWS * posterior.chains:
        return []
    inputs = rows_of(posterior.place(x), slice(CHAIN_ROWS))
    outputs = _outputs_by_chain(posterior, inputs).flatten(0, 1)
    means = (
        posterior.target.likelihood.mean(outputs).unflatten(0, (posterior.chains, -1)).flatten(2)
    )
    moving = means[..., means.flatten(0, 1).double().std(0) > 1e-6]
    if not moving.shape[-1]:
        return [Check("mixing", "failed", "the chains did not move; use a larger step size")]
    # R̂² ≈ 1 + χ²₃/(3·n) for independent draws, n = half a chain, and the worst of many rows is
    # taken.
    return [
        mixed(
            float(rhat(moving).max()),
            float(ess_bulk(moving).min()),
            " of a prediction",
            5 / means.shape[1],
        )
    ]


def _outputs_by_chain(posterior: Posterior, inputs: tuple[Any, ...], size: int = 100) -> Tensor:
    """The outputs of all points, ``size`` at a time: (chains, draws, B, *out)."""
    points = posterior.stack or {}
    stack = {name: value for name, value in points.items() if not name.startswith(NOISE)}
    starts = range(0, posterior.draws or 0, size)
    parts = [
        posterior.outputs({n: v[k : k + size] for n, v in stack.items()}, inputs) for k in starts
    ]
    return torch.cat(parts).unflatten(0, (posterior.chains, -1))


def _coverage(p: Predictive, y: Tensor) -> Check:
    share, rows = metrics.coverage(p, y, LEVEL), len(y)
    error = math.sqrt(LEVEL * (1 - LEVEL) / rows)
    said = f"{share:.1%} of {rows:,} held-out rows lie in their {LEVEL:.0%} intervals (chance: ± {error:.1%})"
    off = share - LEVEL
    if abs(off) <= max(COVERAGE_WARNING, SURE * error) or (
        off > 0 and p.likelihood.support != "real"
    ):
        return Check("coverage", "ok", said)
    if off > 0:
        return _wide_coverage(p, y, said, off)
    text = f"intervals are too narrow: {said}; use a larger noise, or select it on held-out rows"
    return Check("coverage", "failed" if off < -COVERAGE_FAILURE else "warning", text)


def _wide_coverage(p: Predictive, y: Tensor, said: str, excess: float) -> Check:
    """Tell intervals of a noise that is too large from those of residuals that are not normal.

    A normal distribution with the right variance covers more than ``LEVEL`` of bounded or of
    heavy-tailed residuals. This errs on the safe side; a smaller noise would be wrong.
    """
    variance = p.std.detach().double().reshape(len(y), -1).square()
    residual = y.detach().double().reshape(len(y), -1) - p.mean.detach().double().reshape(
        len(y), -1
    )
    ratio = math.sqrt(float((residual.square() / variance).mean()))
    if not ratio >= MIN_RESIDUAL_RATIO:
        return Check(
            "coverage",
            "warning",
            f"intervals are too wide: {said}; use a smaller noise, or learn it",
        )
    shape = f"residuals are {ratio:.2f} times as large as predicted, but not normal"
    advice = spell("bayou.conformal", "`bayou predict --conformal FILE`")
    text = f"intervals are wider than they claim: {said}, since {shape}; {advice} gives intervals of the right width"
    return Check("coverage", "ok" if excess <= WIDE_BY_SHAPE else "warning", text)


def _calibration(p: Predictive, y: Tensor, seed: int) -> Check:
    """ECE, and mean confidence minus accuracy, compared with those of classes drawn from the
    posterior predictive.

    With few rows an ECE is never 0. Classes of all rows are drawn given one function, so that
    confidences may be off together as far as functions differ.
    """
    confidence, hits = metrics.confidence_and_hits(p, y)
    confidence, hits = confidence.cpu(), hits.cpu()
    bins = torch.bucketize(
        confidence, torch.linspace(0, 1, 16, dtype=torch.float64)[1:-1].contiguous()
    )
    known = p.likelihood.labels(y)[1]
    each = p.likelihood.unweighted(p.outputs[0], y)[0].pointwise(
        p.outputs, p.probabilities.argmax(-1)
    )
    likely = each[:, known].detach().exp().double().cpu()
    u = rng.uniform(RESAMPLES, confidence.shape, confidence, rng.fold(seed, "calibration"))
    right = torch.cat(
        [hits.unsqueeze(0), (u < likely[torch.arange(RESAMPLES) % len(likely)]).double()]
    )
    gaps = torch.zeros(len(right), 15, dtype=torch.float64).index_add_(1, bins, right - confidence)
    eces = gaps.abs().sum(1) / len(hits)
    ece, chance = float(eces[0]), float(eces[1:].quantile(CHANCE))
    excess, spread = (
        float((confidence - hits).mean()),
        float(right[1:].mean(1).std()),
    )  # one number has less noise
    said = f"ECE {ece:.3f} on {len(hits):,} held-out rows (chance alone: up to {chance:.3f})"
    if ece <= max(chance, ECE_WARNING) and abs(excess) <= max(SURE * spread, ECE_WARNING):
        return Check("calibration", "ok", said)
    over = excess > 0
    advice = (
        "average more networks, or use a narrower prior"
        if over
        else "train longer, or use a wider prior"
    )
    return Check(
        "calibration", "failed" if ece > ECE_FAILURE else "warning",
        f"{'over' if over else 'under'}confident: {said}, mean confidence {float(confidence.mean()):.3f}, accuracy "
        f"{float(hits.mean()):.3f}; {advice}",
    )  # fmt: skip

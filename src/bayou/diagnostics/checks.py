"""One gate after every fit: is the posterior better than a line, no worse than its own mode, and right about itself?"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from bayou import metrics, rng
from bayou.diagnostics.baselines import Baseline, baselines
from bayou.diagnostics.chains import ess_bulk, rhat
from bayou.metrics import row_nll
from bayou.posteriors import Empirical, GaussianPosterior, Guided, Posterior
from bayou.posteriors.checks import Check, Checks, mixed, of_history
from bayou.posteriors.posterior import NOISE
from bayou.predictive import Predictive

# Of fits that are right 5 % are flagged at most, of wrong ones 95 % at least: benchmarks/gate.py measures it.
SURE = 2.5  # standard errors
MUCH, LITTLE = 0.1, 0.01  # nats an example: a difference that matters, and one that does not
LEVEL, NEAR, FAR = 0.9, 0.05, 0.15  # of intervals, and how far their coverage may be from it
FINE, BAD = 0.02, 0.1  # expected calibration errors
CHANCE = 0.99  # of calibration errors by chance that are below what is flagged
FLAT = 0.01  # of the variance of y: predictions that vary less do not depend on x
RESAMPLES = 400
LEAST = 4  # draws of a chain that R-hat needs
CHAIN_ROWS = 100  # rows whose predictions are followed along the chains


@torch.no_grad()
def check(
    posterior: Posterior,
    train: tuple[Any, Tensor] | None = None,
    held: tuple[Any, Tensor] | None = None,
    *,
    samples: int | None = None,
    seed: int = 0,
    batch_size: int | None = None,
    scale: float = 1.0,
    against: dict[str, Baseline] | None = None,
    predictive: Predictive | None = None,
) -> Checks:
    """The findings about a posterior, also kept as ``posterior.checks``.

    Without data, what its history tells. With ``train`` = (x, y): its NLL beside that of a constant and of a linear
    model, a paired comparison with a tolerance of 2.5 standard errors over rows (those of training included), on the
    ``held`` rows or, without any, on the training rows; R-hat of the predictions of chains. With ``held``: the same
    beside its own mean network, and the coverage of 90 % intervals, or the calibration error of classes, against what
    chance allows.

    ``scale``: what y was divided by, for numbers in original units. ``against``: baselines that were fitted before;
    ``predictive``: the posterior's prediction for these rows.
    """
    found = list(of_history(posterior))
    rows = held if held is not None else train
    if rows is not None:
        x, y = rows
        options: dict[str, Any] = {"samples": samples, "seed": seed, "batch_size": batch_size}
        p = posterior.predict(x, **options) if predictive is None else predictive
        y = y.to(p.outputs.device)
        where = f"{len(y):,} {'held-out' if held is not None else 'training'} rows"
        if against is None and train is not None:
            against = baselines(posterior.target.likelihood, *train, p.outputs.shape[2:], seed)
        own, nll = row_nll(p, y, scale), {n: row_nll(made(x), y, scale) for n, made in (against or {}).items()}
        if not bool(own.isfinite().all()):
            missing = int((~own.isfinite()).sum())
            found.append(Check("finite", "failed", f"{missing:,} of {where} have no finite likelihood; do not use it"))
        else:
            beside = _Beside(own, _luck(x, p.outputs[0, 0].numel(), posterior.target.n), where)
            found += _beside_baselines(beside, nll)
            if isinstance(posterior, Guided) and "linear" in nll and _flat(p, y):
                found += _collapse(nll)
            # On the rows of training a mode is better than any average over functions, and no worse for it elsewhere.
            if held is not None and (point := _mean_network(posterior, x, batch_size)) is not None:
                way = 'take the mode; for Laplace try prior="validation", for VI train longer or with a warm-up'
                what = "the network at its own mean"
                found.append(beside(row_nll(point, y, scale), "mode", what, way))
        if isinstance(posterior, Empirical) and not any(one.name == "mixing" for one in found):
            found += _mixing(posterior, x)
        if held is not None:
            found.append(_calibration(p, y, seed) if p.likelihood.support == "classes" else _coverage(p, y))
    posterior.checks = Checks(tuple({one.name: one for one in found}.values()))  # the later finding knows more
    return posterior.checks


@final
@dataclass(frozen=True)
class _Beside:
    """NLL of the posterior (B,), the luck of its training rows in a difference to others, and which rows these are."""

    own: Tensor
    luck: float
    where: str

    def excess(self, other: Tensor) -> tuple[float, float]:
        """How much more NLL it has, and the standard error of that over test rows and training rows."""
        difference, error = _excess(self.own, other)
        return difference, math.hypot(error, self.luck)

    def words(self, other: Tensor, what: str) -> str:
        difference, error = self.excess(other)
        values = f"NLL {float(self.own.mean()):.3f}, {what} {float(other.mean()):.3f} "
        return f"{values}(difference {difference:+.3f} ± {error:.3f}, {self.where})"

    def __call__(self, other: Tensor, name: str, what: str, way: str) -> Check:
        excess, error = self.excess(other)
        values = self.words(other, what)
        if not excess > SURE * error:
            return Check(name, "ok", values)
        return Check(name, "failed" if excess > MUCH else "warning", f"worse than {what}: {values}; {way}")

    def constant(self, other: Tensor) -> Check:
        """To be as good as a constant is a finding; not to be told from one for want of rows is none."""
        excess, error = self.excess(other)
        values = self.words(other, "a constant")
        if excess > SURE * error:
            way = "do not use it: is it trained to the end?"
            return Check("constant", "failed", f"worse than a constant: {values}; {way}")
        if excess > max(-LITTLE, SURE * error - MUCH):
            return Check("constant", "warning", f"no better than a constant: {values}; x may say nothing about y")
        return Check("constant", "ok", values)


def _luck(x: Any, outputs: int, rows: int) -> float:
    """½·√(D/2)/N nats: what a difference of two fits to the same N rows owes to these rows.

    D weights lose χ²_D/2N nats by what they were learned from, with a standard deviation of √(D/2)/N, of which two fits
    share about a half; D is that of a linear model.
    """
    inputs = x[0] if isinstance(x, tuple) else x
    weights = inputs[0].numel() * outputs if isinstance(inputs, Tensor) and len(inputs) else outputs
    return 0.5 * math.sqrt(min(weights, rows) / 2) / max(rows, 1)


def _beside_baselines(beside: _Beside, nll: dict[str, Tensor]) -> list[Check]:
    found = [beside.constant(nll["constant"])] if "constant" in nll else []
    if "linear" in nll:
        way = "use the linear model, or give more data, another network or a longer training"
        found.append(beside(nll["linear"], "linear", "a linear model", way))
    return found


def _collapse(nll: dict[str, Tensor]) -> list[Check]:
    """Predictions do not depend on x: a collapse where a line shows that they should."""
    gain, error = _excess(nll["linear"], nll["constant"])
    if not gain < -SURE * error:
        return []
    text = "the predictions hardly depend on x where a linear model finds that y does: q has collapsed; begin at the "
    return [Check("collapse", "failed", f"{text}mode, or give a warm-up")]


def _excess(own: Tensor, other: Tensor) -> tuple[float, float]:
    """Mean of paired differences, own − other, and its standard error."""
    return float((own - other).mean()), metrics.standard_error(own - other) if len(own) > 1 else math.inf


def _mean_network(posterior: Posterior, x: Any, rows: int | None) -> Predictive | None:
    """The prediction of the network at the mean of q; a mixture of points is never worse than its points on average."""
    if not isinstance(posterior, Guided | GaussianPosterior):
        return None
    stack = {name: v.unsqueeze(0) for name, v in posterior.like().items() if not name.startswith(NOISE)}
    inputs = posterior._place(x)
    with posterior._isolated(inputs, 0):
        return posterior._tempered(posterior.target.likelihood, posterior._outputs(stack, inputs, rows).detach())


def _flat(p: Predictive, y: Tensor) -> bool:
    mean = p.mean.detach().double().flatten(1)
    if p.likelihood.support == "classes":
        return bool((mean - mean.mean(0)).abs().sum(1).mean() < 2 * FLAT)
    return bool(mean.var(0).mean() < FLAT * y.double().reshape(len(y), -1).var(0).mean())


def _mixing(posterior: Empirical, x: Any) -> list[Check]:
    """R-hat of what is predicted, E[y | f] of some rows: weights that can be exchanged never mix, and need not."""
    if posterior.chains < 2 or posterior.draws < LEAST * posterior.chains:
        return []
    inputs = tuple(i[:CHAIN_ROWS] if isinstance(i, Tensor) else i for i in posterior._place(x))
    stack = {name: v for name, v in posterior.stack.items() if not name.startswith(NOISE)}
    outputs = torch.cat(
        [
            posterior._outputs({n: v[k : k + 100] for n, v in stack.items()}, inputs)
            for k in range(0, posterior.draws, 100)
        ]
    )
    means = posterior.target.likelihood.mean(outputs).unflatten(0, (posterior.chains, -1)).flatten(2)
    moving = means[..., means.flatten(0, 1).double().std(0) > 1e-6]
    if not moving.shape[-1]:
        return [Check("mixing", "failed", "the chains did not move; take a larger step size")]
    # R̂² ≈ 1 + χ²₃/(3·n) for independent draws, n = half a chain, and the worst of many rows is taken.
    return [mixed(float(rhat(moving).max()), float(ess_bulk(moving).min()), " of a prediction", 5 / means.shape[1])]


def _coverage(p: Predictive, y: Tensor) -> Check:
    share, rows = metrics.coverage(p, y, LEVEL), len(y)
    error = math.sqrt(LEVEL * (1 - LEVEL) / rows)
    said = f"{share:.1%} of {rows:,} held-out rows lie in their {LEVEL:.0%} intervals (chance: ± {error:.1%})"
    off = share - LEVEL
    if abs(off) <= max(NEAR, SURE * error) or (off > 0 and p.likelihood.support != "real"):
        return Check("coverage", "ok", said)
    if off > 0:
        return Check("coverage", "warning", f"intervals are too wide: {said}; take a smaller noise, or learn it")
    way = "take a larger noise, or choose it on held-out rows"
    return Check("coverage", "failed" if off < -FAR else "warning", f"intervals are too narrow: {said}; {way}")


def _calibration(p: Predictive, y: Tensor, seed: int) -> Check:
    """ECE, and mean confidence less accuracy, against those of classes which are drawn from the functions themselves.

    With few rows an ECE is never 0. A function is drawn, and classes from it: as far as functions differ, confidences
    may be off together.
    """
    confidence, hits = metrics.confidence_and_hits(p, y)
    confidence, hits = confidence.cpu(), hits.cpu()
    bins = torch.bucketize(confidence, torch.linspace(0, 1, 16, dtype=torch.float64)[1:-1].contiguous())
    likely = p.likelihood.pointwise(p.outputs, p.probabilities.argmax(-1)).detach().exp().double().flatten(1).cpu()
    u = rng.uniform(RESAMPLES, confidence.shape, confidence, rng.fold(seed, "calibration"))
    right = torch.cat([hits.unsqueeze(0), (u < likely[torch.arange(RESAMPLES) % len(likely)]).double()])
    gaps = torch.zeros(len(right), 15, dtype=torch.float64).index_add_(1, bins, right - confidence)
    eces = gaps.abs().sum(1) / len(hits)
    ece, chance = float(eces[0]), float(eces[1:].quantile(CHANCE))
    excess, spread = float((confidence - hits).mean()), float(right[1:].mean(1).std())  # one number has less noise
    said = f"ECE {ece:.3f} on {len(hits):,} held-out rows (chance alone: up to {chance:.3f})"
    if ece <= max(chance, FINE) and abs(excess) <= max(SURE * spread, FINE):
        return Check("calibration", "ok", said)
    over = excess > 0
    way = "average more networks, or take a narrower prior" if over else "train longer, or take a wider prior"
    return Check(
        "calibration", "failed" if ece > BAD else "warning",
        f"{'over' if over else 'under'}confident: {said}, mean confidence {float(confidence.mean()):.3f}, accuracy "
        f"{float(hits.mean()):.3f}; {way}",
    )  # fmt: skip

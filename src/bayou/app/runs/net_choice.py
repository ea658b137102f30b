"""The default network of a large table: the better of two on held-out rows."""

from __future__ import annotations

import time
from typing import Any, Final

import torch
from torch import Tensor

from bayou.app.runs import nets
from bayou.core import rng
from bayou.likelihoods import Gaussian, Likelihood
from bayou.likelihoods.named import NOISE
from bayou.methods.point import MAP
from bayou.metrics import standard_error
from bayou.network.target import Target
from bayou.select.best_method import held_out_nll, without_warnings
from bayou.select.judgment import Residuals
from bayou.select.named import POINT_LR
from bayou.select.noise_and_prior import with_default_prior
from bayou.select.search_run import stage_record
from bayou.training.data import Rows, as_data

MAX_COMPARED_ROWS: Final = 10_000  # training rows that decide, a random sample of more
HELD_OUT_FRACTION: Final = 0.2
# Of the short fits: a point estimate, stopped early by further rows.
FIT: Final[dict[str, Any]] = {
    "lr": POINT_LR / 2,
    "batch_size": 256,
    "epochs": 60,
    "validation": 0.2,
    "patience": 8,
    "schedule": "constant",
}


def choose_net(
    plain: str, x: Tensor, y: Tensor, outputs: int, likelihood: Likelihood | None, seed: int
) -> nets.NetChoice:
    """Compare the default network without bins with that of tables on held-out rows.

    Both are fitted to four fifths of the training rows, as points and stopped early, which takes a
    small part of the time of a fit. The one with the lower NLL of the other rows is chosen; where
    columns act smoothly that is the one without bins.

    Args:
        plain: the name of the network without bins.
        x: standardized training rows, (N, D).
        y: their targets.
        outputs: numbers for each row.
        likelihood: p(y | f) of standardized y; None for targets in any units, whose standardized
            values, or logarithms where all are positive, are compared with Gaussian noise.
        seed: of the split, the initial weights and the fits.
    """
    started = time.perf_counter()
    if likelihood is None:
        y = _standardized_targets(y)
        outputs = 1
        likelihood = Gaussian(NOISE, learn=True)
    order = rng.permutation(len(x), rng.fold(seed, "net"))[:MAX_COMPARED_ROWS].to(x.device)
    rows = as_data((x[order], y[order]), FIT["batch_size"])
    if not isinstance(rows, Rows):
        raise TypeError("tensors have rows")
    training, held_out = rows.split(HELD_OUT_FRACTION, seed)
    losses = {
        name: _held_out_losses(name, training, held_out, outputs, likelihood, seed)
        for name in (plain, nets.TABLE_NET)
    }
    difference = losses[nets.TABLE_NET] - losses[plain]
    best = nets.TABLE_NET if float(difference.mean()) < 0 else plain
    trials = [{"net": name, "nll": float(loss.mean())} for name, loss in losses.items()]
    note = (
        f"Network: {best}, chosen by {held_out.n:,} held-out training rows, where the NLL of "
        f"{nets.TABLE_NET} minus that of {plain} is {float(difference.mean()):+.3f} ± "
        f"{standard_error(difference):.3f}."
    )
    return nets.NetChoice(best, note, stage_record("network", started, trials))


def _standardized_targets(y: Tensor) -> Tensor:
    """Return the first number of each target, or its logarithm, with mean 0 and deviation 1."""
    values = y.reshape(len(y), -1)[:, :1]
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    if bool((values > 0).all()):
        values = values.log()
    scale = values.std(correction=0).clamp_min(torch.finfo(values.dtype).tiny)
    return (values - values.mean()) / scale


def _held_out_losses(
    name: str, training: Rows, held_out: Rows, outputs: int, likelihood: Likelihood, seed: int
) -> Tensor:
    """Return −log p of the held-out rows under a short fit of a network."""
    x = training.source[0]
    layout = nets.layout_for(name, x[training.index])
    net = nets.build(name, tuple(x.shape[1:]), outputs, seed, layout).to(x)
    target = with_default_prior(Target.build(net, likelihood, None, training.n))
    with without_warnings(), torch.enable_grad():
        posterior = MAP(**FIT).fit(target, training, seed=seed, progress=False)
    if target.likelihood.gaussian_noise is None:
        return held_out_nll(posterior, held_out, seed)
    residuals = Residuals.of(posterior, held_out, seed)
    return residuals.log_density_loss(residuals.likeliest_noise())

"""Stacking: weights of posteriors by the density of held-out rows under their mixture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from bayou.metrics import row_nll, standard_error
from bayou.posteriors import Posterior
from bayou.posteriors.mixture import Mixture
from bayou.training.rows import all_rows

PULL: Final = 2.0  # pseudo-rows, by simulation: best for 40 to 3,000 rows and 4 posteriors
MIN_WEIGHT: Final = 0.005  # of a component; half of one of 100 draws
MIN_PULL: Final = 1e-6  # what keeps weights above 0 while they are searched
MAX_NEWTON_STEPS: Final = 200
SUFFICIENT_DECREASE: Final = 0.25  # of that predicted by the slope (Armijo)


def stack(
    posteriors: Sequence[Posterior] | Mapping[str, Posterior],
    rows: Any,
    *,
    pull: float = PULL,
    samples: int | None = None,
    seed: int = 0,
) -> Mixture:
    """Return the mixture of posteriors that predicts held-out rows best.

    Its weights maximize Σ_i log Σ_k w_k p_k(y_i | x_i) + pull/K·Σ_k log w_k. The sum over rows is
    concave in w. The second term pulls toward equal weights, as ``pull`` further rows would that
    every posterior predicts equally well and no other explains: with few rows the weights stay near
    1/K, with many it does not matter. Posteriors of a weight below .005 are left out.

    The posteriors must not have been fitted to these rows, or the most overfitted one gets all the
    weight. After stacking, they may be fitted again to all rows: ``Mixture(refitted, weights)``.
    The name "auto" does this.

    Args:
        posteriors: K posteriors of the same y, which may differ in method, length or network; a
            dict of them has their names for ``choice``.
        rows: a pair (x, y), a Dataset or a DataLoader, which the fits have not seen.
        pull: the number of pseudo-rows, 2 by default: the weights of 40 to 600
            rows then lose least by the choice of rows.
        samples: draws of each posterior; None for the default of ``predict``.
        seed: of the draws.

    Returns:
        The mixture; ``choice`` states its weights, and ``selection`` the NLL of each posterior and
        of the mixture on these rows.

    Raises:
        ValueError: for no posteriors, no rows, or a pull that is not positive.

    Example::

        fits = {name: bayou.fit(net, train, name) for name in ("ensemble", "laplace", "mnf")}
        posterior = bayou.stack(fits, held_out)
        print(posterior.choice)

    Paper: Yao, Vehtari, Simpson & Gelman 2018, https://arxiv.org/abs/1704.02030.
    """
    named = _with_names(posteriors)
    if not named:
        raise ValueError("stack needs at least one posterior, got none")
    x, y = all_rows(rows)
    losses = {
        name: row_nll(posterior.predict(x, samples, seed=seed), y)
        for name, posterior in named.items()
    }
    weights = dict(zip(losses, stacking_weights(losses, pull).tolist(), strict=True))
    weights = keep_largest(weights, MIN_WEIGHT)
    posterior = Mixture([named[name] for name in weights], list(weights.values()))
    posterior.stopped = "finished"
    posterior.choice = describe_stack(losses, weights)
    posterior.selection = [{"stage": "stack", "seconds": 0.0, "trials": stack_trials(losses)}]
    return posterior


def _with_names(
    posteriors: Sequence[Posterior] | Mapping[str, Posterior],
) -> dict[str, Posterior]:
    """Return posteriors by name, those without one by their place."""
    if isinstance(posteriors, Mapping):
        return dict(posteriors)
    return {f"posterior {number}": posterior for number, posterior in enumerate(posteriors)}


def stacking_weights(losses: Mapping[str, Tensor], pull: float = PULL) -> Tensor:
    """Return the weights that maximize Σ_i log Σ_k w_k p_ik + pull/K·Σ_k log w_k.

    Newton's method on the simplex, with steps that stay inside; the function is strictly concave,
    so that the start does not matter.

    Args:
        losses: −log p of every row, (N,) in nats, by name; infinite for a density of 0.
        pull: pseudo-rows with equal weights; positive.

    Returns:
        The weights in float64, (K,), with the sum 1.

    Raises:
        ValueError: if there are no rows, no posterior has a positive density at some row, or the
            pull is not positive.
    """
    log_density = -torch.stack([values.double() for values in losses.values()], 1)
    rows, count = log_density.shape
    if rows == 0:
        raise ValueError("stacking needs held-out rows, got none")
    if not pull > 0:
        raise ValueError(f"pull must be a positive number of rows, got {pull!r}")
    highest = log_density.amax(1, keepdim=True)
    if not bool(highest.isfinite().all()):
        raise ValueError(
            "some held-out row has no density under any posterior (or NaN); check these rows"
        )
    density = (log_density - highest).exp()
    strength = max(pull, MIN_PULL) / count
    weights = torch.full((count,), 1 / count, dtype=torch.float64)
    for _ in range(MAX_NEWTON_STEPS):
        direction, decrease = _newton_direction(density, weights, strength)
        if decrease < 1e-14 * (rows + pull):
            break
        weights = _step_inside(density, weights, strength, direction, decrease)
    return weights / weights.sum()


def _objective(density: Tensor, weights: Tensor, strength: float) -> float:
    """Compute −Σ_i log Σ_k w_k p_ik − strength·Σ_k log w_k."""
    return -float((density @ weights).log().sum() + strength * weights.log().sum())


def _newton_direction(density: Tensor, weights: Tensor, strength: float) -> tuple[Tensor, float]:
    """Return the Newton direction with the sum 0, and the decrease per unit along it."""
    ratio = density / (density @ weights).unsqueeze(1)
    gradient = -ratio.sum(0) - strength / weights
    hessian = ratio.T @ ratio + torch.diag(strength / weights.square())
    # In units of the weights, in which the matrix is well conditioned near the boundary.
    scaled_hessian = weights.unsqueeze(1) * hessian * weights
    solutions = torch.linalg.solve(
        scaled_hessian, torch.stack([weights * gradient, weights], 1)
    ) * weights.unsqueeze(1)
    multiplier = solutions[:, 0].sum() / solutions[:, 1].sum()
    direction = multiplier * solutions[:, 1] - solutions[:, 0]
    return direction, -float(gradient @ direction)


def _step_inside(
    density: Tensor, weights: Tensor, strength: float, direction: Tensor, decrease: float
) -> Tensor:
    """Return weights along a direction that are positive and decrease the objective enough."""
    shrinking = direction < 0
    limit = 1.0
    if bool(shrinking.any()):
        limit = min(1.0, 0.95 * float((weights / -direction)[shrinking].min()))
    before = _objective(density, weights, strength)
    step = limit
    while step > 1e-12:
        moved = weights + step * direction
        gain = before - _objective(density, moved, strength)
        if gain >= SUFFICIENT_DECREASE * step * decrease:
            return moved
        step /= 2
    return weights


def keep_largest(
    weights: Mapping[str, float], least: float, most: int | None = None
) -> dict[str, float]:
    """Return the weights of at least a limit, at most so many, divided by their sum.

    Args:
        weights: by name, with the sum 1.
        least: the smallest weight to keep; the largest one is always kept.
        most: how many to keep; None for all.
    """
    order = sorted(weights, key=lambda name: -weights[name])[:most]
    kept = [name for name in order if weights[name] >= least or name == order[0]]
    total = sum(weights[name] for name in kept)
    return {name: weights[name] / total for name in weights if name in kept}


def mixture_loss(losses: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """Return −log Σ_k w_k p_k(y_i) of every row, (N,).

    Args:
        losses: −log p of every row by name.
        weights: by name; names without one have weight 0.
    """
    shift = torch.stack([losses[name].double() for name in weights]).amin(0)
    terms = [weight * torch.exp(shift - losses[name].double()) for name, weight in weights.items()]
    return shift - torch.stack(terms).sum(0).log()


def stack_trials(losses: Mapping[str, Tensor]) -> list[dict[str, Any]]:
    """Return the mean NLL of every posterior, for the record of the stage.

    Args:
        losses: −log p of every row by name.
    """
    return [{"method": name, "nll": float(values.mean())} for name, values in losses.items()]


def describe_stack(
    losses: Mapping[str, Tensor], weights: Mapping[str, float], mixed: Tensor | None = None
) -> str:
    """Return a sentence with the weights, and the NLL of the mixture and of each posterior.

    Args:
        losses: −log p of every held-out row by name.
        weights: those that were kept, by name.
        mixed: −log p of every row under the mixture, if its components have temperatures; None to
            compute it.
    """
    if mixed is None:
        mixed = mixture_loss(losses, weights)
    differences = ", ".join(
        f"{name} {float((values - mixed).mean()):+.3f} ± {standard_error(values - mixed):.3f}"
        for name, values in losses.items()
        if len(weights) > 1 or name not in weights or not torch.equal(values, mixed)
    )
    rows = f"{len(mixed):,} held-out rows"
    if len(weights) > 1:
        terms = " + ".join(f"{weight:.2f} {name}" for name, weight in weights.items())
        head = f"the mixture {terms} was selected: its weights predict {rows} best"
    else:
        (name,) = weights
        head = f"{name} was selected: it has nearly all the weight in the best mixture for {rows}"
    beside = f", differences {differences}" if differences else ""
    return f"{head}, NLL {float(mixed.mean()):.3f}{beside} nats"

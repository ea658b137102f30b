"""The ratio of the densities of new and held-out inputs, by a classifier or by two flows."""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.flows import Flow, StandardNormal, fit as fit_flow, spline_autoregressive
from bayou.likelihoods import Bernoulli
from bayou.methods import MAP
from bayou.operations.conformal.weights import EffectiveRowsWarning, RowWeights
from bayou.posteriors import Posterior
from bayou.priors import Normal
from bayou.select.fit import fit

Estimator = Literal["logistic", "network", "flows"]
FOLDS: dict[str, int] = {"logistic": 5, "network": 3, "flows": 2}
MAX_WEIGHT = 50.0  # the default bound of a ratio whose mean over held-out rows is 1
RIDGE = 1.0  # penalty of the standardized coefficients of a logistic regression
NEWTON_STEPS = 50
NEWTON_TOLERANCE = 1e-10  # of the largest change of a coefficient
NETWORK_UNITS = 32
NETWORK_STEPS = 400
NETWORK_GAIN = 2.0  # of the prior, for the log-ratios of a strong shift
FLOW_STEPS = 250
FLOW_BATCH_ROWS = 512
MIN_DISTINCT_FRACTION = 0.5  # of the values of an input that a density can describe
MIN_FOLD_ROWS = 10
MEAN_WEIGHTS = (0.5, 1.5)  # of held-out rows; 1 for a ratio of densities


class LogRatio(ABC):
    """An estimate of log q(x)/p(x), up to a constant, from rows of both densities."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return log q(x)/p(x), (B,).

        Args:
            x: standardized inputs, float64 (B, D).
        """


@final
class LogisticRatio(LogRatio):
    """log q(x)/p(x) = a + bᵀx by logistic regression with a ridge penalty, fitted by Newton steps.

    Args:
        held_out: standardized rows of p, (n, D).
        new: standardized rows of q, (m, D).
    """

    def __init__(self, held_out: Tensor, new: Tensor) -> None:
        rows = torch.cat([held_out, new])
        design = torch.cat([rows, torch.ones_like(rows[:, :1])], 1)
        is_new = torch.arange(len(rows)) >= len(held_out)
        penalty = torch.full((design.shape[1],), RIDGE, dtype=design.dtype)
        penalty[-1] = 0.0
        coefficients = torch.zeros_like(penalty)
        for _ in range(NEWTON_STEPS):
            probability = torch.sigmoid(design @ coefficients)
            gradient = design.T @ (probability - is_new.to(design)) + penalty * coefficients
            curvature = (probability * (1 - probability)).unsqueeze(1) * design
            hessian = design.T @ curvature + penalty.diag()
            step = torch.linalg.solve(hessian, gradient)
            step = step / step.abs().amax().clamp_min(1.0)  # a longer one may leave the region
            coefficients = coefficients - step
            if float(step.abs().amax()) < NEWTON_TOLERANCE:
                break
        self.coefficients = coefficients
        self.log_odds = math.log(len(new) / len(held_out))

    def __call__(self, x: Tensor) -> Tensor:
        return x @ self.coefficients[:-1] + self.coefficients[-1] - self.log_odds


@final
class NetworkRatio(LogRatio):
    """log q(x)/p(x) is the logit of a small network that separates rows of q from rows of p.

    Args:
        held_out: standardized rows of p, (n, D).
        new: standardized rows of q, (m, D).
        seed: of the network and its fit.
    """

    def __init__(self, held_out: Tensor, new: Tensor, seed: int) -> None:
        rows = torch.cat([held_out, new]).float()
        is_new = (torch.arange(len(rows)) >= len(held_out)).float().unsqueeze(1)
        with rng.isolated(seed, torch.device("cpu")):
            net = nn.Sequential(
                nn.Linear(rows.shape[1], NETWORK_UNITS),
                nn.SiLU(),
                nn.Linear(NETWORK_UNITS, NETWORK_UNITS),
                nn.SiLU(),
                nn.Linear(NETWORK_UNITS, 1),
            )
        self.posterior: Posterior = fit(
            net,
            (rows, is_new),
            MAP(steps=NETWORK_STEPS, lr=1e-2, batch_size=256),
            likelihood=Bernoulli(),
            prior=Normal("fan_in", gain=NETWORK_GAIN),
            seed=seed,
            progress=False,
        )
        self.log_odds = math.log(len(new) / len(held_out))

    def __call__(self, x: Tensor) -> Tensor:
        logits = self.posterior.predict(x.float(), seed=0).outputs[0, :, 0]
        return logits.double() - self.log_odds


@final
class FlowRatio(LogRatio):
    """log q(x) − log p(x) of two normalizing flows, each fitted to the rows of one density.

    Args:
        held_out: standardized rows of p, (n, D).
        new: standardized rows of q, (m, D).
        seed: of the flows and their fits.
    """

    def __init__(self, held_out: Tensor, new: Tensor, seed: int) -> None:
        self.of_held_out = InputDensity(held_out, seed)
        self.of_new = InputDensity(new, seed)

    def __call__(self, x: Tensor) -> Tensor:
        return self.of_new.log_prob(x) - self.of_held_out.log_prob(x)


@final
class InputDensity:
    """The density of inputs by a flow, fitted to them after they are standardized.

    Args:
        rows: inputs, (n, D).
        seed: of the flow and its fit.
    """

    def __init__(self, rows: Tensor, seed: int) -> None:
        dim = rows.shape[1]
        self.mean = rows.mean(0)
        self.std = rows.std(0)
        with rng.isolated(seed, torch.device("cpu")):
            transform = spline_autoregressive(dim, layers=2, hidden=(16,), bins=4)
        self.flow = Flow(StandardNormal(dim), transform)
        standardized = ((rows - self.mean) / self.std).float()
        fit_flow(
            self.flow,
            standardized,
            steps=FLOW_STEPS,
            batch_size=FLOW_BATCH_ROWS,
            seed=seed,
            progress=False,
        )

    @torch.no_grad()
    def log_prob(self, x: Tensor) -> Tensor:
        """Return the log-density of inputs, (B,).

        Args:
            x: inputs, (B, D).
        """
        standardized = ((x - self.mean) / self.std).float()
        return self.flow.log_prob(standardized).double() - self.std.log().sum()


@final
class DensityRatio(RowWeights):
    """w(x) ≈ q(x)/p(x), new inputs over held-out ones; see ``density_ratio``.

    Args:
        held_out: the cross-fitted weights of the held-out rows, (n,).
        models: the estimates of the log-ratio, one for each fold.
        mean: what is subtracted from inputs, (D,).
        std: what inputs are divided by then, (D,).
        max_weight: the bound of the weights.
    """

    def __init__(
        self,
        held_out: Tensor,
        models: list[LogRatio],
        mean: Tensor,
        std: Tensor,
        max_weight: float,
    ) -> None:
        super().__init__(held_out)
        self.models = models
        self.mean = mean
        self.std = std
        self.max_weight = max_weight

    def __call__(self, x: Any) -> Tensor:
        rows = as_columns(x, "x")
        if rows.shape[1] != len(self.mean):
            raise ValueError(
                f"the density ratio was estimated from rows of {len(self.mean)} numbers, got rows "
                f"of {rows.shape[1]}"
            )
        standardized = (rows - self.mean) / self.std
        log_ratio = torch.stack([model(standardized) for model in self.models]).mean(0)
        return clip_ratio(log_ratio, self.max_weight)


def density_ratio(
    held_out: object,
    new: object,
    *,
    by: Estimator = "logistic",
    folds: int | None = None,
    max_weight: float = MAX_WEIGHT,
    seed: int = 0,
) -> DensityRatio:
    """Estimate w(x) = q(x)/p(x), the density of new inputs over that of held-out inputs.

    - "logistic": a logistic regression separates new from held-out rows; w(x) is its odds times
      n/m. Right if log w is linear in x, as for a shift of means;
    - "network": a network with two hidden layers does so;
    - "flows": two normalizing flows, q fitted to new rows and p to held-out ones. Inputs must be
      continuous.

    A model that has seen a held-out row underestimates its weight. The weights of held-out rows are
    therefore those of models that were fitted without them (cross-fitting). New rows have the
    geometric mean over these models.

    Args:
        held_out: inputs of the held-out rows, (n, ...); axes after the first are flattened.
        new: unlabeled inputs of new rows, (m, ...).
        by: "logistic" (the default), "network" or "flows".
        folds: the number of parts for cross-fitting; by default 5 for "logistic", 3 for "network"
            and 2 for "flows".
        max_weight: weights are clipped here, 50 by default; their mean over held-out rows is about
            1.
        seed: of folds and fits.

    Returns:
        Weights for ``conformal(..., weights=...)``: ``held_out`` (n,), a function of x, and
        ``effective_rows``.

    Raises:
        ValueError: if inputs are not tensors of numbers, are too few, or are discrete or constant
            with "flows".

    Example:
        >>> ratio = bayou.operations.density_ratio(x_held, x_new, by="flows")
        >>> c = bayou.conformal(posterior, (x_held, y_held), weights=ratio)

    References:
        Tibshirani, Barber, Candès, Ramdas: Conformal prediction under covariate shift, NeurIPS
        2019. Sugiyama, Suzuki, Kanamori: Density ratio estimation in machine learning, 2012.
    """
    if by not in FOLDS:
        raise ValueError(f"by must be one of {', '.join(FOLDS)}, got {by!r}")
    if not 1 < max_weight < math.inf:
        raise ValueError(f"max_weight must be a number above 1, got {max_weight!r}")
    rows = as_columns(held_out, "held_out")
    new_rows = as_columns(new, "new")
    if rows.shape[1] != new_rows.shape[1]:
        raise ValueError(
            f"held_out has rows of {rows.shape[1]} numbers and new of {new_rows.shape[1]}; they "
            "must be inputs of one network"
        )
    folds = FOLDS[by] if folds is None else folds
    _check_folds(folds, len(rows), len(new_rows))
    pooled = torch.cat([rows, new_rows])
    mean = pooled.mean(0)
    std = pooled.std(0)
    std = torch.where(std > 0, std, torch.ones_like(std))
    rows = (rows - mean) / std
    new_rows = (new_rows - mean) / std
    if by == "flows":
        _check_continuous(rows, "held_out")
        _check_continuous(new_rows, "new")
    seed = rng.integer(seed)
    fold_of_row = rng.permutation(len(rows), rng.fold(seed, "held-out rows")) % folds
    fold_of_new = rng.permutation(len(new_rows), rng.fold(seed, "new rows")) % folds
    log_ratio = torch.empty(len(rows), dtype=rows.dtype)
    models: list[LogRatio] = []
    for fold in range(folds):
        is_left_out = fold_of_row == fold
        fold_seed = rng.integer(rng.fold(seed, "fold", fold))
        model = _fit_ratio(by, rows[~is_left_out], new_rows[fold_of_new != fold], fold_seed)
        log_ratio[is_left_out] = model(rows[is_left_out])
        models.append(model)
    weights = clip_ratio(log_ratio, max_weight)
    _warn_if_no_ratio(float(weights.mean()))
    return DensityRatio(weights, models, mean, std, max_weight)


@torch.enable_grad()
def _fit_ratio(by: Estimator, held_out: Tensor, new: Tensor, seed: int) -> LogRatio:
    """Fit the estimate of one fold."""
    if by == "logistic":
        return LogisticRatio(held_out, new)
    if by == "network":
        return NetworkRatio(held_out, new, seed)
    return FlowRatio(held_out, new, seed)


def as_columns(x: object, name: str) -> Tensor:
    """Return inputs as float64 (rows, D) on the CPU.

    Args:
        x: a tensor of numbers, (rows, ...).
        name: of the argument, for messages.

    Raises:
        ValueError: if x is no tensor, or has values that are not finite.
    """
    if not isinstance(x, Tensor) or x.ndim == 0:
        raise ValueError(
            f"{name} must be a tensor of inputs (rows, ...), got {type(x).__name__}; for other "
            "inputs give weights= as numbers or a function"
        )
    columns = x.detach().reshape(len(x), -1).double().cpu()
    if not bool(columns.isfinite().all()):
        raise ValueError(f"{name} has values that are not finite; impute them first")
    return columns


def clip_ratio(log_ratio: Tensor, max_weight: float) -> Tensor:
    """Return exp(log_ratio), at most ``max_weight``.

    Args:
        log_ratio: of the rows, (n,).
        max_weight: the bound.
    """
    return log_ratio.clamp_max(math.log(max_weight)).exp()


def _warn_if_no_ratio(mean_weight: float) -> None:
    """Warn if the weights of held-out rows are far from the mean of 1 that a density ratio has."""
    lowest, highest = MEAN_WEIGHTS
    if not lowest < mean_weight < highest:
        warnings.warn(
            f"the weights of held-out rows average {mean_weight:.3g} and not about 1. Below 1 many "
            "new rows lie where there are no held-out rows, and have infinite or uncertain "
            "intervals or sets: hold out rows like them. Above 1 the estimate is poor: use "
            "another by=, or more rows",
            EffectiveRowsWarning,
            stacklevel=3,
        )


def _check_folds(folds: int, held_out: int, new: int) -> None:
    """Raise a ValueError if the number of folds is no whole number from 2 on, or rows are few."""
    if isinstance(folds, bool) or not isinstance(folds, int) or folds < 2:
        raise ValueError(f"folds must be a whole number of 2 or more, got {folds!r}")
    if min(held_out, new) < folds * MIN_FOLD_ROWS:
        raise ValueError(
            f"{held_out} held-out and {new} new rows are too few to estimate a ratio of densities "
            f"with {folds} folds; it needs {folds * MIN_FOLD_ROWS} of each, or give weights="
        )


def _check_continuous(rows: Tensor, name: str) -> None:
    """Raise a ValueError if a column has so many equal values that it has no density."""
    for column in range(rows.shape[1]):
        distinct = len(rows[:, column].unique())
        if distinct < MIN_DISTINCT_FRACTION * len(rows):
            raise ValueError(
                f"column {column} of {name} has {distinct} different values in {len(rows)} rows, "
                "so it has no density for a flow; use by='logistic' or by='network'"
            )

"""Gaussian posteriors given more or fewer rows; exact for linear models with Gaussian noise.

q(w) = N(m, S) becomes, with the Jacobian J of the outputs in the weights at m, the Fisher
information H of p(y | f) and its score g = ∇_f log p(y | f),

    S⁻¹ ← S⁻¹ + Σ JᵀHJ,    m ← m + S·Σ Jᵀg    (with the new S),

which is Bayes' rule for a linear model with Gaussian noise, an extended Kalman filter for a network
with Gaussian noise, and one natural-gradient step for any other likelihood (BONG, Jones et al.
2024, https://arxiv.org/abs/2405.19681), which is shortened where the linearization fails.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.params import Params
from bayou.curvature import Covariance, information
from bayou.curvature.linearize import row_jacobians
from bayou.curvature.rank_updates import log_det_of_rows, solve_in_rows
from bayou.curvature.sweep import QUIET
from bayou.likelihoods import BoundLikelihood
from bayou.likelihoods.information import score
from bayou.network import check_dtype, check_tensor, clear_errors, forward_inputs, rows_of
from bayou.priors import BoundNormal, BoundPart, BoundPrior
from bayou.training.data import as_data
from bayou.training.inputs import check_finite
from bayou.training.loop import move

MAX_BLOCK_OUTPUTS: Final = 1024  # rows times outputs that are added in one step
BLOCK_NUMBERS: Final = 2**24  # entries of their Jacobian
MAX_HALVINGS: Final = 30  # of a step that a network is too far from linear for
DECREASE_TOLERANCE: Final = 1e-6  # relative, of the rounding of a log-likelihood in float32
LINEAR_TOLERANCE: Final = 256  # multiples of eps in the test whether a network is linear

Outputs = Callable[[Params, tuple[Any, ...]], Tensor]  # (random tensors, inputs) -> (B, *out)


@final
@dataclass(frozen=True)
class NormalPriors:
    """The Normal priors of some tensors.

    Args:
        means: of every tensor; empty where a prior is not Normal.
        precisions: of every tensor, one number or one for each weight; likewise.
        names: of the tensors.
    """

    means: Params
    precisions: Params
    names: tuple[str, ...]

    @classmethod
    def of(cls, priors: Mapping[str, BoundPrior], names: tuple[str, ...]) -> NormalPriors:
        """Return the moments of priors, none if one of them is not Normal or belongs to a joint.

        Args:
            priors: by name.
            names: of the tensors.
        """
        means: Params = {}
        precisions: Params = {}
        for name in names:
            prior = priors[name]
            if isinstance(prior, BoundPart) or not isinstance(prior, BoundNormal):
                return cls({}, {}, names)
            means[name] = prior.mean.detach().double()
            precisions[name] = torch.exp(-2 * prior.log_scale.detach().double())
        return cls(means, precisions, names)

    def require(self) -> None:
        """Raise a ValueError for ``forget`` without Normal priors."""
        if not self.means:
            raise ValueError(
                f"forget needs a Normal prior of each of {', '.join(self.names)}, to which the "
                "posterior tends; fit with prior=Normal(...), or update without forget"
            )


@final
@dataclass(frozen=True)
class LinearizedRows:
    """Some rows of data, as a Gaussian model with these weights sees them.

    Args:
        scaled: A = H^½·J, M rows, tensors (M, *shape) in float64.
        gradient: Jᵀg, summed over the rows, (*shape) each.
        log_likelihood: Σ log p(y | f).
        count: the number of rows.
    """

    scaled: Params
    gradient: Params
    log_likelihood: float
    count: int


@final
@dataclass(frozen=True)
class LinearizedModel:
    """A network with a likelihood, linearized at any weights.

    Args:
        outputs: computes the outputs from the random tensors and the inputs.
        likelihood: p(y | f).
        like: the random tensors, in the dtype and on the device of the network.
        parameter: a parameter of the network, with whose dtype inputs are compared.
    """

    outputs: Outputs
    likelihood: BoundLikelihood
    like: Params
    parameter: Tensor

    def blocks(self, data: object, mean: Params) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
        """Yield the rows of data, checked, in blocks that are added in one step each.

        Args:
            data: as ``bayou.fit`` takes them.
            mean: the weights, for a first evaluation.
        """
        weights = sum(value.numel() for value in self.like.values())
        for batch in as_data(data, MAX_BLOCK_OUTPUTS).epoch():
            check_finite(batch)
            check_dtype(batch[0], self.parameter)
            x, y = move(batch, next(iter(self.like.values())))
            inputs = forward_inputs(x)
            with clear_errors(inputs):
                f = self.outputs(self.cast(mean), inputs)
                check_tensor(f)
            self.likelihood.validate(f.shape, y)
            outputs = f[0].numel()
            rows = min(MAX_BLOCK_OUTPUTS // outputs, BLOCK_NUMBERS // (outputs * weights))
            for first in range(0, len(y), max(1, rows)):
                block = slice(first, first + max(1, rows))
                yield rows_of(inputs, block), y[block]

    def cast(self, mean: Params) -> Params:
        """Return weights in the dtype of the network.

        Args:
            mean: in float64.
        """
        return {name: mean[name].to(value) for name, value in self.like.items()}

    @torch.no_grad()
    def linearize(self, mean: Params, inputs: tuple[Any, ...], y: Tensor) -> LinearizedRows:
        """Return a block of rows, linearized at some weights.

        Args:
            mean: the weights, in float64.
            inputs: of the network.
            y: targets.
        """
        with QUIET, clear_errors(inputs):
            f, jacobian = row_jacobians(self.outputs, self.cast(mean), inputs)
        jacobian = {name: value.double() for name, value in jacobian.items()}
        columns = [
            column.flatten(1).double() for column in information(self.likelihood, f, y).columns()
        ]
        slopes = score(self.likelihood.log_prob, f, y).flatten(1).double()
        scaled: Params = {}
        gradient: Params = {}
        for name, value in jacobian.items():
            products = [torch.einsum("bk,bk...->b...", column, value) for column in columns]
            scaled[name] = torch.cat(products)
            gradient[name] = torch.einsum("bk,bk...->...", slopes, value)
        log_likelihood = float(self.likelihood.log_prob(f, y).double().sum())
        return LinearizedRows(scaled, gradient, log_likelihood, len(y))

    @torch.no_grad()
    def log_likelihood(self, mean: Params, inputs: tuple[Any, ...], y: Tensor) -> float:
        """Return Σ log p(y | f) of some rows; −∞ where the outputs are not finite.

        Args:
            mean: the weights, in float64.
            inputs: of the network.
            y: targets.
        """
        f = self.outputs(self.cast(mean), inputs)
        if not bool(f.isfinite().all()):
            return -math.inf
        return float(self.likelihood.log_prob(f, y).double().sum())

    @torch.no_grad()
    def is_linear(self, mean: Params, inputs: tuple[Any, ...]) -> bool:
        """Return whether the outputs are linear in the random tensors, by a test at some rows.

        Args:
            mean: the weights, in float64.
            inputs: of the network.
        """
        center = self.cast(mean)
        deviation = {
            name: rng.normal(1, value.shape, value, rng.fold(0, name))[0]
            for name, value in center.items()
        }
        moved = {name: value + deviation[name] for name, value in center.items()}
        with QUIET:
            f, jacobian = row_jacobians(self.outputs, center, inputs)
        expected = f.flatten(1)
        for name, value in jacobian.items():
            slopes = value.flatten(2) @ deviation[name].flatten()
            expected = expected + slopes
        outputs = self.outputs(moved, inputs).flatten(1)
        rounding = LINEAR_TOLERANCE * torch.finfo(outputs.dtype).eps
        allowed = rounding * float(1 + outputs.abs().max() + f.abs().max())
        return float((outputs - expected).abs().max()) <= allowed


@final
@dataclass(frozen=True)
class GaussianState:
    """N(m, S) over the random tensors of a network, in float64.

    Args:
        mean: m, (*shape) each.
        covariance: S.
        priors: the priors of the tensors.
        log_density: log p(new rows | rows before), summed over the steps so far; 0 by default.
        rows: how many rows were added or removed so far; 0 by default.
    """

    mean: Params
    covariance: Covariance
    priors: NormalPriors
    log_density: float = 0.0
    rows: int = 0

    @classmethod
    def of(
        cls, mean: Params, covariance: Covariance, priors: Mapping[str, BoundPrior]
    ) -> GaussianState:
        """Return the state of a posterior.

        Args:
            mean: of the random tensors.
            covariance: of them.
            priors: of them.
        """
        names = tuple(covariance.shapes)
        return cls(
            {name: mean[name].detach().double() for name in names},
            covariance.to(torch.float64),
            NormalPriors.of(priors, names),
        )

    def forget_rows(self, forget: float) -> GaussianState:
        """Return q^λ·p^(1−λ), normalized: all earlier rows count λ times, and the prior once.

        Args:
            forget: λ.
        """
        if forget == 1.0:
            return self
        self.priors.require()
        precisions = self.priors.precisions
        covariance = self.covariance.forget_rows(forget, precisions)
        pull = {
            name: (1 - forget) * precisions[name] * (self.priors.means[name] - value)
            for name, value in self.mean.items()
        }
        return replace(self, mean=self._move_mean(covariance.product(pull)), covariance=covariance)

    def with_rows(self, rows: LinearizedRows) -> GaussianState:
        """Return the Gaussian given more rows.

        The mean is that of the exact Gaussian of the linearized model, whatever the structure of
        S; a structure that is not exact then takes the nearest covariance of its kind.

        Args:
            rows: linearized at the mean.
        """
        covariance = self.covariance.with_rows(rows.scaled, self.priors.precisions)
        vector = self.covariance.to_vector
        scaled = vector(rows.scaled)
        gradient = vector(rows.gradient)
        products = vector(self.covariance.product(rows.scaled))
        gram = scaled @ products.mT
        if self.covariance.adds_exactly:
            step = vector(covariance.product(rows.gradient))
        else:
            direction = vector(self.covariance.product(rows.gradient))
            step = direction - solve_in_rows(gram, scaled @ direction) @ products
        log_density = rows.log_likelihood + 0.5 * float(gradient @ step - log_det_of_rows(gram))
        return replace(
            self,
            mean=self._move_mean(self.covariance.from_vector(step)),
            covariance=covariance,
            log_density=self.log_density + log_density,
            rows=self.rows + rows.count,
        )

    def without_rows(self, rows: LinearizedRows) -> GaussianState:
        """Return the Gaussian without some rows, for a linear model with Gaussian noise.

        Args:
            rows: linearized at the mean.
        """
        covariance = self.covariance.without_rows(rows.scaled, self.priors.precisions)
        step = covariance.product({name: -value for name, value in rows.gradient.items()})
        return replace(
            self,
            mean=self._move_mean(step),
            covariance=covariance,
            rows=self.rows + rows.count,
        )

    def _move_mean(self, step: Params) -> Params:
        """Return the mean after a step, which must be finite."""
        mean = {name: value + step[name] for name, value in self.mean.items()}
        if not all(bool(value.isfinite().all()) for value in mean.values()):
            raise FloatingPointError(
                "the update gives weights that are not finite; check the new rows and their units"
            )
        return mean


def add_data(
    state: GaussianState, model: LinearizedModel, data: object, forget: float
) -> GaussianState:
    """Return the Gaussian given more data, block by block.

    Args:
        state: the Gaussian before.
        model: the network and the likelihood.
        data: new rows, as ``bayou.fit`` takes them.
        forget: the weight of earlier rows.
    """
    state = state.forget_rows(forget)
    for inputs, y in model.blocks(data, state.mean):
        proposal = state.with_rows(model.linearize(state.mean, inputs, y))
        state = replace(proposal, mean=_shorten_step(state, proposal.mean, model, inputs, y))
    return state


def _shorten_step(
    state: GaussianState, mean: Params, model: LinearizedModel, inputs: tuple[Any, ...], y: Tensor
) -> Params:
    """Return the mean after a step that is halved until −log q(w) − log p(y | w) is not larger.

    A linear model with Gaussian noise takes the step as it is. A network may be far from its
    linearization where the new rows differ much from its predictions.

    Args:
        state: the Gaussian before the rows.
        mean: after the full step.
        model: the network and the likelihood.
        inputs: of the new rows.
        y: their targets.
    """
    step = {name: mean[name] - value for name, value in state.mean.items()}
    before = model.log_likelihood(state.mean, inputs, y)
    scale = 1.0
    for _ in range(MAX_HALVINGS):
        cost = 0.5 * scale**2 * float(state.covariance.mahalanobis(step))
        change = cost + before - model.log_likelihood(mean, inputs, y)
        if change <= DECREASE_TOLERANCE * (1 + abs(before)):
            break
        scale /= 2
        mean = {name: value + scale * step[name] for name, value in state.mean.items()}
    return mean


def remove_data(state: GaussianState, model: LinearizedModel, data: object) -> GaussianState:
    """Return the Gaussian without some of its rows, block by block.

    Args:
        state: the Gaussian with them.
        model: the network and the likelihood.
        data: the rows.

    Raises:
        ValueError: unless the model is linear with Gaussian noise and had these rows.
    """
    if not model.likelihood.is_gaussian:
        raise ValueError(
            f"rows of {type(model.likelihood).__name__} cannot be removed exactly, since their "
            "information depended on the weights when they were added; fit again without them"
        )
    log_density = 0.0
    for number, (inputs, y) in enumerate(model.blocks(data, state.mean)):
        if number == 0 and not model.is_linear(state.mean, inputs):
            raise ValueError(
                "the network is not linear in its random weights, so that rows cannot be removed "
                "exactly; fit the last layer alone, Laplace('full', where='last'), or fit again "
                "without these rows"
            )
        state = state.without_rows(model.linearize(state.mean, inputs, y))
        added = state.with_rows(model.linearize(state.mean, inputs, y))
        log_density -= added.log_density - state.log_density
    return replace(state, log_density=log_density)

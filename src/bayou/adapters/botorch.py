"""A posterior as a BoTorch model, for Bayesian optimization: pip install 'bayou[botorch]'.

posterior = bayou.fit(net, (x, y), method=bayou.Ensemble(5), likelihood=bayou.Gaussian(0.05))
model = PosteriorModel(posterior, x)
acquisition = qLogExpectedImprovement(model, best_f=y.max())
candidates, _ = optimize_acqf(acquisition, bounds=bounds, q=2, num_restarts=8, raw_samples=256)
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.core.extras import extra
from bayou.core.params import size
from bayou.likelihoods.predictive import Predictive
from bayou.network import VmapOrLoop
from bayou.posteriors import Posterior
from bayou.posteriors.empirical import shuffled_indices
from bayou.posteriors.posterior import NOISE

with extra("botorch", "PosteriorModel"):
    from botorch.models.ensemble import EnsembleModel
    from botorch.models.model import FantasizeMixin
    from botorch.models.transforms.input import InputTransform
    from botorch.models.transforms.outcome import OutcomeTransform
    from botorch.sampling.base import MCSampler

EXAMPLE_ERROR = "BoTorch supports points (d,) only, so that example_x must be rows (B, d), got "


@final
@dataclass(frozen=True)
class _Observations:
    """Observations in batches, on which functions are conditioned, in the units of the network.

    Args:
        x: points, (*batch, n, d).
        y: values, (*batch, n, m).
        weights: of the covariances with these points, by which each function moves,
            (*batch, S, n·m).
    """

    x: Tensor
    y: Tensor
    weights: Tensor


@final
class PosteriorModel(EnsembleModel, FantasizeMixin):  # type: ignore[misc]
    """A BoTorch model of S functions E[y | f_s], drawn once from a posterior.

    They are the same functions at all points and in all batches. X (*batch, q, d) gives values
    (*batch, S, q, m), differentiable in X; ``model.posterior(X).rsample`` selects among the
    functions, so that its draws at q points are joint. They are those of
    ``posterior.predict(x, samples, seed=seed)``, without the noise of y.

    ``condition_on_observations`` and ``fantasize`` return the model given more observations. For
    observations that are not in batches it is the model of ``posterior.update``. In batches, as
    the knowledge gradient needs them, every function is moved to the observations of its batch
    (Matheron's rule, Wilson et al. 2020):

        f_s(x) + k(x, X)·(k(X, X) + σ²)⁻¹·(y − f_s(X) − σ·ε_s)

    with the posterior covariance k. These are draws of the updated posterior where functions are
    Gaussian: of a last layer, of a linearized network and of ``Wide``, with Gaussian noise σ.

    Args:
        posterior: what predicts y.
        example_x: some rows (B, d).
        samples: S, by default 128, or all draws if there are fewer.
        seed: of the draws.
        outcome_transform: of BoTorch, if y was transformed before the fit; it is inverted.
        input_transform: of BoTorch, if x was transformed before the fit; it is applied.

    Raises:
        ValueError: if ``example_x`` are not rows (B, d).
    """

    def __init__(
        self,
        posterior: Posterior,
        example_x: Tensor,
        samples: int = 128,
        *,
        seed: int = 0,
        outcome_transform: OutcomeTransform | None = None,
        input_transform: InputTransform | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(example_x, Tensor):
            raise ValueError(EXAMPLE_ERROR + type(example_x).__name__)
        if example_x.ndim != 2:
            raise ValueError(EXAMPLE_ERROR + str(tuple(example_x.shape)))
        self.fitted = posterior
        self.samples = samples
        self.seed = seed
        self.observations: _Observations | None = None
        self._draw_functions()
        if outcome_transform is not None:
            self.outcome_transform = outcome_transform
        # Under the name input_transform BoTorch would require the training inputs.
        self.to_network = input_transform
        self._num_outputs = self.eval().forward(example_x[:1]).shape[-1]

    def _draw_functions(self) -> None:
        """Draw the tensors of the S functions and the parameters of their noise."""
        count = min(self.samples, self.fitted.draws or self.samples)
        stack = self.fitted.sample(count, rng.integer(self.seed))
        self.weights: dict[str, Tensor] = {
            name: value for name, value in stack.items() if not name.startswith(NOISE)
        }
        self.noise = {
            name.removeprefix(NOISE): value
            for name, value in stack.items()
            if name.startswith(NOISE)
        }

    @property
    def batch_shape(self) -> torch.Size:
        """The batch shape of one model: that of the observations it is conditioned on."""
        if self.observations is None:
            return torch.Size()
        return self.observations.weights.shape[:-2]

    def forward(self, X: Tensor) -> Tensor:
        """Return E[y | f_s] of every function.

        Args:
            X: points (*batch, q, d); the batch axes broadcast with those of the observations.

        Returns:
            Values (*batch, S, q, m).
        """
        x = self._network_inputs(X)
        means = self._by_function(self._predictive(x).means, x)
        return self._move(means, x).to(X)

    def condition_on_observations(self, X: Tensor, Y: Tensor, **kwargs: Any) -> PosteriorModel:
        """Return the model given more observations.

        Args:
            X: points (*batch, n, d), in the units of the user.
            Y: values (*batch, n, m), in the units of the user, before ``outcome_transform``. It may
                have more batch axes than X, as those of fantasies.
            kwargs: none: the noise is that of the likelihood.

        Returns:
            A model with the batch shape of Y: of the updated posterior if there is none, and else
            of functions that are moved to the observations.

        Raises:
            ValueError: if the posterior cannot be updated, or the functions have no joint Gaussian
                distribution.
        """
        _check_no_options(kwargs)
        if X.ndim < 2 or Y.shape[-2:] != (X.shape[-2], self.num_outputs):
            raise ValueError(
                f"observations must be X (*batch, n, d) and Y (*batch, n, {self.num_outputs}), got "
                f"{tuple(X.shape)} and {tuple(Y.shape)}"
            )
        y = Y
        if hasattr(self, "outcome_transform"):
            y, _ = self.outcome_transform(Y)
        x = self._network_inputs(X)
        follows_gradient = torch.is_grad_enabled() and (X.requires_grad or Y.requires_grad)
        if X.ndim == Y.ndim == 2 and self.observations is None and not follows_gradient:
            model = copy.copy(self)
            model.fitted = self.fitted.update((x.detach(), y.detach().to(x)))
            model._draw_functions()
            return model
        return self._condition(x, y.to(x))

    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        **kwargs: Any,
    ) -> PosteriorModel:
        """Return the models given y at X, drawn from this model with the noise of the likelihood.

        Args:
            X: points (*batch, n, d).
            sampler: its shape is the number of fantasies F, and its seed that of the choice among
                the S functions and of the noise, which are the same in all batches.
            observation_noise: must be None: the noise is that of the likelihood.
            kwargs: none.

        Returns:
            A model with the batch shape (F, *batch).

        Raises:
            ValueError: if the functions have no joint Gaussian distribution.
        """
        kwargs.pop("propagate_grads", None)
        _check_no_options(kwargs | ({"noise": True} if observation_noise is not None else {}))
        x = self._network_inputs(X)
        predictive = self._predictive(x)
        functions = self._move(self._by_function(predictive.means, x), x)  # (*batch, S, n, m)
        variance = self._noise_variance(predictive, x).mean(-3)  # (*batch, n, m)
        # One function and one noise for all batches, so that their acquisition values compare.
        seed = rng.fold(sampler.seed, "fantasies")
        count = sampler.sample_shape.numel()
        index = shuffled_indices(size(self.weights), count, seed, 0).to(x.device)
        noise = rng.normal(count, functions.shape[-2:], functions, rng.fold(seed, "noise"))
        noise = noise.reshape(count, *[1] * (x.ndim - 2), *noise.shape[1:])
        outcomes = functions.movedim(-3, 0)[index] + variance.sqrt() * noise
        return self._condition(x, outcomes.reshape(*sampler.sample_shape, *outcomes.shape[1:]))

    def _network_inputs(self, X: Tensor) -> Tensor:
        """Return points in the units, the dtype and on the device of the network."""
        x = X if self.to_network is None else self.to_network(X)
        dtype = next(iter(self.fitted.template().values())).dtype
        (rows,) = self.fitted.place(x.reshape(-1, x.shape[-1]).to(dtype))
        return rows.reshape(x.shape)

    def _predictive(self, x: Tensor) -> Predictive:
        """Return the predictive of the functions as they were drawn, at points (*batch, q, d)."""
        call = VmapOrLoop(self.fitted.call, (0, None), loop=not self.fitted.mappable)
        f = call(self.weights, x.reshape(-1, x.shape[-1]))  # (S, N, *out)
        likelihood = self.fitted.target.likelihood
        if self.noise:
            likelihood, f = likelihood.per_sample(f, self.noise)
        return self.fitted.apply_temperature(likelihood, f)

    def _by_function(self, values: Tensor, x: Tensor) -> Tensor:
        """Return values (S, N, *event) of points (*batch, q, d) as (*batch, S, q, m)."""
        return values.reshape(size(self.weights), *x.shape[:-1], -1).movedim(0, -3)

    def _noise_variance(self, predictive: Predictive, x: Tensor) -> Tensor:
        """Return the variance of y given each function, (*batch, S, q, m).

        Raises:
            ValueError: unless y is a function with Gaussian noise.
        """
        likelihood = self.fitted.target.likelihood
        if not (likelihood.is_gaussian and likelihood.is_linear_in_y):
            raise ValueError(
                "batches of observations need Gaussian noise, got "
                f"{type(likelihood).__name__}; condition on one batch at a time, or fit again"
            )
        variance = predictive.likelihood.variance(predictive.outputs)
        return self._by_function(variance.expand_as(predictive.means), x)

    def _move(self, means: Tensor, x: Tensor) -> Tensor:
        """Return functions (*batch, S, q, m) moved to the observations."""
        if self.observations is None:
            return means
        covariance = self._covariance(x, self.observations.x)  # (*batch, S or 1, q·m, n·m)
        shift = (covariance @ self.observations.weights.unsqueeze(-1)).squeeze(-1)
        return means + shift.reshape(*shift.shape[:-1], *means.shape[-2:])

    def _covariance(self, x: Tensor, observed_x: Tensor) -> Tensor:
        """Return covariances between points, (*batch, S or 1, q·m, n·m)."""
        return self.fitted.function_covariance(self.weights, x, observed_x).movedim(0, -3)

    def _condition(self, x: Tensor, y: Tensor) -> PosteriorModel:
        """Return the model whose functions are moved to more observations.

        Args:
            x: points (*batch, n, d), in the units of the network.
            y: values (*batch, n, m), in the units of the network.
        """
        previous = self.observations
        if previous is not None:
            x = _join(previous.x, x)
            y = _join(previous.y, y)
        predictive = self._predictive(x)
        functions = self._by_function(predictive.means, x)
        variance = self._noise_variance(predictive, x)  # (*batch, S, n, m)
        normal = rng.normal(
            size(self.weights),
            x.shape[-2:-1] + y.shape[-1:],
            y,
            rng.fold(self.seed, "observations"),
        )
        residuals = (y.unsqueeze(-3) - functions - variance.sqrt() * normal).flatten(-2)
        covariance = self._covariance(x, x) + variance.flatten(-2).diag_embed()
        root = torch.linalg.cholesky(covariance)
        weights = torch.cholesky_solve(residuals.unsqueeze(-1), root).squeeze(-1)
        model = copy.copy(self)
        model.observations = _Observations(x, y, weights)
        return model


def _join(first: Tensor, second: Tensor) -> Tensor:
    """Return points of two batches one after another, (*batch, n + n', ·)."""
    batch = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return torch.cat([rows.expand(*batch, *rows.shape[-2:]) for rows in (first, second)], -2)


def _check_no_options(options: dict[str, Any]) -> None:
    """Raise a ValueError for options of BoTorch that a posterior cannot take."""
    if options:
        raise ValueError(
            f"PosteriorModel takes no {', '.join(options)}: the noise of observations is that of "
            "the likelihood of the fit"
        )

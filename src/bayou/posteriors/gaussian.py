"""Gaussian posteriors with a structured covariance: Laplace, SWAG, IVON."""

from __future__ import annotations

import copy
import glob
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, size
from bayou.curvature import Covariance
from bayou.curvature.covariance import Diagonal, Full
from bayou.curvature.factor import LowRankPrecision
from bayou.curvature.joint import JointNormal
from bayou.curvature.kronecker import Kronecker
from bayou.curvature.linearize import linear_map, row_jacobians, tangent
from bayou.curvature.sweep import QUIET
from bayou.likelihoods import BoundLikelihood
from bayou.likelihoods.predictive import Predictive
from bayou.network import Map, Network, clear_errors, out_of_memory, rows_of
from bayou.network.target import Target, prior_specs
from bayou.network.units import Units
from bayou.posteriors.posterior import CHUNK_NUMBERS, Posterior, check_count
from bayou.posteriors.state import SavedState, target_state
from bayou.posteriors.updates import Updates, check_forget, check_removal
from bayou.posteriors.updating import GaussianState, LinearizedModel, add_data, remove_data
from bayou.priors import BoundNormal, BoundPart, DensityPrior, Prior, joint_rules
from bayou.training.data import as_data

PredictiveKind = Literal["sampled", "linearized", "probit", "exact"]
PREDICTIVES: Final[tuple[PredictiveKind, ...]] = ("sampled", "linearized", "probit", "exact")
CLOSED: Final[tuple[PredictiveKind, ...]] = ("probit", "exact")  # predict without draws
LINEARITY_FACTOR = 8.0  # enlargement of a draw in the test whether a network is linear in it
GRAPH_ROWS = 256  # whose graph is held at a time while linearized functions are computed


@final
class GaussianPosterior(Posterior):
    """q(w) = N(mean, Σ) over some of the tensors; the others are points at their mean.

    ``predictive`` says which function a draw of weights is:

    - ``"sampled"``: the network with these weights.
    - ``"linearized"``: f(x, mean) + J(x)·(w − mean), the model that a Gauss-Newton curvature
      belongs to (Khan 2019, Immer 2021).
    - ``"probit"``, for classes: logits f/√(1 + π/8·v) with v the variances of the linearized
      logits, one function instead of many (Spiegelhalter & Lauritzen 1990, MacKay 1992).
    - ``"exact"``, for Gaussian noise σ: p(y) = N(f, v + σ²) of the linearized function.

    The single draws of the last two are linearized.

    Args:
        target: network, likelihood and prior.
        network: the network as a function of its tensors.
        mean: of all tensors, (*shape) each.
        covariance: Σ, of those tensors that are not points.
        history: records of the fit; none by default.
        predictive: which function a draw is; "sampled" by default.
        log_evidence: an estimate of log p(D), where the method has one; None by default.
    """

    kind = "gaussian"
    centered = True

    def __init__(
        self,
        target: Target,
        network: Network,
        mean: Params,
        covariance: Covariance,
        history: list[dict[str, float]] | None = None,
        *,
        predictive: PredictiveKind = "sampled",
        log_evidence: float | None = None,
    ) -> None:
        self.target = target
        self.network = network
        self.covariance = covariance
        self.center: dict[str, Tensor] = {name: value.detach() for name, value in mean.items()}
        self.history: list[dict[str, float]] = history or []
        self.stopped = ""
        self.predictive = check_predictive(predictive, target.likelihood)
        self.log_evidence = log_evidence

    @property
    def predicts_without_draws(self) -> bool:  # type: ignore[override]
        """Whether ``predict`` has a closed form unless ``samples`` are given."""
        return self.predictive in CLOSED

    def template(self) -> Params:
        """Return the mean."""
        return dict(self.center)

    def call(self, params: Params, *inputs: object) -> Tensor:
        """Compute the outputs of the network, or of its linearization at the mean.

        Args:
            params: tensors of one draw, by name.
            inputs: the arguments of the network, on its device.
        """
        if self.predictive == "sampled":
            return self.network.evaluate(params, *inputs)
        mean = self._random_mean
        deviation = {name: params[name] - value for name, value in mean.items()}
        outputs, slope = tangent(self._function_at(inputs), mean, deviation)
        return outputs + slope

    @property
    def _random_mean(self) -> Params:
        """The mean of the tensors that are not points."""
        return {name: self.center[name] for name in self.covariance.shapes}

    def _function_at(self, inputs: Sequence[Any]) -> Callable[[Params], Tensor]:
        """Return the network on some inputs as a function of the tensors that are not points."""
        return lambda params: self.network.evaluate(self.center | params, *inputs)

    def _outputs_of(self, params: Params, inputs: tuple[Any, ...]) -> Tensor:
        """Return the outputs with some values of the tensors that are not points."""
        return self.network.evaluate(self.center | params, *inputs)

    def _map_over_draws(self, inputs: tuple[Any, ...], *, loop: bool) -> Map:
        """Return ``call`` as a function of a stack of draws."""
        mapped = super()._map_over_draws(inputs, loop=loop)
        if self.predictive == "sampled":
            return mapped
        return partial(self._linearized_outputs_or, mapped)

    def _linearized_outputs_or(self, mapped: Map, stack: Params, *inputs: Any) -> Tensor:
        """Compute many linearized functions together, or by ``mapped`` where that is impossible.

        They share what does not depend on the draw: for a last layer, nearly everything.
        """
        try:
            starts = range(0, max(1, len(inputs[0])), GRAPH_ROWS)
            outputs = [
                self._linearized_outputs(stack, rows_of(inputs, slice(first, first + GRAPH_ROWS)))
                for first in starts
            ]
            return torch.cat(outputs, 1)
        except RuntimeError as error:  # an operation that cannot be differentiated twice
            if out_of_memory(error):
                raise
        return mapped(stack, *inputs)

    def _linearized_outputs(self, stack: Params, inputs: tuple[Any, ...]) -> Tensor:
        """Compute f + J·(w_s − mean) for every draw, J· as the transpose of Jᵀ·: (S, B, *out)."""
        mean = self._random_mean
        f, push = linear_map(self._function_at(inputs), mean)
        slopes = []
        for index in range(size(stack)):
            deviation = {name: stack[name][index] - value for name, value in mean.items()}
            slopes.append(push(deviation))
        return f + torch.stack(slopes)

    def take_units(self, units: Units) -> None:
        """Convert the posterior and its log evidence to the units of the user."""
        if self.log_evidence is not None:
            self.log_evidence -= self.target.n * units.log_scale
        super().take_units(units)

    def using(self, predictive: PredictiveKind) -> GaussianPosterior:
        """Return the same distribution over weights, with another way to make functions of them.

        Args:
            predictive: "sampled", "linearized", "probit" or "exact".

        Raises:
            ValueError: if it does not suit the likelihood.
        """
        posterior = copy.copy(self)
        posterior.predictive = check_predictive(predictive, self.target.likelihood)
        return posterior

    def predict(
        self,
        x: object,
        samples: int | None = None,
        *,
        seed: rng.Seed = 0,
        chunk: int | None = None,
        batch_size: int | None = None,
        predictive: PredictiveKind | None = None,
    ) -> Predictive:
        """Predict y at new inputs, as every posterior does.

        An exact prediction is one distribution, not a mixture of functions; with ``samples`` these
        are drawn.

        Args:
            x: a tensor (B, ...), a tuple or a mapping of them, or a DataLoader.
            samples: the number of functions; by default 100, and none for a closed form.
            seed: of the draws; 0 by default.
            chunk: functions computed at a time; by default as many as fit.
            batch_size: rows computed at a time; by default as many as fit.
            predictive: which function a draw is; by default that of the posterior.

        Returns:
            The predictive distribution of y.
        """
        if predictive is not None and predictive != self.predictive:
            return self.using(predictive).predict(
                x, samples, seed=seed, chunk=chunk, batch_size=batch_size
            )
        draws_functions = self.predictive == "exact" and samples is not None
        if self.predictive not in CLOSED or draws_functions:
            return super().predict(x, samples, seed=seed, chunk=chunk, batch_size=batch_size)
        if samples not in (None, 1):
            raise ValueError(
                f"a probit prediction is one function, got samples={samples}; "
                "use predictive='linearized'"
            )
        mean, variance = self.function(x, batch_size=batch_size, diagonal=True)
        noise = copy.deepcopy(self.target.likelihood).requires_grad_(False)
        likelihood, outputs = noise.marginal(mean, variance.reshape(mean.shape))
        return self.apply_temperature(likelihood, outputs.unsqueeze(0))

    @torch.no_grad()
    def function(
        self, x: object, *, batch_size: int | None = None, diagonal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Compute the distribution of the linearized function, N(f(x, mean), J·Σ·Jᵀ).

        Args:
            x: the inputs of ``predict``, B rows.
            batch_size: rows whose Jacobians are held at a time; by default as many as fit.
            diagonal: whether to compute variances alone; False by default.

        Returns:
            The mean, (B, *out), and the covariances of the K outputs of each row, (B, K, K), or
            their variances, (B, K).
        """
        inputs = self.place(x)
        means = []
        covariances = []
        rows = batch_size or 1
        first = 0
        with clear_errors(inputs), QUIET:
            while first < len(inputs[0]):
                mean, root = self._covariance_root(rows_of(inputs, slice(first, first + rows)))
                means.append(mean)
                covariances.append(root.square().sum(-1) if diagonal else root @ root.mT)
                first += rows
                numbers = max(1, mean[0].numel() * self.covariance.size)
                rows = batch_size or max(1, CHUNK_NUMBERS // numbers)
        if not means:
            raise ValueError("x has no rows")
        return torch.cat(means), torch.cat(covariances)

    def function_covariance(self, draws: Params, x: Tensor, observed_x: Tensor) -> Tensor:
        """Compute the covariances J(x)·Σ·J(x')ᵀ of linearized functions, (1, *batch, N·K, M·K).

        Args:
            draws: not used: all functions have one covariance.
            x: rows, (*batch, N, d).
            observed_x: rows, (*batch, M, d).

        Raises:
            ValueError: if functions are the network with drawn weights, which is not linear.
        """
        if self.predictive not in ("exact", "linearized"):
            raise ValueError(
                f"functions of {self.predictive} weights have no joint Gaussian distribution; use "
                "posterior.using('linearized')"
            )
        roots = []
        for rows in (x, observed_x):
            inputs = self.place(rows.reshape(-1, rows.shape[-1]))
            with QUIET:
                _, root = self._covariance_root(inputs)  # (B, K, columns)
            roots.append(root.reshape(*rows.shape[:-2], -1, root.shape[-1]))
        root, observed_root = roots
        return (root @ observed_root.mT).unsqueeze(0)

    def _covariance_root(self, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Compute f, (B, *out), and R, (B, K, ·), with R·Rᵀ = J·Σ·Jᵀ."""
        f, jacobian = row_jacobians(self._outputs_of, self._random_mean, inputs)
        return f, self.covariance.spread(jacobian)

    @torch.no_grad()
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw all parameters; those that are points are at their mean.

        With an int seed, draw i is a function of (seed, i) alone.

        Args:
            n: the number of draws.
            seed: of the draws; None (the default) takes them from torch's global stream.
            start: the number of the first draw.

        Returns:
            Tensors by name, (n, *shape) each.
        """
        check_count(n)
        deviation = self.covariance.sample(n, seed, start)
        draws: Params = {}
        for name, value in self.center.items():
            if name in deviation:
                draws[name] = value + deviation[name]
            else:
                draws[name] = value.expand(n, *value.shape)
        return draws

    def mean(self) -> Params:
        """Return the mean of every tensor, (*shape) each."""
        return dict(self.center)

    def std(self) -> Params:
        """Compute the standard deviation of every weight, 0 for tensors that are points."""
        stds = {name: torch.zeros_like(value) for name, value in self.center.items()}
        for name, variance in self.covariance.variance().items():
            stds[name] = variance.sqrt()
        return stds

    def log_prob(self, params: Params) -> Tensor:
        """Compute the log-density log q(w) of the tensors that are not points.

        Args:
            params: tensors by name, (..., *shape) each.

        Returns:
            (...), in nats.
        """
        deviation = {name: params[name] - self.center[name] for name in self.covariance.shapes}
        return self.covariance.log_prob(deviation)

    def as_prior(self) -> dict[str, Prior]:
        """Return N(mean, Σ) as the prior of the next task (online Laplace, Ritter 2018).

        A diagonal Σ is a Normal of each tensor; any other is one density of all of them, with which
        MAP, VI and chains continue, and Laplace of the same structure, "full" or "kronecker".
        Points keep their prior.
        """
        priors = prior_specs(self.target.prior, self.target.net)
        mean = self._random_mean
        if isinstance(self.covariance, Diagonal):
            std = self.covariance.tensors
            for name, value in mean.items():
                priors[name] = DensityPrior(BoundNormal(value.shape, value, std[name].log()))
        else:
            covariance = self.covariance.as_matrix()
            density = JointNormal(mean, covariance, self._base())
            priors |= joint_rules(density, mean, self.std(), self.covariance.shapes)
        return {glob.escape(name): prior for name, prior in priors.items()}

    @torch.no_grad()
    def update(self, data: object, *, forget: float | None = None) -> GaussianPosterior:
        """Return the posterior given further rows; see ``Posterior.update``.

        For Gaussian noise and a network that is linear in its random weights (a last layer) it is
        exact: any order and any division of the rows give the posterior of all of them. So is
        ``log_evidence``. A network that is not linear is linearized at the mean before the rows, a
        likelihood that is not Gaussian takes one natural-gradient step (BONG). The mean is that of
        the full Gaussian; a diagonal or a Kronecker-factored covariance then takes the nearest of
        its structure. Noise and prior stay as they are.

        Args:
            data: new rows, as ``bayou.fit`` takes them, in the units of the fit.
            forget: the weight that is left to all earlier rows, in (0, 1]; None (default) for 1.

        Returns:
            A new posterior. More than 1,024 outputs of rows are added in blocks, in their order.

        Raises:
            ValueError: for rows that do not suit the network or the likelihood, for ``forget``
                without Normal priors, and for a covariance that has no update.
        """
        weight = check_forget(forget)
        state = add_data(self._gaussian_state(), self._linearized_model(), data, weight)
        is_known = self.target.likelihood.is_gaussian and weight == 1.0
        return self._with_state(
            state, is_known, self.updates.after(added=state.rows, forget=weight), state.rows
        )

    @torch.no_grad()
    def downdate(self, data: object) -> GaussianPosterior:
        """Return the posterior without some of its rows; see ``Posterior.downdate``.

        It needs Gaussian noise, a network that is linear in its random weights (a last layer), and
        a full covariance. Weights that are points, such as those below the last layer, stay as
        they are, with what they learned from these rows.

        Args:
            data: rows that were in the fit or in an update, with the same x and y.

        Raises:
            ValueError: where it is not exact, or the rows cannot have been in the posterior.
        """
        check_removal(as_data(data).n, self.target.n, self.updates)
        state = remove_data(self._gaussian_state(), self._linearized_model(), data)
        return self._with_state(state, True, self.updates.after(removed=state.rows), -state.rows)

    @torch.no_grad()
    def log_predictive_density(self, data: object) -> float:
        """Compute log p(y | x, D) of further rows together; see the base class.

        It has a closed form for Gaussian noise without a calibration.

        Args:
            data: the rows.
        """
        is_calibrated = self.temperature != 1.0 or self.calibration_map is not None
        if not self.target.likelihood.is_gaussian or is_calibrated:
            return super().log_predictive_density(data)
        return add_data(self._gaussian_state(), self._linearized_model(), data, 1.0).log_density

    def with_low_rank(self, rank: int = 20) -> GaussianPosterior:
        """Return the same posterior, whose diagonal covariance becomes low rank by updates (LoFi).

        Σ⁻¹ = S⁻¹·(1 + F·Fᵀ)·S⁻¹ with at most ``rank`` columns of F: updates keep the directions of
        most information, and the diagonal of the rest (Chang et al. 2023,
        https://arxiv.org/abs/2305.19535).

        Args:
            rank: the number of columns; 20 by default.

        Raises:
            ValueError: for a covariance that is not diagonal.
        """
        check_count(rank, "rank", 1)
        if not isinstance(self.covariance, Diagonal):
            raise ValueError(
                f"with_low_rank needs a diagonal covariance, got a {self.covariance.kind} one, "
                "which is updated as it is"
            )
        posterior = copy.copy(self)
        std = self.covariance.to_vector(self.covariance.tensors)
        limit = torch.tensor(float(rank), dtype=std.dtype, device=std.device)
        posterior.covariance = LowRankPrecision.of_factor(
            self.covariance.shapes, std, std.new_zeros(len(std), 0), limit
        )
        return posterior

    def _gaussian_state(self) -> GaussianState:
        """Return mean and covariance in float64, with the priors."""
        return GaussianState.of(self.center, self.covariance, self.target.priors)

    def _linearized_model(self) -> LinearizedModel:
        """Return the network and the likelihood, for updates."""
        return LinearizedModel(
            self._outputs_of,
            self.target.likelihood,
            self._random_mean,
            next(self.target.net.parameters()),
        )

    def _with_state(
        self, state: GaussianState, evidence_is_known: bool, updates: Updates, rows: int
    ) -> GaussianPosterior:
        """Return the posterior with another mean and covariance, and so many rows more."""
        posterior = copy.copy(self)
        posterior.note_update(updates, self.target.n + rows)
        dtype = next(iter(self._random_mean.values())).dtype
        posterior.covariance = state.covariance.to(dtype)
        cast = {name: value.to(dtype) for name, value in state.mean.items()}
        posterior.center = self.center | cast
        if self.log_evidence is not None:
            posterior.log_evidence = None
            if evidence_is_known:
                posterior.log_evidence = self.log_evidence + state.log_density
        return posterior

    def with_tensors_of(
        self, source: Posterior, names: Collection[str]
    ) -> GaussianPosterior | None:
        """Return this posterior with some tensors of another Gaussian, independent of the rest.

        Args:
            source: the posterior of the same network that has these tensors.
            names: of the tensors.

        Returns:
            None if the covariance of the source is neither diagonal, full nor Kronecker-factored.
        """
        if not isinstance(source, GaussianPosterior):
            return None
        if not isinstance(source.covariance, Diagonal | Full | Kronecker | LowRankPrecision):
            return None
        mean: Params = {}
        for name in source.center:
            mean[name] = source.center[name] if name in names else self.center[name]
        source_names = [name for name in source.covariance.shapes if name in names]
        remaining = [name for name in self.covariance.shapes if name not in names]
        source_covariance = source.covariance.marginal(source_names)
        covariance = self.covariance.marginal(remaining).with_independent(source_covariance)
        return GaussianPosterior(
            source.target, source.network, mean, covariance, predictive=source.predictive
        )

    def traceable(self, draw: Params, inputs: tuple[Any, ...]) -> tuple[Posterior, Params]:
        """Return a posterior and a draw with the same function, whose ``call`` is one graph.

        A linearized network needs derivatives, which torch.export does not support for every B. A
        network that is linear in its random tensors (a last layer) is its own linearization; a dry
        run with an enlarged draw tests this.

        Args:
            draw: tensors by name.
            inputs: the arguments of the network, as an example.

        Raises:
            ValueError: for a probit prediction or a network that is not linear.
        """
        if self.predictive == "sampled":
            return self, draw
        if self.predictive == "probit":
            raise ValueError(
                "a probit prediction is no average over draws; export "
                "posterior.using('linearized') or .using('sampled')"
            )
        sampled = self.using("sampled")
        enlarged: Params = {}
        for name, value in self.center.items():
            enlarged[name] = value + LINEARITY_FACTOR * (draw[name] - value)
        linear_outputs = self.call(enlarged, *inputs)
        outputs = sampled.call(enlarged, *inputs)
        difference = float((linear_outputs - outputs).abs().max())
        rounding = 256 * torch.finfo(outputs.dtype).eps * float(1 + outputs.abs().max())
        if difference > rounding:
            raise ValueError(
                "a network that is linearized in more than its last layer needs derivatives for "
                "every x, which torch.export cannot take; export posterior.using('sampled'), or "
                "fit with Laplace(where='last')"
            )
        return sampled, draw

    def _base(self) -> Params:
        """Return the precision of the prior before any task, where it was Normal."""
        precisions: Params = {}
        for name, prior in self.target.priors.items():
            density = prior.density if isinstance(prior, BoundPart) else None
            if isinstance(density, JointNormal):
                if name in density.base:
                    precisions[name] = density.base[name]
            elif isinstance(prior, BoundNormal) and density is None:
                precisions[name] = torch.exp(-2 * prior.log_scale.detach())
        return precisions

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the mean, the covariance and its structure."""
        tensors, config = target_state(self, mean=self.center, covariance=self.covariance.tensors)
        shapes = {name: list(shape) for name, shape in self.covariance.shapes.items()}
        config["predictive"] = self.predictive
        config["log_evidence"] = self.log_evidence
        config["covariance"] = [self.covariance.kind, shapes]
        return tensors, config

    @classmethod
    def restore(cls, saved: SavedState, net: nn.Module) -> GaussianPosterior:
        """Return the posterior with a ``state``, see ``Posterior.restore``."""
        target = saved.target(net)
        config = saved.config
        families = {family.kind: family for family in Covariance.__subclasses__()}
        family, shapes = config["covariance"]
        return cls(
            target,
            saved.network(target),
            saved.group("mean"),
            families[family](shapes, saved.group("covariance")),
            config["history"],
            predictive=config["predictive"],
            log_evidence=config["log_evidence"],
        )

    def __repr__(self) -> str:
        net = type(self.target.net).__name__
        total = sum(value.numel() for value in self.center.values())
        covariance = f"{self.covariance.kind} over {self.covariance.size:,}"
        return f"GaussianPosterior({net}: {covariance} of {total:,} weights)"


def check_predictive(predictive: object, likelihood: BoundLikelihood) -> PredictiveKind:
    """Return a way to predict, if it is one and suits the likelihood.

    Args:
        predictive: "sampled", "linearized", "probit" or "exact".
        likelihood: p(y | f).

    Raises:
        ValueError: otherwise.
    """
    if predictive not in PREDICTIVES:
        raise ValueError(f"predictive must be one of {', '.join(PREDICTIVES)}, got {predictive!r}")
    if predictive == "exact" and not likelihood.is_gaussian:
        raise ValueError(
            f"exact predictions need Gaussian noise, got {type(likelihood).__name__}; "
            "use 'linearized'"
        )
    if predictive == "probit" and not likelihood.logits:
        raise ValueError(
            "probit predictions are for classes (Categorical, Bernoulli), not "
            f"{type(likelihood).__name__}; use 'linearized'"
        )
    return predictive

"""The posterior of a network of infinite width: a Gaussian process for each draw of its scales."""

from __future__ import annotations

import copy
import math
from dataclasses import replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.params import Params
from bayou.likelihoods import BoundLikelihood, BoundLog
from bayou.likelihoods.continuous import BoundMarginal, UnitGaussian
from bayou.likelihoods.predictive import Predictive
from bayou.network import Network, check_dtype, clear_errors, forward_inputs, rows_of
from bayou.network.target import Target
from bayou.network.units import Units, units_of
from bayou.network.wide import (
    HIDDEN_UNITS,
    NoiseNetwork,
    PriorScales,
    WideNetwork,
    activate,
    noise_variances,
    solve_rows,
    wide_kernel,
    wide_variance,
)
from bayou.posteriors.empirical import shuffled_indices
from bayou.posteriors.posterior import NOISE, Posterior, check_count
from bayou.posteriors.state import SavedState, target_state
from bayou.posteriors.updates import Updates, check_forget, check_removal
from bayou.training.data import as_data
from bayou.training.inputs import check_finite
from bayou.training.loop import move

BLOCK_NUMBERS: Final = 2**22  # covariances that are held at a time
ROW_TOLERANCE: Final = 16  # multiples of eps by which a row to remove may differ
NOISE_NAME: Final = f"{NOISE}log_scale"


@final
class WidePosterior(Posterior):
    """q(f, scales) = 1/S Σ_s δ(scales_s)·p(f | y, scales_s), with f a network of infinite width.

    Given the prior scales f is a Gaussian process, and ``predict`` has the closed form 1/S Σ_s
    N(mean_s, variance_s + σ_s²), one entry of ``outputs`` for each s. A draw is one function: the
    tensors of a ``WideNetwork``, with the mean and the covariance of the process.
    ``predict(x, samples=100)`` draws functions, whose values at all rows are joint.

    Args:
        target: with a ``WideNetwork``, which has the training rows, and a Gaussian likelihood.
        network: the network as a function of its tensors.
        log_scales: log a_1 .. log a_d, log b, log s and log σ of every s, for the d inputs of the
            hidden units and standardized y, (S, d + 3) in float64.
        history: records of the fit; none by default.
        log_evidence: log p(y | scales) at the most probable scales; None by default.
        noise: the factor of the variance of the noise at x; None (default) where all rows have the
            same noise. With it, that of ``target.likelihood`` is a mean over the training rows.
    """

    kind = "wide"
    predicts_without_draws = True

    def __init__(
        self,
        target: Target,
        network: Network,
        log_scales: Tensor,
        history: list[dict[str, float]] | None = None,
        *,
        log_evidence: float | None = None,
        noise: NoiseNetwork | None = None,
    ) -> None:
        self.target = target
        self.network = network
        self.log_scales: Tensor = log_scales.detach().double()
        self.history: list[dict[str, float]] = history or []
        self.stopped = ""
        self.log_evidence = log_evidence
        self.noise = noise
        # Of each s, computed when they are first used: they are not in files.
        self._solutions: dict[int, tuple[Tensor, Tensor]] = {}
        self._blocks_of_rows = [len(self.wide.rows)]  # of the fit and of each update

    @property
    def wide(self) -> WideNetwork:
        """The network with the training rows."""
        net = self.target.net
        if not isinstance(net, WideNetwork):
            raise TypeError(f"a WidePosterior needs a WideNetwork, got {type(net).__name__}")
        return net

    @property
    def builds_network(self) -> bool:
        """Whether ``restore`` makes the network from the file: True."""
        return True

    @property
    def members(self) -> int:
        """The number of draws of the scales, whose mean is none of them."""
        return len(self.log_scales)

    def template(self) -> Params:
        """Return tensors with the shapes of a draw, all 0."""
        tensors = {name: value.detach() for name, value in self.wide.named_parameters()}
        return tensors | {NOISE_NAME: self._log_noise[0]}

    @property
    def _log_noise(self) -> Tensor:
        """The log-scale of the likelihood for every s, (S,), with the rounding of y."""
        wide = self.wide
        log_noise = self.log_scales[:, -1]
        if wide.rounding:
            log_noise = 0.5 * torch.log(torch.exp(2 * log_noise) + wide.rounding**2)
        log_noise = log_noise + wide.target_spread.log()
        return log_noise.to(wide.log_scales.dtype)

    @torch.no_grad()
    def set_noise(self) -> None:
        """Set the noise of the likelihood, where it was learned, to the mean of its logs."""
        for parameter in self.target.likelihood.parameters():
            parameter.copy_(self._log_noise.mean())

    @property
    def _units(self) -> Units | None:
        """The units of the user, where the fit was to standardized rows and is finished."""
        units = units_of(self.target.net)
        return units if units is not None and units.is_active else None

    def take_units(self, units: Units) -> None:
        """Convert the posterior and its log evidence to the units of the user."""
        if self.log_evidence is not None:
            self.log_evidence -= self.target.n * units.log_scale
        super().take_units(units)

    @property
    def _scales(self) -> PriorScales:
        """The prior scales of every s."""
        return PriorScales.from_logs(self.log_scales)

    def _scales_of(self, index: int) -> PriorScales:
        """Return the prior scales of one s."""
        return PriorScales.from_logs(self.log_scales[index])

    @property
    def _noise_factors(self) -> Tensor | None:
        """The factors of the variance of the noise of the training rows, (N,)."""
        return None if self.noise is None else self.noise(self.wide.rows).exp()

    @torch.no_grad()
    def _solution(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor of K + σ²·F, (N, N), and (K + σ²·F)⁻¹·y, (N, D), of one s."""
        if index not in self._solutions:
            self._solutions[index] = self._solve(index)
        return self._solutions[index]

    def _solve(self, index: int) -> tuple[Tensor, Tensor]:
        """Compute ``_solution``, block by block, so that its rounding is that of the updates."""
        scales = self._scales_of(index)
        first, *later = self._blocks_of_rows
        if not later:
            return solve_rows(self.wide, scales, self._noise_factors)
        rows = self.wide.rows
        some = {"rows": rows[:first], "targets": self.wide.targets[:first]}
        factors = None if self.noise is None else self.noise(rows[:first]).exp()
        root, _ = solve_rows(self.wide.with_buffers(some), scales, factors)
        for count in later:
            root, _ = self._extend_root(index, root, rows[len(root) : len(root) + count])
        return root, torch.cholesky_solve(self.wide.outputs, root)

    @torch.no_grad()
    def predict(
        self,
        x: object,
        samples: int | None = None,
        *,
        seed: rng.Seed = 0,
        chunk: int | None = None,
        batch_size: int | None = None,
    ) -> Predictive:
        """Predict y at new inputs, as every posterior does.

        Without ``samples`` it is the exact predictive distribution given each draw of the scales;
        with them functions are drawn.

        Args:
            x: a tensor (B, ...), or a DataLoader that does not shuffle.
            samples: the number of functions; none by default.
            seed: of the functions; 0 by default.
            chunk: functions computed at a time; by default as many as fit.
            batch_size: rows computed at a time; by default as many as fit.

        Returns:
            The predictive distribution of y.
        """
        if samples is not None:
            functions = super().predict(x, samples, seed=seed, chunk=chunk, batch_size=batch_size)
            location, log_scale = functions.outputs.unbind(-1)
            log_scale = self._at_rows(log_scale, x, batch_size)
            return Predictive(functions.likelihood, torch.stack((location, log_scale), -1))
        mean, variance = self.function(x, batch_size=batch_size)
        # The log-scales of the noise in the units of the user, too.
        _, paired = self.target.likelihood.per_sample(mean, {"log_scale": self._log_noise})
        log_scale = self._at_rows(paired[..., 1].detach(), x, batch_size)
        outputs = torch.stack((mean, log_scale, variance), -1)
        likelihood: BoundLikelihood = BoundMarginal(UnitGaussian())
        if isinstance(self.target.likelihood, BoundLog):
            likelihood = BoundLog(BoundMarginal(UnitGaussian()))
        return self.apply_temperature(likelihood, outputs)

    @torch.no_grad()
    def function(self, x: object, *, batch_size: int | None = None) -> tuple[Tensor, Tensor]:
        """Compute the distribution of the network at each row, without the noise of y.

        Args:
            x: the inputs of ``predict``, B rows.
            batch_size: rows computed at a time; by default as many as fit.

        Returns:
            Means and variances for every draw of the scales, (S, B, *event) each.
        """
        inputs = self.place(x)
        with clear_errors(inputs):
            moments = [self._moments(block) for block in self._blocks(inputs, batch_size)]
        means, variances = zip(*moments, strict=True)
        dtype = inputs[0].dtype
        return torch.cat(means, 1).to(dtype), torch.cat(variances, 1).to(dtype)

    def _blocks(self, inputs: tuple[Any, ...], batch_size: int | None) -> list[Tensor]:
        """Divide the rows of the inputs into blocks, in the units of the fit."""
        count = len(inputs[0])
        if not count:
            raise ValueError("x has no rows")
        if self._units is not None:
            inputs = self._units.standardize_inputs(inputs)
        rows = batch_size or max(1, BLOCK_NUMBERS // len(self.wide.rows))
        return [rows_of(inputs, slice(first, first + rows))[0] for first in range(0, count, rows)]

    def _at_rows(self, log_scale: Tensor, x: object, batch_size: int | None) -> Tensor:
        """Return the log-scales of the noise at x from those of its mean, (S, B, *event)."""
        if self.noise is None:
            return log_scale
        blocks = self._blocks(self.place(x), batch_size)
        logs = torch.cat([self.noise(block) for block in blocks])
        logs = logs.reshape(-1, *[1] * (log_scale.ndim - 2))
        if not self.wide.rounding:
            return log_scale + (0.5 * logs).to(log_scale)
        rounding = (self.wide.rounding * self._output_scale).square()
        learned = torch.exp(2 * log_scale.double()) - rounding
        variance = learned.clamp_min(0.0) * logs.exp() + rounding
        return (0.5 * variance.log()).to(log_scale)

    @property
    def _output_scale(self) -> Tensor:
        """The scale of standardized y in the units of the predictions."""
        scale = self.wide.target_scale.double()
        if self._units is not None and self._units.output is not None:
            scale = scale * self._units.output.scale.to(scale)
        return scale

    def _moments(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Compute means and variances of the outputs at some rows, in the units of the user."""
        wide = self.wide
        units = self._units
        x = wide.standardize(inputs)
        means = []
        variances = []
        for index in range(self.members):
            scales = self._scales_of(index)
            root, weights = self._solution(index)
            covariances = wide_kernel(wide.units, x, wide.inputs, scales)
            explained = torch.linalg.solve_triangular(root, covariances.mT, upper=False)
            variance = wide_variance(wide.units, x, scales) - explained.square().sum(0)
            means.append(covariances @ weights)
            variances.append(variance.clamp_min(0.0))
        mean = wide.restore(torch.stack(means))
        shape = (self.members, len(x), *[1] * (mean.ndim - 2))
        variance = torch.stack(variances).reshape(shape) * wide.target_scale.square()
        if units is not None and units.output is not None:
            mean = units.restore_outputs(mean)
            variance = variance * units.output.scale.double().square()
        return mean, variance.expand_as(mean)

    def function_covariance(self, draws: Params, x: Tensor, observed_x: Tensor) -> Tensor:
        """Compute the covariances of f(x) given the training rows and the scales of each draw.

        k(x, x') − k(x, X)·(K + σ²·F)⁻¹·k(X, x'), the same for each of the D independent outputs.

        Args:
            draws: tensors of S draws, whose scales are used.
            x: rows, (*batch, N, d).
            observed_x: rows, (*batch, M, d).

        Returns:
            Covariances (S, *batch, N·D, M·D).

        Raises:
            ValueError: if the noise differs between rows.
        """
        if self.noise is not None:
            raise ValueError(
                "the noise of this wide network differs between rows, so that new rows cannot be "
                "conditioned on; use the method Wide with varied_noise=False"
            )
        distances = (draws["log_scales"].double()[:, None] - self.log_scales).abs().sum(-1)
        index = distances.argmin(1)
        features, observed_features = (self._features(rows) for rows in (x, observed_x))
        needed, positions = index.unique(return_inverse=True)
        covariances = torch.stack(
            [self._covariance(number, features, observed_features) for number in needed.tolist()]
        )
        scale = self._output_scale.flatten().expand(self.wide.row_weight.shape[1])
        blocks = torch.einsum("...nm,ab->...namb", covariances, scale.square().diag())
        shape = (x.shape[-2] * len(scale), observed_x.shape[-2] * len(scale))
        return blocks.reshape(*covariances.shape[:-2], *shape)[positions].to(x.dtype)

    def _features(self, rows: Tensor) -> Tensor:
        """Return the inputs of the hidden units for rows (*batch, N, d)."""
        flat = self.place(rows.reshape(-1, rows.shape[-1]))
        if self._units is not None:
            flat = self._units.standardize_inputs(flat)
        features = self.wide.standardize(flat[0])
        return features.reshape(*rows.shape[:-1], -1)

    def _covariance(self, index: int, x: Tensor, observed_x: Tensor) -> Tensor:
        """Compute the covariances of standardized outputs for one s, (*batch, N, M)."""
        wide = self.wide
        scales = self._scales_of(index)
        root, _ = self._solution(index)
        explained = [
            torch.linalg.solve_triangular(
                root, wide_kernel(wide.units, rows, wide.inputs, scales).mT, upper=False
            )
            for rows in (x, observed_x)
        ]
        return wide_kernel(wide.units, x, observed_x, scales) - explained[0].mT @ explained[1]

    @torch.no_grad()
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw functions, as the tensors of networks.

        With an int seed, draw i is a function of (seed, i). Each draw of the scales is taken once
        before any is repeated.

        Args:
            n: the number of draws.
            seed: of the draws; None (the default) takes them from torch's global stream.
            start: the number of the first draw.

        Returns:
            Tensors by name, (n, *shape) each.
        """
        check_count(n)
        seed = rng.integer(seed)
        wide = self.wide
        index = shuffled_indices(self.members, n, rng.fold(seed, "scales"), start)
        index = index.to(self.log_scales.device)
        scales = PriorScales.from_logs(self.log_scales[index])

        def noise(name: str, *shape: int) -> Tensor:
            return rng.normal(n, shape, self.log_scales, rng.fold(seed, name), start)

        inputs = len(wide.columns)
        outputs = wide.row_weight.shape[1]
        hidden_weight = noise("weight", HIDDEN_UNITS, inputs) * scales.inputs[:, None]
        hidden_bias = noise("bias", HIDDEN_UNITS) * scales.bias[:, None]
        output_std = scales.output[:, None, None] / math.sqrt(HIDDEN_UNITS)
        output_weight = noise("output", HIDDEN_UNITS, outputs) * output_std
        factors = self._noise_factors
        target_noise = noise("noise", *wide.row_weight.shape)
        row_weight = torch.empty_like(target_noise)
        for number, position in enumerate(index.tolist()):
            values = wide.inputs @ hidden_weight[number].mT + hidden_bias[number]
            random = activate(wide.units, values) @ output_weight[number]
            variances = noise_variances(self._scales_of(position), factors, wide.rounding)
            noise_std = variances.sqrt().unsqueeze(-1)
            residuals = wide.outputs - random - noise_std * target_noise[number]
            row_weight[number] = torch.cholesky_solve(residuals, self._solution(position)[0])
        draws = {
            "log_scales": self.log_scales[index],
            "hidden_weight": hidden_weight,
            "hidden_bias": hidden_bias,
            "output_weight": output_weight,
            "row_weight": row_weight,
        }
        dtype = wide.row_weight.dtype
        draws = {name: value.to(dtype) for name, value in draws.items()}
        return draws | {NOISE_NAME: self._log_noise[index]}

    @torch.no_grad()
    def update(self, data: object, *, forget: float | None = None) -> WidePosterior:
        """Return the posterior given further rows; see ``Posterior.update``.

        Given the scales it is exact: the Gaussian process is conditioned on the rows, which extend
        the Cholesky factor of the covariance by N²·M operations. The draws of the scales, the units
        of x and y, the thresholds and the noise stay as they are.

        Args:
            data: new rows, as ``bayou.fit`` takes them, in the units of the fit.
            forget: must be None or 1: remove old rows by ``downdate`` instead.

        Raises:
            ValueError: for ``forget``, and for rows that do not suit those of the fit.
        """
        if check_forget(forget) < 1:
            raise ValueError(
                f"a WidePosterior keeps its rows and cannot weigh them, got forget={forget}; "
                "remove the oldest rows: posterior.update(new).downdate(old)"
            )
        rows, targets = self._rows_of_fit(data)
        posterior = self._with_rows(
            torch.cat((self.wide.rows, rows)),
            torch.cat((self.wide.targets, targets)),
            self.updates.after(added=len(rows)),
            [*self._blocks_of_rows, len(rows)],
        )
        for index in self._solutions:
            root, _ = self._extend_root(index, self._solutions[index][0], rows)
            solution = torch.cholesky_solve(posterior.wide.outputs, root)
            posterior._solutions[index] = (root, solution)
        return posterior

    @torch.no_grad()
    def downdate(self, data: object) -> WidePosterior:
        """Return the posterior without some of its rows; see ``Posterior.downdate``.

        Args:
            data: rows that were in the fit or in an update, with the same x and y.

        Raises:
            ValueError: for rows that the posterior does not have.
        """
        rows, targets = self._rows_of_fit(data)
        wide = self.wide
        check_removal(len(rows), len(wide.rows), self.updates)
        mine = torch.cat((wide.rows, wide.targets.flatten(1)), 1)
        scale = mine.abs().amax(0).clamp_min(torch.finfo(torch.float32).tiny)
        tolerance = ROW_TOLERANCE * torch.finfo(wide.row_weight.dtype).eps
        is_kept = torch.ones(len(mine), dtype=torch.bool, device=mine.device)
        for number, row in enumerate(torch.cat((rows, targets.flatten(1)), 1)):
            distance = ((mine - row).abs() / scale).amax(1).masked_fill(~is_kept, math.inf)
            nearest = int(distance.argmin())
            if float(distance[nearest]) > tolerance:
                raise ValueError(
                    f"row {number} is not one of the {int(is_kept.sum()):,} rows of the posterior; "
                    "give rows with the same x and y that were in the fit or in an update"
                )
            is_kept[nearest] = False
        return self._with_rows(
            wide.rows[is_kept],
            wide.targets[is_kept],
            self.updates.after(removed=len(rows)),
            [int(is_kept.sum())],
        )

    @torch.no_grad()
    def log_predictive_density(self, data: object) -> float:
        """Compute log p(y | x, D) of further rows together; see ``Posterior``.

        It has a closed form, the mean over the draws of the scales, unless y is a logarithm.

        Args:
            data: the rows.
        """
        units = self._units
        is_calibrated = self.temperature != 1.0 or self.calibration_map is not None
        if (units is not None and units.target is not None) or is_calibrated:
            return super().log_predictive_density(data)
        rows, targets = self._rows_of_fit(data)
        wide = self.wide.with_buffers({"rows": rows, "targets": targets})
        before = len(self.wide.rows)
        densities = []
        for index in range(self.members):
            root, covariances = self._extend_root(index, self._solution(index)[0], rows)
            residual = wide.outputs - covariances @ self._solution(index)[1]
            lower = root[before:, before:]
            whitened = torch.linalg.solve_triangular(lower, residual, upper=False)
            log_det = whitened.shape[1] * lower.diagonal().log().sum()
            constant = 0.5 * whitened.numel() * LOG_2PI
            densities.append(-0.5 * whitened.square().sum() - log_det - constant)
        total = torch.stack(densities).logsumexp(0) - math.log(self.members)
        log_units = wide.target_scale.log().expand(targets.shape).sum()
        if units is not None:
            log_units = log_units + len(rows) * units.log_scale
        return float(total - log_units)

    def _rows_of_fit(self, data: object) -> tuple[Tensor, Tensor]:
        """Return rows of data as the training rows are, (M, d) and (M, *event) in float64."""
        like = self.wide.row_weight
        event = self.wide.targets.shape[1:]
        all_rows = []
        all_targets = []
        for batch in as_data(data).epoch():
            check_finite(batch)
            check_dtype(batch[0], like)
            x, y = move(batch, like)
            inputs = forward_inputs(x)
            self.target.likelihood.validate((len(inputs[0]), *event), y)
            if self._units is not None:
                inputs = self._units.standardize_inputs(inputs)
                y = self._units.standardize_targets(y)
            self.wide.standardize(inputs[0])  # raises for another number of columns
            all_rows.append(inputs[0].double().flatten(1))
            all_targets.append(y.double())
        return torch.cat(all_rows), torch.cat(all_targets)

    def _extend_root(self, index: int, root: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor of the first rows and of others, and their covariances.

        Args:
            index: of the scales.
            root: the factor of the first N rows of the network, (N, N).
            rows: M others.

        Returns:
            (N + M, N + M), and (M, N).
        """
        wide = self.wide
        scales = self._scales_of(index)
        x = wide.standardize(rows)
        earlier = wide.standardize(wide.rows[: len(root)])
        covariances = wide_kernel(wide.units, x, earlier, scales)
        below = torch.linalg.solve_triangular(root, covariances.mT, upper=False).mT
        remaining = wide_kernel(wide.units, x, x, scales) - below @ below.mT
        factors = None if self.noise is None else self.noise(rows).exp()
        remaining.diagonal().add_(noise_variances(scales, factors, wide.rounding))
        count = len(root)
        extended = root.new_zeros(count + len(rows), count + len(rows))
        extended[:count, :count] = root
        extended[count:, :count] = below
        extended[count:, count:] = torch.linalg.cholesky(remaining)
        return extended, covariances

    def _with_rows(
        self, rows: Tensor, targets: Tensor, updates: Updates, blocks: list[int]
    ) -> WidePosterior:
        """Return the posterior of other training rows, with the same scales and units."""
        posterior = copy.copy(self)
        wide = self.wide.with_buffers({"rows": rows, "targets": targets})
        posterior.target = replace(self.target, net=wide)
        posterior.note_update(updates, len(rows))
        posterior.network = Network(wide)
        posterior.network.net.eval()
        posterior.log_evidence = None
        posterior._solutions = {}
        posterior._blocks_of_rows = blocks
        return posterior

    def mean(self) -> Params:
        """Compute E[w]: with one draw of the scales, the network that is the mean function."""
        means = {name: torch.zeros_like(value) for name, value in self.template().items()}
        solutions = [self._solution(index)[1] for index in range(self.members)]
        means["log_scales"] = self.log_scales.mean(0).to(means["log_scales"])
        means["row_weight"] = torch.stack(solutions).mean(0).to(means["row_weight"])
        return means | {NOISE_NAME: self._log_noise.mean(0)}

    def std(self) -> Params:
        """Compute the standard deviation of every tensor of a draw."""
        scales = self._scales
        roots = [self._solution(index) for index in range(self.members)]
        variances = [torch.cholesky_inverse(root).diagonal() for root, _ in roots]
        weights = torch.stack([weights for _, weights in roots])
        row_variance = torch.stack(variances).mean(0)[:, None] + weights.var(0, correction=0)
        output_std = scales.output.square().mean().div(HIDDEN_UNITS).sqrt()
        stds = {
            "log_scales": self.log_scales.std(0, correction=0),
            "hidden_weight": scales.inputs.square().mean(0).sqrt(),
            "hidden_bias": scales.bias.square().mean().sqrt(),
            "output_weight": output_std,
            "row_weight": row_variance.sqrt(),
            NOISE_NAME: self._log_noise.std(correction=0),
        }
        template = self.template()
        return {
            name: value.to(template[name]).expand_as(template[name]) for name, value in stds.items()
        }

    def relevance(self, where: str | None = None) -> dict[str, Tensor]:
        """Compute the relevance of columns: the prior scales a_i of standardized inputs.

        The largest is 1. Of several draws of the scales it is the geometric mean. With thresholds
        it is the standard deviation of the inputs of a hidden unit that a column causes.

        Args:
            where: must be None: there is one layer with inputs.

        Returns:
            The relevance of each column, by the name of its weights.
        """
        if where is not None:
            raise ValueError(f"a wide network has one layer with inputs; omit where={where!r}")
        wide = self.wide
        logs = self.log_scales[:, :-3].mean(0)
        relevance = (logs - logs.max()).exp()
        if wide.thresholds:
            variance = (relevance * wide.inputs.std(0, correction=0)).square()
            of_columns = torch.zeros_like(wide.input_shift).index_add(0, wide.columns, variance)
            relevance = of_columns.sqrt()
            relevance = relevance / relevance.max()
        return {"hidden_weight": relevance}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the scales, the training rows, the units, the thresholds and the noise."""
        groups: dict[str, Params] = {"wide": {"log_scales": self.log_scales}}
        if self.noise is not None:
            network = self.noise.network
            groups["noise"] = {"log_scales": network.log_scales, "log_squares": network.targets}
        if self.updates.calls:  # no longer functions of the rows
            groups["thresholds"] = {
                name: getattr(self.wide, name) for name in ("threshold", "threshold_column")
            }
            if self.noise is not None:
                groups["noise"]["rows"] = self.noise.network.rows
        tensors, config = target_state(self, **groups)
        config["units_of_network"] = self.wide.units
        config["thresholds"] = self.wide.thresholds
        if self.wide.rounding:
            config["rounding"] = self.wide.rounding
        if self.updates.calls:
            config["blocks"] = self._blocks_of_rows
        config["log_evidence"] = self.log_evidence
        if self.noise is not None:
            config["units_of_noise"] = self.noise.network.units
        return tensors, config

    @classmethod
    def restore(cls, saved: SavedState, net: nn.Module) -> WidePosterior:
        """Return the posterior with a ``state``; the network of the fit is made of the file.

        Args:
            saved: the state, read from a file.
            net: any network, which is not used.
        """
        config = saved.config
        rows = saved.group("net")
        (noise,) = saved.group("likelihood").values()
        dtype = noise.dtype
        wide = WideNetwork(
            config["units_of_network"],
            rows["rows"],
            rows["targets"],
            rows["target_units"],
            dtype,
            config.get("thresholds", 0),  # not in files of earlier versions
            config.get("rounding", 0.0),  # the same
        )
        if config.get("updates"):
            wide = wide.with_buffers(rows | saved.group("thresholds"))
        target = saved.target(wide)
        network = Network(target.net)
        network.net.eval()
        noise_network = None
        if "units_of_noise" in config:
            of_noise = saved.group("noise")
            noise_network = NoiseNetwork(
                config["units_of_noise"],
                of_noise.get("rows", rows["rows"]),
                of_noise["log_squares"][:, 0],
                of_noise["log_scales"],
            )
        posterior = cls(
            target,
            network,
            saved.group("wide")["log_scales"],
            config["history"],
            log_evidence=config["log_evidence"],
            noise=noise_network,
        )
        posterior._blocks_of_rows = config.get("blocks", posterior._blocks_of_rows)
        return posterior

    def __repr__(self) -> str:
        count, columns = self.wide.rows.shape
        return (
            f"WidePosterior({self.wide.units} units, {count:,} rows, {columns:,} inputs: "
            f"{self.members} draws of the scales)"
        )

"""The posterior of a network of infinite width: a Gaussian process for each draw of its scales."""

from __future__ import annotations

import math
from typing import Any, Final, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params
from bayou.likelihoods import BoundLikelihood, BoundLog
from bayou.likelihoods.continuous import BoundMarginal, UnitGaussian
from bayou.likelihoods.predictive import Predictive
from bayou.network import Network, clear_errors, rows_of
from bayou.network.target import Target
from bayou.network.units import Units, units_of
from bayou.network.wide import (
    HIDDEN_UNITS,
    PriorScales,
    WideNetwork,
    activate,
    wide_kernel,
    wide_variance,
)
from bayou.posteriors.empirical import shuffled_indices
from bayou.posteriors.posterior import NOISE, Posterior, check_count
from bayou.posteriors.state import SavedState, target_state

BLOCK_NUMBERS: Final = 2**22  # covariances that are held at a time
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
        log_scales: log a_1 .. log a_d, log b, log s and log σ of every s, for standardized x and y,
            (S, d + 3) in float64.
        history: records of the fit; none by default.
        log_evidence: log p(y | scales) at the most probable scales; None by default.
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
    ) -> None:
        self.target = target
        self.network = network
        self.log_scales = log_scales.detach().double()
        self.history = history or []
        self.stopped = ""
        self.log_evidence = log_evidence
        # Of each s, computed when they are first used: they are not in files.
        self._solutions: dict[int, tuple[Tensor, Tensor]] = {}

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
        """The log-scale of the likelihood for every s, (S,)."""
        wide = self.wide
        log_noise = self.log_scales[:, -1] + wide.target_spread.log()
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

    def _solution(self, index: int) -> tuple[Tensor, Tensor]:
        """Return the Cholesky factor of K + σ²·I, (N, N), and (K + σ²·I)⁻¹·y, (N, D), of one s."""
        if index not in self._solutions:
            wide = self.wide
            scales = self._scales_of(index)
            covariance = wide_kernel(wide.units, wide.inputs, wide.inputs, scales)
            covariance.diagonal().add_(scales.noise_variance)
            root = torch.linalg.cholesky(covariance)
            self._solutions[index] = root, torch.cholesky_solve(wide.outputs, root)
        return self._solutions[index]

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
            return super().predict(x, samples, seed=seed, chunk=chunk, batch_size=batch_size)
        mean, variance = self.function(x, batch_size=batch_size)
        # The log-scales of the noise in the units of the user, too.
        _, paired = self.target.likelihood.per_sample(mean, {"log_scale": self._log_noise})
        outputs = torch.stack((mean, paired[..., 1].detach(), variance), -1)
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
        count = len(inputs[0])
        if not count:
            raise ValueError("x has no rows")
        rows = batch_size or max(1, BLOCK_NUMBERS // len(self.wide.rows))
        blocks = []
        with clear_errors(inputs):
            for first in range(0, count, rows):
                blocks.append(self._moments(rows_of(inputs, slice(first, first + rows))))
        means, variances = zip(*blocks, strict=True)
        dtype = inputs[0].dtype
        return torch.cat(means, 1).to(dtype), torch.cat(variances, 1).to(dtype)

    def _moments(self, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """Compute means and variances of the outputs at some rows, in the units of the user."""
        wide = self.wide
        units = self._units
        if units is not None:
            inputs = units.standardize_inputs(inputs)
        x = wide.standardize(inputs[0])
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

        columns = len(wide.input_shift)
        outputs = wide.row_weight.shape[1]
        hidden_weight = noise("weight", HIDDEN_UNITS, columns) * scales.inputs[:, None]
        hidden_bias = noise("bias", HIDDEN_UNITS) * scales.bias[:, None]
        output_std = scales.output[:, None, None] / math.sqrt(HIDDEN_UNITS)
        output_weight = noise("output", HIDDEN_UNITS, outputs) * output_std
        noise_std = scales.noise_variance.sqrt()[:, None, None]
        target_noise = noise("noise", *wide.row_weight.shape) * noise_std
        row_weight = torch.empty_like(target_noise)
        for number, position in enumerate(index.tolist()):
            values = wide.inputs @ hidden_weight[number].mT + hidden_bias[number]
            random = activate(wide.units, values) @ output_weight[number]
            residuals = wide.outputs - random - target_noise[number]
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
        """Compute the relevance of inputs: the prior scales a_i of standardized inputs.

        The largest is 1. Of several draws of the scales it is the geometric mean.

        Args:
            where: must be None: there is one layer with inputs.

        Returns:
            The relevance of each input, (d,), by the name of its weights.
        """
        if where is not None:
            raise ValueError(f"a wide network has one layer with inputs; omit where={where!r}")
        logs = self.log_scales[:, :-3].mean(0)
        return {"hidden_weight": (logs - logs.max()).exp()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the scales, the training rows and the kind of the units."""
        tensors, config = target_state(self, wide={"log_scales": self.log_scales})
        config["units_of_network"] = self.wide.units
        config["log_evidence"] = self.log_evidence
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
            config["units_of_network"], rows["rows"], rows["targets"], rows["target_units"], dtype
        )
        target = saved.target(wide)
        network = Network(target.net)
        network.net.eval()
        return cls(
            target,
            network,
            saved.group("wide")["log_scales"],
            config["history"],
            log_evidence=config["log_evidence"],
        )

    def __repr__(self) -> str:
        count, columns = self.wide.rows.shape
        return (
            f"WidePosterior({self.wide.units} units, {count:,} rows, {columns:,} inputs: "
            f"{self.members} draws of the scales)"
        )

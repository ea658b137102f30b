"""The evidence of networks of infinite width, and the prior scales that it makes probable."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.kernels import hmc
from bayou.network.wide import PriorScales, Units, noise_variances, wide_kernel
from bayou.training.lbfgs import Lbfgs

INITIAL_NOISE: Final = 0.5  # of standardized y
TRAJECTORY: Final = 1.6  # length of the trajectories of draws, in standard deviations
MIN_STEPS: Final = 4  # of a trajectory
DISCARDED_DRAWS: Final = 8  # at the start of a chain
TINY: Final = 1e-12  # variance of inputs that are all constant
DIFFERENCE: Final = 1e-3  # of logs, for second derivatives
# With groups, of which there are many scales: of the logs of scales in a group, and of the noise,
# without which the evidence of some rows of many thresholds leaves no noise. Chosen on generated
# tables.
GROUPED_LOG_STD: Final = 1.0


@final
class WideEvidence:
    r"""log p(y | scales) + log p(scales) of K networks of infinite width, as functions of scales.

    y ~ N(0, K + σ²·F + r²), with the covariances K of ``wide_kernel``, a diagonal F, 1 by default,
    and the standard deviation r of the rounding of y, 0 by default.
    The logs of the scales have normal priors around equal scales of the inputs: log a_i = δ_i +
    log a with δ_i ~ N(0, τ²), log a ~ N(−½·log d, τ²) and log b, log s ~ N(0, τ²), log σ ~
    N(log ½, τ²).

    A point has the logs (δ_1 .. δ_d, log a, log b, log s, log σ).

    With ``groups`` inputs of one group g have similar scales: log a_i = δ_i + γ_g + log a with
    δ_i ~ N(0, 1), γ_g ~ N(0, τ²), log a ~ N(−½·log Σ_i var x_i, τ²) and log σ ~ N(log ½, 1).
    A point then has (δ_1 .. δ_d, γ_1 .. γ_G, log a, log b, log s, log σ).

    Args:
        x: standardized inputs, (N, d).
        y: standardized targets, (N, D).
        log_std: τ.
        units: the hidden units of each network; "erf" for all by default.
        masks: the rows of each network, (K, N); None (default) for all rows.
        has_free_scales: whether the scales of the inputs of a network may differ, (K,); None
            (default) for all of them.
        log_noise: log σ, where it is known; None (default) where it is found with the scales.
        groups: the numbers of the groups of inputs, (d,); None (default) for no groups.
        noise_factors: F, by which the variance of the noise differs between rows, (N,); None
            (default) for 1.
        rounding: r, 0 by default.
    """

    def __init__(
        self,
        x: Tensor,
        y: Tensor,
        log_std: float,
        units: tuple[Units, ...] = ("erf",),
        masks: Tensor | None = None,
        has_free_scales: Tensor | None = None,
        log_noise: float | None = None,
        groups: Tensor | None = None,
        noise_factors: Tensor | None = None,
        rounding: float = 0.0,
    ) -> None:
        self.x = x
        self.y = y
        self.log_std = log_std
        self.units = units
        self.masks = masks
        self.has_free_scales = has_free_scales
        self.log_noise = log_noise
        self.groups = groups
        self.noise_factors = noise_factors
        self.rounding = rounding
        d = x.shape[1]
        group_count = 0 if groups is None else int(groups.max()) + 1
        size = d + group_count + 4
        self.center: Tensor = x.new_zeros(size)  # of the prior
        self.center[-4] = -0.5 * math.log(d)
        self.center[-1] = math.log(INITIAL_NOISE)
        self.log_stds: Tensor = x.new_full((size,), log_std)
        if groups is not None:
            self.center[-4] = -0.5 * float(x.var(0, correction=0).sum().clamp_min(TINY).log())
            self.log_stds[:d] = GROUPED_LOG_STD
            self.log_stds[-1] = GROUPED_LOG_STD

    def scales(self, points: Tensor, problem: int) -> PriorScales:
        """Return the prior scales at a point.

        Args:
            points: logs, (..., d + 4).
            problem: the number of the network.
        """
        return PriorScales.from_logs(self.effective_logs(points, problem))

    def effective_logs(self, points: Tensor, problem: int = 0) -> Tensor:
        """Return (log a_1 .. log a_d, log b, log s, log σ) at points, (..., d + 3).

        Args:
            points: logs, (..., d + 4), or (..., d + G + 4) with groups.
            problem: the number of the network.
        """
        d = self.x.shape[1]
        differences = points[..., :d]
        if self.groups is not None:
            differences = differences + points[..., d:-4].index_select(-1, self.groups)
        if self.has_free_scales is not None and not bool(self.has_free_scales[problem]):
            differences = torch.zeros_like(differences)
        log_noise = points[..., -1:]
        if self.log_noise is not None:
            log_noise = torch.full_like(log_noise, self.log_noise)
        log_inputs = differences + points[..., -4, None]
        return torch.cat([log_inputs, points[..., -3:-1], log_noise], -1)

    def rows_of(self, problem: int) -> tuple[Tensor, Tensor]:
        """Return x and y of the rows of a network.

        Args:
            problem: the number of the network.
        """
        if self.masks is None:
            return self.x, self.y
        return self.x[self.masks[problem]], self.y[self.masks[problem]]

    def noise_covariance(self, scales: PriorScales, problem: int) -> Tensor:
        """Return the covariance of the noise of the rows of a network, a diagonal matrix.

        Args:
            scales: of the network.
            problem: its number.
        """
        factors = self.noise_factors
        if factors is not None and self.masks is not None:
            factors = factors[self.masks[problem]]
        rows, _ = self.rows_of(problem)
        return torch.diag(noise_variances(scales, factors, self.rounding).expand(len(rows)))

    def evaluate(self, points: Tensor, problems: Tensor) -> tuple[Tensor, Tensor]:
        """Compute −log evidence − log prior without constants, and its gradient.

        Args:
            points: logs of A networks, (A, d + 4).
            problems: the numbers of these networks, (A,).

        Returns:
            Values (A,), NaN where the covariance is singular, and gradients (A, d + 4).
        """
        results = [
            self._evaluate(point, problem)
            for point, problem in zip(points, problems.tolist(), strict=True)
        ]
        values, gradients = zip(*results, strict=True)
        return torch.stack(values), torch.stack(gradients)

    def _evaluate(self, point: Tensor, problem: int) -> tuple[Tensor, Tensor]:
        """Compute the value and the gradient of one network."""
        x, y = self.rows_of(problem)
        logs = point.detach().requires_grad_()
        with torch.enable_grad():
            scales = self.scales(logs, problem)
            covariance = wide_kernel(self.units[problem % len(self.units)], x, x, scales)
            covariance = covariance + self.noise_covariance(scales, problem)
        root, info = torch.linalg.cholesky_ex(covariance.detach())
        deviation = (point - self.center) / self.log_stds
        # scales out of range: a trial that is too far
        if bool(info > 0) or not bool(root.isfinite().all()):
            return point.new_full((), math.nan), torch.zeros_like(point)
        inverse = torch.cholesky_inverse(root)
        weights = inverse @ y
        outputs = y.shape[1]
        (gradient,) = torch.autograd.grad(
            covariance, logs, (outputs * inverse - weights @ weights.mT) / 2
        )
        quadratic = deviation.square().sum() + (weights * y).sum()
        value = 0.5 * quadratic + outputs * root.diagonal().log().sum()
        return value, gradient + deviation / self.log_stds

    def maximize(
        self,
        passes: int,
        start: Tensor | None = None,
        report: Callable[[int], None] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the points with the largest evidence that L-BFGS finds, and the values there.

        Args:
            passes: evaluations of each network.
            start: the first points, (K, d + 4); by default the center of the prior for each.
            report: called with the number of passes so far after every pass.

        Returns:
            Points (K, d + 4), and −log evidence − log prior (K,).
        """
        if start is None:
            count = len(self.units) if self.masks is None else len(self.masks)
            start = self.center.expand(count, -1).contiguous()
        search = Lbfgs(self.evaluate, start, torch.zeros_like(start[:, 0]))
        points = search.run(passes, report)
        values, _ = self.evaluate(points, torch.arange(len(points)))
        return points, values

    def log_evidence(self, point: Tensor) -> float:
        """Return log p(y | scales) at a point of the first network, with constants.

        Args:
            point: logs, (d + 4,).
        """
        value, _ = self._evaluate(point, 0)
        deviation = (point - self.center) / self.log_stds
        _, y = self.rows_of(0)
        return 0.5 * float(deviation.square().sum() - y.numel() * math.log(2 * math.pi)) - float(
            value
        )

    def errors(self, points: Tensor) -> Tensor:
        """Return mean squared errors of the posterior means of all rows, (K, N).

        Args:
            points: logs of all networks, (K, d + 4).
        """
        errors = []
        for problem, point in enumerate(points):
            x, y = self.rows_of(problem)
            scales = self.scales(point, problem)
            units = self.units[problem % len(self.units)]
            covariance = wide_kernel(units, x, x, scales)
            covariance = covariance + self.noise_covariance(scales, problem)
            weights = torch.linalg.solve(covariance, y)
            means = wide_kernel(units, self.x, x, scales) @ weights
            errors.append((self.y - means).square().mean(1))
        return torch.stack(errors)

    def hessian(self, point: Tensor) -> Tensor:
        """Compute second derivatives of −log evidence − log prior of the first network.

        They are forward differences of gradients, as a scale of coordinates for ``draw``.

        Args:
            point: logs, (P,).

        Returns:
            A symmetric matrix (P, P).
        """
        steps = DIFFERENCE * torch.eye(len(point)).to(point)
        _, gradients = self.evaluate(point + steps, torch.zeros(len(point), dtype=torch.long))
        differences = (gradients - self._evaluate(point, 0)[1]) / DIFFERENCE
        return (differences + differences.mT) / 2

    def draw(
        self,
        mode: Tensor,
        count: int,
        seed: int,
        report: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Draw from p(scales | y) of the first network by Hamiltonian Monte Carlo.

        The chain starts at the mode and moves in coordinates in which the Hessian there is 1.

        Args:
            mode: the maximum, (P,).
            count: draws that are kept.
            seed: of the chain.
            report: called with the number of trajectories so far after every one.

        Returns:
            Points (count, P).
        """
        curvatures, axes = torch.linalg.eigh(self.hessian(mode))
        # The prior bounds the curvature of directions without data from below.
        to_point = axes / curvatures.clamp_min(0.5 / self.log_std**2).sqrt()
        first = torch.zeros(1, dtype=torch.long)

        def density(coordinates: Tensor) -> tuple[Tensor, Tensor]:
            values, gradients = self.evaluate(mode + coordinates @ to_point.mT, first)
            return -values, -gradients @ to_point

        dimensions = len(mode)
        steps = max(MIN_STEPS, math.ceil(TRAJECTORY * dimensions**0.25 / 0.8))
        trajectories = DISCARDED_DRAWS + count
        noise = rng.normal(trajectories, (1, dimensions), mode, rng.fold(seed, "momentum"))
        uniforms = rng.uniform(trajectories, (2, 1), mode, rng.fold(seed, "accept"))
        state = hmc.init(torch.zeros_like(mode)[None], density)
        inverse_mass = torch.ones_like(mode)
        draws = []
        for number in range(trajectories):
            jitter, uniform = uniforms[number]
            step_size = (0.7 + 0.6 * jitter) * TRAJECTORY / steps
            state, _ = hmc.step(
                state, density, noise[number], uniform, step_size, inverse_mass, steps
            )
            draws.append(state.position)
            if report is not None:
                report(number + 1)
        positions = torch.cat(draws[DISCARDED_DRAWS:])
        return mode + positions @ to_point.mT

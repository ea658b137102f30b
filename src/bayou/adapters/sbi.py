"""Conditional flows of bayou as density estimators of sbi (simulation-based inference).

from bayou.adapters.sbi import flow_builder
inference = sbi.inference.NPE(prior, density_estimator=flow_builder())
inference.append_simulations(theta, x).train()
posterior = inference.build_posterior()
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from bayou.core.extras import extra
from bayou.flows import Flow, StandardNormal, spline_autoregressive
from bayou.flows.core.transform import Ladj, Map

with extra("sbi", "A density estimator of sbi"):
    from sbi.neural_nets.estimators.base import ConditionalDensityEstimator

BuildMap = Callable[[int, int], Map]
DENSITIES = ("posterior", "likelihood")


@final
class FlowEstimator(ConditionalDensityEstimator):  # type: ignore[misc]
    """The density q(input | condition) of a conditional flow, as sbi calls it.

    q is the flow's density of the standardized input, given the embedding of the standardized
    condition: log q(θ | x) = log p_flow((θ − m)/s | e((x − m')/s')) − Σ log s.

    Args:
        flow: of one event of the size of an input, with a context of the size of the embedding.
        input_shape: of one input.
        condition_shape: of one condition.
        embedding_net: maps conditions (B, *condition_shape) to (B, context); None (the default)
            flattens them.
        input_scale: the mean m and the standard deviation s of inputs, (*input_shape) each; None
            (the default) for 0 and 1.
        condition_scale: those of conditions, (*condition_shape) each.
    """

    def __init__(
        self,
        flow: Flow,
        input_shape: Sequence[int],
        condition_shape: Sequence[int],
        embedding_net: nn.Module | None = None,
        input_scale: tuple[Tensor, Tensor] | None = None,
        condition_scale: tuple[Tensor, Tensor] | None = None,
    ) -> None:
        super().__init__(
            net=flow,
            input_shape=torch.Size(input_shape),
            condition_shape=torch.Size(condition_shape),
        )
        self.embedding = nn.Flatten() if embedding_net is None else embedding_net
        unit = (torch.zeros(()), torch.ones(()))
        for name, scale in (("input", input_scale), ("condition", condition_scale)):
            mean, std = unit if scale is None else scale
            self.register_buffer(f"{name}_mean", mean.clone())
            self.register_buffer(f"{name}_std", std.clone())

    @property
    def embedding_net(self) -> nn.Module:
        """The network of the conditions."""
        return self.embedding

    def log_prob(self, input: Tensor, condition: Tensor) -> Tensor:
        """Compute log q(input | condition), (S, B).

        Args:
            input: (S, B, *input_shape), or (B, *input_shape) with S = 1.
            condition: (B, *condition_shape) or (S, B, *condition_shape).
        """
        self._check_input_shape(input)
        self._check_condition_shape(condition)
        input, condition, rows = self._broadcast_and_align(input, condition)
        draws = len(input)
        context = self._context(condition.reshape(draws * rows, *self.condition_shape))
        z = (input - self.input_mean) / self.input_std
        z = z.reshape(draws * rows, *self.net.event_shape)
        log_prob: Tensor = self.net.log_prob(z, context) - self._log_scale
        return log_prob.reshape(draws, rows)

    def loss(self, input: Tensor, condition: Tensor) -> Tensor:
        """Compute −log q(input | condition) of every row, (B,).

        Args:
            input: (B, *input_shape).
            condition: (B, *condition_shape).
        """
        return -self.log_prob(input.unsqueeze(0), condition)[0]

    def sample(self, sample_shape: torch.Size, condition: Tensor) -> Tensor:
        """Draw inputs, (*sample_shape, B, *input_shape), from torch's global stream.

        Args:
            sample_shape: of the draws for each condition.
            condition: (B, *condition_shape).
        """
        self._check_condition_shape(condition)
        shape = tuple(sample_shape)
        z = self.net.sample(shape, self._context(condition))
        return self._restore(z, (*shape, len(condition)))

    def sample_and_log_prob(
        self, sample_shape: torch.Size, condition: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Draw inputs with their log-densities, differentiable and without an inversion.

        Args:
            sample_shape: of the draws for each condition.
            condition: (B, *condition_shape).

        Returns:
            Inputs (*sample_shape, B, *input_shape), and log-densities (*sample_shape, B).
        """
        self._check_condition_shape(condition)
        shape = tuple(sample_shape)
        z, log_prob = self.net.sample_and_log_prob(shape, self._context(condition))
        return self._restore(z, (*shape, len(condition))), log_prob - self._log_scale

    @property
    def _log_scale(self) -> Tensor:
        """Σ log s over the numbers of one input."""
        return self.input_std.expand(self.input_shape).log().sum()

    def _context(self, condition: Tensor) -> Tensor:
        """Return the embedding of conditions (B, *condition_shape), (B, context)."""
        embedded: Tensor = self.embedding((condition - self.condition_mean) / self.condition_std)
        return embedded

    def _restore(self, z: Tensor, batch_shape: tuple[int, ...]) -> Tensor:
        """Return draws of the flow in the units of the inputs."""
        z = z.reshape(*batch_shape, *self.input_shape)
        return self.input_mean + self.input_std * z


def flow_builder(
    transform: BuildMap | None = None,
    *,
    density: str = "posterior",
    embedding_net: nn.Module | None = None,
    standardize: bool = True,
) -> Callable[[Tensor, Tensor], FlowEstimator]:
    """Return a function of (θ, x) that builds a density estimator, for ``NPE`` or ``NLE`` of sbi.

    Args:
        transform: a function (dim, context_dim) → map of ``bayou.flows``; None (the default) for
            ``spline_autoregressive(dim, context_dim=context_dim)``.
        density: "posterior" (the default) for q(θ | x), as NPE needs; "likelihood" for q(x | θ),
            as NLE needs.
        embedding_net: maps conditions (B, ...) to (B, context_dim); None (the default) flattens
            them.
        standardize: whether to shift and scale inputs and conditions by the first simulations.
            Default: True.

    Returns:
        A function for the argument ``density_estimator`` of sbi.

    Raises:
        ValueError: for another density, and when it is called, for a map whose log-density is not
            exact.

    Example:
        >>> maf = lambda dim, context_dim: bayou.flows.maf(dim, context_dim=context_dim)
        >>> inference = NPE(prior, density_estimator=flow_builder(maf))
    """
    if density not in DENSITIES:
        raise ValueError(f"density must be one of {', '.join(DENSITIES)}, got {density!r}")

    def build(theta: Tensor, x: Tensor) -> FlowEstimator:
        """Build the estimator of these simulations.

        Args:
            theta: parameters (N, ...).
            x: simulations (N, ...).
        """
        inputs, conditions = (theta, x) if density == "posterior" else (x, theta)
        embedding = nn.Flatten() if embedding_net is None else embedding_net
        with torch.no_grad():
            context_dim = embedding(conditions[:2]).shape[-1]
        dim = inputs[0].numel()
        make_map = transform or _default_map
        flow = Flow(StandardNormal(dim), make_map(dim, context_dim))
        if flow.kind is not Ladj.exact:
            raise ValueError(
                f"sbi needs exact log-densities, and those of this flow are {flow.label}; use "
                "another map, such as flows.maf"
            )
        return FlowEstimator(
            flow.to(inputs.dtype),
            inputs.shape[1:],
            conditions.shape[1:],
            embedding,
            _scale(inputs) if standardize else None,
            _scale(conditions) if standardize else None,
        )

    return build


def _default_map(dim: int, context_dim: int) -> Map:
    """Return an autoregressive spline with a context."""
    return spline_autoregressive(dim, context_dim=context_dim)


def _scale(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Return mean and standard deviation of every number of a row; 1 for a constant one."""
    std = rows.std(0, correction=0)
    return rows.mean(0), torch.where(std > 0, std, torch.ones_like(std))

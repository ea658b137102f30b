"""log p(w, D) of a target as a function of flat vectors, for all chains at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from bayou.core.params import Params, flatten, under, unflatten
from bayou.kernels.hmc import Density
from bayou.kernels.trace import trace_density
from bayou.network import Network, VmapOrLoop, forward_inputs
from bayou.network.target import Target

MIN_TRACED_CALLS = 500  # calls from which on a trace, which costs about 200 of them, saves time
NOISE = "likelihood."  # prefix of the tensors that belong to the likelihood, not to the network


class Joint:
    """The log joint log p(w, D) and its gradient for C chains.

    w (C, D) holds the free parameters, sorted by name. Parameters of the likelihood (a learned
    ``log_scale``) are among the sampled ones, with a flat prior. The network runs in eval mode with
    its own buffers. The chains are mapped by ``vmap``, or by a loop where an operation has no
    batching rule, with equal results up to rounding.

    Args:
        target: the likelihood, the priors and the number of rows N.
        network: evaluates the network.
        point: named tensors of the shapes of the free parameters.
        loop: whether to use a loop from the start; False by default.
    """

    def __init__(
        self, target: Target, network: Network, point: Params, *, loop: bool = False
    ) -> None:
        self.target = target
        self.network = network
        self.loop: bool = loop
        network.net.eval()
        learned = (
            (name, value)
            for name, value in target.likelihood.named_parameters()
            if value.requires_grad
        )
        noise = {NOISE + name: value.detach() for name, value in learned}
        self.like: dict[str, Tensor] = point | noise
        self.noisy: bool = bool(noise)  # whether parameters of the likelihood are sampled too

    @property
    def start(self) -> Tensor:
        """Return the point as a flat vector: (D,)."""
        return flatten(self.like)

    def tensors(self, w: Tensor) -> Params:
        """Return flat vectors as named tensors (C, *shape).

        Args:
            w: (C, D).
        """
        return unflatten(w, self.like)

    def __call__(
        self, w: Tensor, x: Any, y: Tensor, *, per_chain: bool = False
    ) -> tuple[Tensor, Tensor]:
        """Return log p(w) + (N/M)·Σ_m log p(y_m | x_m, w) and its gradient: (C,), (C, D).

        Args:
            w: (C, D).
            x: the inputs of M rows.
            y: their targets.
            per_chain: whether x and y have a batch for each chain, (C, M, ...), instead of one for
                all; False by default.
        """

        def log_joint(params: Params) -> Tensor:
            log_likelihood = self._log_likelihood(params, x, y, per_chain)
            return self.target.log_prior(params) + self.target.scale(log_likelihood)

        return self._with_gradient(log_joint, w)

    def means(self, w: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        """Return E[y | x, w] of every chain: (C, M, ...).

        Args:
            w: (C, D).
            inputs: of the network, M rows.
        """
        weights, _ = _split_noise(self.tensors(w))
        return self.target.likelihood.mean(self._outputs(weights, inputs, per_chain=False))

    def density(
        self,
        batches: Sequence[tuple[Any, Tensor]],
        like: Tensor,
        *,
        prior: bool = True,
        calls: int = MIN_TRACED_CALLS,
    ) -> Density:
        """Return log p(w, D) and its gradient from all data, as a function of w.

        Args:
            batches: of all rows; their terms are summed.
            like: the shape of w, (C, D).
            prior: whether to include log p(w); False: log p(D | w).
            calls: the maximum number of calls; the function is traced if there are many.
        """
        terms: list[Density] = [
            partial(self._batch_term, x=x, y=y, prior=prior and number == 0)
            for number, (x, y) in enumerate(batches)
        ]
        terms[0](like)  # sets self.loop
        if not self.loop and calls >= MIN_TRACED_CALLS:
            terms = [trace_density(term, like) for term in terms]

        def density(w: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = terms[0](w)
            for term in terms[1:]:
                batch_value, batch_gradient = term(w)
                value = value + batch_value
                gradient = gradient + batch_gradient
            return value, gradient

        return density

    def log_prior(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """Return log p(w) and its gradient: (C,), (C, D).

        Args:
            w: (C, D).
        """
        return self._with_gradient(self.target.log_prior, w)

    def _batch_term(self, w: Tensor, x: Any, y: Tensor, prior: bool) -> tuple[Tensor, Tensor]:
        """Return the term of one batch, Σ_m log p(y_m | x_m, w), with the prior if requested."""

        def log_density(params: Params) -> Tensor:
            value = self._log_likelihood(params, x, y, per_chain=False).sum(-1)
            return value + self.target.log_prior(params) if prior else value

        return self._with_gradient(log_density, w)

    def _with_gradient(
        self, function: Callable[[Params], Tensor], w: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return values (C,) and gradients (C, D), by one backward pass of independent chains."""
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            value = function(self.tensors(w))
            (gradient,) = torch.autograd.grad(value.sum(), w)
            return value.detach(), gradient

    def _log_likelihood(self, params: Params, x: Any, y: Tensor, per_chain: bool) -> Tensor:
        """Return log p(y_m | x_m, w) of every chain and example: (C, M)."""
        weights, noise = _split_noise(params)
        outputs = self._outputs(weights, forward_inputs(x), per_chain)
        if not noise and not per_chain:
            return self.target.likelihood.log_prob(outputs, y)  # which supports sample axes
        axes = (0, 0, 0 if per_chain else None)
        return self._map_chains(self._chain_log_likelihood, axes, noise, outputs, y)

    def _outputs(self, weights: Params, inputs: tuple[Any, ...], per_chain: bool) -> Tensor:
        """Return the outputs of every chain: (C, M, *out)."""
        axes = tuple(0 if per_chain and isinstance(item, Tensor) else None for item in inputs)
        return self._map_chains(self.network.evaluate, (0, *axes), weights, *inputs)

    def _map_chains(
        self, function: Callable[..., Tensor], axes: tuple[int | None, ...], *args: Any
    ) -> Tensor:
        """Evaluate a function of one chain for all chains."""
        mapping = VmapOrLoop(function, axes, loop=self.loop)
        values: Tensor = mapping(*args)
        self.loop = mapping.loop
        return values

    def _chain_log_likelihood(self, noise: Params, outputs: Tensor, y: Tensor) -> Tensor:
        """Return log p(y_m | f_m) of one chain: (M,)."""
        log_probs: Tensor = functional_call(self.target.likelihood, noise, (outputs, y))
        return log_probs


def _split_noise(params: Params) -> tuple[Params, Params]:
    """Return the weights of the network, and the parameters of the likelihood by name."""
    weights = {name: value for name, value in params.items() if not name.startswith(NOISE)}
    return weights, under(NOISE, params)

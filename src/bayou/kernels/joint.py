"""log p(w, D) of a target as a function of flat vectors, for all chains at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call

from bayou.kernels.hmc import Density
from bayou.kernels.trace import traced
from bayou.network import Network, VmapOrLoop, forward_inputs
from bayou.params import Params, flatten, under, unflatten
from bayou.target import Target

MIN_TRACED_CALLS = 500  # calls from which on a trace, which costs about 200 of them, saves time
NOISE = "likelihood."  # prefix of the tensors that belong to the likelihood, not to the network


class Joint:
    """log p(w, D) and its gradient for C chains: w (C, D) holds the free parameters, sorted by
    name.

    Parameters of the likelihood (a learned ``log_scale``) are among the sampled
    ones, with a flat prior. The network runs in eval mode with its own buffers. The chains are
    mapped by ``vmap``, or by a loop where an operation has no batching rule (``loop``), with equal
    results up to rounding.
    """

    def __init__(
        self, target: Target, network: Network, point: Params, *, loop: bool = False
    ) -> None:
        self.target, self.network, self.loop = target, network, loop
        network.net.eval()
        learned = (
            (name, value)
            for name, value in target.likelihood.named_parameters()
            if value.requires_grad
        )
        noise = {NOISE + name: value.detach() for name, value in learned}
        self.like = point | noise
        self.noisy = bool(noise)  # whether parameters of the likelihood are sampled too

    @property
    def start(self) -> Tensor:
        """The point as a flat vector: (D,)."""
        return flatten(self.like)

    def tensors(self, w: Tensor) -> Params:
        """Flat vectors (C, D) as named tensors (C, *shape)."""
        return unflatten(w, self.like)

    def __call__(self, w: Tensor, x: Any, y: Tensor, *, own: bool = False) -> tuple[Tensor, Tensor]:
        """log p(w) + (N/M)·Σ_m log p(y_m | x_m, w) and its gradient: (C,), (C, D).

        x, y: one batch for all chains, or with ``own`` one batch for each, (C, M, ...).
        """

        def log_joint(params: Params) -> Tensor:
            return self.target.log_prior(params) + self.target.scale(
                self._log_likelihood(params, x, y, own)
            )

        return self._with_gradient(log_joint, w)

    def means(self, w: Tensor, inputs: tuple[Any, ...]) -> Tensor:
        """E[y | x, w] of every chain: (C, M, ...)."""
        weights = {
            name: value
            for name, value in unflatten(w, self.like).items()
            if not name.startswith(NOISE)
        }
        return self.target.likelihood.mean(self._outputs(weights, inputs, own=False))

    def density(
        self,
        batches: Sequence[tuple[Any, Tensor]],
        like: Tensor,
        *,
        prior: bool = True,
        calls: int = MIN_TRACED_CALLS,
    ) -> Density:
        """log p(w, D) and its gradient from all data, for vectors shaped like ``like`` (C, D),
        summed over batches.

        ``prior=False``: log p(D | w). ``calls``: the maximum number of calls; the function is
        traced if there are many.
        """
        parts = [
            partial(self._part, x=x, y=y, prior=prior and number == 0)
            for number, (x, y) in enumerate(batches)
        ]
        parts[0](like)  # sets self.loop
        run = (
            parts
            if self.loop or calls < MIN_TRACED_CALLS
            else [traced(part, like) for part in parts]
        )

        def density(w: Tensor) -> tuple[Tensor, Tensor]:
            value, gradient = run[0](w)
            for part in run[1:]:
                more, slope = part(w)
                value, gradient = value + more, gradient + slope
            return value, gradient

        return density

    def log_prior(self, w: Tensor) -> tuple[Tensor, Tensor]:
        """log p(w) and its gradient: (C,), (C, D)."""
        return self._with_gradient(self.target.log_prior, w)

    def _part(self, w: Tensor, x: Any, y: Tensor, prior: bool) -> tuple[Tensor, Tensor]:
        """The term of one batch, Σ_m log p(y_m | x_m, w), with the prior if requested."""

        def log_density(params: Params) -> Tensor:
            value = self._log_likelihood(params, x, y, own=False).sum(-1)
            return value + self.target.log_prior(params) if prior else value

        return self._with_gradient(log_density, w)

    def _with_gradient(
        self, function: Callable[[Params], Tensor], w: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Values (C,) and their gradients (C, D); chains are independent, so one backward pass
        suffices.
        """
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            value = function(unflatten(w, self.like))
            (gradient,) = torch.autograd.grad(value.sum(), w)
            return value.detach(), gradient

    def _log_likelihood(self, params: Params, x: Any, y: Tensor, own: bool) -> Tensor:
        """log p(y_m | x_m, w) of every chain and example: (C, M)."""
        weights = {name: value for name, value in params.items() if not name.startswith(NOISE)}
        noise = {name: value for name, value in params.items() if name.startswith(NOISE)}
        outputs = self._outputs(weights, forward_inputs(x), own)
        if not noise and not own:
            return self.target.likelihood.log_prob(outputs, y)  # which supports sample axes
        each: Tensor = self._mapped(self._each, (0, 0, 0 if own else None), noise, outputs, y)
        return each

    def _outputs(self, weights: Params, inputs: tuple[Any, ...], own: bool) -> Tensor:
        """The outputs of every chain: (C, M, *out)."""
        axes = tuple(0 if own and isinstance(item, Tensor) else None for item in inputs)
        out: Tensor = self._mapped(self.network.evaluate, (0, *axes), weights, *inputs)
        return out

    def _mapped(
        self, function: Callable[..., Tensor], axes: tuple[int | None, ...], *args: Any
    ) -> Any:
        each = VmapOrLoop(function, axes, loop=self.loop)
        out = each(*args)
        self.loop = each.loop
        return out

    def _each(self, noise: Params, outputs: Tensor, y: Tensor) -> Tensor:
        """log p(y_m | f_m) of one chain: (M,)."""
        each: Tensor = functional_call(self.target.likelihood, under(NOISE, noise), (outputs, y))
        return each

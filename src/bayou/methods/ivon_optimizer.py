"""The update of IVON as an optimizer for training loops of other libraries."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from glob import escape
from typing import Any, final

import torch
from torch import nn

from bayou.core import rng
from bayou.guides import Delta, MeanField
from bayou.guides.gaussian import Factorized
from bayou.likelihoods import Likelihood
from bayou.methods.ivon import IVON, bounded, log_std_of, natural_step
from bayou.posteriors.guided import Bayesian, Guided
from bayou.priors import Normal


@final
class IVONOptimizer(torch.optim.Optimizer):
    """The update of ``IVON`` for training loops of other libraries, in place of Adam.

    The parameters are the means m of q. Call ``loss.backward()``, of a mean over the batch, inside
    the block ``with optimizer.sampled_params(train=True)`` and ``step()`` after it;
    ``step(closure)`` has that block itself. Several blocks before a step accumulate; divide each
    loss by their number, as for any optimizer. The gradients are kept here and not in ``.grad``:
    clipping them would bias the curvature. Noise is a function of (seed, number of the draw), the
    same on all ranks.

    Args:
        params: tensors or groups of them, which may have settings of their own.
        lr: the learning rate, 0.1 by default.
        n: the number N of training examples; a larger n gives their likelihood more weight than the
            prior's.
        prior_std: of the prior N(0, prior_std²) of every weight, in place of weight decay; 1 by
            default.
        hessian: h₀, where the curvature of the mean loss starts; 0.1 by default.
        beta1: β₁, of the gradient; 0.9 by default.
        beta2: β₂, of the curvature, 0.99999 by default; 1 − 5/steps forgets the start of a short
            run.
        seed: of the draws; 0 by default.

    Raises:
        ValueError: for settings out of range.

    >>> import bayou, torch
    >>> net = torch.nn.Linear(1, 1)
    >>> optimizer = bayou.methods.IVONOptimizer(net.parameters(), n=20)
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> with optimizer.sampled_params(train=True):
    ...     torch.nn.functional.mse_loss(net(x), 2 * x).backward()
    >>> optimizer.step()

    Paper: Shen et al. 2024, https://arxiv.org/abs/2402.17641.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 0.1,
        *,
        n: int,
        prior_std: float = 1.0,
        hessian: float = 0.1,
        beta1: float = 0.9,
        beta2: float = 0.99999,
        seed: int = 0,
    ) -> None:
        IVON(lr=lr, hessian=hessian, beta1=beta1, beta2=beta2)  # which validates them
        if not n >= 1 or not 0 < prior_std < math.inf:
            raise ValueError(
                "IVONOptimizer needs n >= 1 and a positive and finite prior_std, "
                f"got n={n!r}, prior_std={prior_std!r}"
            )
        self.seed = seed
        self._is_sampling = False
        settings = {
            "n": n,
            "prior_std": prior_std,
            "hessian": hessian,
            "beta1": beta1,
            "beta2": beta2,
        }
        super().__init__(params, {"lr": lr} | settings)

    def _entries(self) -> Iterator[tuple[nn.Parameter, dict[str, Any], dict[str, Any], float]]:
        """Yield every parameter with its settings, its state and δ."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.requires_grad:
                    state = self.state[p]
                    if not state:
                        state.update(
                            t=0,
                            draws=0,
                            g=torch.zeros_like(p),
                            h=torch.full_like(p, group["hessian"]),
                        )
                    yield p, group, state, 1 / (group["n"] * group["prior_std"] ** 2)

    @contextmanager
    def sampled_params(self, train: bool = False) -> Iterator[None]:
        """Set the parameters to a draw of q inside the block.

        Args:
            train: whether ``backward()`` is called in the block, for the next step; False by
                default.
        """
        draws = []
        with torch.no_grad():
            for number, (p, group, state, delta) in enumerate(self._entries()):
                std = log_std_of(state["h"], delta, group["n"]).exp()
                noise = rng.normal(1, p.shape, p, rng.fold(self.seed, number, state["draws"]))[0]
                draws.append((p, state, p.detach().clone(), noise / std))
                state["draws"] += 1
                p.add_(std * noise)
                p.grad = None if train else p.grad
        self._is_sampling = True
        try:
            yield
        finally:
            self._is_sampling = False
            for p, state, mean, factor in draws:
                p.data.copy_(mean)
                if train and p.grad is not None:
                    for name, value in (("grad", p.grad), ("product", p.grad * factor)):
                        state[name] = state[name] + value if name in state else value
                    p.grad = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step; with a closure, on its gradient at a draw.

        Args:
            closure: computes the loss and calls ``backward()``; None after a block of
                ``sampled_params(train=True)``.

        Returns:
            The loss of the closure; None without.

        Raises:
            RuntimeError: if there are no gradients of a draw, or inside a block.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad(), self.sampled_params(train=True):
                loss = closure()
        entries = [entry for entry in self._entries() if "product" in entry[2]]
        if self._is_sampling or not entries:
            raise RuntimeError(
                "call backward() inside a block of sampled_params(train=True), and step() after it"
            )
        for p, group, state, delta in entries:
            state["t"] += 1
            gradient = state.pop("grad")
            curvature = state.pop("product")
            std = log_std_of(state["h"], delta, group["n"]).exp()
            move = natural_step(
                state, gradient, curvature, delta, p, group["beta1"], group["beta2"]
            )
            p.sub_(bounded(group["lr"] * (group["hessian"] + delta) * move, std))
        return loss

    @torch.no_grad()
    def posterior(self, net: nn.Module, likelihood: Likelihood) -> Guided:
        """Return q as ``bayou.fit`` does: a copy of the current means and scales.

        Args:
            net: the network of the parameters; those that the optimizer does not have stay points.
            likelihood: p(y | f), of which the loss was the mean of −log p.
        """
        scales = {
            id(p): (group["prior_std"], log_std_of(state["h"], delta, group["n"]))
            for p, group, state, delta in self._entries()
        }
        free = {
            name: scales.get(id(p), (1.0, None))
            for name, p in net.named_parameters()
            if p.requires_grad
        }
        rules = {
            escape(name): Delta() if log_std is None else MeanField()
            for name, (_, log_std) in free.items()
        }
        priors = {escape(name): Normal(prior_std) for name, (prior_std, _) in free.items()}
        bayesian = Bayesian(net, rules, priors)
        for guide in bayesian.guides:
            log_std = free[guide.names[0]][1]
            if isinstance(guide, Factorized) and log_std is not None:
                guide.log_std.copy_(log_std)
        return bayesian.posterior(likelihood, self.param_groups[0]["n"])

"""Posteriors made of points: one for MLE and MAP, a few for an ensemble, many for a chain."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, shared, size
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors.posterior import Posterior, check_count
from bayou.posteriors.state import SavedState, target_state


@final
class Empirical(Posterior):
    """q(w) = 1/K Σ_k δ(w − w_k), a list of K points.

    Beside all parameters a stack may hold buffers of the network and parameters of the likelihood,
    one for each point. A tensor that all points share is an expanded view
    (``value.expand(K, *shape)``): one copy in memory and in files.

    Args:
        target: network, likelihood and prior.
        network: the network as a function of its tensors.
        stack: the K points, (K, *shape) each.
        history: records of the fit; none by default.
        chains: how many chains the points come from; those of a chain lie side by side, in order.
        mixing: R-hat, effective sample sizes and the like of a sampler's chains
            (``docs/methods.md``); None of anything else.
    """

    kind = "empirical"
    no_update = "its draws are points, which have no density that further rows could change"
    stack: Params

    def __init__(
        self,
        target: Target,
        network: Network,
        stack: Params,
        history: list[dict[str, float]] | None = None,
        *,
        chains: int = 1,
        mixing: dict[str, Any] | None = None,
    ) -> None:
        self.target = target
        self.network = network
        self.stack = {name: value.detach() for name, value in stack.items()}
        self.history: list[dict[str, float]] = history or []
        self.stopped = ""
        self.chains = chains
        self.mixing = mixing
        if size(self.stack) % chains:
            raise ValueError(
                f"{size(self.stack)} points do not divide into {chains} chains of one length"
            )

    @property
    def draws(self) -> int:
        """The number of points."""
        return size(self.stack)

    def template(self) -> Params:
        """Return the first point."""
        return {name: value[0] for name, value in self.stack.items()}

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Return points in random order, each once before any is repeated.

        With an int seed, draw i is a function of (seed, i).

        Args:
            n: the number of draws.
            seed: of the order; None (the default) takes it from torch's global stream.
            start: the number of the first draw.

        Returns:
            Tensors by name, (n, *shape) each.
        """
        check_count(n)
        index = shuffled_indices(self.draws, n, seed, start)
        draws: Params = {}
        for name, value in self.stack.items():
            if shared(value):
                draws[name] = value[:1].expand(n, *value.shape[1:])
            else:
                draws[name] = value[index.to(value.device)]
        return draws

    def mean(self) -> Params:
        """Compute the mean of the points; with several points rarely a good network."""
        return {
            name: value.mean(0) for name, value in self.stack.items() if value.is_floating_point()
        }

    def std(self) -> Params:
        """Compute the standard deviation of every number over the points."""
        return {
            name: value.std(0, correction=0)
            for name, value in self.stack.items()
            if value.is_floating_point()
        }

    def by_chain(self, samples: int | None = None, seed: rng.Seed = 0) -> Params:
        """Return all points by chain, (chains, draws, *shape) each.

        Args:
            samples: must be None, since all points are returned.
            seed: without effect.
        """
        if samples is not None:
            raise ValueError(f"all {self.draws:,} points are exported; omit samples=")
        return {name: value.unflatten(0, (self.chains, -1)) for name, value in self.stack.items()}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the points, their shared tensors, the number of chains and their diagnostics."""
        shared_names = [name for name, value in self.stack.items() if shared(value)]
        stack = {
            name: value[:1] if name in shared_names else value for name, value in self.stack.items()
        }
        tensors, config = target_state(self, stack=stack)
        config["chains"] = self.chains
        config["shared"] = shared_names
        if self.mixing is not None:
            config["mixing"] = self.mixing
        return tensors, config

    @classmethod
    def restore(cls, saved: SavedState, net: nn.Module) -> Empirical:
        """Return the posterior with a ``state``, see ``Posterior.restore``."""
        target = saved.target(net)
        config = saved.config
        stack = saved.group("stack")
        points = max(len(value) for value in stack.values())
        stack = {name: value.expand(points, *value.shape[1:]) for name, value in stack.items()}
        return cls(
            target,
            saved.network(target),
            stack,
            config["history"],
            chains=config["chains"],
            mixing=config.get("mixing"),
        )

    def __repr__(self) -> str:
        weights = sum(value[0].numel() for value in self.stack.values())
        points = f"{self.draws:,} points" if self.draws > 1 else "a point"
        chains = f" of {self.chains} chains" if self.chains > 1 else ""
        mixing = self.mixing or {}
        diagnostics = ""
        if "r_hat" in mixing:
            diagnostics = f"; R-hat {mixing['r_hat']:.3g}, ESS {mixing['ess']:.0f}"
        if not mixing.get("mixed", True):
            diagnostics += ", not mixed"
        net = type(self.target.net).__name__
        return f"Empirical({net}: {points}{chains} of {weights:,} weights{diagnostics})"


def shuffled_indices(count: int, n: int, seed: rng.Seed, start: int = 0) -> Tensor:
    """Return entries of repeated random permutations of 0 .. count − 1.

    Args:
        count: the length of a permutation.
        n: the number of entries.
        seed: of the permutations.
        start: the number of the first entry.

    Returns:
        Entries start .. start + n − 1, (n,).
    """
    seed = rng.integer(seed)
    rounds = range(start // count, -(-(start + n) // count))
    if not rounds:
        return torch.empty(0, dtype=torch.long)
    orders = [rng.permutation(count, rng.fold(seed, "round", number)) for number in rounds]
    return torch.cat(orders)[start % count :][:n]

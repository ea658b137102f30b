"""Gaussian posteriors with a structured covariance: Laplace, SWAG, IVON."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.curvature import Covariance
from bayou.network import Network
from bayou.params import Params
from bayou.posteriors.empirical import restored
from bayou.posteriors.files import FileError
from bayou.posteriors.posterior import Posterior, check_count, restore_target, target_state, under
from bayou.target import Target


@final
class GaussianPosterior(Posterior):
    """q(w) = N(mean, Σ) over some of the tensors; the others are points at their mean."""

    kind = "gaussian"

    def __init__(
        self,
        target: Target,
        network: Network,
        mean: Params,
        covariance: Covariance,
        history: list[dict[str, float]] | None = None,
    ) -> None:
        self.target, self.network, self.covariance = target, network, covariance
        self.mean = {name: value.detach() for name, value in mean.items()}
        self.history, self.stopped = history or [], ""

    @property
    def net(self) -> nn.Module:
        return self.network.net

    def like(self) -> Params:
        return dict(self.mean)

    def call(self, params: Params, *inputs: Any) -> Tensor:
        return self.network.call(params, *inputs)

    @torch.no_grad()
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws of all parameters, (n, *shape) each; with an int seed, draw i is a function of (seed, i) alone."""
        check_count(n)
        deviation = self.covariance.sample(n, seed, start)
        return {
            name: value + deviation[name] if name in deviation else value.expand(n, *value.shape)
            for name, value in self.mean.items()
        }

    def log_prob(self, params: Params) -> Tensor:
        """log q(w) of the tensors (..., *shape) that are not points."""
        return self.covariance.log_prob({name: params[name] - self.mean[name] for name in self.covariance.shapes})

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, config = target_state(self)
        tensors |= {f"mean.{name}": value for name, value in self.mean.items()}
        tensors |= {f"covariance.{name}": value for name, value in self.covariance.tensors.items()}
        tensors |= {f"net.{name}": value for name, value in self.network.buffers().items()}
        config["covariance"] = [self.covariance.kind, {n: list(s) for n, s in self.covariance.shapes.items()}]
        return tensors, config

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any
    ) -> GaussianPosterior:
        target = restore_target(tensors, config, net, **options)
        kinds = {family.kind: family for family in Covariance.__subclasses__()}
        kind, shapes = config["covariance"]
        if kind not in kinds:
            raise FileError(
                f"{config['path']} has a covariance of the kind {kind!r}; expected one of {', '.join(kinds)}"
            )
        device = next(net.parameters()).device
        placed = {name: value.to(device) for name, value in tensors.items()}
        covariance = kinds[kind](shapes, under("covariance.", placed))
        posterior = cls(target, restored(net, tensors, config), under("mean.", placed), covariance, config["history"])
        posterior.stopped = config["stopped"]
        return posterior

    def __repr__(self) -> str:
        net, kind, size = type(self.target.net).__name__, self.covariance.kind, self.covariance.size
        total = sum(value.numel() for value in self.mean.values())
        return f"GaussianPosterior({net}: {kind} over {size:,} of {total:,} weights)"

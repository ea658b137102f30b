"""Posteriors of variational methods: a guide over the network's tensors."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.guides.bayesian import Bayesian, Rules
from bayou.guides.gaussian import Factorized, Point
from bayou.guides.guide import Guide, GuideSpec
from bayou.likelihoods import Likelihood
from bayou.params import Params, match
from bayou.posteriors.files import FileError, no_grad_state, read_file, write_file
from bayou.posteriors.posterior import Posterior, evaluating
from bayou.priors import BoundNormal, DensityPrior, Prior
from bayou.specs import from_json, to_json
from bayou.target import PriorRules, Target


class Guided(Posterior):
    """q(w), with ``bayesian`` the network and its guides."""

    def __init__(self, target: Target, bayesian: Bayesian, history: list[dict[str, float]] | None = None) -> None:
        self.target, self.bayesian = target, bayesian
        self.history = history or []
        self.stopped = ""

    @property
    def net(self) -> nn.Module:
        return self.bayesian.net

    @torch.no_grad()
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws of all parameters, (n, *shape) each; with an int seed, draw i is a function of (seed, i) alone."""
        if isinstance(n, bool) or not isinstance(n, int) or n < 0:
            raise ValueError(f"cannot draw {n!r} samples; it must be a whole number")
        with evaluating(self.bayesian):
            return self.bayesian.sample(n, seed, start)

    def like(self) -> Params:
        return self.bayesian.mean()

    def call(self, params: Params, *inputs: Any) -> Tensor:
        return self.bayesian.call(params, *inputs)

    def log_prob(self, params: Params) -> Tensor:
        """log q(w) of tensors (..., *shape); a ValueError where the family has no tractable density."""
        return self.bayesian.log_prob(params)

    def as_prior(self) -> dict[str, Prior]:
        """This posterior as the prior of the next task, ``fit(..., prior=posterior.as_prior())`` (VCL, Nguyen 2018).

        A prior belongs to one tensor, so every family needs a density of each tensor by itself: FFG and SparseVD have
        it, LowRank and JointFlow where they cover one tensor only, MNF and other gains do not. Points keep their prior.
        """
        given, names = self.target.prior, self.bayesian.names
        old = match(names, given) if isinstance(given, Mapping) else dict.fromkeys(names, given)
        priors: dict[str, Prior] = {}
        for guide in self.bayesian.guides:
            name = guide.names[0]
            if isinstance(guide, Point):
                priors[_escape(name)] = old[name]
            elif isinstance(guide, Factorized):
                normal = BoundNormal(guide.center.shape, guide.center, guide.log_std)
                priors[_escape(name)] = DensityPrior(normal)
            elif len(guide.names) == 1 and guide.log_prob(guide.mean()) is not None:
                priors[_escape(name)] = DensityPrior(TensorDensity(guide))
            else:
                family, tensors = type(self.bayesian.specs[name]).__name__, ", ".join(guide.names)
                raise ValueError(f"{family} over {tensors} gives no density of each tensor by itself; use FFG to go on")
        return priors

    def save(self, path: str | os.PathLike[str]) -> None:
        groups = [list(guide.names) for guide in self.bayesian.guides]
        config = {
            "kind": "guided",
            "rules": [[names, to_json(self.bayesian.specs[names[0]])] for names in groups],
            "local": sorted(self.bayesian.local_names),
            "prior": to_json(self.target.prior),
            "likelihood": to_json(self.target.likelihood_spec),
            "n": self.target.n,
            "shapes": {name: list(value.shape) for name, value in self.bayesian.mean().items()},
            "history": self.history,
            "stopped": self.stopped,
        }
        state = {f"bayesian.{k}": v for k, v in no_grad_state(self.bayesian).items()}
        state |= {f"likelihood.{k}": v for k, v in no_grad_state(self.target.likelihood).items()}
        write_file(path, state, config)

    def __repr__(self) -> str:
        weights: dict[str, int] = {}
        for guide in self.bayesian.guides:
            family = type(self.bayesian.specs[guide.names[0]]).__name__
            mean = guide.mean()
            weights[family] = weights.get(family, 0) + sum(mean[name].numel() for name in guide.names)
        families = " + ".join(f"{family} over {count:,}" for family, count in weights.items())
        last = f", last ELBO {self.history[-1]['elbo']:,.1f}" if self.history and "elbo" in self.history[-1] else ""
        stopped = f", {self.stopped} after {int(self.history[-1]['step']) + 1:,} steps" if self.history else ""
        net = type(self.target.net).__name__
        return f"Guided({net}: {families} of {sum(weights.values()):,} weights{last}{stopped})"

    @staticmethod
    def load(
        path: str | os.PathLike[str],
        net: nn.Module,
        *,
        rules: Rules | None = None,
        prior: PriorRules | None = None,
        likelihood: Likelihood | None = None,
    ) -> Guided:
        """The posterior in a file, for the network it was fitted to (its weights do not matter, its shapes do).

        A file holds no code: what was made with a callable (a flow, a density as a prior) has to be said again by
        ``rules``, ``prior`` or ``likelihood``.
        """
        tensors, config = read_file(path, "guided")
        shapes = {name: list(value.shape) for name, value in net.named_parameters()}
        odd = [n for n in [*config["shapes"], *shapes] if shapes.get(n) != config["shapes"].get(n)]
        if odd:
            raise FileError(
                f"{path} belongs to another network: {odd[0]!r} is {config['shapes'].get(odd[0], 'not')} in the file "
                f"and {shapes.get(odd[0], 'not')} here; build the network it was fitted to"
            )
        if rules is None:
            rules = {}
            for names, spec in config["rules"]:
                made = _spec(path, "rules", spec, GuideSpec)
                rules |= dict.fromkeys(map(_escape, names), made)
        prior = _spec(path, "prior", config["prior"], Prior) if prior is None else prior
        likelihood = _spec(path, "likelihood", config["likelihood"], Likelihood) if likelihood is None else likelihood
        target = Target.build(net, likelihood, prior, config["n"])
        like = next(net.parameters())
        with rng.isolated(0, like.device):  # flows start at random weights, which the file's replace
            bayesian = Bayesian(net, rules, prior)
        state, noise = (
            {k.removeprefix(part): v for k, v in tensors.items() if k.startswith(part)}
            for part in ("bayesian.", "likelihood.")
        )
        first = next(v for k, v in state.items() if k.startswith("guides.") and v.is_floating_point())
        try:
            bayesian.to(first.dtype).load_state_dict(state)
            target.likelihood.to(first.dtype).load_state_dict(noise)
        except RuntimeError as error:
            raise FileError(f"{path} does not fit this network and these rules: {error}") from None
        bayesian._local = set(config["local"])
        posterior = Guided(target, bayesian.eval(), config["history"])
        posterior.stopped = config["stopped"]
        return posterior


def _spec(path: str | os.PathLike[str], what: str, value: Any, family: type) -> Any:
    try:
        return from_json(value, family)
    except ValueError as error:
        raise FileError(f"{path}: {error}; pass the {what} it was fitted with: load(..., {what}=...)") from None


class TensorDensity(nn.Module):
    """q of a guide over one tensor as a density of that tensor."""

    def __init__(self, guide: Guide) -> None:
        super().__init__()
        self.guide = guide

    def log_prob(self, w: Tensor) -> Tensor:
        """log q(w): (..., *shape) to (...)."""
        value = self.guide.log_prob({self.guide.names[0]: w})
        assert value is not None
        return value

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Tensor:
        """Draws start .. start + n − 1: (n, *shape)."""
        return self.guide.sample(n, seed, start)[self.guide.names[0]]


def _escape(name: str) -> str:
    """A name as a pattern that matches itself alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)

"""Posteriors of variational methods: a guide over the network's tensors."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.guides.bayesian import Bayesian
from bayou.guides.guide import GuideSpec
from bayou.likelihoods import Likelihood
from bayou.params import Params
from bayou.posteriors.files import FileError, no_grad_state, read_file, write_file
from bayou.posteriors.posterior import Posterior
from bayou.priors import Prior
from bayou.specs import from_json, to_json
from bayou.target import Target


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
        was_training = self.bayesian.training
        self.bayesian.eval()
        try:
            return self.bayesian.sample(n, seed, start)
        finally:
            self.bayesian.train(was_training)

    def call(self, params: Params, *inputs: Any) -> Tensor:
        return self.bayesian.call(params, *inputs)

    def log_prob(self, params: Params) -> Tensor:
        """log q(w) of tensors (..., *shape); a ValueError where the family has no tractable density."""
        return self.bayesian.log_prob(params)

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

    @staticmethod
    def load(path: str | os.PathLike[str], net: nn.Module, rules: dict[str, GuideSpec] | None = None) -> Guided:
        """The posterior in a file, for the network it was fitted to (its weights do not matter, its shapes do)."""
        tensors, config = read_file(path, "guided")
        shapes = {name: list(value.shape) for name, value in net.named_parameters()}
        if shapes != config["shapes"]:
            names = sorted(
                n for n in shapes.keys() | config["shapes"].keys() if shapes.get(n) != config["shapes"].get(n)
            )
            first = names[0] if names else "the order of the names"
            raise FileError(
                f"{path} belongs to another network: {first!r} is {config['shapes'].get(first)} in the file and "
                f"{shapes.get(first)} here; build the network it was fitted to"
            )
        if rules is None:
            rules = {}
            for names, spec in config["rules"]:
                rules |= dict.fromkeys(names, from_json(spec, GuideSpec))
        likelihood, prior = from_json(config["likelihood"], Likelihood), from_json(config["prior"], Prior)
        target = Target.build(net, likelihood, prior, config["n"])
        bayesian = Bayesian(net, {_escape(name): spec for name, spec in rules.items()}, prior)
        state = {k.removeprefix("bayesian."): v for k, v in tensors.items() if k.startswith("bayesian.")}
        first = next(v for k, v in state.items() if k.startswith("guides.") and v.is_floating_point())
        bayesian.to(first.dtype)
        bayesian.load_state_dict(state)
        bayesian._local = set(config["local"])
        target.likelihood.to(first.dtype)
        target.likelihood.load_state_dict(
            {k.removeprefix("likelihood."): v for k, v in tensors.items() if k.startswith("likelihood.")}
        )
        posterior = Guided(target, bayesian, config["history"])
        posterior.stopped = config["stopped"]
        return posterior


def _escape(name: str) -> str:
    """A name as a pattern that matches itself alone."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)

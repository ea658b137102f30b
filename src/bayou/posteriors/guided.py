"""Posteriors of variational methods: a guide over the network's tensors."""

from __future__ import annotations

import glob
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import FileError, no_grad_state
from bayou.core.params import Params, under
from bayou.core.specs import to_json
from bayou.guides.bayesian import Bayesian, Rules
from bayou.guides.guide import Guide, GuideSpec
from bayou.network import evaluating
from bayou.posteriors.posterior import Posterior, check_count
from bayou.posteriors.state import (
    load_state,
    restore_buffers,
    restore_spec,
    restore_target,
    target_state,
)
from bayou.priors import BoundPrior, Prior
from bayou.target import Target, prior_specs


class Guided(Posterior):
    """q(w), with ``bayesian`` the network and its guides."""

    kind = "guided"
    centered = True
    bayesian: Bayesian

    def __init__(
        self, target: Target, bayesian: Bayesian, history: list[dict[str, float]] | None = None
    ) -> None:
        self.target, self.bayesian, self.network = target, bayesian, bayesian.network
        self.history = history or []
        self.stopped = ""

    @property
    def draws(self) -> int | None:
        """The number of members that are points (``RankOne``); None for any other family."""
        members = self.bayesian.members
        return (
            members if members > 1 and all(guide.points for guide in self.bayesian.guides) else None
        )

    @torch.no_grad()
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws of all parameters, (n, *shape) each; with an int seed, draw i is a function of
        (seed, i) alone.
        """
        check_count(n)
        with evaluating(self.bayesian):
            return self.bayesian.sample(n, seed, start)

    def like(self) -> Params:
        return self.bayesian.mean()

    def mean(self) -> Params:
        self.std()
        return {name: value.detach() for name, value in self.bayesian.mean().items()}

    def std(self) -> Params:
        found: Params = {}
        for guide in self.bayesian.guides:
            std = guide.std()
            if std is None:
                family = self._family(guide)
                raise ValueError(
                    f"{family} over {', '.join(guide.names)} has no mean and std in closed form; take those of "
                    "posterior.sample(1000)"
                )
            found |= {name: value.detach() for name, value in std.items()}
        return {name: found[name] for name in self.bayesian.names}

    def _family(self, guide: Guide) -> str:
        return type(self.bayesian.specs[guide.names[0]]).__name__

    def log_prob(self, params: Params) -> Tensor:
        """log q(w) of tensors (..., *shape); a ValueError where the family has no tractable
        density.
        """
        return self.bayesian.log_prob(params)

    def as_prior(self) -> dict[str, Prior]:
        """This posterior as the prior of the next task, ``fit(..., prior=posterior.as_prior())``
        (VCL, Nguyen 2018).

        MeanField and SparseVD: a Normal of each tensor. LowRank, JointFlow, Inducing: their
        density, of all tensors together. MNF has only a bound of its density: its prior is the
        Normal with the mean and the variance of each weight, without the correlation of the weights
        of a unit that its gain causes. Other gains and implicit families have none. Points keep
        their prior.
        """
        names = self.bayesian.names
        old = prior_specs(self.target.prior, self.target.net)
        priors: dict[str, Prior] = {}
        for guide in self.bayesian.guides:
            guide_priors = guide.as_prior()
            if guide_priors is None:
                family = self._family(guide)
                tensors = ", ".join(guide.names)
                condition = f", only given {', '.join(guide.parents)}" if guide.parents else ""
                raise ValueError(
                    f"{family} over {tensors} has no density{condition}; "
                    "use MeanField, LowRank or MNF to continue"
                )
            priors |= guide_priors
        return {glob.escape(name): priors[name] if name in priors else old[name] for name in names}

    def bound_priors(self) -> dict[str, BoundPrior]:
        found: dict[str, BoundPrior] = {}
        for guide in self.bayesian.guides:
            found |= guide.bound_priors()
        return {name: found[name] for name in self.bayesian.names}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        groups = [list(guide.names) for guide in self.bayesian.guides]
        tensors, config = target_state(self)
        config["rules"] = [[names, to_json(self.bayesian.specs[names[0]])] for names in groups]
        config["local"] = sorted(self.bayesian.local_names)
        if self.bayesian.position_names:
            config["positions"] = sorted(self.bayesian.position_names)
        return tensors | {
            f"guides.{k}": v for k, v in no_grad_state(self.bayesian.guides).items()
        }, config

    def __repr__(self) -> str:
        weights: dict[str, int] = {}
        mean = self.bayesian.mean()
        for guide in self.bayesian.guides:
            family = self._family(guide)
            weights[family] = weights.get(family, 0) + sum(
                mean[name].numel() for name in guide.names
            )
        families = " + ".join(f"{family} over {count:,}" for family, count in weights.items())
        last = (
            f", last ELBO {self.history[-1]['elbo']:,.1f}"
            if self.history and "elbo" in self.history[-1]
            else ""
        )
        if last and self.bayesian.position_names:
            last += " (an approximation: noise per position; bayou.elbo has the bound)"
        stopped = (
            f", {self.stopped} after {int(self.history[-1]['step']) + 1:,} steps"
            if self.history
            else ""
        )
        net = type(self.target.net).__name__
        return f"Guided({net}: {families} of {sum(weights.values()):,} weights{last}{stopped})"

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any
    ) -> Guided:
        """The posterior in a file.

        A file holds no code: pass ``rules``, ``prior`` or ``likelihood`` again if they have a
        callable (a flow, a density as a prior).
        """
        path = config["path"]
        rules: Rules | None = options.pop("rules", None)
        target = restore_target(tensors, config, net, **options)
        if rules is None:
            rules = {}
            for names, spec in config["rules"]:
                made = restore_spec(path, "rules", spec, GuideSpec)
                rules |= dict.fromkeys(map(glob.escape, names), made)
        with rng.isolated(
            0, next(net.parameters()).device
        ):  # flows start at random weights, which the file's replace
            bayesian = Bayesian(target.net, rules, target.prior)
        restore_buffers(bayesian.network, target, tensors, path)
        state = under("guides.", tensors)
        for number, guide in enumerate(
            bayesian.guides
        ):  # tensors missing in the file have the dtype of their guide
            own = (
                value.dtype
                for value in under(f"{number}.", state).values()
                if value.is_floating_point()
            )
            guide.to(next(own, None))
        load_state(bayesian.guides, state, path, "network and these rules")
        for number, guide in enumerate(bayesian.guides):
            dtypes = {value.dtype for value in guide.parameters()}
            if len(dtypes) > 1:
                words = " and ".join(sorted(map(str, dtypes)))
                raise FileError(
                    f"{path} has {words} in 'guides.{number}', expected one dtype; fit again"
                )
        bayesian.local_names = frozenset(config["local"])
        bayesian.position_names = frozenset(config.get("positions", ()))
        return cls(target, bayesian.eval(), config["history"])

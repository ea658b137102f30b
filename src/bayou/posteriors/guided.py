"""Posteriors of variational methods: a guide over the network's tensors."""

from __future__ import annotations

import glob
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import FileError, StrPath, no_grad_state
from bayou.core.params import Params, under
from bayou.core.specs import to_json
from bayou.guides.bayesian import Bayesian, Rules
from bayou.guides.guide import Guide, GuideSpec
from bayou.network import evaluating
from bayou.network.target import Target, prior_specs
from bayou.posteriors.posterior import Posterior, check_count
from bayou.posteriors.state import (
    load_state,
    restore_buffers,
    restore_spec,
    restore_target,
    target_state,
)
from bayou.priors import BoundPrior, Prior


class Guided(Posterior):
    """q(w) of a variational method: a guide over each tensor, or over several together.

    Args:
        target: network, likelihood and prior.
        bayesian: the network and its guides, with their parameters.
        history: records of the fit; none by default.
    """

    kind = "guided"
    centered = True
    bayesian: Bayesian

    def __init__(
        self, target: Target, bayesian: Bayesian, history: list[dict[str, float]] | None = None
    ) -> None:
        self.target = target
        self.bayesian = bayesian
        self.network = bayesian.network
        self.history = history or []
        self.stopped = ""

    @property
    def draws(self) -> int | None:
        """The number of members that are points (``RankOne``); None for any other family."""
        members = self.bayesian.members
        if members > 1 and all(guide.points for guide in self.bayesian.guides):
            return members
        return None

    @torch.no_grad()
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw all parameters from the guides.

        With an int seed, draw i is a function of (seed, i) alone.

        Args:
            n: the number of draws.
            seed: of the draws; None (the default) takes them from torch's global stream.
            start: the number of the first draw.

        Returns:
            Tensors by name, (n, *shape) each.
        """
        check_count(n)
        with evaluating(self.bayesian):
            return self.bayesian.sample(n, seed, start)

    def like(self) -> Params:
        """Return the center of the guides."""
        return self.bayesian.mean()

    def mean(self) -> Params:
        """Compute E[w] of every tensor.

        Raises:
            ValueError: for a family without a mean in closed form.
        """
        self.std()  # raises for a family without moments, whose center is not its mean
        return {name: value.detach() for name, value in self.bayesian.mean().items()}

    def std(self) -> Params:
        """Compute the standard deviation of every weight.

        Raises:
            ValueError: for a family without a standard deviation in closed form.
        """
        stds: Params = {}
        for guide in self.bayesian.guides:
            std = guide.std()
            if std is None:
                raise ValueError(
                    f"{self._family(guide)} over {', '.join(guide.names)} has no mean and std in "
                    "closed form; take those of posterior.sample(1000)"
                )
            stds |= {name: value.detach() for name, value in std.items()}
        return {name: stds[name] for name in self.bayesian.names}

    def _family(self, guide: Guide) -> str:
        """Return the name of the family of a guide."""
        return type(self.bayesian.specs[guide.names[0]]).__name__

    def log_prob(self, params: Params) -> Tensor:
        """Compute the log-density log q(w).

        Args:
            params: all tensors by name, (..., *shape) each.

        Returns:
            (...), in nats.

        Raises:
            ValueError: for a family without a tractable density.
        """
        return self.bayesian.log_prob(params)

    def as_prior(self) -> dict[str, Prior]:
        """Return this posterior as the prior of the next task (VCL, Nguyen 2018).

        It is passed as ``bayou.fit(..., prior=posterior.as_prior())``.

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
        """Return the prior of every tensor, with its learned values, by name."""
        priors: dict[str, BoundPrior] = {}
        for guide in self.bayesian.guides:
            priors |= guide.bound_priors()
        return {name: priors[name] for name in self.bayesian.names}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the parameters of the guides and their specs."""
        tensors, config = target_state(self)
        rules = []
        for guide in self.bayesian.guides:
            rules.append([list(guide.names), to_json(self.bayesian.specs[guide.names[0]])])
        config["rules"] = rules
        config["local"] = sorted(self.bayesian.local_names)
        if self.bayesian.position_names:
            config["positions"] = sorted(self.bayesian.position_names)
        for name, value in no_grad_state(self.bayesian.guides).items():
            tensors[f"guides.{name}"] = value
        return tensors, config

    def __repr__(self) -> str:
        weights: dict[str, int] = {}
        mean = self.bayesian.mean()
        for guide in self.bayesian.guides:
            family = self._family(guide)
            count = sum(mean[name].numel() for name in guide.names)
            weights[family] = weights.get(family, 0) + count
        families = " + ".join(f"{family} over {count:,}" for family, count in weights.items())
        elbo = ""
        stopped = ""
        if self.history:
            last = self.history[-1]
            if "elbo" in last:
                elbo = f", last ELBO {last['elbo']:,.1f}"
                if self.bayesian.position_names:
                    elbo += " (an approximation: noise per position; bayou.elbo has the bound)"
            stopped = f", {self.stopped} after {int(last['step']) + 1:,} steps"
        net = type(self.target.net).__name__
        return f"Guided({net}: {families} of {sum(weights.values()):,} weights{elbo}{stopped})"

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any
    ) -> Guided:
        """Return the posterior with a ``state``, see ``Posterior.restore``.

        A file holds no code: pass ``rules``, ``prior`` or ``likelihood`` again if they have a
        callable (a flow, a density as a prior).
        """
        path = config["path"]
        rules: Rules | None = options.pop("rules", None)
        target = restore_target(tensors, config, net, **options)
        if rules is None:
            rules = {}
            for names, value in config["rules"]:
                spec = restore_spec(path, "rules", value, GuideSpec)
                rules |= dict.fromkeys(map(glob.escape, names), spec)
        # Flows start at random weights, which those of the file replace.
        with rng.isolated(0, next(net.parameters()).device):
            bayesian = Bayesian(target.net, rules, target.prior)
        restore_buffers(bayesian.network, target, tensors, path)
        _load_guides(bayesian, under("guides.", tensors), path)
        bayesian.local_names = frozenset(config["local"])
        bayesian.position_names = frozenset(config.get("positions", ()))
        return cls(target, bayesian.eval(), config["history"])


def _load_guides(bayesian: Bayesian, state: Params, path: StrPath) -> None:
    """Give the guides the tensors of a file, which must have one dtype for each guide."""
    for number, guide in enumerate(bayesian.guides):
        # Tensors missing in the file have the dtype of their guide.
        values = under(f"{number}.", state).values()
        dtypes = [value.dtype for value in values if value.is_floating_point()]
        guide.to(dtypes[0] if dtypes else None)
    load_state(bayesian.guides, state, path, "network and these rules")
    for number, guide in enumerate(bayesian.guides):
        parameter_dtypes = {value.dtype for value in guide.parameters()}
        if len(parameter_dtypes) > 1:
            words = " and ".join(sorted(map(str, parameter_dtypes)))
            raise FileError(
                f"{path} has {words} in 'guides.{number}', expected one dtype; fit again"
            )

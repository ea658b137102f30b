"""Networks with a guide over their tensors, and the posteriors of variational methods."""

from __future__ import annotations

import copy
import glob
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import no_grad_state
from bayou.core.modules import Modules
from bayou.core.params import Params, under
from bayou.core.specs import to_json
from bayou.curvature import Covariance
from bayou.guides.guide import KL, Draw, DrawNoise, Guide, GuideSpec, Tensors
from bayou.guides.local import Trace, guess_trace, trace
from bayou.guides.rules import Rules, expand_rules, group_names
from bayou.likelihoods import Likelihood
from bayou.network import (
    Network,
    check_network,
    evaluating,
    forward_inputs,
    is_sharded,
    layouts,
    shared_copy,
)
from bayou.network.target import PriorRules, Target, bind_priors, prior_specs
from bayou.posteriors.network_draw import NetworkDraw
from bayou.posteriors.posterior import Posterior, check_count
from bayou.posteriors.state import SavedState, target_state
from bayou.posteriors.updates import check_forget
from bayou.posteriors.updating import GaussianState, LinearizedModel, add_data
from bayou.priors import (
    BoundLogUniform,
    BoundPart,
    BoundPrior,
    Normal,
    Prior,
    check_priors,
    couplings,
)
from bayou.priors.joint import JointCorrection


class _OriginalNetwork(tuple[nn.Module]):
    """The network that was made Bayesian; copies share it, and no ``state_dict`` has it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _OriginalNetwork:
        return self


class Bayesian(nn.Module):
    """A network with a guide q over its parameters, as ``bayesianize`` makes it.

    ``draw()`` returns a network drawn from q, with the KL of that draw. With several guides q is
    their product, Π_g q_g, except that a guide with ``parents`` is conditioned on the draws of
    other guides.

    Args:
        net: the network; it is not changed.
        rules: a family such as MNF() for all parameters, or patterns → families.
        prior: one prior, or patterns → priors; None is Normal(1.0).
        example: an input (a tuple or a dict for several) for the dry run; without one the dry run
            is made at the first call of a draw.

    Attributes:
        specs: the family of every tensor, by name.
        guides: the guides, those without parents first.
        traced: whether a dry run was made.
        shares: whether the dry run found that most of the network does not depend on the draw, as
            with a random last layer.
        local_names: tensors whose noise is drawn at the output of their layer.
        position_names: those of ``local_names`` with separate noise at every position, so that the
            ELBO of a training step is an approximation.
        couplings: the terms of priors over several tensors.
    """

    def __init__(
        self,
        net: nn.Module,
        rules: Rules,
        prior: PriorRules | None = None,
        example: object = None,
    ) -> None:
        super().__init__()
        check_network(net)
        check_priors(prior)
        self.prior = prior
        self._original = _OriginalNetwork((net,))
        specs = expand_rules(net, rules)
        parameters = dict(net.named_parameters())
        values = {name: parameters[name].detach() for name in specs}
        # Not a module: its copy of the network is registered as ``net``.
        self.network: Network = Network(net)
        self.net: nn.Module = self.network.net
        self.aliases: dict[str, str] = self.network.aliases
        inputs = None if example is None else forward_inputs(example)
        if not isinstance(rules, Mapping):
            covered = rules.reach(self.network, values, inputs)
            for name, spec in specs.items():
                if spec is rules and name not in covered:
                    specs[name] = rules.for_vectors()
        self.specs = specs
        guides = self._build_guides(values, inputs)
        self.guides: Modules[Guide] = nn.ModuleList(guides)  # type: ignore[assignment]
        self._parent_names = {name for guide in guides for name in guide.parents}
        self._check_points()
        self.couplings: list[JointCorrection] = couplings(self.bound_priors())
        for guide in guides:
            if any(isinstance(module, BoundLogUniform) for module in guide.modules()):
                guide.kl_kind = KL.constant
        self.traced: bool = False
        self.shares: bool = False
        self._assign_local(guess_trace(net, values))
        if example is not None:
            self.trace(example)

    def _build_guides(self, values: Params, inputs: tuple[Any, ...] | None) -> list[Guide]:
        """Build the guides, each with the bound priors of its tensors; those with parents last."""
        net = self._original[0]
        priors = prior_specs(Normal(1.0) if self.prior is None else self.prior, net)
        priors = {name: self.specs[name].prior(prior) for name, prior in priors.items()}
        bound_priors = bind_priors(priors, net)
        layout_by_name = layouts(net, values)
        guides: list[Guide] = []
        for names in group_names(self.specs):
            tensors = Tensors(
                {name: values[name] for name in names},
                {name: bound_priors[name] for name in names},
                layout_by_name,
                self.network,
                values,
                inputs,
            )
            guides.append(self.specs[names[0]].build(tensors))
        guides.sort(key=lambda guide: len(guide.parents))
        conditional = [guide for guide in guides if guide.parents]
        if len(conditional) > 1:
            families = " and ".join(
                f"{type(self.specs[guide.names[0]]).__name__} over {guide.names}"
                for guide in conditional
            )
            raise ValueError(
                f"{families} are each conditioned on the other; "
                "use the same family object for both patterns"
            )
        return guides

    def bound_priors(self) -> dict[str, BoundPrior]:
        """Return the prior of every tensor, with its learned values."""
        priors: dict[str, BoundPrior] = {}
        for guide in self.guides:
            priors |= guide.bound_priors()
        return priors

    def _check_points(self) -> None:
        """Raise a ValueError if a point has a joint prior with other tensors."""
        for guide in self.guides:
            name = guide.names[0]
            if guide.is_point and isinstance(guide.bound_priors()[name], BoundPart):
                raise ValueError(
                    f"{name!r} has a joint prior with other tensors, so it cannot be a point if "
                    "they are random; give it a family with noise"
                )

    def trace(self, example: object) -> None:
        """Run the network once to find where local reparameterization applies.

        Args:
            example: an input, or a tuple or dict of several.

        Raises:
            ValueError: if the network never uses a tensor, or a family cannot cover one.
        """
        inputs = forward_inputs(example)
        usage = trace(self.net, self.mean(), inputs, self.call)
        unused = [name for name in self.specs if name not in usage.used]
        if unused:
            raise ValueError(
                f"{', '.join(map(repr, unused))} is never used by {type(self.net).__name__}; "
                "remove it from the network or freeze it first (a lambda that refers to the "
                "network itself hides its use: write a method instead)"
            )
        self.network.find_recomputation(self.mean(), inputs)
        self._assign_local(usage)
        for guide in self.guides:
            if guide.requires_local and guide.names[0] not in self.local_names:
                raise ValueError(
                    "RankOne needs weights that linear or convolution calls use once for an "
                    f"example, got {guide.names[0]!r}, whose rows could not belong to different "
                    "members; use another family for it"
                )
        random_names = [name for guide in self.guides if not guide.is_point for name in guide.names]
        self.shares = (
            not self.network.recomputes
            and self.network.drawn_fraction(random_names, self.mean(), inputs) < 1
        )
        self.traced = True

    def _assign_local(self, usage: Trace) -> None:
        """Set ``local_names``: noise at the output where that is exact, or where a spec asks."""
        local = {name for name in usage.local if self.specs[name].local}
        local -= set(self.aliases.values())
        # A joint density needs the values of the tensors, which local noise does not have; nor is
        # such noise drawn again where layers are recomputed.
        if self.couplings or self.network.recomputes:
            local = set()
        shared = {name for name in local & usage.shared if self.specs[name].noise}
        self.position_names: frozenset[str] = frozenset(
            name for name in shared if self.specs[name].local == "positions"
        )
        self.local_names: frozenset[str] = frozenset(local - shared) | self.position_names

    @property
    def names(self) -> list[str]:
        """Return the names of all tensors, in the order of the network."""
        return list(self.specs)

    @property
    def per_example(self) -> bool:
        """Return whether some gain needs one draw per example."""
        return any(self.specs[name].per_example and name in self.local_names for name in self.names)

    @property
    def rows_independent(self) -> bool:
        """Return whether rows are independent: no batch norm has statistics of the batch."""
        batch_norms = (
            module
            for module in self.net.modules()
            if isinstance(module, nn.modules.batchnorm._BatchNorm)
        )
        return not any(module.training or module.running_mean is None for module in batch_norms)

    @property
    def members(self) -> int:
        """Return the number of members, in turn, of which draw i is one (``RankOne``), or 1."""
        return math.lcm(*(guide.members for guide in self.guides))

    def draw(
        self,
        samples: int | None = None,
        *,
        examples: int | None = None,
        local: bool = True,
        seed: rng.Seed = None,
        start: int = 0,
    ) -> NetworkDraw:
        """Draw a network from q, or several.

        Args:
            samples: S networks at once, with a leading axis on the outputs; None for one network
                without that axis.
            examples: the number of rows of the input, needed by families with one gain per
                example; without it they draw one gain for all rows.
            local: False for sampled weights everywhere (a *function* draw).
            seed: the seed of the draws; None uses torch's global stream.
            start: the index of the first draw.

        Returns:
            A callable network with its KL.
        """
        count = 1 if samples is None else samples
        if count < 1:
            raise ValueError(f"cannot draw {samples} networks; samples must be at least 1")
        if is_sharded(next(self.parameters())):
            raise ValueError(
                "q is sharded (fully_shard): use outputs, kl = bnn(x), "
                "or bnn.unshard() before draw()"
            )
        draws = self._draw_guides(count, examples, local, seed, start)
        parts = {name: value for draw in draws for name, value in draw.parts.items()}
        sampled = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
        terms = [coupling(sampled) for coupling in self.couplings]
        coupling = torch.stack(terms).sum(0) if terms else None
        return NetworkDraw(self, tuple(draws), count, samples is None, coupling)

    def _draw_guides(
        self, count: int, examples: int | None, local: bool, seed: rng.Seed, start: int
    ) -> list[Draw]:
        """Return the draws of all guides, in their order; ``draw`` has the arguments."""
        draws: dict[int, Draw] = {}
        noises: dict[int, DrawNoise] = {}
        for index, guide in enumerate(self.guides):
            is_local = local and (
                guide.is_point or self.local_names - self._parent_names >= set(guide.names)
            )
            n = count
            if is_local and examples is not None and self.specs[guide.names[0]].per_example:
                n = count * examples
            guide_seed = rng.fold(seed, *guide.names)
            noise = guide.draw_noise(n, is_local, guide_seed, start)
            if noise is not None:
                noises[index] = noise
                continue
            arguments: dict[str, Any] = {}
            if guide.parents:  # their guides come first
                draws |= self._draw_together(noises)
                noises = {}
                parts = {k: v for draw in draws.values() for k, v in draw.parts.items()}
                arguments = guide.parent_arguments(parts, count)
            draws[index] = guide.draw(n, local=is_local, seed=guide_seed, start=start, **arguments)
        draws |= self._draw_together(noises)
        return [draws[index] for index in range(len(self.guides))]

    def _draw_together(self, noises: dict[int, DrawNoise]) -> dict[int, Draw]:
        """Return the draws with this noise, those of a class of guides with the same n at once."""
        groups: dict[tuple[type[Guide], int], list[int]] = {}
        for index, noise in noises.items():
            key = (type(self.guides[index]), noise.n)
            groups.setdefault(key, []).append(index)
        draws: dict[int, Draw] = {}
        for (guide_class, _), indices in groups.items():
            guides = [self.guides[index] for index in indices]
            drawn = guide_class.draw_together(guides, [noises[index] for index in indices])
            draws |= dict(zip(indices, drawn, strict=True))
        return draws

    def forward(
        self, *inputs: Any, local: bool = True, seed: rng.Seed = None, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """Return (outputs, kl) of one draw, for DistributedDataParallel, which wraps ``forward``.

        Args:
            inputs: inputs of the network.
            local: whether noise is drawn at the output of layers where that is possible.
            seed: the seed of the draw; None uses torch's global stream.
            named: inputs that the network takes by keyword; labels are left out.
        """
        inputs = (*inputs, *forward_inputs(named)) if named else inputs
        examples = len(inputs[0]) if self.per_example else None
        draw = self.draw(examples=examples, local=local, seed=seed)
        return draw(*inputs), draw.kl

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw all parameters n times, (n, *shape) each; draw i depends on (seed, i) alone.

        Args:
            n: the number of draws.
            seed: the seed; None uses torch's global stream.
            start: the index of the first draw.
        """
        params: Params = {}
        for guide in self.guides:
            arguments = guide.parent_arguments(params, n)
            params |= guide.sample(n, rng.fold(seed, *guide.names), start, **arguments)
        return {name: params[name] for name in self.names}

    def mean(self) -> Params:
        """Return the mean, or the central point, of every tensor."""
        means: Params = {}
        for guide in self.guides:
            means |= guide.mean(**guide.parent_arguments(means))
        return {name: means[name] for name in self.names}

    def log_prob(self, params: Params) -> Tensor:
        """Compute log q(params); a ValueError where a family has no tractable density.

        Args:
            params: a value of every tensor, (..., *shape).
        """
        terms: list[Tensor] = []
        for guide in self.guides:
            log_q = guide.log_prob(params)
            if log_q is None:
                raise ValueError(
                    f"{type(guide).__name__} over {', '.join(guide.names)} has no tractable density"
                )
            terms.append(log_q)
        total = terms[0]
        for log_q in terms[1:]:
            total = total + log_q
        return total

    def call(self, params: Params, *inputs: object) -> Tensor:
        """Evaluate the network with these parameters.

        Args:
            params: a value of every tensor, (*shape).
            inputs: inputs of the network.
        """
        return self.network.call(params, *inputs)

    def posterior(self, likelihood: Likelihood, n: int) -> Guided:
        """Return the posterior at the end of a training loop, as ``bayou.fit`` returns it.

        It shares the tensors of q.

        Args:
            likelihood: p(y | f), with its noise where that was learned.
            n: the number N of training examples.
        """
        net = shared_copy(self._original[0], self.names)
        buffers = dict(self.net.named_buffers())
        for name, value in net.named_parameters():
            if name in buffers and type(value) is nn.Parameter and not value.requires_grad:
                value.data = buffers[name]  # where ``to`` has moved it, not a second copy
        net = net.to(next(self.parameters()).device)
        return Guided(Target.build(net, likelihood, self.prior, n), self)


def bayesianize(
    net: nn.Module,
    rules: Rules,
    *,
    prior: PriorRules | None = None,
    example: object = None,
) -> Bayesian:
    """Make a network Bayesian: a guide for every parameter, by patterns on names.

    Of several patterns the first match wins. One dry run decides where local reparameterization
    applies and finds weights that are never used. A frozen parameter (``requires_grad=False``) has
    no guide: the network shares its value.

    Args:
        net: the network; it is not changed.
        rules: a family such as MNF() for all parameters, or patterns → families.
        prior: one prior or patterns → priors, Normal(1.0) by default.
        example: an input (a tuple or dict for several) for the dry run; without one it is made at
            the first call of a draw.

    Returns:
        A module with the parameters of q; ``draw()`` is a function drawn from it.

    Raises:
        ValueError: if every parameter is frozen, a pattern matches nothing, a family cannot cover
            its tensor, or the dry run finds a tensor that is never used.

    Example:
        >>> bnn = bayou.bayesianize(net, bayou.MeanField(), example=x[:2])
        >>> optimizer = torch.optim.Adam(bnn.parameters(), 1e-3)
        >>> draw = bnn.draw()
        >>> loss = torch.nn.functional.cross_entropy(draw(x), y) + draw.kl / len(x)
        >>> loss.backward()
    """
    return Bayesian(net, rules, prior, example)


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
        self.network: Network = bayesian.network
        self.history: list[dict[str, float]] = history or []
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

    def template(self) -> Params:
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

    @torch.no_grad()
    def update(self, data: object, *, forget: float | None = None) -> Guided:
        """Return the posterior given further rows; see ``Posterior.update``.

        For Gaussian families, ``MeanField`` and one ``LowRank`` over all random tensors: one
        natural-gradient step with the network linearized at the mean (BONG). The mean is that of
        the exact Gaussian of the linearized model. For ``MeanField`` the precision takes the
        diagonal of what the rows add, for ``LowRank`` the covariance keeps its rank and the
        variance of every weight.

        Args:
            data: new rows, as ``bayou.fit`` takes them, in the units of the fit.
            forget: the weight that is left to all earlier rows, in (0, 1]; None (default) for 1.

        Raises:
            ValueError: for other families, for rows that do not suit the network, and for
                ``forget`` without Normal priors.
        """
        weight = check_forget(forget)
        covariance = self._gaussian_covariance("updated")
        center = self.bayesian.mean()
        names = tuple(covariance.shapes)

        def outputs(params: Params, inputs: tuple[Any, ...]) -> Tensor:
            return self.network.evaluate(center | params, *inputs)

        model = LinearizedModel(
            outputs,
            self.target.likelihood,
            {name: center[name].detach() for name in names},
            next(self.target.net.parameters()),
        )
        state = GaussianState.of(center, covariance, self.bound_priors())
        state = add_data(state, model, data, weight)
        posterior = copy.copy(self)
        # The network of the guides has no weights of its own, and is shared.
        shared = {id(item): item for item in (self.bayesian.network, self.bayesian.net)}
        posterior.bayesian = copy.deepcopy(self.bayesian, shared)
        for guide in posterior.bayesian.guides:
            if not guide.is_point:
                guide.set_gaussian(state.mean, state.covariance)
        updates = self.updates.after(added=state.rows, forget=weight)
        posterior.note_update(updates, self.target.n + state.rows)
        return posterior

    def downdate(self, data: object) -> Guided:
        """Raise a ValueError: rows are in q only approximately.

        Args:
            data: rows of the fit.
        """
        raise ValueError(
            "Guided cannot be reduced by rows: its families hold the rows only approximately, so "
            "that none can be removed exactly; use Laplace('full', where='last') or VBLL, or fit "
            "again without these rows"
        )

    def _gaussian_covariance(self, change: str) -> Covariance:
        """Return the covariance of all random tensors; a ValueError if q is not one Gaussian."""
        total: Covariance | None = None
        for guide in self.bayesian.guides:
            if guide.is_point:
                continue
            covariance = guide.as_gaussian()
            family = self._family(guide)
            if covariance is None:
                raise ValueError(
                    f"a posterior with {family} over {', '.join(guide.names)} cannot be {change}: "
                    "it is not Gaussian; use VI(MeanField()), or Laplace('full', where='last') or "
                    "VBLL, whose last layer is updated exactly, or fit again with all rows"
                )
            if total is not None and covariance.kind != total.kind:
                raise ValueError(
                    f"a posterior of several families, one of them {family}, cannot be {change}; "
                    "use one of them for all tensors"
                )
            total = covariance if total is None else total.with_independent(covariance)
        if total is None:
            raise ValueError(
                f"a posterior of points cannot be {change}: no tensor is random; use "
                "VI(MeanField()), or Laplace('full', where='last', start=None) at this point"
            )
        return total

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
        priors = self.bayesian.bound_priors()
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
    def restore(cls, saved: SavedState, net: nn.Module) -> Guided:
        """Return the posterior with a ``state``, see ``Posterior.restore``.

        A file holds no code: pass ``rules``, ``prior`` or ``likelihood`` again if they have a
        callable (a flow, a density as a prior).
        """
        config = saved.config
        target = saved.target(net)
        specs = saved.spec("rules", GuideSpec)
        rules: Rules = specs
        if isinstance(specs, list):  # of the file: pairs of names and a spec
            rules = {glob.escape(name): spec for names, spec in specs for name in names}
        # Flows start at random weights, which those of the file replace.
        with rng.isolated(0, next(net.parameters()).device):
            bayesian = Bayesian(target.net, rules, target.prior)
        saved.load_buffers(bayesian.network, target)
        guide_tensors = saved.group("guides")
        for number, guide in enumerate(bayesian.guides):
            # Tensors that are not in the file have the dtype of their guide.
            values = under(f"{number}.", guide_tensors).values()
            dtypes = [value.dtype for value in values if value.is_floating_point()]
            guide.to(dtypes[0] if dtypes else None)
        saved.load_into(bayesian.guides, guide_tensors, "network and these rules")
        bayesian.local_names = frozenset(config["local"])
        bayesian.position_names = frozenset(config.get("positions", ()))
        return cls(target, bayesian.eval(), config["history"])

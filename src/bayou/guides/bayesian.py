"""A network with a guide over its named tensors: rules, the module, and its draws."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.modules import Modules
from bayou.core.params import Params, match
from bayou.guides.gaussian import Delta
from bayou.guides.guide import KL, Draw, Guide, GuideSpec, Tensors, Weight
from bayou.guides.local import LocalReparameterization, Trace, guess_trace, trace
from bayou.likelihoods import Likelihood
from bayou.network import (
    NORMS,
    Keywords,
    Network,
    VmapOrLoop,
    check_network,
    combine_inputs,
    fan_ins,
    forward_inputs,
    is_sharded,
    layouts,
    shared_copy,
)
from bayou.network.target import Target, prior_specs
from bayou.priors import (
    BoundLogUniform,
    BoundPart,
    BoundPrior,
    Normal,
    Prior,
    check_priors,
    couplings,
)

if TYPE_CHECKING:
    from bayou.posteriors.guided import Guided

Rules = GuideSpec | Mapping[str, GuideSpec]


def expand_rules(net: nn.Module, rules: Rules) -> dict[str, GuideSpec]:
    """Return a guide spec for every parameter of the network that is not frozen.

    A single spec covers every weight with two or more axes; vectors (biases) then have a factorized
    Gaussian with a stochastic family and are points with points and gains, and parameters of
    normalization layers are points.

    Args:
        net: the network; parameters with ``requires_grad=False`` are frozen.
        rules: one spec, or patterns of names → specs.

    Raises:
        ValueError: if every parameter is frozen, or a rule is not a valid spec.
    """
    requires_grad = {name: parameter.requires_grad for name, parameter in net.named_parameters()}
    if not any(requires_grad.values()):
        raise ValueError(
            f"every parameter of {type(net).__name__} is frozen (requires_grad=False), "
            "so that there is no posterior; unfreeze some with requires_grad_()"
        )
    for spec in rules.values() if isinstance(rules, Mapping) else [rules]:
        if not isinstance(spec, GuideSpec):
            raise ValueError(
                f"rules must be a family such as MeanField(), or patterns → families, got {spec!r}"
            )
    if isinstance(rules, Mapping):
        frozen = [name for name, is_trained in requires_grad.items() if not is_trained]
        specs = match(requires_grad, rules, frozen=frozen)
    else:
        specs = _assign_by_layer(net, rules)
    for name, spec in specs.items():
        if spec.local not in (True, False, "positions"):
            raise ValueError(
                f'local of {name!r} must be True, False or "positions", got {spec.local!r}'
            )
    return specs


def _assign_by_layer(net: nn.Module, spec: GuideSpec) -> dict[str, GuideSpec]:
    """Assign one spec to the weights, ``for_vectors`` to vectors and points to normalization."""
    owners = dict(net.named_modules())
    specs: dict[str, GuideSpec] = {}
    for name, parameter in net.named_parameters():
        if not parameter.requires_grad:
            continue
        if isinstance(owners.get(name.rpartition(".")[0]), NORMS):
            specs[name] = Delta()
        elif spec.joint or parameter.ndim >= 2:
            specs[name] = spec
        else:
            specs[name] = spec.for_vectors()
    return specs


def _group_names(specs: Mapping[str, GuideSpec]) -> list[list[str]]:
    """Return the names of each guide: one tensor, or all with the same object of a joint family."""
    groups: list[list[str]] = []
    joint_groups: dict[int, list[str]] = {}
    for name, spec in specs.items():
        if spec.joint and id(spec) in joint_groups:
            joint_groups[id(spec)].append(name)
            continue
        group = [name]
        groups.append(group)
        if spec.joint:
            joint_groups[id(spec)] = group
    return groups


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
        prior: Prior | Mapping[str, Prior] | None = None,
        example: Any = None,
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
        self.network = Network(net)
        self.net = self.network.net
        self.aliases = self.network.aliases
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
        priors = {name: prior for guide in guides for name, prior in guide.bound_priors().items()}
        self._check_points(priors)
        self.couplings = couplings(priors)
        for guide in guides:
            if any(isinstance(module, BoundLogUniform) for module in guide.modules()):
                guide.kl_kind = KL.constant
        self.traced = False
        self.shares = False
        self._assign_local(guess_trace(net, values))
        if example is not None:
            self.trace(example)

    def _build_guides(self, values: Params, inputs: tuple[Any, ...] | None) -> list[Guide]:
        """Build the guides, each with the bound priors of its tensors; those with parents last."""
        net = self._original[0]
        prior_by_name = prior_specs(Normal(1.0) if self.prior is None else self.prior, net)
        fan_in_by_name = fan_ins(net)
        layout_by_name = layouts(net, values)
        guides: list[Guide] = []
        for names in _group_names(self.specs):
            bound: dict[str, BoundPrior] = {}
            for name in names:
                value = values[name]
                bound[name] = (
                    self.specs[name]
                    .prior(prior_by_name[name])
                    .bind(
                        value.shape,
                        fan_in=fan_in_by_name[name],
                        dtype=value.dtype,
                        device=value.device,
                        axes=layout_by_name[name].axes,
                    )
                )
            tensors = Tensors(
                {name: values[name] for name in names},
                bound,
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

    def _check_points(self, priors: Mapping[str, BoundPrior]) -> None:
        """Raise a ValueError if a point has a joint prior with other tensors."""
        for guide in self.guides:
            name = guide.names[0]
            if guide.is_point and isinstance(priors[name], BoundPart):
                raise ValueError(
                    f"{name!r} has a joint prior with other tensors, so it cannot be a point if "
                    "they are random; give it a family with noise"
                )

    def trace(self, example: Any) -> None:
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
        self.position_names = frozenset(
            name for name in shared if self.specs[name].local == "positions"
        )
        self.local_names = frozenset(local - shared) | self.position_names

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
        draws: list[Draw] = []
        for guide in self.guides:
            is_local = local and (
                guide.is_point or self.local_names - self._parent_names >= set(guide.names)
            )
            n = count
            if is_local and examples is not None and self.specs[guide.names[0]].per_example:
                n = count * examples
            parents = {
                name: value
                for draw in draws
                for name, value in draw.parts.items()
                if name in guide.parents
            }
            guide_seed = rng.fold(seed, *guide.names)
            arguments = parent_arguments(guide, parents, count)
            draws.append(guide.draw(n, local=is_local, seed=guide_seed, start=start, **arguments))
        coupling = self._couple(draws)
        return NetworkDraw(self, tuple(draws), count, samples is None, coupling)

    def _couple(self, draws: list[Draw]) -> Tensor | None:
        """Return log p − Σ log p of each tensor by itself (S,), None without a joint prior."""
        sampled = {
            name: value
            for draw in draws
            for name, value in draw.parts.items()
            if isinstance(value, Tensor)
        }
        terms = [coupling(sampled) for coupling in self.couplings]
        return torch.stack(terms).sum(0) if terms else None

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
            arguments = parent_arguments(guide, params, n)
            params |= guide.sample(n, rng.fold(seed, *guide.names), start, **arguments)
        return {name: params[name] for name in self.names}

    def mean(self) -> Params:
        """Return the mean, or the central point, of every tensor."""
        means: Params = {}
        for guide in self.guides:
            means |= guide.mean(**parent_arguments(guide, means))
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

    def call(self, params: Params, *inputs: Any) -> Tensor:
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
        from bayou.posteriors.guided import Guided  # which is built on this module

        net = shared_copy(self._original[0], self.names)
        buffers = dict(self.net.named_buffers())
        for name, value in net.named_parameters():
            if name in buffers and type(value) is nn.Parameter and not value.requires_grad:
                value.data = buffers[name]  # where ``to`` has moved it, not a second copy
        net = net.to(next(self.parameters()).device)
        return Guided(Target.build(net, likelihood, self.prior, n), self)


def parent_arguments(
    guide: Guide, values: Mapping[str, Tensor | Weight], n: int = 1
) -> dict[str, Any]:
    """Return the argument ``parents`` of a guide that depends on draws of others, or nothing.

    Args:
        guide: the guide.
        values: draws of the tensors so far; a point is the same in all n draws.
        n: the number of draws.
    """
    if not guide.parents:
        return {}
    parents: Params = {}
    for name in guide.parents:
        value = values[name]
        if isinstance(value, Tensor):
            parents[name] = value
        else:
            parents[name] = value.mean.expand(n, *value.mean.shape)
    return {"parents": parents}


# Hashed by identity: torch.compile hashes a callable before its fields are set.
@dataclass(frozen=True, eq=False)
class NetworkDraw:
    """One network drawn from q, or S of them, with the KL of this draw.

    Call it on inputs; ``kl`` is in nats.

    Args:
        bayesian: the network with its guides.
        draws: the draw of each guide.
        samples: S, the number of networks.
        single: whether the outputs have no leading axis of draws.
        coupling: log p − Σ log p of each tensor by itself, (S,), with a prior over several tensors.

    Example:
        >>> draw = bayou.bayesianize(net, bayou.MNF()).draw()
        >>> loss = torch.nn.functional.cross_entropy(draw(x), y) + draw.kl / n
    """

    bayesian: Bayesian
    draws: tuple[Draw, ...]
    samples: int
    single: bool
    coupling: Tensor | None = None

    @property
    def kl(self) -> Tensor:
        """Return Σ over tensors of KL(q ‖ p), averaged over the draws: a scalar, never rescaled."""
        total = torch.stack([draw.kl.mean() for draw in self.draws]).sum()
        return total if self.coupling is None else total - self.coupling.mean()

    @property
    def score(self) -> Tensor | None:
        """Return the log-probability of discrete choices, for REINFORCE; None without any.

        One per draw (S,), or one per row (S·rows,).
        """
        scores = [draw.score for draw in self.draws if draw.score is not None]
        if not scores:
            return None
        rows = max(map(len, scores))
        return torch.stack([score.repeat_interleave(rows // len(score)) for score in scores]).sum(0)

    @property
    def parts(self) -> dict[str, Tensor | Weight]:
        """Return every tensor: sampled weights (S, *shape), or Gaussians given their gains."""
        return {name: value for draw in self.draws for name, value in draw.parts.items()}

    def subset(self, indices: slice) -> NetworkDraw:
        """Return the networks of some of the draws; ``kl`` stays that of all.

        Args:
            indices: the draws to keep.
        """

        def take(value: Tensor) -> Tensor:
            # The leading axis has one entry per draw, or per draw and example.
            return value.unflatten(0, (self.samples, -1))[indices].flatten(0, 1)

        draws = []
        for draw in self.draws:
            parts: dict[str, Tensor | Weight] = {}
            for name, value in draw.parts.items():
                parts[name] = take(value) if isinstance(value, Tensor) else value.with_gains(take)
            score = None if draw.score is None else take(draw.score)
            draws.append(replace(draw, parts=parts, score=score))
        return replace(self, draws=tuple(draws), samples=len(range(self.samples)[indices]))

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """Evaluate the network: outputs (B, ...), or (S, B, ...) for S draws.

        Of a network with several outputs it returns the ``logits``.

        Args:
            inputs: inputs of the network.
            named: inputs that the network takes by keyword, ``draw(**batch)``; labels are left out.
        """
        inputs = (*inputs, *forward_inputs(named)) if named else inputs
        if not self.bayesian.traced and not torch.compiler.is_compiling():
            self.bayesian.trace(inputs)
        parts = {name: self._sample_if_needed(name, value) for name, value in self.parts.items()}
        sampled = {name: value for name, value in parts.items() if isinstance(value, Tensor)}
        points = {
            name: value.mean
            for name, value in parts.items()
            if isinstance(value, Weight) and value.is_point
        }
        unsampled = {
            name: value
            for name, value in parts.items()
            if isinstance(value, Weight) and not value.is_point
        }
        if self.single:
            params = points | {name: value[0] for name, value in sampled.items()}
            return self._evaluate(params, unsampled, inputs)
        rows_independent = self.bayesian.rows_independent
        shares = self.bayesian.shares and rows_independent and not torch.compiler.is_compiling()
        has_row_gains = all(gain.axis < 2 for w in unsampled.values() for gain in w.gains)
        has_plain_inputs = all(isinstance(value, (Tensor, Keywords)) for value in inputs)
        can_tile = has_row_gains and has_plain_inputs and rows_independent and not shares
        if unsampled and not sampled and can_tile:
            return self._evaluate_tiled(points, unsampled, inputs)
        device = next(self.bayesian.parameters()).device
        uses_vmap = shares or (
            device.type == "cuda" and not unsampled and not self.bayesian.training
        )

        def evaluate(index: Tensor, params: Params) -> Tensor:
            return self._evaluate(points | params, self._select_gains(unsampled, index), inputs)

        evaluate_all = VmapOrLoop(evaluate, (0, 0), loop=not uses_vmap)
        outputs: Tensor = evaluate_all(torch.arange(self.samples, device=device), sampled)
        if shares and evaluate_all.loop:
            self.bayesian.shares = False  # an operation has no batching rule
        return outputs

    def _sample_if_needed(self, name: str, value: Tensor | Weight) -> Tensor | Weight:
        """Sample a weight that was drawn before the dry run found that it must be sampled."""
        if isinstance(value, Tensor) or value.is_point or name in self.bayesian.local_names:
            return value
        return value.with_gains(lambda z: z[:: len(z) // self.samples]).sample(self.samples)

    def _evaluate_tiled(
        self, points: Params, unsampled: dict[str, Weight], inputs: tuple[Any, ...]
    ) -> Tensor:
        """Evaluate all S draws in one pass over S copies of the rows.

        Local noise is independent per row anyway.
        """
        rows = len(inputs[0])

        def widen(z: Tensor) -> Tensor:
            return z if len(z) == self.samples * rows else z.repeat_interleave(rows, 0)

        wide = {name: weight.with_gains(widen) for name, weight in unsampled.items()}
        copies = combine_inputs(torch.cat, [inputs] * self.samples)
        return self._evaluate(points, wide, copies).unflatten(0, (self.samples, rows))

    def _select_gains(self, unsampled: dict[str, Weight], index: Tensor) -> dict[str, Weight]:
        """Return the gains of one draw; ``vmap`` takes a tensor as index, but no number."""

        def select(z: Tensor) -> Tensor:
            by_draw = z.unflatten(0, (self.samples, -1))
            return by_draw.index_select(0, index.reshape(1)).squeeze(0)

        return {name: weight.with_gains(select) for name, weight in unsampled.items()}

    def _evaluate(
        self, params: Params, unsampled: dict[str, Weight], inputs: tuple[Any, ...]
    ) -> Tensor:
        """Evaluate one network, with the noise of ``unsampled`` drawn at the outputs of layers."""
        if not unsampled:
            return self.bayesian.call(params, *inputs)
        mode = LocalReparameterization(unsampled)
        means = {name: weight.mean for name, weight in unsampled.items()}
        with mode:
            outputs = self.bayesian.call(params | means, *inputs)
        mode.finish()
        return outputs


def bayesianize(
    net: nn.Module,
    rules: Rules,
    *,
    prior: Prior | Mapping[str, Prior] | None = None,
    example: Any = None,
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

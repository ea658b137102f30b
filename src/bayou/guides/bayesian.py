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
from bayou.guides.gaussian import Delta, Point
from bayou.guides.guide import KL, Draw, Guide, GuideSpec, Tensors, Weight
from bayou.guides.local import LocalReparameterization, Trace, guess_trace, trace
from bayou.guides.nodes import MemberGuide
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
from bayou.priors import (
    BoundLogUniform,
    BoundPart,
    BoundPrior,
    Normal,
    Prior,
    check_priors,
    couplings,
)
from bayou.target import Target, prior_specs

if TYPE_CHECKING:
    from bayou.posteriors.guided import Guided

Rules = GuideSpec | Mapping[str, GuideSpec]


def expand_rules(net: nn.Module, rules: Rules) -> dict[str, GuideSpec]:
    """A guide spec for every parameter of the network that is not frozen (``requires_grad=False``).

    A single spec covers every weight with two or more axes; vectors (biases) then have a factorized
    Gaussian with a stochastic family and are points with points and gains, and parameters of
    normalization layers are points.
    """
    names = {name: parameter.requires_grad for name, parameter in net.named_parameters()}
    if not any(names.values()):
        raise ValueError(
            f"every parameter of {type(net).__name__} is frozen (requires_grad=False), so that there is no posterior; "
            "unfreeze some with requires_grad_()"
        )
    for spec in rules.values() if isinstance(rules, Mapping) else [rules]:
        if not isinstance(spec, GuideSpec):
            raise ValueError(
                f"rules must be a family such as MeanField(), or patterns → families, got {spec!r}"
            )
    frozen = [name for name, needed in names.items() if not needed]
    specs = (
        match(names, rules, frozen=frozen) if isinstance(rules, Mapping) else _by_layer(net, rules)
    )
    for name, spec in specs.items():
        if spec.local not in (True, False, "positions"):
            raise ValueError(
                f'local of {name!r} must be True, False or "positions", got {spec.local!r}'
            )
    return specs


def _by_layer(net: nn.Module, spec: GuideSpec) -> dict[str, GuideSpec]:
    owners = dict(net.named_modules())
    specs: dict[str, GuideSpec] = {}
    for name, parameter in (
        (name, value) for name, value in net.named_parameters() if value.requires_grad
    ):
        if isinstance(owners.get(name.rpartition(".")[0]), NORMS):
            specs[name] = Delta()
        else:
            specs[name] = spec if spec.joint or parameter.ndim >= 2 else spec.for_vectors()
    return specs


class _Original(tuple[nn.Module]):
    """The network that was made Bayesian; copies share it, and no ``state_dict`` has it."""

    def __deepcopy__(self, memo: dict[int, Any]) -> _Original:
        return self


class Bayesian(nn.Module):
    """A network with a guide over its parameters; ``draw`` returns a network drawn from q with its
    KL.

    ``bayesianize`` describes ``net``, ``rules``, ``prior`` and ``example``. ``traced``: whether a
    dry run was made;
    ``shares``: whether it found that most of the network does not depend on the draw (a last layer
    is random).
    ``local_names``: tensors whose noise is drawn at the output of their layer; of these,
    ``position_names`` have separate noise at every position, so that the ELBO of a training step is
    an approximation.
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
        self.prior, self._original = prior, _Original((net,))
        specs, named = expand_rules(net, rules), dict(net.named_parameters())
        priors = prior_specs(Normal(1.0) if prior is None else prior, net)
        values = {name: named[name].detach() for name in specs}
        fans, axes = fan_ins(net), layouts(net, values)
        self.network = Network(
            net
        )  # not a module: its copy of the network is registered as ``net``
        self.net, self.aliases = self.network.net, self.network.aliases
        inputs = None if example is None else forward_inputs(example)
        if not isinstance(rules, Mapping):
            reached = rules.reach(self.network, values, inputs)
            specs = {
                n: rules.for_vectors() if s is rules and n not in reached else s
                for n, s in specs.items()
            }
        self.specs = specs

        def tensors(names: list[str]) -> Tensors:
            bound: dict[str, BoundPrior] = {}
            for name in names:
                value, spec = values[name], specs[name].prior(priors[name])
                bound[name] = spec.bind(
                    value.shape,
                    fan_in=fans[name],
                    dtype=value.dtype,
                    device=value.device,
                    axes=axes[name].axes,
                )
            return Tensors(
                {name: values[name] for name in names}, bound, axes, self.network, values, inputs
            )

        groups: list[list[str]] = []
        joined: dict[int, list[str]] = {}
        for name in values:
            if specs[name].joint and id(specs[name]) in joined:
                joined[id(specs[name])].append(name)
            else:
                groups.append([name])
                if specs[name].joint:
                    joined[id(specs[name])] = groups[-1]
        built = [specs[names[0]].build(tensors(names)) for names in groups]
        built.sort(
            key=lambda guide: len(guide.given)
        )  # tensors on which others are conditioned are drawn first
        if len(given := [guide for guide in built if guide.given]) > 1:
            each = " and ".join(
                f"{type(specs[guide.names[0]]).__name__} over {guide.names}" for guide in given
            )
            raise ValueError(
                f"{each} are each conditioned on the other; use the same family object for both patterns"
            )
        self.guides: Modules[Guide] = nn.ModuleList(built)  # type: ignore[assignment]
        self._given = {name for guide in built for name in guide.given}
        bound = {name: prior for guide in built for name, prior in guide.bound_priors().items()}
        points = [guide.names[0] for guide in built if isinstance(guide, Point)]
        if fixed := [name for name in points if isinstance(bound[name], BoundPart)]:
            raise ValueError(
                f"{fixed[0]!r} has a joint prior with other tensors, so it cannot be a point if they are random; "
                "give it a family with noise"
            )
        self.couplings = couplings(bound)  # of priors over several tensors
        for guide in built:
            if any(isinstance(module, BoundLogUniform) for module in guide.modules()):
                guide.kl_kind = KL.constant
        self.traced = self.shares = False
        self._find_local(guess_trace(net, values))
        if example is not None:
            self.trace(example)

    def trace(self, example: Any) -> None:
        """One dry run on an input: which weights local reparameterization applies to, and which are
        used at all.
        """
        inputs = forward_inputs(example)
        found = trace(self.net, self.mean(), inputs, self.call)
        unused = [name for name in self.specs if name not in found.used]
        if unused:
            raise ValueError(
                f"{', '.join(map(repr, unused))} is never used by {type(self.net).__name__}; remove it from the "
                "network or freeze it first (a lambda that refers to the network itself hides its use: write a "
                "method instead)"
            )
        self.network.find_recomputation(self.mean(), inputs)
        self._find_local(found)
        for guide in self.guides:
            if isinstance(guide, MemberGuide) and guide.name not in self.local_names:
                raise ValueError(
                    f"RankOne needs weights that linear or convolution calls use once for an example, got "
                    f"{guide.name!r}, whose rows could not belong to different members; use another family for it"
                )
        drawn = [
            name for guide in self.guides if not isinstance(guide, Point) for name in guide.names
        ]
        self.shares = (
            not self.network.recomputes
            and self.network.drawn_fraction(drawn, self.mean(), inputs) < 1
        )
        self.traced = True

    def _find_local(self, found: Trace) -> None:
        """Tensors with noise at the output: where that is exact, and per position if a spec
        requests it.
        """
        able = {name for name in found.local if self.specs[name].local} - set(self.aliases.values())
        # A joint density needs the values of the tensors, which local noise does not have; nor is
        # such noise drawn again where layers are recomputed.
        if self.couplings or self.network.recomputes:
            able = set()
        noisy = {name for name in able & found.shared if self.specs[name].noise}
        self.position_names = frozenset(
            name for name in noisy if self.specs[name].local == "positions"
        )
        self.local_names = frozenset(able - noisy) | self.position_names

    @property
    def names(self) -> list[str]:
        """The names of all tensors, in the order of the network."""
        return list(self.specs)

    @property
    def per_example(self) -> bool:
        """Whether some gain needs one draw per example."""
        return any(self.specs[name].per_example and name in self.local_names for name in self.names)

    @property
    def rows_independent(self) -> bool:
        """Whether rows of the input are independent: no batch norm with statistics of the batch."""
        batch_norms = (
            m for m in self.net.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)
        )
        return not any(m.training or m.running_mean is None for m in batch_norms)

    @property
    def members(self) -> int:
        """The number of members in turn, of which draw i is one (``RankOne``); 1 without any."""
        return math.lcm(*(guide.members for guide in self.guides if isinstance(guide, MemberGuide)))

    def draw(
        self, samples: int | None = None, *, examples: int | None = None, local: bool = True, seed: rng.Seed = None,
        start: int = 0,
    ) -> NetworkDraw:  # fmt: skip
        """A network drawn from q. ``samples=S`` draws S of them at once, with a leading axis on the
        outputs.

        ``examples``: the number of rows of the input, needed by families with one gain per example;
        without it they draw one gain for all rows. ``local=False``: sampled weights everywhere (a
        *function* draw). ``start``: the index of the first draw.
        """
        count = 1 if samples is None else samples
        if count < 1:
            raise ValueError(f"cannot draw {samples} networks; samples must be at least 1")
        if is_sharded(next(self.parameters())):
            raise ValueError(
                "q is sharded (fully_shard): use outputs, kl = bnn(x), or bnn.unshard() before draw()"
            )
        draws: list[Draw] = []
        for guide in self.guides:
            here = local and (
                isinstance(guide, Point) or self.local_names - self._given >= set(guide.names)
            )
            n = count
            if here and examples is not None and self.specs[guide.names[0]].per_example:
                n = count * examples
            known = {
                name: part
                for draw in draws
                for name, part in draw.parts.items()
                if name in guide.given
            }
            own = rng.fold(seed, *guide.names)
            draws.append(
                guide.draw(n, local=here, seed=own, start=start, **given_to(guide, known, count))
            )
        found = {
            name: part
            for draw in draws
            for name, part in draw.parts.items()
            if isinstance(part, Tensor)
        }
        coupled = [coupling(found) for coupling in self.couplings]
        return NetworkDraw(
            self,
            tuple(draws),
            count,
            samples is None,
            torch.stack(coupled).sum(0) if coupled else None,
        )

    def forward(
        self, *inputs: Any, local: bool = True, seed: rng.Seed = None, **named: Any
    ) -> tuple[Tensor, Tensor]:
        """(outputs, kl) of one draw, for DistributedDataParallel, which wraps ``forward`` only."""
        inputs = (*inputs, *forward_inputs(named)) if named else inputs
        draw = self.draw(
            examples=len(inputs[0]) if self.per_example else None, local=local, seed=seed
        )
        return draw(*inputs), draw.kl

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """n draws of all parameters, (n, *shape) each; draw i depends on (seed, i) alone."""
        found: Params = {}
        for guide in self.guides:
            found |= guide.sample(
                n, rng.fold(seed, *guide.names), start, **given_to(guide, found, n)
            )
        return {name: found[name] for name in self.names}

    def mean(self) -> Params:
        """The mean (or central point) of every tensor."""
        found: Params = {}
        for guide in self.guides:
            found |= guide.mean(**given_to(guide, found))
        return {name: found[name] for name in self.names}

    def log_prob(self, params: Params) -> Tensor:
        """log q(params); a ValueError where a family has no tractable density."""
        total: Tensor | None = None
        for guide in self.guides:
            part = guide.log_prob(params)
            if part is None:
                raise ValueError(
                    f"{type(guide).__name__} over {', '.join(guide.names)} has no tractable density"
                )
            total = part if total is None else total + part
        assert total is not None
        return total

    def call(self, params: Params, *inputs: Any) -> Tensor:
        """The network with these parameters."""
        return self.network.call(params, *inputs)

    def posterior(self, likelihood: Likelihood, n: int) -> Guided:
        """The posterior at the end of a training loop, as ``bayou.fit`` returns it; it shares the
        tensors of q.

        Args:
            likelihood: p(y | f), with its noise where that was learned.
            n: the number N of training examples.
        """
        from bayou.posteriors.guided import Guided  # which is built on this module

        net, here = shared_copy(self._original[0], self.names), dict(self.net.named_buffers())
        for name, value in net.named_parameters():
            if name in here and type(value) is nn.Parameter and not value.requires_grad:
                value.data = here[name]  # where ``to`` has moved it, not a second copy
        net = net.to(next(self.parameters()).device)
        return Guided(Target.build(net, likelihood, self.prior, n), self)


def given_to(guide: Guide, found: Mapping[str, Tensor | Weight], n: int = 1) -> dict[str, Any]:
    """The argument ``given`` of a guide that depends on the draws of others; a point is the same in
    all n draws.
    """
    if not guide.given:
        return {}
    parts = {name: found[name] for name in guide.given}
    return {
        "given": {
            k: p if isinstance(p, Tensor) else p.mean.expand(n, *p.mean.shape)
            for k, p in parts.items()
        }
    }


@dataclass(
    frozen=True, eq=False
)  # hashed by identity: torch.compile hashes a callable before its fields are set
class NetworkDraw:
    """One network drawn from q, or S of them: call it on inputs; ``kl`` is the KL of this draw, in
    nats.
    """

    bayesian: Bayesian
    draws: tuple[Draw, ...]
    samples: int
    single: bool
    coupling: Tensor | None = (
        None  # (S,), of a prior over several tensors: log p − Σ log p of each by itself
    )

    @property
    def kl(self) -> Tensor:
        """Σ over tensors of KL(q ‖ p), averaged over the draws: a scalar, never rescaled."""
        total = torch.stack([draw.kl.mean() for draw in self.draws]).sum()
        return total if self.coupling is None else total - self.coupling.mean()

    @property
    def score(self) -> Tensor | None:
        """log-probability of discrete choices per draw (S,) or per row (S·rows,), for REINFORCE;
        None without any.
        """
        scores = [draw.score for draw in self.draws if draw.score is not None]
        if not scores:
            return None
        rows = max(map(len, scores))
        return torch.stack([score.repeat_interleave(rows // len(score)) for score in scores]).sum(0)

    @property
    def parts(self) -> dict[str, Tensor | Weight]:
        """Every tensor of the draw: sampled weights (S, *shape), or Gaussians given their gains."""
        return {name: part for draw in self.draws for name, part in draw.parts.items()}

    def part(self, own: slice) -> NetworkDraw:
        """The networks of some of the draws; ``kl`` stays that of all."""

        def rows(value: Tensor) -> Tensor:
            return value.unflatten(0, (self.samples, -1))[own].flatten(
                0, 1
            )  # one per draw, or per draw and example

        draws = []
        for draw in self.draws:
            parts = {
                n: rows(w) if isinstance(w, Tensor) else w.with_gains(rows)
                for n, w in draw.parts.items()
            }
            draws.append(
                replace(draw, parts=parts, score=None if draw.score is None else rows(draw.score))
            )
        return replace(self, draws=tuple(draws), samples=len(range(self.samples)[own]))

    def __call__(self, *inputs: Any, **named: Any) -> Tensor:
        """Outputs (B, ...), or (S, B, ...) for S draws; of a network with several outputs its
        ``logits``.

        ``named``: inputs that the network takes by keyword, ``draw(**batch)``; labels are left out.
        """
        inputs = (*inputs, *forward_inputs(named)) if named else inputs
        if not self.bayesian.traced and not torch.compiler.is_compiling():
            self.bayesian.trace(inputs)
        parts = {name: self._sampled_if_needed(name, part) for name, part in self.parts.items()}
        sampled = {name: part for name, part in parts.items() if isinstance(part, Tensor)}
        points = {
            name: part.mean
            for name, part in parts.items()
            if isinstance(part, Weight) and part.is_point
        }
        waiting = {
            name: part
            for name, part in parts.items()
            if isinstance(part, Weight) and not part.is_point
        }
        if self.single:
            return self._one(points | {name: w[0] for name, w in sampled.items()}, waiting, inputs)
        apart = self.bayesian.rows_independent
        shares = self.bayesian.shares and apart and not torch.compiler.is_compiling()
        flat = all(gain.axis < 2 for weight in waiting.values() for gain in weight.gains)
        plain = all(isinstance(item, (Tensor, Keywords)) for item in inputs)
        if waiting and not sampled and flat and plain and apart and not shares:
            return self._tiled(points, waiting, inputs)
        device = next(self.bayesian.parameters()).device
        mapped = shares or (device.type == "cuda" and not waiting and not self.bayesian.training)

        def one(s: Tensor, own: Params) -> Tensor:
            return self._one(points | own, self._rows(waiting, s), inputs)

        each = VmapOrLoop(one, (0, 0), loop=not mapped)
        out: Tensor = each(torch.arange(self.samples, device=device), sampled)
        if shares and each.loop:
            self.bayesian.shares = False  # an operation has no batching rule
        return out

    def _sampled_if_needed(self, name: str, part: Tensor | Weight) -> Tensor | Weight:
        """Sample weights that were drawn before the dry run found that they must be sampled."""
        if isinstance(part, Tensor) or part.is_point or name in self.bayesian.local_names:
            return part
        return part.with_gains(lambda z: z[:: len(z) // self.samples]).sample(self.samples)

    def _tiled(self, points: Params, waiting: dict[str, Weight], inputs: tuple[Any, ...]) -> Tensor:
        """All S draws in one pass over S copies of the rows, since local noise is independent per
        row anyway.
        """
        rows = len(inputs[0])

        def widen(z: Tensor) -> Tensor:
            return z if len(z) == self.samples * rows else z.repeat_interleave(rows, 0)

        wide = {name: weight.with_gains(widen) for name, weight in waiting.items()}
        tiled = combine_inputs(torch.cat, [inputs] * self.samples)
        return self._one(points, wide, tiled).unflatten(0, (self.samples, rows))

    def _rows(self, waiting: dict[str, Weight], s: Tensor) -> dict[str, Weight]:
        """The gains of draw s; ``vmap`` takes an index of one entry, but no number."""

        def own(z: Tensor) -> Tensor:
            return z.unflatten(0, (self.samples, -1)).index_select(0, s.reshape(1)).squeeze(0)

        return {name: weight.with_gains(own) for name, weight in waiting.items()}

    def _one(self, sampled: Params, waiting: dict[str, Weight], inputs: tuple[Any, ...]) -> Tensor:
        if not waiting:
            return self.bayesian.call(sampled, *inputs)
        mode = LocalReparameterization(waiting)
        with mode:
            out = self.bayesian.call(
                sampled | {name: weight.mean for name, weight in waiting.items()}, *inputs
            )
        mode.finish()
        return out


def bayesianize(
    net: nn.Module,
    rules: Rules,
    *,
    prior: Prior | Mapping[str, Prior] | None = None,
    example: Any = None,
) -> Bayesian:
    """Make a network Bayesian: a guide for every parameter, by patterns on names; the first match
    wins.

    One dry run decides where local reparameterization applies and finds weights that are never
    used. A frozen parameter (``requires_grad=False``) has no guide: the network shares its value.

    Args:
        net: the network; it is not changed.
        rules: a family such as MNF() for all parameters, or patterns → families.
        prior: one prior or patterns → priors, Normal(1.0) by default.
        example: an input (a tuple or dict for several) for the dry run; without one it is made at
            the first call of a draw.

    Returns:
        A module with the parameters of q; ``draw()`` is a function drawn from it.
    """
    return Bayesian(net, rules, prior, example)

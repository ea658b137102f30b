"""Mixtures of posteriors: an ensemble whose members are distributions themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.network import DryRun
from bayou.network.units import Units
from bayou.params import Params, stack, under
from bayou.posteriors.empirical import shuffled
from bayou.posteriors.posterior import NOISE, Posterior, check_count
from bayou.posteriors.state import temperature_state

MEMBER = "member"  # the tensor of a draw that says which component it came from


@final
class Mixture(Posterior):
    """q(w) = 1/C Σ_c q_c(w), of posteriors over the tensors of one network.

    A draw has one more tensor, ``member``: which component it is from. Draws alternate: the
    first C are one of each component, in random order.
    """

    kind = "mixture"
    mappable = False

    def __init__(
        self, components: Sequence[Posterior], history: list[dict[str, float]] | None = None
    ) -> None:
        if (kinds := len({frozenset(component.like()) for component in components})) != 1:
            what = f"a mixture needs at least one posterior, and all over the same tensors, got {kinds} sets of tensors"
            raise ValueError(
                f"{what}; to average other posteriors, join the outputs of their predictions"
            )
        self.components = list(components)
        self.target = self.components[0].target
        self.history, self.stopped = history or [], ""

    def take_units(self, units: Units) -> None:
        super().take_units(units)
        for component in self.components:
            component.take_units(units)
        self.target = self.components[0].target

    @property
    def net(self) -> nn.Module:
        return nn.ModuleList([component.net for component in self.components])

    @property
    def draws(self) -> int | None:
        counts = [component.draws for component in self.components]
        finite = [count for count in counts if count is not None]
        return sum(finite) if len(finite) == len(counts) else None

    def like(self) -> Params:
        return self.components[0].like()

    def relevance(self, where: str | None = None) -> dict[str, Tensor]:
        """The mean over the components."""
        each = [component.relevance(where) for component in self.components]
        return {name: torch.stack([found[name] for found in each]).mean(0) for name in each[0]}

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        check_count(n)
        count, seed = len(self.components), rng.integer(seed)
        index = shuffled(count, n, rng.fold(seed, "members"), start)
        rounds = (torch.arange(start, start + n) // count).tolist()
        found: dict[str, list[Tensor | None]] = {}
        for number, component in enumerate(self.components):
            here = (index == number).nonzero().flatten().tolist()
            first = rounds[here[0]] if here else 0
            drawn = component.sample(len(here), rng.fold(seed, "member", number), first)
            learned = _noise(component)
            drawn |= {
                name: v.expand(len(here), *v.shape)
                for name, v in learned.items()
                if name not in drawn
            }
            for name, values in drawn.items():
                slots = found.setdefault(name, [None] * n)
                for place, value in zip(here, values, strict=True):
                    slots[place] = value
        stack = {
            name: torch.stack(slots) if slots else drawn[name] for name, slots in found.items()
        }  # type: ignore[arg-type]
        return stack | {MEMBER: index.to(next(iter(stack.values())).device)}

    def mean(self) -> Params:
        """The mean of the components' means; rarely a good network."""
        return {name: values.mean(0) for name, values in self._means().items()}

    def std(self) -> Params:
        """√(E[std²] + Var[mean]) over the components."""
        points = [
            {name: torch.zeros_like(v) for name, v in _noise(c).items()} for c in self.components
        ]
        means, stds = (
            self._means(),
            stack([p | c.std() for p, c in zip(points, self.components, strict=True)]),
        )
        return {n: (stds[n].square().mean(0) + means[n].var(0, correction=0)).sqrt() for n in means}

    @property
    def members(self) -> int:
        return len(self.components)

    def component(self, params: Params) -> Posterior:
        return self.components[int(params[MEMBER])] if MEMBER in params else self.components[0]

    def traceable(self, draw: Params, inputs: tuple[Any, ...]) -> tuple[Posterior, Params]:
        if MEMBER not in draw:
            raise ValueError(
                "a mixture of mixtures cannot be exported; export its components one by one"
            )
        return self.component(draw).traceable(_without_member(draw), inputs)

    def _means(self) -> Params:
        return stack([_noise(c) | c.mean() for c in self.components])

    def call(self, params: Params, *inputs: Any) -> Tensor:
        return self.component(params).call(_without_member(params), *inputs)

    def dry_run(self, inputs: tuple[Any, ...]) -> DryRun:
        runs = [component.dry_run(inputs) for component in self.components]
        return DryRun(random=any(run.random for run in runs))  # each splits its own rows

    def outputs(self, stack: Params, inputs: tuple[Any, ...], rows: int | None = None) -> Tensor:
        """Every component computes the outputs of its own draws."""
        members = stack[MEMBER]
        places = [(members == number).nonzero().flatten() for number in range(len(self.components))]
        parts = [
            component.outputs({k: v[here] for k, v in _without_member(stack).items()}, inputs, rows)
            for component, here in zip(self.components, places, strict=True)
            if len(here)
        ]
        return torch.cat(parts)[torch.cat(places).argsort()]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors: dict[str, Tensor] = {}
        configs = []
        for number, component in enumerate(self.components):
            part, config = component.state()
            tensors |= {f"{number}.{name}": value for name, value in part.items()}
            configs.append(config)
        return tensors, {
            "kind": self.kind,
            "components": configs,
            "history": self.history,
            "stopped": self.stopped,
        } | temperature_state(self)

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any
    ) -> Mixture:
        from bayou.posteriors import restore_any  # a component may be of any kind, a mixture too

        components = [
            restore_any(
                under(f"{number}.", tensors), part | {"path": config["path"]}, net, **options
            )
            for number, part in enumerate(config["components"])
        ]
        return cls(components, config["history"])

    def __repr__(self) -> str:
        return f"Mixture of {len(self.components)}: {self.components[0]!r}, ..."


def _without_member(params: Params) -> Params:
    return {name: value for name, value in params.items() if name != MEMBER}


def _noise(component: Posterior) -> Params:
    """The learned parameters of the likelihood of a component, for those that it does not draw."""
    return {
        f"{NOISE}{name}": value.detach()
        for name, value in component.target.likelihood.named_parameters()
    }

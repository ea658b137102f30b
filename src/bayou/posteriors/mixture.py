"""Mixtures of posteriors: an ensemble whose members are distributions themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, stack
from bayou.network import DryRun
from bayou.network.units import Units
from bayou.posteriors.empirical import shuffled_indices
from bayou.posteriors.posterior import NOISE, Posterior, check_count, restore_posterior
from bayou.posteriors.state import SavedState, temperature_state

MEMBER = "member"  # the tensor of a draw that says which component it came from


@final
class Mixture(Posterior):
    """q(w) = 1/C Σ_c q_c(w), of posteriors over the tensors of one network.

    A draw has one more tensor, ``member``: which component it is from. Draws alternate: the
    first C are one of each component, in random order.

    Args:
        components: C posteriors over tensors of the same names.
        history: records of the fit; none by default.
    """

    kind = "mixture"
    mappable = False

    def __init__(
        self, components: Sequence[Posterior], history: list[dict[str, float]] | None = None
    ) -> None:
        names = {frozenset(component.template()) for component in components}
        if len(names) != 1:
            raise ValueError(
                "a mixture needs at least one posterior, and all over the same tensors, got "
                f"{len(names)} sets of tensors; to average other posteriors, join the outputs of "
                "their predictions"
            )
        self.components = list(components)
        self.target = self.components[0].target
        self.history = history or []
        self.stopped = ""

    def take_units(self, units: Units) -> None:
        """Convert all components to the units of the user."""
        super().take_units(units)
        for component in self.components:
            component.take_units(units)
        self.target = self.components[0].target

    @property
    def net(self) -> nn.Module:
        """The networks of all components."""
        return nn.ModuleList([component.net for component in self.components])

    @property
    def draws(self) -> int | None:
        """The number of different draws of all components; None if one of them is a continuum."""
        counts = [component.draws for component in self.components]
        finite_counts = [count for count in counts if count is not None]
        return sum(finite_counts) if len(finite_counts) == len(counts) else None

    def template(self) -> Params:
        """Return tensors with the shapes of a draw of the first component."""
        return self.components[0].template()

    def relevance(self, where: str | None = None) -> dict[str, Tensor]:
        """Compute the mean relevance of inputs over the components.

        Args:
            where: a pattern of tensor names, for other layers than the first.
        """
        relevances = [component.relevance(where) for component in self.components]
        means = {}
        for name in relevances[0]:
            means[name] = torch.stack([relevance[name] for relevance in relevances]).mean(0)
        return means

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw from all components in turn.

        Args:
            n: the number of draws.
            seed: of the draws; None (the default) takes them from torch's global stream.
            start: the number of the first draw.

        Returns:
            Tensors by name, (n, *shape) each, and ``member``, (n,).
        """
        check_count(n)
        count = len(self.components)
        seed = rng.integer(seed)
        members = shuffled_indices(count, n, rng.fold(seed, "members"), start)
        rounds = torch.arange(start, start + n) // count
        positions = []
        draws = []
        for number, component in enumerate(self.components):
            index = (members == number).nonzero().flatten()
            first = int(rounds[index[0]]) if len(index) else 0
            component_seed = rng.fold(seed, "member", number)
            draws.append(_draw_with_noise(component, len(index), component_seed, first))
            positions.append(index)
        order = torch.cat(positions).argsort()
        stacked: Params = {}
        for name in draws[0]:
            values = torch.cat([component_draws[name] for component_draws in draws])
            stacked[name] = values[order.to(values.device)]
        return stacked | {MEMBER: members.to(next(iter(stacked.values())).device)}

    def mean(self) -> Params:
        """Compute the mean of the components' means; rarely a good network."""
        return {name: values.mean(0) for name, values in self._means().items()}

    def std(self) -> Params:
        """Compute √(E[std²] + Var[mean]) over the components."""
        component_stds = []
        for component in self.components:
            noise = _noise(component)
            points = {name: torch.zeros_like(value) for name, value in noise.items()}
            component_stds.append(points | component.std())
        means = self._means()
        stds = stack(component_stds)
        total: Params = {}
        for name in means:
            variance = stds[name].square().mean(0) + means[name].var(0, correction=0)
            total[name] = variance.sqrt()
        return total

    @property
    def members(self) -> int:
        """The number of components."""
        return len(self.components)

    def component(self, params: Params) -> Posterior:
        """Return the component that a draw is from.

        Args:
            params: tensors of one draw, by name.
        """
        return self.components[int(params[MEMBER])] if MEMBER in params else self.components[0]

    def traceable(self, draw: Params, inputs: tuple[Any, ...]) -> tuple[Posterior, Params]:
        """Return the component of a draw and the draw, in a form whose ``call`` is one graph."""
        if MEMBER not in draw:
            raise ValueError(
                "a mixture of mixtures cannot be exported; export its components one by one"
            )
        return self.component(draw).traceable(_without_member(draw), inputs)

    def _means(self) -> Params:
        """Return the means of the components, a stack (C, *shape)."""
        return stack([_noise(component) | component.mean() for component in self.components])

    def call(self, params: Params, *inputs: object) -> Tensor:
        """Compute the outputs of the component that a draw is from."""
        return self.component(params).call(_without_member(params), *inputs)

    def dry_run(self, inputs: tuple[Any, ...]) -> DryRun:
        """Return whether any component is random; each divides its own rows."""
        dry_runs = [component.dry_run(inputs) for component in self.components]
        return DryRun(random=any(dry_run.random for dry_run in dry_runs))

    def outputs(self, stack: Params, inputs: tuple[Any, ...], rows: int | None = None) -> Tensor:
        """Compute the outputs of all draws, those of each component together."""
        members = stack[MEMBER]
        weights = _without_member(stack)
        positions = []
        outputs = []
        for number, component in enumerate(self.components):
            index = (members == number).nonzero().flatten()
            positions.append(index)
            if len(index):
                draws = {name: value[index] for name, value in weights.items()}
                outputs.append(component.outputs(draws, inputs, rows))
        return torch.cat(outputs)[torch.cat(positions).argsort()]

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the states of the components, whose tensors are numbered."""
        tensors: dict[str, Tensor] = {}
        configs = []
        for number, component in enumerate(self.components):
            component_tensors, component_config = component.state()
            for name, value in component_tensors.items():
                tensors[f"{number}.{name}"] = value
            configs.append(component_config)
        config = {
            "kind": self.kind,
            "components": configs,
            "history": self.history,
            "stopped": self.stopped,
        }
        return tensors, config | temperature_state(self)

    @classmethod
    def restore(cls, saved: SavedState, net: nn.Module) -> Mixture:
        """Return the posterior with a ``state``, see ``Posterior.restore``."""
        components = []
        for number, config in enumerate(saved.config["components"]):
            component = replace(saved, tensors=saved.group(str(number)), config=config)
            components.append(restore_posterior(component, net))
        return cls(components, saved.config["history"])

    def __repr__(self) -> str:
        return f"Mixture of {len(self.components)}: {self.components[0]!r}, ..."


def _draw_with_noise(component: Posterior, n: int, seed: rng.Seed, start: int) -> Params:
    """Draw from a component, with the learned noise where it draws none."""
    draws = component.sample(n, seed, start)
    for name, value in _noise(component).items():
        if name not in draws:
            draws[name] = value.expand(n, *value.shape)
    return draws


def _without_member(params: Params) -> Params:
    """Return a draw without the tensor that says which component it is from."""
    return {name: value for name, value in params.items() if name != MEMBER}


def _noise(component: Posterior) -> Params:
    """Return the learned parameters of the likelihood of a component."""
    parameters = component.target.likelihood.named_parameters()
    return {f"{NOISE}{name}": value.detach() for name, value in parameters}

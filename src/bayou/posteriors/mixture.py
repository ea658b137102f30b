"""Mixtures of posteriors: an ensemble whose members are distributions themselves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import FileError, no_grad_state
from bayou.core.params import Params, stack
from bayou.likelihoods import Likelihood
from bayou.likelihoods.joined import Sampled, join_samples
from bayou.likelihoods.predictive import Predictive
from bayou.network import DryRun
from bayou.network.target import Target
from bayou.network.units import Units
from bayou.posteriors.empirical import shuffled_indices
from bayou.posteriors.loading import restore_posterior
from bayou.posteriors.posterior import DEFAULT_SAMPLES, NOISE, Posterior, check_count
from bayou.posteriors.state import SavedState, calibration_state, check_base, updates_state
from bayou.posteriors.updates import Updates, check_forget
from bayou.training.ranks import current

MEMBER = "member"  # the tensor of a draw that says which component it came from
INDEX = "index"  # the number of a draw among those of its component, where tensors differ
SEED = "seed"  # the seed of the mixture that such a draw was made with
# Of likelihoods, in which components may differ.
NOISE_FIELDS = ("noise", "scale", "shape", "dispersion", "learn")
NETWORKS_DIFFER = "networks_differ"  # an entry of files


@final
class Mixture(Posterior):
    """q = Σ_c w_c q_c of C posteriors, so that p(y | x) = Σ_c w_c p_c(y | x).

    The components may be of any methods, and of different networks as long as all predict the same
    y. Their numbers of draws are proportional to the weights: among the first S draws S·w_c are of
    component c, up to less than one draw, so that every average over draws is one with these
    weights. With equal weights the first C draws are one of each component, in random order.

    A draw of components with the same tensors has these tensors, and ``member``: which component
    it is from. Components with different tensors have draws of three numbers, ``member``,
    ``index`` and ``seed``, from which ``call`` makes the tensors again.

    A component that predicts in closed form, such as an exact Laplace, also does so here.

    Args:
        components: C posteriors of the same y.
        weights: C numbers that are not negative, one for each component; they are divided by their
            sum. None (the default) for equal weights.
        history: records of the fit; none by default.

    Raises:
        ValueError: for no components, weights that do not suit them, or components of different y.

    Example::

        components = [bayou.fit(net, data, "laplace"), bayou.fit(other_net, data, "mnf")]
        posterior = bayou.Mixture(components, weights=[0.7, 0.3])
        posterior.save("mixture.bayou")
        posterior = bayou.load("mixture.bayou", [net, other_net])
    """

    kind = "mixture"
    mappable = False

    def __init__(
        self,
        components: Sequence[Posterior],
        weights: Sequence[float] | Tensor | None = None,
        history: list[dict[str, float]] | None = None,
    ) -> None:
        self.components: list[Posterior] = list(components)
        if not self.components:
            raise ValueError("a mixture needs at least one posterior, got none")
        for component in self.components:
            if not isinstance(component, Posterior):
                raise ValueError(
                    f"a mixture is made of posteriors, got {type(component).__name__}; pass what "
                    "bayou.fit returned: Mixture([posterior, other_posterior])"
                )
        self.weights: Tensor = _normalize_weights(weights, len(self.components))
        self.has_equal_weights: bool = bool((self.weights == self.weights[0]).all())
        self.target: Target = self.components[0].target
        self.history: list[dict[str, float]] = history or []
        self.stopped = ""
        first, *rest = self.components
        _check_targets(self.components)
        networks = [component for component in self.components if not component.builds_network]
        self.networks_differ: bool = any(
            not _share_network(networks[0], component) for component in networks[1:]
        )
        is_nested = any(isinstance(component, Mixture) for component in self.components)
        self.tensors_differ: bool = is_nested or any(not _share_tensors(first, c) for c in rest)

    def take_units(self, units: Units) -> None:
        """Convert all components to the units of the user."""
        super().take_units(units)
        for component in {id(component): component for component in self.components}.values():
            component.take_units(units)
        self.target = self.components[0].target

    @property
    def builds_network(self) -> bool:
        """Whether the file makes the networks of all components."""
        return all(component.builds_network for component in self.components)

    @property
    def net(self) -> nn.Module:
        """The networks of all components."""
        return nn.ModuleList([component.net for component in self.components])

    @property
    def draws(self) -> int | None:
        """The number of different draws of all components, if they are equally probable.

        None if one component is a continuum, or if the weights differ.
        """
        if not self.has_equal_weights:
            return None
        counts = [component.draws for component in self.components]
        finite_counts = [count for count in counts if count is not None]
        return sum(finite_counts) if len(finite_counts) == len(counts) else None

    def template(self) -> Params:
        """Return tensors with the shapes of a draw of the first component."""
        return self.components[0].template()

    def relevance(self, where: str | None = None) -> dict[str, Tensor]:
        """Compute the mean relevance of inputs over the components, with their weights.

        Args:
            where: a pattern of tensor names, for other layers than the first.

        Raises:
            ValueError: if a component has none, or the components have different layers.
        """
        relevances = [component.relevance(where) for component in self.components]
        if len({tuple(_shapes(relevance).items()) for relevance in relevances}) > 1:
            raise ValueError(
                "the components of this mixture have different layers, so that it has no relevance "
                "of its own; take those of each component: "
                "[c.relevance() for c in posterior.components]"
            )
        means = {}
        for name in relevances[0]:
            values = torch.stack([relevance[name] for relevance in relevances])
            means[name] = self._average(values)
        return means

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw from the components in turn, in proportion to their weights.

        Args:
            n: the number of draws.
            seed: of the draws; None (the default) takes them from torch's global stream.
            start: the number of the first draw.

        Returns:
            Tensors by name, (n, *shape) each, and ``member``, (n,). If the components have
            different tensors: ``member``, ``index`` and ``seed``, (n,) each.
        """
        check_count(n)
        seed = rng.integer(seed)
        members, indices = self._assign_draws(n, seed, start)
        if self.tensors_differ:
            return {MEMBER: members, INDEX: indices, SEED: torch.full_like(members, seed)}
        positions = []
        draws = []
        for number, component in enumerate(self.components):
            position = (members == number).nonzero().flatten()
            first = int(indices[position[0]]) if len(position) else 0
            component_draws = component.sample(
                len(position), rng.fold(seed, "member", number), first
            )
            for name, value in self._noise(component).items():
                if name not in component_draws:
                    component_draws[name] = value.expand(len(position), *value.shape)
            draws.append(component_draws)
            positions.append(position)
        order = torch.cat(positions).argsort()
        stacked: Params = {}
        for name in draws[0]:
            values = torch.cat([component_draws[name] for component_draws in draws])
            stacked[name] = values[order.to(values.device)]
        return stacked | {MEMBER: members.to(next(iter(stacked.values())).device)}

    def _assign_draws(self, n: int, seed: int, start: int) -> tuple[Tensor, Tensor]:
        """Return the component of each draw, and its number among the draws of this component."""
        count = len(self.components)
        if self.has_equal_weights:
            members = shuffled_indices(count, n, rng.fold(seed, "members"), start)
            return members, torch.arange(start, start + n) // count
        members = allocate_draws(self.weights, start + n, rng.fold(seed, "members"))
        one_hot = torch.nn.functional.one_hot(members, count)
        indices = one_hot.cumsum(0).gather(1, members.unsqueeze(1)).squeeze(1) - 1
        return members[start:], indices[start:]

    def predict(
        self,
        x: object,
        samples: int | None = None,
        *,
        seed: rng.Seed = 0,
        chunk: int | None = None,
        batch_size: int | None = None,
    ) -> Predictive:
        """Predict y at new inputs by all components, with their weights.

        Components that predict in closed form do so whatever ``samples`` is, and points are
        evaluated once.

        Args:
            x: a tensor (B, ...), a tuple or a mapping of them, or a DataLoader.
            samples: the number of functions; by default 100, or all ``draws`` if there are fewer.
                Component c has S·w_c of them, up to less than one.
            seed: of the draws; 0 by default.
            chunk: functions computed at a time; by default as many as fit.
            batch_size: rows computed at a time; by default as many as fit.

        Returns:
            The predictive distribution of y.
        """
        if self._averages_equal_draws:
            return super().predict(x, samples, seed=seed, chunk=chunk, batch_size=batch_size)
        if samples is None:
            samples = min(DEFAULT_SAMPLES, self.draws or DEFAULT_SAMPLES)
        check_count(samples, "samples", 1)
        device = next(iter(self.template().values())).device
        seed = current().first(rng.integer(seed), device)
        options = {"chunk": chunk, "batch_size": batch_size}
        members, _ = self._assign_draws(samples, seed, 0)
        positions = []
        predictions = []
        for number, component in enumerate(self.components):
            position = (members == number).nonzero().flatten()
            if len(position):
                component_seed = rng.fold(seed, "member", number)
                positions.append(position)
                predictions.append(
                    _predict_functions(component, x, len(position), component_seed, options)
                )
        likelihood, outputs = join_samples(predictions)
        order = torch.cat(positions).argsort()
        return self.apply_temperature(likelihood, outputs[order.to(outputs.device)])

    @property
    def _averages_equal_draws(self) -> bool:
        """Whether ``predict`` can evaluate all draws with one likelihood, as an ensemble does."""
        if self.tensors_differ or not self.has_equal_weights:
            return False
        has_drawn_noise = not self._noise_differs
        return has_drawn_noise and not any(
            component.temperature != 1.0
            or component.calibration_map is not None
            or component.predicts_without_draws
            for component in self.components
        )

    def update(self, data: object, *, forget: float | None = None) -> Mixture:
        """Return the mixture given further rows; see ``Posterior.update``.

        Every component is updated, and its weight multiplied by the density that it gave to the new
        rows before, w_c ← w_c^λ·p_c(y | x, D)/Z (Bayes' rule; with λ < 1 as in dynamic model
        averaging, Raftery et al. 2010). The density is that of all rows together, in closed form
        for Gaussian noise and from 1,000 draws otherwise (``log_predictive_density``).

        Args:
            data: new rows, as ``bayou.fit`` takes them, in the units of the fit.
            forget: λ, the weight that is left to all earlier rows, in (0, 1]; None (default) for 1.

        Raises:
            ValueError: if a component cannot be updated.
        """
        weight = check_forget(forget)
        components = self._change_components(lambda c: c.update(data, forget=forget))
        densities = [component.log_predictive_density(data) for component in self.components]
        log_weights = weight * self.weights.log() + torch.tensor(densities, dtype=torch.float64)
        added = components[0].target.n - self.components[0].target.n
        updates = self.updates.after(added=added, forget=weight)
        return self._with_components(components, log_weights, updates)

    def downdate(self, data: object) -> Mixture:
        """Return the mixture without some of its rows; see ``Posterior.downdate``.

        Args:
            data: rows that were in the fit or in an update, with the same x and y.

        Raises:
            ValueError: if the rows cannot be removed exactly from a component.
        """
        components = self._change_components(lambda c: c.downdate(data))
        densities = [component.log_predictive_density(data) for component in components]
        log_weights = self.weights.log() - torch.tensor(densities, dtype=torch.float64)
        removed = self.components[0].target.n - components[0].target.n
        return self._with_components(components, log_weights, self.updates.after(removed=removed))

    def _change_components(self, change: Callable[[Posterior], Posterior]) -> list[Posterior]:
        """Return the components after a change; an error says which one cannot be changed."""
        changed = []
        for number, component in enumerate(self.components):
            try:
                changed.append(change(component))
            except ValueError as error:
                raise ValueError(f"component {number} of this mixture: {error}") from error
        return changed

    def _with_components(
        self, components: list[Posterior], log_weights: Tensor, updates: Updates
    ) -> Mixture:
        """Return the mixture of other components of the same networks, with other weights."""
        mixture = copy.copy(self)
        mixture.components = components
        mixture.weights = log_weights.softmax(0)
        mixture.has_equal_weights = bool((mixture.weights == mixture.weights[0]).all())
        mixture.note_update(updates, components[0].target.n)
        mixture.target = components[0].target
        return mixture

    def mean(self) -> Params:
        """Compute the mean of the components' means; rarely a good network.

        Raises:
            ValueError: if the components have different tensors.
        """
        self._check_shared_tensors("a mean")
        return {name: self._average(values) for name, values in self._means().items()}

    def std(self) -> Params:
        """Compute √(E[std²] + Var[mean]) over the components.

        Raises:
            ValueError: if the components have different tensors.
        """
        self._check_shared_tensors("a standard deviation")
        component_stds = []
        for component in self.components:
            noise = self._noise(component)
            points = {name: torch.zeros_like(value) for name, value in noise.items()}
            component_stds.append(points | component.std())
        means = self._means()
        stds = stack(component_stds)
        total: Params = {}
        for name in means:
            deviation = means[name] - self._average(means[name])
            variance = self._average(stds[name].square() + deviation.square())
            total[name] = variance.sqrt()
        return total

    def by_chain(self, samples: int | None = None, seed: rng.Seed = 0) -> Params:
        """Return draws as one chain; see ``Posterior.by_chain``.

        Args:
            samples: the number of draws; by default 1,000, or all ``draws`` if there are fewer.
            seed: of the draws; 0 by default.

        Raises:
            ValueError: if the components have different tensors.
        """
        self._check_shared_tensors("chains of draws")
        return super().by_chain(samples, seed)

    def to_module(self, params: Params | None = None, *, seed: rng.Seed = None) -> nn.Module:
        """Return a network with the tensors of a draw; see ``Posterior.to_module``.

        Args:
            params: a draw.
            seed: of a draw to make.

        Raises:
            ValueError: without a draw and without a seed.
        """
        if seed is not None:
            params = {name: value[0] for name, value in self.sample(1, seed).items()}
        if params is None or MEMBER not in params or not self.tensors_differ:
            return super().to_module(params)
        return self.component(params).to_module(self._component_draw(params))

    def _check_shared_tensors(self, name: str) -> None:
        """Raise a ValueError for a statistic of tensors that the components do not share."""
        if self.tensors_differ:
            raise ValueError(
                f"the components of this mixture have different tensors, so that it has no {name} "
                "of them; take those of each component: [c for c in posterior.components]"
            )

    def _check_shared_outputs(self) -> None:
        """Raise a ValueError if outputs of the components have different meanings."""
        first, *rest = [component.target.likelihood_spec for component in self.components]
        names = (*NOISE_FIELDS, "units")
        if not all(_differ_only_in(names, first, likelihood) for likelihood in rest):
            raise ValueError(
                "the components of this mixture have different likelihoods, so that their outputs "
                "cannot be compared; use posterior.predict(x), or the components one by one"
            )

    def _average(self, values: Tensor) -> Tensor:
        """Return Σ_c w_c·value_c of values (C, ...)."""
        if self.has_equal_weights:
            return values.mean(0)
        return torch.tensordot(self.weights.to(values), values, 1)

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
        if self.tensors_differ:
            raise ValueError(
                "a mixture over different tensors cannot be exported as one program; export its "
                "components one by one, and average their answers with posterior.weights"
            )
        component = self.component(draw)
        if component.calibration_map is not None:
            raise ValueError(
                f"a component has a calibration map, {component.calibration_map!r}, which a "
                "program of the mixture cannot apply; calibrate the mixture instead"
            )
        if component.temperature != 1.0:
            raise ValueError(
                f"a component has a temperature of {component.temperature:.3g}, which a program of "
                "the mixture cannot apply; calibrate the mixture instead"
            )
        return component.traceable(_without_member(draw), inputs)

    def _means(self) -> Params:
        """Return the means of the components, a stack (C, *shape)."""
        return stack([self._noise(component) | component.mean() for component in self.components])

    @property
    def _noise_differs(self) -> bool:
        """Whether components with the same tensors have known noises of different sizes."""
        first, *rest = [dict(c.target.likelihood.named_buffers()) for c in self.components]
        return any(
            buffers.keys() != first.keys()
            or any(not torch.equal(value, buffers[name]) for name, value in first.items())
            for buffers in rest
        )

    def _noise(self, component: Posterior) -> Params:
        """Return the parameters of a component's likelihood that differ between components."""
        likelihood = component.target.likelihood
        values = {name: value.detach() for name, value in likelihood.named_parameters()}
        if self._noise_differs:
            values = no_grad_state(likelihood)
        return {f"{NOISE}{name}": value for name, value in values.items()}

    def _component_draw(self, params: Params) -> Params:
        """Return the tensors of a draw, as its component has them."""
        if INDEX not in params or not self.tensors_differ:
            return _without_member(params)
        seed = rng.fold(int(params[SEED]), "member", int(params[MEMBER]))
        stacked = self.component(params).sample(1, seed, int(params[INDEX]))
        return {name: value[0] for name, value in stacked.items()}

    def call(self, params: Params, *inputs: object) -> Tensor:
        """Compute the outputs of the component that a draw is from."""
        self._check_shared_outputs()
        draw = self._component_draw(params)
        weights = {name: value for name, value in draw.items() if not name.startswith(NOISE)}
        return self.component(params).call(weights, *inputs)

    def dry_run(self, inputs: tuple[Any, ...]) -> DryRun:
        """Return whether any component is random; each divides its own rows."""
        dry_runs = [component.dry_run(inputs) for component in self.components]
        return DryRun(random=any(dry_run.random for dry_run in dry_runs))

    def outputs(self, stack: Params, inputs: tuple[Any, ...], rows: int | None = None) -> Tensor:
        """Compute the outputs of all draws, those of each component together."""
        self._check_shared_outputs()
        if self.tensors_differ:
            count = len(stack[MEMBER])
            functions = [{name: value[s] for name, value in stack.items()} for s in range(count)]
            return torch.stack([self.call(draw, *inputs) for draw in functions])
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
            if self.networks_differ:
                component_config["base"] = component.target.base()
            configs.append(component_config)
        config: dict[str, Any] = {
            "kind": self.kind,
            "components": configs,
            "history": self.history,
            "stopped": self.stopped,
        }
        if not self.has_equal_weights:
            config["weights"] = self.weights.tolist()
        if self.networks_differ:
            config[NETWORKS_DIFFER] = True
        calibration, calibration_config = calibration_state(self)
        return tensors | calibration, config | calibration_config | updates_state(self)

    @classmethod
    def restore(cls, saved: SavedState, net: nn.Module | Sequence[nn.Module]) -> Mixture:
        """Return the posterior with a ``state``, see ``Posterior.restore``.

        Args:
            saved: the state, read from a file.
            net: the network of all components, or a list with one for each.
        """
        configs = saved.config["components"]
        nets = _nets_of_components(saved, net)
        components = []
        for number, (config, component_net) in enumerate(zip(configs, nets, strict=True)):
            state = replace(saved, tensors=saved.group(str(number)), config=config)
            component = restore_posterior(state, component_net)
            if "base" in config:
                check_base(component.target, config["base"], saved.path)
            components.append(component)
        return cls(components, saved.config.get("weights"), saved.config["history"])

    def __repr__(self) -> str:
        if self.has_equal_weights:
            return f"Mixture of {len(self.components)}: {self.components[0]!r}, ..."
        terms = [
            f"{weight:.3g} {component!r}"
            for weight, component in zip(self.weights.tolist(), self.components, strict=True)
        ]
        return f"Mixture({' + '.join(terms)})"


def allocate_draws(weights: Tensor, n: int, seed: rng.Seed) -> Tensor:
    """Return which component each of n draws is from, in proportion to the weights.

    Among the first S draws the number of component c is within less than 1 of S·w_c, for every S.
    The first draw is of component c with probability w_c; then each takes the component whose
    quota runs out first, among those that are behind theirs (Tijdeman 1980, "The chairman
    assignment problem").

    Args:
        weights: w, (C,), with the sum 1.
        n: the number of draws.
        seed: of the first draw.

    Returns:
        Numbers of components, (n,).
    """
    shares = weights.tolist()
    counts = [0] * len(shares)
    members: list[int] = []
    position = float(rng.uniform(1, (), weights, seed)[0])
    for draw in range(1, n + 1):
        if draw == 1:
            inside = int((weights.cumsum(0) <= position).sum())
            member = min(inside, len(shares) - 1)
        else:
            behind = [c for c, share in enumerate(shares) if counts[c] < draw * share]
            member = min(behind, key=lambda c: (counts[c] + 1) / shares[c])
        counts[member] += 1
        members.append(member)
    return torch.tensor(members, dtype=torch.long)


def _predict_functions(
    component: Posterior, x: object, count: int, seed: rng.Seed, options: dict[str, Any]
) -> Sampled:
    """Return the likelihood of a component, and its outputs as ``count`` functions.

    A closed form stands for all of them, and the points of a list are repeated.
    """
    samples = component.draws_to_average(count)
    predictive = component.predict(x, samples, seed=seed, **options)
    if predictive.likelihood.needs_all_samples:
        raise ValueError(
            "a component has a map of quantiles, which is one of its own mixture and of no part of "
            "another; set component.calibration_map = None and calibrate the mixture instead"
        )
    order = torch.arange(count) % len(predictive.outputs)
    return predictive.likelihood, predictive.outputs[order.to(predictive.outputs.device)]


def _normalize_weights(weights: Sequence[float] | Tensor | None, count: int) -> Tensor:
    """Return weights with the sum 1 in float64, equal ones for None."""
    if weights is None:
        return torch.full((count,), 1 / count, dtype=torch.float64)
    values = torch.as_tensor(weights, dtype=torch.float64).detach().cpu()
    if values.shape != (count,):
        raise ValueError(
            f"{count} components need {count} weights, got {tuple(values.shape)} numbers"
        )
    total = float(values.sum())
    if not bool((values >= 0).all()) or not 0 < total < math.inf:
        raise ValueError(
            "the weights of a mixture must not be negative, and their sum must be positive and "
            f"finite, got {values.tolist()}"
        )
    return values if abs(total - 1) < 1e-12 else values / total


def _check_targets(components: Sequence[Posterior]) -> None:
    """Raise a ValueError unless all components predict a y of one kind."""
    supports = {
        type(component.target.likelihood).__name__: component.target.likelihood.support
        for component in components
    }
    if len(set(supports.values())) > 1:
        described = ", ".join(f"{name}: {support}" for name, support in supports.items())
        raise ValueError(
            f"the components of a mixture must predict the same y, got likelihoods of {described}; "
            "fit all of them to the same targets"
        )


def _share_network(a: Posterior, b: Posterior) -> bool:
    """Return whether two components are of the same network, so that a file needs it once."""
    if isinstance(a, Mixture) or isinstance(b, Mixture):
        mixtures = [posterior for posterior in (a, b) if isinstance(posterior, Mixture)]
        if any(mixture.networks_differ for mixture in mixtures):
            return False
    net_a = a.target.net
    net_b = b.target.net
    if type(net_a) is not type(net_b) or repr(net_a) != repr(net_b):
        return False
    return _shapes(dict(net_a.named_parameters())) == _shapes(dict(net_b.named_parameters()))


def _share_tensors(a: Posterior, b: Posterior) -> bool:
    """Return whether draws of two components can be stacked, and differ in noise at most."""
    has_same_shapes = _shapes(_weights(a)) == _shapes(_weights(b))
    likelihoods = (a.target.likelihood_spec, b.target.likelihood_spec)
    return has_same_shapes and _differ_only_in(NOISE_FIELDS, *likelihoods)


def _differ_only_in(names: Sequence[str], a: Likelihood, b: Likelihood) -> bool:
    """Return whether two likelihoods are equal but for some of their fields."""
    if a == b:
        return True
    if type(a) is not type(b) or not is_dataclass(a):
        return False
    compared = [field.name for field in fields(a) if field.name not in names]
    return all(getattr(a, name) == getattr(b, name) for name in compared)


def _weights(component: Posterior) -> Params:
    """Return the template of a component without the parameters of the likelihood."""
    template = component.template()
    return {name: value for name, value in template.items() if not name.startswith(NOISE)}


def _shapes(tensors: Params) -> dict[str, torch.Size]:
    """Return the shapes of tensors by name."""
    return {name: value.shape for name, value in tensors.items()}


def _nets_of_components(
    saved: SavedState, net: nn.Module | Sequence[nn.Module]
) -> Sequence[nn.Module]:
    """Return the network of each component of a file, or raise a FileError that asks for them."""
    count = len(saved.config["components"])
    if isinstance(net, nn.Module):
        if saved.config.get(NETWORKS_DIFFER, False):
            raise FileError(
                f"{saved.path} is a mixture over {count} networks that differ, got one; pass a "
                "list with the network of each component, in their order: load(path, [net, other])"
            )
        return [net] * count
    if len(net) != count:
        raise FileError(
            f"{saved.path} is a mixture of {count} components, got a list of {len(net)} networks; "
            "pass one for each component, in their order"
        )
    return net


def _without_member(params: Params) -> Params:
    """Return a draw without the tensor that says which component it is from."""
    return {name: value for name, value in params.items() if name != MEMBER}

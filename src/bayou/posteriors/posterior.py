"""The result of every method: a distribution over the named tensors of a network."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import StrPath, write_file
from bayou.core.params import Params, match, shared, size
from bayou.guides.bayesian import Bayesian
from bayou.likelihoods import BoundLikelihood
from bayou.network import DryRun, Map, Network, VmapOrLoop, by_rows, placed, rows_of
from bayou.network.units import Units
from bayou.posteriors.checks import Checks, of_history
from bayou.posteriors.state import with_state
from bayou.predictive import Predictive
from bayou.priors import BoundPrior, BoundUnitNormal, Prior
from bayou.target import Target
from bayou.training.data import whole
from bayou.training.ranks import current

NOISE = "likelihood."  # prefix of those tensors of a draw that belong to the likelihood, not to the network
DEFAULT_SAMPLES = 100  # functions averaged for a prediction
CHUNK_NUMBERS = 2**24  # weights in memory during predictions, unless the user gives a chunk
CHUNK_OUTPUTS = 2**22  # draws times rows, likewise

# Entries of the history that depend on the units of y: sums over all rows, and means over rows.
SUMMED_LOG_DENSITIES = ("elbo", "log_likelihood", "log_joint", "log_evidence")
MEAN_NEGATIVE_LOG_DENSITIES = ("validation", "nll", "mode_nll", "constant_nll")

Stage = dict[str, Any]  # of a selection


class Posterior(ABC):
    """One distribution over tensors: ``sample``; predictions and files are derived from it.

    The tensors of a draw are the parameters of the network by name and, if a method draws them,
    buffers (the statistics of batch norm) and parameters of the likelihood
    (``likelihood.log_scale``).

    ``history``: one record per logging step, {"step", "elbo", "log_likelihood", "kl", "seconds"}
    for a variational
    method: estimates from one batch in nats for all data, elbo = log_likelihood − kl. The last step
    of an epoch has the mean negative log predictive density of held-out data as "validation", if
    there are any. ``stopped``: how the method ended, "finished", "early" or "interrupted".
    ``choice``: the reason for this method, if it was selected.
    ``selection``: what was tried, one record per stage, {"stage", "seconds", "trials"}; trials are
    settings with their scores on held-out rows.
    ``temperature``: of predicted logits, or a factor of the scale of the noise
    (``bayou.calibrate``).

    What only some posteriors have: ``bayesian``, the guides of a variational one; ``stack``, the
    points of one that is a list of them, from ``chains`` chains with the diagnostics ``mixing``.
    ``centered``: ``like()`` is the center of a distribution of weights. ``mappable``: ``call`` does
    not branch on the values of a draw, so that ``vmap`` can map over draws.
    ``predicts_without_draws``: ``predict`` has a closed form unless ``samples`` are given.
    """

    kind: ClassVar[str]
    centered: ClassVar[bool] = False
    mappable: ClassVar[bool] = True
    predicts_without_draws: bool = False
    target: Target
    network: Network
    history: list[dict[str, float]]
    stopped: str
    choice: str = ""
    selection: Sequence[Stage] = ()
    temperature: float = 1.0
    bayesian: Bayesian | None = None
    stack: Params | None = None
    chains: int = 1
    mixing: dict[str, Any] | None = None
    held_out_index: Tensor | None = (
        None  # rows of the data of a fit that it held out, if there are any
    )
    _checks: Checks | None = None
    _pending_check: Callable[[Posterior], Checks] | None = None

    @abstractmethod
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws start .. start + n − 1 of all parameters, stacked: (n, *shape) each."""

    @property
    def checks(self) -> Checks:
        """The results of checks: end of the fit, convergence, and a comparison with baselines on
        some rows.

        ``bayou.fit`` leaves some rows for this comparison, which is made when the checks are first
        read; ``bayou.diagnostics.check`` makes it with other rows.
        """
        if self._pending_check is not None:
            pending = self._pending_check
            self._pending_check = None
            self._checks = pending(self)
        return of_history(self) if self._checks is None else self._checks

    @checks.setter
    def checks(self, results: Checks) -> None:
        self._pending_check = None
        self._checks = results

    def check_when_read(self, check: Callable[[Posterior], Checks]) -> None:
        """Make a check when ``checks`` is read for the first time.

        Args:
            check: a function of the posterior.
        """
        self._pending_check = check

    def take_units(self, units: Units) -> None:
        """Convert the posterior, which was fitted to standardized rows, to the units of the user.

        The units of its networks must be active. Log-densities of y in the history change by Σ log
        scale for each row.

        Args:
            units: the units of x and y.
        """
        if units.output is None:
            return
        total = self.target.n * units.log_scale
        changes = dict.fromkeys(SUMMED_LOG_DENSITIES, -total) | dict.fromkeys(
            MEAN_NEGATIVE_LOG_DENSITIES, units.log_scale
        )

        def convert(record: dict[str, Any]) -> dict[str, Any]:
            return {
                key: value + changes[key] if key in changes else value
                for key, value in record.items()
            }

        self.target = self.target.in_units(units.output.scale)
        self.history = [convert(record) for record in self.history]
        if self.mixing is not None:
            self.mixing = convert(self.mixing)

    @property
    def net(self) -> nn.Module:
        """The network of the parameters."""
        return self.network.net

    def like(self) -> Params:
        """Tensors with the shapes, dtype and device of one draw."""
        return {name: stack[0] for name, stack in self.sample(1, seed=0).items()}

    def call(self, params: Params, *inputs: Any) -> Tensor:
        """The network's outputs with these parameters, in eval mode; any number of threads may call
        it.
        """
        return self.network.evaluate(params, *inputs)

    @abstractmethod
    def mean(self) -> Params:
        """E[w] of every tensor, (*shape) each; a ValueError where it has no closed form."""

    @abstractmethod
    def std(self) -> Params:
        """The standard deviation of every number, (*shape) each; a ValueError where it has no
        closed form.
        """

    def by_chain(self, samples: int | None = None, seed: rng.Seed = 0) -> Params:
        """Draws by chain, (chains, draws, *shape) each: all points of a list; else ``samples``
        (1,000) as one chain.
        """
        stack = self.sample(min(1000, self.draws or 1000) if samples is None else samples, seed)
        return {name: value.unsqueeze(0) for name, value in stack.items()}

    def component(self, params: Params) -> Posterior:
        """The posterior that a draw is from: a component of a mixture, or this one."""
        return self

    def joined(self, other: Posterior, names: Collection[str]) -> Posterior | None:
        """This posterior with the tensors ``names`` of another, independent of the rest; None
        without a closed form.
        """
        return None

    def traceable(self, draw: Params, inputs: tuple[Any, ...]) -> tuple[Posterior, Params]:
        """A posterior and a draw with the same function, whose ``call`` is one graph; a ValueError
        if there is none.
        """
        return self, draw

    def as_prior(self) -> dict[str, Prior]:
        """This posterior as the prior of the next task; a ValueError if its tensors have no
        separate densities.
        """
        raise ValueError(
            f"{type(self).__name__} has no separate density for each tensor, as a prior needs; use VI(MeanField())"
        )

    def bound_priors(self) -> dict[str, BoundPrior]:
        """The prior of every tensor, with its learned values."""
        return self.target.priors

    def relevance(self, where: str | None = None) -> dict[str, Tensor]:
        """The relevance of inputs: the prior scale s·a_i of each unit of the first layer, the
        largest 1: (inputs,).

        It needs a prior per unit, ``Normal("fan_in", learn="units")`` or ``"in"``, and inputs of
        one scale: a column with small values has large weights. ``where``: a pattern of tensors,
        for other layers.
        """
        priors = self.bound_priors()
        weights = [name for name, prior in priors.items() if len(prior.shape) > 1]
        picked = (
            dict.fromkeys(weights[:1], True)
            if where is None
            else match(weights, {where: True}, default=False)
        )
        found: dict[str, Tensor] = {}
        for name in (name for name, wanted in picked.items() if wanted):
            prior = priors[name]
            log = prior.log_factor("in") if isinstance(prior, BoundUnitNormal) else None
            if log is None:
                raise ValueError(
                    f"the prior of {name!r} has no factor for each of its inputs, so their relevance is "
                    'unknown; fit with prior=Normal("fan_in", learn="units") or learn="in" by VI or Laplace, and '
                    "several inputs"
                )
            found[name] = (log - log.max()).exp().detach()
        return found

    @property
    def draws(self) -> int | None:
        """The number of different draws: 1 for a point, the members of an ensemble; None for a
        continuum.
        """
        return None

    @property
    def members(self) -> int:
        """The number of points or components, whose mean is none of them; 1 for any other
        posterior.
        """
        return self.draws or 1

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and JSON from which ``restore`` makes the posterior again."""

    @classmethod
    @abstractmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any
    ) -> Posterior:
        """The posterior with this ``state``, for the network it was fitted to; a FileError if they
        do not match.
        """

    @torch.no_grad()
    def to_module(self, params: Params | None = None, *, seed: rng.Seed = None) -> nn.Module:
        """A network of the user's class in eval mode with tensors of this posterior: one function
        out of many.

        It shares the frozen tensors. Other random quantities (masks, noise of the likelihood) and a
        temperature are not part of it; the draw of a linearized Laplace is the network with these
        weights, as with ``using("sampled")``.

        Args:
            params: a draw, ``{name: value[0] for name, value in posterior.sample(1).items()}``.
            seed: of a draw to make. Without either, a single representative set of weights: the
                point of MLE and MAP; the mode of Laplace and the average of SWAG; the mean of VI
                and IVON; the weights of MC dropout, which is then off. Several points, a mixture
                and families whose mean has no closed form (MNF) have none and raise a ValueError;
                give a seed instead.
        """
        if seed is not None:
            params = {name: value[0] for name, value in self.sample(1, seed).items()}
        if params is None and self.members > 1:
            raise ValueError(
                f"{self!r} has no one network: the mean of its weights is none of them; draw one: to_module(seed=0)"
            )
        if params is None:
            try:
                params = self.mean()
            except ValueError as error:
                raise ValueError(f"{error}; for a network draw one: to_module(seed=0)") from None
        network = self.component(params).network
        state = network.buffers()
        state |= {
            name: value for name, value in params.items() if name in state or name in network.names
        }
        return with_state(self.target.net, state).eval()

    def save(self, path: StrPath) -> None:
        """Write the posterior to a file that ``bayou.load`` reads; atomic, checksummed, no code
        inside.
        """
        tensors, config = self.state()
        config |= {"base": self.target.base(), "checks": self.checks.to_json()}
        write_file(path, {n: whole(value) for n, value in tensors.items()}, config)

    @torch.no_grad()
    def predict(
        self,
        x: Any,
        samples: int | None = None,
        *,
        seed: rng.Seed = 0,
        chunk: int | None = None,
        batch_size: int | None = None,
    ) -> Predictive:
        """Predict with ``samples`` functions, each of them one draw of the weights for all inputs.

        The same call gives the same numbers each time: any number of threads may make it.
        Shapes: outputs (samples, B, ...).

        Args:
            x: a tensor (B, ...), a tuple or a mapping of them, or a DataLoader that does not
                shuffle: the rows of all its batches, whose labels are left out.
            samples: the number of functions; by default 100, or all ``draws`` if there are fewer.
            seed: of the draws. Another seed gives other draws, and ``None`` takes them from torch's
                global stream.
            chunk: functions computed at a time; by default as many as fit into a moderate amount of
                memory, half as many wherever that runs out. With a seed it changes no number beyond
                rounding.
            batch_size: rows computed at a time; by default as for ``chunk``.
        """
        for name, value in (("samples", samples), ("chunk", chunk), ("batch_size", batch_size)):
            if value is not None:
                check_count(value, name, 1)
        if samples is None:
            samples = min(DEFAULT_SAMPLES, self.draws or DEFAULT_SAMPLES)
        inputs = self.place(x)
        seed = current().first(rng.integer(seed), inputs[0].device)
        if chunk is None:
            chunk = self._chunk(samples, inputs)
        noise: dict[str, list[Tensor]] = {}
        outputs = torch.empty(0)
        with self.isolated(inputs, rng.fold(seed, "forward")):
            for start in range(0, samples, chunk):
                stack = self.sample(min(chunk, samples - start), seed, start)
                for name in [name for name in stack if name.startswith(NOISE)]:
                    noise.setdefault(name.removeprefix(NOISE), []).append(stack.pop(name))
                part = self.outputs(stack, inputs, batch_size)
                if start == 0:
                    outputs = (
                        part if len(part) == samples else part.new_empty(samples, *part.shape[1:])
                    )
                if outputs is not part:
                    outputs[start : start + len(part)] = part
        # A copy, so that what was predicted stays when the noise is learned further, and carries no
        # graph.
        likelihood = copy.deepcopy(self.target.likelihood).requires_grad_(False)
        if noise:
            drawn = {name: torch.cat(values) for name, values in noise.items()}
            likelihood, outputs = likelihood.per_sample(outputs, drawn)
        return self.tempered(likelihood, outputs)

    def tempered(self, likelihood: BoundLikelihood, outputs: Tensor) -> Predictive:
        """The predictive at the posterior's temperature."""
        if self.temperature != 1.0:
            likelihood, outputs = likelihood.temper(outputs, self.temperature)
        return Predictive(likelihood, outputs)

    def place(self, x: Any) -> tuple[Any, ...]:
        """The inputs on the device of the parameters; invalid ones raise an error here, not deep
        inside the network.
        """
        (name, first), own = next(self.target.net.named_parameters()), self.like()
        device = next(
            iter(own.values()), first
        ).device  # the first one may be frozen, and elsewhere
        return placed(x, own.get(name, first).new_empty(0, device=device))

    def dry_run(self, inputs: tuple[Any, ...]) -> DryRun:
        """The result of a dry run of the network on inputs of these shapes."""
        return self.network.dry_run(self.like, inputs)

    def isolated(self, inputs: tuple[Any, ...], seed: rng.Seed) -> AbstractContextManager[None]:
        """A network that draws random numbers in eval mode (dropout that is always on) draws them
        from the seed.
        """
        random = self.dry_run(inputs).random
        return rng.isolated(rng.integer(seed), inputs[0].device) if random else nullcontext()

    def outputs(self, stack: Params, inputs: tuple[Any, ...], rows: int | None = None) -> Tensor:
        """Outputs of the functions of a stack, (S, B, *out), ``rows`` at a time; processes may
        share the rows.
        """
        part, cuda = self._drawn_part(stack, inputs), inputs[0].is_cuda
        shares = part < 1
        function = self._functions(
            inputs, loop=not (shares or (cuda and self.mappable))
        )  # a CPU loops as fast
        together = max(1, round(size(stack) * part)) if shares or cuda else 1
        seen, ranks, count = self.dry_run(inputs), current(), len(inputs[0])
        if ranks.size == 1 or count < ranks.size or seen.random or not seen.rows_apart:
            return by_rows(function, stack, inputs, seen, rows, together)
        own = rows_of(inputs, torch.tensor(ranks.spread(count), device=inputs[0].device))
        return ranks.joined(by_rows(function, stack, own, seen, rows, together), count)

    def _functions(self, inputs: tuple[Any, ...], *, loop: bool) -> Map:
        """The map over draws, or a loop."""
        return VmapOrLoop(self.call, (0, *[None] * len(inputs)), loop=loop)

    def _drawn_part(self, stack: Params, inputs: tuple[Any, ...]) -> float:
        """The fraction of the network that differs between the draws of a stack; a map computes the
        rest once.
        """
        if not self.mappable or size(stack) < 2:
            return 1.0
        own = {name: value for name, value in stack.items() if not name.startswith(NOISE)}
        drawn = [name for name, value in own.items() if not shared(value)]
        return self.network.drawn_part(
            drawn, {name: value[0] for name, value in own.items()}, inputs
        )

    def _chunk(self, samples: int, inputs: tuple[Any, ...]) -> int:
        """The number of draws at a time; where most is computed once, as many as are as large as
        the network.
        """
        weights = sum(value.numel() for value in self.like().values())
        chunk = min(
            samples, CHUNK_NUMBERS // max(weights, 1), CHUNK_OUTPUTS // max(len(inputs[0]), 1)
        )
        if chunk < samples and self._drawn_part(two := self.sample(2, seed=0), inputs) < 1:
            drawn = sum(value[0].numel() for value in two.values() if not shared(value))
            chunk = min(
                samples,
                max(CHUNK_NUMBERS, sum(p.numel() for p in self.target.net.parameters())) // drawn,
            )
        return max(1, chunk)


def check_count(value: Any, name: str = "n", least: int = 0) -> None:
    """A ValueError unless this is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")

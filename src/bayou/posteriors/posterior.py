"""The result of every method: a distribution over the named tensors of a network."""

from __future__ import annotations

import copy
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from bayou.calibration import CalibrationMap
from bayou.core import rng
from bayou.core.files import StrPath, write_file
from bayou.core.params import Params, match, shared, size
from bayou.likelihoods import BoundLikelihood
from bayou.likelihoods.predictive import Predictive
from bayou.metrics.certificate import Certificate
from bayou.network import (
    DryRun,
    Map,
    Network,
    VmapOrLoop,
    by_rows,
    place_inputs,
    rows_of,
)
from bayou.network.target import Target
from bayou.network.units import Units
from bayou.posteriors.checks import Checks, check_history
from bayou.posteriors.state import SavedState, is_in_file, with_state
from bayou.posteriors.updates import Updates
from bayou.priors import BoundPrior, BoundUnitNormal, Prior
from bayou.training.data import as_data
from bayou.training.inputs import gather_shards
from bayou.training.ranks import current

if TYPE_CHECKING:
    from bayou.posteriors.guided import Bayesian

NOISE = "likelihood."  # prefix of those tensors of a draw that are parameters of the likelihood
DEFAULT_SAMPLES = 100  # functions averaged for a prediction
CHUNK_NUMBERS = 2**24  # weights in memory during predictions, unless the user passes a chunk
CHUNK_OUTPUTS = 2**22  # draws times rows, likewise
MAX_DENSITY_DRAWS = 1000  # over which the joint density of rows is averaged

# Entries of the history that depend on the units of y: sums over all rows, and means over rows.
SUMMED_LOG_DENSITIES = ("elbo", "log_likelihood", "log_joint", "log_evidence")
MEAN_NEGATIVE_LOG_DENSITIES = ("validation", "nll", "mode_nll", "constant_nll")

Stage = dict[str, Any]  # of a selection


class Posterior(ABC):
    """A distribution q(w) over the tensors of a network: what ``bayou.fit`` returns.

    It is defined by its draws: ``sample`` returns tensors by name, the parameters of the network
    and, if a method draws them, buffers (the statistics of batch norm) and parameters of the
    likelihood (``likelihood.log_scale``). ``predict`` averages p(y | x, w) over draws, ``save``
    writes a file that ``bayou.load`` reads, ``checks`` says whether to believe it, and
    ``to_module`` returns one network out of many.

    Example::

        posterior = bayou.fit(net, (x, y), method="mnf", seed=0)
        print(posterior.checks)
        predictive = posterior.predict(x_new)
        predictive.mean, predictive.std
        posterior.save("posterior.bayou")

    Attributes of every posterior:

    - ``target``: the network, the likelihood and the prior that were fitted.
    - ``network``: the network as a function of its tensors.
    - ``history``: one record per logging step: {"step", "elbo", "log_likelihood", "kl", "seconds"}
      for a variational method, estimates from one batch in nats for all data,
      elbo = log_likelihood − kl. The last step of an epoch has the mean negative log predictive
      density of held-out rows as "validation", if there are any.
    - ``stopped``: how the method ended: "finished", "early" or "interrupted".
    - ``choice``: the reason for this method, if it was selected.
    - ``plan``: the settings that were selected on held-out rows, in words.
    - ``selection``: what was compared, one record per stage, {"stage", "seconds", "trials"}; trials
      are settings with their scores on held-out rows.
    - ``temperature``: of predicted logits, or a factor of the scale of the noise
      (``bayou.calibrate``); 1 by default.
    - ``calibration_map``: a map of predictions that follows the temperature
      (``bayou.calibrate(posterior, rows, map=...)``); None by default.
    - ``certificate``: how far a student is from its teacher (``bayou.operations.certify``); None of
      any other.
    - ``updates``: how many rows ``update`` and ``downdate`` added and removed since the fit, and
      the weight that the rows of the fit still have; ``target.n`` is the number of rows now.
    - ``held_out_index``: the rows of the data of a fit that it held out; None if there are none.

    Attributes that only some have:

    - ``bayesian``: the guides of a variational posterior; None for any other.
    - ``stack``: the points of a posterior that is a list of them; None for any other.
    - ``chains``: the number of chains that these points come from; 1 by default.
    - ``mixing``: diagnostics of these chains; None for any other posterior.

    Properties of a class of posteriors:

    - ``kind``: its name in files.
    - ``centered``: whether ``template()`` is the center of a distribution of weights.
    - ``mappable``: whether ``call`` never branches on the values of a draw, so that ``vmap`` can
      map over draws.
    - ``predicts_without_draws``: whether ``predict`` has a closed form unless ``samples`` are
      given.
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
    plan: str = ""
    selection: Sequence[Stage] = ()
    temperature: float = 1.0
    calibration_map: CalibrationMap | None = None
    bayesian: Bayesian | None = None
    stack: Params | None = None
    chains: int = 1
    mixing: dict[str, Any] | None = None
    held_out_index: Tensor | None = None
    certificate: Certificate | None = None
    updates: Updates = Updates()
    no_update: ClassVar[str] = "its distribution has no closed form that further rows could change"
    _checks: Checks | None = None
    _pending_check: Callable[[Posterior], Checks] | None = None

    # What a user calls.

    @torch.no_grad()
    def predict(
        self,
        x: object,
        samples: int | None = None,
        *,
        seed: rng.Seed = 0,
        chunk: int | None = None,
        batch_size: int | None = None,
    ) -> Predictive:
        """Predict y at new inputs: p(y | x) = 1/S Σ_s p(y | f(x; w_s)), w_s ~ q.

        Each draw of the weights is one function, evaluated at all inputs, so that predictions at
        different inputs are correlated as they should be. The same call gives the same numbers each
        time, and any number of threads may make it.

        Args:
            x: a tensor (B, ...), a tuple or a mapping of them, or a DataLoader that does not
                shuffle: the rows of all its batches, whose labels are left out.
            samples: S, the number of functions; by default 100, or all ``draws`` if there are
                fewer.
            seed: of the draws; 0 by default. Another seed gives other draws, and ``None`` takes
                them from torch's global stream.
            chunk: functions computed at a time; by default as many as fit into a moderate amount of
                memory, half as many wherever that runs out. With a seed it changes no number beyond
                rounding.
            batch_size: rows computed at a time; by default as for ``chunk``.

        Returns:
            The predictive distribution of y, with ``mean``, ``std``, ``epistemic_std``,
            ``interval``, ``log_prob``, ``entropy`` and the functions themselves as ``outputs``,
            (S, B, *out).

        Raises:
            ValueError: for inputs that do not suit the network, or counts that are not positive.

        Example::

            predictive = posterior.predict(x_new)
            predictive.mean, predictive.std        # (B, ...), class probabilities for classes
            predictive.log_prob(y_new).mean()      # the score of new rows, in nats

            functions = posterior.predict(x_new, 1000, seed=1).outputs    # (1000, B, ...)
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
        outputs, noise = self._sampled_outputs(inputs, samples, seed, chunk, batch_size)
        # A copy, so that predictions do not change when the noise is learned further, and have no
        # graph.
        likelihood = copy.deepcopy(self.target.likelihood).requires_grad_(False)
        if noise:
            likelihood, outputs = likelihood.per_sample(outputs, noise)
        return self.apply_temperature(likelihood, outputs)

    @abstractmethod
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draw all tensors from the posterior.

        With an int seed, draw i is a function of (seed, i) alone: ``sample(3, 0)`` and
        ``sample(2, 0, start=1)`` share two draws.

        Args:
            n: the number of draws.
            seed: of the draws; None (the default) takes them from torch's global stream.
            start: the number of the first draw.

        Returns:
            Tensors by name, stacked: (n, *shape) each.

        Example::

            draws = posterior.sample(100, seed=0)
            draws["0.weight"].mean(0)              # (outputs, inputs)
        """

    def update(self, data: object, *, forget: float | None = None) -> Posterior:
        """Return the posterior given old and new rows, without the old rows and without a fit.

            q(w) ← q(w)^λ·p(w)^(1−λ)·p(y_new | x_new, w)/Z

        It takes milliseconds for a random last layer, and longer for a full covariance of many
        weights. The posterior itself is not changed; the new one is of the same class, and can be
        saved, loaded, used for predictions and updated again. It is exact for a
        random last layer with Gaussian noise and for networks of infinite width, and an
        approximation for others (docs/guide/updating.md).

        Args:
            data: the new rows alone, as ``bayou.fit`` takes them: (x, y), a Dataset, a DataLoader,
                in the units of the data of the fit.
            forget: λ in (0, 1], the weight that is left to the log-likelihood of all earlier rows,
                for data that drift. S becomes at most S/λ and never more than that of the prior, to
                which the posterior tends without new rows. None (default) for 1.

        Returns:
            The posterior of all rows, with ``target.n`` of them; ``updates`` counts them. Its
            checks, its certificate and the history of its fit are not made again.

        Raises:
            ValueError: for a kind of posterior that cannot be updated, with what to use instead,
                and for rows that do not suit it.

        Example::

            posterior = bayou.fit(net, (x, y), bayou.Laplace("full", where="last"))
            posterior = posterior.update((x_today, y_today))
            posterior = posterior.update((x_tomorrow, y_tomorrow), forget=0.99)
        """
        raise ValueError(self._refusal("updated"))

    def downdate(self, data: object) -> Posterior:
        """Return the posterior without some of its rows, exactly as if they had not been in it.

        It exists where ``update`` is exact.

        Args:
            data: rows that were in the fit or in an update, with the same x and y.

        Returns:
            The posterior of the remaining rows. Tensors that are points, such as the features below
            a random last layer, stay as they are.

        Raises:
            ValueError: for a kind of posterior without an exact removal, and for rows that cannot
                have been in this one.

        Example::

            posterior.downdate((x[:10], y[:10]))     # a fit of the last layer without ten rows
        """
        raise ValueError(self._refusal("reduced by rows"))

    def log_predictive_density(self, data: object) -> float:
        """Compute log p(y_new | x_new, D) of further rows together, in nats.

        By default log 1/S Σ_s Π_n p(y_n | x_n, w_s) over 1,000 draws, or all if there are fewer. A
        calibration map of quantile levels knows the density of each row alone, and rows are then
        taken as independent.

        Args:
            data: the rows, as ``bayou.fit`` takes them.
        """
        total = torch.zeros((), dtype=torch.float64)
        for x, y in as_data(data).epoch():
            draws = self.draws_to_average(MAX_DENSITY_DRAWS)
            predictive = self.predict(x, draws)
            y = y.to(predictive.outputs.device)
            log_prob = predictive.likelihood.log_prob(predictive.outputs, y)
            total = total + log_prob.double().sum(-1).cpu()
        return float(total.logsumexp(0) - math.log(max(1, total.numel())))

    def note_update(self, updates: Updates, n: int) -> None:
        """Note what an update did, in a copy of the posterior that it was made of.

        Args:
            updates: the record with this update.
            n: the number of rows now.
        """
        self.target = replace(self.target, n=n)
        self.updates = updates
        self.history = list(self.history)
        self.certificate = None
        self._checks = None
        self._pending_check = None

    def _refusal(self, change: str) -> str:
        """Return the sentence that says why a posterior cannot be changed by rows."""
        return (
            f"{type(self).__name__} cannot be {change}: {self.no_update}; use Laplace('full', "
            "where='last') or VBLL, whose last layer is updated exactly, or fit again with the "
            "rows that are to count"
        )

    @abstractmethod
    def mean(self) -> Params:
        """Compute E[w] of every tensor.

        For the posterior of one network this is the mode of Laplace and the center of a variational
        family. With several modes it is rarely a good network.

        Returns:
            Tensors by name, (*shape) each.

        Raises:
            ValueError: where it has no closed form.
        """

    @abstractmethod
    def std(self) -> Params:
        """Compute the standard deviation of every weight.

        Returns:
            Tensors by name, (*shape) each; 0 for tensors that are points.

        Raises:
            ValueError: where it has no closed form.
        """

    def save(self, path: StrPath) -> None:
        """Write the posterior to a file that ``bayou.load`` reads.

        The file is replaced as a whole or not at all, it has a checksum, and it holds tensors and
        settings, but no code. Frozen parameters are not in it.

        Args:
            path: of the file, such as "posterior.bayou".

        Example::

            posterior.save("posterior.bayou")
            posterior = bayou.load("posterior.bayou", net)
        """
        tensors, config = self.contents()
        write_file(path, tensors, config)

    def contents(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the tensors and the JSON values of a file, from which ``restore_contents`` loads.

        Returns:
            Tensors by name, and a dictionary of plain values.
        """
        tensors, config = self.state()
        config["base"] = self.target.base()
        config["checks"] = self.checks.to_json()
        if self.certificate is not None:
            config["certificate"] = self.certificate.to_json()
        return {name: gather_shards(value) for name, value in tensors.items()}, config

    @property
    def checks(self) -> Checks:
        """The checks of this posterior, worst first; ``print(posterior.checks)`` shows them.

        They cover the end of the fit, its convergence, the mixing of chains, and a comparison with
        baselines on some rows. ``bayou.fit`` leaves some rows for this comparison, which is made
        when the checks are first read; ``bayou.diagnostics.check`` makes it with other rows.
        """
        if self._pending_check is not None:
            check = self._pending_check
            self._pending_check = None
            self._checks = check(self)
        if self._checks is None:
            return check_history(self)
        return self._checks

    @checks.setter
    def checks(self, results: Checks) -> None:
        self._pending_check = None
        self._checks = results

    @torch.no_grad()
    def to_module(self, params: Params | None = None, *, seed: rng.Seed = None) -> nn.Module:
        """Return a network of the user's class with tensors of this posterior.

        It is one function out of many, in eval mode, and it shares the frozen tensors. Other random
        quantities (masks, noise of the likelihood) and calibration are not part of it; the draw
        of a linearized Laplace is the network with these weights, as with ``using("sampled")``.

        Args:
            params: a draw, ``{name: value[0] for name, value in posterior.sample(1).items()}``.
            seed: of a draw to make. Without either, a single representative set of weights: the
                point of MLE and MAP; the mode of Laplace and the average of SWAG; the mean of VI
                and IVON; the weights of MC dropout, which is then off.

        Raises:
            ValueError: if there is no representative set of weights: for several points, a mixture
                and families whose mean has no closed form (MNF). Give a seed instead.

        Example::

            net = posterior.to_module()            # the mean or the mode
            net = posterior.to_module(seed=0)      # a draw
        """
        if seed is not None:
            params = {name: value[0] for name, value in self.sample(1, seed).items()}
        if params is None and self.members > 1:
            raise ValueError(
                f"{self!r} has no one network: the mean of its weights is none of them; "
                "draw one: to_module(seed=0)"
            )
        if params is None:
            try:
                params = self.mean()
            except ValueError as error:
                raise ValueError(f"{error}; for a network draw one: to_module(seed=0)") from None
        network = self.component(params).network
        state = network.buffers()
        for name, value in params.items():
            if name in state or name in network.names:
                state[name] = value
        return with_state(self.target.net, state).eval()

    def as_prior(self) -> dict[str, Prior]:
        """Return this posterior as the prior of the next task.

        Returns:
            Priors by tensor name, for ``bayou.fit(..., prior=posterior.as_prior())``.

        Raises:
            ValueError: if it has no density of its tensors.
        """
        raise ValueError(
            f"{type(self).__name__} has no separate density for each tensor, as a prior needs; "
            "use VI(MeanField())"
        )

    def bound_priors(self) -> dict[str, BoundPrior]:
        """Return the prior of every tensor, with its learned values, by name."""
        return self.target.priors

    def relevance(self, where: str | None = None) -> dict[str, Tensor]:
        """Compute the relevance of inputs: the prior scale s·a_i of each input of a layer.

        The largest is 1. It needs a prior per unit, ``Normal("fan_in", learn="units")`` or
        ``"in"``, and inputs of one scale: a column with small values has large weights (automatic
        relevance determination, MacKay 1994, Neal 1996).

        Args:
            where: a pattern of tensor names, for other layers than the first.

        Returns:
            The relevance of each input of a tensor, (inputs,), by the name of the tensor.

        Raises:
            ValueError: if the prior has no factor for each input.
        """
        priors = self.bound_priors()
        weights = [name for name, prior in priors.items() if len(prior.shape) > 1]
        names = weights[:1]
        if where is not None:
            is_selected = match(weights, {where: True}, default=False)
            names = [name for name in weights if is_selected[name]]
        relevance: dict[str, Tensor] = {}
        for name in names:
            prior = priors[name]
            log_factor = prior.log_factor("in") if isinstance(prior, BoundUnitNormal) else None
            if log_factor is None:
                raise ValueError(
                    f"the prior of {name!r} has no factor for each of its inputs, so their "
                    'relevance is unknown; fit with prior=Normal("fan_in", learn="units") or '
                    'learn="in" by VI or Laplace, and several inputs'
                )
            relevance[name] = (log_factor - log_factor.max()).exp().detach()
        return relevance

    def by_chain(self, samples: int | None = None, seed: rng.Seed = 0) -> Params:
        """Return draws by chain, for ``bayou.metrics.rhat`` and the like.

        Args:
            samples: the number of draws; by default all points of a list, and else 1,000, or all
                ``draws`` if there are fewer, as one chain.
            seed: of the draws; 0 by default.

        Returns:
            Tensors by name, (chains, draws, *shape) each.
        """
        if samples is None:
            samples = min(1000, self.draws or 1000)
        return {name: value.unsqueeze(0) for name, value in self.sample(samples, seed).items()}

    @property
    def net(self) -> nn.Module:
        """The network of the parameters."""
        return self.network.net

    @property
    def draws(self) -> int | None:
        """The number of different draws; None for a continuum.

        It is 1 for a point, and the number of members of an ensemble of points.
        """
        return None

    @property
    def builds_network(self) -> bool:
        """Whether ``restore`` makes the network from the file, so that any is right."""
        return is_in_file(self.target.net)

    def draws_to_average(self, most: int) -> int | None:
        """Return how many functions a prediction needs, for ``predict(x, samples)``.

        Args:
            most: the largest number.

        Returns:
            None for a closed form, which functions would only approximate; all ``draws`` where
            there are fewer than ``most``; otherwise ``most``.
        """
        if self.predicts_without_draws:
            return None
        return min(most, self.draws or most)

    @property
    def members(self) -> int:
        """The number of points or components, whose mean is none of them; 1 for any other."""
        return self.draws or 1

    # What a kind of posterior implements, and what the operations on posteriors ask for.

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return tensors and JSON from which ``restore`` makes the posterior again."""

    @classmethod
    @abstractmethod
    def restore(cls, saved: SavedState, net: Any) -> Posterior:
        """Return the posterior with a ``state``.

        Args:
            saved: the state, read from a file.
            net: the network it was fitted to.

        Raises:
            FileError: if state and network do not match.
        """

    def template(self) -> Params:
        """Return tensors with the shapes, dtype and device of one draw."""
        return {name: stack[0] for name, stack in self.sample(1, seed=0).items()}

    def call(self, params: Params, *inputs: object) -> Tensor:
        """Compute the network's outputs with some parameters, in eval mode.

        Any number of threads may call it.

        Args:
            params: tensors of one draw, by name.
            inputs: the arguments of the network, on its device.
        """
        return self.network.evaluate(params, *inputs)

    def component(self, params: Params) -> Posterior:
        """Return the posterior that a draw is from: a component of a mixture, or this one.

        Args:
            params: tensors of one draw, by name.
        """
        return self

    def function_covariance(self, draws: Params, x: Tensor, observed_x: Tensor) -> Tensor:
        """Compute the covariances of the outputs of the network, f(x), between rows.

        The functions must have a joint Gaussian distribution. It is differentiable in both rows.

        Args:
            draws: tensors of S draws, (S, *shape) each; some posteriors have a covariance for each.
            x: rows, (*batch, N, d).
            observed_x: rows, (*batch, M, d); the batch axes broadcast.

        Returns:
            Covariances of K outputs, (S or 1, *batch, N·K, M·K).

        Raises:
            ValueError: if the functions have no such distribution.
        """
        raise ValueError(
            f"the functions of a {type(self).__name__} have no joint Gaussian distribution; "
            "use Laplace or VBLL with where='last', or the method Wide, and Gaussian noise"
        )

    def with_tensors_of(self, source: Posterior, names: Collection[str]) -> Posterior | None:
        """Return this posterior with some tensors of another, independent of the rest.

        Args:
            source: the posterior of the same network that has these tensors.
            names: of the tensors.

        Returns:
            None if it has no closed form.
        """
        return None

    def traceable(self, draw: Params, inputs: tuple[Any, ...]) -> tuple[Posterior, Params]:
        """Return a posterior and a draw with the same function, whose ``call`` is one graph.

        Args:
            draw: tensors by name.
            inputs: the arguments of the network, as an example.

        Raises:
            ValueError: if there is none.
        """
        return self, draw

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
        changes = dict.fromkeys(SUMMED_LOG_DENSITIES, -total)
        changes |= dict.fromkeys(MEAN_NEGATIVE_LOG_DENSITIES, units.log_scale)

        def convert(record: dict[str, Any]) -> dict[str, Any]:
            return {
                key: value + changes[key] if key in changes else value
                for key, value in record.items()
            }

        self.target = self.target.in_units(units.output.scale, is_log=units.is_log)
        self.history = [convert(record) for record in self.history]
        if self.mixing is not None:
            self.mixing = convert(self.mixing)

    def apply_temperature(self, likelihood: BoundLikelihood, outputs: Tensor) -> Predictive:
        """Return the predictive of some outputs, at the posterior's temperature and by its map.

        Args:
            likelihood: p(y | f).
            outputs: of S functions, (S, B, *out).
        """
        if self.temperature != 1.0:
            likelihood, outputs = likelihood.temper(outputs, self.temperature)
        if self.calibration_map is not None:
            likelihood, outputs = self.calibration_map.apply(likelihood, outputs)
        return Predictive(likelihood, outputs)

    def place(self, x: object) -> tuple[Any, ...]:
        """Return inputs on the device of the parameters, as arguments of the network.

        Args:
            x: the inputs of ``predict``.

        Raises:
            ValueError: for invalid inputs.
        """
        name, parameter = next(self.target.net.named_parameters())
        tensors = self.template()
        # The first parameter may be frozen, and on another device than the posterior.
        device = next(iter(tensors.values()), parameter).device
        return place_inputs(x, tensors.get(name, parameter).new_empty(0, device=device))

    def dry_run(self, inputs: tuple[Any, ...]) -> DryRun:
        """Return the result of a dry run of the network on inputs of these shapes.

        Args:
            inputs: the arguments of the network.
        """
        return self.network.dry_run(self.template, inputs)

    def seed_network(self, inputs: tuple[Any, ...], seed: rng.Seed) -> AbstractContextManager[None]:
        """Seed a network that draws random numbers in eval mode (dropout that is always on).

        Args:
            inputs: the arguments of the network.
            seed: of the random numbers inside the context.
        """
        if not self.dry_run(inputs).random:
            return nullcontext()
        return rng.isolated(rng.integer(seed), inputs[0].device)

    def outputs(self, stack: Params, inputs: tuple[Any, ...], rows: int | None = None) -> Tensor:
        """Compute the outputs of the functions of a stack; processes may share the rows.

        Args:
            stack: S draws, (S, *shape) each.
            inputs: the arguments of the network.
            rows: computed at a time; None for as many as fit.

        Returns:
            (S, B, *out).
        """
        drawn_share = self._drawn_share(stack, inputs)
        shares_work = drawn_share < 1
        is_on_gpu = inputs[0].is_cuda
        is_mapped = shares_work or (is_on_gpu and self.mappable)  # a CPU loops as fast
        function = self._map_over_draws(inputs, loop=not is_mapped)
        draws_at_once = 1
        if shares_work or is_on_gpu:
            draws_at_once = max(1, round(size(stack) * drawn_share))
        dry_run = self.dry_run(inputs)
        ranks = current()
        count = len(inputs[0])
        is_alone = ranks.size == 1 or count < ranks.size
        if is_alone or dry_run.random or not dry_run.rows_apart:
            return by_rows(function, stack, inputs, dry_run, rows, draws_at_once)
        index = torch.tensor(ranks.spread(count), device=inputs[0].device)
        outputs = by_rows(function, stack, rows_of(inputs, index), dry_run, rows, draws_at_once)
        return ranks.gather_rows(outputs, count)

    def _sampled_outputs(
        self,
        inputs: tuple[Any, ...],
        samples: int,
        seed: int,
        chunk: int,
        rows: int | None,
    ) -> tuple[Tensor, Params]:
        """Compute the outputs of draws, (samples, B, *out), and their parameters of the noise."""
        noise: dict[str, list[Tensor]] = {}
        outputs = torch.empty(0)
        with self.seed_network(inputs, rng.fold(seed, "forward")):
            for start in range(0, samples, chunk):
                stack = self.sample(min(chunk, samples - start), seed, start)
                for name in [name for name in stack if name.startswith(NOISE)]:
                    noise.setdefault(name.removeprefix(NOISE), []).append(stack.pop(name))
                chunk_outputs = self.outputs(stack, inputs, rows)
                if len(chunk_outputs) == samples:
                    outputs = chunk_outputs
                    continue
                if start == 0:
                    outputs = chunk_outputs.new_empty(samples, *chunk_outputs.shape[1:])
                outputs[start : start + len(chunk_outputs)] = chunk_outputs
        return outputs, {name: torch.cat(values) for name, values in noise.items()}

    def _map_over_draws(self, inputs: tuple[Any, ...], *, loop: bool) -> Map:
        """Return ``call`` as a function of a stack of draws, by ``vmap`` or a loop."""
        return VmapOrLoop(self.call, (0, *[None] * len(inputs)), loop=loop)

    def _drawn_share(self, stack: Params, inputs: tuple[Any, ...]) -> float:
        """Return the fraction of the network that differs between the draws of a stack.

        A map over draws computes the rest once.
        """
        if not self.mappable or size(stack) < 2:
            return 1.0
        weights = {name: value for name, value in stack.items() if not name.startswith(NOISE)}
        drawn = [name for name, value in weights.items() if not shared(value)]
        first_draw = {name: value[0] for name, value in weights.items()}
        return self.network.drawn_fraction(drawn, first_draw, inputs)

    def _chunk(self, samples: int, inputs: tuple[Any, ...]) -> int:
        """Return the number of draws to compute at a time.

        Where most of the network is computed once, these are as many as are as large as the
        network.
        """
        weights = sum(value.numel() for value in self.template().values())
        chunk_by_weights = CHUNK_NUMBERS // max(weights, 1)
        chunk_by_rows = CHUNK_OUTPUTS // max(len(inputs[0]), 1)
        chunk = min(samples, chunk_by_weights, chunk_by_rows)
        if chunk < samples:
            two_draws = self.sample(2, seed=0)
            if self._drawn_share(two_draws, inputs) < 1:
                drawn = sum(value[0].numel() for value in two_draws.values() if not shared(value))
                parameters = sum(p.numel() for p in self.target.net.parameters())
                chunk = min(samples, max(CHUNK_NUMBERS, parameters) // drawn)
        return max(1, chunk)


def check_count(value: object, name: str = "n", least: int = 0) -> None:
    """Raise a ValueError unless a value is a whole number of at least ``least``.

    Args:
        value: to check.
        name: of the argument, for the message.
        least: the smallest allowed number; 0 by default.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")

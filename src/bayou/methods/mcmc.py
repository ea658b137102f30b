"""The base class of Markov chain methods: where chains start, and their run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from bayou.core import rng
from bayou.core.files import StrPath
from bayou.core.params import flatten
from bayou.core.progress import Progress, Show
from bayou.inference.chains import ChainRun, DivergenceError, Sampling
from bayou.inference.method import BatchedMethod, FitArguments, Method, open_checkpoint
from bayou.inference.probe import ChainProbe, warn_unless_mixed
from bayou.inference.start import starting_point
from bayou.kernels import Joint
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE
from bayou.training.data import Data, Rows
from bayou.training.jobs import Executor, send, wait_for
from bayou.training.ranks import current
from bayou.training.seeds import part_seed

Chains = Callable[
    [range, StrPath | None, Show], ChainRun
]  # the run of some chains, with its checkpoint
MODE_LR = 5e-3  # of the short MAP that chains start at
MODE_HELD_OUT = 0.2  # the fraction that this MAP holds out, where a noise is learned
MODE_MIN_ROWS = 10  # the rows that takes


class MarkovChains(Sampling):
    """The chains of a ``Sampler``.

    Args:
        method: the settings.
        joint: log p(w, D).
        data: all rows.
        start: the initial positions, (C, D).
        seed: of the noise.
        chains: the numbers of the chains.
    """

    method: Sampler
    probe: ChainProbe

    def __init__(
        self, method: Sampler, joint: Joint, data: Data, start: Tensor, seed: int, chains: range
    ) -> None:
        super().__init__(method, joint, seed, chains)
        self.data = data

    def mixing(self, draws: Tensor) -> dict[str, Any]:
        """Return the entries of ``posterior.mixing`` for these draws, (C, K, D)."""
        return self.probe.mixing(draws, self.joint.start, self.method.temperature)


@dataclass(frozen=True, kw_only=True)
class Sampler(BatchedMethod[Empirical]):
    """The base class of Markov chain methods.

    Where a noise is learned, the short MAP of ``start="mode"`` holds out a fifth of the rows and
    keeps the parameters with the lowest validation loss: fitted to all rows, the noise of a network
    that can interpolate goes to 0. (A DataLoader is not split: give a ``start``.)

    ``posterior.mixing`` has diagnostics of the chains: split R-hat and bulk ESS of the functions
    E[y | x, w] at up to 64 rows and of the log joint ("r_hat" and "ess" are the worst,
    "r_hat_median" and "ess_median" the median), the mean difference in nats of the draws to the
    start, and where applicable the acceptance rate and the divergences. With at least 20 draws per
    chain it also has "mixed": R-hat of at most 1.1, an ESS of at least 50, and draws less than D +
    5·√(D/2) nats below the start (unless a noise is sampled); otherwise there is a
    ``MixingWarning``.

    The network is in eval mode throughout: batch norm uses the running statistics of the network as
    given (or of the start), dropout is off. Frozen parameters stay. A noise that is learned
    (``Gaussian(learn=True)``) is sampled too, as ``likelihood.log_scale`` with a flat prior on the
    log scale; its posterior is proper where the network cannot go through all data exactly. Ctrl-C
    ends the run after the step at hand and returns the draws so far, ``stopped="interrupted"``;
    before the first draw it raises KeyboardInterrupt. A chain that is not finite ends the run with
    ``DivergenceError``, which carries the draws of the other chains.

    Args:
        chains: the number of parallel chains, by vmap, 4 by default; chain c is a function of
            (seed, c) only.
        start: a method that ends in a point, such as MAP(), or None for the network's own weights.
            "mode" (default) is a short MAP, no longer than the chains themselves (none, where the
            step size is given or the chains begin at the prior).
        dispersal: where the chains begin around the start: the standard deviation of a jitter, 0.01
            by default, or "prior" for independent draws from the prior.
        temperature: T of p(w, D)^(1/T), 1 by default; T < 1 is a cold posterior. T = 0 of SGLD,
            PSGLD and SGHMC: gradient steps without noise; with ``Cyclical`` steps, a snapshot
            ensemble (Huang et al. 2017).
        log_every: steps between two records of ``posterior.history``; 50 by default.
        checkpoint_every: steps between two checkpoints with all draws, if the run has a checkpoint
            file; 1,000 by default.
        parallel: an executor (``concurrent.futures.ProcessPoolExecutor``, that of dask, ...) whose
            workers run a chain each, with the same draws up to rounding; those whose worker died
            run in this process. None (default) runs all chains here. Chain 0 has the file
            ``checkpoint``.chain-000, which workers on other machines must share.
    """

    chains: int = 4
    start: Method | Literal["mode"] | None = "mode"
    dispersal: float | Literal["prior"] = 0.01
    temperature: float = 1.0
    log_every: int = 50
    checkpoint_every: int = 1000
    parallel: Executor | None = field(default=None, compare=False)  # draws do not depend on it

    draws_all_weights: ClassVar[bool] = True
    chains_type: ClassVar[type[MarkovChains]]
    shares_rows: ClassVar[bool] = False  # whether processes of torchrun share the rows of a batch
    without_noise: ClassVar[bool] = False  # whether temperature 0 is possible

    def __post_init__(self) -> None:
        name = type(self).__name__
        self._check_whole("chains", "batch_size", "log_every", "checkpoint_every")
        if self.temperature != 0 or not self.without_noise:
            self._check_positive("temperature")
        if self.start not in (None, "mode") and not isinstance(self.start, Method):
            raise ValueError(
                f"{name} start must be 'mode', None or a method such as MAP(), got {self.start!r}"
            )
        if self.parallel is not None and not isinstance(self.parallel, Executor):
            raise ValueError(f"{name} parallel must be an executor or None, got {self.parallel!r}")
        if self.dispersal != "prior":
            self._check_interval("[0, inf)", "dispersal")

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method from the network as it is."""
        return replace(self, start=None)

    @abstractmethod
    def _plan(self, data: Data) -> tuple[int, list[int]]:
        """Return the number of steps, and those after which positions are kept."""

    @abstractmethod
    def _mode_steps(self, data: Data) -> int:
        """Return the number of steps towards the mode before the chains start; 0 for none."""

    def _start(self, target: Target, data: Data) -> Method | None:
        """Return the method that finds the start; None for the network as it is."""
        if self.start != "mode":
            return self.start
        steps = 0
        if self.dispersal != "prior":
            steps = min(self._mode_steps(data), max(2000, 10 * data.batches))
        if not steps:
            return None
        # p(w, noise | D) has no mode where the network can interpolate: its noise goes to 0, where
        # no chain can move
        learns_noise = any(p.requires_grad for p in target.likelihood.parameters())
        has_rows = isinstance(data, Rows) and data.n >= MODE_MIN_ROWS
        held_out = MODE_HELD_OUT if learns_noise and has_rows else 0.0
        batch_size = min(self.batch_size, MAP.batch_size)
        return MAP(steps=steps, lr=MODE_LR, batch_size=batch_size, validation=held_out)

    def _fit(self, arguments: FitArguments) -> Empirical:
        """Return the draws of all chains, grouped by chain, in order."""
        if not self.shares_rows:
            current().note_unshared(f"the chains of {type(self).__name__}")
        chains = self._prepare(arguments)
        if isinstance(chains, Empirical):
            return chains
        checkpoint = arguments.checkpoint
        progress = arguments.progress
        if self.parallel is None:
            posterior = chains(range(self.chains), checkpoint, progress).run()
        else:
            posterior = self._run_in_workers(self.parallel, chains, checkpoint, progress)
        warn_unless_mixed(type(self).__name__, posterior)
        return posterior

    def _run_in_workers(
        self, executor: Executor, chains: Chains, checkpoint: StrPath | None, progress: Show
    ) -> Empirical:
        """Return the draws of chains that run in workers of an executor, each to its own file."""
        run = chains(range(self.chains), None, False)
        complete_files = list[str]()
        divergence = None
        stopped = "finished"
        with TemporaryDirectory() as temporary, Progress(run.name, self.chains, progress) as line:
            prefix = checkpoint or Path(temporary, "run")
            files = [f"{prefix}.chain-{c:03d}" for c in range(self.chains)]
            jobs = [send(executor, run_chain, chains, c, file) for c, file in enumerate(files)]
            for c, (job, file) in enumerate(zip(jobs, files, strict=True)):
                try:
                    if not wait_for(job):
                        run_chain(chains, c, file)
                    complete_files.append(file)
                except DivergenceError as error:
                    divergence = divergence or error
                except BaseException as error:
                    for other_job in jobs:
                        other_job.cancel()
                    if not complete_files or not isinstance(error, KeyboardInterrupt):
                        raise
                    stopped = "interrupted"
                    break
                line.update(c + 1)
            if divergence is None:
                return run.join_chains(complete_files, stopped)
            if complete_files:
                divergence.posterior = run.join_chains(complete_files, "diverged")
            else:
                divergence.posterior = None
            raise divergence

    def stream(
        self, target: Target, data: Any, *, seed: int = 0, progress: Show = True
    ) -> Iterator[Empirical]:
        """Yield the draws of ``fit``, one of each chain at a time, without storing them.

        The first follows the burn-in. There is no ``mixing``, which needs all draws.

        Args:
            target: the network, likelihood and prior.
            data: tensors (x, y), a Dataset or a DataLoader.
            seed: decides the start, the batches and the noise.
            progress: whether, or where, to show a line of progress.

        Raises:
            KeyboardInterrupt: before there was a chain.
        """
        chains = self._prepare(self._arguments(target, data, seed, None, progress))
        if isinstance(chains, Empirical):  # Ctrl-C before there was a chain
            raise KeyboardInterrupt(f"{type(self).__name__} was interrupted before its first draw")
        yield from chains(range(self.chains), None, progress).stream()

    def _prepare(self, arguments: FitArguments) -> Chains | Empirical:
        """Return the chains at their start, or the start if it was interrupted."""
        target = arguments.target
        batches = arguments.data
        self._plan(batches)  # which checks the settings before the start
        target.require_fixed_priors(type(self).__name__)
        if not target.free:
            raise ValueError(
                "every parameter of the network is frozen (requires_grad=False): nothing to sample"
            )
        point = starting_point(
            self._start(target, batches),
            target,
            batches,
            seed=part_seed(arguments.seed, "start"),
            checkpoint=arguments.checkpoint,
            progress=arguments.progress,
            points=self.chains,
        )
        if point.stopped == "interrupted":  # Ctrl-C during the start: return that point
            return point
        return partial(replace(self, parallel=None)._run, target, batches, arguments.seed, point)

    def _run(
        self,
        target: Target,
        data: Data,
        seed: int,
        point: Empirical,
        chains: range,
        checkpoint: StrPath | None,
        progress: Show,
    ) -> ChainRun:
        """Return the run of some of the chains before their first step."""
        file = open_checkpoint(checkpoint, self, target, data, seed)
        # the user's prior, the learned noise
        target = replace(target, likelihood=point.target.likelihood)
        weights = {
            name: value[0] for name, value in point.stack.items() if not name.startswith(NOISE)
        }
        joint = Joint(target, point.network, weights)
        positions = self._initial_positions(joint, point, seed, chains)
        make = partial(self.chains_type, self, joint, data, positions, seed, chains)
        return ChainRun(self, make, seed, positions.device, *self._plan(data), file, progress)

    def _initial_positions(
        self, joint: Joint, points: Empirical, seed: int, chains: range
    ) -> Tensor:
        """Return where the chains begin, around the point or around a point each: (C, D)."""
        count = len(chains)
        center = joint.start
        if points.draws > 1:
            stack = {name: points.stack[name][chains.start : chains.stop] for name in joint.like}
            center = flatten(stack, 1).detach()
        if self.dispersal != "prior":
            noise_seed = part_seed(seed, "dispersal")
            noise = rng.normal(count, joint.start.shape, center, noise_seed, chains.start)
            return center + self.dispersal * noise
        tensors = {name: value.expand(count, *value.shape) for name, value in joint.like.items()}
        for name in joint.target.free:
            prior_seed = part_seed(seed, "dispersal", name)
            tensors[name] = joint.target.priors[name].sample(count, prior_seed, chains.start)
        return flatten(tensors, 1).detach()


def run_chain(chains: Chains, chain: int, file: str) -> None:
    """Run a chain in a worker: its file has the draws then.

    Args:
        chains: makes the run of some chains.
        chain: the number of the chain.
        file: its checkpoint.

    Raises:
        KeyboardInterrupt: if the chain was interrupted.
    """
    if chains(range(chain, chain + 1), file, False).complete() == "interrupted":
        raise KeyboardInterrupt

"""The base class of Markov chain methods: where chains start, and their run."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from bayou import rng
from bayou.files import StrPath
from bayou.inference.chains import Run, Sampling
from bayou.inference.method import Method, identity
from bayou.inference.probe import warn_unless_mixed
from bayou.inference.start import starting_point
from bayou.kernels import Joint
from bayou.methods.point import MAP
from bayou.params import flatten
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE
from bayou.progress import Show
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, as_data
from bayou.training.seeds import as_int_seed, part_seed

MODE_LR = 5e-3  # of the short MAP that chains start at
MODE_HELD_OUT, MODE_MIN_ROWS = 0.2, 10  # where a noise is learned: the fraction held out, and the rows that takes


@dataclass(frozen=True, kw_only=True)
class Sampler(Method):
    """The base class of Markov chain methods.

    Where a noise is learned, the short MAP of ``start="mode"`` holds out a fifth of the rows and keeps the parameters
    with the lowest validation loss: fitted to all rows, the noise of a network that can interpolate goes to 0. (A
    DataLoader is not split: give a ``start``.)

    ``posterior.mixing`` has diagnostics of the chains: split R-hat and bulk ESS of the functions E[y | x, w] at up to
    64 rows and of the log joint ("r_hat" and "ess" are the worst, "r_hat_median" and "ess_median" the median), the mean
    difference in nats of the draws to the start, and where applicable the acceptance rate and the divergences. With at
    least 20 draws per chain it also has "mixed": R-hat of at most 1.1, an ESS of at least 50, and draws less than
    D + 5·√(D/2) nats below the start (unless a noise is sampled); otherwise there is a ``MixingWarning``.

    The network is in eval mode throughout: batch norm uses the running statistics of the network as given (or of the
    start), dropout is off. Frozen parameters stay. A noise that is learned (``Gaussian(learn=True)``) is sampled too,
    as ``likelihood.log_scale`` with a flat prior on the log scale; its posterior is proper where the network cannot
    go through all data exactly. Ctrl-C ends the run after the step at hand and returns the draws so far,
    ``stopped="interrupted"``; before the first draw it raises KeyboardInterrupt. A chain that is not finite ends the
    run with ``DivergenceError``, which carries the draws of the other chains.

    Args:
        chains: the number of parallel chains, by vmap; chain c is a function of (seed, c) only.
        start: a method that ends in a point, such as MAP(), or None for the network's own weights. "mode" is a short
            MAP, no longer than the chains themselves (none, where the step size is given or the chains begin at the
            prior).
        dispersal: where the chains begin around the start: the standard deviation of a jitter, or "prior" for
            independent draws from the prior.
        temperature: T of p(w, D)^(1/T); T < 1 is a cold posterior. T = 0 of SGLD, PSGLD and
            SGHMC: gradient steps without noise; with ``Cyclical`` steps, a snapshot ensemble (Huang et al. 2017).
        log_every: steps between two records of ``posterior.history``.
        checkpoint_every: steps between two checkpoints with all draws, if the run has a checkpoint file.
    """

    chains: int = 4
    start: Method | Literal["mode"] | None = "mode"
    draws_all_weights: ClassVar[bool] = True
    without_noise: ClassVar[bool] = False  # whether temperature 0 is possible
    dispersal: float | Literal["prior"] = 0.01
    temperature: float = 1.0
    log_every: int = 50
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        me = type(self).__name__
        self._check_whole("chains", "batch_size", "log_every", "checkpoint_every")
        if self.temperature != 0 or not self.without_noise:
            self._check_positive("temperature")
        if self.start not in (None, "mode") and not isinstance(self.start, Method):
            raise ValueError(f"{me} start must be 'mode', None or a method such as MAP(), got {self.start!r}")
        if self.dispersal != "prior" and not (isinstance(self.dispersal, int | float) and self.dispersal >= 0):
            raise ValueError(f"{me} dispersal must be 'prior' or a standard deviation, got {self.dispersal!r}")

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, start=None)

    @abstractmethod
    def _sampling(self, joint: Joint, data: Data, start: Tensor, seed: int, chains: range) -> Sampling:
        """The chains at their start (C, D)."""

    @abstractmethod
    def _plan(self, data: Data) -> tuple[int, list[int]]:
        """The number of steps, and the steps after which the positions of the chains are kept."""

    @abstractmethod
    def _mode_steps(self, data: Data) -> int:
        """The number of steps towards the mode before the chains start; 0 for none."""

    def _start(self, target: Target, data: Data) -> Method | None:
        """Where the chains start, if it is not the network as it is."""
        if self.start != "mode":
            return self.start
        steps = 0 if self.dispersal == "prior" else min(self._mode_steps(data), max(2000, 10 * data.batches))
        if not steps:
            return None
        # p(w, noise | D) has no mode where the network can interpolate: its noise goes to 0, where no chain can move.
        learned = any(p.requires_grad for p in target.likelihood.parameters())
        held_out = MODE_HELD_OUT if learned and isinstance(data, Rows) and data.n >= MODE_MIN_ROWS else 0.0
        batch_size = min(self.batch_size, MAP.batch_size)
        return MAP(steps=steps, lr=MODE_LR, batch_size=batch_size, validation=held_out)

    def fit(
        self, target: Target, data: Any, *, seed: int = 0, checkpoint: StrPath | None = None, progress: Show = True
    ) -> Empirical:
        """The draws of all chains, grouped by chain, in order."""
        found = self._begin(target, data, as_int_seed(seed), checkpoint, progress, range(self.chains))
        if isinstance(found, Empirical):
            return found
        posterior = found.run()
        warn_unless_mixed(found.name, posterior)
        return posterior

    def stream(self, target: Target, data: Any, *, seed: int = 0, progress: Show = True) -> Iterator[Empirical]:
        """The draws of ``fit``, one of each chain at a time, without storing them.

        The first follows the burn-in. There is no ``mixing``, which needs all draws.
        """
        found = self._begin(target, data, as_int_seed(seed), None, progress, range(self.chains))
        if isinstance(found, Empirical):  # Ctrl-C before there was a chain
            raise KeyboardInterrupt(f"{type(self).__name__} was interrupted before its first draw")
        yield from found.stream()

    def _begin(
        self, target: Target, data: Any, seed: int, checkpoint: StrPath | None, progress: Show, chains: range
    ) -> Run | Empirical:
        """The chains before their first step, or the start if it was interrupted."""
        batches = as_data(data, self.batch_size)
        steps, kept = self._plan(batches)
        target = replace(target, n=batches.n)
        target.require_fixed_priors(type(self).__name__)
        if not target.free:
            raise ValueError("every parameter of the network is frozen (requires_grad=False): nothing to sample")
        file = None if checkpoint is None else Checkpoint(checkpoint, identity(self, target, batches, seed))
        found = starting_point(
            self._start(target, batches),
            target,
            batches,
            seed=part_seed(seed, "start"),
            checkpoint=checkpoint,
            progress=progress,
            points=self.chains,
        )
        if found.stopped == "interrupted":  # Ctrl-C during the start: return that point
            return found
        target = replace(target, likelihood=found.target.likelihood)  # the user's prior, the learned noise
        joint = Joint(target, found.network, {n: v[0] for n, v in found.stack.items() if not n.startswith(NOISE)})
        begin = self._dispersed(joint, found, seed, chains)
        make = partial(self._sampling, joint, batches, begin, seed, chains)
        return Run(self, make, seed, begin.device, steps, kept, file, progress)

    def _dispersed(self, joint: Joint, points: Empirical, seed: int, chains: range) -> Tensor:
        """The initial positions of the chains, around the point or around one point each: (C, D)."""
        count, begin, first = len(chains), joint.start, chains.start
        if points.draws > 1:
            several = {name: points.stack[name][chains.start : chains.stop] for name in joint.like}
            begin = flatten(several, 1).detach()
        if self.dispersal != "prior":
            noise = rng.normal(count, joint.start.shape, begin, part_seed(seed, "dispersal"), first)
            return begin + self.dispersal * noise
        drawn = {name: value.expand(count, *value.shape) for name, value in joint.like.items()}
        for name in joint.target.free:
            drawn[name] = joint.target.priors[name].sample(count, part_seed(seed, "dispersal", name), first)
        return flatten(drawn, 1).detach()

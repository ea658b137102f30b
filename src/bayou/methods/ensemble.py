"""Ensembles: several runs of one method from different initial weights as one posterior."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self, final

import torch
from torch import Tensor

from bayou.core.params import Params, stack
from bayou.core.specs import later_field
from bayou.inference.members import (
    Init,
    draw_anchor,
    draw_targets,
    fit_stacked,
    fixed_normal_priors,
    member_seed,
    member_target,
)
from bayou.inference.method import BatchedMethod, FitArguments, Method, identity
from bayou.methods.ensemble_run import EnsembleError, EnsembleRun
from bayou.methods.member_folder import MemberFolder
from bayou.methods.point import MAP
from bayou.network.target import Target
from bayou.posteriors.posterior import Posterior
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data
from bayou.training.jobs import Executor, send

__all__ = ["Ensemble", "EnsembleError"]

# deviations for the name "ensemble", of which held-out rows select the widest within chance
ANCHOR_SPREADS = (0.3, 0.2, 0.0)


@final
@dataclass(frozen=True)
class Ensemble(BatchedMethod[Posterior]):
    """Deep ensembles: n runs of a method, each with its own seed and initial weights.

        q(w) = 1/n Σ_i q_i(w)

    For ``of`` = MAP() or MLE() these are n points, (n, *shape) each, with the running statistics
    and the learned noise of each. Of any other method: a mixture of its posteriors.

    ``parallel="vmap"`` is for MLE and MAP of small networks. Its members are those of
    ``parallel=None`` up to rounding, unless a forward pass is random (dropout). ``checkpoint`` is
    then one file, a record of the history is the mean over members, and a failed member ends the
    run. Otherwise ``checkpoint`` is a folder, which workers on other machines must share:
    member-000.bayou for a finished member, member-000.run for the current run, from which the same
    call continues bit for bit.

    With ``anchored``, every member of MAP() has a draw of the prior as the mean of its prior, and
    in a regression y with another draw of the known noise (anchored ensembles, Pearce et al. 2020;
    randomize-then-optimize, Bardsley et al. 2014). Members of a linear network with Gaussian noise
    are then exact draws of the posterior; members with one prior all end in nearly the same
    function where there are no data.

    Args:
        n: the number of members, 5 by default.
        of: the method of each member, ``MAP()`` by default.
        parallel: None (default) trains the members one after another; "vmap" trains them together,
            as one network with stacked weights; an executor
            (``concurrent.futures.ProcessPoolExecutor``, that of dask, ...) trains each in a worker,
            with the same result, and those whose worker died in this process.
        init: "reset" draws initial weights by the ``reset_parameters()`` of every module (frozen
            parameters stay); "keep" starts every member at the network's weights; a function is
            called with each member's copy of the network and changes it in place. None (default) is
            "reset" for a network with weights as drawn by ``reset_parameters()``, and otherwise an
            error: a tensor (a weight of another scale, the zeros of a low-rank adapter, moved
            statistics) was trained, loaded or set.
        anchored: whether members have anchors; False by default. A number between 0 and 1
            multiplies the deviations of anchors and noise. The name "ensemble" takes 0.3 or 0.2 in
            a small regression, unless held-out rows are predicted worse.

    Returns:
        ``fit`` returns an ``Empirical`` posterior of points, or a ``Mixture``. Ctrl-C returns the
        finished members (or the current one, if there are none), ``stopped="interrupted"``.

    Raises:
        EnsembleError: if a member failed, when the others are finished; it has those as
            ``posterior``.
        ValueError: for settings that do not go together.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> method = bayou.Ensemble(3, bayou.MAP(steps=10))
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.draws
    3

    Paper: Lakshminarayanan et al. 2017, https://arxiv.org/abs/1612.01474.
    """

    n: int = 5
    of: Method = field(default_factory=MAP)
    parallel: Literal["vmap"] | Executor | None = None
    init: Init = None
    anchored: bool | float = later_field(False)

    def __post_init__(self) -> None:
        self._check_whole("n")
        if self.parallel is not None and not isinstance(self.parallel, Executor):
            self._check(("parallel",), lambda value: value == "vmap", "'vmap', an executor or None")
        if not isinstance(self.of, Method):
            raise ValueError(f"Ensemble of must be a method such as MAP(), got {self.of!r}")
        if not isinstance(self.anchored, bool | int | float) or not 0 <= self.anchored <= 1:
            raise ValueError(
                f"Ensemble anchored must be True, False or between 0 and 1, got {self.anchored!r}"
            )
        is_map = isinstance(self.of, MAP) and self.of.l2 is None
        if self.anchored and (not is_map or self.parallel == "vmap"):
            raise ValueError(
                "anchored=True is for MAP() under the prior of the fit, one member after another "
                f"or by an executor, got of={self.of!r} and parallel={self.parallel!r}"
            )
        if isinstance(self.of, Ensemble):
            raise ValueError("an ensemble of ensembles is one ensemble; pass a larger n")
        if self.init not in (None, "reset", "keep") and not callable(self.init):
            raise ValueError(
                "Ensemble init must be 'reset', 'keep' or a function of a network, "
                f"got {self.init!r}"
            )

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """Return the batch size of the members."""
        return self.of.batch_size

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method with other initial weights than the mode: one for each member."""
        return replace(self, init=self.init or "reset")

    def starts(self, target: Target, seed: int) -> Params | None:
        """Return the initial weights of all members; None unless they end at modes."""
        if not isinstance(self.of, MAP) or not self.of.open_ended:
            return None
        init = self.init or "reset"
        return stack([member_target(target, init, own).start() for own in self._seeds(seed)])

    def _seeds(self, seed: int) -> list[int]:
        """Return the seeds of the members."""
        return [member_seed(seed, member) for member in range(self.n)]

    @property
    def spreads(self) -> tuple[float, ...]:
        """Return the candidates for ``anchored`` that held-out rows may select from."""
        if not isinstance(self.of, MAP) or self.of.l2 is not None:
            return (0.0,)
        return ANCHOR_SPREADS

    def with_spread(self, spread: float) -> Ensemble:
        """Return this method with these deviations of the anchors."""
        return replace(self, anchored=spread or False)

    def randomize(self, target: Target, y: Tensor, seed: int) -> tuple[Params, Tensor] | None:
        """Draw anchors and targets of all members, whose means are the prior mean and y.

        Each of them alone is a draw; together they are as many independent draws less their mean,
        times √(n/(n − 1)). The mean of the members of a linear model is then that of the posterior.

        Args:
            target: with fixed Normal priors and a known noise.
            y: the targets of all rows.
            seed: the seed of the fit.

        Returns:
            The anchors, (n, *shape) each, and targets (n, *y.shape); None unless ``anchored``.
        """
        if not self.anchored:
            return None
        seeds = self._seeds(seed)
        draws = stack([draw_anchor(target, own) for own in seeds])
        anchors = {
            name: self._balance(draws[name], prior.mean.detach().expand(prior.shape))
            for name, prior in fixed_normal_priors(target).items()
        }
        targets = torch.stack([draw_targets(target, y, own) for own in seeds])
        if targets.is_floating_point():
            targets = self._balance(targets, y)
        return anchors, targets

    def _balance(self, draws: Tensor, center: Tensor) -> Tensor:
        """Return draws (n, ...) around a mean, with deviations multiplied by ``anchored``."""
        deviations = draws - center
        if self.n > 1:
            deviations = (deviations - deviations.mean(0)) * math.sqrt(self.n / (self.n - 1))
        return center + float(self.anchored) * deviations

    def _fit(self, arguments: FitArguments) -> Posterior:
        """Train all members, or those that are not in the checkpoint folder yet."""
        target = arguments.target
        batches = arguments.data
        checkpoint = arguments.checkpoint
        progress = arguments.progress
        executor = self.parallel if isinstance(self.parallel, Executor) else None
        in_process = replace(self, parallel=None) if executor else self
        run_identity = _identity(in_process, target, batches, arguments.seed)
        seeds = self._seeds(arguments.seed)
        if self.parallel == "vmap":
            file = None if checkpoint is None else Checkpoint(checkpoint, run_identity)
            return fit_stacked(
                self.of, target, self.init, batches, seeds, arguments.seed, file, progress
            )
        folder = None if checkpoint is None else MemberFolder(checkpoint, run_identity)
        if executor is None:
            return EnsembleRun(self, target, batches, seeds, folder).train_all(progress)
        with TemporaryDirectory() as temporary:  # for members that are not kept
            folder = folder or MemberFolder(Path(temporary) / "members", run_identity)
            run = EnsembleRun(in_process, target, batches, seeds, folder)
            jobs = [send(executor, run.train_in_worker, member) for member in range(self.n)]
            try:
                return run.train_all(progress, jobs)
            finally:
                for job in jobs:
                    job.cancel()


def _identity(ensemble: Ensemble, target: Target, data: Data, seed: int) -> dict[str, Any]:
    """Return the identity of a run, without what does not change its result."""
    run_identity = identity(ensemble, target, data, seed)
    fields = run_identity["method"]["fields"]
    fields["init"] = fields["init"] or "reset"  # None only adds a check
    fields["of"]["fields"].pop("checkpoint_every", None)
    return run_identity

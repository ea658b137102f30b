"""Ensembles: several runs of one method from different initial weights as one posterior."""

from __future__ import annotations

import math
import shutil
from dataclasses import dataclass, field, replace
from glob import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, Self, final

import torch
from torch import Tensor, nn

from bayou.core.files import FileError, StrPath
from bayou.core.params import Params, stack
from bayou.core.progress import Show, stage
from bayou.core.specs import later_field
from bayou.inference.members import (
    Init,
    draw_anchor,
    draw_targets,
    member_seed,
    member_target,
    prior_means,
    vmap_ensemble,
)
from bayou.inference.method import Method, identity
from bayou.methods.point import MAP
from bayou.posteriors import load
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.mixture import Mixture
from bayou.posteriors.posterior import NOISE, Posterior
from bayou.priors import BoundNormal, DensityPrior, Prior
from bayou.target import Target
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, as_data
from bayou.training.jobs import Executor, send, wait_for
from bayou.training.seeds import as_int_seed

ANCHOR_SPREADS = (
    0.3,
    0.2,
    0.0,
)  # of the name "ensemble": selected on held-out rows, the widest within chance
FAILURES = (
    ArithmeticError,
    RuntimeError,
    MemoryError,
)  # of one member; a ValueError concerns the call and ends it


class EnsembleError(RuntimeError):
    """Members failed or are missing.

    Args:
        message: which members, and why.
        failures: member → why.
        posterior: the other members, None without any.
    """

    def __init__(self, message: str, failures: dict[int, str], posterior: Posterior | None) -> None:
        super().__init__(message)
        self.failures, self.posterior = failures, posterior


@final
@dataclass(frozen=True)
class Ensemble(Method):
    """q(w) = 1/n Σ_i q_i(w): n runs of a method, each with its own seed and initial weights.

    Deep ensembles (Lakshminarayanan et al. 2017) for ``of`` = MAP() or MLE(): n points, (n, *shape)
    each, with the running statistics and the learned noise of each. Of any other method: a mixture
    of its posteriors.

    ``init``: "reset" draws initial weights by the ``reset_parameters()`` of every module (frozen
    parameters stay); "keep" starts every member at the network's weights; a function is called with
    each member's copy of the network and changes it in place. None, the default, is "reset" for a
    network with weights as drawn by ``reset_parameters()``,
    and otherwise an error: a tensor (a weight of another scale, the zeros of a low-rank adapter,
    moved statistics) was trained, loaded or set.

    ``parallel``: None trains the members one after another; "vmap" trains them together, as one
    network with stacked weights; an executor (``concurrent.futures.ProcessPoolExecutor``, that of
    dask, ...) trains each in a worker, with the same result, and those whose worker died in this
    process. Without "vmap" ``checkpoint`` is a folder, which workers on other machines must share:
    member-000.bayou for a finished member, member-000.run for the current run, from which the same
    call continues bit for bit. Ctrl-C returns the finished members (or the current one, if there
    are none), ``stopped="interrupted"``. A failed member does not stop the
    others: when they are finished, an ``EnsembleError`` names it and has the others as
    ``posterior``.

    ``anchored``: every member of MAP() has a draw of the prior as the mean of its prior, and in a
    regression y with another draw of the known noise (anchored ensembles, Pearce et al. 2020;
    randomize-then-optimize, Bardsley et al. 2014). Members of a linear network with Gaussian noise
    are then exact draws of the posterior; members with one prior all end in nearly the same
    function where there are no data. A number between 0 and 1 multiplies the deviations of anchors
    and noise. The name "ensemble" takes 0.3 or 0.2 in a small regression, unless held-out rows are
    predicted
    worse: under a prior that was selected for modes, members with full deviations had a higher NLL
    on tables.

    ``parallel="vmap"`` is for MLE and MAP of small networks. Its members are those of
    ``parallel=None`` up to rounding, unless a forward pass is random (dropout). ``checkpoint`` is
    one file, a record of the history is the mean over members, and a failed member ends the run.
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
        if self.anchored and (
            not isinstance(self.of, MAP) or self.of.l2 is not None or self.parallel == "vmap"
        ):
            raise ValueError(
                f"anchored=True is for MAP() under the prior of the fit, one member after another or by an executor, "
                f"got of={self.of!r} and parallel={self.parallel!r}"
            )
        if isinstance(self.of, Ensemble):
            raise ValueError("an ensemble of ensembles is one ensemble; pass a larger n")
        if self.init not in (None, "reset", "keep") and not callable(self.init):
            raise ValueError(
                f"Ensemble init must be 'reset', 'keep' or a function of a network, got {self.init!r}"
            )

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """The members' batch size."""
        return self.of.batch_size

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(
            self, init=self.init or "reset"
        )  # members that all start at the mode would be one network

    def starts(self, target: Target, seed: int) -> Params | None:
        if not isinstance(self.of, MAP) or not self.of.open_ended:
            return None
        seeds = [member_seed(seed, member) for member in range(self.n)]
        return stack([member_target(target, self.init or "reset", own).start() for own in seeds])

    @property
    def spreads(self) -> tuple[float, ...]:
        if not isinstance(self.of, MAP) or self.of.l2 is not None:
            return (0.0,)
        return ANCHOR_SPREADS

    def with_spread(self, spread: float) -> Ensemble:
        return replace(self, anchored=spread) if spread else replace(self, anchored=False)

    def randomize(self, target: Target, y: Tensor, seed: int) -> tuple[Params, Tensor] | None:
        """Draw anchors and targets of all members, whose means are the prior mean and y.

        Each of them alone is a draw; together they are as many independent draws less their mean,
        times √(n/(n − 1)). The mean of the members of a linear model is then that of the posterior.
        """
        if not self.anchored:
            return None
        seeds = [member_seed(seed, member) for member in range(self.n)]
        drawn = stack([draw_anchor(target, own) for own in seeds])
        means = prior_means(target)
        anchors = {name: self._balance(values, means[name]) for name, values in drawn.items()}
        targets = torch.stack([draw_targets(target, y, own) for own in seeds])
        if targets.is_floating_point():
            targets = self._balance(targets, y)
        return anchors, targets

    def _balance(self, draws: Tensor, center: Tensor) -> Tensor:
        """Return draws (n, ...) whose mean is the center, with deviations multiplied by
        ``anchored``.
        """
        deviations = draws - center
        if self.n > 1:
            deviations = (deviations - deviations.mean(0)) * math.sqrt(self.n / (self.n - 1))
        return center + float(self.anchored) * deviations

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Train all members, or those that are not in the checkpoint folder yet."""
        seed = as_int_seed(seed)
        batches = as_data(data, self.batch_size)
        target = replace(target, n=batches.n)
        seeds = [member_seed(seed, member) for member in range(self.n)]
        alone = replace(self, parallel=None) if isinstance(self.parallel, Executor) else self
        who = identity(alone, target, batches, seed)
        who["method"]["fields"]["init"] = (
            who["method"]["fields"]["init"] or "reset"
        )  # None only adds a check
        who["method"]["fields"]["of"]["fields"].pop("checkpoint_every", None)
        if self.parallel == "vmap":
            run = vmap_ensemble(self.of, target, self.init, batches, seeds)
            file = None if checkpoint is None else Checkpoint(checkpoint, who)
            posterior = run.fit(seed, file, progress)
            posterior.target = replace(posterior.target, net=target.net)
            return posterior
        folder = None if checkpoint is None else Folder(checkpoint, who)
        if not isinstance(self.parallel, Executor):
            return self._one_by_one(target, batches, seeds, folder, progress, [])
        with TemporaryDirectory() as temporary:  # for members that are not kept
            folder = folder or Folder(Path(temporary) / "members", who)
            jobs = [
                send(self.parallel, train_member, alone, m, target, batches, s, folder)
                for m, s in enumerate(seeds)
            ]
            try:
                return self._one_by_one(target, batches, seeds, folder, progress, jobs)
            finally:
                for job in jobs:
                    job.cancel()

    def _one_by_one(
        self,
        target: Target,
        data: Data,
        seeds: list[int],
        folder: Folder | None,
        progress: Show,
        jobs: list[Any],
    ) -> Posterior:
        done, failures, cause, stopped = dict[int, Posterior](), dict[int, str](), None, "finished"
        try:
            for member, seed in enumerate(seeds):
                try:
                    if jobs:
                        wait_for(
                            jobs[member]
                        )  # its file is in the folder; without it, the member is trained here
                    posterior = self._member(member, target, data, seed, folder, progress)
                except NotImplementedError:
                    raise
                except FAILURES as error:
                    failures[member], cause = f"{type(error).__name__}: {error}", error
                    continue
                if posterior.stopped == "interrupted":
                    stopped, done = "interrupted", done or {member: posterior}
                    break
                done[member] = posterior
        except KeyboardInterrupt:
            if not done:
                raise
            stopped = "interrupted"
        whole = combine(done, target, stopped) if done else None
        if failures or whole is None:
            each = "; ".join(f"member {member}: {why}" for member, why in failures.items())
            kept = "" if folder is None else f" and in the folder {folder.path}"
            raise EnsembleError(
                f"{len(failures)} of {self.n} members did not finish. {each}. The finished ones are in this error's "
                f"posterior{kept}", failures, whole,
            ) from cause  # fmt: skip
        return whole

    def _member(
        self,
        member: int,
        target: Target,
        data: Data,
        seed: int,
        folder: Folder | None,
        progress: Show,
    ) -> Posterior:
        """One member, from its file or trained."""
        found = None if folder is None else folder.load(member, target.net)
        if folder is not None and found is not None:
            folder.clean(member)
            return found
        file = None if folder is None else folder.run(member)
        own = member_target(target, self.init, seed)
        rows = data
        if self.anchored:
            own, rows = anchored_member(own, data, seed, float(self.anchored))
        with stage(member + 1, self.n, unit="member"):
            posterior = self.of.fit(own, rows, seed=seed, checkpoint=file, progress=progress)
        posterior.target = replace(posterior.target, net=target.net)  # whose buffers were not reset
        if self.anchored:
            posterior.target = replace(posterior.target, prior=target.prior)
        if folder is not None and posterior.stopped != "interrupted":
            folder.save(member, posterior, target.net)
        return posterior


def train_member(
    ensemble: Ensemble, member: int, target: Target, data: Data, seed: int, folder: Folder
) -> None:
    """Train a member in a worker: its file is in the folder then."""
    ensemble._member(member, target, data, seed, folder, False)


def anchored_member(target: Target, data: Data, seed: int, spread: float) -> tuple[Target, Data]:
    """Return the target with a prior around the anchor of a member, and the data with its targets.

    Args:
        target: of the member, with its own network.
        data: rows of tensors.
        seed: the seed of the member.
        spread: the factor of the deviations of anchor and targets.
    """
    if not isinstance(data, Rows) or not isinstance(data.source, tuple):
        raise ValueError(
            f"an anchored ensemble needs tensors (x, y), to add noise to y, got {type(data).__name__}; give tensors, "
            "or anchored=False"
        )
    x, y = data.source
    priors: dict[str, Prior] = {}
    for name, anchor in draw_anchor(target, seed).items():
        prior = target.priors[name]
        assert isinstance(prior, BoundNormal)
        log_scale = prior.log_scale.detach().expand(prior.shape)
        mean = torch.lerp(prior.mean.detach().expand(prior.shape), anchor, spread)
        priors[escape(name)] = DensityPrior(BoundNormal(prior.shape, mean, log_scale))
    targets = draw_targets(target, y, seed)
    if targets.is_floating_point():
        targets = torch.lerp(y, targets, spread)
    rows = Rows((x, targets), data.index, data.batch_size)
    return replace(target, prior=priors), rows


class Folder:
    """The checkpoint of an ensemble: a file that identifies the run, and the files of its
    members.
    """

    def __init__(self, path: StrPath, who: dict[str, Any]) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileError(
                f"cannot write {path}: the folder {self.path.parent} does not exist; create it first"
            )
        if self.path.exists() and not self.path.is_dir():
            raise FileError(
                f"{path} is a file; the checkpoint of an ensemble is a folder: pass another name"
            )
        self.path.mkdir(exist_ok=True)
        card = Checkpoint(self.path / "ensemble.run", who)
        if card.read() is None:
            if any(self.path.glob("member-*")):
                raise FileError(
                    f"{path} contains members without ensemble.run, so that their run is unknown; use another folder"
                )
            card.write({}, {})

    def finished(self, member: int) -> Path:
        """The file of a finished member."""
        return self.path / f"member-{member:03d}.bayou"

    def run(self, member: int) -> Path:
        """The checkpoint of an unfinished member; a method may add suffixes."""
        return self.path / f"member-{member:03d}.run"

    def clean(self, member: int) -> None:
        """Remove the run of a finished member."""
        for path in self.path.glob(f"{self.run(member).name}*"):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def load(self, member: int, net: nn.Module) -> Posterior | None:
        """A finished member; None if unfinished, or if only its run can restore it (files cannot
        store functions).
        """
        if not self.finished(member).exists():
            return None
        try:
            return load(self.finished(member), net)
        except FileError:
            if any(self.path.glob(f"{self.run(member).name}*")):
                return None
            raise

    def save(self, member: int, posterior: Posterior, net: nn.Module) -> None:
        """Save a finished member; its checkpoint is removed, unless it is needed to restore the
        member.
        """
        posterior.save(self.finished(member))
        try:
            load(self.finished(member), net)
        except FileError:
            return
        self.clean(member)


def combine(members: dict[int, Posterior], target: Target, stopped: str = "finished") -> Posterior:
    """Members as one posterior: single points as a stack, anything else as a mixture."""
    parts = [members[member] for member in sorted(members)]
    history = [
        {"member": float(m), **record} for m in sorted(members) for record in members[m].history
    ]
    points = [part for part in parts if isinstance(part, Empirical) and part.draws == 1]
    posterior: Posterior
    if len(points) == len(parts) and len({frozenset(point.stack) for point in points}) == 1:
        own = replace(points[0].target, net=target.net)
        posterior = Empirical(
            own, points[0].network, stack([_point(point, points) for point in points]), history
        )
    else:
        posterior = Mixture(parts, history)
    posterior.stopped = stopped
    return posterior


def _point(point: Empirical, points: list[Empirical]) -> Params:
    """The tensors of one member: its weights, the buffers that differ between members, its learned
    noise.
    """
    first = points[0].network.buffers()
    buffers = {
        name: value
        for name, value in point.network.buffers().items()
        if any(not torch.equal(other.network.buffers()[name], first[name]) for other in points)
    }
    noise = {
        f"{NOISE}{name}": value.detach()
        for name, value in point.target.likelihood.named_parameters()
    }
    own = {name: value[0] for name, value in point.stack.items()}
    return own | {name: value for name, value in (buffers | noise).items() if name not in own}

"""Ensembles: several runs of one method from different initial weights as one posterior."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
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
from bayou.network.target import Target
from bayou.posteriors import load
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.mixture import Mixture
from bayou.posteriors.posterior import NOISE, Posterior
from bayou.priors import BoundNormal, DensityPrior, Prior
from bayou.training.checkpoints import Checkpoint
from bayou.training.data import Data, Rows, as_data
from bayou.training.jobs import Executor, send, wait_for
from bayou.training.seeds import as_int_seed

# deviations for the name "ensemble", of which held-out rows select the widest within chance
ANCHOR_SPREADS = (0.3, 0.2, 0.0)
# errors of one member; a ValueError concerns the call and ends it
MEMBER_ERRORS = (ArithmeticError, RuntimeError, MemoryError)


class EnsembleError(RuntimeError):
    """Members failed or are missing.

    Args:
        message: which members, and why.
        failures: member → why.
        posterior: the other members, None without any.
    """

    def __init__(self, message: str, failures: dict[int, str], posterior: Posterior | None) -> None:
        super().__init__(message)
        self.failures = failures
        self.posterior = posterior


@final
@dataclass(frozen=True)
class Ensemble(Method):
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
        means = prior_means(target)
        anchors = {name: self._balance(values, means[name]) for name, values in draws.items()}
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

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Train all members, or those that are not in the checkpoint folder yet.

        Args:
            target: the network, likelihood and prior.
            data: tensors (x, y), a Dataset or a DataLoader.
            seed: decides the seeds of the members.
            checkpoint: a folder, or with ``parallel="vmap"`` a file.
            progress: whether, or where, to show a line of progress.
        """
        seed = as_int_seed(seed)
        batches = as_data(data, self.batch_size)
        target = replace(target, n=batches.n)
        in_process = replace(self, parallel=None) if isinstance(self.parallel, Executor) else self
        run_identity = _identity(in_process, target, batches, seed)
        if self.parallel == "vmap":
            run = vmap_ensemble(self.of, target, self.init, batches, self._seeds(seed))
            file = None if checkpoint is None else Checkpoint(checkpoint, run_identity)
            posterior = run.fit(seed, file, progress)
            posterior.target = replace(posterior.target, net=target.net)
            return posterior
        folder = None if checkpoint is None else MemberFolder(checkpoint, run_identity)
        seeds = self._seeds(seed)
        if not isinstance(self.parallel, Executor):
            return self._train_all(target, batches, seeds, folder, progress, [])
        with TemporaryDirectory() as temporary:  # for members that are not kept
            folder = folder or MemberFolder(Path(temporary) / "members", run_identity)
            jobs = [
                send(self.parallel, train_member, in_process, m, target, batches, s, folder)
                for m, s in enumerate(seeds)
            ]
            try:
                return self._train_all(target, batches, seeds, folder, progress, jobs)
            finally:
                for job in jobs:
                    job.cancel()

    def _train_all(
        self,
        target: Target,
        data: Data,
        seeds: list[int],
        folder: MemberFolder | None,
        progress: Show,
        jobs: list[Any],
    ) -> Posterior:
        """Train the members, or wait for the jobs that do, and combine them."""
        members = dict[int, Posterior]()
        failures = dict[int, str]()
        cause = None
        stopped = "finished"
        try:
            for member, seed in enumerate(seeds):
                try:
                    if jobs:
                        # its file is in the folder then; otherwise the member is trained here
                        wait_for(jobs[member])
                    posterior = self._member(member, target, data, seed, folder, progress)
                except NotImplementedError:
                    raise
                except MEMBER_ERRORS as error:
                    failures[member] = f"{type(error).__name__}: {error}"
                    cause = error
                    continue
                if posterior.stopped == "interrupted":
                    stopped = "interrupted"
                    members = members or {member: posterior}
                    break
                members[member] = posterior
        except KeyboardInterrupt:
            if not members:
                raise
            stopped = "interrupted"
        ensemble = combine(members, target, stopped) if members else None
        if failures or ensemble is None:
            reasons = "; ".join(f"member {member}: {why}" for member, why in failures.items())
            place = "" if folder is None else f" and in the folder {folder.path}"
            raise EnsembleError(
                f"{len(failures)} of {self.n} members did not finish. {reasons}. "
                f"The finished ones are in this error's posterior{place}",
                failures,
                ensemble,
            ) from cause
        return ensemble

    def _member(
        self,
        member: int,
        target: Target,
        data: Data,
        seed: int,
        folder: MemberFolder | None,
        progress: Show,
    ) -> Posterior:
        """Return one member, from its file or trained."""
        saved = None if folder is None else folder.load(member, target.net)
        if folder is not None and saved is not None:
            folder.remove_run(member)
            return saved
        file = None if folder is None else folder.run_path(member)
        own_target = member_target(target, self.init, seed)
        rows = data
        if self.anchored:
            own_target, rows = anchor_member(own_target, data, seed, float(self.anchored))
        with stage(member + 1, self.n, unit="member"):
            posterior = self.of.fit(own_target, rows, seed=seed, checkpoint=file, progress=progress)
        # the buffers of this network were not reset
        posterior.target = replace(posterior.target, net=target.net)
        if self.anchored:
            posterior.target = replace(posterior.target, prior=target.prior)
        if folder is not None and posterior.stopped != "interrupted":
            folder.save(member, posterior, target.net)
        return posterior


def _identity(ensemble: Ensemble, target: Target, data: Data, seed: int) -> dict[str, Any]:
    """Return the identity of a run, without what does not change its result."""
    run_identity = identity(ensemble, target, data, seed)
    fields = run_identity["method"]["fields"]
    fields["init"] = fields["init"] or "reset"  # None only adds a check
    fields["of"]["fields"].pop("checkpoint_every", None)
    return run_identity


def train_member(
    ensemble: Ensemble, member: int, target: Target, data: Data, seed: int, folder: MemberFolder
) -> None:
    """Train a member in a worker: its file is in the folder then.

    Args:
        ensemble: the settings.
        member: its number.
        target: of the ensemble.
        data: all rows.
        seed: of the member.
        folder: the checkpoint.
    """
    ensemble._member(member, target, data, seed, folder, False)


def anchor_member(target: Target, data: Data, seed: int, spread: float) -> tuple[Target, Data]:
    """Return the target with a prior around the anchor of a member, and the data with its targets.

    Args:
        target: of the member, with its own network.
        data: rows of tensors.
        seed: the seed of the member.
        spread: the factor of the deviations of anchor and targets.
    """
    if not isinstance(data, Rows) or not isinstance(data.source, tuple):
        raise ValueError(
            "an anchored ensemble needs tensors (x, y), to add noise to y, got "
            f"{type(data).__name__}; give tensors, or anchored=False"
        )
    x, y = data.source
    priors: dict[str, Prior] = {}
    for name, anchor in draw_anchor(target, seed).items():
        prior = target.priors[name]
        if not isinstance(prior, BoundNormal):
            raise TypeError(f"an anchored ensemble needs a Normal prior of {name!r}")
        log_scale = prior.log_scale.detach().expand(prior.shape)
        mean = torch.lerp(prior.mean.detach().expand(prior.shape), anchor, spread)
        priors[escape(name)] = DensityPrior(BoundNormal(prior.shape, mean, log_scale))
    targets = draw_targets(target, y, seed)
    if targets.is_floating_point():
        targets = torch.lerp(y, targets, spread)
    rows = Rows((x, targets), data.index, data.batch_size)
    return replace(target, prior=priors), rows


class MemberFolder:
    """The checkpoint of an ensemble: a file that identifies the run, and files of its members.

    Args:
        path: the folder, which is created.
        run_identity: must be that of an earlier run in the folder.

    Raises:
        FileError: for a folder that cannot be written, or of another run.
    """

    def __init__(self, path: StrPath, run_identity: dict[str, Any]) -> None:
        self.path = Path(path)
        if not self.path.parent.is_dir():
            raise FileError(
                f"cannot write {path}: the folder {self.path.parent} does not exist; "
                "create it first"
            )
        if self.path.exists() and not self.path.is_dir():
            raise FileError(
                f"{path} is a file; the checkpoint of an ensemble is a folder: pass another name"
            )
        self.path.mkdir(exist_ok=True)
        identity_file = Checkpoint(self.path / "ensemble.run", run_identity)
        if identity_file.read() is None:
            if any(self.path.glob("member-*")):
                raise FileError(
                    f"{path} contains members without ensemble.run, so that their run is unknown; "
                    "use another folder"
                )
            identity_file.write({}, {})

    def posterior_path(self, member: int) -> Path:
        """Return the file of a finished member.

        Args:
            member: its number.
        """
        return self.path / f"member-{member:03d}.bayou"

    def run_path(self, member: int) -> Path:
        """Return the checkpoint of an unfinished member; a method may add suffixes.

        Args:
            member: its number.
        """
        return self.path / f"member-{member:03d}.run"

    def run_files(self, member: int) -> Iterator[Path]:
        """Return the files of the run of a member.

        Args:
            member: its number.
        """
        return self.path.glob(f"{self.run_path(member).name}*")

    def remove_run(self, member: int) -> None:
        """Remove the run of a finished member.

        Args:
            member: its number.
        """
        for path in self.run_files(member):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def load(self, member: int, net: nn.Module) -> Posterior | None:
        """Load a finished member.

        Args:
            member: its number.
            net: the network.

        Returns:
            None if it is unfinished, or if only its run can restore it (files cannot store
            functions).
        """
        if not self.posterior_path(member).exists():
            return None
        try:
            return load(self.posterior_path(member), net)
        except FileError:
            if any(self.run_files(member)):
                return None
            raise

    def save(self, member: int, posterior: Posterior, net: nn.Module) -> None:
        """Save a finished member and remove its run, unless only that can restore the member.

        Args:
            member: its number.
            posterior: of the member.
            net: the network.
        """
        posterior.save(self.posterior_path(member))
        try:
            load(self.posterior_path(member), net)
        except FileError:
            return
        self.remove_run(member)


def combine(members: dict[int, Posterior], target: Target, stopped: str = "finished") -> Posterior:
    """Combine members in one posterior: single points as a stack, others as a mixture.

    Args:
        members: by number.
        target: has the network of the posterior.
        stopped: why the run ended.
    """
    numbers = sorted(members)
    posteriors = [members[number] for number in numbers]
    history = [
        {"member": float(number), **record}
        for number in numbers
        for record in members[number].history
    ]
    points = [p for p in posteriors if isinstance(p, Empirical) and p.draws == 1]
    all_are_points = len(points) == len(posteriors)
    posterior: Posterior
    if all_are_points and len({frozenset(point.stack) for point in points}) == 1:
        own_target = replace(points[0].target, net=target.net)
        tensors = stack([_point_tensors(point, points) for point in points])
        posterior = Empirical(own_target, points[0].network, tensors, history)
    else:
        posterior = Mixture(posteriors, history)
    posterior.stopped = stopped
    return posterior


def _point_tensors(point: Empirical, points: list[Empirical]) -> Params:
    """Return weights, buffers that differ between members, and learned noise of one member."""
    first_buffers = points[0].network.buffers()
    buffers = {
        name: value
        for name, value in point.network.buffers().items()
        if any(not torch.equal(p.network.buffers()[name], first_buffers[name]) for p in points)
    }
    noise = {
        f"{NOISE}{name}": value.detach()
        for name, value in point.target.likelihood.named_parameters()
    }
    weights = {name: value[0] for name, value in point.stack.items()}
    rest = {name: value for name, value in (buffers | noise).items() if name not in weights}
    return weights | rest

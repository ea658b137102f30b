"""The run of an ensemble: its members one after another, and their posteriors as one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from glob import escape
from typing import TYPE_CHECKING

import torch

from bayou.core.params import Params, stack
from bayou.core.progress import Show, stage
from bayou.inference.members import draw_anchor, draw_targets, fixed_normal_priors, member_target
from bayou.methods.member_folder import MemberFolder
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.mixture import Mixture
from bayou.posteriors.posterior import NOISE, Posterior
from bayou.priors import BoundNormal, DensityPrior, Prior
from bayou.training.data import Data, Rows
from bayou.training.jobs import PendingResult, wait_for

if TYPE_CHECKING:
    from bayou.methods.ensemble import Ensemble

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


@dataclass(frozen=True)
class EnsembleRun:
    """The members of one ensemble.

    Args:
        method: the settings.
        target: network, likelihood and prior.
        data: all rows.
        seeds: of the members.
        folder: the checkpoint; None for none.
    """

    method: Ensemble
    target: Target
    data: Data
    seeds: list[int]
    folder: MemberFolder | None

    def train_all(self, progress: Show, jobs: Sequence[PendingResult] = ()) -> Posterior:
        """Train the members, or wait for the jobs that do, and combine them.

        Args:
            progress: whether, or where, to show a line of progress.
            jobs: one for each member; none by default.
        """
        members = dict[int, Posterior]()
        failures = dict[int, str]()
        cause = None
        stopped = "finished"
        try:
            for member in range(len(self.seeds)):
                try:
                    if jobs:
                        # its file is in the folder then; otherwise the member is trained here
                        wait_for(jobs[member])
                    posterior = self.train(member, progress)
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
        ensemble = combine(members, self.target, stopped) if members else None
        if failures or ensemble is None:
            reasons = "; ".join(f"member {member}: {why}" for member, why in failures.items())
            place = "" if self.folder is None else f" and in the folder {self.folder.path}"
            raise EnsembleError(
                f"{len(failures)} of {len(self.seeds)} members did not finish. {reasons}. "
                f"The finished ones are in this error's posterior{place}",
                failures,
                ensemble,
            ) from cause
        return ensemble

    def train_in_worker(self, member: int) -> None:
        """Train a member in a worker: its file is in the folder then.

        Args:
            member: its number.
        """
        self.train(member, False)

    def train(self, member: int, progress: Show) -> Posterior:
        """Return one member, from its file or trained.

        Args:
            member: its number.
            progress: whether, or where, to show a line of progress.
        """
        folder = self.folder
        net = self.target.net
        file = None
        if folder is not None:
            saved = folder.load(member, net)
            if saved is not None:
                folder.remove_run(member)
                return saved
            file = folder.run_path(member)
        method = self.method
        seed = self.seeds[member]
        target = member_target(self.target, method.init, seed)
        data = self.data
        if method.anchored:
            target, data = anchor_member(target, data, seed, float(method.anchored))
        with stage(member + 1, method.n, unit="member"):
            posterior = method.of.fit(target, data, seed=seed, checkpoint=file, progress=progress)
        # the buffers of this network were not reset
        posterior.target = replace(posterior.target, net=net)
        if method.anchored:
            posterior.target = replace(posterior.target, prior=self.target.prior)
        if folder is not None and posterior.stopped != "interrupted":
            folder.save(member, posterior, net)
        return posterior


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
    anchors = draw_anchor(target, seed)
    for name, prior in fixed_normal_priors(target).items():
        log_scale = prior.log_scale.detach().expand(prior.shape)
        mean = torch.lerp(prior.mean.detach().expand(prior.shape), anchors[name], spread)
        priors[escape(name)] = DensityPrior(BoundNormal(prior.shape, mean, log_scale))
    targets = draw_targets(target, y, seed)
    if targets.is_floating_point():
        targets = torch.lerp(y, targets, spread)
    rows = data.with_source((x, targets))
    return replace(target, prior=priors), rows


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
        posterior = Mixture(posteriors, history=history)
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

"""Continual learning: the posterior of each task is the prior of the next (VCL, Nguyen 2018)."""

from __future__ import annotations

import copy
import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, match
from bayou.core.progress import Show
from bayou.inference.data_checks import check_first_batch
from bayou.likelihoods import Categorical, Likelihood
from bayou.methods import VI, Method
from bayou.network import forward_inputs
from bayou.network.target import PriorRules, Target, prior_specs
from bayou.posteriors import Empirical, Posterior
from bayou.posteriors.state import with_state
from bayou.priors import BoundNormal, Normal, Prior
from bayou.training.data import Data, Rows, as_data, join_batches
from bayou.training.seeds import as_int_seed, part_seed

Selection = Literal["random", "k-center"]
MAX_COMBINED_DRAWS = 100  # of the body of the last task with a head of an earlier one


@final
@dataclass(frozen=True)
class Continual:
    """The posteriors of a sequence of tasks.

    Args:
        posteriors: one after each task, of this and all earlier tasks.
        final: the posterior to predict each task with after the last one; without heads it is the
            same for all.
        coresets: the rows (x, y) that were held out of each task; empty without coresets.
        heads: the names of the tensors that belong to each task only.
    """

    posteriors: list[Posterior]
    final: list[Posterior]
    coresets: list[tuple[Any, Tensor]]
    heads: list[set[str]] = field(default_factory=list)

    def after(self, t: int) -> list[Posterior]:
        """Return the posteriors to predict tasks 0 .. t with after task t, before any coreset.

        Each combines the head of its task with the body after task t.

        Args:
            t: the number of the task, from 0.
        """
        last = self.posteriors[t]
        posteriors = []
        for task in range(t + 1):
            posteriors.append(_attach_head(self.posteriors[task], last, self.heads[task]))
        return posteriors


def continual(
    net: nn.Module | Sequence[nn.Module],
    tasks: Sequence[Any],
    method: Method | None = None,
    *,
    likelihood: Likelihood | None = None,
    prior: PriorRules | None = None,
    heads: str | Sequence[str] = (),
    coreset: int | None = None,
    selection: Selection = "random",
    seed: int = 0,
    checkpoint: str | os.PathLike[str] | None = None,
    progress: Show = True,
) -> Continual:
    """Fit a network to data sets one after the other, without the rows of the earlier ones.

    The posterior of each task is the prior of the next: q_t(w) ≈ q_{t−1}(w)·p(D_t | w)/Z_t for
    data sets D_1, D_2, .... Each fit starts at the mean of the posterior before. Ctrl-C ends with
    the tasks so far.

    Parameters that belong to one task only, such as its output layer, are its head. They are reset
    for every task, with ``prior``, to the network's own values in another order, since tasks that
    start with the same head compete for its features. A coreset is held out of the rows of each
    task; in the end all coresets are fitted with the last posterior as the prior, for predictions
    only (with heads, separately for each task).

    Args:
        net: the network, or one for each task, for heads of different sizes or initial values. All
            other parameters must have the same shape in all of them. It is not changed.
        tasks: data sets, each as ``bayou.fit`` takes them.
        method: any method whose posterior has ``as_prior``: ``VI(MeanField())`` by default, IVON,
            or ``Laplace(structure="diagonal")`` (online Laplace).
        likelihood: p(y | f), as ``bayou.fit`` takes it; ``Categorical()`` by default.
        prior: the prior of the first task and of new heads, as ``bayou.fit`` takes it.
        heads: patterns of the names of parameters that belong to one task only.
        coreset: how many rows of each task are held out; None: none.
        selection: of the coreset: "random", or "k-center", each row the farthest in x from those
            before (Gonzalez 1985).
        seed: the same seed gives the same posteriors.
        checkpoint: the beginning of the names of checkpoint files, one for each fit.
        progress: whether to show progress, or a function that is called with it.

    Returns:
        The posterior after each task, and the one to predict each task with after the last.

    Raises:
        ValueError: if the method is not a method, there are no tasks, the networks do not agree
            outside the heads, a task does not fit its network, or a coreset is too large.

    Example:
        >>> tasks = [(x_first, y_first), (x_second, y_second)]
        >>> posteriors = bayou.continual(net, tasks, heads="head.*")
        >>> posteriors.final[0].predict(x_first)

    References:
        Nguyen, Li, Bui, Turner: Variational continual learning, ICLR 2018.
    """
    seed = as_int_seed(seed)
    method = method or VI()
    likelihood = likelihood or Categorical()
    if not isinstance(method, Method):
        raise ValueError(f"method must be a Method such as VI(MeanField()), got {method!r}")
    if not isinstance(tasks, Sequence) or not tasks:
        raise ValueError(
            f"tasks must be a list of data sets, got {type(tasks).__name__}; "
            "a single one is [(x, y)]"
        )
    nets = [net] * len(tasks) if isinstance(net, nn.Module) else list(net)
    data = [as_data(task, method.batch_size) for task in tasks]
    patterns = (heads,) if isinstance(heads, str) else heads
    head_names = _match_heads(nets, patterns, len(data))
    nets = _reset_repeated_heads(nets, head_names, seed)
    for number, (task_net, rows) in enumerate(zip(nets, data, strict=True)):
        _check_task(Target.build(task_net, likelihood, prior, rows.n), rows, number)
    coresets: list[Rows] = []
    if coreset is not None:
        splits = [
            _split_coreset(rows, coreset, selection, part_seed(seed, "coreset", t), t)
            for t, rows in enumerate(data)
        ]
        data = [rest for rest, _ in splits]
        coresets = [held_out for _, held_out in splits]
    sequence = _TaskSequence(
        nets, head_names, method, likelihood, prior, seed, checkpoint, progress
    )
    return sequence.fit(data, coresets)


@dataclass
class _TaskSequence:
    """The settings that all fits of a sequence of tasks have in common.

    Args:
        nets: the network of each task.
        heads: the names of the tensors that belong to each task only.
        method: fits each task.
        likelihood: of all tasks.
        prior: of the first task and of new heads.
        seed: of the whole sequence.
        checkpoint: the beginning of the names of checkpoint files.
        progress: whether to show progress.
    """

    nets: list[nn.Module]
    heads: list[set[str]]
    method: Method
    likelihood: Likelihood
    prior: PriorRules | None
    seed: int
    checkpoint: str | os.PathLike[str] | None
    progress: Show

    def fit(self, data: list[Data], coresets: list[Rows]) -> Continual:
        """Fit the tasks one after the other, and then the coresets, if there are any."""
        posteriors: list[Posterior] = []
        for t, rows in enumerate(data):
            body = posteriors[-1] if t else None
            posteriors.append(self._fit_task(t, rows, body, None, f"task{t}"))
            if posteriors[-1].stopped == "interrupted":
                break
        fitted = Continual(posteriors, [], [], self.heads)
        if coresets and posteriors[-1].stopped != "interrupted":
            final = self._fit_coresets(posteriors, coresets)
        else:
            final = fitted.after(len(posteriors) - 1)
        count = len(posteriors)
        coreset_rows = [_all_rows(rows) for rows in coresets[:count]]
        return Continual(posteriors, final, coreset_rows, self.heads[:count])

    def _fit_task(
        self,
        t: int,
        rows: Data,
        body: Posterior | None,
        head: Posterior | None,
        name: str,
    ) -> Posterior:
        """Fit the network of task t, with the posteriors of body and head as the prior, if any."""
        net = self.nets[t]
        rules = self.prior
        if body is not None:
            new_head_prior = self.prior or Normal(1.0)
            net, rules = _continue_from(net, body, head, self.heads[t], new_head_prior)
        target = Target.build(net, self.likelihood, rules, rows.n)
        file = None if self.checkpoint is None else f"{os.fspath(self.checkpoint)}.{name}"
        return self.method.fit(
            target,
            rows,
            seed=part_seed(self.seed, name),
            checkpoint=file,
            progress=self.progress,
        )

    def _fit_coresets(self, posteriors: list[Posterior], coresets: list[Rows]) -> list[Posterior]:
        """Fit the coresets with the last posterior as the prior: one posterior for each task."""
        last = posteriors[-1]
        count = len(posteriors)
        if self.heads[0]:
            return [
                self._fit_task(t, coresets[t], last, posteriors[t], f"coreset{t}")
                for t in range(count)
            ]
        rows = as_data(join_batches(map(_all_rows, coresets)), self.method.batch_size)
        return [self._fit_task(count - 1, rows, last, None, "coreset")] * count


def _match_heads(nets: list[nn.Module], patterns: Sequence[str], task_count: int) -> list[set[str]]:
    """Return the names of each task's head, and check that the networks agree outside of it."""
    if len(nets) != task_count:
        raise ValueError(
            f"{len(nets)} networks for {task_count} tasks; give one for each, or one for all"
        )
    rules = dict.fromkeys(patterns, True)
    heads: list[set[str]] = []
    bodies: list[dict[str, tuple[int, ...]]] = []
    for net in nets:
        shapes = {name: tuple(value.shape) for name, value in net.named_parameters()}
        matches = match(shapes, rules, default=False)
        head = {name for name, is_head in matches.items() if is_head}
        heads.append(head)
        bodies.append({name: shape for name, shape in shapes.items() if name not in head})
    for t, body in enumerate(bodies):
        if not body:
            raise ValueError(
                f"heads={list(patterns)} match the whole network: tasks would share no parameters"
            )
        for name in {*body, *bodies[0]}:
            if body.get(name) != bodies[0].get(name):
                raise ValueError(
                    f"{name!r} is {bodies[0].get(name, 'not')} in the network of task 0 and "
                    f"{body.get(name, 'not')} in that of task {t}; name what belongs to one task "
                    "with heads=, the rest must agree"
                )
    return heads


def _reset_repeated_heads(
    nets: list[nn.Module], heads: list[set[str]], seed: int
) -> list[nn.Module]:
    """Return the networks with new heads where a network is that of an earlier task as well."""
    task_nets = list(nets)
    for t, net in enumerate(nets):
        if net in nets[:t]:
            task_nets[t] = _permute_head(net, heads[t], part_seed(seed, "head", t))
    return task_nets


@torch.no_grad()
def _permute_head(net: nn.Module, head: set[str], seed: int) -> nn.Module:
    """Return a copy with the values of its head in another order, so that their scale is kept."""
    if not head:
        return net
    permuted = copy.deepcopy(net)
    for name in head:
        value = permuted.get_parameter(name)
        order = rng.permutation(value.numel(), part_seed(seed, name)).to(value.device)
        value.copy_(value.flatten()[order].view_as(value))
    return permuted


def _check_task(target: Target, rows: Data, number: int) -> None:
    """Check that a network accepts the rows of its task, before the first task is fitted."""
    start = target.start()
    try:
        check_first_batch(target, rows, lambda *inputs: target.network.evaluate(start, *inputs))
    except ValueError as error:
        raise ValueError(f"task {number}: {error}") from error


def _continue_from(
    net: nn.Module,
    body: Posterior,
    head: Posterior | None,
    head_names: set[str],
    new_head_prior: PriorRules,
) -> tuple[nn.Module, dict[str, Prior]]:
    """Return the network at the means of two posteriors, and these posteriors as its priors.

    Args:
        net: the network of the next task.
        body: the posterior of the parameters outside the head.
        head: the posterior of the head; None for a new head.
        head_names: the names of the parameters of the head.
        new_head_prior: the prior of a new head.
    """
    names = {name for name, _ in net.named_parameters()}
    rules = prior_specs(new_head_prior, net)
    start: Params = {}
    _continue_tensors(body, names - head_names, rules, start)
    if head is not None:
        _continue_tensors(head, names & head_names, rules, start)
    return with_state(net, start), {glob.escape(name): rule for name, rule in rules.items()}


def _continue_tensors(
    posterior: Posterior, names: set[str], rules: dict[str, Prior], start: Params
) -> None:
    """Add priors and initial values of some tensors, those of a posterior."""
    priors = match(posterior.template(), posterior.as_prior())
    rules |= {name: prior for name, prior in priors.items() if name in names}
    center = _center(posterior, priors)
    start |= {name: value for name, value in center.items() if name in names}


def _center(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """Return the mean, or that of a Normal approximation where it has no closed form."""
    try:
        return posterior.mean()
    except ValueError:
        means: Params = {}
        for name, prior in priors.items():
            density = getattr(prior, "density", None)
            if isinstance(density, BoundNormal):
                means[name] = density.mean
        return posterior.template() | means


def _attach_head(posterior: Posterior, last: Posterior, head: set[str]) -> Posterior:
    """Return the head of a task's posterior with the body of the last, which are independent."""
    if posterior is last or not head:
        return last
    exact = last.with_tensors_of(posterior, head)
    if exact is not None:
        return exact
    body_draws = {
        name: value
        for name, value in last.sample(MAX_COMBINED_DRAWS, seed=0).items()
        if name not in head
    }
    draws = posterior.sample(MAX_COMBINED_DRAWS, seed=1)
    shared_draws = {name: body_draws[name] for name in draws if name in body_draws}
    return Empirical(posterior.target, posterior.network, draws | shared_draws)


def _split_coreset(
    rows: Data, count: int, selection: Selection, seed: int, number: int
) -> tuple[Rows, Rows]:
    """Return the rows of a task without its coreset, and the coreset."""
    if selection not in ("random", "k-center"):
        raise ValueError(f"selection must be 'random' or 'k-center', got {selection!r}")
    if not isinstance(rows, Rows):
        raise ValueError(
            "a coreset needs tensors or a Dataset, got a DataLoader; split its data yourself"
        )
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < rows.n:
        raise ValueError(f"task {number} has {rows.n} rows, too few for a coreset of {count!r}")
    if selection == "random":
        indices = rng.permutation(rows.n, seed)[:count].cpu()
    else:
        indices = k_center(_all_rows(rows)[0], count, seed).cpu()
    is_fitted = torch.ones(rows.n, dtype=torch.bool).index_fill(0, indices, False)
    rest = rows.at(rows.index[is_fitted])
    coreset = rows.at(rows.index[indices.sort().values])
    return rest, coreset


def k_center(x: object, count: int, seed: rng.Seed = 0) -> Tensor:
    """Select rows, each the farthest from all before, from a random one on (Gonzalez 1985).

    The largest distance of a row to a selected one is at most twice the least possible.

    Args:
        x: inputs (B, ...), or several of them.
        count: how many rows to select.
        seed: of the first row.

    Returns:
        The indices of the rows, (count,).
    """
    tensors = [item for item in forward_inputs(x) if isinstance(item, Tensor)]
    points = torch.cat([item.reshape(len(item), -1).double() for item in tensors], 1)
    indices = [int(rng.permutation(len(points), seed)[0])]
    distance = torch.linalg.vector_norm(points - points[indices[0]], dim=1)
    while len(indices) < count:
        indices.append(int(distance.argmax()))
        new_distance = torch.linalg.vector_norm(points - points[indices[-1]], dim=1)
        distance = distance.minimum(new_distance)
        distance[indices] = -1.0  # duplicate rows count separately
    return torch.tensor(indices)


def _all_rows(rows: Rows) -> tuple[Any, Tensor]:
    """Return all rows as one batch."""
    return next(rows.with_batch_size(rows.n).epoch())

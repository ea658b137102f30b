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
from bayou.inference.first_batch import check_first_batch
from bayou.likelihoods import Categorical, Likelihood
from bayou.methods import VI, Method
from bayou.network import forward_inputs
from bayou.posteriors import Empirical, Posterior
from bayou.posteriors.state import with_state
from bayou.priors import BoundNormal, Normal, Prior
from bayou.target import PriorRules, Target, prior_specs
from bayou.training.data import Data, Rows, as_data
from bayou.training.rows import join_batches
from bayou.training.seeds import as_int_seed, part_seed

Selection = Literal["random", "k-center"]
COMBINED_DRAWS = 100  # of the body of the last task with a head of an earlier one


@final
@dataclass(frozen=True)
class Continual:
    """The result of a sequence of tasks.

    ``posteriors``: one after each task, of this and all earlier tasks. ``final``: the posterior to
    predict each task with after the last one; without heads it is the same for all. ``coresets``:
    the rows (x, y) held out of each task.
    """

    posteriors: list[Posterior]
    final: list[Posterior]
    coresets: list[tuple[Any, Tensor]]
    heads: list[set[str]] = field(default_factory=list)  # the names of each task's own tensors

    def after(self, t: int) -> list[Posterior]:
        """The posteriors to predict tasks 0 .. t with after task t, before any coreset: own heads
        on its body.
        """
        last = self.posteriors[t]
        return [
            _joined(self.posteriors[s], last, self.heads[s]) if self.heads[s] else last
            for s in range(t + 1)
        ]


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
    """q_t(w) ≈ q_{t−1}(w)·p(D_t | w)/Z_t for data sets D_1, D_2, ... (Nguyen 2018), by any method
    with ``as_prior``.

    ``tasks``: data as ``bayou.fit`` takes them. ``method``: ``VI(MeanField())`` by default, or
    IVON, or ``Laplace(structure="diagonal")`` (online Laplace). Each run starts at the mean of the
    one before.

    ``heads``: patterns of parameters that belong to one task only: they are reset for every task,
    with ``prior``, to the network's own values in another order (tasks that start with the same
    head compete for its features). For heads of different sizes or initial values, give a network
    for each task; all other parameters must have the same shape in all of them. ``final`` has for
    each task its own head on the body of the last.

    ``coreset``: the number of rows of each task that are held out; in the end they are fitted with
    the last posterior as prior, for predictions only (with heads, separately for each task).
    ``selection``: rows at random, or "k-center", each the farthest in x from those before (Gonzalez
    1985).

    ``checkpoint``: the beginning of the names of files, one for each run. Ctrl-C ends with the
    tasks so far.

    Args:
        net: the network, or one for each task. It is not changed.
        likelihood: p(y | f), as ``bayou.fit`` takes it.
        seed: the same seed gives the same posteriors.
        progress: whether to show progress, or a function that is called with it.
    """
    seed = as_int_seed(seed)
    method, likelihood = (
        VI() if method is None else method,
        Categorical() if likelihood is None else likelihood,
    )
    if not isinstance(method, Method):
        raise ValueError(f"method must be a Method such as VI(MeanField()), got {method!r}")
    if not isinstance(tasks, Sequence) or not tasks:
        raise ValueError(
            f"tasks must be a list of data sets, got {type(tasks).__name__}; a single one is [(x, y)]"
        )
    nets = [net] * len(tasks) if isinstance(net, nn.Module) else list(net)
    data = [as_data(task, method.batch_size) for task in tasks]
    own = _heads(nets, (heads,) if isinstance(heads, str) else heads, len(data))
    nets = [
        _fresh(part, own[t], part_seed(seed, "head", t)) if part in nets[:t] else part
        for t, part in enumerate(nets)
    ]
    for number, (part, rows) in enumerate(zip(nets, data, strict=True)):
        _check_task(Target.build(part, likelihood, prior, rows.n), rows, number)
    coresets: list[Rows] = []
    if coreset is not None:
        split = [
            _held(rows, coreset, selection, part_seed(seed, "coreset", t), t)
            for t, rows in enumerate(data)
        ]
        data, coresets = [rest for rest, _ in split], [held for _, held in split]

    def run(
        t: int, rows: Data, before: Posterior | None, head: Posterior | None, name: str
    ) -> Posterior:
        """Task t's network on some rows, with the posteriors of its body and its head as the prior,
        if any.
        """
        start, rules = nets[t], prior
        if before is not None:
            start, rules = _continued(
                nets[t], before, head, own[t], Normal(1.0) if prior is None else prior
            )
        target = Target.build(start, likelihood, rules, rows.n)
        file = None if checkpoint is None else f"{os.fspath(checkpoint)}.{name}"
        return method.fit(
            target, rows, seed=part_seed(seed, name), checkpoint=file, progress=progress
        )

    posteriors: list[Posterior] = []
    for t, rows in enumerate(data):
        posteriors.append(run(t, rows, posteriors[-1] if t else None, None, f"task{t}"))
        if posteriors[-1].stopped == "interrupted":
            break
    last, known = posteriors[-1], range(len(posteriors))
    final = Continual(posteriors, [], [], own).after(len(posteriors) - 1)
    if coresets and last.stopped != "interrupted":
        if own[0]:
            final = [run(t, coresets[t], last, posteriors[t], f"coreset{t}") for t in known]
        else:
            final = [
                run(
                    known[-1],
                    as_data(join_batches(map(_taken, coresets)), method.batch_size),
                    last,
                    None,
                    "coreset",
                )
            ] * len(known)
    return Continual(
        posteriors, final, [_taken(rows) for rows in coresets[: len(known)]], own[: len(known)]
    )


def _heads(nets: list[nn.Module], patterns: Sequence[str], tasks: int) -> list[set[str]]:
    """The names of each task's own parameters; a ValueError if the others are not the same in all
    networks.
    """
    if len(nets) != tasks:
        raise ValueError(
            f"{len(nets)} networks for {tasks} tasks; give one for each, or one for all"
        )
    shapes = [{name: tuple(value.shape) for name, value in net.named_parameters()} for net in nets]
    rules = dict.fromkeys(patterns, True)
    own = [
        {name for name, head in match(each, rules, default=False).items() if head}
        for each in shapes
    ]
    bodies = [
        {name: shape for name, shape in each.items() if name not in own[t]}
        for t, each in enumerate(shapes)
    ]
    for t, body in enumerate(bodies):
        if not body:
            raise ValueError(
                f"heads={list(patterns)} match the whole network: tasks would share no parameters"
            )
        for name in {*body, *bodies[0]}:
            if body.get(name) != bodies[0].get(name):
                raise ValueError(
                    f"{name!r} is {bodies[0].get(name, 'not')} in the network of task 0 and {body.get(name, 'not')} in "
                    f"that of task {t}; name what belongs to one task with heads=, the rest must agree"
                )
    return own


@torch.no_grad()
def _fresh(net: nn.Module, heads: set[str], seed: int) -> nn.Module:
    """A copy with the values of its heads permuted: of the same scale as those of the first task,
    but different.
    """
    if not heads:
        return net
    fresh = copy.deepcopy(net)
    for name in heads:
        value = fresh.get_parameter(name)
        order = rng.permutation(value.numel(), part_seed(seed, name)).to(value.device)
        value.copy_(value.flatten()[order].view_as(value))
    return fresh


def _check_task(target: Target, rows: Data, number: int) -> None:
    """Check all tasks before the first one is fitted."""
    start = target.start()
    try:
        check_first_batch(target, rows, lambda *inputs: target.network.evaluate(start, *inputs))
    except ValueError as error:
        raise ValueError(f"task {number}: {error}") from error


def _continued(
    net: nn.Module, body: Posterior, head: Posterior | None, own: set[str], prior: PriorRules
) -> tuple[nn.Module, dict[str, Prior]]:
    """The network at the means of posteriors of its body and head, and these as priors; a head
    without one is new.
    """
    names = [name for name, _ in net.named_parameters()]
    rules = prior_specs(prior, net)
    start: Params = {}
    for posterior, mine in ((body, False), (head, True)):
        if posterior is not None:
            picked = {name for name in names if (name in own) is mine}
            priors = match(posterior.like(), posterior.as_prior())
            rules |= {name: prior for name, prior in priors.items() if name in picked}
            start |= {
                name: value for name, value in _center(posterior, priors).items() if name in picked
            }
    return with_state(net, start), {glob.escape(name): rule for name, rule in rules.items()}


def _center(posterior: Posterior, priors: Mapping[str, Prior]) -> Params:
    """The mean; for a family without one in closed form, that of its Normal approximation."""
    try:
        return posterior.mean()
    except ValueError:
        normal = {n: getattr(prior, "density", None) for n, prior in priors.items()}
        return posterior.like() | {
            n: prior.mean for n, prior in normal.items() if isinstance(prior, BoundNormal)
        }


def _joined(own: Posterior, last: Posterior, heads: set[str]) -> Posterior:
    """The head of a task with the body of the last, which are independent."""
    if own is last:
        return last
    exact = last.joined(own, heads)
    if exact is not None:
        return exact
    body = {
        name: value
        for name, value in last.sample(COMBINED_DRAWS, seed=0).items()
        if name not in heads
    }
    stack = own.sample(COMBINED_DRAWS, seed=1)
    return Empirical(
        own.target, own.network, stack | {name: body[name] for name in stack if name in body}
    )


def _held(
    rows: Data, count: int, selection: Selection, seed: int, number: int
) -> tuple[Rows, Rows]:
    """The rows of a task without its coreset, and the coreset."""
    if selection not in ("random", "k-center"):
        raise ValueError(f"selection must be 'random' or 'k-center', got {selection!r}")
    if not isinstance(rows, Rows):
        raise ValueError(
            "a coreset needs tensors or a Dataset, got a DataLoader; split its data yourself"
        )
    if isinstance(count, bool) or not isinstance(count, int) or not 0 < count < rows.n:
        raise ValueError(f"task {number} has {rows.n} rows, too few for a coreset of {count!r}")
    picked = (
        rng.permutation(rows.n, seed)[:count]
        if selection == "random"
        else k_center(_taken(rows)[0], count, seed)
    )
    rest = torch.ones(rows.n, dtype=torch.bool).index_fill(0, picked.cpu(), False)
    size = rows.batch_size
    return Rows(rows.source, rows.index[rest], size), Rows(
        rows.source, rows.index[picked.cpu().sort().values], size
    )


def k_center(x: Any, count: int, seed: rng.Seed = 0) -> Tensor:
    """Indices of rows, each the farthest from all before (Gonzalez 1985): within twice the least
    covering radius.
    """
    tensors = [item for item in forward_inputs(x) if isinstance(item, Tensor)]
    points = torch.cat([item.reshape(len(item), -1).double() for item in tensors], 1)
    chosen = [int(rng.permutation(len(points), seed)[0])]
    distance = torch.linalg.vector_norm(points - points[chosen[0]], dim=1)
    while len(chosen) < count:
        chosen.append(int(distance.argmax()))
        distance = distance.minimum(torch.linalg.vector_norm(points - points[chosen[-1]], dim=1))
        distance[chosen] = -1.0  # duplicate rows count separately
    return torch.tensor(chosen)


def _taken(rows: Rows) -> tuple[Any, Tensor]:
    return next(rows.cut(rows.n).ordered())

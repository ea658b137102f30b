"""A plan: what to fit to which rows, and what was compared to decide it."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from bayou.core.files import StrPath
from bayou.core.progress import Show, stage
from bayou.inference.method import Method
from bayou.network.target import Target
from bayou.posteriors import Posterior
from bayou.posteriors.posterior import Stage
from bayou.training.data import Data

if TYPE_CHECKING:
    from bayou.select.recipes import Recipe


@final
@dataclass(frozen=True)
class Plan:
    """One fit, with settings that were selected on held-out rows.

    ``print(plan)`` describes it in words. A changed plan is fitted like the plan itself::

        plan = bayou.select.plan("mnf", target, rows, seed=0)
        longer = dataclasses.replace(plan, method=dataclasses.replace(plan.method, steps=2000))
        posterior = longer.fit()

    Args:
        target: the network, at the weights where the method starts, with the selected likelihood
            and prior.
        method: the method with its selected settings.
        rows: the rows that it is fitted to.
        seed: of the search and, unless another one is given, of the fit.
        start: the mode at which the method starts; None for the network as given.
        stages: what was compared, one record for each stage of the search:
            {"stage", "seconds", "trials"}.
        decisions: what was selected, a sentence for each decision.
        choice: why this method or these layers were selected, if there were several.
        progress_stage: number, count and name of the stage of the fit in progress lines.
        narrowed: the recipe with those decisions that other rows of the same table share, so that
            a search for them is shorter; None for the recipe that made the plan.
    """

    target: Target = field(repr=False)
    method: Method
    rows: Data = field(repr=False)
    seed: int = 0
    start: Posterior | None = field(default=None, repr=False)
    stages: tuple[Stage, ...] = field(default=(), repr=False)
    decisions: tuple[str, ...] = ()
    choice: str = ""
    progress_stage: tuple[int, int, str] | None = field(default=None, repr=False)
    narrowed: Recipe | None = field(default=None, repr=False, compare=False)

    @property
    def description(self) -> str:
        """The decisions as one text, separated by semicolons."""
        return "; ".join(self.decisions)

    def fit(
        self,
        *,
        seed: int | None = None,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Fit the method to the target, once.

        Args:
            seed: another seed than that of the plan.
            checkpoint: a file from which an interrupted run continues.
            progress: whether to show progress, or a function that is called with it.

        Returns:
            The posterior, whose ``plan``, ``choice`` and ``selection`` say how it was selected.
        """
        options: dict[str, Any] = {
            "seed": self.seed if seed is None else seed,
            "checkpoint": checkpoint,
            "progress": progress,
        }
        if self.progress_stage is None:
            posterior = self.method.fit(self.target, self.rows, **options)
        else:
            with stage(*self.progress_stage):
                posterior = self.method.fit(self.target, self.rows, **options)
        posterior.selection = [*self.stages, *posterior.selection]
        if isinstance(self.method, Fitted):  # whose choice the plan has
            posterior.choice = self.choice or posterior.choice
        else:
            posterior.choice = "; ".join(filter(None, (self.choice, posterior.choice)))
        posterior.plan = self.description
        return posterior

    def __str__(self) -> str:
        lines = [f"fit {self.method} to {self.rows.n:,} rows"]
        lines += [f"- {decision}" for decision in self.decisions]
        if self.choice:
            lines.append(f"- {self.choice}")
        for record in self.stages:
            trials = len(record["trials"])
            lines.append(f"- {record['stage']}: {trials} compared in {record['seconds']:.1f} s")
        return "\n".join(lines)


@final
@dataclass(frozen=True)
class Fitted(Method):
    """A method whose posterior is a result of the search that selected its settings.

    The modes of a regression are found by the search itself, and with many rows a fit that was
    judged is not repeated.

    Args:
        method: the method, which is fitted if the target is changed; None after Ctrl-C.
        posterior: its posterior.
    """

    method: Method | None
    posterior: Posterior = field(repr=False, compare=False)

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Return the posterior, or fit the method to another target."""
        if target is not self.posterior.target:
            if self.method is None:
                raise ValueError("the search was interrupted before it had selected a method")
            return self.method.fit(
                target, data, seed=seed, checkpoint=checkpoint, progress=progress
            )
        posterior = copy.copy(self.posterior)
        posterior.selection = ()  # the plan has its stages
        return posterior

    @classmethod
    def plan(cls, method: Method | None, posterior: Posterior, rows: Data, seed: int) -> Plan:
        """Return the plan of a method that the search has fitted.

        Args:
            method: the method; None after Ctrl-C.
            posterior: its posterior.
            rows: the rows that it was fitted to.
            seed: of the search.
        """
        stages = tuple(posterior.selection)
        choice = posterior.choice
        return Plan(
            posterior.target, cls(method, posterior), rows, seed, stages=stages, choice=choice
        )


class SearchInterrupted(Exception):
    """Ctrl-C during a search.

    Args:
        posterior: what there is so far: a mode, or the network as given.
    """

    def __init__(self, posterior: Posterior) -> None:
        super().__init__("the search was interrupted")
        self.posterior = posterior

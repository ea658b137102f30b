"""Several planned fits as one method: the mixture of their posteriors."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, final

import torch
from torch import Tensor

from bayou.core.files import StrPath
from bayou.core.progress import BayouWarning, Show
from bayou.core.specs import later_field
from bayou.inference.baseline_checks import WorseThanModeWarning
from bayou.inference.method import Method
from bayou.network.target import Target
from bayou.posteriors import Mixture, Posterior
from bayou.select.best_method import FIT_ERRORS
from bayou.select.plans import Plan
from bayou.training.data import Data, as_data

# Entries of a history about one posterior; that it has collapsed is kept. "rising" is left out,
# too: held-out rows have judged fits of these lengths, some of which are short on purpose.
JUDGMENTS: Final = (
    "nll",
    "rising",
    "mode_nll",
    "constant_nll",
    "nll_error",
    "mode_allowance",
    "worse_than_mode",
)


@final
@dataclass(frozen=True)
class Stacked(Method):
    """Several methods with their selected settings, and the mixture of their posteriors.

    Args:
        weights: of the methods, by name.
        plans: of the methods, by name.
        target: what they were planned for.
        temperatures: of the methods, by name; others keep theirs.
        leaves_out_failures: whether a method whose fit raises an error is left out, with a warning,
            unless it is the only one; False by default.
    """

    weights: Mapping[str, float]
    plans: Mapping[str, Plan] = field(repr=False, compare=False)
    target: Target = field(repr=False, compare=False)
    temperatures: Mapping[str, float] = field(default_factory=dict)
    leaves_out_failures: bool = later_field(False)

    @classmethod
    def plan(
        cls,
        plans: Mapping[str, Plan],
        weights: Mapping[str, float],
        target: Target,
        rows: Data,
        seed: int,
        temperatures: Mapping[str, float] | None = None,
        *,
        leaves_out_failures: bool = False,
    ) -> Plan:
        """Return the plan of a mixture, with what was selected for each component.

        Args:
            plans: of the methods, by name.
            weights: of the methods, by name.
            target: what they were planned for.
            rows: all rows.
            seed: of the search.
            temperatures: of the methods, by name; None (default) for none.
            leaves_out_failures: see ``Stacked``.
        """
        stages = [
            record | {"stage": f"{name}: {record['stage']}"}
            for name, selected in plans.items()
            for record in selected.stages
        ]
        decisions = [
            f"{name}: {decision}"
            for name, selected in plans.items()
            for decision in selected.decisions
        ]
        method = cls(weights, plans, target, temperatures or {}, leaves_out_failures)
        return Plan(target, method, rows, seed, stages=tuple(stages), decisions=tuple(decisions))

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Fit every method, and return the mixture; after Ctrl-C that of the finished ones.

        A mixture without some of its methods has no temperatures, which are for all of them
        together.

        Raises:
            ValueError: (or another error) of a fit that failed, unless it is left out.
        """
        plans = self.plans
        if target is not self.target:
            rows = as_data(data, self.batch_size)
            plans = {name: replace(plan, target=target, rows=rows) for name, plan in plans.items()}
        components, failures, is_finished = self._fit_components(plans, seed, checkpoint, progress)
        if not is_finished and len(components) == 1:
            (posterior,) = components.values()
            if posterior.stopped == "interrupted":
                return posterior
        left_out = leave_out_failures(failures, components)
        if is_finished and not failures:
            for name, temperature in self.temperatures.items():
                components[name].temperature = temperature
        if len(self.plans) - len(failures) == 1:
            (posterior,) = components.values()
            posterior.selection = ()  # the plan has its stages
            posterior.choice = left_out
            return posterior
        mixture = Mixture(
            list(components.values()),
            [self.weights[name] for name in components],
            _joined_history(components),
        )
        mixture.stopped = "finished" if is_finished else "interrupted"
        mixture.choice = left_out
        mixture.held_out_index = _shared_held_out_index(mixture)
        diagnostics = [posterior.mixing for posterior in components.values() if posterior.mixing]
        if len(diagnostics) == 1:
            mixture.mixing = diagnostics[0]
        return mixture

    def _fit_components(
        self,
        plans: Mapping[str, Plan],
        seed: int,
        checkpoint: StrPath | None,
        progress: Show,
    ) -> tuple[dict[str, Posterior], dict[str, Exception], bool]:
        """Fit every method until Ctrl-C.

        Args:
            plans: of the methods, by name.
            seed: of every fit.
            checkpoint: the beginning of the names of their checkpoints; None for none.
            progress: how to show it.

        Returns:
            The posteriors by the names of their methods, the errors of those that are left out, and
            whether all methods were fitted. A posterior that was interrupted is among the first
            only if no other was finished.
        """
        components: dict[str, Posterior] = {}
        failures: dict[str, Exception] = {}
        for name, plan in plans.items():
            file = None if checkpoint is None else f"{checkpoint}.{name}.all"
            with warnings.catch_warnings():
                # Of a component alone: the mixture is what predicts.
                warnings.simplefilter("ignore", WorseThanModeWarning)
                try:
                    posterior = plan.fit(seed=seed, checkpoint=file, progress=progress)
                except FIT_ERRORS as error:
                    if not self.leaves_out_failures:
                        raise
                    failures[name] = error
                    continue
            if posterior.stopped == "interrupted":
                return components or {name: posterior}, failures, False
            components[name] = posterior
        return components, failures, True


def leave_out_failures(failures: Mapping[str, Exception], others: Mapping[str, object]) -> str:
    """Warn of methods that could not be fitted to all rows, and return the same in words.

    Args:
        failures: the errors by name.
        others: what is left, by name.

    Raises:
        ValueError: (or another error) the last failure, if nothing is left.
    """
    if not failures:
        return ""
    if not others:
        raise list(failures.values())[-1]
    text = "; ".join(
        f"{name} was left out, since its fit to all rows failed: {type(error).__name__}: {error}"
        for name, error in failures.items()
    )
    warnings.warn(
        f"{text}; the weights of {', '.join(others)} are divided by their sum",
        BayouWarning,
        stacklevel=3,
    )
    return text


def _joined_history(components: Mapping[str, Posterior]) -> list[dict[str, float]]:
    """Return the records of all components, without the judgments of a single one."""
    records = []
    for number, posterior in enumerate(components.values()):
        for record in posterior.history:
            kept = {key: value for key, value in record.items() if key not in JUDGMENTS}
            records.append({"member": float(number), **kept})
    return records


def _shared_held_out_index(mixture: Mixture) -> Tensor | None:
    """Return the rows that no component was fitted to; None if they differ."""
    first, *others = [component.held_out_index for component in mixture.components]
    if first is None or any(other is None or not torch.equal(first, other) for other in others):
        return None
    return first

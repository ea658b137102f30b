"""Decisions by expected utility under a predictive distribution, and what information is worth."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from bayou.likelihoods.base import BoundLikelihood
from bayou.likelihoods.discrete import FiniteLikelihood
from bayou.likelihoods.outcomes import CELLS, Outcomes, outcomes_of

if TYPE_CHECKING:
    from bayou.likelihoods.predictive import Predictive

MIN_FUNCTIONS = 64  # in place of a closed form over functions
MAX_BLOCK_NUMBERS = 2**23  # numbers held at a time

Utility = Callable[[Tensor, Tensor], Tensor]  # u(action, y), elementwise


@final
@dataclass(frozen=True, eq=False)
class Decision:
    """The action with the highest expected utility for every row, and the value of information.

    Values of information are differences of expected utilities, at least 0 and in their units. With
    ``abstain=c`` abstaining is one more action, with utility −c for every y, in all of them.

    Args:
        action: the action of every row, (B, *event): its number for classes, the action itself for
            numbers. It is the best action also in rows that abstain.
        expected_utility: max_a E[u(a, y)], or −c in rows that abstain, (B, *event).
        expected_utilities: E[u(a, y)] of all A actions, (B, *event, A).
        perfect_information: E[max_a u(a, y)] − max_a E[u(a, y)], what it is worth to know y before
            acting (the expected value of perfect information, EVPI), (B, *event).
        weights_information: E_w max_a E[u(a, y) | w] − max_a E[u(a, y)], what it is worth to know
            the weights: the most that more training data can be worth for this row, (B, *event).
            It is nan for a single function, which says nothing about other weights.
        abstains: whether −c exceeds the expected utility of all actions, (B, *event); None without
            ``abstain``.
        abstention_gain: how much expected utility abstaining saves, 0 in rows that act,
            (B, *event); None without ``abstain``.
        names: the names of the actions; None without any.
    """

    action: Tensor
    expected_utility: Tensor
    expected_utilities: Tensor
    perfect_information: Tensor
    weights_information: Tensor
    abstains: Tensor | None = None
    abstention_gain: Tensor | None = None
    names: tuple[str, ...] | None = None

    @property
    def labels(self) -> list[str]:
        """Return the name of every row's action, or "abstain", in the order of the rows.

        Raises:
            ValueError: if the actions have no names.
        """
        if self.names is None:
            raise ValueError("the actions have no names; pass names=[...] to decide")
        index = self.expected_utilities.argmax(-1).flatten().tolist()
        labels = [self.names[k] for k in index]
        if self.abstains is None:
            return labels
        pairs = zip(labels, self.abstains.flatten().tolist(), strict=True)
        return ["abstain" if is_left_out else label for label, is_left_out in pairs]


@final
@dataclass(frozen=True)
class Newsvendor:
    """The utility of ordering ``action`` units when y are needed.

    u(a, y) = −shortage·max(y − a, 0) − surplus·max(a − y, 0). The best action is the quantile
    shortage/(shortage + surplus) of y, so that no grid of actions is needed.

    Args:
        shortage: the cost of each unit that is missing (default 1).
        surplus: the cost of each unit that is left over (default 1).

    Example:
        >>> decision = predictive.decide(bayou.likelihoods.Newsvendor(shortage=9, surplus=1))
        >>> decision.action  # the 90 % quantile
    """

    shortage: float = 1.0
    surplus: float = 1.0

    def __post_init__(self) -> None:
        for name in ("shortage", "surplus"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise ValueError(
                    f"Newsvendor {name} must be a positive, finite cost, got {value!r:.60}"
                )

    def __call__(self, action: Tensor, y: Tensor) -> Tensor:
        """Return the utility of an order.

        Args:
            action: the units that are ordered.
            y: the units that are needed.
        """
        missing = (y - action).clamp_min(0.0)
        left_over = (action - y).clamp_min(0.0)
        return -self.shortage * missing - self.surplus * left_over

    def best_action(self, likelihood: BoundLikelihood, f: Tensor) -> Tensor:
        """Return the order with the highest expected utility: (B, *event).

        Args:
            likelihood: p(y | f).
            f: outputs, (S, B, *out).
        """
        return likelihood.mixture_quantile(f, self.shortage / (self.shortage + self.surplus))


@dataclass(frozen=True)
class _Expectations:
    """Expected utilities of N coordinates.

    Args:
        of_actions: E[u(a, y)], (N, A).
        action: the best action, (N,).
        knowing_y: E[max_a u(a, y)], (N,).
        knowing_weights: E_w max_a E[u(a, y) | w], (N,).
    """

    of_actions: Tensor
    action: Tensor
    knowing_y: Tensor
    knowing_weights: Tensor

    @staticmethod
    def join(blocks: Sequence[_Expectations]) -> _Expectations:
        """Return those of all blocks of rows.

        Args:
            blocks: in order.
        """
        tensors = [
            (block.of_actions, block.action, block.knowing_y, block.knowing_weights)
            for block in blocks
        ]
        return _Expectations(*map(torch.cat, zip(*tensors, strict=True)))


@torch.no_grad()
def decide(
    predictive: Predictive,
    utilities: Tensor | Sequence[Sequence[float]] | Utility,
    actions: Tensor | Sequence[float] | None = None,
    *,
    abstain: float | None = None,
    names: Sequence[str] | None = None,
) -> Decision:
    """Choose the action with the highest expected utility; see ``Predictive.decide``.

    Args:
        predictive: of B rows.
        utilities: a matrix (A, K) for classes, a function u(action, y) for numbers.
        actions: for numbers, the grid of actions.
        abstain: the cost of abstaining.
        names: of the actions.
    """
    if abstain is not None and not math.isfinite(abstain):
        raise ValueError(f"abstain must be a finite cost, got {abstain}; None for no abstention")
    likelihood = predictive.likelihood
    f = predictive.outputs.detach()
    if isinstance(likelihood, FiniteLikelihood):
        event = likelihood.log_pmf(f[:1]).shape[1:]
        utility: Utility | Tensor = _check_matrix(utilities, actions, event[-1], f)
        event = event[:-1]
        grid: Tensor | None = torch.arange(len(utility), device=f.device).unsqueeze(-1)  # type: ignore[arg-type]
    else:
        event = likelihood.mean(f[:1]).shape[1:]
        utility = _check_function(utilities, likelihood)
        grid = _check_grid(actions, utility, event, f)
    count = 1 if grid is None else len(grid)
    _check_names(names, count, grid is None)
    is_closed = bool(torch.as_tensor(likelihood.function_variance(f)).any())
    functions = -(-MIN_FUNCTIONS // len(f)) if is_closed else 0
    blocks = []
    for start, block in _row_blocks(f, max(1, functions) * len(f), count, math.prod(event[1:])):
        block_grid = grid
        if grid is not None and grid.shape[-1] > 1:
            block_grid = grid[:, start : start + block.shape[1] * math.prod(event[1:])]
        outcomes = outcomes_of(likelihood, block, functions)
        blocks.append(_expectations(outcomes, utility, block_grid, abstain))
    expectations = _Expectations.join(blocks)
    has_functions = is_closed or len(f) > 1
    return _decision(expectations, event, abstain, names, has_functions)


def _decision(
    expectations: _Expectations,
    event: torch.Size,
    abstain: float | None,
    names: Sequence[str] | None,
    has_functions: bool,
) -> Decision:
    """Return the decision of rows with (B, *event) coordinates."""
    highest = expectations.of_actions.max(-1).values
    utility = _with_abstention(highest, abstain)
    weights_information = (expectations.knowing_weights - utility).clamp_min(0.0)
    if not has_functions:
        weights_information = torch.full_like(utility, math.nan)
    abstains = None
    gain = None
    if abstain is not None:
        abstains = (highest < -abstain).reshape(event)
        gain = (utility - highest).reshape(event)
    return Decision(
        expectations.action.reshape(event),
        utility.reshape(event),
        expectations.of_actions.reshape(*event, -1),
        (expectations.knowing_y - utility).clamp_min(0.0).reshape(event),
        weights_information.reshape(event),
        abstains,
        gain,
        None if names is None else tuple(names),
    )


def _with_abstention(utility: Tensor, abstain: float | None) -> Tensor:
    """Return utilities, at least that of abstaining."""
    return utility if abstain is None else utility.clamp_min(-abstain)


def _expectations(
    outcomes: Outcomes, utility: Utility | Tensor, grid: Tensor | None, abstain: float | None
) -> _Expectations:
    """Compute the expected utilities of some rows."""
    if grid is None:
        return _expectations_of_formula(outcomes, utility, abstain)
    y = outcomes.values
    mass = outcomes.probabilities
    if isinstance(utility, Tensor):
        values = utility.unsqueeze(-1).to(mass).expand(-1, -1, mass.shape[-1])  # (A, K, n)
    else:
        values = _evaluate(utility, grid.to(y).unsqueeze(1), y)
    of_actions = torch.einsum("kn,akn->na", mass, values)
    knowing_y = (mass * _with_abstention(values.max(0).values, abstain)).sum(0)
    by_function = torch.einsum("skn,akn->sna", outcomes.by_function, values)
    knowing_weights = _with_abstention(by_function.max(-1).values, abstain).mean(0)
    best = of_actions.argmax(-1)
    action = grid.expand(-1, len(best)).gather(0, best.unsqueeze(0)).squeeze(0)
    return _Expectations(of_actions, action, knowing_y, knowing_weights)


def _expectations_of_formula(
    outcomes: Outcomes, utility: Any, abstain: float | None
) -> _Expectations:
    """Compute the same for a utility with a formula of its best action."""
    y = outcomes.values
    mass = outcomes.probabilities
    action = utility.best_action(outcomes.likelihood, outcomes.f).flatten()
    of_action = (mass * _evaluate(utility, action.to(y).unsqueeze(0), y)).sum(0)
    knowing_y = (mass * _with_abstention(_evaluate(utility, y, y), abstain)).sum(0)
    likelihood, functions = outcomes.functions
    knowing_weights = torch.zeros_like(of_action)
    for function, probabilities in zip(functions.split(1), outcomes.by_function, strict=True):
        its_action = utility.best_action(likelihood, function).to(y).reshape(1, -1)
        expected = (probabilities * _evaluate(utility, its_action, y)).sum(0)
        knowing_weights = knowing_weights + _with_abstention(expected, abstain) / len(functions)
    return _Expectations(of_action.unsqueeze(-1), action, knowing_y, knowing_weights)


def _evaluate(utility: Utility, action: Tensor, y: Tensor) -> Tensor:
    """Return u(action, y), or raise a ValueError if it is not one finite number for each pair."""
    # broadcast_shapes would import sympy.
    expected = torch.broadcast_tensors(action, y)[0].shape
    values = torch.as_tensor(utility(action, y))
    if values.shape in (action.shape, y.shape):  # of one of the two only
        values = values.expand(expected)
    if values.shape != expected:
        raise ValueError(
            f"utilities(action, y) must be elementwise, {tuple(expected)} for action "
            f"{tuple(action.shape)} and y {tuple(y.shape)}, got {tuple(values.shape)}"
        )
    if not bool(values.isfinite().all()):
        raise ValueError("utilities(action, y) must be finite, got nan or infinite values")
    return values.to(y)


def _row_blocks(
    f: Tensor, functions: int, actions: int, coordinates: int
) -> list[tuple[int, Tensor]]:
    """Divide the rows into blocks whose tables fit into memory, with their first coordinates."""
    rows = max(1, MAX_BLOCK_NUMBERS // (CELLS * max(functions, actions) * max(1, coordinates)))
    return [(k * rows * coordinates, block) for k, block in enumerate(f.split(rows, 1))]


def _check_matrix(utilities: object, actions: object, classes: int, f: Tensor) -> Tensor:
    """Return a matrix of utilities (A, K), or raise a ValueError."""
    if actions is not None:
        raise ValueError(
            "the actions of classes are the rows of the matrix of utilities; name them with "
            "names=[...] instead of actions"
        )
    if callable(utilities):
        raise ValueError(
            f"the utilities of classes are a matrix (actions, {classes}), got a function; give the "
            "utility of every action for every class"
        )
    matrix = torch.as_tensor(utilities, dtype=torch.float64, device=f.device)
    if matrix.ndim != 2 or not len(matrix) or matrix.shape[1] != classes:
        raise ValueError(
            f"utilities must be (actions, {classes}), a row for each action and a column for each "
            f"class, got {tuple(matrix.shape)}"
        )
    if not bool(matrix.isfinite().all()):
        raise ValueError("utilities must be finite, got nan or infinite values")
    return matrix


def _check_function(utilities: object, likelihood: BoundLikelihood) -> Utility:
    """Return a function u(action, y), or raise a ValueError."""
    if not callable(utilities):
        raise ValueError(
            "the utility of numbers is a function u(action, y) of tensors, such as "
            f"Newsvendor(9, 1), got {type(utilities).__name__}; a matrix is for classes"
        )
    if not likelihood.overrides("cdf"):
        raise ValueError(
            f"{type(likelihood).__name__} has no cdf, by which expected utilities are computed; "
            "define one"
        )
    return utilities


def _check_grid(
    actions: Tensor | Sequence[float] | None, utility: Utility, event: torch.Size, f: Tensor
) -> Tensor | None:
    """Return actions of numbers (A, 1) or (A, B·event); None for a utility with a formula."""
    if actions is None:
        if hasattr(utility, "best_action"):
            return None
        raise ValueError(
            "actions must be given for a function of utilities: a list of numbers, for all rows"
        )
    grid = torch.as_tensor(actions, device=f.device)
    grid = grid if grid.is_floating_point() else grid.to(f.dtype)
    if grid.ndim == 0 or not len(grid) or tuple(grid.shape[1:]) not in ((), tuple(event)):
        raise ValueError(
            f"actions must be (A,), the same for all rows, or (A, {', '.join(map(str, event))}), "
            f"got {tuple(grid.shape)}"
        )
    if not bool(grid.isfinite().all()):
        raise ValueError("actions must be finite, got nan or infinite values")
    return grid.reshape(len(grid), -1)


def _check_names(names: Sequence[str] | None, count: int, is_formula: bool) -> None:
    """Raise a ValueError unless every action has a name."""
    if names is None:
        return
    if is_formula:
        raise ValueError("names are for a list of actions; this utility has any number as action")
    if isinstance(names, str) or len(names) != count or len(set(names)) != count:
        raise ValueError(
            f"names must be {count} different names, one for each action, got {names!r:.60}"
        )

"""``fit``: fit a flow to data or to an unnormalized density."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.progress import Show
from bayou.flows.continuous_time.continuous import Continuous
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Ladj
from bayou.flows.fitting.objectives import (
    REMEDY,
    FlowMatching,
    LogDensity,
    MaximumLikelihood,
    Objective,
    ReverseKL,
    elbo,
)
from bayou.training.data import StepCount
from bayou.training.graphs import capturable
from bayou.training.loop import fit_module
from bayou.training.problem import Hooks, Problem
from bayou.training.settings import SCHEDULES, Settings

Stopped = Literal["finished", "patience", "interrupted"]
Schedule = Literal["cosine", "constant"] | Callable[[float], float]
DEFAULT_STEPS = 2000
BOUND_DRAWS = 16_384  # fresh draws for the final bound of reverse KL
MAX_TIMED_STEPS = 10**9  # of a run with a time limit
TIMED_WARMUP_STEPS = 100  # of the learning rate of such a run
SYNC_EVERY = 16  # steps after which such a run waits for the device
MIN_CHECK_STEPS = 20  # between two checks
CHECKS_PER_RUN = 50
RATE_WARMUP = 0.02  # fraction of a run over which the learning rate rises


class HistoryRow(NamedTuple):
    """One row of the history of a fit.

    Args:
        step: the number of steps so far.
        loss: the mean loss since the previous row.
        score: the score for early stopping; lower is better.
        lr: the learning rate of the step.
        gradient_norm: the norm of the gradient of the step.
    """

    step: int
    loss: float
    score: float
    lr: float
    gradient_norm: float


@dataclass(frozen=True)
class FitResult:
    """The result of a fit. The flow has the parameters of ``best_step`` and is in eval mode.

    Args:
        objective: what was minimized.
        measure: what ``best`` and the scores measure: held-out or training NLL in nats per row, or
            −bound + 2 standard errors.
        history: one row for every check.
        best: the lowest score.
        best_step: the step of the lowest score.
        steps: the number of steps.
        stopped: why the run ended.
        seconds: the time of the run.
        bound: of reverse KL, E_q[log p̃ − log q] ≤ log Z, from new draws; None for data.
        standard_error: the standard error of ``bound``.
        ladj: whether log q, and hence every number here, is exact, a bound or an estimate.
    """

    objective: Literal["maximum likelihood", "flow matching", "reverse KL"]
    measure: str
    history: tuple[HistoryRow, ...]
    best: float
    best_step: int
    steps: int
    stopped: Stopped
    seconds: float
    bound: float | None = None
    standard_error: float | None = None
    ladj: Ladj = Ladj.exact

    def __str__(self) -> str:
        notes = {
            Ladj.exact: "",
            Ladj.bound: " (log q is a bound)",
            Ladj.estimate: " (log q is an estimate)",
        }
        return (
            f"{self.objective}: {self._format_score()}{notes[self.ladj]}; best at step "
            f"{self.best_step} of {self.steps}, {self.stopped} after {self.seconds:.1f} s"
        )

    def _format_score(self) -> str:
        """Format the bound with its standard error or, for data, the best score with its unit."""
        if self.bound is not None:
            return f"bound {self.bound:.4f} ± {self.standard_error:.4f} ≤ log Z"
        unit = " nats per row" if self.measure.endswith("NLL") else ""
        return f"{self.measure} {self.best:.4f}{unit}"


class FitOptions(TypedDict, total=False):
    """Options of ``fit`` and ``VAE.fit``, passed as keywords; the defaults are those of ``fit`` (of
    ``VAE.fit``).

    Args:
        steps: the run ends after this many steps, 2,000 unless ``seconds`` is given.
        seconds: the run ends after this time. With both, the first limit that is reached counts,
            also for the schedule and the warm-up.
        batch_size: rows of data, or of the context, in a step: 256 (100).
        lr: the learning rate: 5e-3 (1e-3).
        optimizer: ``optimizer(parameters, lr=lr)``; Adam by default.
        schedule: the factor of lr as a function of the fraction done: "cosine" (the default, with
            a warm-up of 2 %), "constant", or a callable.
        clip: the largest norm of the gradient, 5 (None); None does not clip.
        validation: the fraction of the rows, at most 4,096 of them, that is held out to select the
            best parameters: 0.1. With 0 the training rows select. Reverse KL selects by its bound
            instead.
        patience: stop after this many checks in a row without a better score, 15 (None); None does
            not stop.
        check_every: steps between two checks; by default a fiftieth of the run and at least 20, or
            an epoch if the run is limited by ``seconds``. The best parameters are restored at the
            end.
        warmup: the fraction of the run over which the weight of log p̃ (of the KL, for a VAE)
            increases: 0 (0.1).
        seed: an int reproduces the run bit for bit and leaves the global stream of torch unchanged:
            0.
        progress: whether and how progress is shown.
        callback: called with every row of the history; a KeyboardInterrupt raised in it stops the
            run.
    """

    steps: int | None
    seconds: float | None
    batch_size: int
    lr: float
    optimizer: Callable[..., torch.optim.Optimizer] | None
    schedule: Schedule
    clip: float | None
    validation: float
    patience: int | None
    check_every: int | None
    warmup: float
    seed: rng.Seed
    progress: Show
    callback: Callable[[HistoryRow], object] | None


@dataclass(frozen=True, kw_only=True)
class FlowSettings(Settings):
    """The options of ``FitOptions`` with their defaults, checked.

    Args:
        samples: draws in a step of reverse KL, 256.
    """

    batch_size: int = 256
    lr: float = 5e-3
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    schedule: Schedule = "cosine"
    clip: float | None = 5.0
    validation: float = 0.1
    patience: int | None = 15
    seconds: float | None = None
    check_every: int | None = None
    warmup: float = 0.0
    samples: int = 256
    seed: rng.Seed = 0
    progress: Show = True
    callback: Callable[[HistoryRow], object] | None = None

    def __post_init__(self) -> None:
        self._check_whole("steps", "batch_size", "samples", "patience", "check_every")
        self._check_positive("seconds")
        self._check_positive("lr")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, got {self.clip}; pass None for no clipping")
        for name in ("validation", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a fraction in [0, 1), got {getattr(self, name)}")
        if self.schedule not in ("cosine", "constant") and not callable(self.schedule):
            raise ValueError(
                "schedule must be 'cosine', 'constant' or a function of the fraction done, "
                f"got {self.schedule!r}"
            )

    def with_default_length(self, epoch_steps: int) -> FlowSettings:
        """Return these settings with a number of steps and of steps between checks.

        Args:
            epoch_steps: steps of an epoch, after which a run with a time limit is checked.
        """
        is_timed = self.seconds is not None
        steps = self.steps or (MAX_TIMED_STEPS if is_timed else DEFAULT_STEPS)
        usual_interval = epoch_steps if is_timed else steps // CHECKS_PER_RUN
        check_every = self.check_every or max(MIN_CHECK_STEPS, usual_interval)
        return replace(self, steps=steps, log_every=check_every)

    def rate(self, done: float) -> float:
        """Return the factor of the learning rate after a fraction of the run."""
        if callable(self.schedule):
            return self.schedule(done)
        if self.schedule == "constant":
            return 1.0
        return min(1.0, 0.1 + done / RATE_WARMUP) * SCHEDULES["cosine"](done)


def fit(
    flow: Flow,
    target: Tensor | LogDensity,
    *,
    context: Tensor | None = None,
    matching: bool = False,
    samples: int = 256,
    **options: Unpack[FitOptions],
) -> FitResult:
    r"""Fit the parameters of a flow, in place.

    Data (rows, \*event) are fitted by **maximum likelihood**: minimize −E_data[log q(x | context)].
    A callable log p̃, (n, \*event) → (n,), is fitted by **reverse KL**: minimize E_q[log q(x) − log
    p̃(x)] = KL(q ‖ p) − log Z, p̃ being known up to its integral Z (Rezende & Mohamed 2015). The
    parameters are selected by the bound minus two standard errors, with fixed noise; ``warmup``
    increases the weight of log p̃ from 0.01 to 1, so that the flow covers all modes.

    With ``matching`` a continuous flow is fitted to data by **flow matching**: minimize
    E‖v(t, x_t) − ẋ_t‖² over linear paths from base draws to data (Lipman et al. 2023). Training
    needs no solver.

    Args:
        flow: the flow.
        target: data, or log p̃. With a context, log p̃ takes (x, context), x (n, rows, \*event),
            and returns (n, rows).
        context: (rows, context_dim), one for each row of the data.
        matching: use flow matching.
        samples: draws in a step of reverse KL.
        options: settings of the run, see ``FitOptions``.

    Ctrl-C restores the best parameters so far and returns with ``stopped="interrupted"``. A loss or
    a gradient that is not finite raises a FloatingPointError that names the row or parameter; the
    flow keeps its last good parameters.

    On a GPU a step of data (forward, backward, Adam) is one CUDA graph if every pass of the flow
    performs the same operations; a loss that is not finite is then detected at the next check.
    """
    if not isinstance(flow, Flow):
        raise ValueError(
            f"fit takes a Flow, got {type(flow).__name__}; "
            "wrap a transform: Flow(StandardNormal(2), t)"
        )
    settings = FlowSettings(samples=samples, **options)
    epoch_steps = MIN_CHECK_STEPS
    if isinstance(target, Tensor):
        epoch_steps = len(target) // settings.batch_size
    settings = settings.with_default_length(epoch_steps)
    seed = rng.integer(settings.seed)
    objective = _make_objective(flow, target, context, matching, settings, seed)
    problem = FlowProblem(objective, settings)
    fit_result = problem.fit(seed)
    if not isinstance(objective, ReverseKL):
        return fit_result
    return _with_bound(fit_result, problem, objective, seed)


def _make_objective(
    flow: Flow,
    target: Tensor | LogDensity,
    context: Tensor | None,
    matching: bool,
    settings: FlowSettings,
    seed: int,
) -> Objective:
    """Return the objective of a fit, or raise a ValueError for a target that has none."""
    if matching and not isinstance(target, Tensor):
        raise ValueError(
            f"matching fits data, got {type(target).__name__}; pass a tensor (rows, *event)"
        )
    if matching and not isinstance(flow.transform, Continuous):
        raise ValueError(
            "matching fits a continuous flow, "
            f"got {type(flow.transform).__name__}; use continuous()"
        )
    if isinstance(target, Tensor):
        likelihood_or_matching = FlowMatching if matching else MaximumLikelihood
        return likelihood_or_matching(
            flow, target, context, settings.batch_size, settings.validation, seed
        )
    if callable(target):
        return ReverseKL(flow, target, context, settings.samples, settings.batch_size, seed)
    raise ValueError(
        f"target is {type(target).__name__}; "
        "pass data as a tensor (torch.as_tensor), or a function log_density(x)"
    )


def _with_bound(
    fit_result: FitResult, problem: FlowProblem, objective: ReverseKL, seed: int
) -> FitResult:
    """Return the result with its bound from new draws; without it after a second Ctrl-C."""
    bound_seed = rng.fold(seed, "bound")
    try:
        with rng.isolated(seed, objective.anchor.device):
            bound, error = elbo(
                objective.flow, objective.log_density, BOUND_DRAWS, objective.context, bound_seed
            )
    except KeyboardInterrupt:  # the parameters are safe, only the number is missing
        return replace(fit_result, stopped="interrupted", seconds=problem.seconds_so_far)
    return replace(fit_result, bound=bound, standard_error=error, seconds=problem.seconds_so_far)


class FlowProblem(Problem):
    """The training problem of a flow: it can be interrupted at any step, or end by a time limit.

    Args:
        objective: what is minimized.
        settings: the options of the run, with their length.
    """

    settings: FlowSettings

    def __init__(self, objective: Objective, settings: FlowSettings) -> None:
        super().__init__()
        parameters = [p for p in objective.flow.parameters() if p.requires_grad]
        self.settings = settings
        self.title: str = "fitting"
        self.max_seconds: float | None = settings.seconds
        if self.max_seconds is not None:
            self.settings = replace(settings, schedule=self._rate_by_clock)
            self.title = f"fitting for {self.max_seconds:g} s"
        self.flow: Flow = objective.flow
        self.flow_objective = objective
        make_optimizer = settings.optimizer or adam
        self.optimizer: torch.optim.Optimizer = make_optimizer(parameters, lr=settings.lr)
        self.start_time: float = time.monotonic()
        self.usual_rate: Callable[[float], float] = settings.rate
        self.parameters_now: dict[str, Any] = self.flow.state_dict()  # shares memory with the flow
        self.last_good: dict[str, Any] = {
            name: value.clone() for name, value in self.parameters_now.items()
        }
        self.history: list[HistoryRow] = []
        self.best_score: float = math.inf
        self.best_step: int = 0
        self.attempt: int = 0
        self.loss_sum: Tensor = objective.anchor.new_zeros((), dtype=torch.float64)
        self.loss_count: int = 0
        self.recordable: bool = objective.recordable and capturable(
            self.optimizer, objective.anchor.device
        )
        self.norm: Tensor = objective.anchor.new_zeros(())
        self.inputs: tuple[Tensor, ...] = ()

    @property
    def elapsed_fraction(self) -> float:
        """The fraction of the time limit that has passed; 0 without one."""
        if self.max_seconds is None:
            return 0.0
        return min(1.0, self.seconds_so_far / self.max_seconds)

    @property
    def seconds_so_far(self) -> float:
        """The time since the run began."""
        return time.monotonic() - self.start_time

    def _rate_by_clock(self, done: float) -> float:
        """Return the factor of the learning rate by elapsed time.

        Its warm-up counts steps, since the first one may take long.
        """
        warmup = min(1.0, self.attempt / TIMED_WARMUP_STEPS + 0.01)
        return self.usual_rate(max(done, self.elapsed_fraction)) * warmup

    @torch.enable_grad()
    def fit(self, seed: int) -> FitResult:
        """Run the fit. Even after an error the flow has parameters with a finite loss."""
        steps = StepCount(self.settings.log_every or 1)  # an epoch ends with a check
        keep_each_step = None if self.recordable else self._keep
        hooks = Hooks(self._score, keep_each_step, self._record)
        try:
            state = fit_module(
                self, steps, self.settings, seed=seed, progress=self.settings.progress, hooks=hooks
            )
            if not self.history:
                self._restore()
        except FloatingPointError as error:
            reason = self._first_not_finite() or error
            self._restore()
            message = f"step {self.attempt}: {reason}. The flow keeps its last good parameters"
            raise FloatingPointError(message) from None
        except BaseException as error:
            self._restore()
            error.add_note(
                f"at step {self.attempt} of bayou.flows.fitting.fit; "
                "the flow keeps its last good parameters"
            )
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.flow.eval()
        return FitResult(
            objective=self.flow_objective.name,
            measure=self.flow_objective.measure,
            history=tuple(self.history),
            best=self.best_score,
            best_step=self.best_step,
            steps=state.step,
            stopped="patience" if state.stopped == "early" else state.stopped,  # type: ignore[arg-type]
            seconds=self.seconds_so_far,
            ladj=self.flow.transform.ladj_kind,
        )

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        return self.optimizer

    def before_step(self, step: int, steps: int) -> None:
        done = max((step + 1) / steps, self.elapsed_fraction)
        warmup = self.settings.warmup
        self.flow_objective.warmed = min(1.0, done / warmup) if warmup else 1.0
        self.attempt = step + 1
        self.warming: bool = self.flow_objective.warmed < 1
        inputs = self.flow_objective.inputs(step)
        if not self.recordable or not self.inputs:
            self.inputs = inputs
            return
        for recorded_input, value in zip(self.inputs, inputs, strict=True):
            recorded_input.copy_(value, non_blocking=True)  # a graph reads from fixed memory

    def loss(self, x: object, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.flow_objective.value(*self.inputs)
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def _keep(self, step: int) -> None:
        """Keep the parameters, at which the loss is finite; after the update it may not be."""
        torch._foreach_copy_(list(self.last_good.values()), list(self.parameters_now.values()))

    def _restore(self) -> None:
        """Give the flow its last good parameters."""
        # load_state_dict also restores what is not a tensor (whether act norm is initialized).
        self.flow.load_state_dict(self.last_good)

    def after_step(self, numbers: dict[str, Tensor]) -> bool:
        """Update the mean loss on the device, and return whether the time limit is reached."""
        self.loss_sum = self.loss_sum + numbers["loss"]
        self.loss_count += 1
        numbers["loss"] = self.loss_sum / self.loss_count
        if self.max_seconds is not None and self.attempt % SYNC_EVERY == 0:
            float(self.loss_sum)  # wait for the device: its time counts
        return self.elapsed_fraction >= 1.0

    def _score(self) -> float:
        """Return the score; the steps of a solver may have changed with it."""
        score = self.flow_objective.score()
        self.version: int = self.flow_objective.version
        return score

    def _record(self, record: dict[str, float]) -> None:
        """Add a row to the history, and keep the parameters of the best one."""
        if "validation" not in record:  # the record of the first step has no score
            return
        score = record["validation"]
        if self.recordable and math.isfinite(score):
            self._keep(self.attempt)
        if score < self.best_score:
            self.best_score = score
            self.best_step = self.attempt
        rate = float(self.optimizer.param_groups[0]["lr"])
        self.history.append(HistoryRow(self.attempt, record["loss"], score, rate, float(self.norm)))
        self.loss_sum = torch.zeros_like(self.loss_sum)
        self.loss_count = 0
        if self.settings.callback is not None:
            self.settings.callback(self.history[-1])

    def _first_not_finite(self) -> str | None:
        """Describe the first parameter whose value or gradient is not finite."""
        for name, parameter in self.flow.named_parameters():
            tensors = (("parameter", parameter), ("the gradient of", parameter.grad))
            for description, value in tensors:
                if value is None or bool(value.isfinite().all()):
                    continue
                count = int((~value.isfinite()).sum())
                return (
                    f"{description} '{name}' has {count} NaN or infinite values "
                    f"of {value.numel()}; {REMEDY}"
                )
        return None


def adam(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Return Adam, fused where possible, which is faster for many small tensors."""
    device = params[0].device.type
    is_fused = device in ("cpu", "cuda")
    return torch.optim.Adam(params, lr=lr, fused=is_fused, capturable=device == "cuda")

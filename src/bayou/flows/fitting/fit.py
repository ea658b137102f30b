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
BOUND_DRAWS = 16_384  # fresh draws for the final bound of reverse KL
UNLIMITED_STEPS = 10**9  # of a run with a time limit
WARMUP_STEPS = 100  # of the learning rate of such a run
SYNC_EVERY = 16  # steps after which such a run waits for the device


class Check(NamedTuple):
    """One row of the history: the mean loss since the previous row, and the score for early
    stopping.
    """

    step: int
    loss: float
    score: float
    lr: float
    gradient_norm: float


@dataclass(frozen=True)
class FitResult:
    """The result of a fit. The flow has the parameters of ``best_step`` and is in eval mode."""

    objective: Literal["maximum likelihood", "flow matching", "reverse KL"]
    measure: str
    """What ``best`` and the scores measure: held-out or training NLL in nats per row, or −bound + 2
    standard errors.
    """
    history: tuple[Check, ...]
    best: float
    best_step: int
    steps: int
    stopped: Stopped
    seconds: float
    bound: float | None = None
    """For reverse KL: E_q[log p̃ − log q] ≤ log Z, from new draws."""
    standard_error: float | None = None
    ladj: Ladj = Ladj.exact
    """Whether log q, and hence every number here, is exact, a bound or an estimate."""

    def __str__(self) -> str:
        if self.bound is not None:
            head = f"bound {self.bound:.4f} ± {self.standard_error:.4f} ≤ log Z"
        else:
            head = f"{self.measure} {self.best:.4f}" + (
                " nats per row" if self.measure.endswith("NLL") else ""
            )
        note = {
            Ladj.exact: "",
            Ladj.bound: " (log q is a bound)",
            Ladj.estimate: " (log q is an estimate)",
        }[self.ladj]
        return (
            f"{self.objective}: {head}{note}; best at step {self.best_step} of {self.steps}, "
            f"{self.stopped} after {self.seconds:.1f} s"
        )


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
        schedule: the factor of lr as a function of the fraction done: "cosine" (with a warm-up of 2
            %, the default), "constant", or a callable.
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
    callback: Callable[[Check], object] | None


@dataclass(frozen=True, kw_only=True)
class FlowSettings(Settings):
    """``FitOptions`` with their defaults, checked."""

    batch_size: int = 256
    lr: float = 5e-3
    optimizer: Callable[..., torch.optim.Optimizer] | None = None
    schedule: Any = "cosine"
    clip: float | None = 5.0
    validation: float = 0.1
    patience: int | None = 15
    seconds: float | None = None
    check_every: int | None = None
    warmup: float = 0.0
    samples: int = 256
    seed: rng.Seed = 0
    progress: Show = True
    callback: Callable[[Check], object] | None = None

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
                f"schedule must be 'cosine', 'constant' or a function of the fraction done, got {self.schedule!r}"
            )

    def of_length(self, epoch: int) -> FlowSettings:
        """These settings with the default number of steps and of steps between checks."""
        most = self.steps or (2000 if self.seconds is None else UNLIMITED_STEPS)
        every = self.check_every or max(20, most // 50 if self.seconds is None else epoch)
        return replace(self, steps=most, log_every=every)

    def rate(self, done: float) -> float:
        if callable(self.schedule):
            return self.schedule(done)
        return (
            1.0
            if self.schedule == "constant"
            else min(1.0, 0.1 + done / 0.02) * SCHEDULES["cosine"](done)
        )


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
            f"fit takes a Flow, got {type(flow).__name__}; wrap a transform: Flow(StandardNormal(2), t)"
        )
    settings = FlowSettings(samples=samples, **options)
    settings = settings.of_length(
        len(target) // settings.batch_size if isinstance(target, Tensor) else 20
    )
    key = rng.integer(settings.seed)
    given = (context, settings.batch_size, settings.validation, key)
    objective: Objective
    if matching:
        if not isinstance(target, Tensor):
            raise ValueError(
                f"matching fits data, got {type(target).__name__}; pass a tensor (rows, *event)"
            )
        objective = FlowMatching(flow, target, *given)
    elif isinstance(target, Tensor):
        objective = MaximumLikelihood(flow, target, *given)
    elif callable(target):
        objective = ReverseKL(flow, target, context, samples, settings.batch_size, key)
    else:
        raise ValueError(
            f"target is {type(target).__name__}; pass data as a tensor (torch.as_tensor), or a function log_density(x)"
        )
    problem = FlowProblem(objective, settings)
    found = problem.fit(key)
    if not isinstance(objective, ReverseKL):
        return found
    try:
        with rng.isolated(key, objective.anchor.device):
            bound, error = elbo(
                flow, objective.log_density, BOUND_DRAWS, objective.context, rng.fold(key, "bound")
            )
    except (
        KeyboardInterrupt
    ):  # a second Ctrl-C: the parameters are safe, only the number is missing
        return replace(found, stopped="interrupted", seconds=time.monotonic() - problem.begun)
    return replace(
        found, bound=bound, standard_error=error, seconds=time.monotonic() - problem.begun
    )


class FlowProblem(Problem):
    """The training problem of a flow: it can be interrupted at any step, or end by a time limit."""

    settings: FlowSettings

    def __init__(self, objective: Objective, settings: FlowSettings) -> None:
        super().__init__()
        params = [p for p in objective.flow.parameters() if p.requires_grad]
        seconds = settings.seconds
        self.settings = settings if seconds is None else replace(settings, schedule=self._by_clock)
        self.flow, self.target = objective.flow, objective
        self.optimizer = (settings.optimizer or adam)(params, lr=settings.lr)
        self.title = "fitting" if seconds is None else f"fitting for {seconds:g} s"
        self.begun, self.seconds, self.usual_rate = time.monotonic(), seconds, settings.rate
        self.live = self.flow.state_dict()  # its tensors share memory with those of the flow
        self.good = {name: tensor.clone() for name, tensor in self.live.items()}
        self.history: list[Check] = []
        self.best_score, self.best_step, self.attempt = math.inf, 0, 0
        self.sum, self.count = objective.anchor.new_zeros((), dtype=torch.float64), 0
        self.recordable = objective.recordable and capturable(
            self.optimizer, objective.anchor.device
        )
        self.norm: Tensor = objective.anchor.new_zeros(())
        self.inputs: tuple[Any, ...] = ()

    @property
    def elapsed(self) -> float:
        """The fraction of ``seconds`` that has passed; 0 without a time limit."""
        return (
            0.0
            if self.seconds is None
            else min(1.0, (time.monotonic() - self.begun) / self.seconds)
        )

    def _by_clock(self, done: float) -> float:
        """The learning rate by elapsed time; its warm-up counts steps, since the first one may take
        long.
        """
        return self.usual_rate(max(done, self.elapsed)) * min(
            1.0, self.attempt / WARMUP_STEPS + 0.01
        )

    @torch.enable_grad()
    def fit(self, seed: int) -> FitResult:
        """Run. Even after an error the flow has parameters with a finite loss."""
        steps, progress = (
            StepCount(self.settings.log_every or 1),
            self.settings.progress,
        )  # an epoch ends with a check
        try:
            hooks = Hooks(self._score, None if self.recordable else self._keep, self._record)
            state = fit_module(
                self, steps, self.settings, seed=seed, progress=progress, hooks=hooks
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
                f"at step {self.attempt} of bayou.flows.fitting.fit; the flow keeps its last good parameters"
            )
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.flow.eval()
        return FitResult(
            objective=self.target.name,
            measure=self.target.measure,
            history=tuple(self.history),
            best=self.best_score,
            best_step=self.best_step,
            steps=state.step,
            stopped="patience" if state.stopped == "early" else state.stopped,  # type: ignore[arg-type]
            seconds=time.monotonic() - self.begun,
            ladj=self.flow.transform.ladj_kind,
        )

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        return self.optimizer

    def before_step(self, step: int, steps: int) -> None:
        done, warmup = max((step + 1) / steps, self.elapsed), self.settings.warmup
        self.target.warmed = min(1.0, done / warmup) if warmup else 1.0
        self.attempt, self.warming = step + 1, self.target.warmed < 1
        inputs = self.target.inputs(step)
        if not self.recordable or not self.inputs:
            self.inputs = inputs
        else:  # a recorded step reads its inputs from fixed memory
            for mine, given in zip(self.inputs, inputs, strict=True):
                mine.copy_(given, non_blocking=True)

    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.target.value(*self.inputs)
        return loss, {"loss": loss.detach()}

    @torch.no_grad()
    def _keep(self, step: int) -> None:
        """Keep the parameters, at which the loss is finite; after the update it may not be."""
        torch._foreach_copy_(list(self.good.values()), list(self.live.values()))

    def _restore(self) -> None:
        # By load_state_dict, which also restores what is not a tensor (whether act norm is
        # initialized).
        self.flow.load_state_dict(self.good)

    def after_step(self, numbers: dict[str, Tensor]) -> bool:
        """Update the mean loss since the last record, on the device; whether the time limit is
        reached.
        """
        self.sum, self.count = self.sum + numbers["loss"], self.count + 1
        numbers["loss"] = self.sum / self.count
        if self.seconds is not None and self.attempt % SYNC_EVERY == 0:
            float(self.sum)  # wait for the device: its time counts
        return self.elapsed >= 1.0

    def _score(self) -> float:
        score = self.target.score()
        self.version = self.target.version
        return score

    def _record(self, record: dict[str, float]) -> None:
        if "validation" not in record:  # the record of the first step has no score
            return
        score = record["validation"]
        if self.recordable and math.isfinite(score):
            self._keep(self.attempt)
        if score < self.best_score:
            self.best_score, self.best_step = score, self.attempt
        rate, norm = float(self.optimizer.param_groups[0]["lr"]), float(self.norm)
        self.history.append(Check(self.attempt, record["loss"], score, rate, norm))
        self.sum, self.count = torch.zeros_like(self.sum), 0
        if self.settings.callback is not None:
            self.settings.callback(self.history[-1])

    def _first_not_finite(self) -> str | None:
        """The first parameter whose value or gradient is not finite."""
        for name, p in self.flow.named_parameters():
            for what, value in (("parameter", p), ("the gradient of", p.grad)):
                if value is not None and not value.isfinite().all():
                    bad = int((~value.isfinite()).sum())
                    return f"{what} '{name}' has {bad} NaN or infinite values of {value.numel()}; {REMEDY}"
        return None


def adam(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam, fused where possible: for many small tensors this saves a sixth of a step on a CPU."""
    device = params[0].device.type
    return torch.optim.Adam(
        params, lr=lr, fused=device in ("cpu", "cuda"), capturable=device == "cuda"
    )

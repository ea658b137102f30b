"""Fitting a flow to data or to a density, in one call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows.core.flow import Flow
from bayou.flows.core.transform import Ladj
from bayou.flows.fitting.objectives import (
    REMEDY,
    Coupling,
    FlowMatching,
    LogDensity,
    MaximumLikelihood,
    Objective,
    Path,
    ReverseKL,
    elbo,
)
from bayou.progress import Show
from bayou.training.data import Steps
from bayou.training.graphs import capturable
from bayou.training.loop import Hooks, Problem, fit_module
from bayou.training.settings import SCHEDULES, Settings

Stopped = Literal["finished", "patience", "interrupted"]
Schedule = Literal["cosine", "constant"] | Callable[[float], float]
ENDLESS = 10**9  # steps of a run that a clock ends
WARM = 100  # steps in which the rate of such a run rises
AHEAD = 16  # steps that may wait for the device where a clock ends the run


class Check(NamedTuple):
    """One row of the history: the mean loss since the row before, and the score that early stopping compares."""

    step: int
    loss: float
    score: float
    lr: float
    gradient_norm: float


@dataclass(frozen=True)
class FitResult:
    """What a fit did. The flow itself has the parameters of ``best_step`` and is in eval mode."""

    objective: Literal["maximum likelihood", "flow matching", "reverse KL"]
    measure: str
    """What ``best`` and the scores are: held-out or training NLL in nats per row, or −bound + 2 standard errors."""
    history: tuple[Check, ...]
    best: float
    best_step: int
    steps: int
    stopped: Stopped
    seconds: float
    bound: float | None = None
    """Reverse KL: E_q[log p̃ − log q] ≤ log Z, from fresh draws."""
    standard_error: float | None = None
    ladj: Ladj = Ladj.exact
    """Whether log q was exact; where it was a bound or an estimate, so is every number here."""

    def __str__(self) -> str:
        if self.bound is not None:
            head = f"bound {self.bound:.4f} ± {self.standard_error:.4f} ≤ log Z"
        else:
            head = f"{self.measure} {self.best:.4f}" + (" nats per row" if self.measure.endswith("NLL") else "")
        note = {Ladj.exact: "", Ladj.bound: " (log q is a bound)", Ladj.estimate: " (log q is an estimate)"}[self.ladj]
        return (
            f"{self.objective}: {head}{note}; best at step {self.best_step} of {self.steps}, "
            f"{self.stopped} after {self.seconds:.1f} s"
        )


def fit(
    flow: Flow,
    target: Tensor | LogDensity,
    *,
    context: Tensor | None = None,
    matching: bool = False,
    path: Path = "linear",
    coupling: Coupling = "independent",
    steps: int | None = None,
    seconds: float | None = None,
    batch_size: int = 256,
    samples: int = 256,
    lr: float = 5e-3,
    optimizer: Callable[..., torch.optim.Optimizer] | None = None,
    schedule: Schedule = "cosine",
    clip: float | None = 5.0,
    validation: float = 0.1,
    patience: int | None = 15,
    check_every: int | None = None,
    warmup: float = 0.0,
    bound_samples: int = 16_384,
    seed: rng.Seed = 0,
    progress: Show = True,
    callback: Callable[[Check], object] | None = None,
) -> FitResult:
    r"""Fit the parameters of a flow, in place.

    A tensor of data, (rows, \*event), is fitted by **maximum likelihood**: minimize −E_data[log q(x | context)].
    A callable log p̃, (n, \*event) → (n,), is fitted by **reverse KL**: minimize E_q[log q(x) − log p̃(x)]
    = KL(q ‖ p) − log Z, p̃ being known up to its integral Z (Rezende & Mohamed 2015). With a context (rows,
    context_dim) the callable takes (x, context), x (n, rows, \*event), and answers (n, rows).

    With ``matching`` data are fitted by **flow matching** instead, for a flow in continuous time: minimize
    E‖v(t, x_t) − ẋ_t‖² over paths from base draws to data (Lipman et al. 2023). No solver runs while it learns, and
    afterwards the same flow has a density and draws.

    Parameters
    ----------
    path, coupling
        Of matching: "linear" paths, or "preserving" the variance; base draws and data paired as they come
        ("independent"), or nearest in sum within a batch ("transport", Tong et al. 2024).
    steps, seconds
        The run ends after so many steps, 2,000 by default, or so many seconds, whichever comes first. The schedule
        follows the one that is further.
    lr, optimizer, schedule
        Updates by ``optimizer(parameters, lr=lr)``, by default Adam. The schedule multiplies lr by a function of the
        fraction done: "cosine" (with a warm-up of 2 %), "constant", or one of your own.
    batch_size
        Rows of data (or of the context) a step.
    samples
        Draws a step, for reverse KL.
    clip
        Largest norm of the whole gradient; None for no clipping.
    validation
        Fraction of the rows held out (at most 4,096 rows) to choose the best parameters; 0 chooses by the training
        rows. Reverse KL chooses by the bound less two standard errors, on fixed noise, instead.
    patience, check_every
        Stop after this many checks in a row without a better score; None never stops. A check every ``check_every``
        steps, by default a fiftieth of the run and at least 20, or an epoch if a clock ends the run. The best
        parameters are restored at the end.
    warmup
        Reverse KL: the fraction of the steps in which log p̃ is tempered by β from 0.01 up to 1, which helps a flow to
        find every mode.
    bound_samples
        Fresh draws behind the final ``bound`` of reverse KL.
    seed
        An int repeats the run bit for bit and leaves torch's global stream alone.
    callback
        Called with every row of the history; raise KeyboardInterrupt in it to stop.

    Ctrl-C restores the best parameters so far and returns with ``stopped="interrupted"``. A loss or a gradient that
    is not finite raises a FloatingPointError that says where, and the flow keeps its last good parameters.

    On a GPU a step of data (forward, backward, Adam) is one CUDA graph where every pass of the flow does the same
    operations; then a loss that is not finite is noticed at the next check.
    """
    params = _check_flow(flow)
    steps, every = lengths(steps, seconds, check_every, len(target) // batch_size if isinstance(target, Tensor) else 20)
    settings = FlowSettings(
        steps=steps, batch_size=batch_size, samples=samples, lr=lr, schedule=schedule, clip=clip, validation=validation,
        patience=patience, log_every=every, warmup=warmup,
    )  # fmt: skip
    key = rng.integer(seed)
    objective: Objective
    if matching:
        if not isinstance(target, Tensor):
            raise ValueError(f"matching fits data, got {type(target).__name__}; pass a tensor (rows, *event)")
        given = (target, context, batch_size, validation, key)
        objective = FlowMatching(flow, *given, path=path, coupling=coupling)
    elif isinstance(target, Tensor):
        objective = MaximumLikelihood(flow, target, context, batch_size, validation, key)
    elif callable(target):
        objective = ReverseKL(flow, target, context, samples, batch_size, settings.warmup_steps, key)
    else:
        raise ValueError(
            f"target is {type(target).__name__}; pass data as a tensor (torch.as_tensor), or a function log_density(x)"
        )
    start = time.monotonic()
    problem = FlowProblem(objective, (optimizer or adam)(params, lr=lr), settings, callback, seconds)
    with torch.enable_grad():
        stopped = problem.fit(key, progress)
    bound = None
    if isinstance(objective, ReverseKL):
        try:
            with rng.isolated(key, params[0].device):
                bound = elbo(flow, objective.log_density, bound_samples, objective.context, rng.fold(key, "bound"))
        except KeyboardInterrupt:  # a second Ctrl-C: the parameters are safe, only the number is missing
            stopped = "interrupted"
    found = problem.result(stopped, time.monotonic() - start, flow.transform.ladj_kind)
    return found if bound is None else replace(found, bound=bound.value, standard_error=bound.standard_error)


@dataclass(frozen=True, kw_only=True)
class FlowSettings(Settings):
    """The settings of ``fit``."""

    samples: int
    warmup: float
    schedule: Any = "cosine"

    def __post_init__(self) -> None:
        self._check_whole("steps", "batch_size", "samples", "patience", "log_every")
        if not 0 < self.lr < math.inf:
            raise ValueError(f"lr must be positive and finite, got {self.lr}")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be positive, got {self.clip}; pass None for no clipping")
        for name in ("validation", "warmup"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is a fraction in [0, 1), got {getattr(self, name)}")
        if self.schedule not in ("cosine", "constant") and not callable(self.schedule):
            raise ValueError(
                f"schedule must be 'cosine', 'constant' or a function of the fraction done, got {self.schedule!r}"
            )

    @property
    def warmup_steps(self) -> int:
        """Steps over which a density is tempered."""
        return int(self.warmup * (self.steps or 0))

    def rate(self, done: float) -> float:
        if callable(self.schedule):
            return self.schedule(done)
        return 1.0 if self.schedule == "constant" else min(1.0, 0.1 + done / 0.02) * SCHEDULES["cosine"](done)

    def make_scheduler(self, optimizer: torch.optim.Optimizer) -> None:
        return None


def lengths(steps: int | None, seconds: float | None, check_every: int | None, epoch: int) -> tuple[int, int]:
    """The most steps of a run, and the steps from one check to the next."""
    if seconds is not None and not seconds > 0:
        raise ValueError(f"seconds must be positive, got {seconds}")
    most = (2000 if seconds is None else ENDLESS) if steps is None else steps
    return most, check_every or max(20, most // 50 if seconds is None else epoch)


class FlowProblem(Problem):
    """A flow in training, with the state for an interruption at any step; a time limit may end it."""

    def __init__(
        self,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        settings: FlowSettings,
        callback: Callable[[Check], object] | None,
        seconds: float | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings if seconds is None else replace(settings, schedule=self._by_clock)
        self.flow, self.target, self.optimizer = objective.flow, objective, optimizer
        self.callback = callback
        self.title = "fitting" if seconds is None else f"fitting for {seconds:g} s"
        self.begun, self.seconds, self.usual_rate = time.monotonic(), seconds, settings.rate
        self.good = _Snapshot(self.flow)
        self.history: list[Check] = []
        self.best_score, self.best_step, self.attempt = math.inf, 0, 0
        self.sum, self.count = objective.anchor.new_zeros((), dtype=torch.float64), 0
        self.recordable = objective.recordable and capturable(optimizer, objective.anchor.device)
        self.norm: Tensor = objective.anchor.new_zeros(())
        self.inputs: tuple[Any, ...] = ()

    @property
    def elapsed(self) -> float:
        """The fraction of the seconds that is over; 0 without a clock."""
        return 0.0 if self.seconds is None else min(1.0, (time.monotonic() - self.begun) / self.seconds)

    def _by_clock(self, done: float) -> float:
        """The rate; it rises by steps, since the first of them may take long."""
        return self.usual_rate(max(done, self.elapsed)) * min(1.0, self.attempt / WARM + 0.01)

    def result(self, stopped: Stopped, seconds: float, ladj: Ladj) -> FitResult:
        """What there is to say of the fit in the end."""
        return FitResult(
            objective=self.target.name,
            measure=self.target.measure,
            history=tuple(self.history),
            best=self.best_score,
            best_step=self.best_step,
            steps=self.done,
            stopped=stopped,
            seconds=seconds,
            ladj=ladj,
        )

    def fit(self, seed: int, progress: Show) -> Stopped:
        """Run; whatever happens, the flow keeps parameters that gave a finite loss."""
        flow, steps = self.flow, Steps(self.settings.log_every)  # an epoch ends with a check
        try:
            hooks = Hooks(self._score, None if self.recordable else self._keep, self._record)
            state = fit_module(self, steps, self.settings, seed=seed, progress=progress, hooks=hooks)
            self.done = state.step
            if not self.history:
                self.good.restore()
        except FloatingPointError as error:
            reason = self._blame() or error
            self.good.restore()
            message = f"step {self.attempt}: {reason}. The flow keeps its last good parameters"
            raise FloatingPointError(message) from None
        except BaseException as error:
            self.good.restore()
            error.add_note(
                f"at step {self.attempt} of bayou.flows.fitting.fit; the flow keeps its last good parameters"
            )
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            flow.eval()
        return "patience" if state.stopped == "early" else state.stopped  # type: ignore[return-value]

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        return self.optimizer

    def before_step(self, step: int, steps: int) -> None:
        self.attempt, self.warming = step + 1, step < self.settings.warmup_steps
        inputs = self.target.inputs(step)
        if not self.recordable or not self.inputs:
            self.inputs = inputs
        else:  # a recorded step reads them where they were when it was recorded
            for mine, given in zip(self.inputs, inputs, strict=True):
                mine.copy_(given, non_blocking=True)

    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        loss = self.target.value(*self.inputs)
        return loss, {"loss": loss.detach()}

    def _keep(self, step: int) -> None:
        self.good.save()  # these parameters gave a finite loss; those after the update may not

    def after_step(self, numbers: dict[str, Tensor]) -> bool:
        """The mean loss since the last record, left on the device; whether the time is over."""
        self.sum, self.count = self.sum + numbers["loss"], self.count + 1
        numbers["loss"] = self.sum / self.count
        if self.seconds is not None and self.attempt % AHEAD == 0:
            float(self.sum)  # steps may run ahead of the device, but not far: the clock is the device's
        return self.elapsed >= 1.0

    def _score(self) -> float:
        score = self.target.score()
        self.version = self.target.version
        return score

    def _record(self, record: dict[str, float]) -> None:
        if "validation" not in record:  # the first step has a record, but is judged with the others
            return
        score = record["validation"]
        if self.recordable and math.isfinite(score):
            self.good.save()
        if score < self.best_score:
            self.best_score, self.best_step = score, self.attempt
        rate, norm = float(self.optimizer.param_groups[0]["lr"]), float(self.norm)
        self.history.append(Check(self.attempt, record["loss"], score, rate, norm))
        self.sum, self.count = torch.zeros_like(self.sum), 0
        if self.callback is not None:
            self.callback(self.history[-1])

    def _blame(self) -> str | None:
        """The first parameter whose value or gradient is not finite."""
        for name, p in self.flow.named_parameters():
            for what, value in (("parameter", p), ("the gradient of", p.grad)):
                if value is not None and not value.isfinite().all():
                    bad = int((~value.isfinite()).sum())
                    return f"{what} '{name}' has {bad} NaN or infinite values of {value.numel()}; {REMEDY}"
        return None


class _Snapshot:
    """A copy of the state of a module, cheap to keep up to date at every step."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.live = module.state_dict()  # its tensors share memory with the module's own
        self.kept = {name: t.clone() for name, t in self.live.items()}

    @torch.no_grad()
    def save(self) -> None:
        torch._foreach_copy_(list(self.kept.values()), list(self.live.values()))

    def restore(self) -> None:
        # Through load_state_dict, because a module may keep more than tensors (act norm: whether it has seen data).
        self.module.load_state_dict(self.kept)


def adam(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    """Adam, fused where it can be."""
    # A flow has many small tensors; the fused kernel spares their Python loop, which is a sixth of a step on a CPU.
    device = params[0].device.type
    return torch.optim.Adam(params, lr=lr, fused=device in ("cpu", "cuda"), capturable=device == "cuda")


def _check_flow(flow: Flow) -> list[nn.Parameter]:
    if not isinstance(flow, Flow):
        raise ValueError(f"fit takes a Flow, got {type(flow).__name__}; wrap a transform: Flow(StandardNormal(2), t)")
    params = [p for p in flow.parameters() if p.requires_grad]
    if not params:
        raise ValueError("the flow has no parameter that requires a gradient; there is nothing to fit")
    return params

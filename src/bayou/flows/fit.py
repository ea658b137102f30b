"""Fitting a flow to data or to a density, in one call."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.flows.flow import Flow
from bayou.flows.objectives import REMEDY, LogDensity, MaximumLikelihood, Objective, ReverseKL, elbo
from bayou.flows.transform import Ladj
from bayou.progress import Progress, Show

Stopped = Literal["finished", "patience", "interrupted"]
Schedule = Literal["cosine", "constant"] | Callable[[float], float]


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

    objective: Literal["maximum likelihood", "reverse KL"]
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
    steps: int = 2000,
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

    A tensor of data, (rows, \*event), is fitted by **maximum likelihood**: minimise −E_data[log q(x | context)].
    A callable log p̃, (n, \*event) → (n,), is fitted by **reverse KL**: minimise E_q[log q(x) − log p̃(x)]
    = KL(q ‖ p) − log Z, p̃ being known up to its integral Z (Rezende & Mohamed 2015). With a context (rows,
    context_dim) the callable takes (x, context), x (n, rows, \*event), and answers (n, rows).

    Parameters
    ----------
    steps, lr, optimizer, schedule
        At most ``steps`` updates by ``optimizer(parameters, lr=lr)``, by default Adam. The schedule multiplies lr by
        a function of the fraction done: "cosine" (with a warm-up of 2 %), "constant", or one of your own.
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
        steps, by default a fiftieth of the run and at least 20. The best parameters are restored at the end.
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
    """
    params = _check_flow(flow)
    _check_numbers(steps, batch_size, samples, lr, clip, validation, patience, check_every, warmup)
    every = check_every or max(20, steps // 50)
    key = rng.integer(seed)
    warmup_steps = int(warmup * steps)
    objective: Objective
    if isinstance(target, Tensor):
        objective = MaximumLikelihood(flow, target, context, batch_size, validation, key)
    elif callable(target):
        objective = ReverseKL(flow, target, context, samples, batch_size, warmup_steps, key)
    else:
        raise ValueError(
            f"target is {type(target).__name__}; pass data as a tensor (torch.as_tensor), or a function log_density(x)"
        )
    start = time.monotonic()
    run = _Run(flow, params, objective, (optimizer or _adam)(params, lr=lr), _schedule(schedule), clip)
    with rng.isolated(key, params[0].device), torch.enable_grad():
        stopped = run(steps, every, patience, warmup_steps, progress, callback)
        bound = None
        if isinstance(objective, ReverseKL):
            try:
                bound = elbo(flow, objective.log_density, bound_samples, objective.context, rng.fold(key, "bound"))
            except KeyboardInterrupt:  # a second Ctrl-C: the parameters are safe, only the number is missing
                stopped = "interrupted"
    return FitResult(
        objective="maximum likelihood" if isinstance(objective, MaximumLikelihood) else "reverse KL",
        measure=objective.measure,
        history=tuple(run.history),
        best=run.best_score,
        best_step=run.best_step,
        steps=run.step,
        stopped=stopped,
        seconds=time.monotonic() - start,
        bound=bound and bound.value,
        standard_error=bound and bound.standard_error,
        ladj=flow.transform.ladj_kind,
    )


class _Run:
    """The loop, and what it must remember to be left at any moment."""

    def __init__(
        self,
        flow: Flow,
        params: list[nn.Parameter],
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        schedule: Callable[[float], float],
        clip: float | None,
    ) -> None:
        self.flow, self.params, self.objective, self.optimizer = flow, params, objective, optimizer
        self.schedule, self.clip = schedule, math.inf if clip is None else clip
        self.base_lr = [group["lr"] for group in optimizer.param_groups]
        self.good, self.best = _Snapshot(flow), _Snapshot(flow)
        self.history: list[Check] = []
        self.best_score, self.best_step, self.step = math.inf, 0, 0
        self.attempt = 0  # the step under way, counted from 1

    def __call__(
        self,
        steps: int,
        every: int,
        patience: int | None,
        warmup_steps: int,
        progress: Show,
        callback: Callable[[Check], object] | None,
    ) -> Stopped:
        stopped: Stopped = "finished"
        losses: list[float] = []
        self.flow.train()
        try:
            with Progress("fitting", steps, progress) as bar:
                for step in range(steps):
                    self.attempt = step + 1
                    loss, norm = self._update(step, steps)
                    losses.append(loss)
                    self.step = step + 1
                    bar.update(self.step, loss=loss, best=self.best_score)
                    if self.step % every and self.step < steps:
                        continue
                    row = self._check(sum(losses) / len(losses), norm)
                    losses = []
                    if callback is not None:
                        callback(row)
                    stale = (self.step - max(self.best_step, warmup_steps)) // every
                    if patience is not None and stale >= patience and self.step < steps:
                        stopped = "patience"
                        break
            self.best.restore()
        except KeyboardInterrupt:
            stopped = "interrupted"
            (self.best if self.history else self.good).restore()
        except FloatingPointError as error:
            reason = self._blame() or error
            self.good.restore()
            message = f"step {self.attempt}: {reason}. The flow keeps its last good parameters"
            raise FloatingPointError(message) from None
        except BaseException as error:
            self.good.restore()
            error.add_note(f"at step {self.attempt} of bayou.flows.fit; the flow keeps its last good parameters")
            raise
        finally:
            self.optimizer.zero_grad(set_to_none=True)
            self.flow.eval()
        return stopped

    def _update(self, step: int, steps: int) -> tuple[float, float]:
        """One step of the optimizer: (loss, norm of the gradient before clipping)."""
        for group, lr in zip(self.optimizer.param_groups, self.base_lr, strict=True):
            group["lr"] = lr * self.schedule(step / steps)
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.objective.loss(step)
        loss.backward()
        gradients = [p.grad for p in self.params if p.grad is not None]
        norm = nn.utils.get_total_norm(gradients)
        value, size = loss.item(), norm.item()
        if not math.isfinite(value + size):
            raise FloatingPointError(f"the loss is {value} and the norm of its gradient {size}; {REMEDY}")
        nn.utils.clip_grads_with_norm_(self.params, self.clip, norm)
        self.good.save()  # these parameters gave a finite loss; those after the update may not
        self.optimizer.step()
        return value, size

    @torch.no_grad()
    def _check(self, loss: float, norm: float) -> Check:
        self.flow.eval()
        score = self.objective.score()
        self.flow.train()
        if score < self.best_score:
            self.best_score, self.best_step = score, self.step
            self.best.save()
        row = Check(self.step, loss, score, self.optimizer.param_groups[0]["lr"], norm)
        self.history.append(row)
        return row

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


def _adam(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
    # A flow has many small tensors; the fused kernel spares their Python loop, which is a sixth of a step on a CPU.
    return torch.optim.Adam(params, lr=lr, fused=params[0].device.type in ("cpu", "cuda"))


def _schedule(schedule: Schedule) -> Callable[[float], float]:
    if callable(schedule):
        return schedule
    if schedule == "constant":
        return lambda done: 1.0
    if schedule == "cosine":
        return lambda done: min(1.0, 0.1 + done / 0.02) * 0.5 * (1 + math.cos(math.pi * done))
    raise ValueError(f"schedule must be 'cosine', 'constant' or a function of the fraction done, got {schedule!r}")


def _check_flow(flow: Flow) -> list[nn.Parameter]:
    if not isinstance(flow, Flow):
        raise ValueError(f"fit takes a Flow, got {type(flow).__name__}; wrap a transform: Flow(StandardNormal(2), t)")
    params = [p for p in flow.parameters() if p.requires_grad]
    if not params:
        raise ValueError("the flow has no parameter that requires a gradient; there is nothing to fit")
    return params


def _check_numbers(
    steps: int,
    batch_size: int,
    samples: int,
    lr: float,
    clip: float | None,
    validation: float,
    patience: int | None,
    check_every: int | None,
    warmup: float,
) -> None:
    counts = {"steps": steps, "batch_size": batch_size, "samples": samples}
    counts |= {name: n for name, n in (("patience", patience), ("check_every", check_every)) if n is not None}
    for name, count in counts.items():
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"{name} must be a whole number of at least 1, got {count!r}")
    if not 0 < lr < math.inf:
        raise ValueError(f"lr must be positive and finite, got {lr}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip must be positive, got {clip}; pass None for no clipping")
    for name, fraction in (("validation", validation), ("warmup", warmup)):
        if not 0 <= fraction < 1:
            raise ValueError(f"{name} is a fraction in [0, 1), got {fraction}")

"""Results of checks of a posterior, and the checks that need only its training history.

This module judges: comparisons on rows (``inference/baseline_checks``, ``diagnostics/checks``)
return numbers or checks, and the limits of a warning and of a failure are here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, final

from bayou.core.progress import setting_name, spell
from bayou.training.convergence import MIN_TESTED_STEPS

if TYPE_CHECKING:
    from bayou.posteriors.posterior import Posterior

Status = Literal["ok", "warning", "failed"]
MARKS: dict[Status, str] = {"ok": "ok     ", "warning": "WARNING", "failed": "FAILED "}
WARNING_RHAT = 1.1  # of predictions: a larger one is a warning
FAILURE_RHAT = 1.5  # of predictions: a larger one is a failure
MIN_EFFECTIVE_SHARE = 0.1  # effective draws by their weights: fewer, and annealing was too fast
MAX_GRADIENT_NOISE = 0.2  # h²·λ of a step: a larger one makes variances too wide
MIN_KL = 1.0  # nats for all weights: less is the prior
LARGE_EXCESS = 0.1  # nats per example by which an NLL is worse: a failure rather than a warning
CONCERNS = {  # by the name of a check: what its warning or failure says about a method
    "end": "did not run to its end",
    "converged": "may not have converged",
    "divergences": "had divergent trajectories",
    "collapse": "ignores the data",
    "mode": "is worse than its own mode",
    "mixing": "has chains that did not mix",
    "annealing": "was annealed too fast",
    "finite": "has rows without a finite likelihood",
    "constant": "is no better than a constant",
    "linear": "is worse than a linear model",
    "coverage": "has intervals of the wrong width",
    "calibration": "has confidences that do not match its accuracy",
}


@final
@dataclass(frozen=True)
class Check:
    """One check of a posterior.

    Args:
        name: of the check, such as "converged".
        status: "ok", "warning" or "failed".
        text: a sentence with the numbers and, unless it is ok, what to do.
    """

    name: str
    status: Status
    text: str

    def __str__(self) -> str:
        return f"{MARKS[self.status]}  {self.name}: {self.text}"


@final
@dataclass(frozen=True)
class Checks:
    """All checks of a posterior, the worst first; ``print`` shows them.

    It is iterable, and a check is found by its name: ``checks["converged"].status``.

    Args:
        results: the checks, in any order; none by default.
    """

    results: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        order = ("failed", "warning", "ok")
        worst_first = sorted(self.results, key=lambda check: order.index(check.status))
        object.__setattr__(self, "results", tuple(worst_first))

    @property
    def flags(self) -> tuple[Check, ...]:
        """The checks that are not ok."""
        return tuple(check for check in self.results if check.status != "ok")

    @property
    def status(self) -> Status:
        """The worst status."""
        return self.results[0].status if self.results else "ok"

    def __iter__(self) -> Iterator[Check]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __contains__(self, name: object) -> bool:
        return any(check.name == name for check in self.results)

    def __getitem__(self, name: str) -> Check:
        for check in self.results:
            if check.name == name:
                return check
        names = ", ".join(check.name for check in self.results) or "none"
        raise KeyError(f"there is no check {name!r}; there are {names}")

    def __str__(self) -> str:
        if not self.results:
            return "nothing was checked; bayou.diagnostics.check(posterior, train, held)"
        return "\n".join(map(str, self.results))

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain values."""
        return [asdict(check) for check in self.results]

    @staticmethod
    def from_json(value: Any) -> Checks:
        """Return the checks that ``to_json`` described.

        Args:
            value: plain values.

        Raises:
            ValueError: for anything else.
        """
        if not isinstance(value, list):
            raise ValueError(f"checks must be a list, got {type(value).__name__}")
        checks = []
        for entry in value:
            check = Check(**entry)
            has_texts = isinstance(check.name, str) and isinstance(check.text, str)
            if check.status not in MARKS or not has_texts:
                raise ValueError(
                    f"a check needs a name, a status of {', '.join(MARKS)} and a text, "
                    f"got {entry!r:.60}"
                )
            checks.append(check)
        return Checks(tuple(checks))


def concern(name: str) -> str:
    """Return what a check that is not ok says about a method: "may not have converged".

    Args:
        name: of the check, such as "converged".
    """
    return CONCERNS.get(name, f"was flagged by the check of {name}")


def describe_flag(name: str, status: Status, text: str) -> str:
    """Return a sentence about a check that is not ok.

    The name of the check is not taken for its result.

    Args:
        name: of the check.
        status: "warning" or "failed".
        text: its own sentence.
    """
    result = "FAILED" if status == "failed" else "gives a WARNING"
    return f"the check {name!r} {result}: {text}"


def check_history(posterior: Posterior) -> Checks:
    """Make the checks that need no data.

    End of training, convergence, divergent trajectories, noise of the gradient, collapse,
    comparison with the mode, and mixing.

    Args:
        posterior: has a ``history``, ``stopped`` and ``mixing``.
    """
    history = posterior.history
    last = history[-1] if history else {}
    checks = []
    if posterior.stopped in ("interrupted", "diverged"):
        checks.append(_check_end(posterior.stopped))
    # A Laplace approximation, whose record has an evidence, takes no steps: those of its start
    # count, if there are any.
    descent = [row for row in history if _is_of_optimizer(row)]
    if descent and ("elbo" in last or "log_likelihood" in last):
        steps = int(descent[-1].get("step", MIN_TESTED_STEPS)) + 1
        falls = [row["fallen"] for row in history if "fallen" in row]
        checks.append(_check_convergence(_rising_rates(history), steps, max(falls, default=0.0)))
    if "divergences" in last:
        checks.append(_check_divergences(int(last["divergences"])))
    if "gradient_noise" in last:
        checks.append(_check_gradient_noise(last["gradient_noise"]))
    collapsed = _collapsed_component(history)
    if collapsed is not None:
        checks.append(_check_collapsed_component(collapsed))
    elif "elbo" in last and "kl" in last:
        checks.append(_check_collapse(last))
    if "mode_nll" in last:
        checks.append(_check_mode(last))
    checks += _check_chains(posterior.mixing or {})
    return Checks(tuple(checks))


def _is_of_optimizer(record: dict[str, float]) -> bool:
    """Return whether a record of the history is that of an optimizer's step."""
    if "elbo" in record:
        return True
    return "log_likelihood" in record and "log_evidence" not in record


def _check_chains(mixing: dict[str, Any]) -> list[Check]:
    """Judge the diagnostics of a sampler for its own chains."""
    if mixing.get("lost"):
        text = (
            f"the log joint of the draws is {mixing['below_start']:,.0f} nats below the start of "
            "the chains on average: they are not draws of the posterior; run longer"
        )
        return [Check("mixing", "failed", text)]
    if "elbo" in mixing:
        return [_check_annealing(mixing)]
    if "r_hat" not in mixing:
        return []
    check = check_mixing(mixing["r_hat"], mixing.get("ess"), " of a prediction")
    if check.status == "ok" and mixing.get("mixed") is False:
        text = f"too few independent draws: {check.text}; run longer"
        return [Check("mixing", "warning", text)]
    return [check]


def _check_annealing(mixing: dict[str, Any]) -> Check:
    """Judge the importance weights of annealed draws, which are nearly equal if they are right."""
    text = (
        f"{mixing['ess']:.1f} effective of {mixing['draws']} draws; the log weights have a "
        f"standard deviation of {mixing['spread']:.1f} nats"
    )
    if mixing["ess"] >= MIN_EFFECTIVE_SHARE * mixing["draws"]:
        return Check("annealing", "ok", text)
    advice = "use more temperatures or leapfrogs, or start from a closer family such as Inducing"
    return Check("annealing", "warning", f"{text}: annealing was too fast; {advice}")


def _check_end(stopped: str) -> Check:
    """Judge a fit that did not run to its end."""
    if stopped == "diverged":
        text = "the chain diverged and its draws are not usable; use a smaller step size"
        return Check("end", "failed", text)
    remedy = spell(
        "continue it with the same checkpoint=",
        "continue it with `bayou resume`, or train it again",
    )
    return Check("end", "warning", f"the fit was interrupted; {remedy}")


def _rising_rates(history: list[dict[str, float]]) -> list[float]:
    """Return the rates of runs that ended while their objective was rising.

    In nats per thousand steps, one for every run, such as that of a member of an ensemble, that was
    not continued.
    """
    rates: list[float] = []
    run: dict[str, float] = {}  # the last record of the current run
    for record in history:
        starts_next_run = record["step"] < run.get("step", 0.0)
        if starts_next_run and "rising" in run:
            rates.append(run["rising"])
        is_rising = record.get("rising") is not None
        # A record without seconds belongs to a method that started from this point, and did not
        # train it further.
        if is_rising or starts_next_run or "seconds" in record:
            run = record
    if "rising" in run:
        rates.append(run["rising"])
    return rates


def _check_convergence(rates: list[float], steps: int, fall: float) -> Check:
    """Judge the convergence of an optimizer.

    Args:
        rates: of runs that ended while their objective was rising, in nats per thousand steps.
        steps: of the last run.
        fall: nats by which the objective ended below its maximum; 0 for none.
    """
    if fall:
        remedy = spell("use a smaller lr or clip=1.0", "use a smaller --lr")
        text = f"the objective ended {fall:,.0f} nats below its maximum; {remedy}"
        return Check("converged", "failed", text)
    remedy = f"give more {setting_name('steps')} or {setting_name('epochs')}"
    if rates:
        text = (
            f"the objective was still rising by {max(rates):.3g} nats per thousand steps; {remedy}"
        )
        return Check("converged", "warning", text)
    if steps < MIN_TESTED_STEPS:
        text = f"{steps} steps are too few to judge convergence; {remedy}"
        return Check("converged", "warning", text)
    return Check("converged", "ok", "the objective was not rising significantly at the end")


def _check_divergences(count: int) -> Check:
    """Judge the number of divergent trajectories of a sampler."""
    if not count:
        return Check("divergences", "ok", "no trajectory diverged")
    remedy = spell("increase accept= or the warm-up", "give more --steps")
    text = (
        f"{count:,} trajectories diverged after the warm-up: part of the posterior is not "
        f"explored; {remedy}"
    )
    return Check("divergences", "warning", text)


def _check_gradient_noise(noise: float) -> Check:
    """Judge the minibatches of a sampler without a Metropolis test.

    Their noise makes some directions too wide.
    """
    text = f"noise of the gradient is {noise:.2g} in a step, in units of the posterior"
    if noise <= MAX_GRADIENT_NOISE:
        return Check("gradient noise", "ok", f"{text}, at most {MAX_GRADIENT_NOISE:g}")
    advice = "use a smaller step_size, adapt=True with a warm-up, or a larger batch_size"
    text = f"{text}: variances of the draws may be far off; {advice}"
    return Check("gradient noise", "warning", text)


def _check_collapse(record: dict[str, float]) -> Check:
    """Judge whether a variational posterior has collapsed to the prior, by its last record."""
    kl = record["kl"]
    if abs(kl) < MIN_KL:
        reason = f"the KL to the prior is {kl:.2g} nats for all weights"
    elif "collapsed" in record:
        reason = (
            f"NLL {record['nll']:.3f} on training rows, a constant {record['constant_nll']:.3f}"
        )
    elif kl < 0:
        return Check("collapse", "ok", "no collapse; the KL to the prior is known up to a constant")
    else:
        return Check("collapse", "ok", f"the KL to the prior is {kl:,.0f} nats: no collapse")
    remedy = spell(
        "start at the mode, or use a warm-up, a narrower prior or beta < 1",
        "use --warmup 0.4, a smaller --gain or a --beta below 1",
    )
    text = f"{reason}: q has collapsed to the prior, ignoring the data; {remedy}"
    return Check("collapse", "failed", text)


def _collapsed_component(history: list[dict[str, float]]) -> int | None:
    """Return the number of the first component of a mixture that has collapsed, if one has.

    The history of a mixture has no NLL of a single component.
    """
    for record in history:
        if "collapsed" in record and "member" in record and "nll" not in record:
            return int(record["member"])
    return None


def _check_collapsed_component(component: int) -> Check:
    """Judge a mixture with a component that has collapsed to the prior."""
    text = (
        f"component {component + 1} of the mixture predicts its training rows no better than a "
        "constant; the others, and its weight by held-out rows, limit what that costs"
    )
    return Check("collapse", "warning", text)


def _check_mode(record: dict[str, float]) -> Check:
    """Judge the comparison of a posterior with its mode, by its last record."""
    nll = record["nll"]
    mode_nll = record["mode_nll"]
    excess = nll - mode_nll
    limit = ""
    if "mode_allowance" in record:
        limit = f"; up to {record['mode_allowance']:+.3f} is not flagged"
    values = (
        f"NLL {nll:.3f}, the mode {mode_nll:.3f} (difference {excess:+.3f} "
        f"± {record['nll_error']:.3f}{limit})"
    )
    if "worse_than_mode" not in record:
        return Check("mode", "ok", values)
    remedy = spell(
        'use the mode; for Laplace try prior="validation", for SWAG a smaller lr',
        "use the mode (--method map); for SWAG try a smaller --lr",
    )
    status: Status = "failed" if excess > LARGE_EXCESS else "warning"
    return Check("mode", status, f"worse than its own mode: {values}; {remedy}")


def check_mixing(
    rhat: float, ess: float | None = None, subject: str = "", chance: float = 0.0
) -> Check:
    """Judge whether chains agree.

    Args:
        rhat: the worst R-hat.
        ess: the smallest effective sample size; None if it is unknown.
        subject: whose R-hat it is, such as " of a prediction".
        chance: how far R-hat may exceed 1 because chains are short; 0 by default.
    """
    size = ""
    if ess is not None and not math.isnan(ess):
        size = f" (effective sample size {ess:,.0f})"
    if math.isnan(rhat) or rhat < WARNING_RHAT + chance:
        return Check("mixing", "ok", f"the worst R-hat{subject} is {rhat:.3f}{size}")
    status: Status = "failed" if rhat > FAILURE_RHAT + chance else "warning"
    text = f"the chains have not mixed: the worst R-hat{subject} is {rhat:.2f}{size}; run longer"
    return Check("mixing", status, text)

"""Results of checks of a posterior, and the checks that need only its training history."""

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
MAX_RHAT = 1.1, 1.5  # of predictions: above, a warning and a failure
MIN_EFFECTIVE_SHARE = 0.1  # effective draws by their weights: fewer, and annealing was too fast
MAX_GRADIENT_NOISE = 0.2  # h²·λ of a step, chosen on one linear regression with a known posterior
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
    """One check: its name, its status and a sentence with the numbers and, unless it is ok, what to
    do.
    """

    name: str
    status: Status
    text: str

    def __str__(self) -> str:
        return f"{MARKS[self.status]}  {self.name}: {self.text}"


@final
@dataclass(frozen=True)
class Checks:
    """All checks of a posterior, the worst first; ``print`` shows them."""

    found: tuple[Check, ...] = ()

    def __post_init__(self) -> None:
        order = ("failed", "warning", "ok")
        object.__setattr__(
            self, "found", tuple(sorted(self.found, key=lambda check: order.index(check.status)))
        )

    @property
    def flags(self) -> tuple[Check, ...]:
        """The checks that are not ok."""
        return tuple(check for check in self.found if check.status != "ok")

    @property
    def status(self) -> Status:
        """The worst status."""
        return self.found[0].status if self.found else "ok"

    def __iter__(self) -> Iterator[Check]:
        return iter(self.found)

    def __len__(self) -> int:
        return len(self.found)

    def __contains__(self, name: object) -> bool:
        return any(check.name == name for check in self.found)

    def __getitem__(self, name: str) -> Check:
        for check in self.found:
            if check.name == name:
                return check
        raise KeyError(
            f"there is no check {name!r}; there are {', '.join(c.name for c in self.found) or 'none'}"
        )

    def __str__(self) -> str:
        return (
            "\n".join(map(str, self.found))
            or "nothing was checked; bayou.diagnostics.check(posterior, train, held)"
        )

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain values."""
        return [asdict(check) for check in self.found]

    @staticmethod
    def from_json(value: Any) -> Checks:
        """Return the checks that ``to_json`` described; a ValueError for anything else."""
        if not isinstance(value, list):
            raise ValueError(f"checks must be a list, got {type(value).__name__}")
        results = []
        for entry in value:
            check = Check(**entry)
            if (
                check.status not in MARKS
                or not isinstance(check.name, str)
                or not isinstance(check.text, str)
            ):
                raise ValueError(
                    f"a check needs a name, a status of {', '.join(MARKS)} and a text, got {entry!r:.60}"
                )
            results.append(check)
        return Checks(tuple(results))


def concern(name: str) -> str:
    """What a warning or a failure of a check says about a method, as a predicate: "may not have
    converged".

    Args:
        name: of the check, such as "converged".
    """
    return CONCERNS.get(name, f"was flagged by the check of {name}")


def describe_flag(name: str, status: Status, text: str) -> str:
    """A sentence about a check that is not ok, in which the name of the check is not taken for its
    result.

    Args:
        name: of the check.
        status: "warning" or "failed".
        text: its own sentence.
    """
    result = "FAILED" if status == "failed" else "gives a WARNING"
    return f"the check {name!r} {result}: {text}"


def of_history(posterior: Posterior) -> Checks:
    """Checks that need no data: end of training, convergence, divergent trajectories, collapse,
    mixing.
    """
    history = posterior.history
    found = (
        [_stopped(posterior.stopped)] if posterior.stopped in ("interrupted", "diverged") else []
    )
    last = history[-1] if history else {}
    # A Laplace approximation, whose record has an evidence, takes no steps: those of its start
    # count, if there are any.
    descent = [
        row
        for row in history
        if "elbo" in row or ("log_likelihood" in row and "log_evidence" not in row)
    ]
    if descent and ("elbo" in last or "log_likelihood" in last):
        lost = [row["fallen"] for row in history if "fallen" in row]
        found.append(
            _converged(
                _rising(history),
                int(descent[-1].get("step", MIN_TESTED_STEPS)) + 1,
                max(lost, default=0.0),
            )
        )
    if "divergences" in last:
        found.append(_divergences(int(last["divergences"])))
    if "gradient_noise" in last:
        found.append(_gradient_noise(last["gradient_noise"]))
    if "elbo" in last and "kl" in last:
        found.append(_collapse(last))
    if "mode_nll" in last:
        found.append(_mode(last))
    return Checks((*found, *_mixing(posterior.mixing or {})))


def _mixing(mixing: dict[str, Any]) -> list[Check]:
    """The diagnostics of a sampler for its own chains."""
    if mixing.get("lost"):
        below = f"{mixing['below_start']:,.0f} nats below the start of the chains"
        text = f"the log joint of the draws is {below} on average: they are not draws of the posterior; run longer"
        return [Check("mixing", "failed", text)]
    if "elbo" in mixing:
        return [_annealing(mixing)]
    if "r_hat" not in mixing:
        return []
    found = mixed(mixing["r_hat"], mixing.get("ess"), " of a prediction")
    if found.status == "ok" and mixing.get("mixed") is False:
        found = Check("mixing", "warning", f"too few independent draws: {found.text}; run longer")
    return [found]


def _annealing(mixing: dict[str, Any]) -> Check:
    """Annealed draws that follow the posterior have nearly equal importance weights."""
    even = f"{mixing['ess']:.1f} effective of {mixing['draws']} draws"
    found = f"{even}; the log weights have a standard deviation of {mixing['spread']:.1f} nats"
    if mixing["ess"] >= MIN_EFFECTIVE_SHARE * mixing["draws"]:
        return Check("annealing", "ok", found)
    advice = "use more temperatures or leapfrogs, or start from a closer family such as Inducing"
    return Check("annealing", "warning", f"{found}: annealing was too fast; {advice}")


def _stopped(why: str) -> Check:
    if why == "diverged":
        return Check(
            "end",
            "failed",
            "the chain diverged and its draws are not usable; use a smaller step size",
        )
    way_out = spell(
        "continue it with the same checkpoint=",
        "continue it with `bayou resume`, or train it again",
    )
    return Check("end", "warning", f"the fit was interrupted; {way_out}")


def _rising(history: list[dict[str, float]]) -> list[float]:
    """Nats per thousand steps for every run that ended while its objective was rising and was not
    continued.
    """
    found = list[float]()
    open_: dict[str, float] = {}
    for row in history:
        if row.get("rising") is not None or row["step"] < open_.get(
            "step", 0.0
        ):  # the next member starts
            found += [open_["rising"]] if "rising" in open_ and row["step"] < open_["step"] else []
            open_ = row
        elif (
            "seconds" in row
        ):  # further training; a row without it belongs to a method that started from this point
            open_ = row
    return found + ([open_["rising"]] if "rising" in open_ else [])


def _converged(rates: list[float], steps: int, lost: float) -> Check:
    if lost:
        way_out = spell("use a smaller lr or clip=1.0", "use a smaller --lr")
        text = f"the objective ended {lost:,.0f} nats below its maximum; {way_out}"
        return Check("converged", "failed", text)
    longer = f"give more {setting_name('steps')} or {setting_name('epochs')}"
    if not rates and steps < MIN_TESTED_STEPS:
        text = f"{steps} steps are too few to judge convergence; {longer}"
        return Check("converged", "warning", text)
    if not rates:
        return Check("converged", "ok", "the objective was not rising significantly at the end")
    return Check(
        "converged", "warning",
        f"the objective was still rising by {max(rates):.3g} nats per thousand steps; {longer}",
    )  # fmt: skip


def _divergences(count: int) -> Check:
    if not count:
        return Check("divergences", "ok", "no trajectory diverged")
    return Check(
        "divergences", "warning",
        f"{count:,} trajectories diverged after the warm-up: part of the posterior is not explored; "
        + spell("increase accept= or the warm-up", "give more --steps"),
    )  # fmt: skip


def _gradient_noise(noise: float) -> Check:
    """Minibatches of a sampler without a Metropolis test: their noise makes some directions too
    wide.
    """
    text = f"noise of the gradient is {noise:.2g} in a step, in units of the posterior"
    if noise <= MAX_GRADIENT_NOISE:
        return Check("gradient noise", "ok", f"{text}, at most {MAX_GRADIENT_NOISE:g}")
    advice = "use a smaller step_size, adapt=True with a warm-up, or a larger batch_size"
    return Check(
        "gradient noise", "warning", f"{text}: variances of the draws may be far off; {advice}"
    )


def _collapse(last: dict[str, float]) -> Check:
    kl = last["kl"]
    advice = spell(
        "start at the mode, or use a warm-up, a narrower prior or beta < 1",
        "use --warmup 0.4, a smaller --gain or a --beta below 1",
    )
    if kl < MIN_KL:
        said = f"the KL to the prior is {kl:.2g} nats for all weights"
    elif "collapsed" in last:
        said = f"NLL {last['nll']:.3f} on training rows, a constant {last['constant_nll']:.3f}"
    else:
        return Check("collapse", "ok", f"the KL to the prior is {kl:,.0f} nats: no collapse")
    return Check(
        "collapse", "failed", f"{said}: q has collapsed to the prior, ignoring the data; {advice}"
    )


def _mode(last: dict[str, float]) -> Check:
    own, mode, error = last["nll"], last["mode_nll"], last["nll_error"]
    limit = (
        f"; up to {last['mode_allowance']:+.3f} is not flagged" if "mode_allowance" in last else ""
    )
    values = (
        f"NLL {own:.3f}, the mode {mode:.3f} (difference {own - mode:+.3f} ± {error:.3f}{limit})"
    )
    if "worse_than_mode" not in last:
        return Check("mode", "ok", values)
    way_out = spell(
        'use the mode; for Laplace try prior="validation", for SWAG a smaller lr',
        "use the mode (--method map); for SWAG try a smaller --lr",
    )
    text = f"worse than its own mode: {values}; {way_out}"
    return Check("mode", "failed" if own - mode > LARGE_EXCESS else "warning", text)


def mixed(rhat: float, ess: float | None = None, what: str = "", chance: float = 0.0) -> Check:
    """Whether chains agree; ``chance``: how far R-hat may exceed 1 because chains are short."""
    size = "" if ess is None or math.isnan(ess) else f" (effective sample size {ess:,.0f})"
    if math.isnan(rhat) or rhat < MAX_RHAT[0] + chance:
        return Check("mixing", "ok", f"the worst R-hat{what} is {rhat:.3f}{size}")
    status: Status = "failed" if rhat > MAX_RHAT[1] + chance else "warning"
    return Check(
        "mixing",
        status,
        f"the chains have not mixed: the worst R-hat{what} is {rhat:.2f}{size}; run longer",
    )

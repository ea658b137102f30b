"""Every method beside the true posterior of its network, which long HMC
runs give.

``truth_reference.py`` made the references and their evidence; here each method gets the same
network, prior, noise and rows. A line that is added to ``LINES`` is a line of the table.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any, final

import torch

import bayou
from bayou import metrics
from bayou.app.report.judge import prediction_options
from bayou.app.runs.interrupt import raise_if_interrupted
from bayou.core.progress import Show
from bayou.inference.method import Method
from bayou.network.target import PriorRules
from bayou.posteriors import Empirical, Guided, Mixture, Posterior
from bayou.select import with_dropout
from experiments import study
from experiments.experiment import Budget
from experiments.study import Fit, Found
from experiments.truth_reference import PRIOR, PROBLEMS, Reference, reference

SAMPLES = 500  # networks that a prediction averages: total variation is known to about .002
DATA = tuple(PROBLEMS)
VI_LR = 1e-2  # as by name; the ELBO/N of FFG on digits after 3,000 steps: −1.161 at 5e-3, −1.069 here, −1.030 at 2e-2


@final
@dataclass(frozen=True)
class Line:
    """One line of the table: a method, what is particular about it, and where it can go."""

    label: str
    method: Callable[[Budget], Method]
    note: str = ""
    prior: PriorRules = PRIOR
    dropout: float = 0.0
    data: tuple[str, ...] = DATA
    body: Callable[[Budget], Method] | None = (
        None  # fits the layers below the last, which alone ``method`` is given
    )


def _map(budget: Budget, **changes: Any) -> bayou.MAP:
    return bayou.MAP(**budget.settings(**changes))


def _vi(guide: Any, **changes: Any) -> Callable[[Budget], Method]:
    return lambda budget: bayou.VI(
        guide, **budget.settings(**{"lr": VI_LR, "warmup": 0.3} | changes)
    )


def _laplace(structure: str, **changes: Any) -> Callable[[Budget], Method]:
    return lambda budget: bayou.Laplace(structure, start=_map(budget), **changes)  # type: ignore[arg-type]


def _chains(kind: Callable[..., Method]) -> Callable[[Budget], Method]:
    return lambda budget: kind(
        start=_map(budget), chains=4, steps=budget.steps, batch_size=budget.batch_size
    )


def _swag(lr: float) -> Callable[[Budget], Method]:
    return lambda budget: bayou.SWAG(
        start=_map(budget), **budget.settings(lr=lr, schedule="constant")
    )


def _ivon(noise: float) -> Callable[[Budget], Method]:
    """Steps and curvature in units of the noise variance."""
    rates: dict[str, Any] = {"lr": 0.5 * noise**2}
    return lambda budget: bayou.IVON(
        hessian=0.05 / noise**2, local=True, **budget.settings(**rates)
    )


def _inducing(lr: float, scale_lr: float) -> Callable[[Budget], Method]:
    """Pseudo-data that begin at the outputs of a mode; the rates are those of the best ELBO of the
    training rows.
    """
    rates: dict[str, Any] = {"lr": lr, "scale_lr": scale_lr, "warmup": 0.0, "clip": 1.0}
    return lambda budget: bayou.VI(
        bayou.Inducing(100), start=_map(budget), **budget.settings(**rates)
    )


def _cooler(budget: Budget) -> bayou.VI:
    """From a mode, with half the KL: near its best a bound is flat, and what it costs it gives back
    in likelihood.
    """
    return bayou.VI(bayou.MeanField(), start=_map(budget), beta=0.5, **budget.settings(lr=VI_LR))


def _last(guide: Any, layer: str) -> Callable[[Budget], Method]:
    """A family over the last layer; the weights below are points, learned under the same bound with
    their prior.
    """
    return _vi({f"{layer}.*": guide, "*": bayou.Delta(penalty=True)})


def _rank_one(std: float | None) -> Callable[[Budget], Method]:
    return _vi(bayou.guides.RankOne(4, std=std))


def _snapshots(budget: Budget) -> bayou.SGHMC:
    """The ends of five cycles, without noise, of one run that is as long as that of MAP."""
    run: dict[str, Any] = {
        "steps": budget.steps,
        "batch_size": budget.batch_size,
        "chains": 1,
        "start": None,
    }
    return bayou.SGHMC(temperature=0, schedule=bayou.methods.Cyclical(5), draws=5, **run)


def _microcanonical(budget: Budget) -> bayou.MCLMC:
    """Half as many full-batch gradients of each chain as MAP has steps."""
    assert budget.steps is not None
    length = max(2, budget.steps // 80)
    return bayou.MCLMC(
        chains=4, start=bayou.Ensemble(4, of=_map(budget)), warmup=length, draws=length
    )


def _annealed(make: Callable[[Budget], Method]) -> Callable[[Budget], Method]:
    return lambda budget: bayou.Annealed(make(budget), draws=100)


POINTS = "points for weights"
PATHS = "100 draws, annealed; the ELBO is that of their paths"
LAST_LAYER = "points below: its bound is that of another model"
UNITS = bayou.Normal("fan_in", gain=3.0, learn="units")
BY_UNIT = "prior learned by unit: its ELBO is a bound of another evidence"
LINES: tuple[Line, ...] = (
    Line("MAP", _map),
    Line("ensemble of 10", lambda b: bayou.Ensemble(10, of=_map(b))),
    Line("MC dropout", lambda b: bayou.MCDropout(_map(b)), "0.1 on hidden units: another network", dropout=0.1),
    Line("FFG", _vi(bayou.MeanField())),
    Line("MNF", _vi(bayou.MNF())),
    Line("LowRank", _vi(bayou.LowRank(), lr=5e-3, scale_lr=5e-3, samples=4), "rank 8"),
    Line("NodeFlow", _vi(bayou.NodeFlow(where="both", penalty=True)), POINTS),
    Line("NodeNoise", _vi(bayou.NodeNoise(where="both", penalty=True)), POINTS),
    Line("NodeNoise, 4 components", _vi(bayou.NodeNoise(where="both", components=4, penalty=True)), POINTS),
    Line("Inducing", _inducing(3e-2, 0.1), "100 points"),
    Line("FFG, annealed", _annealed(_vi(bayou.MeanField())), PATHS),
    Line("MNF, annealed", _annealed(_vi(bayou.MNF())), PATHS),
    Line("Inducing, annealed", _annealed(_inducing(3e-2, 0.1)), PATHS),
    Line("SIVI", _vi(bayou.guides.SIVI(), clip=1.0)),
    Line("UIVI", _vi(bayou.guides.UIVI(), clip=1.0)),
    Line("FFG, by unit", _vi(bayou.MeanField()), BY_UNIT, UNITS),
    Line("MNF, by unit", _vi(bayou.MNF()), BY_UNIT, UNITS),
    Line("FFG, by unit, β = ½", _cooler, f"from a mode; {BY_UNIT}", UNITS),
    Line("mixture of 5 of it", lambda b: bayou.Ensemble(5, of=_cooler(b)), "its ELBO is the mean of theirs", UNITS),
    Line("Inducing, by unit", _inducing(1e-2, 0.03), BY_UNIT, UNITS),
    Line("SparseVD", _vi(bayou.SparseVD(), scale_lr=1e-2, warmup=0.5), "log-uniform prior"),
    Line("FFG, last layer", _last(bayou.MeanField(), "5"), LAST_LAYER, data=("digits",)),
    Line("FFG, last layer", _last(bayou.MeanField(), "2"), LAST_LAYER, data=("yacht",)),
    Line("MNF, last layer", _last(bayou.MNF(), "5"), LAST_LAYER, data=("digits",)),
    Line("MNF, last layer", _last(bayou.MNF(), "2"), LAST_LAYER, data=("yacht",)),
    Line("IVON", _ivon(1.0), "the family of FFG", data=("digits",)),
    Line("IVON", _ivon(0.1), "the family of FFG", data=("yacht",)),
    Line("Laplace, full", _laplace("full"), "linearized", data=("yacht",)),
    Line("Laplace, Kronecker", _laplace("kronecker", curvature="ggn"), "linearized"),
    Line("Laplace, last layer", _laplace("kronecker", where="last", curvature="ggn"), "linearized"),
    Line("SWAG", _swag(0.01), "its rate sets the width", data=("digits",)),
    Line("SWAG", _swag(1e-4), "its rate sets the width", data=("yacht",)),
    Line("VBLL", lambda b: bayou.methods.VBLL(**b.settings()), LAST_LAYER),
    Line("BatchEnsemble of 4", _rank_one(None), POINTS),
    Line("rank-1, 4 components", _rank_one(0.1), POINTS),
    Line("sub-ensemble of 5", lambda b: bayou.Ensemble(5, of=_map(b), init="reset"), "last layers on the body of MAP",
         body=_map),
    Line("5 snapshots", _snapshots, "one run"),
    Line("SGLD", _chains(bayou.SGLD), "4 chains"),
    Line("SGHMC", _chains(bayou.SGHMC), "4 chains"),
    Line("MCLMC", _microcanonical, "4 chains from an ensemble, 10 steps a draw"),
)  # fmt: skip


@final
@dataclass(frozen=True)
class Truth:
    """Problems × methods × seeds, each against the reference of its problem."""

    name: str = "truth"
    title: str = "Every method beside the true posterior"
    seeds: int = 3
    lr: float = 5e-3
    length: int = 5000

    def budget(self, length: int, gpu: bool = False) -> Budget:
        """What every line is given."""
        return Budget(steps=length, batch_size=128, lr=self.lr, schedule="cosine", compile=gpu)

    def fits(
        self, data: Sequence[str], only: Sequence[str], seeds: int | None, length: int | None
    ) -> list[Fit]:
        """Problems × lines × seeds."""
        labels = study.chosen(
            "truth has no row", only, list(dict.fromkeys(line.label for line in LINES))
        )
        long = length or self.length
        return [
            Fit(self.name, one, line.label, seed, long)
            for one in study.chosen("truth has no data", data, DATA)
            for seed in range(seeds or self.seeds)
            for line in LINES
            if line.label in labels and one in line.data
        ]

    def measure(self, fit: Fit, device: str, samples: int | None, show: Show) -> dict[str, Any]:
        """Fit one method, and hold its predictions and its bound against the reference."""
        assert fit.length is not None
        place, truth = torch.device(device), reference(fit.data)
        gpu = place.type == "cuda"
        line = next(line for line in LINES if line.label == fit.label and fit.data in line.data)
        net = truth.build(fit.seed).to(place)
        net = with_dropout(net, line.dropout) if line.dropout else net
        train = (truth.train[0].to(place), truth.train[1].to(place))
        clock = time.monotonic if gpu else time.process_time
        start = clock()
        options: dict[str, Any] = {
            "likelihood": truth.problem.likelihood,
            "prior": line.prior,
            "progress": show,
        }
        budget = self.budget(fit.length, gpu)
        method = line.method(budget)
        if line.body is not None:
            net = bayou.fit(
                net, train, method=line.body(budget), seed=fit.seed, **options
            ).to_module()
            options["where"] = "last"
        posterior = raise_if_interrupted(
            bayou.fit(net, train, method=method, seed=fit.seed, **options)
        )
        seconds = clock() - start
        lost = {"lost": True} if any("fallen" in row for row in posterior.history) else {}
        return (
            compare(posterior, truth, train, samples or SAMPLES, fit.seed)
            | {"seconds": round(seconds, 2)}
            | lost
        )

    def render(self, found: Found) -> str:
        """A table for each problem: the truth, then the methods, means over seeds ± one standard
        error.
        """
        lines = [f"# {self.title}", "", INTRODUCTION, ""]
        for one in DATA:
            mine = {line.label: self.rows(line, one, found) for line in LINES if one in line.data}
            if any(mine.values()):
                lines += [*_table(one, mine), ""]
        lengths = " or ".join(f"{n:,}" for n in sorted({row["length"] for row in found["rows"]}))
        rates = f"{self.lr:g} (variational families {VI_LR:g})"
        how = f"{lengths} steps of Adam at {rates} along a cosine, batches of 128, {SAMPLES} networks a prediction"
        return "\n".join(
            [*lines, f"{how}; means ± one standard error.", "", study.made_by(found), ""]
        )

    def rows(self, line: Line, data: str, found: Found) -> list[dict[str, Any]]:
        """Return the longest fits of a line."""
        mine = [
            made for made in found["rows"] if (made["data"], made["label"]) == (data, line.label)
        ]
        longest = max((made["length"] for made in mine), default=self.length)
        return [made for made in mine if made["length"] == longest]

    def draw(self, found: Found, path: Path) -> bool:
        """Nothing."""
        return False


def compare(
    posterior: Posterior,
    truth: Reference,
    train: tuple[torch.Tensor, torch.Tensor],
    samples: int,
    seed: int,
) -> dict[str, Any]:
    """Scores of a posterior at the test rows, its distance from the truth, and its ELBO per row
    where it is one.
    """
    x, y = truth.test
    p = posterior.predict(x.to(train[0].device), **prediction_options(posterior, samples, seed))
    scores = metrics.summary(p, y.to(p.outputs.device))
    found: dict[str, float | None] = {
        name: scores[name] for name in ("nll", "ece", "coverage") if name in scores
    }
    found["total_variation"] = metrics.total_variation(p, truth.predictive)
    if "ece" in scores:
        found["error"] = 100 * (1 - scores["accuracy"])
        found["agreement"] = metrics.agreement(p, truth.predictive)
    found["elbo"] = None
    parts = posterior.components if isinstance(posterior, Mixture) else [posterior]
    bounds = [
        bayou.elbo(part, train, samples=100, seed=0) for part in parts if isinstance(part, Guided)
    ]
    if len(bounds) == len(parts) and all(
        one.side in ("equal", "lower") and one.kind != "up to a constant" for one in bounds
    ):
        found["elbo"] = fmean(one.value for one in bounds) / len(
            train[1]
        )  # of a mixture, a bound of its ELBO
    if isinstance(posterior, Empirical) and "elbo" in (mixing := posterior.mixing or {}):
        found["elbo"] = mixing["elbo"] / len(train[1])
    return found


def _table(name: str, mine: dict[str, list[dict[str, Any]]]) -> list[str]:
    """The truth and the lines of one problem."""
    facts, notes = (
        reference(name).facts,
        {line.label: line.note for line in LINES if name in line.data},
    )
    classes = "test_ece" in facts
    columns = ("error", "nll", "ece") if classes else ("nll", "coverage")
    far = ("total_variation", "agreement") if classes else ("total_variation",)
    heads = [HEADS[column] for column in (*columns, *far)]
    own = {
        "error": 100 * (1 - facts.get("test_accuracy", 1.0)),
        "total_variation": facts["halves_total_variation"],
    }
    exact = [_number(own.get(c, facts.get(f"test_{c}")), DIGITS[c]) for c in (*columns, *far)]
    evidence = f"{facts['log_evidence'] / facts['rows']:.3f}"
    spread = f"R-hat {facts['r_hat_median']:.3f} (median), {facts['r_hat_95']:.3f} (95 %)"
    lines = [
        f"## {DESCRIPTIONS[name]}",
        "",
        f"log evidence {facts['log_evidence']:.1f} ± {facts['log_evidence_error']:.1f} nats by annealed importance "
        f"sampling, a lower bound in expectation (spread of the log weights {facts['log_weights_spread']:.1f}, "
        f"{facts['log_weights_ess']:.1f} effective of {facts['lengths']['chains']} chains).",
        "",
        f"| method | ELBO/N | {' | '.join(heads)} | cost, × MAP | seeds | |",
        f"|---|{'---:|' * (len(heads) + 3)}---|",
        f"| **HMC** | {evidence} | {' | '.join(exact)} | | | evidence/N; distance of two halves; {spread} |",
    ]
    for label, made in mine.items():
        if made:
            cells = [
                study.cell([row[c] for row in made], DIGITS[c]) for c in ("elbo", *columns, *far)
            ]
            lost = sum(row.get("lost", False) for row in made)
            note = "; ".join(
                filter(None, [notes[label], f"**{lost} lost their way**" if lost else ""])
            )
            parts = [label, *cells, _cost(made, mine["MAP"]), str(len(made)), note]
            lines.append(f"| {' | '.join(parts)} |")
    return lines


def _number(value: float | None, digits: int) -> str:
    return "" if value is None else f"{value:,.{digits}f}"


def _cost(made: list[dict[str, Any]], plain: list[dict[str, Any]]) -> str:
    """Seconds of the fits as a multiple of those of MAP that were made in the same run."""
    runs = {row["run"] for row in made}
    base = [row["seconds"] for row in plain if row["run"] in runs]
    return (
        f"{fmean(row['seconds'] for row in made) / fmean(base):.1f}"
        if base and fmean(base) > 0
        else ""
    )


INTRODUCTION = (
    "Same network, prior N(0, 9/fan-in) on weights and biases, noise and rows for all. Total variation and agreement "
    "are to the predictive of HMC at the test rows (`experiments/truth_reference.py`); a method is judged by them, and "
    "not by its NLL alone, since a wrong posterior can predict well. The ELBO of a family with that prior is below the "
    "evidence, in the first line, and the difference is KL(q ‖ posterior)/N, or a bound of it; families with points "
    "or with another prior have none. Cost: processor seconds of a fit (on a GPU seconds, with compiling)."
)
DESCRIPTIONS = {
    "digits": "Digits: 8×8 images, network 64-100-100-10 with ReLU, 17,610 weights, 1,438 rows",
    "yacht": "Yacht: 6 inputs, 50 ReLU units, 401 weights, 277 rows, noise .1; all in units of the sd of y",
}
HEADS = {
    "error": "error, %", "nll": "NLL", "ece": "ECE", "coverage": "90 % covers", "total_variation": "total variation",
    "agreement": "agreement",
}  # fmt: skip
DIGITS = {
    "elbo": 3,
    "error": 2,
    "nll": 3,
    "ece": 3,
    "coverage": 3,
    "total_variation": 3,
    "agreement": 3,
}

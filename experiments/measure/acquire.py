"""Which rows to label: a learning curve for every way to choose them, beside random choice.

    python -m experiments.measure.acquire --mnist --device cuda --jobs 9 --seeds 3      # the CNN with
    dropout of Gal 2017
    python -m experiments.measure.acquire                                               # 8×8 digits on a CPU
    python -m experiments.measure.acquire --small                                       # a trial

prints the labels after which the mean curve reaches 90 % and 95 %, and draws the curves. Gal 2017
(MNIST, from 20 labels on by tens): 10 % error with 145 labels by BALD, 165 by entropy, 255 at
random; 5 % with 335, 355 and 835. The network is fitted anew after every round. ``--held``: rows of
the training set judge instead of the test rows.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayou
from bayou.core import rng
from bayou.data import load
from experiments.measure.parallel import keep, kept, made, spread

RESULTS = Path(__file__).parents[1] / "results"
WAYS = ("random", "entropy", "bald", "batchbald")
PUBLISHED = {"random": "255, 835", "entropy": "165, 355", "bald": "145, 335"}


@dataclass(frozen=True)
class Study:
    """Data, network and rounds; ``model``: dropout (MC dropout) or ensemble."""

    data: str
    last: int  # labels in the end
    steps: int  # of every fit
    model: str = "dropout"
    first: int = 20  # labels at the start, as many of each class
    each: int = 10  # labels in a round
    pool: int = 5000  # rows that are looked at in a round, drawn anew
    draws: int = 32
    batch_size: int = 64
    lr: float = 1e-3
    scale: float = 1.0  # of the prior of all weights
    device: str = "cpu"
    held: bool = False

    @cached_property
    def rows(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x and y to choose from, x and y to judge by."""
        data = load(self.data)
        (x, y), (x_test, y_test) = (
            (a.to(self.device), b.to(self.device)) for a, b in (data.train, data.test)
        )
        if self.held:
            cut = 5 * len(y) // 6
            return x[:cut], y[:cut], x[cut:], y[cut:]
        return x, y, x_test, y_test

    def network(self, seed: int) -> nn.Module:
        """Two convolutions and two dense layers for 28×28 (Gal 2017), a dense layer of 128 for
        8×8.
        """
        torch.manual_seed(seed)
        if self.rows[0].shape[-1] == 28:
            body: list[nn.Module] = [
                nn.Conv2d(1, 32, 4),
                nn.ReLU(),
                nn.Conv2d(32, 32, 4),
                nn.ReLU(),
                nn.MaxPool2d(2),
            ]
            body += [nn.Dropout(0.25), nn.Flatten(), nn.Linear(3872, 128)]
        else:
            body = [nn.Flatten(), nn.Linear(64, 128)]
        return nn.Sequential(*body, nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10)).to(self.device)

    @property
    def method(self) -> bayou.methods.Method:
        """What doubts."""
        point = bayou.MAP(steps=self.steps, lr=self.lr, batch_size=self.batch_size)
        return bayou.MCDropout(start=point) if self.model == "dropout" else bayou.Ensemble(5, point)


STUDIES = {
    "mnist": Study("mnist", last=400, steps=500),
    "digits": Study("digits", last=150, steps=300, lr=3e-3),
    "small": Study("digits", last=40, steps=30, pool=200, draws=8, lr=1e-2),
}


def work(how: str, seed: int, study: Study) -> dict[str, Any]:
    """Accuracy after every round."""
    x, y, x_test, y_test = study.rows
    order = rng.permutation(len(y), rng.fold(seed, "start")).to(y.device)
    begin = torch.cat([order[y[order] == c][: study.first // 10] for c in range(10)])
    known = torch.zeros(len(y), dtype=torch.bool, device=y.device).index_fill(0, begin, True)
    curve = []
    while True:
        labels = int(known.sum())
        rows, prior = (x[known], y[known]), bayou.Normal(study.scale)
        posterior = bayou.fit(
            study.network(seed), rows, method=study.method, prior=prior, seed=seed, progress=False
        )
        samples = study.draws if study.model == "dropout" else None
        said = posterior.predict(x_test, samples, seed=0).mean
        curve.append(float((said.argmax(-1) == y_test).float().mean()))
        if labels >= study.last:
            return {"curve": curve}
        rest = (~known).nonzero().flatten()
        rest = rest[
            rng.permutation(len(rest), rng.fold(seed, "pool", labels)).to(rest.device)[: study.pool]
        ]
        place = rng.integer(rng.fold(seed, "ask", labels))
        chosen = bayou.acquire(posterior, x[rest], study.each, how, samples=samples, seed=place)  # type: ignore[arg-type]
        known[rest[chosen.indices.to(rest.device)]] = True


def columns(found: dict[str, Any]) -> dict[str, Tensor]:
    """Curves (seeds, rounds) of each way."""
    each = {
        how: [run["curve"] for key, run in found.items() if key.split("/")[0] == how]
        for how in WAYS
    }
    return {how: torch.tensor(curves) for how, curves in each.items() if curves}


def table(found: dict[str, Any], study: Study) -> str:
    """Labels to 90 and 95 %, and accuracies on the way."""
    places = list(range(study.first, study.last + 1, study.each))
    shown = [labels for labels in (50, 100, 150, 200, 300, 400) if labels in places]
    said = [
        f"{study.data}, {study.model}, {study.steps} steps a round, {study.draws} draws, {study.pool:,} rows of the "
        f"pool looked at in a round, prior N(0, {study.scale:g}²). *Labels to 90, 95 %*: where the mean curve "
        "reaches it. *Area*: the mean of the curve.", "",
        f"| how | {' | '.join(f'{n} labels' for n in shown)} | labels to 90, 95 % | published | area | seeds |",
        "|---" + "|---:" * (len(shown) + 4) + "|",
    ]  # fmt: skip
    for how, curves in columns(found).items():

        def words(values: Tensor) -> str:
            error = f" ± {values.std() / len(values) ** 0.5:.3f}" if len(values) > 1 else ""
            return f"{values.mean():.3f}{error}"

        mean = curves.mean(0)
        reached = [
            int((mean >= level).nonzero()[0]) if bool((mean >= level).any()) else None
            for level in (0.9, 0.95)
        ]
        until = ", ".join(f"over {study.last}" if k is None else str(places[k]) for k in reached)
        cells = [words(curves[:, places.index(n)]) for n in shown]
        known = PUBLISHED.get(how, "") if study.data == "mnist" else ""
        said.append(
            f"| {how} | {' | '.join(cells)} | {until} | {known} | {words(curves.mean(1))} | {len(curves)} |"
        )
    return "\n".join(said) + "\n"


def draw(found: dict[str, Any], study: Study, path: Path) -> None:
    """Mean curves with their standard errors."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axis = pyplot.subplots(figsize=(5.6, 3.6))
    places = range(study.first, study.last + 1, study.each)
    for how, curves in columns(found).items():
        mean, color = 100 * curves.mean(0), "0.5" if how == "random" else f"C{WAYS.index(how) - 1}"
        error = 100 * curves.std(0) / len(curves) ** 0.5 if len(curves) > 1 else 0 * mean
        axis.plot(places, mean, color=color, label=how, linestyle="--" if how == "random" else "-")
        axis.fill_between(places, mean - error, mean + error, color=color, alpha=0.15, linewidth=0)
    axis.set(xlabel="labels", ylabel="test accuracy, %", title=f"{study.data}, {study.model}")
    axis.grid(alpha=0.3)
    axis.legend(frameon=False, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mnist", action="store_true")
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--ways", nargs="*", default=WAYS, choices=WAYS)
    parser.add_argument("--held", action="store_true")
    numbers = {
        "last": int,
        "steps": int,
        "pool": int,
        "draws": int,
        "lr": float,
        "scale": float,
        "model": str,
    }
    for name, kind in numbers.items():
        parser.add_argument(f"--{name}", type=kind)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    kind = "mnist" if given.mnist else "small" if given.small else "digits"
    changed = {name: getattr(given, name) for name in numbers if getattr(given, name) is not None}
    study = replace(STUDIES[kind], device=given.device, held=given.held, **changed)
    path = given.out / f"acquire-{kind}.json"
    seeds = range(given.first_seed, given.first_seed + given.seeds)
    jobs = [
        (how, seed)
        for seed in seeds
        for how in sorted(given.ways, key=lambda how: how != "batchbald")
    ]
    for job, found in spread(work, jobs, study, given.jobs):
        keep(path, job, found)
    said = table(kept(path), study)
    print(said)
    if not given.held:
        draw(kept(path), study, path.with_suffix(".png"))
        path.with_suffix(".md").write_text(f"{said}\n{made(given.device)}\n")


if __name__ == "__main__":
    main()

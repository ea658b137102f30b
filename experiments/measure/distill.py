"""A posterior and its students: what one network keeps of what a hundred draws say.

    python -m experiments.measure.distill --mnist --device cuda --jobs 4 --choose 1 2 4 8    # 400-400, as
    Balan 2015
    python -m experiments.measure.distill --small                                        # a trial on a CPU:
    digits of 8×8

prints a table: test error and NLL, entropy and mutual information of test rows and of rows out of
distribution, the time of a prediction on one thread of a CPU. Balan 2015 (MNIST, 400-400): SGD 1.54
%, SGLD 1.27 %, distilled 1.31 %.
Teachers: a mean field on 8×8 digits, an ensemble on MNIST, with chains of SGLD beside it, from
which the student "online" learns while one runs: no draw is stored. ``--choose``: the scale of the
prior, gain/√fan-in, by held-out rows. ``--held``: the last sixth of the training rows judges
instead of the test rows, and characters of another alphabet are out of distribution, to choose
settings by.
"""

from __future__ import annotations

import argparse
import math
import tempfile
import time
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import bayou
from bayou.core import rng
from bayou.data import load
from experiments.measure.parallel import keep, kept, made, spread

RESULTS = Path(__file__).parents[1] / "results"
PUBLISHED = {"one network": 1.54, "teacher": 1.27, "student, online": 1.31}
ROWS = ("one network", "SGLD", "student, online", "teacher", "student", "student, Dirichlet")
CPU_ROWS = 1000  # that a prediction is timed with


@dataclass(frozen=True)
class Study:
    """Data, network, teacher and students."""

    data: str
    hidden: tuple[int, ...]
    epochs: int  # of the one network
    steps: int  # of a mean field or of chains
    lessons: int  # steps of each student
    members: int = 0  # of an ensemble that teaches; without any it is a mean field
    chains: int = 4
    batch_size: int = 128
    lr: float = 3e-3
    noise: float = 0.3  # on copies of the rows that the teacher is asked about
    copies: int = 10
    blends: int = 0  # copies that are mixed with another row
    puzzles: int = 0  # copies with their pieces in another order
    gain: float = 2.0  # of the prior N(0, gain²/fan-in)
    device: str = "cpu"
    held: bool = False

    @cached_property
    def rows(self) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor], Tensor]:
        """To learn from, to judge by, and out of distribution."""
        data = (
            load(self.data, ood="kmnist") if self.held and self.data == "mnist" else load(self.data)
        )
        train, test = (
            (x.flatten(1).to(self.device), y.to(self.device)) for x, y in (data.train, data.test)
        )
        far = data.ood[0] if isinstance(data.ood, tuple) else data.ood
        assert far is not None
        if self.held:
            cut = 5 * len(train[1]) // 6
            train, test = (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])
        return train, test, far.flatten(1).to(train[0])

    @cached_property
    def asked(self) -> Tensor:
        """The training rows, noisy copies, λ·x + (1 − λ)·x', and images cut into 4×4 pieces that
        are shuffled.
        """
        x = self.rows[0][0]
        noisy = [x + self.noise * rng.normal(len(x), x.shape[1:], x, k) for k in range(self.copies)]
        blends, puzzles, side = [], [], math.isqrt(x.shape[1])
        for k in range(self.blends):
            share = rng.uniform(len(x), (1,), x, 100 + k)
            blends.append(
                share * x + (1 - share) * x[rng.permutation(len(x), 200 + k).to(x.device)]
            )
        for k in range(self.puzzles):
            pieces = (
                x.view(-1, 4, side // 4, 4, side // 4).transpose(2, 3).flatten(1, 2)
            )  # (B, 16, h, w)
            order = (
                rng.uniform(len(x), (16,), x, 300 + k).argsort(1)[..., None, None].expand_as(pieces)
            )
            shuffled = pieces.gather(1, order).unflatten(1, (4, 4)).transpose(2, 3)
            puzzles.append(shuffled.flatten(1))
        return torch.cat([x, *noisy, *blends, *puzzles])

    def network(self, seed: int) -> nn.Module:
        """The network of teacher and students."""
        torch.manual_seed(seed)
        sizes = [self.rows[0][0].shape[1], *self.hidden, 10]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1]).to(self.device)

    @property
    def prior(self) -> bayou.priors.Prior:
        """Of every weight."""
        return bayou.Normal("fan_in", gain=self.gain)

    @property
    def point(self) -> bayou.MAP:
        """One network, and where chains begin."""
        fast = self.device == "cuda"
        return bayou.MAP(epochs=self.epochs, lr=self.lr, batch_size=self.batch_size, compile=fast)

    @property
    def chain(self) -> bayou.SGLD:
        """Chains with 100 draws together."""
        size = {"batch_size": self.batch_size, "start": self.point}
        return bayou.SGLD(steps=self.steps, chains=self.chains, draws=100 // self.chains, **size)  # type: ignore[arg-type]

    @property
    def teacher(self) -> bayou.methods.Method:
        """What answers, with 100 draws or as many as there are members."""
        if not self.members:
            return bayou.VI(bayou.MeanField(), steps=self.steps, lr=self.lr)
        return bayou.Ensemble(self.members, replace(self.point, compile=False), parallel="vmap")

    def judged(self, posterior: Any) -> dict[str, float]:
        """Error in %, NLL, entropies and informations, and the seconds of a prediction of 1,000
        rows on a CPU.
        """
        _, (x, y), far = self.rows
        beyond = posterior.predict(far, seed=0)
        seconds = []
        said = posterior.predict(x, seed=0)
        error = 100 * float((said.mean.argmax(-1) != y).float().mean())
        kept = isinstance(posterior, bayou.operations.Distilled)
        with tempfile.TemporaryDirectory() as folder:
            (posterior.point if kept else posterior).save(f"{folder}/posterior.bayou")
            here = bayou.load(f"{folder}/posterior.bayou", self.network(0).cpu())
        ask = (
            bayou.operations.Distilled(here).concentration
            if kept
            else lambda x: here.predict(x).mean
        )
        for _ in range(5):
            begun = time.monotonic()
            ask(x[:CPU_ROWS].cpu())
            seconds.append(time.monotonic() - begun)
        return {
            "error": error, "nll": -float(said.log_prob(y).mean()),
            "entropy": float(said.entropy.mean()), "far": float(beyond.entropy.mean()),
            "information": float(said.mutual_information.mean()),
            "information far": float(beyond.mutual_information.mean()), "predict": min(seconds),
        }  # fmt: skip


STUDIES = {
    "mnist": Study(
        "mnist", (400, 400), 30, 24_000, 20_000, members=100, batch_size=512, lr=1e-3, noise=0.1, copies=4, blends=2,
        puzzles=2,
    ),
    "digits": Study("digits", (100,), 60, 3000, 3000),
    "small": Study("digits-few", (20,), 20, 300, 300, members=5, chains=2, blends=1, puzzles=1),
}  # fmt: skip


def work(label: str, seed: int, study: Study) -> dict[str, Any]:
    """The one network; the teacher with its students; the student of a chain of its own."""
    train, options = study.rows[0], {"seed": seed, "progress": False}
    taught: dict[str, Any] = {
        "steps": study.lessons,
        "lr": study.lr,
        "batch_size": study.batch_size,
        **options,
    }
    if label == "one network":
        found = bayou.fit(
            study.network(seed), train, method=study.point, prior=study.prior, **options
        )
        return {label: study.judged(found)}
    if label == "SGLD":
        found = bayou.fit(
            study.network(seed), train, method=study.chain, prior=study.prior, **options
        )
        return {label: study.judged(found)}
    if label == "student, online":
        asked = {"prior": study.prior, "rows": study.asked, **taught, "steps": None}
        return {
            label: study.judged(bayou.distill(study.chain, study.network(seed), train, **asked))
        }  # type: ignore[arg-type]
    begun = time.monotonic()
    teacher = bayou.fit(
        study.network(seed), train, method=study.teacher, prior=study.prior, **options
    )
    judged = {"teacher": study.judged(teacher)}
    print(
        f"  {judged['teacher']}, {time.monotonic() - begun:.0f} s, mixing {getattr(teacher, 'mixing', None)}",
        flush=True,
    )
    for name, what in (("student", None), ("student, Dirichlet", "epistemic")):
        judged[name] = study.judged(
            bayou.distill(teacher, study.network(seed), study.asked, keep=what, **taught)
        )  # type: ignore[arg-type]
        print(f"  {name}: {judged[name]}, {time.monotonic() - begun:.0f} s", flush=True)
    return judged


def choice(gain: float, seed: int, study: Study) -> dict[str, float]:
    """A smaller teacher with another prior, judged by held-out rows."""
    study = replace(study, gain=gain)
    options = {"prior": study.prior, "seed": seed, "progress": False}
    return study.judged(
        bayou.fit(study.network(seed), study.rows[0], method=study.teacher, **options)
    )  # type: ignore[arg-type]


def table(found: dict[str, Any], study: Study) -> str:
    """A row for each network, means over seeds."""
    kind = (
        f"ensemble of {study.members}"
        if study.members
        else f"mean field, {study.steps:,} steps, 100 draws"
    )
    more = {"noisy": study.copies, "blended": study.blends, "shuffled": study.puzzles}
    said = [
        f"{study.data}, {'-'.join(map(str, study.hidden))} hidden units, prior N(0, {study.gain:g}²/fan-in), teacher: "
        f"{kind}; students of the same network, {study.lessons:,} steps on the rows and "
        f"{', '.join(f'{count} {name}' for name, count in more.items() if count)} copies of each. *Online* and *SGLD*: "
        f"{study.chains} chains of {study.steps:,} steps, 100 draws. *Far*: rows out of distribution. *Cost*: class "
        f"probabilities (of a Dirichlet its α) of {CPU_ROWS:,} rows on one thread of a CPU, beside the teacher's.", "",
        "| | error, % | published | NLL | entropy | entropy, far | information | information, far | cost | seeds |",
        "|---" + "|---:" * 9 + "|",
    ]  # fmt: skip
    for label in ROWS:
        runs = [run[label] for run in found.values() if label in run]
        teachers = [run["teacher"]["predict"] for run in found.values() if "teacher" in run]
        if runs:
            mean = {key: sum(run[key] for run in runs) / len(runs) for key in runs[0]}
            ratio = sum(teachers) / len(teachers) / mean["predict"] if teachers else float("nan")
            cost = f"{1000 * mean['predict']:.1f} ms" + (
                "" if label == "teacher" else f" (÷{ratio:.0f})"
            )
            cells = [
                f"{mean[key]:.4f}"
                for key in ("nll", "entropy", "far", "information", "information far")
            ]
            known = PUBLISHED.get(label, "") if study.data == "mnist" else ""
            said.append(
                f"| {label} | {mean['error']:.2f} | {known} | {' | '.join(cells)} | {cost} | {len(runs)} |"
            )
    return "\n".join(said) + "\n"


def draw(study: Study, found: dict[str, Any], path: Path) -> None:
    """Entropy at test rows and beyond, of each network."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [label for label in ROWS if any(label in run for run in found.values())]
    figure, axis = pyplot.subplots(figsize=(6, 2.6))
    for shift, (key, color, name) in enumerate(
        (("entropy", "C0", "test rows"), ("far", "C1", "out of distribution"))
    ):
        values = [[run[label][key] for run in found.values() if label in run] for label in shown]
        places = [k + 0.4 * shift for k in range(len(shown))]
        axis.barh(places, [sum(v) / len(v) for v in values], 0.38, color=color, label=name)
    axis.set_yticks([k + 0.2 for k in range(len(shown))], shown)
    axis.invert_yaxis()
    axis.set(xlabel="mean entropy, nats", title=study.data)
    axis.legend(frameon=False, fontsize=8)
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
    parser.add_argument(
        "--only", nargs="*", default=["teacher", "student, online", "SGLD", "one network"]
    )
    parser.add_argument("--held", action="store_true")
    parser.add_argument(
        "--choose", type=float, nargs="*", help="gains of the prior to choose from by held-out rows"
    )
    numbers = {"epochs": int, "steps": int, "lessons": int, "chains": int, "batch_size": int, "copies": int,
               "members": int, "blends": int, "puzzles": int, "lr": float, "noise": float, "gain": float}  # fmt: skip
    for name, kind in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    kind = "mnist" if given.mnist else "small" if given.small else "digits"
    best = (math.inf, STUDIES[kind].gain)
    changed = {name: getattr(given, name) for name in numbers if getattr(given, name) is not None}
    study = replace(STUDIES[kind], device=given.device, held=given.held, **changed)
    path = given.out / f"distill-{kind}.json"
    if given.choose:
        tried = replace(study, held=True, members=study.members // 5)
        for (gain, _), found in spread(
            choice, [(gain, 0) for gain in given.choose], tried, given.jobs
        ):
            print(
                f"  gain {gain:g}: held-out NLL {found['nll']:.4f}, error {found['error']:.2f} %",
                flush=True,
            )
            best = min(best, (found["nll"], gain))
        study = replace(study, gain=best[1])
    chosen = [label for label in given.only if study.members or label in ("teacher", "one network")]
    for job, found in spread(
        work, [(label, s) for s in range(given.seeds) for label in chosen], study, given.jobs
    ):
        keep(path, job, found)
    said = table(kept(path), study)
    print(said)
    if not given.held:
        draw(study, kept(path), path.with_suffix(".png"))
        path.with_suffix(".md").write_text(f"{said}\n{made(given.device)}\n")


if __name__ == "__main__":
    main()

"""One task after another: permuted and split digits, by VCL and online Laplace, beside fine-tuning
and joint training.

    python -m experiments.measure.continual --mnist --only split --choose --device cuda --jobs 6  # settings
    of VI: held-out rows
    python -m experiments.measure.continual --mnist --device cuda --jobs 5              # ten permutations,
    five pairs of classes
    python -m experiments.measure.continual --mnist --tables                            # table and picture
    again
    python -m experiments.measure.continual --small                                     # a trial on a CPU:
    digits of 8×8

prints test accuracy of every task in the end, and draws how the mean over the tasks so far goes on.
Nguyen 2018 (MNIST): permuted 90 %, 93 % with 200 coreset rows; split, a head of two classes for
each of five tasks, 97.0 % and 98.4 %. ``--held``: the last sixth of the training rows judges
instead of the test rows. ``--choose``: VCL with each of ``TRIED``, judged by these; what is best
goes to ``results/continual-choice.json``, where the table finds it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass, field, replace
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

Pair = tuple[Tensor, Tensor]
Scores = Callable[[Tensor], Tensor]
RESULTS = Path(__file__).parents[1] / "results"
PRIOR = bayou.Normal(1.0)
METHODS = (
    "fine-tuning", "VCL", "VCL, coreset", "VCL, k-center", "MNF", "online Laplace", "online Laplace (Kronecker)",
    "joint training",
)  # fmt: skip
ALL = 1 << 20  # rows of a batch: every one of a task
TRIED: tuple[dict[str, Any], ...] = tuple(
    {"epochs": epochs, "batch_size": rows, "lr": 1e-3, "scale_lr": 1e-3, "std": 0.05, "head": head}
    for epochs, rows in (
        (120, ALL),
        (300, ALL),
        (10, 1024),
        (40, 1024),
    )  # the first are those of Nguyen 2018
    for head in (1.0, 5.0, 20.0)
)
PUBLISHED = {
    "permuted/VCL": 90,
    "permuted/VCL, coreset": 93,
    "split/VCL": 97.0,
    "split/VCL, coreset": 98.4,
}


@dataclass(frozen=True)
class Study:
    """A sequence of tasks and how each is learned."""

    name: str
    data: str
    hidden: tuple[int, ...]
    tasks: int
    epochs: int
    coreset: int
    batch_size: int = 256
    lr: float = 3e-3
    std: float = 1e-3  # of the weights at the start of VI
    scale_lr: float | None = None
    head: float = 1.0  # what the first weights of a head are multiplied by
    chosen: dict[str, Any] = field(default_factory=dict)  # settings of VI instead of these
    device: str = "cpu"
    held: bool = False

    @property
    def split(self) -> bool:
        """Whether a task is a pair of classes with a head of its own, or all classes with permuted
        pixels.
        """
        return self.name == "split"

    @cached_property
    def rows(self) -> tuple[list[Pair], list[Pair]]:
        """Rows to learn from and to judge by, for each task."""
        data = load(self.data)
        train, test = (
            (x.flatten(1).to(self.device), y.to(self.device)) for x, y in (data.train, data.test)
        )
        if self.held:
            cut = 5 * len(train[1]) // 6
            train, test = (train[0][:cut], train[1][:cut]), (train[0][cut:], train[1][cut:])
        return [self.task(train, k) for k in range(self.tasks)], [
            self.task(test, k) for k in range(self.tasks)
        ]

    def task(self, pair: Pair, k: int) -> Pair:
        """Rows of task k."""
        x, y = pair
        if self.split:
            return x[y // 2 == k], y[y // 2 == k] % 2
        return (x[:, rng.permutation(x.shape[1], 100 + k).to(x.device)], y) if k else pair

    def network(self, seed: int, outputs: int | None = None) -> nn.Sequential:
        """A multilayer perceptron, whose last layer is the head of a split task."""
        torch.manual_seed(seed)
        sizes = [self.rows[0][0][0].shape[1], *self.hidden]
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        head = nn.Linear(sizes[-1], outputs or (2 if self.split else 10))
        head.weight.data.mul_(self.head)
        return nn.Sequential(*layers, head).to(self.device)

    @property
    def options(self) -> dict[str, Any]:
        """Settings of every run that descends."""
        fast = self.device == "cuda"
        return {
            "epochs": self.epochs,
            "lr": self.lr,
            "batch_size": self.batch_size,
            "compile": fast,
        }


STUDIES = {
    "mnist": (
        Study("permuted", "mnist", (100, 100), 10, epochs=60, coreset=200, batch_size=1024),
        Study(
            "split", "mnist", (256, 256), 5, epochs=60, coreset=40, batch_size=1024, chosen=TRIED[7]
        ),
    ),
    "digits": (
        Study("permuted", "digits", (100,), 5, epochs=60, coreset=20),
        Study("split", "digits", (100,), 5, epochs=60, coreset=20),
    ),
    "small": (
        Study("permuted", "digits", (20,), 2, epochs=10, coreset=10),
        Study("split", "digits", (20,), 2, epochs=10, coreset=10),
    ),
}


class Heads(nn.Module):
    """All heads on one body, for joint training: a row says which task it is of."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor, task: Tensor) -> Tensor:
        """Logits (B, 2) of each row's own task."""
        logits = self.net(x).unflatten(-1, (-1, 2))
        return logits.gather(1, task.reshape(-1, 1, 1).expand(-1, 1, 2)).squeeze(1)


def accuracy(scores: Scores, pair: Pair) -> float:
    """The share of rows whose best score is y."""
    with torch.no_grad():
        return float((scores(pair[0]).argmax(-1) == pair[1]).float().mean())


def predicted(posterior: bayou.Posterior) -> Scores:
    """Class probabilities of 100 draws; of a Laplace posterior the network at its mode."""
    if isinstance(posterior, bayou.posteriors.GaussianPosterior):
        return posterior.to_module()
    return lambda x: posterior.predict(x, seed=0).mean


def fine_tuned(study: Study, seed: int) -> list[list[Scores]]:
    """No memory at all: every task starts at the last one's weights, with a head of its own, which
    stays with it.
    """
    net: nn.Module = study.network(seed)
    head, nets, found = f"{len(net) - 1}.", list[nn.Module](), []  # type: ignore[arg-type]
    for rows in study.rows[0]:
        point = bayou.MAP(**study.options)
        if study.split:
            net[-1].load_state_dict(study.network(seed + 1000 * len(nets))[-1].state_dict())  # type: ignore[index]
        nets.append(
            net := bayou.fit(
                net, rows, method=point, prior=PRIOR, seed=seed, progress=False
            ).to_module()
        )
        now: list[Scores] = []
        for old in nets:
            own = {k: v for k, v in old.state_dict().items() if study.split and k.startswith(head)}
            joined = study.network(seed)
            joined.load_state_dict(net.state_dict() | own)
            now.append(joined)
        found.append(now)
    return found


def joint(study: Study, seed: int) -> list[list[Scores]]:
    """All tasks at once, in as many steps as they have one after another."""
    train, count = study.rows[0], study.tasks
    x, y = (torch.cat(parts) for parts in zip(*train, strict=True))
    steps = sum(-(-len(part) // study.batch_size) for _, part in train) * study.epochs
    method = bayou.MAP(**study.options | {"epochs": None, "steps": steps})
    if not study.split:
        net = bayou.fit(
            study.network(seed), (x, y), method=method, prior=PRIOR, seed=seed, progress=False
        )
        return [[predicted(net)] * count]
    task = torch.cat([torch.full_like(part, k) for k, (_, part) in enumerate(train)])
    heads = Heads(study.network(seed, 2 * count))
    module = bayou.fit(
        heads, ((x, task), y), method=method, prior=PRIOR, seed=seed, progress=False
    ).to_module()
    each = [torch.full((), k, device=study.device) for k in range(count)]
    return [[lambda x, k=k: module(x, k.expand(len(x))) for k in each]]


def sequence(study: Study, seed: int, label: str) -> list[list[Scores]]:
    """Posteriors as priors: what to predict with after each task; with a coreset, in the end
    alone.
    """
    if "Laplace" not in label:
        study = replace(study, **study.chosen)
    net, begin = (
        study.network(seed),
        {"start": "network", "scale_lr": study.scale_lr, **study.options},
    )
    laplace: dict[str, Any] = {"start": bayou.MAP(**study.options), "batch_size": study.batch_size}
    methods: dict[str, bayou.methods.Method] = {
        "VCL": bayou.VI(bayou.MeanField(study.std), **begin),
        "MNF": bayou.VI(bayou.MNF(std=study.std), **begin),
        "online Laplace": bayou.Laplace("diagonal", **laplace),
        "online Laplace (Kronecker)": bayou.Laplace("kronecker", **laplace),
    }
    found = bayou.continual(
        net, study.rows[0], methods[label.partition(",")[0]],
        prior=PRIOR, heads=f"{len(net) - 1}.*" if study.split else (), seed=seed, progress=False,
        coreset=study.coreset if "," in label else None, selection="k-center" if "k-center" in label else "random",
    )  # fmt: skip
    after = [found.final] if "," in label else [found.after(t) for t in range(study.tasks)]
    return [[predicted(posterior) for posterior in now] for now in after]


def work(name: str, label: str, seed: int, studies: dict[str, Study]) -> dict[str, Any]:
    """Accuracies of all tasks in the end, and the means over the tasks so far, if they were
    measured.
    """
    study = studies[name]
    study = replace(study, head=study.chosen.get("head", study.head))  # the same network for all
    runs = {"fine-tuning": fine_tuned, "joint training": joint}
    after = runs[label](study, seed) if label in runs else sequence(study, seed, label)
    judged = [
        [accuracy(f, pair) for f, pair in zip(now, study.rows[1], strict=False)] for now in after
    ]
    return {"final": judged[-1], "curve": [sum(now) / len(now) for now in judged]}


def choice(name: str, number: int, seed: int, studies: dict[str, Study]) -> dict[str, Any]:
    """VCL with one of the settings that are tried."""
    study = replace(studies[name], chosen=TRIED[number])
    return work(name, "VCL", seed, {name: study}) | {"settings": TRIED[number]}


def best(tried: dict[str, Any], kind: str, name: str) -> dict[str, Any]:
    """The settings with the best mean accuracy in the end, over all seeds; none if none were
    tried.
    """
    runs = [run for job, run in tried.items() if job.startswith(f"{kind}/{name}/")]
    means = [
        (sum(run["curve"][-1] for run in same) / len(same), same[0]["settings"])
        for same in ([r for r in runs if r["settings"] == one["settings"]] for one in runs)
    ]
    return max(means, key=lambda mean: mean[0])[1] if means else {}


def columns(found: dict[str, Any], name: str) -> dict[str, list[Any]]:
    """The runs of each method over seeds, in the order of METHODS."""
    keys = [f"{name}/{label}/" for label in METHODS]
    each = {
        key.split("/")[1]: [run for k, run in found.items() if k.startswith(key)] for key in keys
    }
    return {label: runs for label, runs in each.items() if runs}


def table(found: dict[str, Any], studies: dict[str, Study]) -> str:
    """Accuracy in % of every task in the end."""
    said: list[str] = []
    for study in studies.values():
        tasks = [f"{2 * t}, {2 * t + 1}" if study.split else str(t + 1) for t in range(study.tasks)]
        size = f"{study.data}, {'-'.join(map(str, study.hidden))} hidden units, {study.epochs} epochs a task"
        size += f" in batches of {study.batch_size}, coresets of {study.coreset} rows a task"
        own = {key: "all" if value == ALL else value for key, value in study.chosen.items()}
        size += (
            f"; VCL and MNF with {', '.join(f'{key} {value}' for key, value in own.items())}"
            if own
            else ""
        )
        said += [f"**{study.name.title()}**: {size}.", ""]
        said += [f"| {study.name} | {' | '.join(tasks)} | mean | published | seeds | s |",
                 "|---" + "|---:" * (len(tasks) + 4) + "|"]  # fmt: skip
        for label, runs in columns(found, study.name).items():
            final = 100 * torch.tensor([run["final"] for run in runs])
            mean = final.mean(1)
            error = f" ± {mean.std() / len(mean) ** 0.5:.1f}" if len(mean) > 1 else ""
            known = PUBLISHED.get(f"{study.name}/{label}", "") if study.data == "mnist" else ""
            cells = [f"{v:.1f}" for v in final.mean(0).tolist()] + [
                f"{mean.mean():.1f}{error}",
                str(known),
            ]
            seconds = sum(run["seconds"] for run in runs) / len(runs)
            said.append(f"| {label} | {' | '.join(cells)} | {len(runs)} | {seconds:.0f} |")
        said.append("")
    return "\n".join(said)


def draw(found: dict[str, Any], studies: dict[str, Study], path: Path) -> None:
    """The mean accuracy over the tasks so far."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        1, len(studies), figsize=(5.2 * len(studies), 3.4), squeeze=False
    )
    for axis, study in zip(axes[0], studies.values(), strict=True):
        for label, runs in columns(found, study.name).items():
            curve = 100 * torch.tensor([run["curve"] for run in runs]).mean(0)
            color = (
                "0.5"
                if label in ("fine-tuning", "joint training")
                else f"C{METHODS.index(label) - 1}"
            )
            if len(curve) > 1:
                style = "--" if label == "fine-tuning" else "-"
                axis.plot(
                    range(1, len(curve) + 1), curve, style, marker=".", color=color, label=label
                )
            elif label == "joint training":
                axis.axhline(float(curve[0]), color=color, linestyle=":", label=label)
            else:
                marker = "s" if "k-center" in label else "D"
                axis.plot([study.tasks], curve, marker, color=color, label=label, markersize=5)
        axis.set(
            title=f"{study.name} {study.data}",
            xlabel="tasks learned",
            xticks=range(1, study.tasks + 1),
        )
        axis.grid(alpha=0.3)
    axes[0, 0].set_ylabel("accuracy on all of them, %")
    axes[0, 0].legend(frameon=False, fontsize=8)
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
    parser.add_argument("--only", nargs="*", default=["permuted", "split"])
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=METHODS)
    parser.add_argument("--held", action="store_true")
    for name in ("tasks", "epochs", "batch-size", "coreset"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("lr", "std"):
        parser.add_argument(f"--{name}", type=float)
    parser.add_argument("--tables", action="store_true", help="make these again and run nothing")
    parser.add_argument(
        "--choose",
        type=int,
        nargs="*",
        help="settings of VI by held-out rows: which of TRIED, or all",
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    kind = "mnist" if given.mnist else "small" if given.small else "digits"
    names = ("tasks", "epochs", "batch_size", "coreset", "lr", "std")
    changed = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    chosen, path = given.out / "continual-choice.json", given.out / f"continual-{kind}.json"
    held = given.held or given.choose is not None
    every = [replace(study, device=given.device, held=held, **changed) for study in STUDIES[kind]]
    studies = {study.name: study for study in every if study.name in given.only}
    if given.choose is not None:
        jobs = [
            (n, k, s)
            for k in given.choose or range(len(TRIED))
            for n in studies
            for s in range(given.seeds)
        ]
        for job, found in spread(choice, jobs, studies, given.jobs):
            keep(chosen, (kind, *job), found)
            print(f"  {found['settings']}: {100 * found['curve'][-1]:.2f} %", flush=True)
        return
    found = kept(chosen)
    studies = {
        n: replace(study, chosen=(best(found, kind, n) or study.chosen) | changed)
        for n, study in studies.items()
    }
    # The longest first: steps of flows take long to compile, and coresets of split tasks are a run
    # for each of them.
    order = sorted(
        given.methods, key=lambda label: (label != "MNF", "," not in label, label in METHODS[::7])
    )
    jobs = (
        []
        if given.tables
        else [(n, label, s) for s in range(given.seeds) for label in order for n in studies]
    )
    for job, found in spread(work, jobs, studies, given.jobs):
        keep(path, job, found)
        print(f"  {100 * sum(found['final']) / len(found['final']):.2f} %", flush=True)
    found = kept(path)
    said = table(found, studies)
    print(said)
    if not given.held:
        draw(found, studies, path.with_suffix(".png"))
        path.with_suffix(".md").write_text(
            said + ("" if given.tables else made(given.device) + "\n")
        )


if __name__ == "__main__":
    main()

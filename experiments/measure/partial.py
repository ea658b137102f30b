"""Which tensors of a network are worth being random: one of its layers, its norms, its biases, or
all.

    python -m experiments.measure.partial --out rows                    # every row is a file of its own,
    made once
    python -m experiments.measure.partial --out rows --write            # and the table of all rows that are
    there

Of each network a point is trained first (MAP); from there VI learns a mean field over the random
tensors and a point for the others, ``VI({"0.*": MeanField(), "*": Delta(penalty=True)})``, for the
same number of steps for every choice, "point" (no random tensor) too. Prior and noise are given,
the same for all rows.

digits: 8×8 digits 0 to 6, 500 rows, an MLP 64-50-50-7; the digits 7 to 9 are out of distribution.
concrete: UCI, an MLP 8-50-50-1, noise .3 of the standard deviation of y; out of distribution: the
test rows at three times their distance from the mean. Instead of accuracy and ECE: RMSE, and the
coverage of intervals of 90 %.
cifar10: a ResNet-8 of width 8 with filter response normalization, without augmentation; out of
distribution are Fashion-MNIST and notMNIST (the mean of both AUROC).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import platform
import time
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor, as_completed
from datetime import date
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import bayou
from bayou import metrics
from bayou.core.params import match
from bayou.likelihoods.predictive import Predictive

HERE = Path(__file__).parents[1] / "results"
NUMBERS, TABLE = HERE / "partial.json", HERE / "partial.md"
DRAWS = 30  # of a prediction
LAST, FIRST, ALL, POINT = "last layer", "first layer", "all", "point"
MLP = {POINT: (), FIRST: ("0.*",), LAST: ("4.*",), "biases": ("*.bias",), ALL: ("*",)}
CHOICES: dict[str, dict[str, tuple[str, ...]]] = {
    "digits": MLP,
    "concrete": MLP,
    "cifar10": {
        POINT: (), FIRST: ("0.*",), LAST: ("11.*",), "norms": ("*.affine",), "biases and norms": ("*.bias", "*.affine"),
        ALL: ("*",),
    },
}  # fmt: skip
COLUMNS = {
    "weights": ("random weights", 0), "accuracy": ("accuracy, %", 2), "ece": ("ECE", 4), "rmse": ("RMSE", 4),
    "coverage": ("coverage, %", 1), "nll": ("NLL", 4), "above": ("above the point", 4),
    "entropy": ("AUROC: entropy", 3), "information": ("information", 3), "std": ("AUROC: std", 3),
    "seconds": ("processor s", 0),
}  # fmt: skip


class Task(NamedTuple):
    """A network and its rows. ``far``: what is out of distribution, by name."""

    net: nn.Module
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    far: dict[str, Tensor]
    likelihood: Any
    prior: Any
    point: dict[str, Any]  # settings of the run that finds the point
    own: dict[str, Any]  # settings of the run of each row


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(inputs, 50), nn.SiLU(), nn.Linear(50, 50), nn.SiLU(), nn.Linear(50, outputs)
    )


def digits(seed: int, sizes: Mapping[str, int]) -> Task:
    from sklearn.datasets import load_digits

    found = load_digits()
    x, y = torch.tensor(found.data / 16).float(), torch.tensor(found.target)
    order = torch.randperm(int((y < 7).sum()))
    (xs, ys), rows = (x[y < 7][order], y[y < 7][order]), 500
    length = {"steps": sizes["steps"], "batch_size": rows, "lr": 3e-3, "schedule": "cosine"}
    return Task(
        mlp(64, 7), (xs[:rows], ys[:rows]), (xs[rows:], ys[rows:]), {"7 to 9": x[y >= 7]},
        bayou.Categorical(), bayou.Normal("fan_in", gain=3.0), length, length,
    )  # fmt: skip


def concrete(seed: int, sizes: Mapping[str, int]) -> Task:
    from bayou.data import load

    split = load("concrete", split=seed)
    length = {
        "steps": sizes["steps"],
        "batch_size": len(split.train[1]),
        "lr": 3e-3,
        "schedule": "cosine",
    }
    return Task(
        mlp(8, 1), split.train, split.test, {"far": 3 * split.test[0]},
        bayou.Gaussian(0.3), bayou.Normal("fan_in", gain=2.0), length, length,
    )  # fmt: skip


def cifar10(seed: int, sizes: Mapping[str, int]) -> Task:
    from experiments.hmc_cifar.images import AWAY, Sizes, read
    from experiments.hmc_cifar.network import resnet
    from experiments.hmc_cifar.rows import PRIOR, momentum

    images = read(Sizes(train=50_000, test=sizes["test"], away=sizes["away"]), torch.device("cpu"))
    rows = torch.randperm(50_000)[: sizes["train"]]
    often = {"batch_size": 100, "schedule": "cosine"}
    return Task(
        resnet(8, 1), (images.train[0][rows], images.train[1][rows]), (images.inputs["test"], images.y),
        {name: images.inputs[name] for name in AWAY}, bayou.Categorical(), PRIOR,
        often | {"epochs": sizes["start"], "lr": 0.1, "optimizer": momentum},
        often | {"epochs": sizes["epochs"], "lr": 2e-3},
    )  # fmt: skip


Build = Callable[[int, Mapping[str, int]], Task]
TASKS: dict[str, Build] = {"digits": digits, "concrete": concrete, "cifar10": cifar10}
SIZES = {"train": 10_000, "test": 2000, "away": 500, "start": 20, "epochs": 10, "steps": 2000}


def scores(test: Predictive, y: Tensor, far: list[Predictive]) -> dict[str, float]:
    """Of the test rows, and AUROC against what is out of distribution."""
    if y.is_floating_point():
        found = {"rmse": metrics.rmse(test, y), "coverage": 100 * metrics.coverage(test, y, 0.9)}
        std = fmean(metrics.auroc(test.std.flatten(), one.std.flatten()) for one in far)
        return found | {"nll": metrics.nll(test, y), "std": std}
    found = {
        "accuracy": 100 * metrics.accuracy(test, y),
        "ece": metrics.ece(test, y),
        "nll": metrics.nll(test, y),
    }
    found["entropy"] = fmean(metrics.auroc(test.entropy, one.entropy) for one in far)
    if len(test.outputs) > 1:  # a point has no mutual information
        found["information"] = fmean(
            metrics.auroc(test.mutual_information, one.mutual_information) for one in far
        )
    return found


def start(data: str, seed: int, sizes: Mapping[str, int], file: Path) -> None:
    """The point that all rows of a seed begin at."""
    from safetensors.torch import save_file

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = TASKS[data](seed, sizes)
    method = bayou.MAP(**task.point)
    found = bayou.fit(
        task.net,
        task.train,
        method,
        likelihood=task.likelihood,
        prior=task.prior,
        seed=seed,
        progress=False,
    )
    save_file(found.to_module().state_dict(), file.with_suffix(".part"))
    file.with_suffix(".part").rename(file)


def row(
    data: str, choice: str, seed: int, sizes: Mapping[str, int], point: Path, file: Path
) -> None:
    """One fit from the point of its seed, and its scores."""
    from safetensors.torch import load_file

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = TASKS[data](seed, sizes)
    task.net.load_state_dict(load_file(point))
    patterns = CHOICES[data][choice]
    rules: dict[str, Any] = dict.fromkeys(patterns, bayou.MeanField())
    rules |= {} if choice == ALL else {"*": bayou.Delta(penalty=True)}
    tensors = dict(task.net.named_parameters())
    random = match(tensors, dict.fromkeys(patterns, True), default=False) if patterns else {}
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bayou.BayouWarning)  # short runs are not converged
        posterior = bayou.fit(
            task.net, task.train, bayou.VI(rules, start="network", **task.own), likelihood=task.likelihood,
            prior=task.prior, seed=seed, progress=False,
        )  # fmt: skip
    seconds = time.process_time() - started
    draws = 1 if choice == POINT else DRAWS
    test, *far = (
        posterior.predict(x, draws, seed=seed) for x in (task.test[0], *task.far.values())
    )
    found: dict[str, Any] = {
        "data": data,
        "choice": choice,
        "seed": seed,
        "sizes": dict(sizes),
        "seconds": seconds,
    }
    found["weights"] = sum(tensors[name].numel() for name, wanted in random.items() if wanted)
    found |= scores(test, task.test[1], far) | {
        "date": str(date.today()),
        "machine": platform.machine(),
    }
    file.with_suffix(".part").write_text(json.dumps(found | {"torch": torch.__version__}))
    file.with_suffix(".part").rename(file)


def run(args: argparse.Namespace) -> None:
    """All rows that are not there, in ``args.jobs`` processes, the first seed first, until
    ``args.limit`` seconds.
    """
    out, sizes = Path(args.out), {name: getattr(args, name) for name in SIZES}
    out.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + args.limit
    work = [(data, seed) for seed in range(args.seeds) for data in args.data]
    points = {key: out / f"{key[0]}-{key[1]}.safetensors" for key in work}
    with ProcessPoolExecutor(args.jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
        waiting: dict[Any, tuple[str, int] | None] = {
            pool.submit(start, *key, sizes, points[key])
            if not points[key].exists()
            else pool.submit(int): key
            for key in work
        }
        while waiting and time.monotonic() < end:
            try:
                done = next(as_completed(waiting, timeout=max(0.0, end - time.monotonic())))
            except TimeoutError:
                break
            key = waiting.pop(done)
            done.result()
            for choice in CHOICES[key[0]] if key else ():
                file = out / f"{key[0]}-{choice.replace(' ', '-')}-{key[1]}.json"
                if not file.exists():
                    waiting[pool.submit(row, key[0], choice, key[1], sizes, points[key], file)] = (
                        None
                    )
        if waiting:
            print(f"{len(waiting)} runs were not finished in {args.limit:g} s")
            pool.shutdown(wait=False, cancel_futures=True)
            for child in multiprocessing.active_children():
                child.terminate()


def render(rows: list[dict[str, Any]]) -> str:
    """The tables: means over seeds ± one standard error."""
    from experiments.study import cell

    lines = ["# Which tensors are random", "", INTRODUCTION, ""]
    points = {(one["data"], one["seed"]): one["nll"] for one in rows if one["choice"] == POINT}
    for data, choices in CHOICES.items():
        mine = [one for one in rows if one["data"] == data]
        mine = [
            one
            if one["choice"] == POINT
            else one | {"above": one["nll"] - points[data, one["seed"]]}
            for one in mine
        ]
        heads = {name: head for name, head in COLUMNS.items() if any(name in one for one in mine)}
        if not mine:
            continue
        lines += [
            f"## {data}",
            "",
            f"| random | {' | '.join(head for head, _ in heads.values())} | seeds |",
        ]
        lines.append(f"|---|{'---:|' * (len(heads) + 1)}")
        for choice in choices:
            same = [one for one in mine if one["choice"] == choice]
            cells = [
                cell([one.get(name) for one in same], digits) for name, (_, digits) in heads.items()
            ]
            cells[0] = f"{same[0]['weights']:,}" if same else ""
            lines += [f"| {' | '.join([choice, *cells, str(len(same))])} |"] if same else []
        one = mine[0]
        sizes = one["sizes"]
        size = f" --train {sizes['train']} --test {sizes['test']} --away {sizes['away']} --start {sizes['start']}"
        size += f" --epochs {sizes['epochs']}"
        command = f"python -m experiments.measure.partial --out rows --data {data}"
        command += size if data == "cifar10" else f" --steps {sizes['steps']}"
        lines += [
            "",
            f"`{command}`, {one['date']}, torch {one['torch']}, {one['machine']} CPU, one thread.",
            "",
        ]
    return "\n".join(lines)


INTRODUCTION = (
    "From one trained point per seed, VI learns a mean field over the tensors named, and a point with the same prior "
    "for all others; every row has the same number of steps, the point too. `experiments/measure/partial.py` says what the "
    'networks, priors and rows are. Means over seeds ± one standard error; "above the point": the NLL less that of '
    "the point of the same seed."
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="the folder of the rows")
    parser.add_argument("--data", nargs="*", default=list(TASKS), choices=TASKS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument(
        "--limit", type=float, default=1e6, help="seconds, after which runs are ended"
    )
    parser.add_argument("--write", action="store_true", help="write the table of all rows in OUT")
    for name, value in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    run(args)
    if args.write:
        rows = [json.loads(file.read_text()) for file in sorted(Path(args.out).glob("*.json"))]
        NUMBERS.write_text(json.dumps({"rows": rows}, indent=1) + "\n")
        TABLE.write_text(render(rows))


if __name__ == "__main__":
    main()

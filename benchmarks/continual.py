"""One task after another: permuted and split digits, by VCL and online Laplace, beside fine-tuning and joint training.

    python -m benchmarks.continual --data mnist --tasks 10 --hidden 100 100 --epochs 100 --coreset 200 --device cuda
    python -m benchmarks.continual --split --data mnist --hidden 256 256 --epochs 120 --coreset 40 --device cuda
    python -m benchmarks.continual --tasks 3 --epochs 20                       # a trial on a CPU: digits of 8×8

prints a table: test accuracy of all tasks in the end, task by task and on average. Nguyen 2018 (MNIST): permuted 90 %,
93 % with 200 coreset rows; split, a head of two classes for each of five tasks, 97.0 % and 98.4 %.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

import bayou
from bayou import rng
from bayou.data import load

Pair = tuple[Tensor, Tensor]
Scores = Callable[[Tensor], Tensor]
PRIOR = bayou.Normal(1.0)


def tasks(given: argparse.Namespace) -> tuple[list[Pair], list[Pair]]:
    """Rows to learn from and to judge by, for each task."""
    data = load(given.data)
    train, test = ((x.flatten(1).to(given.device), y.to(given.device)) for x, y in (data.train, data.test))
    if given.split:

        def pick(pair: Pair, k: int) -> Pair:
            here = pair[1] // 2 == k
            return pair[0][here], pair[1][here] % 2

        count = min(given.tasks, 5)
        return [pick(train, k) for k in range(count)], [pick(test, k) for k in range(count)]
    width = train[0].shape[1]
    orders = [torch.arange(width) if k == 0 else rng.permutation(width, 100 + k) for k in range(given.tasks)]
    orders = [order.to(given.device) for order in orders]
    return [(train[0][:, order], train[1]) for order in orders], [(test[0][:, order], test[1]) for order in orders]


def network(given: argparse.Namespace, inputs: int) -> nn.Module:
    """A multilayer perceptron, whose last layer is the head of a split task."""
    torch.manual_seed(given.seed)
    sizes = [inputs, *given.hidden]
    layers: list[nn.Module] = []
    for a, b in pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(sizes[-1], 2 if given.split else 10)).to(given.device)


def accuracies(scores: list[Scores], test: list[Pair]) -> list[float]:
    """Of each task, by what it is to be predicted with."""
    return [float((f(x).argmax(-1) == y).float().mean()) for f, (x, y) in zip(scores, test, strict=True)]


def predicted(posterior: bayou.Posterior) -> Scores:
    """Class probabilities of 100 draws."""
    return lambda x: posterior.predict(x, seed=0).mean


def fine_tuned(net: nn.Module, train: list[Pair], method: bayou.MAP, head: str | None) -> list[Scores]:
    """No memory at all: every task starts at the last one's weights. A head stays with its task."""
    nets: list[nn.Module] = []
    for rows in train:
        nets.append(net := bayou.to_module(bayou.fit(net, rows, method=method, prior=PRIOR, progress=False)))
    for old in nets[:-1]:
        own = {name: value for name, value in old.state_dict().items() if head and name.startswith(head)}
        old.load_state_dict(net.state_dict() | own)
    return list(nets)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--split", action="store_true")
    parser.add_argument("--tasks", type=int, default=5)
    parser.add_argument("--hidden", type=int, nargs="*", default=[100])
    parser.add_argument("--epochs", type=int, default=100)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--std", type=float, default=1e-3, help="of the weights at the start of VI")
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--coreset", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    train, test = tasks(given)
    net = network(given, train[0][0].shape[1])
    head = f"{len(net) - 1}."  # type: ignore[arg-type]
    heads = f"{head}*" if given.split else ()
    point = bayou.MAP(epochs=given.epochs, lr=given.lr, batch_size=given.batch_size)
    vi = bayou.VI(bayou.FFG(given.std), epochs=given.epochs, lr=given.lr, batch_size=given.batch_size, start="network")
    laplace = bayou.Laplace(structure="diagonal", start=point)

    def sequence(method: bayou.Method, coreset: int | None = None, how: Any = "random") -> list[Scores]:
        options: dict[str, Any] = {"prior": PRIOR, "heads": heads, "seed": given.seed, "progress": False}
        found = bayou.continual(net, train, method, coreset=coreset, how=how, **options)
        return [predicted(posterior) for posterior in found.final]

    rows: dict[str, Callable[[], list[Scores]]] = {
        "fine-tuning": lambda: fine_tuned(net, train, point, head if given.split else None),
        "VCL": lambda: sequence(vi),
        f"VCL, {given.coreset} random rows": lambda: sequence(vi, given.coreset),
        f"VCL, {given.coreset} k-center rows": lambda: sequence(vi, given.coreset, "k-center"),
        "online Laplace": lambda: sequence(laplace),
    }
    if not given.split:
        every = (torch.cat([x for x, _ in train]), torch.cat([y for _, y in train]))
        joint: dict[str, Any] = {"method": point, "prior": PRIOR, "progress": False}
        rows["joint training"] = lambda: [predicted(bayou.fit(net, every, **joint))] * len(test)
    print(f"| | {' | '.join(f'task {t}' for t in range(len(test)))} | mean | seconds |")
    print("|---" * (len(test) + 3) + "|")
    for label, run in rows.items():
        begun = time.monotonic()
        found = accuracies(run(), test)
        cells = [f"{100 * value:.1f}" for value in [*found, sum(found) / len(found)]]
        print(f"| {label} | {' | '.join(cells)} | {time.monotonic() - begun:.0f} |", flush=True)


if __name__ == "__main__":
    main()

"""A posterior and its students: what one network keeps of what a hundred draws say.

    python -m benchmarks.distil --data mnist --hidden 400 400 --epochs 100 --steps 100000 --device cuda
    python -m benchmarks.distil                                                # a trial on a CPU: few digits of 8×8

prints a table: test error and NLL, entropy and mutual information of test rows and of rows out of distribution, seconds
of a prediction. Balan 2015 (MNIST, 400-400): SGD 1.54 %, SGLD 1.27 %, distilled 1.31 %.
"""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from typing import Any

import torch
from torch import nn

import bayou
from bayou import rng
from bayou.data import load

PRIOR = bayou.Normal("fan_in", gain=2.0)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="digits-few")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--hidden", type=int, nargs="*", default=[100])
    parser.add_argument("--epochs", type=int, default=200, help="of the one network")
    parser.add_argument("--steps", type=int, default=3000, help="of the teacher and of each student")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--noise", type=float, default=0.3, help="on rows that the teacher is asked about, ten of each")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    data = load(given.data)
    (x, y), (x_test, y_test) = ((x.flatten(1).to(given.device), y.to(given.device)) for x, y in (data.train, data.test))
    far = data.ood[0] if isinstance(data.ood, tuple) else data.ood
    assert far is not None
    far = far.flatten(1).to(x)
    sizes = [x.shape[1], *given.hidden, 10]

    def network() -> nn.Module:
        torch.manual_seed(given.seed)
        layers = [layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())]
        return nn.Sequential(*layers[:-1]).to(given.device)

    point = bayou.MAP(epochs=given.epochs, lr=given.lr)
    vi = bayou.VI(bayou.FFG(), steps=given.steps, lr=given.lr)
    teacher = bayou.fit(network(), (x, y), method=vi, prior=PRIOR, seed=given.seed, progress=False)
    rows = torch.cat([x, *(x + given.noise * rng.normal(len(x), x.shape[1:], x, seed) for seed in range(10))])
    options: dict[str, Any] = {"steps": given.steps, "lr": given.lr, "seed": given.seed, "progress": False}
    found = {
        "one network (MAP)": bayou.fit(network(), (x, y), method=point, prior=PRIOR, progress=False),
        "teacher (VI), 100 draws": teacher,
        "student": bayou.distil(teacher, network(), rows, **options),
        "student, Dirichlet": bayou.distil(teacher, network(), rows, keep="epistemic", **options),
    }
    print("| | error, % | NLL | entropy | out of distribution | information | out of distribution | ms |")
    print("|---" * 8 + "|")
    for label, posterior in found.items():
        beyond = posterior.predict(far, seed=0)
        begun = time.monotonic()
        said = posterior.predict(x_test, seed=0)
        seconds = time.monotonic() - begun
        error = 100 * float((said.mean.argmax(-1) != y_test).float().mean())
        numbers = [-float(said.log_prob(y_test).mean())]
        numbers += [float(v.mean()) for v in (said.entropy, beyond.entropy)]
        numbers += [float(v.mean()) for v in (said.mutual_information, beyond.mutual_information)]
        cells = [f"{error:.2f}", *(f"{number:.3f}" for number in numbers), f"{1000 * seconds:.1f}"]
        print(f"| {label} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()

"""Remember: three tasks one after another, and what is left of the first.

Fine-tuning forgets: each task's digits arrive with their pixels in another order, and weights that served the first
order are overwritten by the second. With the posterior of one task as the prior of the next, weights that were sure
stay, and the others learn (VCL, Nguyen 2018; online Laplace, Ritter 2018). A coreset, a few rows of each task, is
learned again in the end.

    python examples/continual.py --plot continual.png
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import nn

import bayou
from bayou import rng
from bayou.data import load

PRIOR = bayou.Normal(1.0)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))


def main(epochs: int = 60, tasks: int = 3, plot: str | None = None) -> dict[str, list[list[float]]]:
    data = load("digits")
    orders = [torch.arange(64), *(rng.permutation(64, task) for task in range(1, tasks))]
    (x, y), (x_test, y_test) = ((x.flatten(1), y) for x, y in (data.train, data.test))
    train, test = [(x[:, order], y) for order in orders], [x_test[:, order] for order in orders]
    point = bayou.MAP(epochs=epochs, lr=3e-3)
    methods = {
        "VCL": bayou.VI(bayou.MeanField(1e-3), epochs=epochs, lr=3e-3, start="network"),
        "online Laplace": bayou.Laplace("kronecker", start=point),
    }

    def accuracies(predictors: list[Any]) -> list[float]:
        """Of each task so far."""
        said = [f(inputs).argmax(-1) for f, inputs in zip(predictors, test, strict=False)]
        return [float((one == y_test).float().mean()) for one in said]

    found: dict[str, list[list[float]]] = {}
    net, curve = network(), []
    for t, rows in enumerate(train):  # fine-tuning: the next task starts where the last one ended
        net = bayou.fit(net, rows, method=point, prior=PRIOR, progress=False).to_module()
        curve.append(accuracies([net] * (t + 1)))
    found["fine-tuning"] = curve
    for name, method in methods.items():
        done = bayou.continual(network(), train, method, prior=PRIOR, progress=False)
        found[name] = [
            accuracies([lambda x, q=q: q.predict(x, seed=0).mean for q in done.after(t)]) for t in range(tasks)
        ]
    done = bayou.continual(network(), train, methods["VCL"], prior=PRIOR, coreset=20, progress=False)
    found["VCL, 20 rows kept"] = [accuracies([lambda x, q=q: q.predict(x, seed=0).mean for q in done.final])]

    print(f"{'accuracy in the end':20s}" + "".join(f"  task {t}" for t in range(tasks)) + "    mean")
    for name, curve in found.items():
        last = curve[-1]
        print(f"{name:20s}" + "".join(f"  {value:6.1%}" for value in [*last, sum(last) / len(last)]))
    if plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5, 3.2), layout="compressed")
        axis = figure.subplots()
        for name, curve in found.items():
            means = [100 * sum(now) / len(now) for now in curve]
            axis.plot(range(tasks + 1 - len(means), tasks + 1), means, marker="o", label=name)
        axis.set(xlabel="tasks learned", ylabel="accuracy on all of them, %", xticks=range(1, tasks + 1))
        axis.legend(frameon=False)
        figure.savefig(plot, dpi=130)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=60)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.epochs, plot=options.plot)

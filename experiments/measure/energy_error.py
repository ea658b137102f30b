"""The energy error of MCLMC: held-out NLL of chains from an ensemble, and errors where the
posterior is known.

    python -m experiments.measure.energy_error energy concrete yacht       # a fifth of the training rows of
    split 0 held out
    python -m experiments.measure.energy_error --known cubic --seeds 4     # a problem of experiments.measure.chains

docs/methods/mclmc.md has the numbers that the default was chosen by; CPU, one thread.
"""

from __future__ import annotations

import argparse
import warnings
from dataclasses import replace

import torch
from torch import nn

import bayou
from bayou import metrics
from bayou.data import load
from experiments.measure.chains import PROBLEMS, measure

TARGETS = 5e-4, 5e-3, 0.02, 0.05, 0.1, 0.3
MEMBERS = {
    "well trained": bayou.MAP(epochs=200, lr=5e-3, batch_size=128, schedule="cosine"),
    "hardly trained": bayou.MAP(steps=200, lr=1e-3, batch_size=10**4, schedule="constant"),
}


def held_out(name: str) -> None:
    """Print the NLL of standardized rows, of the ensembles and of the chains from them."""
    x, y = (part.float() for part in load(name).train[:2])
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(1))
    own, other = order[: int(0.8 * len(x))], order[int(0.8 * len(x)) :]
    x, y = (
        (part - part[own].mean(0)) / (part[own].std(0) + 1e-8) for part in (x, y.view(len(x), -1))
    )
    for members, point in MEMBERS.items():
        for target in (None, *TARGETS):
            torch.manual_seed(0)
            hidden = nn.Linear(x.shape[1], 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU()
            method: bayou.inference.method.Method = bayou.Ensemble(4, of=point, parallel="vmap")
            if target is not None:
                length = {"steps": 2, "warmup": 1000, "draws": 500}
                method = bayou.MCLMC(
                    chains=4, start=method, dispersal=0.0, energy_error=target, **length
                )
            model = {"likelihood": bayou.HeteroscedasticGaussian(), "prior": bayou.Normal(1.0)}
            net = nn.Sequential(*hidden, nn.Linear(16, 2))
            posterior = bayou.fit(net, (x[own], y[own]), method, seed=0, progress=False, **model)
            p = posterior.predict(x[other], posterior.draws, seed=0)
            print(
                name,
                members,
                target or "ensemble",
                f"NLL {metrics.nll(p, y[other]):.3f}",
                flush=True,
            )


def main() -> None:
    """Print a line for each setting."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="*")
    parser.add_argument("--known", nargs="*", default=(), choices=PROBLEMS)
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", bayou.BayouWarning)
    for name in args.data:
        held_out(name)
    for name in args.known:
        for target in TARGETS:
            method = replace(bayou.MCLMC(), energy_error=target)
            found = [measure(PROBLEMS[name](), method, seed)["error"] for seed in range(args.seeds)]
            print(name, target, "error", *(f"{error:.3f}" for error in found), flush=True)


if __name__ == "__main__":
    main()

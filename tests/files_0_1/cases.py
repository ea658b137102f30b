"""The files of bayou 0.1 beside this one: the networks that they need, and how they were written.

    python -m tests.files_0_1.cases    write all files and their predictions again

The files belong to a release: they are never written again by a later one. If a release changes the
random numbers of a seed, ``--predictions`` renews the predictions by what the old files give.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import bayou

HERE = Path(__file__).parent
SAMPLES = 20


def inputs() -> Tensor:
    """Return new inputs (5, 2)."""
    return torch.linspace(-1.5, 1.5, 10, dtype=torch.float64).reshape(5, 2)


def rows() -> tuple[Tensor, Tensor]:
    """Return 40 rows of two inputs and a number, without random numbers."""
    angle = torch.arange(40, dtype=torch.float64)
    x = torch.stack([(1.7 * angle).sin(), (2.3 * angle).cos()], -1)
    return x, (2 * x[:, :1] - x[:, 1:] ** 2) + 0.1 * (5.1 * angle).sin()[:, None]


def network(outputs: int = 1, dropout: bool = False) -> nn.Sequential:
    """Return the network of the posteriors, with two outputs for classes."""
    torch.manual_seed(0)
    layers = [nn.Dropout(0.2)] if dropout else []
    return nn.Sequential(nn.Linear(2, 8), nn.Tanh(), *layers, nn.Linear(8, outputs)).double()


def network_of(name: str) -> nn.Sequential:
    """Return the network with which a file is loaded."""
    return network(2 if name.startswith("classification") else 1, dropout=name == "masked")


def fit(
    method: object, outputs: int = 1, dropout: bool = False, **options: object
) -> bayou.Posterior:
    """Fit a method to the rows, or to their signs with two outputs."""
    x, y = rows()
    target = y if outputs == 1 else (y[:, 0] > 0).long()
    likelihood = bayou.Gaussian(0.2) if outputs == 1 else bayou.Categorical()
    settings = {"likelihood": likelihood, "seed": 0, "progress": False} | options
    return bayou.fit(network(outputs, dropout), (x, target), method, **settings)


CASES: dict[str, Callable[[], bayou.Posterior]] = {
    "gaussian_mean_field": lambda: fit(bayou.VI(bayou.MeanField(), steps=50)),
    "gaussian_laplace": lambda: fit(bayou.Laplace("diagonal", start=bayou.MAP(steps=50))),
    "kronecker_laplace": lambda: fit(bayou.Laplace("kronecker", start=bayou.MAP(steps=50))),
    "guided_mnf": lambda: fit(bayou.VI(bayou.MNF(), steps=30)),
    "learned_noise": lambda: fit(bayou.MAP(steps=50), likelihood=bayou.Gaussian(0.3, learn=True)),
    "ensemble": lambda: fit(bayou.Ensemble(3, bayou.MAP(steps=30))),
    "chain": lambda: fit(bayou.HMC(chains=2, draws=4, warmup=20)),
    "mixture": lambda: bayou.Mixture(
        [fit(bayou.MAP(steps=50)), fit(bayou.VI(bayou.MeanField(), steps=30))], [0.3, 0.7]
    ),
    "wide": lambda: fit(bayou.methods.Wide(draws=2), likelihood=bayou.Gaussian(0.2, learn=True)),
    "masked": lambda: fit(bayou.MCDropout(bayou.MAP(steps=50)), dropout=True),
    "by_name": lambda: fit("map", likelihood=None),
    "classification_swag": lambda: fit(bayou.SWAG(steps=60), outputs=2),
}


def flow() -> bayou.flows.Flow:
    """Return the flow whose state is in flow.safetensors."""
    torch.manual_seed(0)
    base = bayou.flows.StandardNormal(2)
    return bayou.flows.Flow(base, bayou.flows.spline_coupling(2, layers=2, hidden=(8,))).double()


def conformal() -> bayou.operations.Conformal:
    """Return the conformal prediction whose file is conformal.bayou."""
    x, y = rows()
    return bayou.conformal(fit(bayou.MAP(steps=50)), (x + 0.01, y), samples=SAMPLES)


def estimator() -> bayou.BayesRegressor:
    """Return the estimator whose file is estimator.bayou."""
    x, y = rows()
    regressor = bayou.BayesRegressor("map", steps=50, random_state=0)
    return regressor.fit(x.numpy(), y[:, 0].numpy())


def other_predictions() -> dict[str, Tensor]:
    """Return what the files of other objects than posteriors give."""
    model = flow()
    model.load_state_dict(load_file(HERE / "flow.safetensors"))
    calibrated = bayou.operations.Conformal.load(HERE / "conformal.bayou", network())
    low, high = calibrated.interval(inputs())
    loaded = bayou.BayesRegressor.load(HERE / "estimator.bayou")
    return {
        "flow.log_prob": model.log_prob(inputs()).detach(),
        "conformal.interval": torch.stack([low, high]).double(),
        "estimator.mean": torch.from_numpy(loaded.predict(inputs().numpy())).double(),
    }


def predictions(posterior: bayou.Posterior) -> dict[str, Tensor]:
    """Return the numbers that a loaded posterior must reproduce."""
    p = posterior.predict(inputs(), SAMPLES, seed=0)
    numbers = {"mean": p.mean, "spread": p.entropy if p.mean.shape[-1] > 1 else p.std}
    return {name: value.double().contiguous() for name, value in numbers.items()}


def main(arguments: list[str] | None = None) -> None:
    """Write the files and their predictions."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predictions", action="store_true", help="keep the files")
    keep = parser.parse_args(arguments).predictions
    numbers = {}
    for name, make in CASES.items():
        path = HERE / f"{name}.bayou"
        if not keep:
            make().save(path)
        posterior = bayou.load(path, network_of(name))
        numbers |= {f"{name}.{key}": value for key, value in predictions(posterior).items()}
        print(f"{path.name}: {path.stat().st_size:,} bytes")
    if not keep:
        x, y = rows()
        model = flow()
        bayou.flows.fit(model, torch.cat([x[:, :1], y], -1), steps=50, seed=0, progress=False)
        save_file(model.state_dict(), HERE / "flow.safetensors")
        conformal().save(HERE / "conformal.bayou")
        estimator().save(HERE / "estimator.bayou")
    numbers |= other_predictions()
    save_file(numbers, HERE / "predictions.safetensors")


if __name__ == "__main__":
    sys.exit(main())

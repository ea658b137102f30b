"""Networks of infinite width beside other methods by name and scikit-learn, on small tables.

python experiments/measure/wide.py                  # all tables, five draws each
python experiments/measure/wide.py --only sparse --seeds 1
python experiments/measure/wide.py --settings       # units, draws and most probable scales alone
"""

from __future__ import annotations

import argparse
import math
import time
import warnings
from collections.abc import Callable

import numpy as np
import torch
from sklearn.datasets import load_diabetes, make_friedman1, make_friedman2, make_friedman3
from sklearn.gaussian_process import GaussianProcessRegressor
from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel
from sklearn.linear_model import BayesianRidge
from torch import Tensor, nn

import bayou
from bayou.methods import Wide

ROWS = 240
TEST_ROWS = 1000
Table = tuple[np.ndarray, np.ndarray]
# mean and standard deviation of y in test rows, in the units of y; or log p(y) with them
Result = tuple[np.ndarray, np.ndarray]


def sparse(count: int, seed: int) -> Table:
    """Thirty inputs, of which four matter."""
    rng = np.random.RandomState(seed)
    x = rng.randn(count, 30)
    f = np.sin(2 * x[:, 0]) + x[:, 1] * x[:, 2] + 0.5 * x[:, 3] ** 2
    return x, f + 0.3 * rng.randn(count)


def piecewise(count: int, seed: int) -> Table:
    """Steps, and an input that decides which of two others matters."""
    rng = np.random.RandomState(seed)
    x = rng.rand(count, 6)
    either = np.where(x[:, 1] > 0.3, 3 * x[:, 2], -2 * x[:, 3])
    f = 2 * (x[:, 0] > 0.5) + either + np.floor(4 * x[:, 4]) / 2
    return x, f + 0.2 * rng.randn(count)


def additive(count: int, seed: int) -> Table:
    """A sum of functions of single inputs, two of them with a kink or a steep step."""
    rng = np.random.RandomState(seed)
    x = 4 * rng.rand(count, 8) - 2
    f = np.abs(x[:, 0]) + np.tanh(3 * x[:, 1]) + x[:, 2] + 0.3 * x[:, 3] ** 2
    return x, f + 0.2 * rng.randn(count)


def diabetes(count: int, seed: int) -> Table:
    """The table of scikit-learn in random order; it has 442 rows."""
    x, y = load_diabetes(return_X_y=True)
    order = np.random.RandomState(seed).permutation(len(x))
    return x[order], y[order]


TABLES: dict[str, Callable[[int, int], Table]] = {
    "friedman1": lambda count, seed: make_friedman1(count, noise=1.0, random_state=seed),
    "friedman2": lambda count, seed: make_friedman2(count, noise=30.0, random_state=seed),
    "friedman3": lambda count, seed: make_friedman3(count, noise=0.1, random_state=seed),
    "diabetes": diabetes,
    "sparse": sparse,
    "piecewise": piecewise,
    "additive": additive,
}


def scores(log_prob: np.ndarray, mean: np.ndarray, std: np.ndarray, y: np.ndarray) -> list[float]:
    """Return NLL, RMSE and the coverage of mean ± 1.645 std."""
    covered = np.abs(y - mean) < 1.645 * std
    return [-log_prob.mean(), math.sqrt(((y - mean) ** 2).mean()), covered.mean()]


def of_sklearn(make: Callable[[int], object]) -> Callable[..., list[float]]:
    """Return the scores of an estimator of scikit-learn, on standardized x and y."""

    def fit(x: np.ndarray, y: np.ndarray, new_x: np.ndarray, new_y: np.ndarray) -> list[float]:
        shift, scale = x.mean(0), x.std(0)
        model = make(x.shape[1])
        model.fit((x - shift) / scale, (y - y.mean()) / y.std())
        mean, std = model.predict((new_x - shift) / scale, return_std=True)
        mean, std = y.mean() + y.std() * mean, y.std() * std
        z = (new_y - mean) / std
        return scores(-0.5 * (z**2 + math.log(2 * math.pi)) - np.log(std), mean, std, new_y)

    return fit


def gaussian_process(columns: int) -> GaussianProcessRegressor:
    """A squared-exponential kernel with a length for each input, and noise."""
    kernel = ConstantKernel(1.0, (1e-3, 1e4)) * RBF(np.full(columns, 3.0), (1e-2, 1e4))
    return GaussianProcessRegressor(kernel + WhiteKernel(0.1, (1e-6, 10.0)), random_state=0)


def of_bayou(method: object) -> Callable[..., list[float]]:
    """Return the scores of a method by name, or of an object on standardized rows."""

    def fit(x: np.ndarray, y: np.ndarray, new_x: np.ndarray, new_y: np.ndarray) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(x.shape[1], 50), nn.ReLU(), nn.Linear(50, 1))
        shift, scale = x.mean(0), x.std(0)

        def as_tensor(values: np.ndarray) -> Tensor:
            return torch.tensor(values, dtype=torch.float32)

        inputs = as_tensor((x - shift) / scale)
        targets = as_tensor((y - y.mean()) / y.std())[:, None]
        posterior = bayou.fit(net, (inputs, targets), method, progress=False)
        predictive = posterior.predict(as_tensor((new_x - shift) / scale))
        new_targets = as_tensor((new_y - y.mean()) / y.std())[:, None]
        log_prob = predictive.log_prob(new_targets).double().numpy() - math.log(y.std())
        mean = y.mean() + y.std() * predictive.mean[:, 0].double().numpy()
        return scores(log_prob, mean, y.std() * predictive.std[:, 0].double().numpy(), new_y)

    return fit


METHODS: dict[str, Callable[..., list[float]]] = {
    "wide": of_bayou("wide"),
    "laplace": of_bayou("laplace"),
    "Gaussian process (scikit-learn)": of_sklearn(gaussian_process),
    "BayesianRidge (scikit-learn)": of_sklearn(lambda columns: BayesianRidge()),
}
SETTINGS: dict[str, Callable[..., list[float]]] = {
    "Wide()": of_bayou(Wide()),
    "Wide(draws=1)": of_bayou(Wide(draws=1)),
    "Wide(units='erf')": of_bayou(Wide(units="erf")),
    "Wide(units='relu')": of_bayou(Wide(units="relu")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=list(TABLES))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--method", choices=[*METHODS, *SETTINGS])
    parser.add_argument("--settings", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print("| table | method | NLL | RMSE | covered by 90 % | processor seconds |")
    print("|---|---|---|---|---|---|")
    for name in [options.only] if options.only else list(TABLES):
        for label, fit in (SETTINGS if options.settings else METHODS).items():
            if options.method not in (None, label):
                continue
            rows = []
            for seed in range(options.first, options.first + options.seeds):
                x, y = TABLES[name](options.rows + TEST_ROWS, seed)
                split = options.rows
                started = time.process_time()
                result = fit(x[:split], y[:split], x[split:], y[split:])
                rows.append([*result, time.process_time() - started])
            nll, rmse, covered, seconds = np.mean(rows, 0)
            print(
                f"| {name} | {label} | {nll:.3f} | {rmse:.4g} | {covered:.3f} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()

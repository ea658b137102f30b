"""The inducing posterior beside a factorized Gaussian: digits, network 64-100-100-10, prior N(0,
9/fan-in).

    python -m experiments.measure.inducing --device cuda                                # FFG and 50, 100,
    200 points
    python -m experiments.measure.inducing --steps 100 --points 20                      # a trial on a CPU

prints a table: ELBO per row, its two parts, test NLL and ECE of 100 draws, total variation to the
HMC reference (where ``experiments/truth_digits.safetensors`` is there), milliseconds a step.
Settings by flags, to compare them.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

import bayou
from bayou import metrics
from bayou.app.runs import nets
from bayou.data import load
from bayou.guides import GuideSpec
from bayou.likelihoods.predictive import Predictive

PRIOR = bayou.Normal("fan_in", gain=3.0)


def reference() -> Predictive | None:
    """The HMC predictive of the test rows, once it has been made."""
    try:
        from experiments.truth_reference import reference as find  # type: ignore[import-not-found, unused-ignore]

        found: Predictive = find("digits").predictive
    except (ImportError, ValueError):
        return None
    return found


def row(label: str, family: GuideSpec, truth: Predictive | None, given: argparse.Namespace) -> str:
    """Fit once, and one line of the table."""
    data = load("digits")
    (x, y), (x_test, y_test) = (
        (x.to(given.device), y.to(given.device)) for x, y in (data.train, data.test)
    )
    net = nets.build("digits", tuple(x.shape[1:]), 10, seed=given.seed).to(x)
    start: Any = bayou.MAP(steps=given.mode, lr=3e-3) if given.mode else "network"
    method = bayou.VI(
        family, steps=given.steps, lr=given.lr, scale_lr=given.scale_lr, warmup=given.warmup, clip=given.clip,
        beta=given.beta, samples=given.samples, batch_size=given.batch_size, schedule="cosine", start=start,
        compile=given.device != "cpu",
    )  # fmt: skip
    begun = time.monotonic()
    posterior = bayou.fit(net, (x, y), method=method, prior=PRIOR, seed=given.seed, progress=False)
    seconds = time.monotonic() - begun
    bound = bayou.elbo(posterior, (x, y), samples=20, seed=0)  # type: ignore[arg-type]
    predictive = posterior.predict(x_test, samples=100, seed=0)
    scores = metrics.summary(predictive, y_test)
    distance = "" if truth is None else f"{metrics.total_variation(predictive, truth):.4f}"
    numbers = [
        bound.value / len(x),
        bound.log_likelihood / len(x),
        bound.kl / len(x),
        scores["nll"],
        scores["ece"],
    ]
    cells = [
        label,
        *(f"{number:.3f}" for number in numbers),
        distance,
        f"{1000 * seconds / given.steps:.1f}",
    ]
    return f"| {' | '.join(cells)} |"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=int, nargs="*", default=[50, 100, 200])
    parser.add_argument("--precision", type=float, default=0.05)
    parser.add_argument("--steps", type=int, default=5000)
    parser.add_argument(
        "--mode",
        type=int,
        default=500,
        help="steps of the MAP that it starts from; 0: a fresh network",
    )
    parser.add_argument("--lr", type=float, default=3e-2)
    parser.add_argument("--scale-lr", type=float, default=0.1, help="of precisions and stds")
    parser.add_argument("--warmup", type=float, default=0.0)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--beta", type=float, default=1.0, help="the weight of the KL in training")
    parser.add_argument("--samples", type=int, default=1)
    parser.add_argument("--batch-size", type=int, default=1438)
    parser.add_argument("--no-ffg", action="store_true")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    truth = reference()
    print(
        "| family | ELBO/N | log-likelihood/N | KL/N | NLL | ECE | total variation | ms a step, with the start |"
    )
    print("|---|---|---|---|---|---|---|---|")
    if not given.no_ffg:
        print(row("FFG", bayou.MeanField(), truth, given), flush=True)
    for points in given.points:
        print(
            row(f"Inducing, {points}", bayou.Inducing(points, given.precision), truth, given),
            flush=True,
        )


if __name__ == "__main__":
    main()

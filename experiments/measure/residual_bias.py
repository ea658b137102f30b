"""Bias and variance of estimators of log det(I + J) as ‖J‖ = L goes to 1.

    python -m experiments.measure.residual_bias              # table and picture, a minute on a CPU

log det(I + J) = Σ_k (−1)^{k+1} tr J^k / k, with εᵀJ^kε in the place of tr J^k, ε = ±1. Truncation
keeps the first n
terms: biased, of finite variance. Russian roulette draws N and weighs term k by 1{N ≥ k}/P(N ≥ k):
unbiased, with

    E[estimate²] = Σ_{k,l} E[a_k·a_l]/P(N ≥ min(k, l)),   a_k = (−1)^{k+1}·εᵀJ^kε/k,

since 1{N ≥ k}·1{N ≥ l} = 1{N ≥ max} and P(max)/(P(k)·P(l)) = 1/P(min). The expectation over ε is
summed over all 2^D signs, that over N by this formula: no number of the table is drawn but the
last, which is what 100,000 draws of the estimator in the library say of the last rule.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from itertools import product
from pathlib import Path

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.flows import Residual
from experiments.measure.parallel import made

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "residual_bias.png"
DIM, TERMS, DRAWS = 8, 6000, 100_000
NORMS = (0.5, 0.7, 0.8, 0.9, 0.95, 0.98, 0.99)
Tail = Callable[[int], float]  # log P(N ≥ k)


def geometric(p: float) -> Tail:
    """P(N ≥ k) = (1 − p)^(k − 1)."""
    return lambda k: (k - 1) * math.log1p(-p)


def poisson(rate: float) -> Tail:
    """N − 1 ~ Poisson(rate): P(N ≥ k) = Σ_{j ≥ k − 1} e^−λ λ^j / j!."""

    def tail(k: int) -> float:
        if k == 1:
            return 0.0
        first = -rate + (k - 1) * math.log(rate) - math.lgamma(k)
        total, ratio = 1.0, 1.0
        for j in range(k, k + 200):
            ratio *= rate / j
            total += ratio
        return min(0.0, first + math.log(total))

    return tail


RULES: dict[str, Callable[[float], Tail]] = {
    "Poisson(10)": lambda _: poisson(10.0),
    "geometric(.5)": lambda _: geometric(0.5),
    "geometric(1 − L)": lambda norm: geometric(1 - norm),
}
# Terms of the variance are L^2k/(k²·P(N ≥ k)), so that it is finite for geometric(p) up to L² = 1 −
# p, and for a Poisson, whose tail falls faster than any power, never.
LIMIT = {"Poisson(10)": 0.0, "geometric(.5)": math.sqrt(0.5), "geometric(1 − L)": 1.0}
TRUNCATED = (5, 10, 20)


def jacobian(norm: float) -> Tensor:
    """A symmetric matrix with eigenvalues from −L to L in random directions: both ends count, and
    J² has norm L².
    """
    basis = torch.linalg.qr(rng.normal(DIM, (DIM,), torch.zeros((), dtype=torch.float64), 0))[0]
    return norm * (basis * torch.linspace(-1, 1, DIM).double()) @ basis.T


def terms(j: Tensor, count: int) -> Tensor:
    """a_k of all signs: (2^D, count)."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=DIM)), dtype=torch.float64)
    power, found = signs, []
    for k in range(1, count + 1):
        power = power @ j.T
        found.append((-1) ** (k + 1) * (power * signs).sum(-1) / k)
    return torch.stack(found, -1)


def roulette(a: Tensor, tail: Tail, true: float) -> float:
    """The standard deviation of the estimate, where it is finite.

    Σ_{k,l} a_k·a_l/P(min(k, l)) = Σ_k (a_k² + 2·a_k·Σ_{l > k} a_l)/P(k): every k once as the
    smaller index.
    """
    after = a.flip(-1).cumsum(-1).flip(-1) - a
    each = (a.square() + 2 * a * after).mean(0)  # (count,)
    weight = torch.tensor([-tail(k) for k in range(1, a.shape[1] + 1)], dtype=torch.float64).exp()
    return math.sqrt((each * weight).sum().item() - true**2)


def drawn(j: Tensor, norm: float) -> tuple[float, float]:
    """Mean error and standard deviation of the library's own estimator."""
    g = nn.Linear(DIM, DIM, bias=False).double()
    g.weight.data.copy_(j)
    flow = Residual(DIM, g, norm, "roulette")
    with torch.no_grad():
        values = flow(torch.zeros(DRAWS, DIM, dtype=torch.float64), seed=0)[1]
    return values.mean().item(), values.std().item()


def measure() -> dict[str, dict[str, dict[str, float]]]:
    """For every norm and rule: bias, standard deviation, mean number of terms."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    for norm in NORMS:
        j = jacobian(norm)
        true = torch.linalg.slogdet(torch.eye(DIM).double() + j)[1].item()
        a = terms(j, min(TERMS, math.ceil(60 / -math.log(norm))))
        row: dict[str, dict[str, float]] = {"true": {"value": true}}
        for n in TRUNCATED:
            kept = a[:, :n].sum(-1)
            row[f"first {n}"] = {
                "bias": kept.mean().item() - true,
                "std": kept.std(correction=0).item(),
                "terms": n,
            }
        for name, rule in RULES.items():
            tail = rule(norm)
            mean_terms = sum(math.exp(tail(k)) for k in range(1, 3000))
            row[name] = {
                "bias": 0.0,
                "std": roulette(a, tail, true) if norm <= LIMIT[name] else math.inf,
                "terms": mean_terms,
            }
        mean, std = drawn(j, norm)
        row["library"] = {"bias": mean - true, "std": std, "terms": 1 / (1 - norm)}
        found[str(norm)] = row
    return found


ABOUT = (
    f"log det(I + J) of a symmetric {DIM}×{DIM} matrix with eigenvalues from −L to L, one probe ε = ±1. Truncated "
    "series: bias ± standard deviation of one draw. Russian roulette has no bias: its standard deviation, ∞ where the "
    "variance is not finite, and in brackets the mean number of terms. These are exact sums over all signs and all N. "
    f"The last column is measured: (mean − truth)/standard error, and the standard deviation, of {DRAWS:,} draws of "
    '`Residual(..., determinant="roulette")`, which takes geometric(1 − L).'
)
SEEN = (
    "The variance over N is finite for geometric(p) only if L² ≤ 1 − p: for p = .5 up to L = .71, and for a Poisson "
    "never, since its tail falls faster than any power. A finite number of draws does not show that: the rare large "
    "weight is missing until it comes. With p = 1 − L the variance stays finite, at 1/(1 − L) terms in the mean."
)


def table(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """Bias ± standard deviation of one draw."""
    names = [f"first {n}" for n in TRUNCATED] + list(RULES)
    said = ["# Estimators of a log-determinant as L → 1", "", ABOUT, ""]
    said += [
        "| L | truth | " + " | ".join(names) + " | measured |",
        "|---:|---:|" + "---:|" * (len(names) + 1),
    ]
    for norm, row in found.items():
        cells = []
        for name in names:
            own = row[name]
            if name.startswith("first"):
                cells.append(f"{own['bias']:+.4f} ± {own['std']:.2f}")
            else:
                cells.append(
                    f"{'∞' if math.isinf(own['std']) else format(own['std'], '.2f')} ({own['terms']:.0f})"
                )
        own = row["library"]
        cells.append(f"{own['bias'] / (own['std'] / math.sqrt(DRAWS)):+.1f}, {own['std']:.2f}")
        said.append(f"| {norm} | {row['true']['value']:.4f} | {' | '.join(cells)} |")
    return "\n".join([*said, "", SEEN]) + "\n"


def draw(found: dict[str, dict[str, dict[str, float]]], path: Path) -> None:
    """|bias| of truncation, and the standard deviation of roulette, over 1 − L."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9.5, 3.4))
    gaps = [1 - float(norm) for norm in found]
    for i, n in enumerate(TRUNCATED):
        axes[0].plot(gaps, [abs(row[f"first {n}"]["bias"]) for row in found.values()], ".-", color=f"C{i}",
                     label=f"the first {n} terms")  # fmt: skip
    axes[0].set(title="|bias|, truncated series", yscale="log")
    for i, name in enumerate(RULES):
        values = [row[name]["std"] for row in found.values()]
        finite = [
            (gap, value) for gap, value in zip(gaps, values, strict=True) if math.isfinite(value)
        ]
        axes[1].plot(
            *zip(*finite, strict=True) if finite else ([], []), ".-", color=f"C{i + 3}", label=name
        )
        if lost := [
            gap for gap, value in zip(gaps, values, strict=True) if not math.isfinite(value)
        ]:
            axes[1].plot(lost, [1.0 - 0.06 * i] * len(lost), "x", color=f"C{i + 3}", label=f"{name}: infinite",
                         transform=axes[1].get_xaxis_transform(), clip_on=False)  # fmt: skip
    axes[1].set(title="standard deviation, Russian roulette (no bias)")
    for axis in axes:
        axis.set(xlabel="1 − L", xscale="log")
        axis.invert_xaxis()
        axis.grid(alpha=0.3)
        axis.legend(frameon=False, fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--redraw", action="store_true", help="table and picture again, and measure nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    path = given.out / "residual_bias.json"
    found = json.loads(path.read_text()) if given.redraw else measure()
    path.write_text(json.dumps(found, indent=1) + "\n")
    said = table(found)
    print(said)
    path.with_suffix(".md").write_text(f"{said}\n{made('cpu')}\n")
    draw(found, PICTURE if given.out == RESULTS else path.with_suffix(".png"))


if __name__ == "__main__":
    main()

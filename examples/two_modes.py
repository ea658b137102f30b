"""A posterior with two modes that is known exactly, and which families find both.

The network sees only the energy of a linear map, f(x) = (w·x)², so w and −w explain the data equally well: under a
symmetric prior the posterior p over the two weights has two modes of mass ½ each. Its evidence Z comes from quadrature.

Why a Gaussian must lose log 2. For every q, ELBO(q) = log Z − KL(q ‖ p). Ask of a draw only on which side of the line
between the modes it lies: a coin with P(right) = ½ under p and ε under q. Forgetting the rest raises no divergence:

    log Z − ELBO(q) = KL(q ‖ p) ≥ KL(Bernoulli(ε) ‖ Bernoulli(½)) = log 2 − h(ε),   h the entropy of a coin.

A Gaussian that sits in one mode has ε ≈ 0 or 1 and is short by log 2 = 0.693 nats at the least, however well it fits;
one that straddles both has ε = ½ but spends its mass on the desert between them. MNF with a mixture of two components
under its flow has neither problem: about half of its draws lie on either side.
"""

from __future__ import annotations

import math
import sys

import torch
from torch import Tensor, nn

import bayou

NOISE, TRUE = 0.5, torch.tensor([0.9, 0.6], dtype=torch.float64)


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.constant_(self.linear.weight, 0.4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).square()


def make_data(n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 2, generator=generator, dtype=torch.float64)
    y = (x @ TRUE).square() + NOISE * torch.randn(n, generator=generator, dtype=torch.float64)
    return x, y.unsqueeze(-1)


def quadrature(x: Tensor, y: Tensor, points: int = 401) -> tuple[float, Tensor, Tensor]:
    """log Z, and p(w | data) on a grid: a line (points,) and densities (points, points)."""
    line = torch.linspace(-2, 2, points, dtype=torch.float64)
    w = torch.cartesian_prod(line, line)
    log_joint = torch.distributions.Normal(0.0, 1.0).log_prob(w).sum(-1)
    log_joint += torch.distributions.Normal((w @ x.mT).square(), NOISE).log_prob(y[:, 0]).sum(-1)
    log_z = float(log_joint.logsumexp(0)) + 2 * math.log(4 / (points - 1))
    return log_z, line, (log_joint - log_z).exp().reshape(points, points)


def main(steps: int = 1500, picture: str = "two_modes.png", samples: int = 1000) -> dict[str, dict[str, float]]:
    x, y = make_data()
    log_z, line, density = quadrature(x, y)
    families = {
        "MeanField": bayou.MeanField(std=0.1),
        "MNF, one component": bayou.MNF(std=0.05),
        "MNF, two components": bayou.MNF(std=0.05, components=2, z_std=2.0),  # z starts around −1 and 3
    }
    print(f"log evidence by quadrature: {log_z:.4f}; log 2 = {math.log(2):.4f}\n")
    print(f"{'family':<20} {'ELBO':>18} {'short by':>9} {'at least':>9} {'mass right':>11}")
    rows, draws = {}, {}
    for name, family in families.items():
        method = bayou.VI(family, steps=steps, samples=8, lr=5e-3, scale_lr=0.1)
        posterior = bayou.fit(Energy(), (x, y), method=method, likelihood=bayou.Gaussian(NOISE), progress=False)
        elbo = bayou.elbo(posterior, (x, y), samples=samples, seed=1)
        draws[name] = posterior.sample(2000, seed=0)["linear.weight"][:, 0]
        right = float((draws[name] @ TRUE > 0).double().mean())
        coin = -sum(p * math.log(p) for p in (right, 1 - right) if p > 0)
        short, least = log_z - elbo.value, math.log(2) - coin
        rows[name] = {"short": short, "error": elbo.standard_error, "least": least, "right": right}
        value = f"{elbo.value:.4f} ± {elbo.standard_error:.4f}"
        print(f"{name:<20} {value:>18} {short:9.4f} {least:9.4f} {right:11.3f}")
    print(f"\n{bayou.diagnostics.bound_gap(posterior, seed=0, samples=500)}")  # of the last family
    plot(line, density, draws).savefig(picture, dpi=130)
    return rows


def plot(line: Tensor, density: Tensor, draws: dict[str, Tensor]):
    from matplotlib.figure import Figure

    figure = Figure(figsize=(3.4 * len(draws), 3.6), layout="compressed")
    for axis, (name, w) in zip(figure.subplots(1, len(draws), sharey=True), draws.items(), strict=True):
        axis.scatter(*w[:600].T.numpy(), s=7, color="#d9743c", alpha=0.5, linewidths=0)
        levels = [float(density.max()) * level for level in (0.02, 0.2, 0.6)]
        axis.contour(line, line, density.mT, levels=levels, colors="#3b5b92", linewidths=1.0)
        axis.set(title=name, xlabel="$w_1$", xlim=(-1.6, 1.6), ylim=(-1.6, 1.6), aspect="equal")
    figure.axes[0].set_ylabel("$w_2$")
    return figure


if __name__ == "__main__":
    main(picture=sys.argv[1] if len(sys.argv) > 1 else "two_modes.png")

"""A VAE of 8×8 digits with two latent numbers, so that the true posterior p(z|x) can be seen on a grid.

    python examples/vae.py --plot vae.png

log p(x) = log ∫ p(x|z)·p(z) dz comes from quadrature. What an encoder loses is KL(q(z|x) ‖ p(z|x)): the gap between
log p(x) and its bound. A Gaussian can only be an ellipse along the axes; a flow bends. With importance samples the
bound of any of them becomes log p(x), and says the same as the quadrature.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from torch import Tensor, nn

from bayou import rng
from bayou.data import load
from bayou.flows import VAE, BernoulliDecoder, ConditionalFlow, amortized

EVENT, REACH, POINTS = (8, 8), 5.0, 101
ENCODERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "Gaussian": ("gaussian", {}),
    "planar, 10": ("planar", {"layers": 10}),
    "Sylvester, 6": ("sylvester_householder", {"layers": 6, "reflections": 2}),
}


def on_grid(vae: VAE, x: Tensor) -> tuple[Tensor, Tensor]:
    """log p(x) by quadrature: (rows,), and p(z|x) at the points of a grid: (points, points, rows)."""
    line = torch.linspace(-REACH, REACH, POINTS)
    z = torch.cartesian_prod(line, line)
    with torch.no_grad():
        log_prior = vae.prior.log_prob(z).unsqueeze(-1)  # type: ignore[operator]
        log_joint = log_prior + vae.map.decoder.log_prob(x, z.unsqueeze(1), 1)
    log_p = log_joint.logsumexp(0) + 2 * math.log(2 * REACH / (POINTS - 1))
    return log_p, (log_joint - log_p).exp().reshape(POINTS, POINTS, -1)


def main(steps: int = 1000, plot: str | None = None, rows: int = 360) -> dict[str, dict[str, float]]:
    data = load("digits", ood="none")
    low, high = data.train[0].min(), data.train[0].max()
    train, test = (((x - low) / (high - low) > 0.5).float().reshape(-1, *EVENT) for x in (data.train[0], data.test[0]))
    test, found, models = test[:rows], {}, {}
    print(f"{'encoder':<14} {'−ELBO':>7} {'−log p, 500 samples':>20} {'−log p, quadrature':>19} {'lost':>6}")
    for name, (kind, options) in ENCODERS.items():
        with rng.isolated(0, torch.device("cpu")):
            back = nn.Sequential(nn.Linear(2, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
            net = nn.Sequential(nn.Flatten(-2), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU())
            vae = VAE(BernoulliDecoder(EVENT, back), ConditionalFlow(amortized(kind, 2, 64, **options), net))
        vae.fit(train, steps=steps, lr=5e-3, warmup=0.2, seed=0, progress=False)
        with torch.no_grad():
            exact = torch.cat([on_grid(vae, x)[0] for x in test.split(20)])
            bound, many = vae.elbo(test, 100, seed=1), vae.log_prob(test, 500, seed=2)
        row = {"elbo": -bound.mean(), "samples": -many.mean(), "exact": -exact.mean(), "lost": (exact - bound).mean()}
        found[name], models[name] = {key: float(value) for key, value in row.items()}, vae
        print(f"{name:<14} {row['elbo']:7.2f} {row['samples']:20.2f} {row['exact']:19.2f} {row['lost']:6.2f}")
    if plot:
        draw(models, test[:4]).savefig(plot, dpi=110)
    return found


def draw(models: dict[str, VAE], x: Tensor) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(2.1 * len(x) + 1.2, 2.1 * len(models) + 1.2), layout="compressed")
    axes = figure.subplots(1 + len(models), len(x), height_ratios=[0.6] + [1] * len(models))
    line = torch.linspace(-REACH, REACH, POINTS)
    for column in range(len(x)):
        axes[0, column].imshow(1 - x[column].numpy(), cmap="gray")
        axes[0, column].axis("off")
    for row, (name, vae) in enumerate(models.items(), 1):
        _, density = on_grid(vae, x)
        z = torch.stack([vae.encode(x, seed=k) for k in range(300)])
        for column, axis in enumerate(axes[row]):
            p, dots = density[..., column], z[:, column]
            axis.contourf(
                *(line.numpy(),) * 2,
                p.mT.numpy(),
                levels=[float(p.max()) * k for k in (0.01, 0.1, 0.3, 0.6, 1)],
                cmap="Blues",
            )
            axis.scatter(*dots.T.numpy(), s=3, color="#d9743c", alpha=0.6, linewidths=0)
            (left, down), (right, up) = (dots.min(0).values - 0.3).tolist(), (dots.max(0).values + 0.3).tolist()
            axis.set(xlim=(left, right), ylim=(down, up), xticks=[], yticks=[])
        axes[row, 0].set_ylabel(name)
    figure.suptitle("p(z|x) (blue) and draws of q(z|x)", fontsize=10)
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, options.plot)

"""Fit the posteriors of the page ``static/play.html``, which the start page embeds.

``python -m docs.make_play`` writes ``docs/static/play_data.js``.

Five panels: fifty networks for handwritten digits, networks for classes in the plane and for a
curve, whose last layers the page fits again when points move, the layers of flows on a grid, and
draws that are annealed to a posterior. Arrays are float32 (flows and paths: 16 bits of their range)
in base64.
"""

from __future__ import annotations

import base64
import json
import math
import sys
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import bayou
from bayou.core import rng
from bayou.core.params import flatten
from bayou.flows import Chain, Flow, StandardNormal, maf, planar, realnvp, spline_coupling
from bayou.flows.fitting.fit import fit
from bayou.kernels.annealing import Annealing
from experiments.densities import SAMPLERS

OUT = Path(__file__).parent / "static" / "play_data.js"
DECLARATION = "const DATA = "
NETWORKS, FEATURE_NETWORKS = 50, 24
NOISE = 0.1
Packed = dict[str, Any]


def packed(tensor: Tensor, bits: int = 32) -> Packed:
    """An array for the page: its shape and numbers, as float32 or as 16 bits between its
    extremes.
    """
    array = tensor.detach().double().cpu()
    if bits == 32:
        return {"shape": list(array.shape), "f32": _base64(array.float())}
    low, high = array.min().item(), array.max().item()
    steps = ((array - low) / (high - low) * 65535).round().to(torch.uint16)
    return {"shape": list(array.shape), "low": low, "high": high, "u16": _base64(steps)}


def _base64(array: Tensor) -> str:
    return base64.b64encode(array.contiguous().numpy().tobytes()).decode()


def layers(stack: dict[str, Tensor]) -> list[dict[str, Packed]]:
    """Weights (S, out, in) and biases (S, out) of the linear layers of a Sequential, in order."""
    names = sorted({name.split(".")[0] for name in stack}, key=int)
    return [
        {part: packed(stack[f"{name}.{part}"]) for part in ("weight", "bias")} for name in names
    ]


class Sine(nn.Module):
    """Apply sin to every element.

    Functions of a network with sines vary as much far from the data as they do near them, so that
    its posterior returns to the prior there; tanh and ReLU continue what they learned at the edge
    of the data.
    """

    def forward(self, x: Tensor) -> Tensor:
        return torch.sin(x)


def select_examples(p: bayou.Predictive, y: Tensor) -> list[int]:
    """Return the row of the first digit of each class that the networks classify correctly.

    Args:
        p: the prediction for all rows.
        y: their classes, 0 to 9.
    """
    correct = p.mean.argmax(1) == y
    return [int(torch.nonzero(correct & (y == k))[0]) for k in range(10)]


def digits() -> dict[str, Any]:
    """Annealed draws and a plain network on the 8×8 digits; probabilities of ten of them as a
    reference.
    """
    x, y = (torch.as_tensor(a) for a in load_digits(return_X_y=True))
    x = x.float() / 16
    test = torch.arange(len(x)) % 5 == 0
    net = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    train = (x[~test], y[~test])
    posterior = bayou.fit(net, train, "annealed", seed=0)
    plain = bayou.fit(net, train, bayou.MLE(steps=3000), seed=0)
    draws = posterior.sample(NETWORKS, seed=0)
    p, own = posterior.predict(x[test], samples=NETWORKS, seed=0), plain.predict(x[test], samples=1)
    for name, one in (("annealed", p), ("plain", own)):
        print(name, bayou.metrics.summary(one, y[test]))
    examples = x[test][select_examples(p, y[test])]
    return {
        "layers": layers(draws),
        "plain": layers(plain.sample(1, seed=0)),
        "examples": packed(examples),
        "mean": packed(posterior.predict(examples, samples=NETWORKS, seed=0).mean),
        "plain_mean": packed(plain.predict(examples, samples=1).mean),
        "mutual_information": packed(
            posterior.predict(examples, samples=NETWORKS, seed=0).mutual_information
        ),
    }


def curve() -> dict[str, Any]:
    """40 points of a sine: first layers drawn by HMC from the posterior, a mode, and bands of HMC
    itself.
    """
    torch.manual_seed(0)
    x = torch.cat([torch.rand(14, 1) - 2, torch.rand(14, 1) + 0.5])
    y = torch.sin(2 * x) + NOISE * torch.randn(28, 1)
    net = nn.Sequential(nn.Linear(1, 40), nn.Tanh(), nn.Linear(40, 1))
    prior, likelihood = bayou.Normal("fan_in", gain=2.0), bayou.Gaussian(NOISE)
    options: dict[str, Any] = {"prior": prior, "likelihood": likelihood, "seed": 0}
    mode = bayou.fit(net, (x, y), bayou.MAP(steps=2000, lr=1e-2), **options)
    hmc = bayou.fit(net, (x, y), bayou.NUTS(chains=4, warmup=400, draws=250), **options)
    print(hmc, hmc.mixing)
    grid = torch.linspace(-3.5, 3.5, 141)[:, None]
    f = hmc.predict(grid, samples=1000, seed=0).outputs[..., 0]
    quantiles = f.quantile(torch.tensor([0.05, 0.5, 0.95]), 0)
    return {
        "x": packed(x[:, 0]), "y": packed(y[:, 0]), "noise": NOISE, "scale": 2.0 / math.sqrt(40),
        "networks": layers(hmc.sample(FEATURE_NETWORKS, seed=1)),
        "mode": layers(mode.sample(1, seed=0)),
        "grid": packed(grid[:, 0]), "hmc": packed(quantiles),
    }  # fmt: skip


def plane() -> dict[str, Any]:
    """Three classes in the plane: first layers of annealed draws and of a mode."""
    torch.manual_seed(1)
    angle = torch.rand(54) * 1.6 + torch.arange(3).repeat_interleave(18) * 2.1
    radius = 0.7 + 0.8 * (angle - torch.arange(3).repeat_interleave(18) * 2.1) / 1.6
    x = torch.stack([radius * angle.cos(), radius * angle.sin()], 1) + 0.08 * torch.randn(54, 2)
    y = torch.arange(3).repeat_interleave(18)
    net = nn.Sequential(nn.Linear(2, 24), Sine(), nn.Linear(24, 3))
    options: dict[str, Any] = {"prior": bayou.Normal("fan_in", gain=3.0), "seed": 0}
    mode = bayou.fit(net, (x, y), bayou.MAP(steps=2000, lr=1e-2), **options)
    method = bayou.Annealed(
        bayou.VI(bayou.MeanField(), steps=2000), draws=FEATURE_NETWORKS, adapt=True
    )
    draws = bayou.fit(net, (x, y), method, **options)
    return {
        "x": packed(x), "y": y.tolist(), "scale": 3.0 / math.sqrt(24),
        "networks": layers(draws.sample(FEATURE_NETWORKS, seed=0)), "mode": layers(mode.sample(1, seed=0)),
    }  # fmt: skip


def warps() -> list[dict[str, Any]]:
    """A grid of base points after every layer of fitted flows, and their densities."""
    flows = {
        "planar": Chain(*(planar(2, layers=1) for _ in range(16))),
        "RealNVP": realnvp(2, layers=8),
        "masked autoregressive": maf(2, layers=4),
        "spline coupling": spline_coupling(2),
    }
    lines = torch.linspace(-2.5, 2.5, 13)
    fine = torch.linspace(-2.5, 2.5, 41)
    across = torch.stack(torch.meshgrid(lines, fine, indexing="ij"), -1)
    grid = torch.cat([across, across.flip(-1)])  # (26 lines, 41 points, 2)
    side = torch.linspace(-2.4, 2.4, 64)
    pixels = torch.stack(torch.meshgrid(side, side, indexing="xy"), -1).reshape(-1, 2)
    data = SAMPLERS["two moons"](10_000, seed=0)
    found = []
    for name, transform in flows.items():
        flow = Flow(StandardNormal(2), transform)
        print(name, fit(flow, data, steps=1500, seed=0))
        steps, z = [grid], grid.reshape(-1, 2)
        with torch.no_grad():
            for part in transform.transforms:
                z, _ = part(z)
                steps.append(z.reshape(grid.shape))
            density = flow.log_prob(pixels).exp().reshape(64, 64)
        shown = steps[:: max(1, (len(steps) - 1) // 8)]
        shown = shown if shown[-1] is steps[-1] else [*shown, steps[-1]]
        found.append(
            {
                "name": name,
                "steps": packed(torch.stack(shown), 16),
                "density": packed(density, 16),
                "layers": len(steps) - 1,
            }
        )
    return found


def annealing() -> dict[str, Any]:
    """w₂·tanh(w₁·x) with two weights: mean-field draws on their way to the posterior, and its
    density.
    """
    x = torch.tensor([[-1.2], [-0.6], [0.4], [1.0]])
    y = 1.5 * torch.tanh(0.9 * x) + 0.15 * torch.tensor([[0.5], [-0.8], [0.3], [0.6]])
    net = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Tanh(), nn.Linear(1, 1, bias=False))
    for weight in net.parameters():
        nn.init.ones_(weight)
    noise, scale = 0.3, 1.5
    likelihood, prior = bayou.Gaussian(noise), bayou.Normal(scale)
    q = bayou.fit(
        net,
        (x, y),
        bayou.VI(bayou.MeanField(), steps=3000),
        likelihood=likelihood,
        prior=prior,
        seed=0,
    )
    many = flatten(q.sample(4000, seed=1), 1)
    side = (
        many[:, 0].mean().sign()
    )  # the posterior is symmetric in (w₁, w₂) → −(w₁, w₂): the positive side is shown
    mean, std = side * many.mean(0), many.std(0)
    draws, pilot_draws = (
        side * flatten(q.sample(n, seed=seed), 1) for n, seed in ((300, 0), (60, 2))
    )

    def joint(w: Tensor) -> Tensor:
        f = w[:, 1:] * torch.tanh(w[:, :1] * x[:, 0])
        return -0.5 * ((f - y[:, 0]) / noise).square().sum(1) - 0.5 * (w / scale).square().sum(1)

    def family(w: Tensor) -> Tensor:
        return -0.5 * ((w - mean) / std).square().sum(1)

    def parts(w: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            base, rise = family(w), joint(w) - family(w)
            (slope,), (climb,) = (
                torch.autograd.grad(base.sum(), w),
                torch.autograd.grad(rise.sum(), w),
            )
        return base.detach(), slope, rise.detach(), climb

    run, temperatures = Annealing(parts, std.square(), 60), 300
    run.start(torch.cat([draws, pilot_draws]))
    path, before = [run.position[:300].clone()], 0.0
    for t in range(1, temperatures + 1):
        beta = t / temperatures
        run.warm(before, beta)
        momentum = rng.normal(360, (2,), run.position, rng.fold(0, "momentum", str(t)))
        if t == 1:
            run.find_step(momentum)
        run.move(
            momentum,
            rng.uniform(360, (2,), run.position, rng.fold(0, "uniform", str(t))),
            20,
            0.65,
            temperatures,
        )
        before = beta
        if t % 5 == 0:
            path.append(run.position[:300].clone())
    line = torch.linspace(0, 4.5, 64)
    pixels = torch.stack(torch.meshgrid(line, line, indexing="xy"), -1).reshape(-1, 2)
    density = joint(pixels).exp().reshape(64, 64)
    return {
        "path": packed(torch.stack(path), 16),
        "density": packed(density, 16),
        "extent": [0, 4.5],
    }


def main() -> None:
    """Fit the panels that are named, or all: some minutes on one core."""
    panels = {
        "digits": digits,
        "curve": curve,
        "plane": plane,
        "flows": warps,
        "annealing": annealing,
    }
    data: dict[str, Any] = {}
    if OUT.exists():
        data = json.loads(OUT.read_text().removeprefix(DECLARATION).rstrip().removesuffix(";"))
    for name in sys.argv[1:] or panels:
        torch.manual_seed(0)  # of the initial networks
        data[name] = panels[name]()
        OUT.write_text(f"{DECLARATION}{json.dumps(data, separators=(',', ':'))};\n")
    print(f"{OUT.name}: {OUT.stat().st_size / 1e6:.2f} MB")


if __name__ == "__main__":
    main()

"""Model images: a Glow of handwritten digits, 8×8 pixels in 17 shades of grey, and new digits drawn from it.

A flow of real numbers has no mass on whole ones: dequantization adds noise within a shade, uniform or learned, and
makes log p of a picture a bound. It is given in bits per dimension: what a pixel would cost in a file. A picture of
equal shades costs log₂ 17 = 4.09 bits a pixel.

    python examples/images.py --plot images.png
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from bayou.data import load
from bayou.flows import Dequantize, Flow, Uniform, bits_per_dim, dequantizer, fit, glow_image, image_flow

SHAPE, SHADES = (1, 8, 8), 17


def shades(x: Tensor, data: Any) -> Tensor:
    """Whole numbers 0 .. 16, (N, 1, 8, 8)."""
    return (16 * data.preprocessor.pixels(x)).round()


def main(steps: int = 300, plot: str | None = None) -> dict[str, float]:
    data = load("digits")
    train, test = shades(data.train[0], data), shades(data.test[0], data)
    found: dict[str, float] = {}
    found["equal shades"] = bits_per_dim(Flow(Uniform(SHAPE), Dequantize(SHAPE, SHADES)), test).mean().item()
    for name in ("uniform", "variational"):
        torch.manual_seed(0)
        chain = glow_image(SHAPE, levels=2, steps=4, hidden=32)
        q = dequantizer(SHAPE, SHADES, steps=2, hidden=16) if name == "variational" else "uniform"
        flow = image_flow(chain, SHADES, q)
        fit(flow, train, steps=steps, batch_size=64, lr=3e-3, progress=False)
        for samples in (1, 20):
            key = f"Glow, {name} noise" + (", K = 20" if samples > 1 else "")
            found[key] = bits_per_dim(flow, test, samples).mean().item()

    print("bits per dimension of test digits")
    for name, bits in found.items():
        print(f"{name:35s} {bits:.3f}")
    drawn = flow.sample(40, seed=0).clamp(0, SHADES - 1)
    if plot:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 3.6), layout="compressed")
        for axis, (title, rows) in zip(figure.subplots(1, 2), (("data", test), ("drawn", drawn)), strict=True):
            framed = pad(rows[:40], (1, 1, 1, 1)).reshape(5, 8, 10, 10)
            grid = framed.permute(0, 2, 1, 3).reshape(50, 80).numpy()
            axis.imshow(grid, cmap="gray_r", vmin=0, vmax=SHADES - 1)
            axis.set(title=title, xticks=[], yticks=[])
        figure.savefig(plot, dpi=110)
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--plot", metavar="FILE.png")
    options = parser.parse_args()
    main(options.steps, options.plot)

"""Handwritten digits as a file that is as short as a flow says.

An integer discrete flow maps whole numbers to whole numbers, x = y − round(t(the other pixels)), so that a mass of x is
the mass of y and −log₂ p(y) bits are enough to write y down. ``flow.compress`` writes them, ``flow.decompress`` reads
them to the bit. Here the flow has learned 1,437 of scikit-learn's 8×8 digits, with levels 0 to 16, and codes the 360
others; gzip, xz and PNG know nothing about digits. The weights of the flow are not in the file.

    python examples/codec.py --plot digits.png
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import math
import zlib
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor

from bayou import rng
from bayou.flows import DiscretizedLogistic, Flow, Groups, fit, integer, quincunx
from bayou.flows.discrete.bijections import cnn

EVENT, LEVELS, COMPONENTS = (1, 8, 8), 17, 3


def make_flow() -> Flow:
    """Two couplings, and a base that goes from coarse pixels to fine ones: five groups, each given those before it."""
    groups = quincunx(EVENT, 2)
    nets = [cnn(2, (32, 32), 3 * COMPONENTS) for _ in range(5)]
    base = DiscretizedLogistic(EVENT, LEVELS, COMPONENTS, Groups(groups, nets))
    return Flow(base, integer(EVENT, LEVELS, layers=2, hidden=(16, 16)))


def png(sheet: Tensor) -> int:
    """Bytes of a grey PNG with eight bits a pixel and no filter."""
    raw = b"".join(b"\0" + bytes(row) for row in sheet.int().tolist())
    return 8 + 12 + 13 + 12 + len(zlib.compress(raw, 9)) + 12  # signature, header, data, end


def main(steps: int = 400, rows: int = 360, plot: str | None = None) -> dict[str, Any]:
    digits = torch.from_numpy(load_digits().images).float().unsqueeze(1)
    order = rng.permutation(len(digits), 0)
    test, train = digits[order[:rows]], digits[order[360:]]
    torch.manual_seed(0)
    flow = make_flow()
    print(fit(flow, train, steps=steps, batch_size=128, lr=5e-3, seed=0))
    stream = flow.compress(test)
    again = flow.decompress(stream)
    assert torch.equal(again, test)
    with torch.no_grad():
        ideal = -flow.log_prob(test).sum().item() / math.log(2) / 8
    raw = bytes(test.flatten().byte().tolist())
    sheet = test.reshape(-1, 20, 8, 8).transpose(1, 2).reshape(-1, 160)
    found = {
        "raw, 5 bits a pixel": test.numel() * 5 // 8,
        "PNG": png(sheet),
        "gzip -9": len(gzip.compress(raw, 9)),
        "xz -9e": len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)),
        "flow": len(stream),
    }
    for name, size in found.items():
        print(f"{name:<22} {size:>7,} bytes {8 * size / test.numel():6.3f} bits a pixel")
    print(f"{'−log₂ p(y)':<22} {ideal:>7,.0f} bytes {8 * ideal / test.numel():6.3f} bits a pixel")
    if plot:
        draw(flow, test, found).savefig(plot, dpi=130)
        print(f"picture: {plot}")
    return {"bytes": found, "ideal": ideal, "again": again, "test": test}


def draw(flow: Flow, test: Tensor, found: dict[str, int]) -> Any:
    """Digits that were coded, digits that the flow draws, and the sizes of the files."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 3), layout="compressed")
    coded, drawn, sizes = figure.subplots(1, 3)
    for axis, rows, title in ((coded, test, "coded"), (drawn, flow.sample(40, seed=0), "drawn")):
        sheet = rows[:40].clamp(0, 16).reshape(5, 8, 8, 8).transpose(1, 2).reshape(40, 64)
        axis.imshow(sheet.numpy(), cmap="gray_r", vmin=0, vmax=16)
        axis.set(title=title, xticks=[], yticks=[])
    sizes.barh(list(found), list(found.values()), color=["0.75"] * (len(found) - 1) + ["C0"])
    sizes.set(title="bytes")
    return figure


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plot", help="a file for the picture")
    main(plot=parser.parse_args().plot)

"""Discrete flows as files: MNIST, Fashion-MNIST and 1 MB of text beside PNG, WebP, gzip and xz.

    python -m benchmarks.codec --device cuda --jobs 9      # all flows: --seconds of training each, then a file
    python -m benchmarks.codec --only others               # PNG, WebP, gzip, xz (needs Pillow, takes ten minutes)
    python -m benchmarks.codec --redraw                    # table and picture again
    python -m benchmarks.codec --small                     # a trial on a CPU

Images: 55,000 to learn from, the last 5,000 of the training images choose the weights that are kept, the 10,000 test
images are the file. Text: the last million characters are the file, the 100,000 before them choose, the rest is to
learn from (wiki27: letters and the space). The weights are not in the file. Every file is decoded and compared to the
bit. The argmax flow has no code: its number is a bound.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import io
import lzma
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.data import files
from bayou.data.catalogue import CATALOGUE, DataError
from bayou.data.images import idx_set
from bayou.flows import (
    MADE,
    Autoregressive,
    BinaryArgmax,
    Categorical,
    Chain,
    Conditioner,
    DiscretizedLogistic,
    Flow,
    Groups,
    Inverse,
    ModuloAutoregressive,
    OneHot,
    PixelCNN,
    StandardNormal,
    Transform,
    Whole,
    integer,
    logistic_mixture,
    quincunx,
)
from bayou.flows.discrete import Modulo
from benchmarks.parallel import keep, kept, made, spread

RESULTS = Path(__file__).parent / "results"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "codec.png"
IMAGES, LETTERS = ("mnist", "fashion"), " abcdefghijklmnopqrstuvwxyz"
ROWS = [
    *(f"{data}/{kind}" for kind in ("PixelCNN", "integer flow", "MADE") for data in IMAGES),
    *(f"text/{kind}" for kind in ("autoregressive", "modulo flow", "argmax flow")),
    *(f"{data}/others" for data in (*IMAGES, "text")),
]


@dataclass(frozen=True)
class Setting:
    """Sizes of networks and data."""

    seconds: float
    device: str
    threads: int
    seed: int = 0
    width: int = 24  # of the networks of an integer flow: float64 convolutions on a CPU are what coding waits for
    depth: int = 2
    levels: int = 3  # of groups of pixels
    couplings: int = 2
    components: int = 5
    hidden: int = 800  # of MADE
    pixel_width: int = 16  # of PixelCNN
    pixel_depth: int = 6
    channels: int = 160  # of the causal network of text
    dilations: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8)
    length: int = 500
    batch: int = 128
    images: int = 10_000
    characters: int = 1_000_000


SMALL: dict[str, Any] = {
    "width": 8, "depth": 1, "levels": 2, "couplings": 2, "components": 2, "hidden": 32, "pixel_width": 4,
    "pixel_depth": 2, "channels": 16, "dilations": (1, 2, 4), "length": 50, "batch": 16, "images": 100,
    "characters": 5_000,
}  # fmt: skip


# --- data ------------------------------------------------------------------------------------------------------------


@lru_cache
def pixels(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Training and test images (N, 1, 28, 28), whole numbers from 0 to 255."""
    (train, _), (test, _) = idx_set(CATALOGUE[name], None)
    return train, test


@lru_cache
def text() -> str:
    """Letters and spaces."""
    for folder in files.folders():
        if (path := folder / "text" / "wiki27.txt.xz").exists():
            return lzma.open(path, "rt").read()
    raise DataError("there is no text/wiki27.txt.xz in the folder of BAYOU_DATA")


def letters(part: str) -> Tensor:
    """Numbers of letters."""
    return torch.tensor([LETTERS.index(c) for c in part], dtype=torch.float32)


def rows_of(data: str, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """To learn from, to choose by, to code. Text to learn from is one long row, of which pieces are taken."""
    if data != "text":
        train, test = (torch.from_numpy(part.copy()).float() for part in pixels(data))
        return train[:-5000], train[-min(5000, setting.images) :], test[: setting.images]
    every, size, length = letters(text()), setting.characters, setting.length
    test = every[len(every) - size :]
    return every[: -size - 100_000], every[-size - 100_000 : -size].reshape(-1, length), test.reshape(-1, length)


# --- models ----------------------------------------------------------------------------------------------------------


class Residual(nn.Module):
    """3×3 convolutions, each added to what it gets: (n, inputs, H, W) → (n, outputs, H, W), 0 at first."""

    def __init__(self, inputs: int, width: int, depth: int, outputs: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inputs, width, 5, padding=2)
        self.inner = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(depth))
        self.last = nn.Conv2d(width, outputs, 1)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        for layer in self.inner:
            h = h + layer(F.relu(h))
        return self.last(F.relu(h))


class Causal(Conditioner):
    """Dilated causal convolutions over rows (..., L, inputs) → (..., L, params), each seeing the rows before it."""

    def __init__(
        self, length: int, inputs: int, params: int, channels: int, dilations: Sequence[int], dropout: float = 0.1
    ) -> None:
        super().__init__(length, params)
        self.dilations = tuple(dilations)
        self.first = nn.Linear(inputs, channels)
        self.here = nn.ModuleList(nn.Linear(channels, channels) for _ in dilations)
        self.back = nn.ModuleList(nn.Linear(channels, channels, bias=False) for _ in dilations)
        self.mix = nn.ModuleList(nn.Linear(channels, channels) for _ in dilations)
        self.norm = nn.ModuleList(nn.LayerNorm(channels) for _ in dilations)
        self.drop = nn.Dropout(dropout)
        self.last = nn.Linear(channels, params)
        nn.init.zeros_(self.last.weight)
        nn.init.zeros_(self.last.bias)

    def layers(self) -> Any:
        """Dilation, norm and the three maps of each layer."""
        return zip(self.dilations, self.norm, self.here, self.back, self.mix, strict=True)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        h = self.first(F.pad(x, (0, 0, 1, 0))[..., :-1, :])
        for dilation, norm, here, back, mix in self.layers():
            seen = norm(h)
            before = F.pad(back(seen), (0, 0, dilation, 0))[..., : h.shape[-2], :]
            h = h + self.drop(mix(F.relu(here(seen) + before)))
        return self.last(F.relu(h))

    def steps(self, like: Tensor, context: Tensor | None = None) -> _CausalSteps:
        return _CausalSteps(self, like)


class _CausalSteps:
    """One row after another; what the dilations look back at is kept."""

    def __init__(self, net: Causal, like: Tensor) -> None:
        self.net, self.row = net, torch.zeros_like(like[..., 0, :])
        self.seen: list[list[Tensor]] = [[] for _ in net.dilations]

    def params(self) -> Tensor:
        h = self.net.first(self.row)
        for (dilation, norm, here, back, mix), seen in zip(self.net.layers(), self.seen, strict=True):
            seen.append(norm(h))
            inner = here(seen[-1])
            if len(seen) > dilation:
                inner = inner + back(seen.pop(0))
            h = h + mix(F.relu(inner))
        return self.net.last(F.relu(h))

    def push(self, x: Tensor) -> None:
        self.row = x


class Sequence5(Transform):
    """Five numbers a letter, (L, bits): each by a mixture of logistics from the letters before and the bits before."""

    def __init__(self, length: int, bits: int, channels: int, dilations: Sequence[int]) -> None:
        super().__init__()
        self.event_shape = (length, bits)
        elementwise = logistic_mixture(6)
        self.causal = Causal(length, 2 * bits, channels, channels, dilations)
        self.inner = Autoregressive(elementwise, MADE(bits, elementwise.params, (128,), context_dim=channels))
        nn.init.normal_(self.causal.last.weight, std=0.05)

    def _forward(self, x: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        raise NotImplementedError("it scores, and does not draw")

    def _inverse(self, y: Tensor, context: Tensor | None) -> tuple[Tensor, Tensor]:
        h = F.relu(self.causal(torch.cat([y.sign(), y], -1)))
        x, ladj = self.inner._forward(y, h)
        return x, ladj.sum(-1)


def build(data: str, kind: str, setting: Setting) -> Flow:
    """The flow of a row."""
    torch.manual_seed(setting.seed)
    event, k = (1, 28, 28), setting.components
    if (data, kind) == ("text", "argmax flow"):
        bits = (len(LETTERS) - 1).bit_length()
        inner = Sequence5(setting.length, bits, setting.channels, setting.dilations)
        return Flow(StandardNormal((setting.length, bits)), Chain(inner, BinaryArgmax(setting.length, len(LETTERS))))
    if data == "text":
        classes, modulo = len(LETTERS), kind == "modulo flow"
        params = Modulo(classes).params if modulo else classes
        net = Causal(setting.length, classes, params, setting.channels, setting.dilations)
        last = OneHot(setting.length, classes)
        if modulo:
            return Flow(Categorical(setting.length, classes), Chain(Inverse(ModuloAutoregressive(net, classes)), last))
        return Flow(Categorical(setting.length, classes, net), last)
    if kind != "integer flow":  # a base alone, pixel after pixel
        masked: Conditioner = MADE(784, 3 * k, (setting.hidden, setting.hidden), residual=True)
        net = masked if kind == "MADE" else PixelCNN(event, 3 * k, setting.pixel_width, setting.pixel_depth)
        return Flow(DiscretizedLogistic(event, 256, k, net, bounded=True), Whole(event, 256))
    groups = quincunx(event, setting.levels)
    nets = [Residual(2, setting.width, setting.depth, 3 * k) for _ in range(2 * setting.levels + 1)]
    chain = integer(event, 256, setting.couplings, (16, 16), wrap=True)
    return Flow(DiscretizedLogistic(event, 256, k, Groups(groups, nets), bounded=True), chain)


def bits_of(flow: Flow, rows: Tensor, setting: Setting, samples: int = 1) -> float:
    """−log₂ p of rows, all together."""
    flow.eval()
    with torch.no_grad():
        parts = rows.split(2 * setting.batch)
        found = [
            flow.log_prob(p.to(setting.device), samples=samples, seed=i).double().sum() for i, p in enumerate(parts)
        ]
    flow.train()
    return -float(torch.stack(found).sum()) / math.log(2)


def guess(flow: Flow, rows: Tensor) -> Tensor:
    """A shift that takes the letter away which is expected: −log softmax of it.

    The likelihood alone stays where it starts, at the identity: shifts that are worse by themselves, until the base
    expects 0, have softmax weights, and so gradients, of almost nothing.
    """
    classes = len(LETTERS)
    shift = flow.transform.transforms[0].transform.conditioner(F.one_hot(rows.long(), classes).float())[..., :classes]
    return F.cross_entropy(shift.flatten(0, -2), (-rows.long() % classes).flatten())


def learn(
    flow: Flow, train: Tensor, held: Tensor, setting: Setting, lr: float = 2e-3,
    hint: Callable[[Flow, Tensor], Tensor] | None = None,
) -> int:  # fmt: skip
    """Adam until the clock says so, a cosine of the time; the weights that are best on held-out rows. Steps."""
    generator = torch.Generator().manual_seed(setting.seed)
    tables = [p for name, p in flow.named_parameters() if name == "base.table"]  # logits: small steps are no steps
    networks = [p for name, p in flow.named_parameters() if name != "base.table"]
    groups = [{"params": networks, "rate": lr}, {"params": tables, "rate": 10 * lr}]
    optimizer = torch.optim.AdamW(groups, lr=lr, weight_decay=1e-2)
    train, begun, steps, checks = train.to(setting.device), time.monotonic(), 0, 0
    best, weights = math.inf, copy.deepcopy(flow.state_dict())
    flow.train()
    while (done := (time.monotonic() - begun) / setting.seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = group["rate"] * min(1.0, steps / 100) * 0.5 * (1 + math.cos(math.pi * done))
        if train.ndim == 1:  # pieces of one long row
            at = torch.randint(len(train) - setting.length, (setting.batch,), generator=generator)
            rows = train[(at[:, None] + torch.arange(setting.length)).to(train.device)]
        else:
            rows = train[torch.randint(len(train), (setting.batch,), generator=generator).to(train.device)]
        loss = -flow.log_prob(rows).mean() / rows[0].numel()
        if hint is not None and done < 0.6:
            loss = loss + hint(flow, rows)
        if not loss.isfinite():
            continue
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(flow.parameters(), 1.0)
        optimizer.step()
        steps += 1
        if done > (checks + 1) / 12:
            checks += 1
            score = bits_of(flow, held, setting)
            if score < best:
                best, weights = score, copy.deepcopy(flow.state_dict())
    if not bits_of(flow, held, setting) <= best:
        flow.load_state_dict(weights)
    flow.eval()
    return steps


# --- rows ------------------------------------------------------------------------------------------------------------


def work(data: str, kind: str, setting: Setting) -> dict[str, Any]:
    """Learn and code, or what others make of the same data."""
    found: dict[str, Any]
    if kind == "others":
        found = others_text(setting) if data == "text" else others(data, setting)
        return {"others": found, "symbols": setting.characters if data == "text" else 784 * setting.images}
    torch.set_num_threads(setting.threads)
    train, held, test = rows_of(data, setting)
    flow = build(data, kind, setting).to(setting.device)
    steps = learn(flow, train, held, setting, hint=guess if kind == "modulo flow" else None)
    per = 1 / test.numel()
    found = {
        "steps": steps, "parameters": sum(p.numel() for p in flow.parameters()), "symbols": test.numel(),
        "held": bits_of(flow, held, setting) / held.numel(), "test": bits_of(flow, test, setting) * per,
    }  # fmt: skip
    if kind == "argmax flow":
        return found | {"test_20": bits_of(flow, test, setting, samples=20) * per}
    flow = flow.cpu()
    begun = time.monotonic()
    stream = flow.compress(test)
    between = time.monotonic()
    again = flow.decompress(stream)
    ended = time.monotonic()
    if not torch.equal(again, test):
        raise AssertionError("the file does not decode to its data")
    return found | {"bytes": len(stream), "code_s": between - begun, "decode_s": ended - between}


def others(data: str, setting: Setting) -> dict[str, int]:
    """Bytes of PNG and WebP (lossless), images one by one and all in one sheet; and of raw pixels by gzip and xz."""
    from PIL import Image

    test = pixels(data)[1][: setting.images, 0]
    side = math.isqrt(len(test))
    sheet = test[: side * side].reshape(side, side, 28, 28).swapaxes(1, 2).reshape(side * 28, side * 28)

    def size(image: np.ndarray, **options: Any) -> int:
        buffer = io.BytesIO()
        Image.fromarray(image).convert("RGB" if options["format"] == "WEBP" else "L").save(buffer, **options)
        return len(buffer.getvalue())

    png, webp = {"format": "PNG", "optimize": True}, {"format": "WEBP", "lossless": True, "quality": 100, "method": 6}
    raw = test.tobytes()
    return {
        "PNG, one by one": sum(size(image, **png) for image in test),
        "PNG, one sheet": size(sheet, **png),
        "WebP, one by one": sum(size(image, **webp) for image in test),
        "WebP, one sheet": size(sheet, **webp),
        "gzip -9": len(gzip.compress(raw, 9)),
        "xz -9e": len(lzma.compress(raw, preset=9 | lzma.PRESET_EXTREME)),
    }


def others_text(setting: Setting) -> dict[str, int]:
    """Bytes of gzip and xz; and of xz behind the text that the models learn from, which is how much that text helps."""
    whole = text().encode()
    test, before = whole[-setting.characters :], whole[: -setting.characters]
    options: dict[str, Any] = {"preset": 9 | lzma.PRESET_EXTREME}
    return {
        "gzip -9": len(gzip.compress(test, 9)),
        "xz -9e": len(lzma.compress(test, **options)),
        "xz -9e, after the text before it": len(lzma.compress(whole, **options))
        - len(lzma.compress(before, **options)),
    }


def lines(found: dict[str, Any], data: str) -> list[tuple[str, float, dict[str, Any]]]:
    """(what, bits a symbol, the rest) of a data set, the longest first."""
    rest = found.get(f"{data}/others", {"others": {}, "symbols": 1})
    runs = {key.split("/")[1]: one for key, one in found.items() if key.startswith(data) and "others" not in key}
    rows = [(name, 8 * size / rest["symbols"], {"bytes": size}) for name, size in rest["others"].items()]
    for name, one in runs.items():
        bits = 8 * one["bytes"] / one["symbols"] if "bytes" in one else one["test_20"]
        part = "" if one["symbols"] == rest["symbols"] else f" ({one['symbols']:,} symbols)"
        rows.append((name + part, bits, one))
    return sorted(rows, key=lambda row: -row[1])


def table(found: dict[str, Any]) -> str:
    """A table for each data set."""
    said: list[str] = []
    for data in (*IMAGES, "text"):
        unit = "character" if data == "text" else "pixel"
        head = f"| file | bytes | bits a {unit} | −log₂ p | over | parameters | steps | code s | decode s |"
        said += [f"**{data}**", "", head, "|---|---:|---:|---:|---:|---:|---:|---:|---:|"]
        for name, bits, one in lines(found, data):
            if "steps" not in one:
                said.append(f"| {name} | {one['bytes']:,} | {bits:.4f} | | | | | | |")
            elif "bytes" not in one:
                size = f"{one['parameters']:,} | {one['steps']:,}"
                said.append(f"| {name} (bound, 20 samples) | no code | ≤ {bits:.4f} | | | {size} | | |")
            else:
                over = f"{100 * (bits / one['test'] - 1):.3f} %"
                cells = (f"{one['bytes']:,}", f"{bits:.4f}", f"{one['test']:.4f}", over, f"{one['parameters']:,}")
                last = f"{one['steps']:,} | {one['code_s']:.0f} | {one['decode_s']:.0f}"
                said.append(f"| {name} | {' | '.join(cells)} | {last} |")
        said.append("")
    return "\n".join(said)


def draw(found: dict[str, Any], path: Path) -> None:
    """Bits a symbol of every file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 3, figsize=(13, 3.2))
    for axis, data in zip(axes, (*IMAGES, "text"), strict=True):
        rows = lines(found, data)
        colours = ["C0" if "steps" in one else "0.75" for _, _, one in rows]
        names = [name if "bytes" in one else f"{name} (bound)" for name, _, one in rows]
        axis.barh(names, [bits for _, bits, _ in rows], color=colours)
        axis.set(title=data, xlabel=f"bits a {'character' if data == 'text' else 'pixel'}")
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, a row")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--threads", type=int, help="of the CPU, for coding; by default the cores shared by the jobs")
    parser.add_argument("--only", nargs="*", default=[], help=f"rows, or parts of their names: {', '.join(ROWS)}")
    parser.add_argument("--images", type=int, default=10_000, help="test images to code, the first ones")
    parser.add_argument("--characters", type=int, default=1_000_000, help="characters to code, the last ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--redraw", action="store_true", help="table and picture again, and run nothing")
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    threads = given.threads or max(1, (os.cpu_count() or 1) // given.jobs)
    setting = Setting(min(given.seconds, 10.0) if given.small else given.seconds, given.device, threads, given.seed)
    sizes = SMALL if given.small else {"images": given.images, "characters": given.characters}
    setting = replace(setting, **sizes)
    given.out.mkdir(parents=True, exist_ok=True)
    path = given.out / ("codec-small.json" if given.small else "codec.json")
    only = given.only or ["flow", "MADE", "PixelCNN", "autoregressive"]
    wanted = [name for name in ROWS if any(part in name for part in only)]
    jobs = [] if given.redraw else [tuple(name.split("/")) for name in wanted]
    for job, found in spread(work, jobs, setting, given.jobs):
        keep(path, job, found | {"command": made(given.device), "seed": given.seed})
    found = kept(path)
    said = table(found)
    print(said)
    path.with_suffix(".md").write_text(HEAD + said + commands(found))
    draw(found, PICTURE if path.parent == RESULTS and not given.small else path.with_suffix(".png"))


HEAD = """# Data as files

Made by `python -m benchmarks.codec`, which says what is learned from, chosen by and coded. Every file of a flow was
decoded and compared to the bit. −log₂ p: what the flow says of the test set; over: how much longer the file is, its
header included (shorter, where the flow has masses beyond the least and the largest number of the file, which the code
knows). Weights are in no file. PNG, WebP, gzip and xz have learned nothing before; "after the text before it" has.

"""


def commands(found: dict[str, Any]) -> str:
    """Which command made which row."""
    return (
        "\n".join(
            f"- {key}: {one['seconds']:.0f} s, seed {one['seed']}; {one['command']}" for key, one in found.items()
        )
        + "\n"
    )


if __name__ == "__main__":
    main()

"""Discrete flows as files: MNIST, Fashion-MNIST and 1 MB of text beside PNG, WebP, gzip and xz.

    python -m experiments.measure.codec --device cuda --jobs 4      # all flows: --seconds of training each,
    then a file
    python -m experiments.measure.codec --only others               # PNG, WebP, gzip, xz (needs Pillow,
    takes ten minutes)
    python -m experiments.measure.codec --redraw                    # table and picture again
    python -m experiments.measure.codec --small                     # a trial on a CPU

Images: the 60,000 training images are learned from, the 10,000 test images are the file. Text: the
last million characters are the file, those before are learned from (wiki27: letters and the space).
A tenth of what is learned from (at most 4,096 rows) is held out and chooses the weights that are
kept, which are not in the file. Every file is decoded and compared to the bit. The argmax flow has
no code: its number is a bound.
"""

from __future__ import annotations

import argparse
import gzip
import io
import lzma
import math
import os
import time
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayou.data import files
from bayou.data.catalogue import CATALOGUE, DataError
from bayou.data.images import idx_set
from bayou.flows import Flow, fit
from experiments.measure.codec_models import SMALL, Setting, build, guesser
from experiments.measure.parallel import keep, kept, made, spread

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "codec.png"
IMAGES = ("mnist", "fashion")
ROWS = [
    *(f"{data}/{kind}" for kind in ("PixelCNN", "integer flow", "MADE") for data in IMAGES),
    *(f"text/{kind}" for kind in ("autoregressive", "modulo flow", "argmax flow")),
    *(f"{data}/others" for data in (*IMAGES, "text")),
]
LR = 2e-3


@lru_cache
def pixels(name: str) -> tuple[np.ndarray, np.ndarray]:
    """Training and test images (N, 1, 28, 28), whole numbers from 0 to 255."""
    (train, _), (test, _) = idx_set(CATALOGUE[name], None)
    return train, test


@lru_cache
def text() -> bytes:
    """Letters and spaces."""
    for folder in files.folders():
        if (path := folder / "text" / "wiki27.txt.xz").exists():
            return lzma.open(path).read()
    raise DataError("there is no text/wiki27.txt.xz in the folder of BAYOU_DATA")


def rows_of(data: str, setting: Setting) -> tuple[Tensor, Tensor]:
    """To learn from, and to code: images, or pieces of the text as numbers of letters, the space
    0.
    """
    if data != "text":
        train, test = (torch.from_numpy(part.copy()).float() for part in pixels(data))
        return train[: 6 * setting.images], test[: setting.images]
    letters = torch.tensor(list(text())).sub(ord("a") - 1).clamp_min(0).float()
    letters = letters[-7 * setting.characters :]
    before, test = letters[: -setting.characters], letters[-setting.characters :]
    rows = len(before) // setting.length
    return before[-rows * setting.length :].reshape(rows, -1), test.reshape(-1, setting.length)


def learn(flow: Flow, rows: Tensor, setting: Setting, share: float = 1.0) -> int:
    """AdamW for a share of the seconds; steps. Logits of a table get ten times the rate: small
    steps are no steps.
    """

    def adamw(params: list[nn.Parameter], lr: float) -> torch.optim.Optimizer:
        table = next((p for name, p in flow.named_parameters() if name == "base.table"), None)
        groups: list[dict[str, Any]] = [{"params": [p for p in params if p is not table]}]
        groups += [] if table is None else [{"params": [table], "lr": 10 * lr}]
        cuda = setting.device == "cuda"
        return torch.optim.AdamW(groups, lr, weight_decay=1e-2, fused=True, capturable=cuda)

    return fit(
        flow, rows, seconds=share * setting.seconds, batch_size=setting.batch, lr=LR, optimizer=adamw,
        clip=rows[0].numel(), check_every=100, patience=None, seed=setting.seed, progress=False,
    ).steps  # fmt: skip


@torch.no_grad()
def bits_of(flow: Flow, rows: Tensor, setting: Setting, samples: int = 1) -> float:
    """−log₂ p of rows, all together."""
    parts = rows.split(2 * setting.batch)
    found = [
        flow.log_prob(p.to(setting.device), samples=samples, seed=i).double().sum()
        for i, p in enumerate(parts)
    ]
    return -float(torch.stack(found).sum()) / math.log(2)


def work(data: str, kind: str, setting: Setting) -> dict[str, Any]:
    """Learn and code, or what others make of the same data."""
    found: dict[str, Any]
    if kind == "others":
        found = others_text(setting) if data == "text" else others(data, setting)
        return {
            "others": found,
            "symbols": setting.characters if data == "text" else 784 * setting.images,
        }
    torch.set_num_threads(setting.threads)
    train, test = rows_of(data, setting)
    flow = build(data, kind, setting).to(setting.device)
    if kind == "modulo flow":
        steps = learn(guesser(flow), train, setting, 0.6)
        steps += learn(flow, train, setting, 0.4)
    else:
        steps = learn(flow, train, setting)
    per = 1 / test.numel()
    found = {
        "steps": steps, "parameters": sum(p.numel() for p in flow.parameters()), "symbols": test.numel(),
        "test": bits_of(flow, test, setting) * per,
    }  # fmt: skip
    if kind == "argmax flow":
        return found | {"test_20": bits_of(flow, test, setting, samples=20) * per}
    print(f"{data}/{kind}: {found['test']:.4f} bits, {steps} steps; now the file", flush=True)
    begun = time.monotonic()
    stream = flow.compress(test)
    between = time.monotonic()
    again = flow.decompress(stream)
    ended = time.monotonic()
    if not torch.equal(again.cpu(), test):
        raise AssertionError("the file does not decode to its data")
    return found | {"bytes": len(stream), "code_s": between - begun, "decode_s": ended - between}


def others(data: str, setting: Setting) -> dict[str, int]:
    """Bytes of PNG and WebP (lossless), images one by one and all in one sheet; and of raw pixels
    by gzip and xz.
    """
    from PIL import Image

    test = pixels(data)[1][: setting.images, 0]
    side = math.isqrt(len(test))
    sheet = (
        test[: side * side].reshape(side, side, 28, 28).swapaxes(1, 2).reshape(side * 28, side * 28)
    )

    def size(image: np.ndarray, **options: Any) -> int:
        buffer = io.BytesIO()
        Image.fromarray(image).convert("RGB" if options["format"] == "WEBP" else "L").save(
            buffer, **options
        )
        return len(buffer.getvalue())

    png, webp = (
        {"format": "PNG", "optimize": True},
        {"format": "WEBP", "lossless": True, "quality": 100, "method": 6},
    )
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
    """Bytes of gzip and xz; and of xz behind the text that the models learn from, which is how much
    that text helps.
    """
    whole = text()
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
    runs = {
        key.split("/")[1]: one
        for key, one in found.items()
        if key.startswith(data) and "others" not in key
    }
    rows = [
        (name, 8 * size / rest["symbols"], {"bytes": size}) for name, size in rest["others"].items()
    ]
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
                said.append(
                    f"| {name} (bound, 20 samples) | no code | ≤ {bits:.4f} | | | {size} | | |"
                )
            else:
                over = f"{100 * (bits / one['test'] - 1):.3f} %"
                cells = (
                    f"{one['bytes']:,}",
                    f"{bits:.4f}",
                    f"{one['test']:.4f}",
                    over,
                    f"{one['parameters']:,}",
                )
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
        colors = ["C0" if "steps" in one else "0.75" for _, _, one in rows]
        names = [name if "bytes" in one else f"{name} (bound)" for name, _, one in rows]
        axis.barh(names, [bits for _, bits, _ in rows], color=colors)
        axis.set(title=data, xlabel=f"bits a {'character' if data == 'text' else 'pixel'}")
        axis.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=130)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--seconds", type=float, default=120.0, help="of training, a row")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument(
        "--threads", type=int, help="of the CPU, for coding; by default all, beside a GPU one"
    )
    parser.add_argument(
        "--only", nargs="*", default=[], help=f"rows, or parts of their names: {', '.join(ROWS)}"
    )
    parser.add_argument(
        "--images", type=int, default=10_000, help="test images to code, the first ones"
    )
    parser.add_argument(
        "--characters", type=int, default=1_000_000, help="characters to code, the last ones"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--small", action="store_true")
    parser.add_argument(
        "--redraw", action="store_true", help="table and picture again, and run nothing"
    )
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args()
    cores = (
        1 if given.device == "cuda" else os.cpu_count() or 1
    )  # tables are small there, and many threads wait
    threads = given.threads or max(1, cores // given.jobs)
    setting = Setting(
        min(given.seconds, 10.0) if given.small else given.seconds,
        given.device,
        threads,
        given.seed,
    )
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

Made by `python -m experiments.measure.codec`, which says what is learned from, chosen by and coded. Every file of a flow was
decoded and compared to the bit. −log₂ p: what the flow says of the test set; over: how much longer the file is, its
header included (shorter, where the flow has masses beyond the least and the largest number of the file, which the code
knows). Weights are in no file. PNG, WebP, gzip and xz have learned nothing before; "after the text before it" has.

"""


def commands(found: dict[str, Any]) -> str:
    """Which command made which row."""
    return (
        "\n".join(
            f"- {key}: {one['seconds']:.0f} s, seed {one['seed']}; {one['command']}"
            for key, one in found.items()
        )
        + "\n"
    )


if __name__ == "__main__":
    main()

"""VAEs whose encoder is a flow: −ELBO and −log p of MNIST, Omniglot and Frey faces beside the
published numbers.

    python -m experiments.measure.vae --device cuda --jobs 8                              # all rows; each is
    written when done
    python -m experiments.measure.vae --device cuda --only mnist/planar frey --seconds 90  # some of them,
    with another clock
    python -m experiments.measure.vae --redraw                                            # table and picture
    again
    python -m experiments.measure.vae --small --out trial                                 # a trial on a CPU

Every row trains for ``--seconds`` of the clock (default: of its data set, ``SETS``), rate and
warm-up of β following it, keeps the parameters with the best bound on held-out rows, and then takes
``--eval-seconds`` for −log p: importance samples for as many test images as that allows, in random
order. Data come from ``BAYOU_DATA``.
"""

from __future__ import annotations

import argparse
import io
import math
import os
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.data import DataError, find
from bayou.data.files import VARIABLE
from bayou.data.images import idx_set
from bayou.flows import (
    VAE,
    BernoulliDecoder,
    CategoricalDecoder,
    ConditionalFlow,
    LogisticDecoder,
)  # fmt: skip
from experiments.measure.parallel import keep, kept, made, spread
from experiments.measure.vae_nets import (
    amortized,
    conv_decoder,
    conv_encoder,
    dense_decoder,
    dense_encoder,
)

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "vae.png"
Split = tuple[Tensor, Tensor, Tensor]  # to learn from, to judge by, to report


@dataclass(frozen=True)
class Set:
    """A data set and how it is learned."""

    rows: tuple[str, ...]
    seconds: float
    samples: int  # importance samples
    decoder: str = "bernoulli"
    conv: bool = True
    dim: int = 64  # of z
    features: int = 256
    batch: int = 100
    lr: float = 5e-4
    source: str = ""
    chunk: int = 16_384  # images decoded at once


POSTERIORS: dict[str, tuple[str, dict[str, Any], str]] = {
    "gaussian": ("gaussian", {}, "Gaussian (VAE)"),
    "planar": ("planar", {"layers": 16}, "planar, 16"),
    "iaf": ("iaf", {"layers": 4, "hidden": (320,)}, "IAF, 4 of width 320"),
    "sylvester-o": (
        "sylvester_orthogonal",
        {"layers": 8, "rank": 32},
        "Sylvester orthogonal, 8 of rank 32",
    ),
    "sylvester-h": (
        "sylvester_householder",
        {"layers": 8, "reflections": 8},
        "Sylvester Householder, 8",
    ),
    "sylvester-t": ("sylvester_triangular", {"layers": 8}, "Sylvester triangular, 8"),
    "continuous": (
        "continuous",
        {"hidden": (128,), "steps": 8},
        "continuous, 128 units, 8 RK4 steps",
    ),
    "k0": ("gaussian", {}, "planar k = 0"),
    **{f"k{k}": ("planar", {"layers": k}, f"planar k = {k}") for k in (10, 20, 40, 80)},
}
MAIN = ("gaussian", "planar", "iaf", "sylvester-o", "continuous")
SETS = {
    "mnist": Set((*MAIN, "sylvester-h", "sylvester-t"), 150, 1000, batch=250, lr=1e-3),
    "maxout": Set(("k0", "k10", "k20", "k40", "k80"), 90, 5000, conv=False, dim=40, features=400, batch=500, lr=1e-3,
                  source="mnist", chunk=65_536),
    "omniglot": Set(MAIN, 60, 1000),
    "frey": Set(MAIN, 45, 5000, decoder="logistic"),
    "frey256": Set(MAIN, 45, 5000, decoder="categorical", source="frey", chunk=4096),
}  # fmt: skip
SYLVESTER = dict.fromkeys(("sylvester-o", "sylvester-h", "sylvester-t"))
PUBLISHED: dict[str, dict[str, tuple[float, float | None]]] = {  # −ELBO, −log p; Frey: bits per dimension
    "mnist": {"gaussian": (86.55, 82.14), "planar": (86.06, 81.91), "iaf": (84.20, 80.79),
              **dict.fromkeys(SYLVESTER, (83.32, 80.22)), "continuous": (82.82, None)},
    "maxout": {"k0": (89.9, None), "k10": (87.5, None), "k20": (86.5, None), "k40": (85.7, None), "k80": (85.1, None)},
    "omniglot": {"gaussian": (104.28, None), "planar": (102.65, None), "iaf": (102.41, None),
                 "sylvester-o": (99.00, None), "continuous": (98.33, None)},
    "frey256": {"gaussian": (4.53, None), "planar": (4.40, None), "iaf": (4.47, None), "sylvester-o": (4.45, None),
                "continuous": (4.39, None)},
}  # fmt: skip
PUBLISHED["frey"] = PUBLISHED["frey256"]
WHAT = {
    "mnist": "MNIST, gated convolutions, z of 64",
    "maxout": "MNIST, two layers of 400 maxout units, z of 40",
    "omniglot": "Omniglot (ten alphabets), gated convolutions, z of 64",
    "frey": "Frey faces, discretized logistic, gated convolutions, z of 64; bits per dimension",
    "frey256": "Frey faces, 256 logits a pixel as published, gated convolutions, z of 64; bits per dimension",
}
HEAD = """# VAEs with flow posteriors

−ELBO and −log p in nats an image (Frey faces: bits a pixel) on test images. −ELBO: ten draws for every test image. −log p: importance samples for *images* of the test set,
as many as the clock allowed; the number is −ELBO of all test images less the mean gap of those, ± its standard error. *epochs*: how often the training images were seen, and, in
brackets, when the held-out bound was best: these parameters are reported. Published: van den Berg et al. 2018 (Sylvester: the best of its three forms), Grathwohl et al. 2019
(continuous), Rezende & Mohamed 2015 (k); up to 2,000 epochs of batches of 100, β warm-up over 100 epochs. Here: a clock, Adam with a cosine, β warm-up over its first fifth, networks in
bfloat16 while they learn, flows in float32.

Not the published data: MNIST was binarised once, pixel by pixel with probability grey/255, by our seed 0 (not the file of Larochelle; first 50,000 training images to learn from, the other
10,000 held out). Omniglot: the 5,840 images of the two small background sets, 105 to 28 pixels by area and binarised alike; at random 4,240 / 600 / 1,000 images, where the published split has 24,345 to learn
from: **not comparable**. Frey faces: 1,565 / 200 / 200 at random, as published but for the seed; *frey* has a likelihood of its own.
"""


# --- data ---------------------------------------------------------------------------------------


def binarised(grey: np.ndarray) -> Tensor:
    """Pixels 1 with probability grey/255, by a seed that is always the same: (N, 1, 28, 28)."""
    p = torch.from_numpy(grey.astype(np.float32) / 255).reshape(-1, 1, 28, 28)
    return (rng.uniform(len(p), (1, 28, 28), p, 0) < p).float()


def shuffled(x: Tensor, *sizes: int) -> Split:
    """Parts of the rows in a random order that is always the same."""
    first, second, third = x[rng.permutation(len(x), 0)].split(sizes)
    return first, second, third


def mnist() -> Split:
    (train, _), (test, _) = idx_set(find("mnist"), None)
    x = binarised(np.concatenate([train, test]))
    return x[:50_000], x[50_000:60_000], x[60_000:]


def folder(name: str) -> Path:
    path = Path(os.environ.get(VARIABLE, "data")) / name
    if not path.exists():
        raise DataError(f"there is no {path}; set {VARIABLE} to the folder with {name}")
    return path


def omniglot() -> Split:
    from PIL import Image

    images = []
    for path in sorted(folder("omniglot").glob("images_background_small*.zip")):
        with zipfile.ZipFile(path) as archive:
            for name in sorted(name for name in archive.namelist() if name.endswith(".png")):
                with Image.open(io.BytesIO(archive.read(name))) as image:
                    images.append(
                        255 - np.asarray(image.convert("L").resize((28, 28), Image.Resampling.BOX))
                    )
    return shuffled(binarised(np.stack(images)), 4240, 600, 1000)


def frey() -> Split:
    with np.load(folder("misc") / "freyfaces.npz", allow_pickle=False) as stored:
        x = torch.from_numpy(stored["x"].astype(np.float32)).reshape(-1, 1, 28, 20)
    return shuffled(x, 1565, 200, 200)


READ: dict[str, Callable[[], Split]] = {"mnist": mnist, "omniglot": omniglot, "frey": frey}


@lru_cache
def data(name: str, device: str, small: bool) -> Split:
    """On the device, where batches are cut too."""
    parts = (x[:200] if small else x for x in READ[name]())
    first, second, third = (x.to(device) for x in parts)
    return first, second, third


# --- one row ------------------------------------------------------------------------------------


class Brief(nn.Module):
    """A network in bfloat16 while it learns on a GPU, in float32 when it is judged."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cuda", torch.bfloat16, enabled=x.is_cuda and self.training):
            out: Tensor = self.net(x)
        return out.float()


def model(name: str, row: str) -> VAE:
    chosen, (kind, options, _) = SETS[name], POSTERIORS[row]
    event = (1, 28, 20) if "frey" in name else (1, 28, 28)
    decoder = {
        "bernoulli": BernoulliDecoder,
        "logistic": LogisticDecoder,
        "categorical": CategoricalDecoder,
    }
    levels, params = {"bernoulli": (2, 1), "logistic": (256, 2), "categorical": (256, 256)}[
        chosen.decoder
    ]
    there, back = (conv_encoder, conv_decoder) if chosen.conv else (dense_encoder, dense_decoder)
    encoder = ConditionalFlow(amortized(kind, chosen.dim, chosen.features, **options),
                    Brief(there(event, chosen.features, levels)))  # fmt: skip
    return VAE(decoder[chosen.decoder](event, Brief(back(event, chosen.dim, params))), encoder)


def work(name: str, row: str, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """Train and judge one row."""
    torch.set_float32_matmul_precision(
        "highest"
    )  # a flow's density is only as exact as its products
    chosen, device = SETS[name], options.device
    if options.small:
        chosen = replace(chosen, batch=10, chunk=500)
    train, held, test = data(chosen.source or name, device, options.small)
    with rng.isolated(seed, torch.device("cpu")):
        vae = model(name, row).to(device)
    if device == "cuda":  # the fastest kernels of a step are looked for once, and recorded with it
        torch.backends.cudnn.benchmark = True
        (-vae.train().elbo(train[: chosen.batch]).mean()).backward()
        vae.zero_grad(set_to_none=True)
    torch.backends.cudnn.benchmark = False
    note, seconds, rate = "", options.seconds or chosen.seconds, options.lr or chosen.lr
    begun = time.monotonic()
    try:
        result = vae.fit(train, held_out=held[:2500], seconds=seconds, batch_size=chosen.batch, lr=rate,
                         warmup=0.2, clip=200.0, seed=seed, progress=False)  # fmt: skip
        steps, best = result.steps, result.best_step
        held_out = result.best
    except FloatingPointError as error:  # the model keeps its last good parameters
        note, steps, best, held_out = str(error), math.nan, math.nan, math.nan
        vae.eval()
    spent = time.monotonic() - begun
    unit = math.prod(vae.event) * math.log(2) if "frey" in name else 1.0
    return {
        **judged(
            vae,
            test,
            options.samples or chosen.samples,
            options.eval_seconds,
            chosen.chunk,
            seed,
            unit,
        ),
        "held-out": held_out / unit,
        "steps": steps,
        "epochs": steps * chosen.batch / len(train),
        "best epoch": best * chosen.batch / len(train),
        "batch": chosen.batch,
        "lr": rate,
        "training": spent,
        "parameters": sum(p.numel() for p in vae.parameters()),
        "note": note,
        "pictures": pictures(vae, test),
    }


@torch.no_grad()
def judged(
    vae: VAE, test: Tensor, samples: int, seconds: float, chunk: int, seed: int, unit: float
) -> dict[str, Any]:
    """−ELBO of all, −log p of as many as the clock allows."""
    rows = max(1, chunk // 10)
    elbo = torch.cat(
        [vae.elbo(x, 10, seed=seed, start=i * rows) for i, x in enumerate(test.split(rows))]
    ).double()
    order, gaps, begun = (
        rng.permutation(len(test), rng.fold(seed, "images")).to(test.device),
        [],
        time.monotonic(),
    )
    for index in order.split(max(1, chunk // min(samples, 500))):
        found = vae.log_prob(
            test[index], samples, seed=rng.fold(seed, "log p", int(index[0])), chunk=chunk
        )
        gaps.append((found.double() - elbo[index]).cpu())
        if time.monotonic() - begun > seconds:
            break
    gap = torch.cat(gaps)
    return {
        "elbo": -float(elbo.mean()) / unit,
        "log p": -float(elbo.mean() + gap.mean()) / unit,
        "error": float(gap.std() / len(gap) ** 0.5) / unit if 1 < len(gap) < len(test) else 0.0,
        "images": len(gap),
        "of": len(test),
        "samples": samples,
    }


@torch.no_grad()
def pictures(vae: VAE, test: Tensor) -> list[Any]:
    """Bytes (16, H, W): means of eight draws of the prior, and eight reconstructions of test
    images.
    """
    prior: Any = vae.prior
    z = prior.draw(8, seed=0)
    grey = torch.cat([vae.map.decoder.center(z, 1), vae.reconstruct(test[:8])])[:, 0]
    top = (vae.map.decoder.levels or 2) - 1
    return (255 * grey / top).round().clamp(0, 255).to(torch.uint8).cpu().numpy().tolist()


# --- table and picture --------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    said = HEAD
    for name, chosen in SETS.items():
        rows = [(row, seed, found[key]) for row in chosen.rows for key in found for seed in [key.split("/")[2]]
                if key == f"{name}/{row}/{seed}"]  # fmt: skip
        if not rows:
            continue
        said += f"\n## {WHAT[name]}\n\n| posterior | −ELBO | published | −log p | published | samples, images | epochs (best) | batch, rate | seconds: training, all | parameters | seed |\n"
        said += "|---|---:|---:|---:|---:|---|---|---|---|---:|---:|\n"
        digits = 3 if "frey" in name else 2
        for row, seed, one in rows:
            elbo, log_p = PUBLISHED[name][row]
            error = f" ± {one['error']:.{digits}f}" if one["error"] else ""
            cells = [
                POSTERIORS[row][2] + (f" ({one['note']})" if one["note"] else ""),
                f"{one['elbo']:.{digits}f}",
                f"{elbo:.2f}",
                f"{one['log p']:.{digits}f}{error}",
                "" if log_p is None else f"{log_p:.2f}",
                f"{one['samples']:,}, {one['images']:,} of {one['of']:,}",
                f"{one['epochs']:.1f} ({one['best epoch']:.1f})",
                f"{one['batch']}, {one['lr']:g}",
                f"{one['training']:.0f}, {one['seconds']:.0f}",
                f"{one['parameters'] / 1e6:.1f} M",
                seed,
            ]
            said += f"| {' | '.join(cells)} |\n"
        over = [(one["elbo"] - PUBLISHED[name][row][0]) for row, _, one in rows]
        if name != "omniglot":
            said += f"\n−ELBO here less the published one: {min(over):+.{digits}f} to {max(over):+.{digits}f}.\n"
    return said + "".join(
        f"\n{line}\n" for line in dict.fromkeys(one["made"] for one in found.values())
    )


def draw(found: dict[str, Any], images: dict[str, np.ndarray], path: Path) -> None:
    """Draws and reconstructions, and the bounds beside the published ones."""
    from matplotlib.figure import Figure

    names = [
        name for name in ("mnist", "maxout", "omniglot", "frey256", "frey") if _rows(found, name)
    ]
    figure = Figure(figsize=(3.6 * len(names), 6.4), layout="constrained")
    axes = figure.subplots(2, len(names), squeeze=False, height_ratios=[1, 1.25])
    for column, name in enumerate(names):
        rows = _rows(found, name)
        best = min(rows, key=lambda row: rows[row]["elbo"])
        tiles = images[f"{name}/{best}"]
        grid = np.concatenate([np.concatenate(list(tiles[i : i + 4]), 1) for i in range(0, 8, 4)])
        axes[0, column].imshow(255 - grid if "frey" not in name else grid, cmap="gray")
        axes[0, column].set(
            title=f"{WHAT[name].split(',')[0]}: draws\n({POSTERIORS[best][2]})",
            xticks=[],
            yticks=[],
        )
        axis, labels = axes[1, column], list(rows)
        for i, row in enumerate(labels):
            axis.plot(
                rows[row]["elbo"], -i, "o", color="#d9743c", label="−ELBO" if i == 0 else None
            )
            axis.plot(
                rows[row]["log p"], -i, "s", color="#3b5b92", label="−log p" if i == 0 else None
            )
            elbo, log_p = PUBLISHED[name][row]
            if name != "omniglot":  # not the same data
                axis.plot(
                    elbo,
                    -i,
                    "o",
                    mfc="none",
                    color="#d9743c",
                    label="published" if i == 0 else None,
                )
                if log_p is not None:
                    axis.plot(log_p, -i, "s", mfc="none", color="#3b5b92")
        axis.set_yticks([-i for i in range(len(labels))], [POSTERIORS[row][2].split(",")[0] if name != "maxout" else
                                                           row.replace("k", "k = ") for row in labels])  # fmt: skip
        axis.set_xlabel("bits a pixel" if "frey" in name else "nats")
        axis.legend(frameon=False, fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def _rows(found: dict[str, Any], name: str) -> dict[str, Any]:
    """The first seed of every row of a set."""
    return {
        row: found[key] for row in SETS[name].rows for key in [f"{name}/{row}/0"] if key in found
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1, help="rows side by side, a process each")
    parser.add_argument("--only", nargs="*", default=list(SETS), help="sets, or set/row, or */row")
    parser.add_argument("--seconds", type=float, help="of training a row; default: of the set")
    parser.add_argument(
        "--eval-seconds", type=float, default=20.0, help="of importance sampling a row"
    )
    parser.add_argument("--samples", type=int, help="importance samples; default: of the set")
    parser.add_argument("--lr", type=float)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument(
        "--small", action="store_true", help="200 images, 5 seconds, no files unless --out"
    )
    parser.add_argument("--redraw", action="store_true")
    parser.add_argument(
        "--out", type=Path, help="folder of the results; default: experiments/results"
    )
    given = parser.parse_args()
    if given.small:
        given.seconds, given.eval_seconds, given.samples = (
            given.seconds or 5.0,
            1.0,
            given.samples or 20,
        )
        given.out = given.out or Path("vae-small")
    out = given.out or RESULTS
    out.mkdir(parents=True, exist_ok=True)
    rows, shots = out / "vae.json", out / "vae.npz"
    jobs = [(name, row, seed) for seed in given.seeds for name, chosen in SETS.items() for row in chosen.rows
            if any(only in (name, f"{name}/{row}", f"*/{row}") for only in given.only)]  # fmt: skip
    if not jobs:
        parser.error(
            f"no row is called {' '.join(given.only)}; the sets are {', '.join(SETS)}, rows {', '.join(POSTERIORS)}"
        )
    if not given.redraw:
        command = made(given.device)
        for job, found in spread(work, jobs, given, given.jobs):
            tiles = np.array(found.pop("pictures"), dtype=np.uint8)
            before = dict(np.load(shots)) if shots.exists() else {}
            np.savez_compressed(shots, **before | {"/".join(job[:2]): tiles})  # type: ignore[arg-type]
            keep(rows, job, found | {"made": command})
            print(
                f"  −ELBO {found['elbo']:.3f}, −log p {found['log p']:.3f}, {found['epochs']:.1f} epochs",
                flush=True,
            )
            (out / "vae.md").write_text(table(kept(rows)))
    found = kept(rows)
    said = table(found)
    (out / "vae.md").write_text(said)
    draw(found, dict(np.load(shots)), PICTURE if given.out is None else out / "vae.png")
    print(said)


if __name__ == "__main__":
    main()

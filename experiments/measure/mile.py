"""MILE (Sommer et al. 2025): chains that start at the members of an ensemble, here and by
sklearn-contrib-bde.

    python -m venv peer && peer/bin/pip install sklearn-contrib-bde==1.0.2   # it pins another
    blackjax than the tests
    python -m experiments.measure.mile --peer peer/bin/python --write                  # both libraries, both
    data sets
    python -m experiments.measure.mile --folder DATA --only default --out row.json     # ours alone, with the
    data of the wheel
    python -m experiments.measure.mile --write --join row.json                         # such rows into the
    table, and no run
    python -m experiments.measure.mile --folder DATA --setting paper --device cuda --only default mile

The wheel of the other library has the data. Both fit a network with two hidden layers of 16 ReLU
units and a noise for each row, with the prior N(0, 1) on all weights, to 80 % of the rows
(``train_test_split`` with seed 42, as in the example of its README); x and y are standardized by
the training rows, and so are RMSE and NLL. The NLL is that of the mixture of all draws. The other
library has the settings of its README, with fewer members and steps on the larger data; an epoch of
its members is one step of AdamW with all rows.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.model_selection import train_test_split

HERE = Path(__file__).parents[1] / "results"
NUMBERS, TABLE = HERE / "bde.json", HERE / "bde.md"
DATA = ("airfoil", "bike sharing")
PEER = "sklearn-contrib-bde"
LIBRARIES = {
    "ensemble": "bayou, `Ensemble`",
    "default": "bayou, `MCLMC` from it",
    "mile": "bayou, `MCLMC(energy_error=5e-4)` from it",
    "loose": "bayou, `MCLMC(energy_error=0.1)` from it",
    "untrained": "bayou, the same from members of one step per epoch",
    "peer": PEER,
}


@dataclass(frozen=True)
class Setting:
    """Hidden layers; of each data set members, their epochs, steps of the warm-up, steps after it."""

    hidden: tuple[int, ...]
    sizes: dict[str, tuple[int, int, int, int]]
    thinning: int
    patience: int


SETTINGS = {
    "readme": Setting(
        (16, 16), {"airfoil": (8, 200, 5000, 2000), "bike sharing": (4, 50, 1000, 1000)}, 2, 10
    ),
    "paper": Setting((16,) * 4, dict.fromkeys(DATA, (10, 1000, 50_000, 10_000)), 10, 20),
}
FEW = 100  # draws of a second NLL
# RMSE and NLL of the paper, of its method and of TabPFN v2
PUBLISHED = {
    "airfoil": (".1215 | −.913", ".1359 | −.934"),
    "bike sharing": (".2261 | −.7315", ".2103 | −.6856"),
}


def rows(name: str, folder: Path) -> list[np.ndarray]:
    """x and y of the training rows, then of the test rows, standardized by the first."""
    if name == "airfoil":
        table = np.loadtxt(folder / "airfoil.csv", delimiter=",", skiprows=1)
    else:  # season to windspeed, and the count; without the date and the two parts of the count
        found = folder / "bike_sharing_dataset" / "hour.csv"
        table = np.loadtxt(found, delimiter=",", skiprows=1, usecols=(*range(2, 14), 16))
    train, test = train_test_split(table, test_size=0.2, random_state=42)
    mean, sd = train.mean(0), train.std(0) + 1e-8
    parts = ((part - mean) / sd for part in (train, test))
    return [half.astype(np.float32) for part in parts for half in (part[:, :-1], part[:, -1:])]


def score(mean: np.ndarray, sd: np.ndarray, y: np.ndarray) -> dict[str, float]:
    """RMSE of the mean and NLL of the mixture of draws (K, N) for targets (N,)."""
    log = -0.5 * ((y - mean) / sd) ** 2 - np.log(sd) - 0.5 * np.log(2 * np.pi)
    most = log.max(0)
    nll = -(most + np.log(np.exp(log - most).mean(0))).mean()
    return {"rmse": float(np.sqrt(np.mean((mean.mean(0) - y) ** 2))), "nll": float(nll)}


def peer(name: str, out: str, setting_name: str) -> None:
    """Runs in the interpreter that has the other library."""
    import bde
    import jax

    x, y, x_test, y_test = rows(name, Path(bde.__file__).parent / "data")
    setting = SETTINGS[setting_name]
    members, epochs, warmup, steps = setting.sizes[name]
    model = bde.BdeRegressor(
        hidden_layers=list(setting.hidden), n_members=members, seed=0, loss=bde.loss.GaussianNLL(), epochs=epochs,
        patience=setting.patience, validation_split=0.15, lr=1e-3, weight_decay=1e-4, warmup_steps=warmup,
        n_samples=steps, n_thinning=setting.thinning,
    )  # fmt: skip
    started = time.process_time()
    model.fit(x=x, y=y)
    raw = np.asarray(model.predict(x_test, raw=True)).reshape(-1, len(x_test), 2)
    seconds = time.process_time() - started
    sd = np.asarray(jax.nn.softplus(raw[..., 1])) + 1e-6
    found = score(raw[..., 0], sd, y_test[:, 0])
    few = np.random.default_rng(0).permutation(len(raw))[:FEW]
    found["nll_few"] = score(raw[few, :, 0], sd[few], y_test[:, 0])["nll"]
    Path(out).write_text(
        json.dumps(found | {"draws": len(raw), "seconds": round(seconds, 1), "where": where()})
    )


def ours(name: str, folder: Path, rival: str, setting: Setting, device: str) -> dict[str, Any]:
    import torch
    from torch import nn

    import bayou

    torch.set_num_threads(1)
    x, y, x_test, y_test = (torch.from_numpy(part).to(device) for part in rows(name, folder))
    members, epochs, warmup, steps = setting.sizes[name]
    torch.manual_seed(0)
    widths = (x.shape[1], *setting.hidden)
    layers = [(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(widths)]
    net = nn.Sequential(*chain.from_iterable(layers), nn.Linear(widths[-1], 2)).to(device)
    point = bayou.MAP(epochs=epochs, lr=5e-3, batch_size=128, schedule="cosine")
    if rival == "untrained":
        point = bayou.MAP(steps=epochs, lr=1e-3, batch_size=len(x), schedule="constant")
    method: Any = bayou.Ensemble(members, of=point, parallel="vmap")
    if rival != "ensemble":
        method = bayou.MCLMC(
            chains=members, start=method, steps=setting.thinning, warmup=warmup // setting.thinning,
            draws=steps // setting.thinning,
            dispersal=0.0, energy_error={"mile": 5e-4, "default": bayou.MCLMC.energy_error}.get(rival, 0.1),
        )  # fmt: skip
    options: dict[str, Any] = {
        "likelihood": bayou.HeteroscedasticGaussian(),
        "prior": bayou.Normal(1.0),
    }
    started = time.process_time()
    with warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", bayou.MixingWarning
        )  # chains of different members do not meet
        posterior = bayou.fit(net, (x, y), method, seed=0, progress=False, **options)
    f = (
        posterior.predict(x_test, samples=posterior.draws, seed=0).outputs.double().cpu()
    )  # each draw once, in random order
    seconds = time.process_time() - started
    mean, sd, y_true = (
        f[..., 0].numpy(),
        (0.5 * f[..., 1]).exp().numpy(),
        y_test[:, 0].double().cpu().numpy(),
    )
    few = score(mean[:FEW], sd[:FEW], y_true)["nll"]
    return score(mean, sd, y_true) | {
        "nll_few": few,
        "draws": len(f),
        "seconds": round(seconds, 1),
        "where": where(),
    }


def where() -> str:
    return f"{platform.machine()}, Python {platform.python_version()}"


def render(found: dict[str, Any]) -> str:
    lines = [
        "# MILE beside sklearn-contrib-bde",
        "",
        "Two hidden layers of 16 ReLU units, a noise for each row, prior N(0, 1), 80 % of the rows; RMSE and NLL of",
        "the test rows in standard deviations of y. `sklearn-contrib-bde` has the settings of its README (members by",
        "AdamW with early stopping, one step with all rows per epoch, where those of bayou have batches of 128); its",
        "warm-up lowers the target of the energy error per weight from .5 to .1, that of `MCLMC` is .02",
        f"unless stated. Predictions have all draws; the last NLL is that of {FEW} of them. One seed.",
        "",
        f"| data | library | RMSE | NLL | draws | NLL of {FEW} | processor seconds | machine |",
        "|---|---|---:|---:|---:|---:|---:|---|",
    ]
    for data in DATA:
        for key, label in LIBRARIES.items():
            row = found["rows"].get(f"{data}, {key}")
            if row:
                numbers = f"{row['rmse']:.4f} | {row['nll']:.3f} | {row['draws']:,} | {row['nll_few']:.3f}"
                lines.append(
                    f"| {data} | {label} | {numbers} | {row['seconds']:,.0f} | {row['where']} |"
                )
    lines += [
        "",
        "Published for airfoil (other splits and settings): MILE RMSE .1216, NLL −.913; an ensemble .365 and .176.",
        *in_paper(found),
        "",
        *(
            f"{data}: {members} members, at most {epochs} epochs each, {warmup:,} steps of warm-up, {steps:,} after it."
            for data, (members, epochs, warmup, steps) in SETTINGS["readme"].sizes.items()
            if any(key.startswith(data) for key in found["rows"])
        ),
        "",
        "`python -m experiments.measure.mile --peer peer/bin/python --write`, in parts by `--out` and `--join`; one thread.",
        "",
    ]
    return "\n".join(lines)


def in_paper(found: dict[str, Any]) -> list[str]:
    """The rows with the sizes of the paper, beside its figures; nothing without such rows."""
    lines = []
    for data in DATA:
        for key, label in LIBRARIES.items():
            row = found["rows"].get(row_name(data, key, "paper"))
            if row:
                numbers = f"{row['rmse']:.4f} | {row['nll']:.3f} | {row['draws']:,}"
                lines.append(
                    f"| {data} | {label} | {numbers} | {row['seconds']:,.0f} | {row['where']} |"
                )
    if not lines:
        return []
    for data, (mile, tabpfn) in PUBLISHED.items():
        lines += [
            f"| {data} | {PEER}, published | {mile} | | | |",
            f"| {data} | TabPFN v2, published | {tabpfn} | | | |",
        ]
    return [
        "",
        "## With the sizes of its paper",
        "",
        "Four hidden layers of 16 units, ten members of at most 1,000 epochs, 50,000 steps of warm-up, 1,000 draws each,",
        "thinned by 10. Published figures are of other splits.",
        "",
        "| data | library | RMSE | NLL | draws | processor seconds | machine |",
        "|---|---|---:|---:|---:|---:|---|",
        *lines,
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peer", help="a Python that has sklearn-contrib-bde")
    parser.add_argument("--folder", type=Path, help="where its data are, without it")
    parser.add_argument("--data", nargs="*", default=list(DATA), choices=DATA)
    parser.add_argument("--only", nargs="*", default=list(LIBRARIES), choices=LIBRARIES)
    parser.add_argument("--setting", default="readme", choices=SETTINGS, help="sizes of both")
    parser.add_argument("--device", default="cpu", help="of bayou")
    parser.add_argument("--write", action="store_true", help="write the results folder")
    parser.add_argument(
        "--out", type=Path, help="write the rows of this run to a file of their own"
    )
    parser.add_argument(
        "--join", type=Path, nargs="*", default=(), help="files of --out, instead of a run"
    )
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    for file in args.join:
        rows |= json.loads(file.read_text())
    for data in () if args.join else args.data:
        for key in args.only:
            rows[row_name(data, key, args.setting)] = row = (
                theirs(data, args.peer, args.setting)
                if key == "peer"
                else ours(data, folder(args), key, SETTINGS[args.setting], args.device)
            )
            print(data, key, json.dumps(row), flush=True)
            if args.out:
                args.out.write_text(json.dumps(rows, indent=1) + "\n")
    if args.write:
        kept = json.loads(NUMBERS.read_text())["rows"] if NUMBERS.exists() else {}
        found = {"rows": kept | rows}
        NUMBERS.write_text(json.dumps(found, indent=1) + "\n")
        TABLE.write_text(render(found))


def folder(args: argparse.Namespace) -> Path:
    if args.folder:
        return Path(args.folder)
    find = "import bde, pathlib; print(pathlib.Path(bde.__file__).parent / 'data')"
    return Path(
        subprocess.run(
            [args.peer, "-c", find], check=True, capture_output=True, text=True
        ).stdout.strip()
    )


def row_name(data: str, key: str, setting: str) -> str:
    return f"{data}, {key}" if setting == "readme" else f"{data}, {key}, {setting}"


def theirs(data: str, python: str, setting: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as there:
        out = str(Path(there, "row.json"))
        subprocess.run([python, __file__, "--run", data, out, setting], check=True)
        found: dict[str, Any] = json.loads(Path(out).read_text())
    return found


if __name__ == "__main__":
    if sys.argv[1:2] == ["--run"]:
        peer(*sys.argv[2:])
    else:
        main()

"""Fits that several processes share: ``python processes.py FOLDER [--die STEP]``, started as by torchrun.

Every process writes what it got to FOLDER/RANK.pt. With ``--die``, process 1 kills itself in this step of the run
"vi", unless there is a checkpoint already.
"""

import argparse
import itertools
import os
import signal
import sys
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou.methods import vi
from bayou.training import checkpoints
from bayou.training.ranks import sharing

N = 37  # the last batch of an epoch has one row: too few for two processes
SHORT = {"steps": 12, "batch_size": 9, "log_every": 1, "checkpoint_every": 5}
DISAGREE = ("another y", "another network", "another seed")


class Died(BaseException):
    """A process that ends without a chance to clean up."""


def data():
    x = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, torch.sin(x.sum(1, keepdim=True)), (x[:, 0] > 0).long()


def mlp(outputs=1, *extra):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), *extra, nn.Tanh(), nn.Linear(6, outputs)).double()


def run(name, **changes):
    """One of the fits whose noise, if any, is the same for all rows: several processes end where one does."""
    x, y, label = data()
    classes, curve = {"net": mlp(2), "data": (x, label)}, {"net": mlp(), "data": (x, y), "likelihood": NOISE}
    named = {"input": x, "labels": label}
    runs = {
        "map": curve | {"method": bayou.MAP(clip=0.5, **SHORT)},
        "mle": classes | {"method": bayou.MLE(validation=0.2, **SHORT)},
        "loader": classes | {"data": loader(named), "method": bayou.MAP(**SHORT)},
        "vi": curve | {"method": bayou.VI(bayou.MeanField(local=False), samples=2, **SHORT)},
        "ivon": curve | {"method": bayou.IVON(**SHORT)},
        "sgld": curve | {"method": bayou.SGLD(steps=12, lr=1e-4, draws=3, batch_size=9, chains=2)},
        "sghmc": curve | {"method": bayou.SGHMC(steps=12, draws=3, batch_size=9, chains=2)},
        "swag": classes | {"method": bayou.SWAG(start=bayou.MAP(**SHORT), steps=12, batch_size=9)},
        "ensemble": classes | {"method": bayou.Ensemble(2, bayou.MAP(**SHORT))},
        "vmap": classes | {"method": bayou.Ensemble(2, bayou.MAP(**SHORT), parallel="vmap")},
        "laplace": classes | {"method": bayou.Laplace(start=bayou.MAP(**SHORT))},
        "hmc": classes | {"method": bayou.HMC(draws=2, chains=2, warmup=2)},
        "dropout": {"net": mlp(2, nn.Dropout(0.3)), "data": (x, label), "method": bayou.MAP(**SHORT)},
        "batch norm": {"net": mlp(2, nn.BatchNorm1d(6)), "data": (x[:36], label[:36]), "method": bayou.MAP(**SHORT)},
        "local": curve | {"method": bayou.VI(**SHORT)},
        "mnf": curve | {"method": bayou.VI(bayou.MNF(), **SHORT)},
    }
    return bayou.fit(**({"seed": 3, "progress": False} | runs[name] | changes))


NOISE = bayou.Gaussian(0.3)
EXACT = ["map", "mle", "loader", "vi", "ivon", "sgld"]
SLOW_EXACT = ["sghmc", "swag", "ensemble", "vmap", "laplace", "hmc"]
RANDOM = ["dropout", "batch norm", "local"]  # with noise of rows, or statistics of a batch: equal in all processes
SLOW_RANDOM = ["mnf"]


def loader(columns):
    """Batches that are mappings; every process makes all of them."""
    rows = TensorDataset(*columns.values())

    def named(items):
        return dict(zip(columns, (torch.stack(column) for column in zip(*items, strict=True)), strict=True))

    return DataLoader(rows, batch_size=9, shuffle=True, collate_fn=named)


def tensors(posterior):
    return posterior.state()[0]


def predicted(posterior):
    """The outputs for 37 rows, of which every process computes some; the seed of the first process is that of all."""
    with sharing():
        return posterior.predict(data()[0], samples=4, seed=5).outputs, posterior.predict(data()[0][:1], 2).outputs


def dying(step):
    """The loss of call number ``step`` never comes back, in any process."""
    calls, plain = itertools.count(1), vi.EvidenceBound.loss

    def watched(self, *args):
        if next(calls) == step:
            raise Died
        return plain(self, *args)

    vi.EvidenceBound.loss = watched
    return plain


def killed(step, file):
    """Process 1 kills itself in this step of a first run."""
    calls, plain = itertools.count(1), vi.EvidenceBound.loss
    first = not file.exists()

    def watched(self, *args):
        if first and next(calls) == step and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return plain(self, *args)

    vi.EvidenceBound.loss = watched


def quick(folder, rank):
    """What the fast tests compare."""
    found = {"tensors": {}, "errors": {}, "shown": [], "written": []}
    plain, write = vi.EvidenceBound.loss, checkpoints.write_file
    for name in EXACT + RANDOM:
        posterior = run(name, progress=lambda title, *numbers: found["shown"].append(title))
        found["tensors"][name] = tensors(posterior)
        if name == "vi":
            found["predicted"] = predicted(posterior)
            found["records"] = [{k: v for k, v in one.items() if k != "seconds"} for one in posterior.history]
    x, y, _ = data()
    other = mlp()
    nn.init.constant_(other[0].bias, rank)
    changes = ({"data": (x, y + rank)}, {"net": other}, {"seed": rank})
    for what, change in zip(DISAGREE, changes, strict=True):
        try:
            run("vi", **change)
        except ValueError as error:
            found["errors"][what] = str(error)
    with sharing(False):
        found["alone"] = tensors(run("vi", seed=rank))
    checkpoints.write_file = lambda path, *args: (found["written"].append(str(path)), write(path, *args))
    dying(8)
    try:
        run("vi", checkpoint=folder / "vi.run")
    except Died:
        found["died"] = True
    vi.EvidenceBound.loss = plain
    return found


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die", type=int)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    if options.die is not None:
        file = options.folder / "vi.run"
        killed(options.die, file)
        found = tensors(run("vi", checkpoint=file))
    elif options.slow:
        found = {name: tensors(run(name)) for name in SLOW_EXACT + SLOW_RANDOM}
    else:
        found = quick(options.folder, rank)
    torch.save(found, options.folder / f"{rank}.pt")


if __name__ == "__main__":
    sys.exit(main())

"""Makes the files of ``before/``: posteriors and half-done runs, as bayou of commit 18d99f6 wrote them.

    python make_before.py before        # with that version; ``tests/training/test_before.py`` reads them with this one

Data and settings are the same on every machine to the bit (small whole numbers), since a checkpoint knows its data.
"""

import sys
from pathlib import Path

import torch
from torch import nn

import bayou
import bayou.progress

ROWS, HALF = 60, 25


def rows() -> tuple[torch.Tensor, torch.Tensor]:
    numbers = torch.arange(3 * ROWS).reshape(ROWS, 3)
    x = ((numbers * 37) % 17 - 8).float() / 8
    return x, (x[:, 0] * x[:, 1] > 0).long()


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))


def methods() -> dict[str, bayou.methods.Method]:
    run = {"steps": 40, "batch_size": 16, "log_every": 5, "checkpoint_every": 10}
    return {
        "map": bayou.MAP(**run),
        "mnf": bayou.VI(bayou.MNF(), **run),
        "ivon": bayou.IVON(**run),
        "swag": bayou.SWAG(start=bayou.MAP(**run), **run),
        "vmap": bayou.Ensemble(2, bayou.MAP(**run), how="vmap"),
        "laplace": bayou.Laplace(start=bayou.MAP(**run)),
        "sgld": bayou.SGLD(steps=40, draws=5, chains=2, batch_size=16, checkpoint_every=10),
    }


class Stop(BaseException):
    """Somebody pulled the plug."""


def main(folder: Path) -> None:
    folder.mkdir(exist_ok=True)
    plain = bayou.progress.Progress.update

    def stop(self: bayou.progress.Progress, step: int, **fields: float) -> None:
        plain(self, step, **fields)
        if step >= HALF:
            raise Stop

    for name, method in methods().items():
        net = network()
        bayou.fit(net, rows(), method=method, seed=3, progress=False).save(folder / f"{name}.bayou")
        bayou.progress.Progress.update = stop
        try:
            bayou.fit(net, rows(), method=method, seed=3, progress=False, checkpoint=folder / f"{name}.run")
        except Stop:
            pass
        finally:
            bayou.progress.Progress.update = plain


if __name__ == "__main__":
    main(Path(sys.argv[1]))

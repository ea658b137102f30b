"""Checkpoints: the complete state of a run, for bit-identical resumption, in one file written
atomically.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayou.files import (
    FileError,
    StrPath,
    join,
    making,
    no_grad_state,
    read_file,
    restore_state,
    split,
    write_file,
)
from bayou.training.ranks import current

Best = dict[str, Tensor] | None


@dataclass
class State:
    """The progress of a run; with the module and the optimizer, the contents of a checkpoint."""

    step: int = 0
    best: float = math.inf
    waited: int = 0
    stopped: str = ""
    total: int = 0  # planned steps; a run without a given length extends them
    cells: list[float] = field(
        default_factory=list
    )  # means of the objective over so many steps each
    partial: float = 0.0  # the sum of those after the last cell
    rising: float | None = None  # nats per thousand steps, if the run ended before convergence
    history: list[dict[str, float]] = field(default_factory=list)


def fingerprint(config: Any) -> str:
    """A short hash of the settings of a run, so that a checkpoint of another run is rejected."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


def check_tensors(path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise a FileError unless the tensors of a checkpoint have the dtypes and axes of those of
    this run.

    Args:
        path: the checkpoint.
        tensors: its tensors.
        expected: tensors of this run under the same names, with any values.
    """
    for name, like in expected.items():
        value = tensors.get(name, like)
        if value.dtype != like.dtype or value.ndim != like.ndim:
            raise FileError(
                f"the checkpoint {path} has {value.dtype} of {value.ndim} axes in {name!r}, expected {like.dtype} of "
                f"{like.ndim}; delete it, or use a backup"
            )


def check_fractions(path: Path, tensors: dict[str, Tensor]) -> None:
    """Raise a FileError for tensors of a checkpoint that are not floating-point.

    Args:
        path: the checkpoint.
        tensors: those of its tensors that must be floating-point.
    """
    for name, value in tensors.items():
        if not value.is_floating_point():
            raise FileError(
                f"the checkpoint {path} has {value.dtype} in {name!r}, expected numbers with fractions; delete it, or "
                "use a backup"
            )


class Checkpoint:
    """The checkpoint file of one run. ``identity``: part → plain values that identify the run."""

    def __init__(self, path: StrPath, identity: dict[str, Any]) -> None:
        self.path = Path(path)
        self.keys = {part: fingerprint(value) for part, value in identity.items()}
        if not self.path.parent.is_dir():
            raise FileError(
                f"cannot write {path}: the folder {self.path.parent} does not exist; create it first"
            )

    def write(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Write the state of the run as tensors and JSON, atomically; of several processes, the
        first does.
        """
        if current().rank == 0:
            write_file(self.path, tensors, {"kind": "checkpoint", "keys": self.keys, **config})

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """The last state; None if there is none, a FileError for the checkpoint of another run."""
        if not self.path.exists():
            return None
        tensors, config = read_file(self.path, "checkpoint")
        keys = config.get("keys")
        if not isinstance(keys, dict):
            raise FileError(f"the checkpoint {self.path} does not identify its run; delete it")
        other = [
            part for part in self.keys.keys() | keys.keys() if self.keys.get(part) != keys.get(part)
        ]
        if other:
            raise FileError(
                f"the checkpoint {self.path} belongs to another run: another {', '.join(sorted(other))}; delete it, "
                "or pass the arguments it was started with"
            )
        return tensors, config

    def save(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, state: State, best: Best
    ) -> None:
        """Write the state of the run, atomically."""
        tensors, tree = split(optimizer.state_dict(), "optimizer")
        tensors |= {f"module.{name}": tensor for name, tensor in no_grad_state(module).items()}
        tensors |= {f"best.{name}": tensor for name, tensor in (best or {}).items()}
        state_now = asdict(state)
        if state.stopped != "early":  # an interrupted or complete run needs no record
            state_now["stopped"] = ""
        self.write(tensors, {"optimizer": tree, "state": state_now})

    def restore(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[State, Best]:
        """Restore the state of a run; a FileError for the checkpoint of another run."""
        found = self.read()
        if found is None:
            return State(), None
        tensors, config = found
        module_state = {
            k.removeprefix("module."): v for k, v in tensors.items() if k.startswith("module.")
        }
        best = {k.removeprefix("best."): v for k, v in tensors.items() if k.startswith("best.")}
        now = no_grad_state(module)
        check_tensors(self.path, module_state, now)
        check_tensors(self.path, best, now)
        averages = {
            n: value for n, value in tensors.items() if n.startswith("optimizer.") and value.ndim
        }
        check_fractions(self.path, averages)
        with making("run like this one", self.path):
            restore_state(module, module_state)
            optimizer.load_state_dict(join(tensors, config["optimizer"]))
            return State(**config["state"]), best or None

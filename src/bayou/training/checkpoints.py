"""Checkpoints: the complete state of a run in one file, from which it resumes bit for bit."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core.files import (
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
from bayou.core.params import under
from bayou.training.ranks import current

BestState = dict[str, Tensor] | None  # the parameters with the lowest validation loss


@dataclass
class RunState:
    """The progress of a run; with the module and the optimizer, the contents of a checkpoint.

    Args:
        step: the number of steps that are done.
        best: the lowest validation loss.
        waited: the number of evaluations since then.
        stopped: how the run ended: "finished", "early" or "interrupted"; empty before that.
        total: the number of planned steps, which a run without a given length extends.
        cells: means of the objective over equally many steps each, for the test of convergence.
        partial: the sum of the objective after the last cell.
        rising: nats per thousand steps, if the run ended before convergence.
        history: the records of the run.
    """

    step: int = 0
    best: float = math.inf
    waited: int = 0
    stopped: str = ""
    total: int = 0
    cells: list[float] = field(default_factory=list)
    partial: float = 0.0
    rising: float | None = None
    history: list[dict[str, float]] = field(default_factory=list)


def fingerprint(config: Any) -> str:
    """Return a short hash of settings of a run, by which checkpoints of other runs are rejected.

    Args:
        config: the settings, as plain values.
    """
    text = json.dumps(config, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_tensors(path: Path, tensors: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Raise a FileError unless the tensors of a checkpoint have the dtypes and axes of this run.

    Args:
        path: the checkpoint.
        tensors: its tensors.
        expected: tensors of this run under the same names, with any values.
    """
    for name, expected_tensor in expected.items():
        tensor = tensors.get(name, expected_tensor)
        if tensor.dtype != expected_tensor.dtype or tensor.ndim != expected_tensor.ndim:
            raise FileError(
                f"the checkpoint {path} has {tensor.dtype} of {tensor.ndim} axes in {name!r}, "
                f"expected {expected_tensor.dtype} of {expected_tensor.ndim}; delete it, or use a "
                "backup"
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
                f"the checkpoint {path} has {value.dtype} in {name!r}, expected numbers with "
                "fractions; delete it, or use a backup"
            )


class Checkpoint:
    """The checkpoint file of one run.

    Args:
        path: the file.
        identity: plain values that identify the run, by the name of the argument they come from.
    """

    def __init__(self, path: StrPath, identity: dict[str, Any]) -> None:
        self.path: Path = Path(path)
        self.keys: dict[str, str] = {name: fingerprint(value) for name, value in identity.items()}
        folder = self.path.parent
        if not folder.is_dir():
            raise FileError(
                f"cannot write {path}: the folder {folder} does not exist; create it first"
            )

    def write(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Write tensors and JSON atomically; of several processes, the first does.

        Args:
            tensors: the tensors of the run.
            config: its other values.
        """
        if current().rank == 0:
            write_file(self.path, tensors, {"kind": "checkpoint", "keys": self.keys, **config})

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Return the tensors and the config of the file; None if there is no file.

        Raises:
            FileError: for the checkpoint of another run.
        """
        if not self.path.exists():
            return None
        tensors, config = read_file(self.path, "checkpoint")
        keys = config.get("keys")
        if not isinstance(keys, dict):
            raise FileError(f"the checkpoint {self.path} does not identify its run; delete it")
        all_names = self.keys.keys() | keys.keys()
        differing = [name for name in all_names if self.keys.get(name) != keys.get(name)]
        if differing:
            raise FileError(
                f"the checkpoint {self.path} belongs to another run: another "
                f"{', '.join(sorted(differing))}; delete it, or pass the arguments it was started "
                "with"
            )
        return tensors, config

    def save(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        state: RunState,
        best: BestState,
    ) -> None:
        """Write the state of the run atomically.

        Args:
            module: has the parameters and buffers.
            optimizer: the optimizer.
            state: the progress.
            best: the parameters with the lowest validation loss, if any.
        """
        tensors, optimizer_tree = split(optimizer.state_dict(), "optimizer")
        tensors |= _with_prefix("module.", no_grad_state(module))
        tensors |= _with_prefix("best.", best or {})
        fields = asdict(state)
        if state.stopped != "early":  # an interrupted or complete run needs no record
            fields["stopped"] = ""
        self.write(tensors, {"optimizer": optimizer_tree, "state": fields})

    def restore(
        self, module: nn.Module, optimizer: torch.optim.Optimizer
    ) -> tuple[RunState, BestState]:
        """Restore the module and the optimizer, and return the progress and the best parameters.

        Without a file nothing changes, and the progress is that of a new run.

        Raises:
            FileError: for the checkpoint of another run.
        """
        contents = self.read()
        if contents is None:
            return RunState(), None
        tensors, config = contents
        module_state = under("module.", tensors)
        best = under("best.", tensors)
        current_state = no_grad_state(module)
        check_tensors(self.path, module_state, current_state)
        check_tensors(self.path, best, current_state)
        averages = {
            name: value
            for name, value in tensors.items()
            if name.startswith("optimizer.") and value.ndim
        }
        check_fractions(self.path, averages)
        with making("run like this one", self.path):
            restore_state(module, module_state)
            optimizer.load_state_dict(join(tensors, config["optimizer"]))
            return RunState(**config["state"]), best or None


def _with_prefix(prefix: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors with a prefix in their names."""
    return {f"{prefix}{name}": tensor for name, tensor in tensors.items()}

"""Checkpoints: all that a run needs to go on bit for bit, in one file that is whole or absent."""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from bayou.files import FileError, StrPath, join, making, no_grad_state, read_file, split, write_file

Best = dict[str, Tensor] | None


@dataclass
class State:
    """Where a run is; together with the module and the optimizer, all that a checkpoint holds."""

    step: int = 0
    best: float = math.inf
    waited: int = 0
    stopped: str = ""
    total: int = 0  # steps that are planned; a run whose length is not given plans more as it goes
    cells: list[float] = field(default_factory=list)  # means of the objective over so many steps each
    partial: float = 0.0  # the sum of those after the last cell
    rising: float | None = None  # nats a thousand steps, where the run ended before it was flat
    history: list[dict[str, float]] = field(default_factory=list)


def fingerprint(config: Any) -> str:
    """A short hash of what a run was asked to do, so that a checkpoint of another run is refused."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, default=str).encode()).hexdigest()[:16]


class Checkpoint:
    """The file of one run. ``identity``, part → plain values, says which run it is."""

    def __init__(self, path: StrPath, identity: dict[str, Any]) -> None:
        self.path = Path(path)
        self.keys = {part: fingerprint(value) for part, value in identity.items()}
        if not self.path.parent.is_dir():
            raise FileError(f"cannot write {path}: the folder {self.path.parent} does not exist; create it first")

    def write(self, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
        """Write where the run is, as tensors and JSON; atomic."""
        write_file(self.path, tensors, {"kind": "checkpoint", "keys": self.keys, **config})

    def read(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """What was written last; None before there is anything, a FileError for the checkpoint of another run."""
        if not self.path.exists():
            return None
        tensors, config = read_file(self.path, "checkpoint")
        keys = config.get("keys")
        if not isinstance(keys, dict):
            raise FileError(f"the checkpoint {self.path} does not say which run it is of; delete it")
        other = [part for part in self.keys.keys() | keys.keys() if self.keys.get(part) != keys.get(part)]
        if other:
            raise FileError(
                f"the checkpoint {self.path} belongs to another run: another {', '.join(sorted(other))}; delete it, "
                "or pass the arguments it was started with"
            )
        return tensors, config

    def save(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: LRScheduler | None,
        state: State,
        best: Best,
    ) -> None:
        """Write where the run is; atomic."""
        tensors, tree = split(optimizer.state_dict(), "optimizer")
        more, schedule = split({} if scheduler is None else scheduler.state_dict(), "scheduler")
        tensors |= more
        tensors |= {f"module.{name}": tensor for name, tensor in no_grad_state(module).items()}
        tensors |= {f"best.{name}": tensor for name, tensor in (best or {}).items()}
        state_now = asdict(state)
        if state.stopped != "early":  # a run that was interrupted, or has all its steps, needs no note of it
            state_now["stopped"] = ""
        self.write(tensors, {"optimizer": tree, "scheduler": schedule, "state": state_now})

    def restore(
        self, module: nn.Module, optimizer: torch.optim.Optimizer, scheduler: LRScheduler | None
    ) -> tuple[State, Best]:
        """Put a run back where it was; a FileError for the checkpoint of another run."""
        found = self.read()
        if found is None:
            return State(), None
        tensors, config = found
        module_state = {k.removeprefix("module."): v for k, v in tensors.items() if k.startswith("module.")}
        best = {k.removeprefix("best."): v for k, v in tensors.items() if k.startswith("best.")}
        with making("run like this one", self.path):
            module.load_state_dict(module_state)
            optimizer.load_state_dict(join(tensors, config["optimizer"]))
            if scheduler is not None:
                now = scheduler.state_dict()
                old = join(tensors, config["scheduler"])
                counters = {key: Counter(value) for key, value in old.items() if isinstance(now.get(key), Counter)}
                scheduler.load_state_dict(old | counters)
            return State(**config["state"]), best or None

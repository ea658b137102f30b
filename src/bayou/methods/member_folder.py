"""The checkpoint of an ensemble: a folder with files of its members."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from bayou.core.files import FileError, StrPath
from bayou.posteriors import load
from bayou.posteriors.posterior import Posterior
from bayou.training.checkpoints import Checkpoint


class MemberFolder:
    """The checkpoint of an ensemble: a file that identifies the run, and files of its members.

    Args:
        path: the folder, which is created.
        run_identity: must be that of an earlier run in the folder.

    Raises:
        FileError: for a folder that cannot be written, or of another run.
    """

    def __init__(self, path: StrPath, run_identity: dict[str, Any]) -> None:
        self.path: Path = Path(path)
        if not self.path.parent.is_dir():
            raise FileError(
                f"cannot write {path}: the folder {self.path.parent} does not exist; "
                "create it first"
            )
        if self.path.exists() and not self.path.is_dir():
            raise FileError(
                f"{path} is a file; the checkpoint of an ensemble is a folder: pass another name"
            )
        self.path.mkdir(exist_ok=True)
        identity_file = Checkpoint(self.path / "ensemble.run", run_identity)
        if identity_file.read() is None:
            if any(self.path.glob("member-*")):
                raise FileError(
                    f"{path} contains members without ensemble.run, so that their run is unknown; "
                    "use another folder"
                )
            identity_file.write({}, {})

    def posterior_path(self, member: int) -> Path:
        """Return the file of a finished member.

        Args:
            member: its number.
        """
        return self.path / f"member-{member:03d}.bayou"

    def run_path(self, member: int) -> Path:
        """Return the checkpoint of an unfinished member; a method may add suffixes.

        Args:
            member: its number.
        """
        return self.path / f"member-{member:03d}.run"

    def run_files(self, member: int) -> Iterator[Path]:
        """Return the files of the run of a member.

        Args:
            member: its number.
        """
        return self.path.glob(f"{self.run_path(member).name}*")

    def remove_run(self, member: int) -> None:
        """Remove the run of a finished member.

        Args:
            member: its number.
        """
        for path in self.run_files(member):
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)

    def load(self, member: int, net: nn.Module) -> Posterior | None:
        """Load a finished member.

        Args:
            member: its number.
            net: the network.

        Returns:
            None if it is unfinished, or if only its run can restore it (files cannot store
            functions).
        """
        if not self.posterior_path(member).exists():
            return None
        try:
            return load(self.posterior_path(member), net)
        except FileError:
            if any(self.run_files(member)):
                return None
            raise

    def save(self, member: int, posterior: Posterior, net: nn.Module) -> None:
        """Save a finished member and remove its run, unless only that can restore the member.

        Args:
            member: its number.
            posterior: of the member.
            net: the network.
        """
        posterior.save(self.posterior_path(member))
        try:
            load(self.posterior_path(member), net)
        except FileError:
            return
        self.remove_run(member)

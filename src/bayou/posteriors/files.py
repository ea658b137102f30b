"""Files that hold tensors and JSON, notice every flipped bit, and run no code: safetensors + JSON + SHA-256 in a zip.

A file is written under a temporary name and renamed, so that a name always holds a whole file.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from torch import Tensor

FORMAT = 1
TENSORS, CONFIG, MANIFEST = "tensors.safetensors", "config.json", "manifest.json"


class FileError(ValueError):
    """A file is missing, truncated, damaged, foreign or from another version."""


def write_file(path: str | os.PathLike[str], tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write atomically: after a crash the name holds either the old file or the new one."""
    path = Path(path)
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    members = {TENSORS: save_tensors(plain), CONFIG: json.dumps(config, allow_nan=True).encode()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    members[MANIFEST] = json.dumps({"format": FORMAT, "kind": "bayou", "sha256": digests}).encode()
    if not path.parent.is_dir():
        raise FileError(f"cannot write {path}: the folder {path.parent} does not exist; create it first")
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_STORED) as archive:
                for name, data in members.items():
                    archive.writestr(zipfile.ZipInfo(name), data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def read_file(path: str | os.PathLike[str], kind: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a file, or a FileError that says what is wrong with it."""
    path = Path(path)
    if not path.is_file():
        raise FileError(f"there is no file {path}")
    try:
        with zipfile.ZipFile(path) as archive:
            members = {name: archive.read(name) for name in (TENSORS, CONFIG, MANIFEST)}
        manifest = json.loads(members[MANIFEST])
        digests, version = dict(manifest["sha256"]), manifest["format"]
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, EOFError, OSError, NotImplementedError, RuntimeError):
        raise FileError(
            f"{path} is not a whole bayou file: it is foreign, truncated or damaged; use a backup"
        ) from None
    if version != FORMAT:
        raise FileError(f"{path} has format {version!r}, this bayou reads {FORMAT}; use the version that wrote it")
    for name in (TENSORS, CONFIG):
        if hashlib.sha256(members[name]).hexdigest() != digests.get(name):
            raise FileError(f"{path} is damaged: the SHA-256 of its {name} does not match; use a backup")
    config = json.loads(members[CONFIG])
    if kind is not None and config.get("kind") != kind:
        raise FileError(f"{path} holds a {config.get('kind')!r}, expected a {kind!r}")
    return load_tensors(members[TENSORS]), config


def split(state: dict[str, Any], prefix: str) -> tuple[dict[str, Tensor], Any]:
    """A nested state (of an optimizer, say) as flat tensors and JSON with references to them."""
    tensors: dict[str, Tensor] = {}

    def walk(value: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[key, walk(item, f"{name}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            return {"list": [walk(item, f"{name}.{i}") for i, item in enumerate(value)]}
        return {"value": value}

    return tensors, walk(state, prefix)


def join(tensors: dict[str, Tensor], tree: Any) -> Any:
    """The inverse of ``split``."""
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "dict" in tree:
        return {key: join(tensors, item) for key, item in tree["dict"]}
    if "list" in tree:
        return [join(tensors, item) for item in tree["list"]]
    return tree["value"]


def no_grad_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a module's state, detached."""
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}

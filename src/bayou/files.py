"""Files that hold tensors and JSON, notice every flipped bit, and run no code: safetensors + JSON + SHA-256 in a zip.

A file is written under a temporary name and renamed, so that a name always holds a whole file. Its last 64 bytes are
the SHA-256 of all others, which makes the check total; the members' own digests in the manifest are for other readers.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import secrets
import zipfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor

FORMAT = 1
SEAL = 64  # hex digits at the end of a file
TENSORS, CONFIG, MANIFEST = "tensors.safetensors", "config.json", "manifest.json"


class FileError(ValueError):
    """A file is missing, truncated, damaged, foreign or from another version."""


def pack(tensors: dict[str, Tensor], config: dict[str, Any]) -> bytes:
    """The bytes of a file: a zip whose comment is the SHA-256 of everything before it."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    members = {TENSORS: save_tensors(plain), CONFIG: json.dumps(config, allow_nan=True).encode()}
    digests = {name: hashlib.sha256(data).hexdigest() for name, data in members.items()}
    members[MANIFEST] = json.dumps({"format": FORMAT, "kind": "bayou", "sha256": digests}).encode()
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
        archive.comment = b"0" * SEAL
    content = buffer.getbuffer()
    content[-SEAL:] = hashlib.sha256(content[:-SEAL]).hexdigest().encode()
    return buffer.getvalue()


def write_file(path: str | os.PathLike[str], tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write atomically: after a crash the name holds either the old file or the new one."""
    path = Path(path)
    content = pack(tensors, config)
    real = Path(os.path.realpath(path))  # a link stays a link
    if not real.parent.is_dir():
        raise FileError(f"cannot write {path}: the folder {real.parent} does not exist; create it first")
    if real.is_dir():
        raise FileError(f"cannot write {path}: it is a folder")
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(8)}.part")
    try:
        try:
            with open(temporary, "xb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            os.replace(temporary, real)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}; what was there is untouched") from error


def read_file(path: str | os.PathLike[str], kind: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a file, or a FileError that says what is wrong with it."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileError(f"there is no file {path}") from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    if hashlib.sha256(memoryview(content)[:-SEAL]).hexdigest().encode() != content[-SEAL:]:
        raise FileError(
            f"{path} is not a whole bayou file: its SHA-256 does not match, so it is truncated, damaged or foreign; "
            "use a backup"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            version = json.loads(archive.read(MANIFEST))["format"]
            if version != FORMAT:
                raise FileError(
                    f"{path} has format {version!r}, this bayou reads {FORMAT}; use the version that wrote it"
                )
            config = json.loads(archive.read(CONFIG))
            tensors = load_tensors(archive.read(TENSORS))
    except FileError:
        raise
    except Exception as error:  # whole, but not ours
        raise FileError(f"{path} is a foreign file: {type(error).__name__}: {error}") from None
    if kind is not None and config.get("kind") != kind:
        raise FileError(f"{path} holds a {config.get('kind')!r}, expected a {kind!r}")
    return tensors, config


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
            kind = "tuple" if isinstance(value, tuple) else "list"
            return {kind: [walk(item, f"{name}.{i}") for i, item in enumerate(value)]}
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ValueError(f"{name} is a {type(value).__name__}, which a file cannot hold")
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
    if "tuple" in tree:
        return tuple(join(tensors, item) for item in tree["tuple"])
    return tree["value"]


def no_grad_state(module: torch.nn.Module) -> dict[str, Tensor]:
    """The tensors of a module's state, detached."""
    return {name: tensor.detach() for name, tensor in module.state_dict().items()}

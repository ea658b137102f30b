"""Files that hold tensors and JSON, notice every flipped bit, and run no code: safetensors + JSON + SHA-256 in a zip.

A file is written under a temporary name and renamed, so that a name always holds a whole file. Its last 64 bytes are
the SHA-256 of all others, which makes the check total; the members' own digests in the manifest are for other readers.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import io
import json
import os
import secrets
import time
import zipfile
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed anyway
    fcntl = None  # type: ignore[assignment]

StrPath = str | os.PathLike[str]
FORMAT = 1
MINUTE = 60.0  # seconds
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


def write_file(path: StrPath, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write atomically: after a crash the name holds either the old file or the new one."""
    path = Path(path)
    content = pack(tensors, config)
    real = Path(os.path.realpath(path))  # a link stays a link
    if not real.parent.is_dir():
        raise FileError(f"cannot write {path}: the folder {real.parent} does not exist; create it first")
    if real.is_dir():
        raise FileError(f"cannot write {path}: it is a folder")
    remove_leftovers(real)
    temporary = real.with_name(f".{real.name}.{secrets.token_hex(8)}.part")
    try:
        try:
            with open(temporary, "xb") as stream:
                _lock(stream, wait=True)
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
                if fcntl is not None:  # a file that is open has no other name on Windows
                    os.replace(temporary, real)
            if fcntl is None:
                os.replace(temporary, real)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
    except OSError as error:
        raise FileError(f"cannot write {path}: {error.strerror or error}; what was there is untouched") from error


def remove_leftovers(path: Path) -> None:
    """Remove what killed processes left behind on their way to ``path``; a file that is being written is locked."""
    for left in path.parent.glob(f".{glob.escape(path.name)}.{'[0-9a-f]' * 16}.part"):
        with contextlib.suppress(OSError), open(left, "rb") as stream:  # not ours, gone already, or in use
            _lock(stream, wait=False)
            state = os.fstat(stream.fileno())
            if state.st_size or state.st_mtime < time.time() - MINUTE:  # an empty one may be about to be locked
                left.unlink()


def _lock(stream: IO[bytes], wait: bool) -> None:
    """Hold a file until it is closed, or the process is no more; an OSError where another one holds it."""
    if fcntl is not None:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def read_file(path: StrPath, kind: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and config of a file, or a FileError that says what is wrong with it."""
    path = Path(path)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        raise FileError(f"there is no file {path}") from None
    except OSError as error:
        raise FileError(f"cannot read {path}: {error.strerror or error}") from None
    remove_leftovers(Path(os.path.realpath(path)))
    if hashlib.sha256(memoryview(content)[:-SEAL]).hexdigest().encode() != content[-SEAL:]:
        raise FileError(
            f"{path} is not a whole bayou file: its SHA-256 does not match, so it is truncated, damaged or foreign; "
            "use a backup"
        )
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            _check_members(archive, len(content))
            version = json.loads(archive.read(MANIFEST))["format"]
            if version != FORMAT:
                raise FileError(
                    f"{path} has format {version!r}, this bayou reads {FORMAT}; use the version that wrote it"
                )
            config = json.loads(archive.read(CONFIG))
            tensors = load_tensors(archive.read(TENSORS))
        if not isinstance(config, dict):
            raise ValueError(f"{CONFIG} is a {type(config).__name__}, not an object")
    except FileError:
        raise
    except Exception as error:  # whole, but not ours
        raise FileError(f"{path} is a foreign file: {type(error).__name__}: {error}") from None
    if kind is not None and config.get("kind") != kind:
        raise FileError(f"{path} holds a {config.get('kind')!r}, expected a {kind!r}")
    return tensors, config


def _check_members(archive: zipfile.ZipFile, size: int) -> None:
    """A ValueError for members that would be larger than they are in the file: nothing here is ever compressed."""
    for member in archive.infolist():
        if member.compress_type != zipfile.ZIP_STORED or not member.file_size == member.compress_size <= size:
            packed, full = member.compress_size, member.file_size
            raise ValueError(f"{member.filename} is {full:,} bytes packed in {packed:,}, and bayou packs nothing")


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

"""Files of tensors and JSON: safetensors and JSON in a zip archive that ends with its SHA-256.

Loading runs no code.
A file is written under a temporary name and renamed, so that it is complete or absent. Its last 64
bytes are the SHA-256 of all others: a file that was changed is refused.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import hashlib
import io
import json
import os
import secrets
import time
import zipfile
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import IO, Any, TypeVar

import torch
from safetensors.torch import load as load_tensors, save as save_tensors
from torch import Tensor, nn

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]
msvcrt: Any = import_module("msvcrt") if os.name == "nt" else None

Result = TypeVar("Result")
StrPath = str | os.PathLike[str]
FORMAT = 1
SEAL = 64  # hex digits at the end of a file
LEFTOVER_SECONDS = 60.0  # the age from which an empty temporary file is one of a killed process
SUFFIX_BYTES = 8  # random bytes in the name of a temporary file
# Windows refuses to replace or to open a file while another process opens or replaces it.
WINDOWS_ATTEMPTS = 40
WINDOWS_PAUSE = 0.05  # seconds between two attempts
WINDOWS_LOCK_BYTE = 2**30  # far behind the content, since no other process can read a locked byte
# The dtypes of tensors in files.
DTYPES = frozenset(
    {
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.complex64,
        torch.complex128,
        torch.bool,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
    }
)
EXTRA_STATE = "_extra_state"  # the key that torch gives to the result of get_extra_state
TENSORS = "tensors.safetensors"
CONFIG = "config.json"
MANIFEST = "manifest.json"


class FileError(ValueError):
    """A file is missing, truncated, damaged, foreign or from another version."""


def pack(tensors: dict[str, Tensor], config: dict[str, Any]) -> bytes:
    """Return the bytes of a file: a zip whose comment is the SHA-256 of everything before it.

    Args:
        tensors: the tensors by name.
        config: JSON values.
    """
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    members = {
        TENSORS: save_tensors(plain),
        CONFIG: json.dumps(config, allow_nan=True).encode(),
        MANIFEST: json.dumps({"format": FORMAT, "kind": "bayou"}).encode(),
    }
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for name, data in members.items():
            archive.writestr(zipfile.ZipInfo(name), data)
        archive.comment = b"0" * SEAL
    content = buffer.getbuffer()
    content[-SEAL:] = hashlib.sha256(content[:-SEAL]).hexdigest().encode()
    return buffer.getvalue()


@contextlib.contextmanager
def writing(
    path: StrPath, *, folders: bool = False, through_links: bool = True
) -> Iterator[IO[bytes]]:
    """Open a stream whose bytes become the file ``path`` at the end of the block, or none of them.

    They are written under a temporary name in the same folder, flushed to the disk and renamed.
    After an error or Ctrl-C the temporary file is removed; that of a killed process is removed at
    the next write.

    Args:
        path: the file.
        folders: create missing parent folders, which are removed if the file cannot be written.
        through_links: write to the target of a symbolic link; False: replace the link by the file,
            since the folder may have been prepared by somebody else.

    Raises:
        FileError: if the file cannot be written; what was there is untouched.
    """
    target = _write_target(path, folders, through_links)
    new_folders = [folder for folder in target.parents if folders and not folder.exists()]
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(SUFFIX_BYTES)}.part")
    try:
        if new_folders:
            target.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(target)
        with open(temporary, "xb") as stream:
            with contextlib.suppress(OSError):  # file systems without locks
                _lock(stream, wait=True)
            yield stream
            stream.flush()
            os.fsync(stream.fileno())
            if fcntl is not None:  # an opened file cannot be renamed on Windows
                os.replace(temporary, target)
        if fcntl is None:
            _repeat_on_windows(lambda: os.replace(temporary, target))
        _flush_folder(target.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):  # another process may have put something there
            temporary.unlink(missing_ok=True)
            for folder in new_folders:
                folder.rmdir()
        if isinstance(error, OSError):
            reason = error.strerror or error
            raise FileError(
                f"cannot write {path}: {reason}; what was there is untouched, choose another place"
            ) from error
        raise


def _repeat_on_windows(action: Callable[[], Result]) -> Result:
    """Return what an action returns; on Windows try again while another process has the file open.

    Raises:
        PermissionError: if the last of ``WINDOWS_ATTEMPTS`` was refused, too.
    """
    for _ in range(WINDOWS_ATTEMPTS - 1 if msvcrt is not None else 0):
        try:
            return action()
        except PermissionError:
            time.sleep(WINDOWS_PAUSE)
    return action()


def _write_target(path: StrPath, folders: bool, through_links: bool) -> Path:
    """Return the file that a rename shall replace, after checks that it can be one."""
    target = Path(os.path.realpath(path))
    is_replaced_link = not through_links and Path(path).is_symlink()
    if is_replaced_link:
        target = Path(os.path.realpath(Path(path).parent), Path(path).name)
    if not (folders or target.parent.is_dir()):
        raise FileError(
            f"cannot write {path}: the folder {target.parent} does not exist; create it first"
        )
    # A rename would replace a device, too: /dev/null.
    if target.exists() and not target.is_file() and not is_replaced_link:
        raise FileError(
            f"cannot write {path}: it is a folder, a pipe or a device; choose another place"
        )
    return target


def _flush_folder(folder: Path) -> None:
    """Flush a folder to the disk, on systems where folders can be opened."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_text(path: StrPath, text: str, *, through_links: bool = True) -> None:
    """Write UTF-8 text atomically, with its parent folders.

    Args:
        path: the file.
        text: its content.
        through_links: write to the target of a symbolic link; False: replace the link by the file.
    """
    with writing(path, folders=True, through_links=through_links) as stream:
        stream.write(text.encode())


def write_file(path: StrPath, tensors: dict[str, Tensor], config: dict[str, Any]) -> None:
    """Write a file atomically: after a crash the path has either the old file or the new one.

    Args:
        path: the file.
        tensors: its tensors by name.
        config: its JSON values.
    """
    content = pack(tensors, config)
    with writing(path) as stream:
        stream.write(content)


def remove_leftovers(path: Path) -> None:
    """Remove the temporary files of ``path`` that killed processes left.

    A file that is being written is locked; an empty one may be about to be locked.

    Args:
        path: the file.
    """
    digits = "[0-9a-f]" * (2 * SUFFIX_BYTES)
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.{digits}.part"):
        # An OSError means that it is not ours, gone already, or in use.
        with contextlib.suppress(OSError):
            with open(leftover, "rb") as stream:
                _lock(stream, wait=False)
                status = os.fstat(stream.fileno())
                is_old = status.st_mtime < time.time() - LEFTOVER_SECONDS
                is_abandoned = bool(status.st_size) or is_old
                if is_abandoned and fcntl is not None:
                    leftover.unlink()
            if is_abandoned and fcntl is None:  # an opened file cannot be removed on Windows
                leftover.unlink()


@contextlib.contextmanager
def lock_file(path: Path) -> Iterator[bool]:
    """Lock the file ``path`` until the block or the process ends.

    Args:
        path: the file, which is created with its folders.

    Yields:
        Whether this process has the lock; True without a lock on file systems without locks.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        flags = os.O_APPEND | os.O_CREAT | os.O_WRONLY | getattr(os, "O_NOFOLLOW", 0)
        stream = os.fdopen(os.open(path, flags, 0o666), "ab")
    except OSError as error:
        raise FileError(
            f"cannot write {path}: {error.strerror or error}; choose another place"
        ) from error
    with stream:
        has_lock = True
        try:
            _lock(stream, wait=False)
        except BlockingIOError:
            has_lock = False
        except OSError:  # no locks here
            pass
        yield has_lock


def _lock(stream: IO[bytes], wait: bool) -> None:
    """Lock a file until it is closed or the process ends.

    Raises:
        OSError: if another process has the lock and this one does not wait for it.
    """
    if fcntl is not None:
        fcntl.flock(stream.fileno(), fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    elif msvcrt is not None:
        _lock_on_windows(stream.fileno(), wait)


def _lock_on_windows(handle: int, wait: bool) -> None:
    """Lock one byte of a file, and keep the position at which it is written.

    Raises:
        BlockingIOError: if another process has the lock; after ten seconds if this one waits.
    """
    position = os.lseek(handle, 0, os.SEEK_CUR)
    os.lseek(handle, WINDOWS_LOCK_BYTE, os.SEEK_SET)
    try:
        msvcrt.locking(handle, msvcrt.LK_LOCK if wait else msvcrt.LK_NBLCK, 1)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EDEADLK):
            raise BlockingIOError(error.errno, "another process has the lock") from error
        raise
    finally:
        os.lseek(handle, position, os.SEEK_SET)


def read_bytes(path: StrPath) -> bytes:
    """Return the bytes of a file.

    Args:
        path: the file.

    Raises:
        FileError: for a missing file, a folder, a pipe or a device.
    """
    path = Path(path)
    try:
        if path.exists() and not path.is_file():
            description = "a folder" if path.is_dir() else "a pipe or device"
            raise FileError(f"cannot read {path}: it is {description}, no file")
        return _repeat_on_windows(path.read_bytes)
    except FileNotFoundError:
        raise FileError(f"there is no file {path}") from None
    except (OSError, MemoryError) as error:
        reason = getattr(error, "strerror", None) or repr(error)
        raise FileError(f"cannot read {path}: {reason}") from None


def read_file(path: StrPath, kind: str | None = None) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the config of a file.

    Args:
        path: the file.
        kind: what the config must name as its kind; None: anything.

    Raises:
        FileError: states what is wrong with the file.
    """
    content = read_bytes(path)
    remove_leftovers(Path(os.path.realpath(path)))
    if hashlib.sha256(memoryview(content)[:-SEAL]).hexdigest().encode() != content[-SEAL:]:
        raise FileError(
            f"{path} is not a whole bayou file: its SHA-256 does not match, so it is truncated, "
            "damaged or foreign; use a backup"
        )
    try:
        tensors, config = _unpack(path, content)
    except FileError:
        raise
    except Exception as error:  # whole, but not ours
        raise FileError(f"{path} is a foreign file: {type(error).__name__}: {error}") from None
    for name, tensor in tensors.items():
        if tensor.dtype not in DTYPES:
            raise FileError(
                f"{path} has {tensor.dtype} in {name!r}, which bayou does not write; use a backup"
            )
    if kind is not None and config.get("kind") != kind:
        raise FileError(f"{path} holds a {config.get('kind')!r}, expected a {kind!r}")
    return tensors, config


def _unpack(path: StrPath, content: bytes) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors and the config in the bytes of a file."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        _check_members(archive, len(content))
        version = json.loads(archive.read(MANIFEST))["format"]
        if version != FORMAT:
            raise FileError(
                f"{path} has format {version!r}, this bayou reads {FORMAT}; use the version that "
                "wrote it"
            )
        config = json.loads(archive.read(CONFIG))
        tensors = load_tensors(archive.read(TENSORS))
    if not isinstance(config, dict):
        raise ValueError(f"{CONFIG} is a {type(config).__name__}, not an object")
    return tensors, config


@contextlib.contextmanager
def making(what: str, path: StrPath) -> Iterator[None]:
    """Convert errors in building an object from an intact file to a FileError.

    Args:
        what: the object.
        path: the file.
    """
    try:
        yield
    except FileError:
        raise
    except Exception as error:
        description = f"{type(error).__name__}: {error}"
        raise FileError(
            f"{path} is whole, but no {what} can be made of it: {description}"
        ) from error


def _check_members(archive: zipfile.ZipFile, size: int) -> None:
    """Raise a ValueError for compressed members, which bayou does not write."""
    for member in archive.infolist():
        is_stored = member.compress_type == zipfile.ZIP_STORED
        if not is_stored or not member.file_size == member.compress_size <= size:
            raise ValueError(
                f"{member.filename} is {member.file_size:,} bytes packed in "
                f"{member.compress_size:,}, and bayou packs nothing"
            )


def split(state: dict[str, Any], prefix: str) -> tuple[dict[str, Tensor], Any]:
    """Split a nested state into flat tensors and JSON with references to them.

    Args:
        state: nested dicts, lists and tuples of tensors and plain values, as of an optimizer.
        prefix: with which the names of the tensors begin.

    Returns:
        The tensors by name, and the JSON values.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: object, name: str) -> Any:
        if isinstance(value, Tensor):
            tensors[name] = value
            return {"tensor": name}
        if isinstance(value, dict):
            return {"dict": [[key, walk(item, f"{name}.{key}")] for key, item in value.items()]}
        if isinstance(value, list | tuple):
            type_name = "tuple" if isinstance(value, tuple) else "list"
            return {type_name: [walk(item, f"{name}.{i}") for i, item in enumerate(value)]}
        if value is not None and not isinstance(value, bool | int | float | str):
            raise ValueError(f"{name} is a {type(value).__name__}, which a file cannot hold")
        return {"value": value}

    return tensors, walk(state, prefix)


def join(tensors: dict[str, Tensor], tree: dict[str, Any]) -> Any:
    """Invert ``split``.

    Args:
        tensors: the tensors by name.
        tree: the JSON values.
    """
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "dict" in tree:
        return {key: join(tensors, item) for key, item in tree["dict"]}
    if "list" in tree:
        return [join(tensors, item) for item in tree["list"]]
    if "tuple" in tree:
        return tuple(join(tensors, item) for item in tree["tuple"])
    return tree["value"]


def no_grad_state(module: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and persistent buffers of a module by name, detached.

    Anything else that a ``state_dict`` may hold (extra state, packed weights of quantized layers)
    belongs to the modules.

    Args:
        module: the module.
    """
    names = registered_names(module)
    return {name: value.detach() for name, value in module.state_dict().items() if name in names}


def registered_names(module: nn.Module) -> set[str]:
    """Return all names of the parameters and buffers of a module, tied ones too.

    Args:
        module: the module.
    """
    parameters = (name for name, _ in module.named_parameters(remove_duplicate=False))
    buffers = (name for name, _ in module.named_buffers(remove_duplicate=False))
    return {*parameters, *buffers}


def packed_state(module: nn.Module) -> dict[str, Any]:
    """Return the entries of a ``state_dict`` that quantized layers keep their weights in.

    They are neither parameters nor buffers nor extra state.

    Args:
        module: the module.
    """
    names = registered_names(module)
    entries = module.state_dict().items()
    return {
        name: value
        for name, value in entries
        if name not in names and not name.endswith(EXTRA_STATE)
    }


def restore_state(module: nn.Module, state: dict[str, Tensor], *, partial: bool = False) -> None:
    """Give a module the tensors of ``no_grad_state``.

    Packed weights and extra state remain as they are.

    Args:
        module: the module, which is changed.
        state: its tensors by name.
        partial: whether tensors may be missing, which then keep their values.

    Raises:
        RuntimeError: for missing tensors, tensors of other names or of other shapes.
    """
    full = module.state_dict()  # has the versions of the layers, which quantized ones read
    packed = packed_state(module)
    full.clear()
    full.update(packed | state)
    keys = module.load_state_dict(full, strict=False)
    missing = [name for name in keys.missing_keys if not name.endswith(EXTRA_STATE)]
    if missing and not partial:
        raise RuntimeError(f"there is no {missing[0]!r}")
    unexpected = [name for name in keys.unexpected_keys if name in state]
    if unexpected and not partial:
        raise RuntimeError(f"there is no place for {unexpected[0]!r}")

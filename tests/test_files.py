"""Atomic writes, locks, and paths that are not opened."""

import errno
import os
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import bayou
from bayou.app.runs.json_files import RunError, read_json, write_json
from bayou.core import files

SOURCE = Path(bayou.__file__).parent
HOLD = """
import fcntl, sys, time
stream = open(sys.argv[1], "ab")
fcntl.flock(stream, fcntl.LOCK_EX)
print("held", flush=True)
time.sleep(60)
"""
posix = pytest.mark.skipif(files.fcntl is None, reason="locks of POSIX")


@posix  # Windows opens no folders
def test_a_file_is_flushed_before_it_is_renamed(tmp_path, monkeypatch):
    done = []
    sync, rename = os.fsync, os.replace
    monkeypatch.setattr(
        os,
        "fsync",
        lambda handle: (done.append(os.readlink(f"/proc/self/fd/{handle}")), sync(handle)),
    )
    if not Path("/proc/self/fd").exists():  # macOS
        monkeypatch.setattr(
            os, "fsync", lambda handle: (done.append(str(tmp_path / ".part")), sync(handle))
        )
    monkeypatch.setattr(os, "replace", lambda old, new: (done.append("rename"), rename(old, new)))
    files.write_text(tmp_path / "a.json", "{}")
    assert len(done) == 3
    assert done[0].endswith(".part")
    assert done[1] == "rename"
    assert Path(done[2]).name in (tmp_path.name, ".part")


def test_concurrent_writes_of_json_are_atomic(tmp_path):
    path, values = (
        tmp_path / "facts.json",
        [{"who": who, "numbers": [who] * 2000} for who in range(3)],
    )
    write_json(path, values[0])
    problems = []

    def write(value):
        try:
            for _ in range(25):
                write_json(path, value)
        except Exception as error:
            problems.append(error)

    threads = [threading.Thread(target=write, args=(value,)) for value in values]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        assert read_json(path) in values
    assert not problems
    assert os.listdir(tmp_path) == ["facts.json"]


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_failed_write_leaves_no_part_and_no_folder(tmp_path, error):
    def write():
        with files.writing(tmp_path / "new" / "run" / "a.csv", folders=True) as stream:
            stream.write(b"half")
            raise error

    with pytest.raises((files.FileError, KeyboardInterrupt)) as caught:
        write()
    assert os.listdir(tmp_path) == []
    if isinstance(error, OSError):
        assert "No space left on device; what was there is untouched" in str(caught.value)


def test_every_file_of_the_library_is_written_in_one_way():
    writes = re.compile(
        r"""\bopen\([^()]*["'][wax][b+]*["']|\.(write_text|write_bytes|savefig)\("""
    )
    found = [
        path for path in SOURCE.rglob("*.py") if writes.search(path.read_text(encoding="utf-8"))
    ]
    assert {path.relative_to(SOURCE).as_posix() for path in found} == {"core/files.py"}


@posix
def test_a_file_system_without_locks_is_written_to(tmp_path, monkeypatch):
    def none(*args):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(files.fcntl, "flock", none)
    files.write_text(tmp_path / "a", "whole")
    assert (tmp_path / "a").read_text() == "whole"
    with files.lock_file(tmp_path / "lock") as free:
        assert free


@posix
def test_a_lock_ends_with_its_process(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path / "lock")], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with files.lock_file(tmp_path / "lock") as free:
            assert not free
        other.kill()
    with files.lock_file(tmp_path / "lock") as free:
        assert free


class Msvcrt:
    """The locks of Windows, by those of POSIX: of ranges, held by processes."""

    LK_LOCK = 1
    LK_NBLCK = 2

    def locking(self, handle, mode, count):
        import fcntl

        is_read_only = not fcntl.fcntl(handle, fcntl.F_GETFL) & (os.O_WRONLY | os.O_RDWR)
        flags = fcntl.LOCK_SH if is_read_only else fcntl.LOCK_EX  # POSIX wants a writable file
        flags |= fcntl.LOCK_NB if mode == self.LK_NBLCK else 0
        start = os.lseek(handle, 0, os.SEEK_CUR)
        assert start == files.WINDOWS_LOCK_BYTE
        fcntl.lockf(handle, flags, count, start)


HOLD_RANGE = """
import fcntl, sys, time
stream = open(sys.argv[1], "ab")
fcntl.lockf(stream, fcntl.LOCK_EX, 1, int(sys.argv[2]))
print("held", flush=True)
time.sleep(60)
"""


@posix  # imitates Windows
def test_windows_locks_a_byte_behind_the_content(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(files, "msvcrt", Msvcrt())
    path = tmp_path / "lock"
    command = [sys.executable, "-c", HOLD_RANGE, str(path), str(files.WINDOWS_LOCK_BYTE)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        with files.lock_file(path) as free:
            assert not free
        other.kill()
    with files.lock_file(path) as free:
        assert free
    files.write_text(tmp_path / "a", "whole")
    assert (tmp_path / "a").read_bytes() == b"whole"
    leftover = tmp_path / f".a.{'0' * 16}.part"
    leftover.write_text("half")
    files.write_text(tmp_path / "a", "new")
    assert sorted(os.listdir(tmp_path)) == ["a", "lock"]


@posix
def test_windows_replaces_a_file_as_soon_as_its_reader_has_closed_it(tmp_path, monkeypatch):
    refusals = [PermissionError(13, "in use")] * 3
    rename = os.replace

    def replace(old, new):
        if refusals:
            raise refusals.pop()
        rename(old, new)

    monkeypatch.setattr(os, "replace", replace)
    with pytest.raises(files.FileError, match="in use"):  # on POSIX it is an error at once
        files.write_text(tmp_path / "a", "text")
    monkeypatch.setattr(files, "fcntl", None)
    monkeypatch.setattr(files, "msvcrt", Msvcrt())
    monkeypatch.setattr(files, "WINDOWS_PAUSE", 0.0)
    files.write_text(tmp_path / "a", "text")
    assert not refusals
    assert (tmp_path / "a").read_text() == "text"
    refusals += [PermissionError(13, "in use")] * files.WINDOWS_ATTEMPTS
    with pytest.raises(files.FileError, match="in use"):
        files.write_text(tmp_path / "a", "text")


@pytest.mark.skipif(os.name != "posix", reason="pipes with a name")
def test_pipes_and_devices_are_errors_and_not_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    os.symlink("/dev/zero", tmp_path / "device")
    for name in ("pipe", "device"):
        with pytest.raises(files.FileError, match="a pipe or device, no file"):
            files.read_file(tmp_path / name)
        with pytest.raises(RunError, match="a pipe or device, no file"):
            read_json(tmp_path / name)
        with pytest.raises(files.FileError, match="it is a folder, a pipe or a device"):
            files.write_text(tmp_path / name, "text")
    assert sorted(os.listdir(tmp_path)) == ["device", "pipe"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"a": 1' + b"0" * 5000 + b"}", b"nul\0"],
)
def test_invalid_json_is_a_file_error(content, tmp_path):
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(RunError, match=r"a\.json cannot be read: .*; delete it and run again"):
        read_json(tmp_path / "a.json")

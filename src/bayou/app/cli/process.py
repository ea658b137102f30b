"""Process behavior of commands: errors as one sentence, signals, warnings and workers."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

from bayou.core.progress import command_line_spelling

HARMLESS = (  # warnings of torch that the user of a command cannot act on; other programs keep them
    "TensorFloat32 tensor cores",  # products stay in float32 unless lower precision is requested
    "\nOnline softmax is disabled",  # affects speed only
    "mkldnn_matmul failed",  # bfloat16 on a processor without it: slower, same result
    "`torch.jit.script_method` is deprecated",  # by torch itself
)


def ignore_harmless_warnings() -> None:
    """Hide these warnings in this process."""
    for start in HARMLESS:
        warnings.filterwarnings("ignore", start)


@contextmanager
def workers(name: str | None) -> Iterator[Any]:
    """Make the executor of ``--executor``.

    Args:
        name: "processes" (one per core), "processes:4", or "module:name" of a function that returns
            an executor; None for this process.
    """
    module, _, suffix = (name or "").partition(":")
    if module != "processes":
        try:
            executor = name and getattr(importlib.import_module(module), suffix)()
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"--executor {name}: neither processes nor a function module:name ({error})"
            ) from error
        yield executor
        return
    if not (suffix or "1").isdigit() or suffix == "0":
        raise ValueError(
            f"--executor {name}: the number of processes must be a whole number of at least 1"
        )
    # Here, so that --help does not wait for them.
    import multiprocessing
    from concurrent.futures import ProcessPoolExecutor

    pool = ProcessPoolExecutor(
        int(suffix or os.cpu_count() or 1), multiprocessing.get_context("spawn"), begin_worker
    )
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def begin_worker() -> None:
    """Prepare a worker: it has one thread, and leaves Ctrl-C to the process that started it."""
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ignore_harmless_warnings()
    command_line_spelling().__enter__()  # until the worker ends


def terminate_like_ctrl_c() -> None:
    """Handle SIGTERM, as sent by schedulers, like Ctrl-C, so that a run saves its state first."""

    def handle(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
            raise KeyboardInterrupt  # a background job of a script ignores SIGINT
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, handle)


class ErrorsAsSentences(TyperGroup):
    """Commands that report user errors as one sentence and exit code 2, instead of a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (ValueError, ImportError) as error:  # an extra that is missing, too
            sentence = str(error)
        except BrokenPipeError:  # `bayou list nets | head`: the reader has closed the pipe
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:  # a full disk, a folder without write permission
            sentence = str(error)
            if error.filename is not None:
                sentence = f"{error.filename}: {error.strerror}"
        typer.secho(f"bayou: {sentence}", fg="red", err=True)
        raise typer.Exit(2)

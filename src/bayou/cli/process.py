"""How the process of a command behaves: errors as a sentence, a signal to end like Ctrl-C, no idle warnings."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from types import FrameType
from typing import Any

import typer
from typer.core import TyperGroup

HARMLESS = (  # warnings of torch that ask nothing of whoever runs a command; a program of one's own keeps them
    "TensorFloat32 tensor cores",  # products stay in float32 unless one asks for less
    "\nOnline softmax is disabled",  # a matter of speed
    "mkldnn_matmul failed",  # bfloat16 on a processor without it: slower, and as right
    "`torch.jit.script_method` is deprecated",  # by torch itself
)


def ignore_harmless_warnings() -> None:
    """Do not show them in this process."""
    for start in HARMLESS:
        warnings.filterwarnings("ignore", start)


def terminate_like_ctrl_c() -> None:
    """What a scheduler sends is the same as Ctrl-C, so that a run saves first."""

    def handle(number: int, frame: FrameType | None) -> None:
        if signal.getsignal(signal.SIGINT) in (signal.SIG_IGN, None):
            raise KeyboardInterrupt  # a job in the background of a script does not hear Ctrl-C
        signal.raise_signal(signal.SIGINT)

    signal.signal(signal.SIGTERM, handle)


class ErrorsAsSentences(TyperGroup):
    """Commands whose errors of the user's world are one sentence and exit code 2, instead of a traceback."""

    def invoke(self, ctx: typer.Context) -> Any:  # type: ignore[override]
        """Run the command."""
        try:
            return super().invoke(ctx)
        except (ValueError, ImportError) as error:  # an extra that is missing, too
            sentence = str(error)
        except BrokenPipeError:  # `bayou list nets | head`: whoever read has gone, and nobody wants a message
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(0) from None
        except OSError as error:  # a disk that is full, a folder that cannot be written to
            sentence = str(error) if error.filename is None else f"{error.filename}: {error.strerror}"
        typer.secho(f"bayou: {sentence}", fg="red", err=True)
        raise typer.Exit(2)

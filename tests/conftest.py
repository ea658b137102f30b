"""What every test begins with, whatever ran before it and however pytest was started."""

from __future__ import annotations

import signal

import pytest
import torch


def pytest_configure() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C; tests that press it want to be heard."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Which tests share a process depends on the number of cores; their random numbers must not."""
    torch.manual_seed(0)

"""What every test begins with, whatever ran before it and however pytest was started."""

from __future__ import annotations

import gc
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest
import torch


def pytest_configure() -> None:
    """A shell lets what it starts in the background ignore Ctrl-C; tests that press it want to be
    heard.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Imports and 6,000 tests are no garbage: to look for some is a quarter of the time of their
    collection.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Two of scikit-learn's checks want pandas, or SCIPY_ARRAY_API=1, and skip themselves
    otherwise.
    """
    for item in items:
        if "sklearn" in item.name and ("not_an_array" in item.name or "array_api" in item.name):
            item.add_marker("peers")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A comparison with a peer that is skipped compares nothing."""
    report = yield
    if report.skipped and item.get_closest_marker("peers"):
        report.outcome = "failed"
    return report


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """Which tests share a process depends on the number of cores; their random numbers must not."""
    torch.manual_seed(0)


def _shorten(patch: pytest.MonkeyPatch) -> None:
    from bayou.select import folds, ratio, regularization_path

    patch.setattr(folds, "SINGLE_FOLD_ROWS", 0)
    patch.setattr(regularization_path, "PASSES", 15)
    patch.setattr(regularization_path, "LOG_PROB_PASSES", 10)
    patch.setattr(ratio, "NOISE_STEPS", (0, -1))
    patch.setattr(ratio, "FIRST_LAYER_DIVISORS", (1.0,))


@pytest.fixture
def short_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fit by name looks for noise and priors on one fold and near where it begins: for tests of
    all around that.
    """
    _shorten(monkeypatch)


@pytest.fixture(scope="module")
def short_searches() -> Iterator[None]:
    """The same for all of a module, what its tests share included."""
    with pytest.MonkeyPatch.context() as patch:
        _shorten(patch)
        yield


@pytest.fixture(scope="session")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run of two methods and two seeds on the digits, for tests that only look at it."""
    from bayou.app.runs.config import Config
    from bayou.app.runs.folder import Run

    folder = tmp_path_factory.mktemp("runs") / "digits"
    run = Run.create(
        folder, Config("digits", ("map", "mnf"), seeds=2, steps=12, samples=6, members=2)
    )
    with pytest.MonkeyPatch.context() as patch:
        _shorten(patch)
        run.work()
    return run

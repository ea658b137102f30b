"""Progress is a bar on a terminal, lines where asked, and silence elsewhere."""

import io
import sys

import pytest

from bayou import progress
from bayou.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _run(show: progress.Show, steps: int = 3) -> None:
    with Progress("fitting", steps, show) as bar:
        for step in range(steps):
            bar.update(step + 1, loss=1.5)


def test_silent_where_nobody_looks(capsys: pytest.CaptureFixture[str]) -> None:
    _run(True)
    _run(False)
    assert capsys.readouterr() == ("", "")


def test_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    _run("plain")
    assert capsys.readouterr() == ("", "fitting 3/3  loss 1.5  0 s left\n")


def test_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    _run(True)
    assert "fitting" in terminal.getvalue()
    assert "3/3" in terminal.getvalue()
    assert "loss 1.5" in terminal.getvalue()


def test_terminal_without_rich_gets_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    _run(True)
    assert terminal.getvalue() == "fitting 3/3  loss 1.5  0 s left\n"


def test_a_bar_inside_a_bar_does_not_stop_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with Progress("outer", 1) as outer:
        _run(True)
        outer.update(1)
    assert "outer" in terminal.getvalue()
    assert "1/1" in terminal.getvalue()


def test_an_error_closes_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with pytest.raises(KeyError), Progress("fitting", 2):
        raise KeyError
    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


def test_bad_show() -> None:
    with pytest.raises(ValueError, match="got 'loud'"):
        Progress("fitting", 2, "loud")  # type: ignore[arg-type]


def test_a_function_hears_of_it_instead(capsys: pytest.CaptureFixture[str]) -> None:
    heard: list[tuple[str, int, int, dict[str, float]]] = []
    _run(lambda title, step, total, fields: heard.append((title, step, total, fields)))
    assert heard[-1] == ("fitting", 3, 3, {"loss": 1.5})
    assert capsys.readouterr() == ("", "")


def test_titles_can_have_a_prefix() -> None:
    heard: list[str] = []
    with progress.prefixed("member 2 of 5:"):
        _run(lambda title, step, total, fields: heard.append(title))
    _run(lambda title, step, total, fields: heard.append(title))
    assert heard[0] == "member 2 of 5: fitting"
    assert heard[-1] == "fitting"

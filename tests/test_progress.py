"""Progress is a bar on a terminal, lines where asked, and silence elsewhere."""

import io
import itertools
import sys

import pytest

from bayou.core import progress
from bayou.core.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def on_terminal(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    return terminal


@pytest.fixture
def now(monkeypatch):
    """The time, in a list of one number."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def _run(show):
    with Progress("fitting", 3, show) as bar:
        for step in range(3):
            bar.update(step + 1, loss=1.5)


def test_no_output_without_a_terminal(capsys):
    _run(True)
    _run(False)
    assert capsys.readouterr() == ("", "")


def test_plain_lines(capsys):
    _run("plain")
    assert capsys.readouterr() == ("", "fitting 3/3  loss 1.5\n")


def test_bar_on_a_terminal(monkeypatch):
    terminal = on_terminal(monkeypatch)
    _run(True)
    for words in ("fitting", "3/3", "loss 1.5"):
        assert words in terminal.getvalue()


def test_terminal_without_rich_gets_lines(monkeypatch):
    terminal = on_terminal(monkeypatch)
    monkeypatch.setattr(progress, "find_spec", lambda name: None)
    _run(True)
    assert terminal.getvalue() == "fitting 3/3  loss 1.5\n"


def test_a_bar_inside_a_bar_does_not_stop_the_work(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with Progress("outer", 1) as outer:
        _run(True)
        outer.update(1)
    for words in ("outer", "1/1"):
        assert words in terminal.getvalue()


def test_an_error_closes_the_bar(monkeypatch):
    terminal = on_terminal(monkeypatch)
    with pytest.raises(KeyError), Progress("fitting", 2):
        raise KeyError
    assert terminal.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


def test_invalid_show_raises():
    with pytest.raises(ValueError, match="got 'loud'"):
        Progress("fitting", 2, "loud")


def test_function_is_called_instead_of_output(capsys):
    heard = []
    _run(lambda *line: heard.append(line))
    assert heard[-1] == ("fitting", 3, 3, {"loss": 1.5, "seconds_left": 0.0})
    assert capsys.readouterr() == ("", "")


def test_stages_are_numbered_and_their_whole_never_decreases():
    heard = []

    def run(title):
        with Progress(
            title, 4, lambda title, step, total, numbers: heard.append((title, numbers.get("done")))
        ) as line:
            line.update(4)
            line.total = 8  # a run that is not flat yet plans more steps
            line.update(8)

    with progress.stage(1, 2):
        run("choosing the prior")
    with progress.stage(2, 2, "held out"):
        run("mode")
        for member in (1, 2):
            with progress.stage(member, 2, unit="member"):
                run("MAP")
        run("curvature")
    run("alone")
    assert [title for title, _ in heard[::2]] == [
        "1 of 2: choosing the prior", "2 of 2: held out, mode", "2 of 2: held out, member 1 of 2: MAP",
        "2 of 2: held out, member 2 of 2: MAP", "2 of 2: held out, curvature", "alone",
    ]  # fmt: skip
    *done, last, again = [share for _, share in heard]
    assert last is again is None  # there are no stages, hence no whole
    assert done == sorted(done)
    assert done[1] == progress.SHARE / 2  # of the first of two stages
    assert done[1] < done[-1] < 1  # whether more follows is not known


def test_a_search_before_the_stages_of_a_fit_leaves_them_a_part():
    """A mode in a stage of its own, then five fits: each of them moves the part that is done."""
    heard = []

    def run():
        with Progress("fitting", 4, lambda *line: heard.append(line[-1]["done"])) as line:
            line.update(4)

    with progress.stage(1, 2):
        run()
    with progress.stage(2, 2):
        with progress.stage(1, 1):
            run()
        for number in range(1, 6):
            with progress.stage(number, 5):
                run()
    steps = [after - before for before, after in itertools.pairwise(heard)]
    assert min(steps) > 0.01  # they were all at 100 %
    assert heard[-1] < progress.MAX_DONE


def test_the_time_that_is_left_is_that_of_the_steps_since_a_run_was_resumed(now):
    heard = []
    with Progress("fitting", 1000, lambda *line: heard.append(line[-1]["seconds_left"])) as line:
        for step in range(900, 1000):
            now[0] += 2.0
            line.update(step + 1)
    assert heard == [2.0 * k for k in range(99, -1, -1)]


def test_the_time_that_is_left_counts_no_preparation_and_every_step(now):
    """A minute before the first steps, which come in pairs, as in a search: not "about 3 h" at 2 of
    360.
    """
    heard = []
    with Progress("searching", 20, lambda *line: heard.append(line[-1]["seconds_left"])) as line:
        now[0] += 60.0
        line.start_clock(360)
        for step in range(2, 361, 2):
            now[0] += 1.0
            line.update(step)
    assert heard == [0.5 * k for k in range(358, -1, -2)]


@pytest.mark.parametrize(
    ("seconds", "text"), [(6.4, "6 s"), (98, "98 s"), (200, "3 min"), (7200, "2 h")]
)
def test_describe_formats_a_line(seconds, text):
    numbers = {"loss": 1.5, "kl": 3.0, "seconds_left": seconds, "done": 0.384}
    assert (
        progress.describe(300, 2000, numbers, 1)
        == f"300/2,000  loss 1.5  about {text}  38 % of the whole"
    )

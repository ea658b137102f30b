"""The output of a run: a line for every event, and the progress of the current job."""

from bayou.app.cli import live
from bayou.app.cli.live import FitBoard
from bayou.app.report.results import Average


def read_lines(capsys):
    return capsys.readouterr().err.splitlines()


def test_lines_without_a_terminal(capsys):
    """One line for each event, however long it is, and one from time to time in between."""
    board = FitBoard(["mnf-0"])
    board.tell("mnf-0", "fitting", {})
    board.show("VI(MNF)", 10, 2000, {"elbo": -3.0})
    board.last_line = -live.LINE
    board.show("VI(MNF)", 20, 2000, {"elbo": -2.0})
    board.tell("mnf-0", "done", dict.fromkeys(live.SHOWN, 0.12345))
    *lines, last = read_lines(capsys)
    assert lines == ["mnf-0: fitting", "mnf-0: VI(MNF) 20/2,000  elbo -2"]
    assert len(last) > 100


def test_the_share_that_is_done_is_that_of_all_jobs(capsys):
    board = FitBoard(["mle-0", "map-0"])
    for name, share in (("map-0", 0.99), ("mle-0", 0.5)):  # MAP is fitted first
        board.tell(name, "fitting", {})
        board.last_line = -live.LINE
        board.show("fit", 5, 10, {"nll": 1.0, "seconds_left": 6.0, "done": share})
        board.tell(name, "done", {})
    assert [line for line in read_lines(capsys) if "of the whole" in line] == [
        "map-0 (1 of 2): fit 5/10  nll 1  about 6 s  49 % of the whole",
        "mle-0 (2 of 2): fit 5/10  nll 1  about 6 s  75 % of the whole",
    ]


def test_unmixed_chains_and_methods_worse_than_map_are_marked(capsys):
    board = FitBoard(["sgld-0", "ffg-0"])
    chains = {"nll": 0.5, "r_hat": 1.61, "ess": 3.6, "mixed": False, "difference_from_map": None}
    board.tell("sgld-0", "done", chains)
    board.tell("ffg-0", "done", {"nll": 0.5, "difference_from_map": Average(0.04, 0.01)})
    board.tell("ffg-1", "failed", {"error": "words"})
    sgld, ffg, failure = read_lines(capsys)
    assert "R-hat 1.61 not mixed" in sgld
    assert "+0.040 ± 0.010 worse" in ffg
    assert failure == "ffg-1: failed"

"""One fit in several processes has the posterior of one process, and files that any can resume."""

import os
import socket
import subprocess
import sys
import time
import warnings

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_module

import bayou
from bayou.core.files import read_file
from bayou.training import ranks as sharing
from bayou.training.ranks import LostRankError, Ranks
from tests.training import processes
from tests.training.processes import (
    EXACT,
    RANDOM,
    SLOW_EXACT,
    SLOW_RANDOM,
    Adapted,
    data,
    mlp,
    predicted,
    run,
    tensors,
)


def free_port():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def environment():
    return os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def run_processes(folder, *arguments, size=2):
    """Start processes as torchrun starts them; return their exit statuses and their stderr."""
    shared = environment() | {
        "WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
    }
    command = [sys.executable, "-W", "ignore", processes.__file__, str(folder), *arguments]
    started = []
    try:
        for rank in range(size):
            variables = shared | {"RANK": str(rank)}
            started.append(
                subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True)
            )
        errors = [process.communicate(timeout=300)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [process.returncode for process in started], errors


def results_of(folder, *arguments, size=2):
    """Return the results of processes."""
    statuses, errors = run_processes(folder, *arguments, size=size)
    assert statuses == [0] * size, errors
    return [torch.load(folder / f"{rank}.pt") for rank in range(size)]


@pytest.fixture(scope="module")
def two(tmp_path_factory):
    """The results of two processes, which one worker of pytest-xdist starts for all workers."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "two"
    try:
        folder.mkdir()
    except FileExistsError:
        until = time.monotonic() + 600
        while not (folder / "ended").exists() and time.monotonic() < until:
            time.sleep(0.1)
    else:
        try:
            results_of(folder)
        finally:
            (folder / "ended").touch()
    return folder, [torch.load(folder / f"{rank}.pt") for rank in range(2)]


def close(one, two):
    torch.testing.assert_close(one, two, rtol=1e-12, atol=1e-12)


def common(results, *keys):
    """Return what all processes have in this place, equal bit for bit."""
    for key in keys:
        results = [found[key] for found in results]
    first, *others = results
    for other in others:
        torch.testing.assert_close(first, other, rtol=0, atol=0)
    return first


@pytest.mark.parametrize("name", EXACT)
def test_two_processes_end_where_one_does(name, two):
    close(common(two[1], "tensors", name), tensors(run(name)))


def test_records_of_the_history_are_of_all_rows(two):
    history = [{k: v for k, v in one.items() if k != "seconds"} for one in run("vi").history]
    for mine, theirs in zip(history, two[1][0]["records"], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-12)


@pytest.mark.parametrize("name", RANDOM)
def test_two_processes_with_noise_of_rows_end_close_to_one(name, two):
    first = common(two[1], "tensors", name)
    whole = tensors(run(name))
    moved = {
        key: (value - first[key]).abs().max()
        for key, value in whole.items()
        if not torch.equal(value, first[key])
    }
    assert moved  # by other noise, or other statistics
    # 12 steps of Adam move a number by 0.012 at most, a log-std by 0.12.
    assert max(moved.values()) < 0.3


def test_predictions_are_shared_and_equal(two):
    # also without a seed, and with fewer rows than processes
    many, _ = common(two[1], "predicted")
    close(many, run("vi").predict(data()[0], samples=4, seed=5).outputs)


def test_processes_with_different_arguments_raise(two):
    for found in two[1]:
        texts = [found["errors"][what] for what in processes.DISAGREE]
        assert all("2 processes of torchrun disagree on the " in text for text in texts)
        for text, part in zip(texts, ("data", "weights", "seed"), strict=True):
            assert f"disagree on the {part};" in text


def test_processes_that_share_draws_end_where_one_does(two):
    close(common(two[1], "draws"), [tensors(run(name)) for name in processes.DRAWS])
    for found in two[1]:  # one call per step, not two
        assert found["calls"] - found["calls with shared draws"] == 12
    assert "2 processes cannot share 3 samples" in two[1][0]["errors"]["samples"]


@pytest.mark.parametrize("name", processes.SHARDED)
def test_a_fit_of_a_network_whose_frozen_part_is_sharded(name, two):
    whole = run(name, net=Adapted())
    close(two[1][0]["sharded"][name][:2], (tensors(whole), predicted(whole)[0]))
    assert torch.equal(two[1][0]["sharded"][name][1], two[1][1]["sharded"][name][1])
    loaded = bayou.load(two[0] / "0.bayou", Adapted())  # of the last fit
    close(two[1][0]["sharded"]["sgld"][1], predicted(loaded)[0])


def test_a_draw_of_a_network_whose_frozen_part_is_sharded(two):
    close(two[1][0]["drawn"], processes.draw_with_gradients(Adapted()))


def test_a_sharded_posterior_trains_by_its_forward_and_is_saved_as_a_whole(two):
    bayesian = bayou.bayesianize(mlp(), bayou.MeanField())
    close(two[1][0]["forward"], processes.forward_gradients(bayesian))
    for found in two[1]:
        assert "q is sharded (fully_shard): use outputs, kl = bnn(x)" in found["errors"]["q"]
    bayou.load(two[0] / "q0.bayou", mlp())


def test_scores_of_a_run_are_those_of_one_process(two):
    for found in two[1]:
        expected = processes.scores(two[0] / "run")
        assert found["scores"] == pytest.approx(expected, rel=1e-5)  # float32


def test_all_processes_end_after_the_same_step_if_one_is_interrupted(two):
    (stopped, first), (other, second) = (found["stopped"] for found in two[1])
    assert stopped == other == "interrupted"
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert read_file(two[0] / "stopped.run")[1]["state"]["step"] == 4
    close(tensors(run("vi", checkpoint=two[0] / "stopped.run")), tensors(run("vi")))


def test_each_process_can_fit_alone(two):
    for rank, found in enumerate(two[1]):
        close(found["alone"], tensors(run("vi", seed=rank)))


def test_only_the_first_process_writes_and_shows_progress(two):
    folder, (first, second) = two
    assert first["written"] == [str(folder / "vi.run")]
    assert second["written"] == []
    assert first["shown"]
    assert not second["shown"]


def test_a_checkpoint_of_two_processes_continues_in_one(two):
    folder, found = two
    file = folder / "vi.run"
    assert found[0]["died"]
    assert found[1]["died"]
    assert read_file(file)[1]["state"]["step"] == 5
    close(tensors(run("vi", checkpoint=file)), tensors(run("vi")))


def test_rows_of_a_batch_are_each_in_one_process():
    x, y = torch.arange(14.0).reshape(7, 2), torch.arange(7)
    for size in (1, 2, 3, 9):
        parts = [Ranks(rank, size).rows(((x, "kept"), y)) for rank in range(size)]
        assert sum(share for _, share in parts) == pytest.approx(1)
        rows = torch.cat([own for (_, own), share in parts if share])
        assert torch.equal(rows.sort().values, y)
        for ((inputs, kept), own), share in parts:
            assert kept == "kept"
            assert torch.equal(inputs, x[own])
            assert share in (0, len(own) / 7)
        if size <= 7:
            rows = [Ranks(rank, size).spread(7) for rank in range(size)]
            assert len({len(own) for own in rows}) == 1
            assert [row for some in zip(*rows, strict=True) for row in some][:7] == list(range(7))


@pytest.fixture
def one_process():
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{free_port()}", rank=0, world_size=1
    )
    yield
    dist.destroy_process_group()


def test_a_sharded_parameter_to_train_raises(one_process):
    # DTensors, as fully_shard makes of parameters.
    net = distribute_module(mlp(), init_device_mesh("cpu", (1,)))
    for call in (
        lambda: bayou.fit(net, data()[:2]),
        lambda: bayou.bayesianize(net, bayou.MeanField()),
    ):
        with pytest.raises(
            ValueError, match="'0.weight' of Sequential is sharded .fully_shard.; freeze it"
        ):
            call()


@pytest.fixture
def three(monkeypatch):
    """This process as rank 0 of three on this machine, of which rank 1 has ended."""
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    here = socket.gethostname()
    monkeypatch.setattr(
        sharing, "_PROCESSES", {0: (here, 0), 1: (here, ended.pid), 2: (here, os.getpid())}
    )
    monkeypatch.setattr(sharing, "_STORES", [dist.HashStore()])

    def fail(*args):
        raise RuntimeError("[pair.cc:547] Connection closed by peer [127.0.0.1]:1234")

    monkeypatch.setattr(dist, "all_reduce", fail)
    return ended


@pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")
def test_the_error_names_the_rank_that_ended_and_the_checkpoint(three, tmp_path):
    file = tmp_path / "fit.run"
    words = "rank 1 of the 3 processes has ended, so that their fit cannot continue"
    with pytest.raises(LostRankError, match=f"^{words}; with bayou.fit") as error:
        Ranks(0, 3).mean([torch.ones(1)], 1.0)
    assert error.value.__suppress_context__  # one sentence, without that of the backend
    with pytest.raises(
        LostRankError, match=f"^{words}; the checkpoint .*fit.run was not written yet"
    ):
        Ranks(0, 3, checkpoint=file).mean([torch.ones(1)], 1.0)
    file.touch()
    with pytest.raises(
        LostRankError, match=f"^{words}; start all of them again to continue from .*fit.run$"
    ):
        Ranks(2, 3, checkpoint=file).differing({"data": "0a"}, torch.device("cpu"))


@pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")
def test_an_error_without_a_lost_rank_stays_as_it_is(three, monkeypatch):
    monkeypatch.setattr(sharing, "LOST_SECONDS", 0.1)
    monkeypatch.setitem(sharing._PROCESSES, 1, (socket.gethostname(), os.getpid()))
    with pytest.raises(RuntimeError, match="Connection closed by peer"):
        Ranks(0, 3).mean([torch.ones(1)], 1.0)
    monkeypatch.setitem(sharing._PROCESSES, 1, ("elsewhere", 1))
    with pytest.raises(LostRankError, match="rank 1 of the 3 processes has ended"):
        Ranks(0, 3).mean([torch.ones(1)], 1.0)


@pytest.mark.parametrize(
    ("method", "work"),
    [
        ("laplace", "the search of noise and prior of a method by name"),
        (bayou.MCLMC(draws=2, warmup=2, steps=2, chains=1), "the chains of MCLMC"),
        (bayou.HMC(draws=2, warmup=2, leapfrogs=2, chains=1), "the chains of HMC"),
        (bayou.Laplace(start=bayou.MAP(steps=2)), "the curvature of Laplace"),
        (bayou.MAP(steps=2), None),
        (bayou.SGLD(steps=4, lr=1e-4, draws=1, chains=1), None),
    ],
)
def test_work_that_is_not_shared_warns_before_it_begins(method, work, monkeypatch):
    first = Ranks(0, 2)
    monkeypatch.setattr(first, "rows", lambda batch: (batch, 1.0))
    monkeypatch.setattr(first, "mean", lambda tensors, share: list(tensors))
    monkeypatch.setattr(first, "any", lambda flag: flag)
    x, y, _ = data()
    target = bayou.network.target.Target.build(mlp(), bayou.Gaussian(0.3, learn=True), None, len(y))
    token = sharing._RANKS.set(first)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("error", ".*do not share", bayou.BayouWarning)
            if work is None:
                method.fit(target, (x, y))
                return
            words = f"the 2 processes of torchrun do not share {work}: each computes all of it"
            with pytest.raises(bayou.BayouWarning, match=words):
                bayou.select.plan(method, target, (x, y)).fit()
    finally:
        sharing._RANKS.reset(token)


def test_work_that_is_not_shared_warns_once_in_the_first_process():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for ranks_of_a_fit in (Ranks(), Ranks(1, 2), Ranks(0, 2)):
            ranks_of_a_fit.note_unshared("the chains")
            ranks_of_a_fit.note_unshared("the curvature")
    (only,) = caught
    assert "do not share the chains" in str(only.message)


# --- slow ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_other_methods_in_three_processes(tmp_path):
    found = results_of(tmp_path, "--slow", size=3)
    for name in SLOW_EXACT + SLOW_RANDOM:
        common(found, name)
    for name in SLOW_EXACT:
        torch.testing.assert_close(found[0][name], tensors(run(name)), rtol=1e-9, atol=1e-9)


@pytest.mark.slow
def test_torchrun_restarts_a_killed_process_and_the_run_resumes(tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    options = ["--max-restarts", "2", "--master-port", str(free_port())]
    command = [*torchrun, *options, processes.__file__, str(tmp_path), "--die", "8"]
    subprocess.run(command, env=environment(), check=True, timeout=300)
    assert read_file(tmp_path / "vi.run")[1]["state"]["step"] == 12
    for rank in range(2):
        close(torch.load(tmp_path / f"{rank}.pt"), tensors(run("vi")))


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="processes of POSIX")
def test_the_other_processes_end_with_an_error_if_one_is_killed(tmp_path):
    statuses, errors = run_processes(tmp_path, "--die", "8", size=3)
    assert statuses[1] < 0
    words = "LostRankError: rank 1 of the 3 processes has ended, so that their fit cannot continue;"
    for rank in (0, 2):
        assert statuses[rank] == 1
        assert errors[rank].count("Traceback") == 1, errors[rank]
        advice = f"start all of them again to continue from the checkpoint {tmp_path / 'vi.run'}"
        assert errors[rank].strip().splitlines()[-1].endswith(f"{words} {advice}")

"""Runs that are killed, interrupted and poisoned: nothing is lost, and nothing bad is kept."""

import itertools
import math
import os
import random
import runpy
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import bayou
from bayou.core.files import read_file
from bayou.likelihoods import Likelihood
from bayou.methods import vi
from bayou.training.checkpoints import Checkpoint
from bayou.training.guards import FiniteCheck, Interrupt

SCRIPT = Path(__file__).with_name("runs.py")
runs = runpy.run_path(str(SCRIPT))
fit_run = runs["fit"]
Died, RUNS, digest, dying, poisoned, result, same, small = (
    runs[name]
    for name in ("Died", "RUNS", "digest", "dying", "poisoned", "result", "same", "small")
)


def spawn(*arguments):
    threads = str(torch.get_num_threads())  # the bits of a product may depend on their number
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": threads}
    return subprocess.Popen([sys.executable, str(SCRIPT), *map(str, arguments)], env=environment)


# --- killed runs -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_dies_inside_an_epoch_goes_on_bit_for_bit(name, tmp_path, monkeypatch):
    whole = result(fit_run(name))
    file = tmp_path / "run.ckpt"
    for step in (11, 6):  # dies twice
        with monkeypatch.context() as patch:
            dying(patch, step)
            with pytest.raises(Died):
                fit_run(name, file)
        at = read_file(file)[1]["state"]["step"]
        assert at % 3 == 0  # a checkpoint of its own, not one of the end of an epoch
    same(result(fit_run(name, file)), whole)
    same(result(fit_run(name, file)), whole)  # a finished run is only read again


@pytest.mark.parametrize("kills", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_a_process_that_is_sigkilled_at_any_moment_goes_on_bit_for_bit(kills, tmp_path):
    file, out = tmp_path / "run.ckpt", tmp_path / "result.pt"
    clock = random.Random(0)
    for _ in range(kills):
        before = digest(file) if file.exists() else None
        process = spawn("loader", file, out, "--slow")
        while process.poll() is None and (not file.exists() or digest(file) == before):
            time.sleep(0.01)
        time.sleep(clock.uniform(0, 0.05))
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
        assert not out.exists()
    assert 0 < read_file(file)[1]["state"]["step"] < 22
    same(result(fit_run("loader", file)), result(fit_run("loader")))


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["loader", "mnf_scheduler", "reinforce"]
)  # all of them die in this process, above
def test_a_process_that_kills_itself_inside_an_epoch_goes_on_bit_for_bit(name, tmp_path):
    file, out = tmp_path / "run.ckpt", tmp_path / "result.pt"
    assert spawn(name, file, out, "--die", 11).wait() == -signal.SIGKILL
    assert spawn(name, file, out).wait() == 0
    same(torch.load(out), result(fit_run(name)))


def test_a_killed_run_loses_no_seconds_and_no_records(tmp_path, monkeypatch):
    file = tmp_path / "run.ckpt"
    with monkeypatch.context() as patch:
        dying(patch, 12)
        with pytest.raises(Died):
            fit_run("adam_dropout", file)
    seconds = [record["seconds"] for record in fit_run("adam_dropout", file).history]
    assert seconds == sorted(seconds)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"seed": 4}, "seed"),
        ({"lr": 0.02}, "method"),
        ({"guide": bayou.MNF()}, "method"),
        ({"steps": 13}, "method"),
        ({"net": nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2))}, "network"),
        ({"net": nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))}, "network"),
        ({"data": (torch.randn(60, 3), torch.zeros(60).long())}, "data"),
        ({"prior": bayou.Normal(2.0)}, "prior"),
        ({"likelihood": bayou.Categorical(class_axis=-2), "data": "images"}, "likelihood"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused_and_named(change, named, tmp_path):
    file = tmp_path / "run.ckpt"
    if change.get("data") == "images":
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Unflatten(1, (1, 2)))
        x, y = runs["classes"]()
        small(net=net, data=(x, y.unsqueeze(1)), checkpoint=file)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2), nn.Unflatten(1, (2, 1)))
        change = {**change, "net": net, "data": (x, y.unsqueeze(1))}
    else:
        small(checkpoint=file)
    before = digest(file)
    with pytest.raises(
        bayou.posteriors.FileError, match=f"another run: another .*{named}.*delete it"
    ) as error:
        small(**({} | change), checkpoint=file)
    assert str(file) in str(error.value)
    assert digest(file) == before


def test_how_often_a_run_is_saved_and_where_its_weights_started_do_not_make_it_another(tmp_path):
    file = tmp_path / "run.ckpt"
    one = small(checkpoint=file)
    two = small(
        net=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        checkpoint=file,
        checkpoint_every=7,
    )
    same(result(one), result(two))


@pytest.mark.parametrize("damage", ["cut", "flip", "foreign", "posterior"])
def test_a_damaged_checkpoint_is_refused_and_kept(damage, tmp_path):
    file = tmp_path / "run.ckpt"
    posterior = small(checkpoint=file)
    content = bytearray(file.read_bytes())
    if damage == "cut":
        content = content[:-10]
    elif damage == "flip":
        content[len(content) // 2] ^= 4
    elif damage == "foreign":
        content = b"hello"
    file.write_bytes(content)
    if damage == "posterior":
        posterior.save(file)
    before = digest(file)
    with pytest.raises(bayou.posteriors.FileError):
        small(checkpoint=file)
    assert digest(file) == before


def test_a_checkpoint_in_a_folder_that_is_not_there_is_an_error_before_the_first_step(
    tmp_path, monkeypatch
):
    dying(monkeypatch, 1)
    with pytest.raises(bayou.posteriors.FileError, match="does not exist; create it"):
        small(checkpoint=tmp_path / "no" / "run.ckpt")


# --- numbers that are not finite -------------------------------------------------------------------------------------


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("gradient", "gradient of log_std of '2.weight'"),
        ("loss", "gradient of"),
        ("detached", "the loss itself"),
    ],
)
def test_a_nan_names_tensor_and_step_and_leaves_the_checkpoint_alone(
    how, named, clip, tmp_path, monkeypatch
):
    file, kept = tmp_path / "run.ckpt", []
    plain = Checkpoint.save

    def save(self, *args):
        plain(self, *args)
        kept.append(digest(file))

    monkeypatch.setattr(Checkpoint, "save", save)
    poisoned(monkeypatch, 7, how)
    with pytest.raises(FloatingPointError, match=f"step 7: .*{named}.* is not finite") as error:
        small(checkpoint=file, checkpoint_every=2, log_every=50, clip=clip)
    assert "smaller lr" in str(error.value)
    assert len(kept) == 3
    assert digest(file) == kept[-1]
    assert read_file(file)[1]["state"]["step"] == 6


class Overflow(torch.optim.SGD):
    """An update that goes to infinity at the third step, from gradients that are finite."""

    count = 0

    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        if self.count == 3:
            self.param_groups[1]["params"][1].data[0] = math.inf


def test_a_parameter_that_overflows_is_never_saved_nor_handed_out(tmp_path):
    file = tmp_path / "run.ckpt"
    with pytest.raises(
        FloatingPointError, match="step 2: the parameter log_std of '0.bias' is not finite"
    ):
        small(optimizer=Overflow, checkpoint=file, checkpoint_every=1)
    assert read_file(file)[1]["state"]["step"] == 2
    with pytest.raises(FloatingPointError, match="step 2: the parameter log_std of '0.bias'"):
        small(optimizer=Overflow, steps=3)
    with pytest.raises(FloatingPointError, match="step 3: the parameter log_std of '0.bias'"):
        small(optimizer=Overflow)


def test_a_learning_rate_that_diverges_stops_the_run():
    with pytest.raises(FloatingPointError, match=r"step \d+: the .* is not finite .*smaller lr"):
        small(lr=1e8, guide=bayou.Delta(), optimizer=torch.optim.SGD, likelihood=bayou.Gaussian(1e-3),
              net=nn.Linear(3, 1), data=(torch.randn(60, 3), torch.randn(60, 1)), steps=200)  # fmt: skip


def test_data_that_turn_nan_during_the_run_are_named():
    x, y = runs["classes"]()

    class Rotting(torch.utils.data.Dataset):
        reads = 0

        def __len__(self):
            return len(x)

        def __getitem__(self, i):
            self.reads += 1
            return x[i] * (math.nan if self.reads > 200 else 1.0), y[i]

    with pytest.raises(
        FloatingPointError, match=r"step \d+: the input x of this batch is not finite"
    ):
        small(data=Rotting())


def test_a_sum_that_overflows_is_no_alarm():
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3e38, 3e38]])
    FiniteCheck(module, torch.device("cpu")).look(
        torch.tensor(1.0), 0, torch.zeros(1), torch.zeros(1)
    )


def test_on_a_device_that_is_not_waited_for_the_first_bad_step_is_the_one_reported():
    module = nn.Linear(2, 2)
    watch = FiniteCheck(module, torch.device("meta"))  # any device but the CPU
    for step, bad in enumerate([0.0, 0.0, math.nan, math.inf, 1.0]):
        module.weight.grad, module.bias.grad = torch.ones(2, 2), torch.full((2,), bad)
        watch.look(torch.tensor(1.0), step, None, torch.zeros(1))
    with pytest.raises(FloatingPointError, match="step 2: the gradient of bias is not finite"):
        watch.read()


# --- Ctrl-C ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["adam_dropout", "sgd_momentum_batchnorm", "reinforce"])
def test_a_keyboard_interrupt_returns_the_posterior_so_far_and_saves(name, tmp_path, monkeypatch):
    file = tmp_path / "run.ckpt"
    with monkeypatch.context() as patch:
        dying(patch, 11, KeyboardInterrupt)
        posterior = fit_run(name, file)
    assert posterior.stopped == "interrupted"
    assert read_file(file)[1]["state"]["step"] == 10
    assert not posterior.bayesian.training
    same(result(fit_run(name, file)), result(fit_run(name)))


def test_an_interrupt_between_forward_and_update_does_not_move_running_statistics_twice(
    tmp_path, monkeypatch
):
    file = tmp_path / "run.ckpt"
    calls, plain = itertools.count(1), vi.EvidenceBound.loss

    def late(self, *args):
        value = plain(self, *args)
        if next(calls) == 11:
            raise KeyboardInterrupt
        return value

    with monkeypatch.context() as patch:
        patch.setattr(vi.EvidenceBound, "loss", late)
        assert fit_run("sgd_momentum_batchnorm", file).stopped == "interrupted"
    same(result(fit_run("sgd_momentum_batchnorm", file)), result(fit_run("sgd_momentum_batchnorm")))


def test_an_interrupt_inside_an_update_is_not_saved(tmp_path):
    file = tmp_path / "run.ckpt"

    class Torn(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            super().step(closure)
            Torn.count += 1
            if Torn.count == 6:
                raise KeyboardInterrupt

    assert small(optimizer=Torn, checkpoint=file, checkpoint_every=4).stopped == "interrupted"
    assert read_file(file)[1]["state"]["step"] == 4
    same(
        result(small(optimizer=Torn, checkpoint=file, checkpoint_every=4)),
        result(small(optimizer=Torn)),
    )


@dataclass(frozen=True)
class Impatient(Likelihood):
    """A Gaussian that has had enough at its sixth call."""

    def bind(self, *, dtype=None, device=None):
        bound, calls = bayou.Gaussian(0.1).bind(dtype=dtype, device=device), itertools.count()
        plain = bound.log_prob

        def log_prob(f, y):
            if next(calls) == 5:
                raise KeyboardInterrupt
            return plain(f, y)

        bound.log_prob = log_prob
        return bound


def test_a_keyboard_interrupt_from_a_likelihood_ends_the_run():
    x, y = runs["curve"]()
    posterior = small(net=nn.Linear(1, 1), data=(x, y), likelihood=Impatient())
    assert posterior.stopped == "interrupted"
    assert [record["step"] for record in posterior.history] == [0, 1, 2, 3, 4]
    assert posterior.predict(x, samples=3).mean.shape == (60, 1)


def test_a_real_sigint_waits_for_the_end_of_the_step(tmp_path):
    file = tmp_path / "run.ckpt"
    x, y = runs["classes"]()
    done = []

    class Network(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            if self.training:
                done.append(len(done))
                if len(done) == 7:  # after a dry run and five steps
                    os.kill(os.getpid(), signal.SIGINT)
                    time.sleep(0.01)  # the signal arrives here
            return out

    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    posterior = small(net=Network(3, 2), data=(x, y), checkpoint=file)
    assert posterior.stopped == "interrupted"
    assert len(posterior.history) == 6  # the step at hand was finished
    assert read_file(file)[1]["state"]["step"] == 6
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.slow
def test_a_process_that_gets_ctrl_c_returns_and_can_be_continued(tmp_path):
    file, out = tmp_path / "run.ckpt", tmp_path / "result.pt"
    process = spawn("adam_dropout", file, out, "--slow")
    while process.poll() is None and not file.exists():
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait() == 0
    assert torch.load(out)["stopped"] == "interrupted"
    assert 0 < read_file(file)[1]["state"]["step"] < 22
    same(result(fit_run("adam_dropout", file)), result(fit_run("adam_dropout")))


def test_a_second_ctrl_c_does_not_wait():
    reached = []

    def twice():
        with Interrupt() as interrupt, interrupt.defer():
            for number in range(3):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)  # the signal arrives here
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == [0]


def test_a_run_in_a_thread_leaves_signals_alone():
    found = []
    thread = threading.Thread(target=lambda: found.append(small().stopped))
    thread.start()
    thread.join()
    assert found == ["finished"]

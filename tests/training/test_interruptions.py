"""Runs that are killed or interrupted, or whose numbers are not finite."""

import itertools
import math
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from torch import nn

import bayou
from bayou.core.files import read_file
from bayou.methods import vi
from bayou.training.checkpoints import Checkpoint
from bayou.training.guards import FiniteCheck, Interrupt
from tests.training import runs
from tests.training.runs import (
    RUNS,
    assert_same,
    classes,
    die_at_call,
    digest,
    fit_run,
    interrupt_at_call,
    poison,
    small,
)


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.ckpt"


def saved_step(file):
    return read_file(file)[1]["state"]["step"]


# --- killed runs ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_dies_inside_an_epoch_resumes_bit_for_bit(name, file):
    whole = fit_run(name)
    die_at_call(11, fit_run, name, file)
    assert saved_step(file) == 9
    resumed = fit_run(name, file)
    assert_same(resumed, whole)
    seconds = [record["seconds"] for record in resumed.history]
    assert seconds == sorted(seconds)
    assert_same(fit_run(name, file), whole)  # a finished run is only read


def test_a_killed_process_resumes_bit_for_bit(tmp_path):
    file = tmp_path / "run.ckpt"
    out = tmp_path / "result.pt"
    threads = str(torch.get_num_threads())  # the bits of a product may depend on their number
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": threads}
    command = [sys.executable, runs.__file__, "loader", str(file), str(out), "--slow"]
    process = subprocess.Popen(command, env=environment)
    while process.poll() is None and not file.exists():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == (-signal.SIGKILL if os.name == "posix" else 1)
    assert not out.exists()
    assert 0 < saved_step(file) < 22
    assert_same(fit_run("loader", file), fit_run("loader"))


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
        ({"likelihood": bayou.Categorical(label_smoothing=0.1)}, "likelihood"),
    ],
)
def test_a_checkpoint_of_another_run_raises(change, named, file):
    small(checkpoint=file)
    before = digest(file)
    with pytest.raises(
        bayou.posteriors.FileError, match=f"another run: another .*{named}.*delete it"
    ) as error:
        small(**change, checkpoint=file)
    assert str(file) in str(error.value)
    assert digest(file) == before


def test_initial_weights_and_checkpoint_every_do_not_identify_a_run(file):
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    assert_same(small(checkpoint=file), small(net=net, checkpoint=file, checkpoint_every=7))


@pytest.mark.parametrize("damage", ["flip", "posterior"])
def test_a_file_that_is_no_checkpoint_raises_and_is_kept(damage, file):
    posterior = small(checkpoint=file)
    if damage == "posterior":
        posterior.save(file)
    else:
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 4
        file.write_bytes(content)
    before = digest(file)
    with pytest.raises(bayou.posteriors.FileError):
        small(checkpoint=file)
    assert digest(file) == before


def test_a_missing_folder_raises_before_the_first_step(tmp_path, monkeypatch):
    interrupt_at_call(monkeypatch, 1)
    with pytest.raises(bayou.posteriors.FileError, match="does not exist; create it"):
        small(checkpoint=tmp_path / "no" / "run.ckpt")


# --- numbers that are not finite ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "named", "clip"),
    [
        ("gradient", "gradient of log_std of '2.weight'", None),
        ("loss", "gradient of", 1.0),
        ("detached", "the loss itself", None),
    ],
)
def test_an_error_names_the_tensor_that_is_nan_and_keeps_the_checkpoint(
    how, named, clip, file, monkeypatch
):
    kept = []
    plain = Checkpoint.save

    def save(self, *args):
        plain(self, *args)
        kept.append(digest(file))

    monkeypatch.setattr(Checkpoint, "save", save)
    poison(monkeypatch, 7, how)
    with pytest.raises(FloatingPointError, match=f"step 7: .*{named}.* is not finite") as error:
        small(checkpoint=file, checkpoint_every=2, log_every=50, clip=clip)
    assert "smaller lr" in str(error.value)
    assert len(kept) == 3
    assert digest(file) == kept[-1]
    assert saved_step(file) == 6


class Overflow(torch.optim.SGD):
    """An update that goes to infinity at the third step, from gradients that are finite."""

    count = 0

    def step(self, closure=None):
        super().step(closure)
        self.count += 1
        if self.count == 3:
            self.param_groups[1]["params"][1].data[0] = math.inf


def test_a_parameter_that_overflows_is_neither_saved_nor_returned(file):
    with pytest.raises(
        FloatingPointError, match="step 2: the parameter log_std of '0.bias' is not finite"
    ):
        small(optimizer=Overflow, checkpoint=file, checkpoint_every=1)
    assert saved_step(file) == 2
    with pytest.raises(FloatingPointError, match="step 2: the parameter log_std of '0.bias'"):
        small(optimizer=Overflow, steps=3)
    with pytest.raises(FloatingPointError, match="step 3: the parameter log_std of '0.bias'"):
        small(optimizer=Overflow)


def test_a_learning_rate_that_diverges_stops_the_run():
    with pytest.raises(FloatingPointError, match=r"step \d+: the .* is not finite .*smaller lr"):
        small(lr=1e8, guide=bayou.Delta(), optimizer=torch.optim.SGD, likelihood=bayou.Gaussian(1e-3),
              net=nn.Linear(3, 1), data=(torch.randn(60, 3), torch.randn(60, 1)), steps=200)  # fmt: skip


def test_an_error_names_data_that_become_nan_during_the_run():
    x, y = classes()

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


def test_an_overflow_of_the_total_norm_does_not_raise():
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3e38, 3e38]])
    FiniteCheck(module, torch.device("cpu")).look(
        torch.tensor(1.0), 0, torch.zeros(1), torch.zeros(1)
    )


def test_the_first_bad_step_on_another_device_is_reported():
    module = nn.Linear(2, 2)
    watch = FiniteCheck(module, torch.device("meta"))  # any device but the CPU
    for step, bad in enumerate([0.0, 0.0, math.nan, math.inf, 1.0]):
        module.weight.grad, module.bias.grad = torch.ones(2, 2), torch.full((2,), bad)
        watch.look(torch.tensor(1.0), step, None, torch.zeros(1))
    with pytest.raises(FloatingPointError, match="step 2: the gradient of bias is not finite"):
        watch.read()


# --- Ctrl-C -------------------------------------------------------------------------------------


def test_a_keyboard_interrupt_saves_and_returns_the_posterior_so_far(file, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt_at_call(patch, 11, KeyboardInterrupt)
        posterior = fit_run("reinforce", file)
    assert posterior.stopped == "interrupted"
    assert saved_step(file) == 10
    assert not posterior.bayesian.training
    assert_same(fit_run("reinforce", file), fit_run("reinforce"))


def test_an_interrupt_after_the_forward_pass_restores_running_statistics(file, monkeypatch):
    calls = itertools.count(1)
    plain = vi.EvidenceBound.loss

    def late(self, *args):
        value = plain(self, *args)
        if next(calls) == 11:
            raise KeyboardInterrupt
        return value

    with monkeypatch.context() as patch:
        patch.setattr(vi.EvidenceBound, "loss", late)
        assert fit_run("sgd_momentum_batchnorm", file).stopped == "interrupted"
    assert_same(fit_run("sgd_momentum_batchnorm", file), fit_run("sgd_momentum_batchnorm"))


def test_an_interrupt_inside_an_update_is_not_saved(file):

    class Torn(torch.optim.SGD):
        count = 0

        def step(self, closure=None):
            super().step(closure)
            Torn.count += 1
            if Torn.count == 6:
                raise KeyboardInterrupt

    assert small(optimizer=Torn, checkpoint=file, checkpoint_every=4).stopped == "interrupted"
    assert saved_step(file) == 4
    assert_same(small(optimizer=Torn, checkpoint=file, checkpoint_every=4), small(optimizer=Torn))


def test_a_real_sigint_waits_for_the_end_of_the_step(file):
    x, y = classes()
    done = []

    class Network(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            if self.training:
                done.append(len(done))
                if len(done) == 7:  # after a dry run and five steps
                    signal.raise_signal(signal.SIGINT)
                    time.sleep(0.01)  # the signal arrives here
            return out

    before = signal.getsignal(signal.SIGINT)
    assert before is signal.default_int_handler
    posterior = small(net=Network(3, 2), data=(x, y), checkpoint=file)
    assert posterior.stopped == "interrupted"
    assert len(posterior.history) == 6  # the step at hand was finished
    assert saved_step(file) == 6
    assert signal.getsignal(signal.SIGINT) is before


def test_a_second_ctrl_c_takes_effect_at_once():
    reached = []

    def twice():
        with Interrupt() as interrupt, interrupt.defer():
            for number in range(3):
                signal.raise_signal(signal.SIGINT)
                time.sleep(0.01)  # the signal arrives here
                reached.append(number)

    with pytest.raises(KeyboardInterrupt):
        twice()
    assert reached == [0]


def test_a_run_in_a_thread_installs_no_signal_handler():
    stopped = []
    thread = threading.Thread(target=lambda: stopped.append(small().stopped))
    thread.start()
    thread.join()
    assert stopped == ["finished"]

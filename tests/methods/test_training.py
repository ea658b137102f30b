"""The training loop: runs that are killed, interrupted, poisoned and repeated."""

import hashlib
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
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from torch import nn

import bayou
from bayou.guides.bayesian import Bayesian
from bayou.likelihoods import Likelihood
from bayou.methods import data as data_module
from bayou.methods import vi
from bayou.methods.checkpoints import Checkpoint, State
from bayou.methods.guards import Interrupt, Watch
from bayou.methods.training import SCHEDULES, parameter_groups
from bayou.posteriors.files import read_file
from bayou.target import Target

SCRIPT = Path(__file__).with_name("runs.py")
runs = runpy.run_path(str(SCRIPT))
RUNS, fit_run, result, same = runs["RUNS"], runs["fit"], runs["result"], runs["same"]


class Died(BaseException):
    """A process that ends without a chance to clean up."""


def dying(monkeypatch, step, error=Died):
    """The loss of call number ``step`` never comes back."""
    calls, plain = itertools.count(1), vi.Objective.__call__

    def watched(self, *args):
        if next(calls) == step:
            raise error
        return plain(self, *args)

    monkeypatch.setattr(vi.Objective, "__call__", watched)


def spawn(*arguments):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(SCRIPT), *map(str, arguments)], env=environment)


def digest(path):
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def small(net=None, **changes):
    """A quick classification fit."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) if net is None else net
    options = {"data": runs["classes"](), "seed": 0, "progress": False, "checkpoint": None, "likelihood": None}
    options |= {key: changes.pop(key) for key in list(changes) if key in options or key == "prior"}
    method = bayou.VI(changes.pop("guide", bayou.FFG()), **({"steps": 12, "batch_size": 16, "log_every": 1} | changes))
    return bayou.fit(net, options.pop("data"), method=method, **options)


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


@pytest.mark.parametrize("kills", [1, pytest.param(4, marks=pytest.mark.slow)])
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
    assert spawn("loader", file, out).wait() == 0
    same(torch.load(out), result(fit_run("loader")))


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
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
    with pytest.raises(bayou.FileError, match=f"another run: another .*{named}.*delete it") as error:
        small(**({} | change), checkpoint=file)
    assert str(file) in str(error.value)
    assert digest(file) == before


def test_how_often_a_run_is_saved_and_where_its_weights_started_do_not_make_it_another(tmp_path):
    file = tmp_path / "run.ckpt"
    one = small(checkpoint=file)
    two = small(net=nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), checkpoint=file, checkpoint_every=7)
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
    with pytest.raises(bayou.FileError):
        small(checkpoint=file)
    assert digest(file) == before


def test_a_checkpoint_in_a_folder_that_is_not_there_is_an_error_before_the_first_step(tmp_path, monkeypatch):
    dying(monkeypatch, 1)
    with pytest.raises(bayou.FileError, match="does not exist; create it"):
        small(checkpoint=tmp_path / "no" / "run.ckpt")


# --- numbers that are not finite -------------------------------------------------------------------------------------


class Poison(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def poisoned(monkeypatch, step, how, guide=2):
    calls, plain = itertools.count(), vi.Objective.__call__

    def watched(self, x, y, beta):
        value, report = plain(self, x, y, beta)
        if next(calls) == step:
            log_std = self.bayesian.guides[guide].log_std
            value = value * math.nan if how == "loss" else value + 0 * Poison.apply(log_std).sum()
            if how == "detached":
                value = torch.full_like(value, math.inf).requires_grad_()
        return value, report

    monkeypatch.setattr(vi.Objective, "__call__", watched)


@pytest.mark.parametrize("clip", [None, 1.0])
@pytest.mark.parametrize(
    ("how", "named"),
    [("gradient", "gradient of log_std of '2.weight'"), ("loss", "gradient of"), ("detached", "the loss itself")],
)
def test_a_nan_names_tensor_and_step_and_leaves_the_checkpoint_alone(how, named, clip, tmp_path, monkeypatch):
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
    with pytest.raises(FloatingPointError, match="step 2: the parameter log_std of '0.bias' is not finite"):
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
            return x[i] * (math.nan if self.reads > 120 else 1.0), y[i]

    with pytest.raises(FloatingPointError, match=r"step \d+: the input x of this batch is not finite"):
        small(data=Rotting())


def test_a_sum_that_overflows_is_no_alarm():
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[3e38, 3e38]])
    Watch(module, torch.device("cpu")).look(torch.tensor(1.0), 0, torch.zeros(1), torch.zeros(1))


def test_on_a_device_that_is_not_waited_for_the_first_bad_step_is_the_one_reported():
    module = nn.Linear(2, 2)
    watch = Watch(module, torch.device("meta"))  # any device but the CPU
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


def test_an_interrupt_between_forward_and_update_does_not_move_running_statistics_twice(tmp_path, monkeypatch):
    file = tmp_path / "run.ckpt"
    calls, plain = itertools.count(1), vi.Objective.__call__

    def late(self, *args):
        value = plain(self, *args)
        if next(calls) == 11:
            raise KeyboardInterrupt
        return value

    with monkeypatch.context() as patch:
        patch.setattr(vi.Objective, "__call__", late)
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
    same(result(small(optimizer=Torn, checkpoint=file, checkpoint_every=4)), result(small(optimizer=Torn)))


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
                if len(done) == 6:
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
        with Interrupt() as interrupt, interrupt.held():
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


# --- early stopping --------------------------------------------------------------------------------------------------


def test_early_stopping_keeps_the_best_and_says_so(monkeypatch):
    scores = iter([3.0, 1.0, 2.0, 2.5, 9.0, 9.0])
    kept = []

    def watched(bayesian):
        kept.append({name: value.clone() for name, value in bayesian.state_dict().items()})

    monkeypatch.setattr(vi, "fixed_draws", watched)
    monkeypatch.setattr(vi, "validation_loss", lambda target, held, call, stack: next(scores))
    posterior = small(validation=0.2, patience=2, steps=500)
    assert posterior.stopped == "early"
    assert len(kept) == 4
    for name, value in posterior.bayesian.state_dict().items():
        assert torch.equal(value, kept[1][name])
    assert [r["validation"] for r in posterior.history if "validation" in r] == [3.0, 1.0, 2.0, 2.5]


def test_validation_is_the_held_out_negative_log_predictive_density_and_is_never_trained_on():
    posterior = small(validation=0.25, steps=6)
    assert posterior.target.n == 45
    x, y = runs["classes"]()
    rows = data_module.as_data((x, y), 16)
    _, held = rows.split(0.25, vi.part_seed(0, "validation"))
    xs, ys = next(data_module.Rows(held.source, held.index, held.n).ordered())
    p = posterior.sample(8, seed=0)
    outputs = torch.stack([posterior.call({k: v[s] for k, v in p.items()}, xs) for s in range(8)])
    expected = -bayou.Predictive(posterior.target.likelihood, outputs).log_prob(ys).mean()
    best = min(record["validation"] for record in posterior.history if "validation" in record)
    assert best == pytest.approx(float(expected), rel=1e-5)
    assert len(set(held.index.tolist())) == 15


def test_a_validation_split_that_leaves_nothing_is_refused():
    with pytest.raises(ValueError, match="leaves none on one side"):
        small(validation=0.001)


# --- what a step does ------------------------------------------------------------------------------------------------


def recorded(monkeypatch):
    """The learning rates of every step, group by group, and the norm of its gradient."""
    rates, norms = [], []

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            rates.append([group["lr"] for group in self.param_groups])
            gradients = [p.grad for g in self.param_groups for p in g["params"] if p.grad is not None]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            return super().step(closure)

    return Recorder, rates, norms


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_schedules_move_both_rates(schedule, monkeypatch):
    recorder, rates, _ = recorded(monkeypatch)
    small(optimizer=recorder, schedule=schedule, lr=0.01, scale_lr=0.05, steps=20)
    for t, (lr, scale_lr) in enumerate(rates):
        factor = {
            "constant": 1.0,
            "linear": 1 - t / 20,
            "cosine": math.cos(math.pi * t / 40) ** 2,
            "tail": min(1.0, 4 * (1 - t / 20)),
        }[schedule]
        assert lr == pytest.approx(0.01 * factor)
        assert scale_lr == pytest.approx(0.05 * factor)


def test_a_torch_scheduler_advances_at_every_step(monkeypatch):
    recorder, rates, _ = recorded(monkeypatch)
    small(optimizer=recorder, schedule=lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.1), lr=0.01, steps=12)
    assert [lr for lr, _ in rates] == pytest.approx([0.01] * 4 + [0.001] * 4 + [0.0001] * 4)


def test_a_scheduler_that_waits_for_a_number_is_refused():
    with pytest.raises(ValueError, match="ReduceLROnPlateau"):
        small(schedule=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(ValueError, match="torch LR scheduler, got"):
        small(schedule=lambda optimizer: 3)


def test_scale_lr_is_ten_times_lr_and_moves_the_log_stds_only():
    torch.manual_seed(0)
    bayesian = Bayesian(nn.Linear(3, 2), bayou.FFG())
    rest, scales = parameter_groups(bayesian, 0.1, 1.0)
    assert [id(p) for p in rest["params"]] == [id(g.center) for g in bayesian.guides]
    assert [id(p) for p in scales["params"]] == [id(g.log_std) for g in bayesian.guides]
    assert (rest["lr"], scales["lr"]) == (0.1, 1.0)
    frozen = small(lr=1e-12, scale_lr=0.1)
    start = small(lr=1e-12, scale_lr=1e-12)
    for one, two in zip(frozen.bayesian.guides, start.bayesian.guides, strict=True):
        assert (one.center - two.center).abs().max() < 1e-9
        assert (one.log_std - two.log_std).abs().max() > 0.1


@pytest.mark.parametrize(
    ("guide", "prior", "scales"),
    [
        (bayou.Dropout(rate="concrete"), bayou.Normal(1.0), {"logit_p"}),
        (bayou.FFG(), bayou.Normal(1.0, learn=True), {"log_std", "log_scale"}),
        (bayou.FFG(), bayou.ScaleMixture(learn=True), {"log_std", "log_scale1", "log_scale2"}),
    ],
)
def test_rates_and_scales_of_priors_are_scale_parameters_too(guide, prior, scales):
    bayesian = Bayesian(nn.Linear(3, 2), guide, prior)
    _, group = parameter_groups(bayesian, 0.1, 1.0)
    names = {id(p): name.rpartition(".")[2] for name, p in bayesian.named_parameters()}
    assert {names[id(p)] for p in group["params"]} == scales


@pytest.mark.parametrize(
    "optimizer",
    [
        torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.NAdam,
        torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RAdam, torch.optim.Rprop,
    ],
)  # fmt: skip
def test_any_optimizer_trains_and_resumes(optimizer, tmp_path, monkeypatch):
    whole = small(optimizer=optimizer, lr=1e-3)
    with monkeypatch.context() as patch:
        dying(patch, 8)
        with pytest.raises(Died):
            small(optimizer=optimizer, lr=1e-3, checkpoint=tmp_path / "c", checkpoint_every=5)
    same(result(small(optimizer=optimizer, lr=1e-3, checkpoint=tmp_path / "c", checkpoint_every=5)), result(whole))


def test_optimizers_that_cannot_be_used_are_refused():
    with pytest.raises(ValueError, match="LBFGS"):
        small(optimizer=lambda groups: torch.optim.LBFGS(groups[0]["params"]))
    with pytest.raises(ValueError, match="must return a torch optimizer, got list"):
        small(optimizer=list)


def test_clip_bounds_the_norm_of_the_gradient(monkeypatch):
    recorder, _, norms = recorded(monkeypatch)
    small(optimizer=recorder)
    assert max(norms) > 0.05
    norms.clear()
    small(optimizer=recorder, clip=0.05)
    assert max(norms) <= 0.05 * (1 + 1e-5)


def objective(guide, samples=1, net=None, features=3):
    """−ELBO/N in float64 for 8 rows, its network, and the rows."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = (nn.Linear(3, 1) if net is None else net).double()
    x = torch.randn(8, features, generator=generator, dtype=torch.float64)
    y = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    target = Target.build(net, bayou.Gaussian(0.5), None, 8)
    bayesian = Bayesian(net, guide, target.prior, (x,))
    baseline = vi.Baseline(next(bayesian.parameters()))
    return vi.Objective(target, bayesian, baseline, samples), bayesian, x, y


def test_the_gradient_of_a_minibatch_is_that_of_all_data_on_average():
    loss, bayesian, x, y = objective(bayou.Delta(penalty=True))
    one = torch.ones((), dtype=torch.float64)

    def gradient(rows):
        bayesian.zero_grad()
        loss(x[rows], y[rows], one)[0].backward()
        return torch.cat([p.grad.flatten() for p in bayesian.parameters()])

    full = gradient(list(range(8)))
    for size in (1, 2, 3):
        parts = [gradient(list(rows)) for rows in itertools.combinations(range(8), size)]
        assert torch.allclose(torch.stack(parts).mean(0), full, atol=1e-12)


def test_an_epoch_of_unequal_batches_is_unbiased_too():
    rows = data_module.as_data((torch.arange(10.0).unsqueeze(1), torch.arange(10)), 4)
    assert [len(y) for _, y in rows.epoch(0)] == [4, 4, 2]
    counts = torch.zeros(3, 10)
    for seed in range(600):
        for number, (_, y) in enumerate(rows.epoch(seed)):
            counts[number, y] += 10 / len(y) / 600  # N/M, once per row
    assert (counts - 1).abs().max() < 6 * math.sqrt(4 / 600)


@pytest.mark.parametrize("guide", [bayou.FFG(std=0.3), bayou.FFG(std=0.3, local=False), bayou.MNF(std=0.3)])
def test_beta_scales_the_kl_in_the_loss_and_never_in_the_report(guide):
    loss, _, x, y = objective(guide, samples=3)
    values = []
    for beta in (0.0, 0.5, 1.0):
        torch.manual_seed(1)
        value, report = loss(x, y, torch.tensor(beta, dtype=torch.float64))
        assert float(report["elbo"]) == pytest.approx(float(report["log_likelihood"] - report["kl"]), rel=1e-12)
        assert float(-8 * value.detach()) == pytest.approx(
            float(report["log_likelihood"] - beta * report["kl"]), rel=1e-12
        )
        values.append({name: float(number) for name, number in report.items()})
    assert values[0] == values[1] == values[2]


def test_warmup_raises_beta_from_nothing(monkeypatch):
    seen, plain = [], vi.Objective.__call__

    def watched(self, x, y, beta):
        seen.append(float(beta))
        return plain(self, x, y, beta)

    monkeypatch.setattr(vi.Objective, "__call__", watched)
    small(beta=0.5, warmup=0.5, steps=12)
    assert seen == pytest.approx([0.5 * min(1, (t + 1) / 6) for t in range(12)])


def test_tempering_widens_or_narrows_the_posterior():
    x, y = runs["curve"]()

    def width(beta):
        posterior = small(net=nn.Linear(1, 1), data=(x, y), likelihood=bayou.Gaussian(0.5), beta=beta, steps=200,
                          lr=0.02, scale_lr=0.05, batch_size=60, samples=32)  # fmt: skip
        return posterior.bayesian.guides[0].log_std.exp().item()

    cold, warm = width(0.1), width(1.0)
    precision = float((x**2).sum()) / 0.25  # of the likelihood; q's variance is β/(precision + β)
    assert cold == pytest.approx(math.sqrt(0.1 / (precision + 0.1)), rel=0.05)
    assert warm == pytest.approx(math.sqrt(1 / (precision + 1)), rel=0.05)


def test_more_samples_per_step_lower_the_variance_of_the_gradient():
    def variance(samples):
        loss, bayesian, x, y = objective(bayou.FFG(std=0.5), samples)
        found = []
        for seed in range(100):
            torch.manual_seed(seed)
            bayesian.zero_grad()
            loss(x, y, torch.ones((), dtype=torch.float64))[0].backward()
            found.append(torch.cat([p.grad.flatten() for p in bayesian.parameters()]))
        return float(torch.stack(found).var(0).sum())

    assert variance(1) / variance(8) == pytest.approx(8, rel=0.5)


def test_history_has_log_likelihood_kl_and_elbo_in_nats_at_every_logging_step():
    posterior = small(steps=23, log_every=5)
    assert [record["step"] for record in posterior.history] == [0, 5, 10, 15, 20, 22]
    for record in posterior.history:
        assert record["elbo"] == pytest.approx(record["log_likelihood"] - record["kl"], rel=1e-5)
        assert record["kl"] > 0 > record["log_likelihood"]
        assert record["seconds"] >= 0
        assert set(record) == {"step", "elbo", "log_likelihood", "kl", "seconds"}
    first = posterior.history[0]
    assert first["log_likelihood"] == pytest.approx(-60 * math.log(2), rel=0.3)  # a sum over all 60, from 16 of them


# --- REINFORCE -------------------------------------------------------------------------------------------------------


ONE = torch.ones((), dtype=torch.float64)


def enumerated(monkeypatch, loss, bayesian, x, y, masks):
    """E[gradient of the rates] over every mask, each with its probability: exact, no Monte Carlo.

    ``masks``: guide → shape (n, *units) of the uniforms that one loss draws for it.
    """
    sizes = [math.prod(shape) for shape in masks.values()]
    rates = [torch.sigmoid(guide.logit_p.detach()) for guide in masks]
    order, drawn = list(masks), []

    def uniform(n, event, like, seed=None, start=0):
        shape = (n, *event)
        guide = order[len(drawn)]
        assert shape == masks[guide]
        drawn.append(guide)
        begin = sum(sizes[: len(drawn) - 1])
        return torch.tensor(bits[begin : begin + sizes[len(drawn) - 1]], dtype=torch.float64).reshape(shape)

    monkeypatch.setattr("bayou.guides.dropout.rng.uniform", uniform)
    mean, second = 0.0, 0.0
    for bits in itertools.product([0.0, 1.0], repeat=sum(sizes)):  # u = 0 keeps, u = 1 drops
        drawn.clear()
        prob, begin = 1.0, 0
        for size, rate in zip(sizes, rates, strict=True):
            dropped = sum(bits[begin : begin + size])
            prob *= float(rate**dropped * (1 - rate) ** (size - dropped))
            begin += size
        bayesian.zero_grad()
        loss(x, y, ONE)[0].backward()
        gradient = torch.stack([guide.logit_p.grad for guide in order])
        mean, second = mean + prob * gradient, second + prob * gradient.square()
    return mean, second - mean.square()


def exact(loss, bayesian, guides, value):
    """The gradient of −ELBO/N in the rates, through E[log-likelihood] = Σ_masks P(mask)·log-likelihood(mask).

    ``value(masks, kept)``: the log-likelihood of all data for one mask (units,) per guide.
    """
    logits = [guide.logit_p.detach().clone().requires_grad_() for guide in guides]
    kept = [torch.sigmoid(-logit) for logit in logits]
    units = [guide.center.numel() if guide.axis is None else guide.center.shape[guide.axis] for guide in guides]
    total = 0.0
    for bits in itertools.product([0.0, 1.0], repeat=sum(units)):
        masks = torch.tensor(bits, dtype=torch.float64).split(units)
        prob = math.prod(torch.prod(k**m * (1 - k) ** (1 - m)) for k, m in zip(kept, masks, strict=True))
        total = total + prob * value(masks, kept)
    kl = sum(guide._kl(count) for guide, count in zip(guides, units, strict=True))
    of_kl = torch.stack(torch.autograd.grad(kl, [guide.logit_p for guide in guides]))
    return (of_kl - torch.stack(torch.autograd.grad(total, logits))) / loss.target.n


def dropped(per, samples, rows=8, features=3):
    loss, bayesian, x, y = objective(bayou.Dropout(0.3, per=per, rate="reinforce"), samples, net=nn.Linear(features, 1))
    x, y = x[:rows], y[:rows]
    guide, bias = bayesian.guides

    def value(masks, kept):
        weight = guide.center.detach() * masks[0] / kept[0]
        return loss.target.log_likelihood(bayesian.call({"weight": weight, "bias": bias.value.detach()}, x), y)

    return loss, bayesian, x, y, exact(loss, bayesian, [guide], value)


@pytest.mark.parametrize("samples", [1, 2])
def test_the_score_function_gradient_of_the_rate_is_unbiased(samples, monkeypatch):
    loss, bayesian, x, y, truth = dropped("weight", samples)
    loss.baseline.settle({"reward": torch.tensor(-2.0, dtype=torch.float64)})
    mean, _ = enumerated(monkeypatch, loss, bayesian, x, y, {bayesian.guides[0]: (samples, 1, 3)})
    assert torch.allclose(mean, truth, atol=1e-12)
    assert truth.abs() > 1e-3


@pytest.mark.parametrize(("samples", "rows"), [(1, 2), (2, 1), (1, 1)])
def test_the_score_function_gradient_is_unbiased_with_a_mask_per_example(samples, rows, monkeypatch):
    loss, bayesian, x, y, truth = dropped("unit", samples, rows)
    assert bayesian.per_example
    mean, _ = enumerated(monkeypatch, loss, bayesian, x, y, {bayesian.guides[0]: (samples * rows, 3)})
    assert torch.allclose(mean, truth, atol=1e-12)  # rows are independent, so a mask for each is the same on average


def test_masks_per_example_and_per_draw_go_together(monkeypatch):
    net = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1))
    rules = {
        "0.weight": bayou.Dropout(0.3, per="unit", rate="reinforce"),
        "2.weight": bayou.Dropout(0.4, per="weight", rate="reinforce"),
        "*": bayou.Delta(),
    }
    loss, bayesian, x, y = objective(rules, 2, net=net, features=1)
    x, y = x[:2], y[:2]
    means = {name: value.detach() for name, value in bayesian.mean().items()}

    def value(masks, kept):
        first, last = means["0.weight"] * masks[0] / kept[0], means["2.weight"] * masks[1] / kept[1]
        return loss.target.log_likelihood(bayesian.call(means | {"0.weight": first, "2.weight": last}, x), y)

    one, two = bayesian.guides[0], bayesian.guides[2]
    truth = exact(loss, bayesian, [one, two], value)
    mean, _ = enumerated(monkeypatch, loss, bayesian, x, y, {one: (4, 1), two: (2, 1, 2)})
    assert torch.allclose(mean, truth, atol=1e-12)


def test_rows_that_touch_one_another_share_their_reward(monkeypatch):
    net = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1, affine=False))
    rules = {"0.weight": bayou.Dropout(0.3, per="unit", rate="reinforce"), "*": bayou.Delta()}
    loss, bayesian, x, y = objective(rules, net=net, features=2)
    x, y = x[:3], y[:3]
    guide = bayesian.guides[0]
    logit = guide.logit_p.detach().clone().requires_grad_()
    kept, total = torch.sigmoid(-logit), 0.0
    for bits in itertools.product([0.0, 1.0], repeat=6):
        mask = torch.tensor(bits, dtype=torch.float64).reshape(3, 2)
        prob = torch.prod(kept**mask * (1 - kept) ** (1 - mask))
        f = (x * mask / kept) @ guide.center.detach().T + bayesian.guides[1].value.detach()
        f = (f - f.mean(0)) / (f.var(0, unbiased=False) + 1e-5).sqrt()
        total = total + prob * loss.target.log_likelihood(f, y)
    truth = -torch.autograd.grad(total, logit)[0] / 8 + torch.autograd.grad(guide._kl(2), guide.logit_p)[0] / 8
    mean, _ = enumerated(monkeypatch, loss, bayesian, x, y, {guide: (3, 2)})
    assert torch.allclose(mean, truth, atol=1e-10)


def test_the_baseline_lowers_the_variance(monkeypatch):
    def variance(samples, settled):
        loss, bayesian, x, y, _ = dropped("weight", samples)
        if settled:
            with torch.no_grad():
                rewards = [loss(x, y, ONE)[1]["reward"] for _ in range(50)]
            for reward in rewards:
                loss.baseline.settle({"reward": reward})
        with monkeypatch.context() as patch:
            return float(enumerated(patch, loss, bayesian, x, y, {bayesian.guides[0]: (samples, 1, 3)})[1])

    assert variance(1, True) < 0.5 * variance(1, False)
    assert variance(2, False) < 0.5 * variance(1, False)


def test_the_running_baseline_follows_the_reward_and_starts_at_the_first_one():
    baseline = vi.Baseline(torch.zeros((), dtype=torch.float64))
    assert float(baseline.value) == 0
    baseline.settle({"reward": torch.tensor(-3.0, dtype=torch.float64)})
    assert float(baseline.value) == pytest.approx(-3)
    for _ in range(200):
        baseline.settle({"reward": torch.tensor(5.0, dtype=torch.float64)})
    assert float(baseline.value) == pytest.approx(5)
    before = float(baseline.value)
    baseline.settle({"kl": torch.tensor(1.0)})  # a family without discrete choices
    assert float(baseline.value) == before


def test_a_learned_rate_moves_and_the_reward_is_not_in_the_history():
    posterior = small(guide=bayou.Dropout(0.5, rate="reinforce"), steps=60, lr=0.01)
    moved = posterior.bayesian.guides[0].logit_p.detach()
    assert abs(float(moved)) > 0.1
    assert "reward" not in posterior.history[0]


# --- randomness and the user's things --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["adam_dropout", "mnf_scheduler", "loader", "dataset", "loader_generator", "validation"]
)
def test_a_fit_leaves_the_global_streams_alone_and_repeats_itself(name):
    torch.manual_seed(7)
    one = result(fit_run(name))
    state = torch.get_rng_state()
    net, data, options = RUNS[name]()
    torch.set_rng_state(state)
    generator = getattr(data, "generator", None)
    own = None if generator is None else generator.get_state()
    bayou.fit(net, data, seed=3, progress=False, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert own is None or torch.equal(generator.get_state(), own)
    same(result(fit_run(name)), one)
    other = result(fit_run(name, seed=4))
    assert any(not torch.equal(v, other["tensors"][k]) for k, v in one["tensors"].items() if "center" in k)


def test_the_same_seed_whatever_the_global_stream_says():
    x, y = runs["classes"]()
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    found = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        method = bayou.VI(bayou.MNF(), steps=5)
        found.append(result(bayou.fit(net, (x, y), method=method, progress=False)))
    same(*found)


def test_the_users_network_is_not_changed():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    posterior = small(net=net)
    posterior.predict(torch.randn(5, 3), samples=2)
    bayou.elbo(posterior, runs["classes"](), samples=2)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert modes == [module.training for module in net.modules()]
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    moved = posterior.net.state_dict()["1.running_mean"]
    assert not torch.equal(moved, before["1.running_mean"])  # the posterior has statistics of its own


@pytest.mark.parametrize("seed", [None, 1.5, "0", True])
def test_a_seed_must_be_a_whole_number(seed):
    with pytest.raises(ValueError, match="seed of a run must be a whole number"):
        small(seed=seed)


def test_seeds_may_be_of_any_size_and_of_numpy():
    import numpy as np

    same(result(small(seed=np.int64(3))), result(small(seed=3)))
    assert small(seed=-(2**70)).stopped == "finished"


# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "steps": 1}, "give epochs or steps, not both"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"samples": True}, "samples must be a whole number"),
        ({"lr": -1.0}, "lr must be positive, got -1.0"),
        ({"scale_lr": math.nan}, "scale_lr must be positive"),
        ({"clip": 0}, "clip must be positive"),
        ({"beta": -1}, "beta >= 0"),
        ({"warmup": 2}, "warmup <= 1"),
        ({"validation": 1.0}, "validation < 1"),
        ({"patience": 3}, "set validation"),
        ({"schedule": "cosin"}, "one of constant, linear, cosine, tail"),
        ({"guide": bayou.MNF}, "must be a family such as MNF"),
        ({"guide": None}, "must be a family such as MNF"),
        ({"guide": {}}, "must be a family such as MNF"),
        ({"guide": {"*": 3}}, "must be a family such as MNF"),
    ],
)
def test_arguments_that_make_no_sense_are_refused_at_once(options, message):
    with pytest.raises(ValueError, match=message):
        bayou.VI(**options)


def test_what_fit_is_given_is_checked():
    net, data = nn.Linear(3, 2), runs["classes"]()
    with pytest.raises(ValueError, match="method must be a Method such as VI"):
        bayou.fit(net, data, method=bayou.VI)
    with pytest.raises(ValueError, match="net must be an nn.Module"):
        bayou.fit(lambda x: x, data)
    with pytest.raises(ValueError, match="likelihood must be a Likelihood"):
        bayou.fit(net, data, likelihood="gaussian")
    with pytest.raises(ValueError, match="has no parameters"):
        bayou.fit(nn.ReLU(), data)


def test_how_long_a_run_is():
    rows = data_module.as_data((torch.zeros(100, 1), torch.zeros(100)), 10)
    assert bayou.VI().total_steps(rows) == 2000
    assert bayou.VI(epochs=3).total_steps(rows) == 30
    assert bayou.VI(steps=7).total_steps(rows) == 7
    many = data_module.as_data((torch.zeros(10_000, 1), torch.zeros(10_000)), 10)
    assert bayou.VI().total_steps(many) == 10_000


def test_the_progress_line_has_a_title_and_elbo_nll_kl(capsys, monkeypatch):
    monkeypatch.setattr("bayou.progress.LINE", 0.0)
    small(guide={"*.weight": bayou.MNF(), "*": bayou.Delta()}, progress="plain")
    line = capsys.readouterr().err.splitlines()[-1]
    for part in ("VI(*.weight: MNF, *: Delta) 12/12", "elbo ", "nll ", "kl "):
        assert part in line


# --- compile ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_compiled_run_learns_repeats_itself_and_resumes(tmp_path, monkeypatch):
    options = {"compile": True, "steps": 10, "batch_size": 20, "guide": bayou.MNF()}
    one = small(**options)
    plain = small(**(options | {"compile": False}))
    assert one.history[0]["kl"] == pytest.approx(plain.history[0]["kl"], rel=0.1)
    same(result(small(**options)), result(one))
    with monkeypatch.context() as patch:
        plain_save, count = Checkpoint.save, itertools.count()

        def save(self, *args):
            plain_save(self, *args)
            if next(count) == 1:
                raise Died

        patch.setattr(Checkpoint, "save", save)
        with pytest.raises(Died):
            small(**options, checkpoint=tmp_path / "c", checkpoint_every=2)
    same(result(small(**options, checkpoint=tmp_path / "c", checkpoint_every=2)), result(one))


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize("name", ["adam_dropout", "mnf_scheduler", "validation", "learned", "reinforce"])
def test_on_a_cuda_device_runs_resume_and_nans_are_named(name, tmp_path, monkeypatch):
    def fit(checkpoint=None):
        torch.manual_seed(0)
        net, data, options = RUNS[name]()
        return bayou.fit(net.cuda(), data, seed=3, checkpoint=checkpoint, progress=False, **options)

    torch.manual_seed(0)  # as fit does, before the state that must come back is taken
    file, state = tmp_path / "run.ckpt", torch.cuda.get_rng_state()
    whole = fit()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    with monkeypatch.context() as patch:
        dying(patch, 11)
        with pytest.raises(Died):
            fit(file)
    same(result(fit(file)), result(whole))
    x = RUNS[name]()[1][0]
    assert whole.predict(x, 5, seed=0).outputs.is_cuda
    if name == "adam_dropout":
        poisoned(monkeypatch, 7, "gradient", guide=0)
        with pytest.raises(FloatingPointError, match="step 7: the gradient of log_std of '0.weight'"):
            fit()


def test_state_starts_at_nothing():
    assert State() == State(0, math.inf, 0, "", [])


@needs_cuda
@pytest.mark.parametrize("method", [bayou.MAP(steps=30, lr=0.01), bayou.VI(steps=30, lr=0.01, warmup=0.5, clip=1.0)])
def test_a_replayed_step_is_the_step(method):
    """Compiled and replayed as one CUDA graph: the losses of an eager run, epoch ends of another shape included."""
    x, y = (part.cuda() for part in runs["classes"]())
    torch.manual_seed(0)
    net = runs["mlp"]().cuda()
    options = {"log_every": 1, "batch_size": 16}
    eager, graph, again = (
        bayou.fit(net, (x, y), method=replace(method, compile=compiled, **options), seed=3, progress=False)
        for compiled in (False, True, True)
    )
    for one, two, same in zip(eager.history, graph.history, again.history, strict=True):
        assert two["log_likelihood"] == same["log_likelihood"]
        if isinstance(method, bayou.MAP):  # the noise of a compiled step is another one
            assert two["log_likelihood"] == pytest.approx(one["log_likelihood"], rel=1e-4)


@needs_cuda
def test_a_replayed_step_that_goes_wrong_is_noticed():
    x, y = (part.cuda() for part in runs["classes"]())
    method = bayou.MAP(steps=200, compile=True, lr=1e30, log_every=10)
    with pytest.raises(FloatingPointError, match="not finite"):
        bayou.fit(runs["mlp"]().cuda(), (x, y), method=method, progress=False)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize("method", [bayou.MAP(steps=60, lr=0.05), bayou.VI(bayou.MNF(), steps=60, lr=0.02)])
def test_autocast_rounds_the_products_of_the_network_alone(method):
    torch.manual_seed(0)
    net, data = runs["mlp"](), runs["classes"]()
    exact, rounded = (
        bayou.fit(net, data, method=replace(method, autocast=autocast, log_every=1), progress=False)
        for autocast in (False, True)
    )
    first, other = exact.history[0], rounded.history[0]
    assert other["log_likelihood"] != first["log_likelihood"]
    assert other["log_likelihood"] == pytest.approx(first["log_likelihood"], rel=0.02)
    if "kl" in first:
        assert other["kl"] == first["kl"]
    what = "elbo" if "elbo" in first else "log_likelihood"
    assert rounded.history[-1][what] > other[what]
    assert {value.dtype for value in rounded.sample(1, seed=0).values()} == {torch.float32}

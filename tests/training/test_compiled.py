"""Steps that are compiled, replayed as one CUDA graph, or rounded to bfloat16."""

import itertools
import warnings
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

import bayou
from bayou.training.checkpoints import Checkpoint
from bayou.training.graphs import Recorded
from tests.training.runs import (
    RUNS,
    Died,
    assert_same,
    classes,
    die_at_call,
    mlp,
    poison,
    small,
)

F64 = torch.float64


@pytest.mark.slow
def test_a_compiled_run_is_reproducible_and_resumes(tmp_path, monkeypatch):
    """With sampled weights, locally reparameterized weights and factorized biases in one graph."""
    guide = {"0.*": bayou.MNF(local=False), "*": bayou.MNF()}
    options = {"compile": True, "steps": 10, "batch_size": 20, "guide": guide}
    one = small(**options)
    plain = small(**(options | {"compile": False}))
    assert one.history[0]["kl"] == pytest.approx(plain.history[0]["kl"], rel=0.1)
    assert_same(small(**options), one)
    with monkeypatch.context() as patch:
        plain_save, count = Checkpoint.save, itertools.count()

        def save(self, *args):
            plain_save(self, *args)
            if next(count) == 1:
                raise Died

        patch.setattr(Checkpoint, "save", save)
        with pytest.raises(Died):
            small(**options, checkpoint=tmp_path / "c", checkpoint_every=2)
    assert_same(small(**options, checkpoint=tmp_path / "c", checkpoint_every=2), one)


@pytest.fixture
def traced(monkeypatch):
    """Return a function that counts traced graphs, with a torch.compile without code generation."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    torch.compiler.reset()
    yield lambda: counters["stats"]["unique_graphs"]
    torch.compiler.reset()


def test_natural_gradients_of_gains_can_be_compiled(traced):
    """Every step is one graph; the numbers are those of an eager run."""
    method = bayou.IVON(bayou.MNF(), steps=4, warmup=0.5, log_every=1)
    net = curve_net(1)
    eager, compiled = (
        fit_curve(replace(method, compile=compile), net, seed=1).history
        for compile in (False, True)
    )
    assert traced() > 0
    for one, two in zip(eager, compiled, strict=True):
        assert two["elbo"] == pytest.approx(one["elbo"], rel=1e-5)


@pytest.mark.parametrize(
    "method", [bayou.MAP(), bayou.VI(bayou.MeanField())], ids=["MAP", "MeanField"]
)
def test_a_second_run_of_the_same_network_and_method_is_not_traced_again(method, traced):
    def run(seed, **options):
        fitted = replace(method, steps=2, compile=True, **options)
        fit_curve(fitted, seed=seed)

    run(0)
    first = traced()
    run(1, lr=0.01)
    again = (
        1 if torch.__version__.startswith("2.9.") else 0
    )  # torch 2.9 traces the step of a second run once more
    assert 0 < first <= traced() <= first + again


def test_a_step_of_swag_can_be_compiled(traced):
    """Its target is made anew at the start, and the priors of a target cannot be created in a
    compiled loss.
    """
    method = bayou.SWAG(start=None, steps=4, every=2, compile=True)
    fit_curve(method)
    assert traced() > 0


@pytest.mark.slow
def test_any_number_of_networks_and_data_sets_can_be_compiled_in_one_process(traced):
    """Torch compiles one function for at most eight kinds of arguments."""
    for i in range(9):
        data = tuple(part[: 20 + i] for part in DATA)
        method = bayou.MAP(steps=1, compile=True)
        fit_curve(method, curve_net(i % 2), data)


DATA = torch.linspace(-1, 1, 40)[:, None], torch.linspace(-1, 1, 40)[:, None].sin()


def fit_curve(method, net=None, data=DATA, **options):
    likelihood = bayou.Gaussian(0.1)
    return bayou.fit(net or curve_net(0), data, method, likelihood=likelihood, **options)


def curve_net(layers):
    return nn.Sequential(
        nn.Linear(1, 2), *[nn.Linear(2, 2) for _ in range(layers)], nn.Linear(2, 1)
    )


needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
@pytest.mark.parametrize(
    "name", ["adam_dropout", "mnf_scheduler", "validation", "learned", "reinforce", "inducing"]
)
def test_runs_on_a_cuda_device_resume_and_name_nans(name, tmp_path, monkeypatch):
    def fit(checkpoint=None):
        torch.manual_seed(0)
        net, data, options = RUNS[name]()
        return bayou.fit(net.cuda(), data, seed=3, checkpoint=checkpoint, **options)

    torch.manual_seed(0)  # as fit does, before the state that must come back is taken
    file, state = tmp_path / "run.ckpt", torch.cuda.get_rng_state()
    whole = fit()
    assert torch.equal(torch.cuda.get_rng_state(), state)
    die_at_call(11, fit, file)
    assert_same(fit(file), whole)
    x = RUNS[name]()[1][0]
    assert whole.predict(x, 5).outputs.is_cuda
    if name == "adam_dropout":
        poison(monkeypatch, 7, "gradient", guide=0)
        with pytest.raises(
            FloatingPointError, match="step 7: the gradient of log_std of '0.weight'"
        ):
            fit()


@needs_cuda
@pytest.mark.parametrize(
    "method",
    [
        bayou.MAP(steps=30, lr=0.01),
        bayou.VI(steps=30, lr=0.01, warmup=0.5, clip=1.0),
        bayou.VI(bayou.Inducing(20), steps=30, lr=0.01),
        bayou.IVON(steps=30, warmup=0.5),
        bayou.IVON(bayou.MNF(), steps=30, warmup=0.5),
    ],
)
def test_a_replayed_step_equals_the_eager_step(method):
    """Compiled and replayed as one CUDA graph: the losses of an eager run, epoch ends of another
    shape included.
    """
    x, y = (part.cuda() for part in classes())
    torch.manual_seed(0)
    net = mlp().cuda()
    options = {"log_every": 1, "batch_size": 16}
    eager, graph, again = (
        bayou.fit(net, (x, y), replace(method, compile=compiled, **options), seed=3)
        for compiled in (False, True, True)
    )
    for one, two, same in zip(eager.history, graph.history, again.history, strict=True):
        assert two["log_likelihood"] == same["log_likelihood"]
        if isinstance(method, bayou.MAP):  # the noise of a compiled step is another one
            assert two["log_likelihood"] == pytest.approx(one["log_likelihood"], rel=1e-4)


@needs_cuda
def test_a_single_row_of_a_flow_is_the_same_when_compiled():
    """A compiled row of a GPU is written as a sum instead of a product: values and gradients of the
    eager flow.
    """
    flow = bayou.flows.gated(7, layers=2).double().cuda()
    with torch.no_grad():
        for parameter in flow.parameters():
            parameter.add_(0.3 * torch.randn_like(parameter))
    x = torch.randn(1, 7, dtype=F64, device="cuda", requires_grad=True)

    def value(x):
        y, ladj = flow(x)
        return (y.square().sum() + ladj.sum()), y

    inputs = [x, *flow.parameters()]
    (loss, y), (fast_loss, fast_y) = value(x), torch.compile(value, fullgraph=True)(x)
    torch.testing.assert_close(fast_y, y)
    for one, two in zip(
        torch.autograd.grad(fast_loss, inputs), torch.autograd.grad(loss, inputs), strict=True
    ):
        torch.testing.assert_close(one, two)


@needs_cuda
def test_a_replayed_step_that_is_not_finite_raises():
    x, y = (part.cuda() for part in classes())
    method = bayou.MAP(steps=200, compile=True, lr=1e30, log_every=10)
    with pytest.raises(FloatingPointError, match="not finite"):
        bayou.fit(mlp().cuda(), (x, y), method)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")
@pytest.mark.parametrize(
    "method", [bayou.MAP(steps=60, lr=0.05), bayou.VI(bayou.MNF(), steps=60, lr=0.02)]
)
def test_autocast_rounds_only_the_products_of_the_network(method):
    net, data = mlp(), classes()
    exact, rounded = (
        bayou.fit(net, data, replace(method, autocast=autocast, log_every=1))
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


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.parametrize("compile", [False, True])
def test_a_recorded_function_equals_the_function(device, compile, monkeypatch):
    """Gradients of batches of ten rows; every third one has five, which runs as it is."""
    if device == "cpu":
        monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    calls = []

    def gradient(w, batch):
        calls.append(len(batch))
        x, y = batch
        with torch.enable_grad():
            w = w.detach().requires_grad_()
            value = (torch.tanh(x @ w) - y).square().sum()
            return value.detach(), torch.autograd.grad(value, w)[0]

    recorded = Recorded(gradient, compile)
    for number in range(9):
        rows = 5 if number % 3 == 2 else 10
        x = torch.randn(rows, 3, dtype=F64, device=device)
        w = torch.randn(3, dtype=F64, device=device)
        values = recorded(w, (x, x.sum(1)))
        torch.testing.assert_close(values, gradient(w, (x, x.sum(1))), rtol=1e-9, atol=1e-9)
    if compile:
        assert len(calls) == 9 + 3 + 1  # the batches of five rows, and one trace
    elif device == "cuda":
        assert len(calls) == 9 + 3 + 4  # three calls before the recording


@needs_cuda
@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize(
    ("module", "method"),
    [
        ("gradient_chains", bayou.SGHMC(steps=40, chains=2, lr=1e-4, burn_in=0, draws=40)),
        ("mclmc", bayou.MCLMC(stochastic=True, steps=4, chains=2, warmup=0, draws=10, adapt=False)),
    ],
)
def test_chains_with_recorded_gradients_are_the_same(compile, module, method, monkeypatch):
    """Two batches of one size and a smaller one in each epoch."""
    x = torch.linspace(-1, 1, 25, dtype=F64, device="cuda").unsqueeze(1)
    method = replace(method, batch_size=10, start=None)
    if module == "mclmc":
        method = replace(method, step_size=0.01, length=0.1)

    def draws(method):
        torch.manual_seed(0)
        net = curve_net(0).to("cuda", F64)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", bayou.MixingWarning)
            return fit_curve(method, net, (x, x.sin())).stack

    recorded = draws(replace(method, compile=compile))
    monkeypatch.setattr(f"bayou.methods.{module}.Recorded", lambda function, compile: function)
    for name, expected in draws(method).items():
        torch.testing.assert_close(recorded[name], expected, rtol=1e-9, atol=1e-9)

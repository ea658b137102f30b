"""Independent fits in the workers of an executor have the results of one process."""

import importlib
import multiprocessing
import sys
from concurrent.futures import Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

import pytest
import torch
from torch import nn

import bayou
from bayou.app.cli.process import begin_worker, workers
from bayou.app.runs.config import Config
from bayou.app.runs.folder import Run
from bayou.core.progress import BayouWarning
from bayou.methods.ensemble import EnsembleError

SHORT = bayou.MAP(steps=6, batch_size=8)
QUICK = {"steps": 12, "samples": 6}


class Mortal:
    """An executor without the base class of ``concurrent.futures``, which does every job at once.

    Job number ``dies`` and all after it end like those of a broken pool.
    """

    def __init__(self, dies=None):
        self.dies = dies
        self.jobs = 0

    def submit(self, function, /, *arguments):
        future = Future()
        self.jobs += 1
        if self.dies is not None and self.jobs > self.dies + 1:
            raise BrokenProcessPool("killed before")
        try:
            if self.jobs == (self.dies or -2) + 1:
                raise BrokenProcessPool("killed")
            future.set_result(function(*arguments))
        except BaseException as error:
            future.set_exception(error)
        return future


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))


def fitted(net=None, **options):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    method = bayou.Ensemble(3, options.pop("of", SHORT), parallel=options.pop("parallel", None))
    options = {"likelihood": bayou.Gaussian(0.1), "seed": 3} | options
    return bayou.fit(make_net() if net is None else net, (x, x[:, :1].sin()), method, **options)


def assert_same(first, second, atol=0.0):
    torch.testing.assert_close(first.stack, second.stack, rtol=0, atol=atol)


def test_members_of_workers_are_those_of_one_process(tmp_path):
    whole = fitted()
    executor = Mortal()
    assert_same(fitted(parallel=executor), whole)
    assert executor.jobs == 3
    with ThreadPoolExecutor(2) as pool:
        assert_same(fitted(parallel=pool, checkpoint=tmp_path / "members"), whole)
    assert (tmp_path / "members" / "member-002.bayou").exists()
    assert_same(
        fitted(checkpoint=tmp_path / "members"), whole
    )  # the folder of any number of workers


def test_members_whose_worker_died_are_trained_here():
    with pytest.warns(BayouWarning, match="a worker died .killed."):
        assert_same(fitted(parallel=Mortal(dies=1)), fitted())


def sampled(net=None, method=bayou.HMC, **options):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    length = (
        {"draws": 4, "warmup": 2, "leapfrogs": 2}
        if method is bayou.HMC
        else {"steps": 20, "draws": 4, "lr": 1e-4}
    )
    own = method(chains=3, start=SHORT, parallel=options.pop("parallel", None), **length)
    options = {"likelihood": bayou.Gaussian(0.3), "seed": 3} | options
    return bayou.fit((net or make_net()).double(), (x, x[:, :1].sin()), own, **options)


@pytest.mark.parametrize("method", [bayou.HMC, bayou.SGLD])
def test_chains_of_workers_are_those_of_one_process(method, tmp_path):
    """Also where the second worker dies, and from the files of the chains."""
    whole = sampled(method=method)
    with pytest.warns(BayouWarning, match="a worker died .killed."):
        first = sampled(method=method, parallel=Mortal(dies=1), checkpoint=tmp_path / "run")
    assert (tmp_path / "run.chain-002").exists()
    again = sampled(method=method, parallel=Mortal(), checkpoint=tmp_path / "run")
    for posterior in (first, again):
        assert (posterior.chains, posterior.draws, posterior.stopped) == (3, 12, "finished")
        assert_same(posterior, whole, atol=1e-10)
        last, expected = (
            {key: value for key, value in p.history[-1].items() if key != "seconds"}
            for p in (posterior, whole)
        )
        assert last == pytest.approx(expected, rel=1e-8)
        assert posterior.mixing == pytest.approx(whole.mixing, rel=1e-6)


def test_a_chain_that_diverges_in_a_worker_leaves_the_draws_of_the_others():
    class Square(nn.Linear):
        def forward(self, x):
            # Quartic tails, where a step that is too large diverges.
            return self.weight.square() * x

    x = torch.ones(4, 1)
    found = {}
    for parallel in (None, Mortal()):
        method = bayou.SGLD(
            chains=6, steps=50, draws=50, burn_in=0, lr=0.05, dispersal=4.0, parallel=parallel
        )
        with pytest.raises(
            bayou.methods.DivergenceError, match=r"chain \d of SGLD is not finite"
        ) as caught:
            bayou.fit(
                Square(1, 1, bias=False),
                (x, x),
                method,
                likelihood=bayou.Gaussian(1.0),
                seed=2,
            )
        found[parallel] = caught.value.posterior
    whole, apart = found.values()
    assert apart.stopped == "diverged"
    assert 0 < apart.draws == 50 * apart.chains  # chains that are finite to the end
    assert apart.chains <= whole.chains


def test_a_member_that_fails_in_a_worker_is_named():
    with pytest.raises(
        EnsembleError, match="3 of 3 members did not finish. member 0: FloatingPointError"
    ):
        fitted(parallel=Mortal(), of=bayou.MAP(steps=30, lr=1e30, batch_size=8))


@pytest.mark.parametrize(
    ("method", "choices"), [(bayou.Ensemble, "'vmap', an executor"), (bayou.SGLD, "an executor")]
)
def test_an_invalid_executor_raises(method, choices):
    with pytest.raises(ValueError, match=f"parallel must be {choices} or None, got 'threads'"):
        method(parallel="threads")


def test_a_network_that_cannot_be_sent_to_a_worker_raises():
    net = make_net()
    net.note = lambda: None
    with (
        ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool,
        pytest.raises(
            ValueError, match=r"cannot be sent to a worker: .*lambda.*top level of a module"
        ),
    ):
        fitted(net, parallel=pool)


@pytest.mark.usefixtures("short_search")
def test_rows_of_a_comparison_in_workers(tmp_path):
    config = Config("moons", ("mle", "map"), prior=1.0, **QUICK)
    whole, shared = (Run.create(tmp_path / name, config) for name in ("whole", "shared"))
    executor = Mortal(dies=1)  # MAP comes first, and MLE is fitted here
    with pytest.warns(BayouWarning, match="a worker died"):
        results = shared.work(executor=executor)
    assert executor.jobs == 2
    for one, two in zip(whole.work(), results, strict=True):
        assert (one["name"], one["metrics"], one["rows"]) == (
            two["name"],
            two["metrics"],
            two["rows"],
        )
    shared.work(executor=executor)
    assert executor.jobs == 2  # nothing is left


def test_a_failure_in_a_worker_is_recorded(tmp_path, monkeypatch):
    def broken(*args, **options):
        raise FloatingPointError("step 3: the loss is not finite")

    monkeypatch.setattr(bayou, "fit", broken)
    run = Run.create(tmp_path / "run", Config("moons", ("map",), **QUICK))
    run.work(executor=Mortal())
    assert run.failures() == {"map-0": "FloatingPointError: step 3: the loss is not finite"}


def test_executors_of_the_command_line(tmp_path, monkeypatch):
    with workers(None) as none:
        assert none is None
    with workers("processes:3") as pool:
        assert isinstance(pool, ProcessPoolExecutor)
        assert pool._max_workers == 3
    (tmp_path / "my_cluster.py").write_text("def make():\n    return 'an executor'\n")
    monkeypatch.syspath_prepend(tmp_path)
    with workers("my_cluster:make") as made:
        assert made == "an executor"
    for name, message in (
        ("processes:0", "at least 1"),
        ("processes:x", "at least 1"),
        ("slurm", "neither processes nor a function module:name"),
        ("my_cluster:other", "has no attribute 'other'"),
    ):
        with pytest.raises(ValueError, match=message), workers(name):
            pass


# --- slow ---------------------------------------------------------------------------------------


DEADLY = """
import multiprocessing, os
from pathlib import Path
from torch import nn

class Deadly(nn.Linear):
    mark = ""

    def forward(self, x):
        if self.mark and multiprocessing.parent_process() is not None and not os.path.exists(self.mark):
            Path(self.mark).touch()
            os._exit(1)  # as abruptly as a killed process, on every system
        return super().forward(x)
"""  # a layer whose first worker is killed, where a spawned process can import it


@pytest.fixture
def deadly_net(tmp_path, monkeypatch):
    (tmp_path / "deadly_layer.py").write_text(DEADLY)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "deadly_layer", raising=False)
    net = make_net()
    net[2] = importlib.import_module("deadly_layer").Deadly(4, 1)
    net[2].mark = str(tmp_path / "killed")
    return net


@pytest.mark.slow
@pytest.mark.parametrize("fit", [fitted, sampled])
def test_a_pool_of_processes_with_a_killed_one(fit, deadly_net, tmp_path):
    whole = fit(deadly_net)  # no worker, so that nothing is killed
    with (
        ProcessPoolExecutor(2, multiprocessing.get_context("spawn"), begin_worker) as pool,
        pytest.warns(BayouWarning, match="a worker died"),
    ):
        posterior = fit(deadly_net, parallel=pool)
    assert (tmp_path / "killed").exists()
    assert_same(posterior, whole, atol=1e-10)


@pytest.mark.slow
@pytest.mark.peers
def test_a_cluster_of_dask_does_the_jobs_of_a_killed_worker_again(deadly_net, tmp_path):
    import distributed

    with distributed.Client(n_workers=2, threads_per_worker=1, dashboard_address=None) as client:
        found = fitted(deadly_net, parallel=client.get_executor())
    assert (tmp_path / "killed").exists()
    assert_same(found, fitted(deadly_net))


@pytest.mark.parametrize(
    "text",
    [
        "Unable to handle autograd's threading in combination with fork-based multiprocessing.",
        "Cannot re-initialize CUDA in forked subprocess.",
    ],
)
def test_a_forked_pool_that_torch_refuses_gets_the_way_out(text):
    class Forked(Mortal):
        def submit(self, function, /, *arguments):
            future = Future()
            future.set_exception(RuntimeError(text))
            return future

    with pytest.raises(ValueError, match=r"forked worker .*get_context..spawn.."):
        fitted(parallel=Forked())

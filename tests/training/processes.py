"""Fits that several processes share, started as by torchrun.

    python processes.py FOLDER [--die STEP] [--slow]

Every process writes its results to FOLDER/RANK.pt. With ``--die``, process 1 kills itself in this
step of the run "vi", unless there is a checkpoint already.
"""

import argparse
import itertools
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou.app.runs.config import Config
from bayou.app.runs.evaluation import evaluate_run
from bayou.app.runs.folder import Run
from bayou.methods import vi
from bayou.network import is_sharded
from bayou.training import checkpoints
from bayou.training.inputs import gather_shards
from bayou.training.ranks import sharing

N = 37  # the last batch of an epoch has one row: too few for two processes
SHORT = {"steps": 12, "batch_size": 9, "log_every": 1, "checkpoint_every": 5}
DISAGREE = ("another y", "another network", "another seed")


class Died(BaseException):
    """A process that ends without a chance to clean up."""


def data():
    x = torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    return x, torch.sin(x.sum(1, keepdim=True)), (x[:, 0] > 0).long()


def mlp(outputs=1, *extra):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 6), *extra, nn.Tanh(), nn.Linear(6, outputs)).double()


class Adapted(nn.Module):
    """A frozen network with an adapter and a head; ``out`` is not called, its weights are used."""

    def __init__(self):
        torch.manual_seed(1)
        super().__init__()
        self.stem, self.block, self.out = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 5)
        self.requires_grad_(False)
        self.adapter, self.head = nn.Linear(5, 5), nn.Linear(5, 1)
        self.double()

    def forward(self, x):
        hidden = self.stem(x)
        hidden = torch.tanh(self.block(hidden + self.adapter(hidden)))
        return self.head(torch.tanh(nn.functional.linear(hidden, self.out.weight, self.out.bias)))


def sharded():
    """The network whose frozen part is spread over the processes, block by block."""
    net = Adapted()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(net.block, mesh=mesh)
    return fully_shard(
        net, mesh=mesh, ignored_params={p for p in net.parameters() if p.requires_grad}
    )


def draw_with_gradients(net):
    """The output and the gradients of one draw."""
    bayesian = bayou.bayesianize(net, bayou.MeanField())
    draw = bayesian.draw(seed=0)
    output = draw(data()[0])
    (output.sum() + draw.kl).backward()
    return [output.detach(), *(p.grad for p in bayesian.parameters() if p.grad is not None)]


def forward_gradients(bayesian):
    """The gradients of a training loop that calls the module."""
    output, kl = bayesian(data()[0], seed=0)
    (output.sum() + kl).backward()
    return [gather_shards(p.grad) for p in bayesian.parameters()]


def run(name, **changes):
    """One of the fits whose noise, if any, is the same for all rows: several processes end where
    one does.
    """
    x, y, label = data()
    classes, curve = (
        {"net": mlp(2), "data": (x, label)},
        {"net": mlp(), "data": (x, y), "likelihood": NOISE},
    )
    named = {"input": x, "labels": label}
    mode = bayou.MAP(**SHORT)
    runs = {
        "map": (curve, bayou.MAP(clip=0.5, **SHORT)),
        "mle": (classes, bayou.MLE(validation=0.2, **SHORT)),
        "loader": (classes | {"data": loader(named)}, mode),
        "vi": (curve, bayou.VI(bayou.MeanField(local=False), samples=2, **SHORT)),
        "ivon": (curve, bayou.IVON(**SHORT)),
        "natural": (curve, bayou.IVON(bayou.MNF(local=False), samples=2, **SHORT)),
        "sgld": (curve, bayou.SGLD(steps=12, lr=1e-4, draws=3, batch_size=9, chains=2)),
        "sghmc": (curve, bayou.SGHMC(steps=12, draws=3, batch_size=9, chains=2)),
        "swag": (classes, bayou.SWAG(start=mode, steps=12, batch_size=9)),
        "ensemble": (classes, bayou.Ensemble(2, mode)),
        "vmap": (classes, bayou.Ensemble(2, mode, parallel="vmap")),
        "laplace": (classes, bayou.Laplace(start=mode)),
        "hmc": (classes, bayou.HMC(draws=2, chains=2, warmup=2)),
        "dropout": (classes | {"net": mlp(2, nn.Dropout(0.3))}, mode),
        "batch norm": (
            {"net": mlp(2, nn.BatchNorm1d(6)), "data": (x[:36], label[:36])},
            mode,
        ),
        "local": (curve, bayou.VI(**SHORT)),
        "mnf": (curve, bayou.VI(bayou.MNF(), **SHORT)),
    }
    options, method = runs[name]
    return bayou.fit(**(options | {"seed": 3, "method": method} | changes))


NOISE = bayou.Gaussian(0.3)
EXACT = ["map", "mle", "loader", "vi", "ivon", "natural", "sgld"]
SLOW_EXACT = ["sghmc", "swag", "ensemble", "vmap", "laplace", "hmc"]
# With noise of rows, or statistics of a batch: equal in all processes.
RANDOM = ["dropout", "batch norm", "local"]
SLOW_RANDOM = ["mnf"]
DRAWS = ["vi", "mle"]  # with draws to share, and without any
SHARDED = ["map", "vi", "sgld"]


def loader(columns):
    """Batches that are mappings; every process makes all of them."""
    rows = TensorDataset(*columns.values())

    def named(items):
        return dict(
            zip(columns, (torch.stack(column) for column in zip(*items, strict=True)), strict=True)
        )

    return DataLoader(rows, batch_size=9, shuffle=True, collate_fn=named)


def tensors(posterior):
    return posterior.state()[0]


def calls():
    """How often the run "vi" calls the network in this process, dry runs included."""
    net = mlp()
    count = []
    net[0].register_forward_hook(lambda *_: count.append(1))  # shared by copies of the network
    run("vi", net=net)
    return len(count)


def predicted(posterior):
    """The outputs for 37 rows, of which every process computes some, and for one without a seed."""
    x = data()[0]
    with sharing():
        return (
            posterior.predict(x, samples=4, seed=5).outputs,
            posterior.predict(x[:1], 2, seed=None).outputs,
        )


def scores(folder):
    """What ``bayou evaluate`` prints of a run."""
    (row,) = evaluate_run(folder, None)[0]
    return {name: value for name, value in row.items() if name != "method"}


def act_at_call(step, act):
    """Let call number ``step`` of the loss do something first."""
    calls = itertools.count(1)
    plain = vi.EvidenceBound.loss

    def watched(self, *args):
        if next(calls) == step:
            act()
        return plain(self, *args)

    vi.EvidenceBound.loss = watched


def die():
    raise Died


def kill_second(number):
    """Send a signal to this process if it is process 1."""
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), number)


def message_of(function, *args, **options):
    """Return the message of the ValueError of a call."""
    try:
        function(*args, **options)
    except ValueError as error:
        return str(error)
    return ""


def run_quick(folder, rank):
    """Return what the fast tests compare."""
    results = {"tensors": {}, "errors": {}, "shown": [], "written": []}
    plain = vi.EvidenceBound.loss
    write = checkpoints.write_file
    for name in EXACT + RANDOM:
        posterior = run(name, progress=lambda title, *numbers: results["shown"].append(title))
        results["tensors"][name] = tensors(posterior)
        if name == "vi":
            results["predicted"] = predicted(posterior)
            results["records"] = [
                {k: v for k, v in one.items() if k != "seconds"} for one in posterior.history
            ]
    x, y, _ = data()
    other = mlp()
    nn.init.constant_(other[0].bias, rank)
    changes = ({"data": (x, y + rank)}, {"net": other}, {"seed": rank})
    for what, change in zip(DISAGREE, changes, strict=True):
        results["errors"][what] = message_of(run, "vi", **change)
    with sharing(draws=True):
        results["draws"] = [tensors(run(name)) for name in DRAWS]
        results["calls with shared draws"] = calls()
        odd_samples = bayou.IVON(samples=3, **SHORT)
        results["errors"]["samples"] = message_of(run, "ivon", method=odd_samples)
    results["calls"] = calls()
    with sharing(False):
        results["alone"] = tensors(run("vi", seed=rank))
    checkpoints.write_file = lambda path, *args: (
        results["written"].append(str(path)),
        write(path, *args),
    )
    act_at_call(8, die)
    try:
        run("vi", checkpoint=folder / "vi.run")
    except Died:
        results["died"] = True
    checkpoints.write_file = write
    vi.EvidenceBound.loss = plain
    act_at_call(4, lambda: kill_second(signal.SIGINT))
    posterior = run("vi", checkpoint=folder / "stopped.run")
    results["stopped"] = posterior.stopped, tensors(posterior)
    vi.EvidenceBound.loss = plain
    results["sharded"] = {}
    for name in SHARDED:
        net = sharded()
        posterior = run(name, net=net)
        results["sharded"][name] = tensors(posterior), *predicted(posterior)
        posterior.save(folder / f"{rank}.bayou")  # every process, since it needs the parts of all
        again = bayou.load(folder / f"{rank}.bayou", net)
        torch.testing.assert_close(
            predicted(again)[0], predicted(posterior)[0], rtol=1e-12, atol=1e-12
        )
        assert is_sharded(
            posterior.net.get_buffer("block.weight")
        )  # no process has a copy of the whole
    results["drawn"] = draw_with_gradients(sharded())
    bayesian = fully_shard(
        bayou.bayesianize(mlp(), bayou.MeanField()), mesh=init_device_mesh("cpu", (2,))
    )
    results["forward"] = forward_gradients(bayesian)
    results["errors"]["q"] = message_of(bayesian.draw)
    bayesian.unshard()
    bayesian.posterior(NOISE, N).save(folder / f"q{rank}.bayou")
    if rank == 0:
        with sharing(False):
            Run.create(folder / "run", Config("moons", ("mle",), steps=12, samples=6)).work()
    dist.barrier()
    with sharing():
        results["scores"] = scores(folder / "run")
    return results


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--die", type=int)
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    rank = int(os.environ["RANK"])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a job in the background ignores it
    if options.die is not None:
        file = options.folder / "vi.run"
        if not file.exists():
            act_at_call(options.die, lambda: kill_second(signal.SIGKILL))
        results = tensors(run("vi", checkpoint=file))
    elif options.slow:
        results = {name: tensors(run(name)) for name in SLOW_EXACT + SLOW_RANDOM}
    else:
        results = run_quick(options.folder, rank)
    torch.save(results, options.folder / f"{rank}.pt")


if __name__ == "__main__":
    sys.exit(main())

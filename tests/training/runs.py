"""Runs that tests kill and start again, ways to let a run fail, a quick fit and a loss.

python runs.py NAME CHECKPOINT RESULT [--slow]
"""

import argparse
import hashlib
import itertools
import math
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

import bayou
from bayou.methods import vi
from bayou.network.target import Target
from bayou.posteriors.guided import Bayesian

F64 = torch.float64

N = 60


class Augmented(Dataset):
    """Rows with new noise each time they are read."""

    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i] + 0.05 * torch.randn(self.x.shape[1:]), self.y[i]


def classes():
    """Return 60 rows of two classes."""
    x = torch.randn(N, 3, generator=torch.Generator().manual_seed(1))
    return x, (x[:, 0] * x[:, 1] > 0).long()


def curve():
    """Return 60 noisy points of a sine."""
    x = torch.linspace(-1, 1, N).unsqueeze(-1)
    noise = torch.randn(N, 1, generator=torch.Generator().manual_seed(2))
    return x, torch.sin(3 * x) + 0.1 * noise


def mlp(i=3, o=2, extra=()):
    return nn.Sequential(nn.Linear(i, 8), *extra, nn.Tanh(), nn.Linear(8, o))


BASE = {"steps": 22, "batch_size": 16, "log_every": 5, "checkpoint_every": 3, "lr": 0.01}


def by_vi(*guide, **changes):
    """The options of a fit by VI."""
    return {"method": bayou.VI(*guide, **BASE | changes)}


def _adam_dropout():
    return mlp(extra=[nn.Dropout(0.3)]), classes(), by_vi()


def _sgd_momentum_batchnorm():
    def sgd(groups):
        return torch.optim.SGD(groups, momentum=0.9, nesterov=True)

    return mlp(extra=[nn.BatchNorm1d(8)]), classes(), by_vi(optimizer=sgd, clip=1.0)


def _mnf_scheduler():
    def halve(done):
        return 0.5 ** int(4 * done)

    def adamw(groups):
        return torch.optim.AdamW(groups, amsgrad=True)

    return mlp(), classes(), by_vi(bayou.MNF(), schedule=halve, optimizer=adamw, warmup=0.5)


def _validation():
    changes = {"steps": 200, "lr": 0.5, "batch_size": 10}
    return mlp(), classes(), by_vi(validation=0.25, patience=2, **changes)


def _dataset():
    return mlp(), Augmented(*classes()), by_vi(samples=2)


def _loader():
    loader = DataLoader(Augmented(*classes()), batch_size=16, shuffle=True)
    return mlp(extra=[nn.Dropout(0.3)]), loader, by_vi()


def _loader_generator():
    loader = DataLoader(
        Augmented(*classes()),
        batch_size=16,
        shuffle=True,
        drop_last=True,
        generator=torch.Generator().manual_seed(5),
    )
    return mlp(), loader, by_vi()


def _learned():
    options = {
        "prior": bayou.Normal(1.0, learn=True),
        "likelihood": bayou.Gaussian(0.3, learn=True),
    }
    return mlp(1, 1), curve(), by_vi() | options


def _reinforce():
    guide = bayou.Dropout(per="weight", rate="reinforce")
    return mlp(), classes(), by_vi(guide)


def _inducing():
    return mlp(extra=[nn.BatchNorm1d(8)]), classes(), by_vi(bayou.Inducing(20))


RUNS = {
    name.removeprefix("_"): make
    for name, make in list(globals().items())
    if name.startswith("_") and callable(make) and not name.startswith("__")
}


def fit_run(name, checkpoint=None, seed=3):
    """Fit one of the runs."""
    torch.manual_seed(0)
    net, data, options = RUNS[name]()
    return bayou.fit(net, data, seed=seed, checkpoint=checkpoint, **options)


def result(posterior):
    """Return all that must be equal: tensors, history without seconds, how the run ended."""
    tensors = dict(posterior.bayesian.state_dict())
    tensors |= {f"likelihood.{k}": v for k, v in posterior.target.likelihood.state_dict().items()}
    history = [{k: v for k, v in record.items() if k != "seconds"} for record in posterior.history]
    return {"tensors": tensors, "history": history, "stopped": posterior.stopped}


def assert_same(first, second):
    """Check that two posteriors, or their results, are equal bit for bit."""
    first, second = (r if isinstance(r, dict) else result(r) for r in (first, second))
    assert first["history"] == second["history"]
    assert first["stopped"] == second["stopped"]
    assert first["tensors"].keys() == second["tensors"].keys()
    for name, tensor in first["tensors"].items():
        assert torch.equal(tensor, second["tensors"][name]), name


class Died(BaseException):
    """A process that ends without a chance to clean up."""


def interrupt_at_call(monkeypatch, step, error=Died, of=vi.EvidenceBound):
    """Let call number ``step`` of the loss raise an error."""
    calls = itertools.count(1)
    plain = of.loss

    def watched(self, *args):
        if next(calls) == step:
            raise error
        return plain(self, *args)

    monkeypatch.setattr(of, "loss", watched)


def die_at_call(step, fit, *args, of=vi.EvidenceBound, **options):
    """Begin a fit that dies in this call of the loss."""
    with pytest.MonkeyPatch.context() as patch:
        interrupt_at_call(patch, step, of=of)
        with pytest.raises(Died):
            fit(*args, **options)


class Poison(torch.autograd.Function):
    """The identity, whose gradient is NaN."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * math.nan


def poison(monkeypatch, step, how, guide=2):
    """Let the gradient of a step, or its loss, be NaN or infinite."""
    calls = itertools.count()
    plain = vi.EvidenceBound.loss

    def watched(self, x, y):
        value, report = plain(self, x, y)
        if next(calls) == step:
            log_std = self.bayesian.guides[guide].log_std
            value = value * math.nan if how == "loss" else value + 0 * Poison.apply(log_std).sum()
            if how == "detached":
                value = torch.full_like(value, math.inf).requires_grad_()
        return value, report

    monkeypatch.setattr(vi.EvidenceBound, "loss", watched)


def digest(path):
    """Return the hash of a file."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def small(net=None, **changes):
    """Fit a small network to classes in 12 steps."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)) if net is None else net
    options = {
        "data": classes(),
        "seed": 0,
        "checkpoint": None,
        "likelihood": None,
    }
    names = [*options, "prior", "progress"]
    options |= {key: changes.pop(key) for key in list(changes) if key in names}
    method = bayou.VI(
        changes.pop("guide", bayou.MeanField()),
        **({"steps": 12, "batch_size": 16, "log_every": 1} | changes),
    )
    return bayou.fit(net, options.pop("data"), method, **options)


def make_objective(guide, samples=1, net=None, features=3):
    """Return −ELBO/N in float64 for 8 rows, its network, and the rows."""
    generator = torch.Generator().manual_seed(0)
    torch.manual_seed(0)
    net = (nn.Linear(3, 1) if net is None else net).double()
    x = torch.randn(8, features, generator=generator, dtype=F64)
    y = torch.randn(8, 1, generator=generator, dtype=F64)
    target = Target.build(net, bayou.Gaussian(0.5), None, 8)
    bayesian = Bayesian(net, guide, target.prior, (x,))
    bound = vi.EvidenceBound(bayou.VI(guide, samples=samples), target, bayesian)

    def loss(x, y, beta):
        bound.beta = beta
        return bound.loss(x, y)

    loss.baseline, loss.target = bound.baseline, target
    return loss, bayesian, x, y


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("name")
    parser.add_argument("checkpoint")
    parser.add_argument("result")
    parser.add_argument("--slow", action="store_true")
    options = parser.parse_args()
    plain = vi.EvidenceBound.loss

    def watched(self, x, y):
        if options.slow:
            time.sleep(0.1)  # time enough for a test to act in, on a machine that is busy
        return plain(self, x, y)

    vi.EvidenceBound.loss = watched
    torch.save(result(fit_run(options.name, options.checkpoint)), options.result)


if __name__ == "__main__":
    sys.exit(main())

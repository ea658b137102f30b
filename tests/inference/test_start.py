"""Methods that begin at what another method finds: its own settings count, and Ctrl-C there ends
the run.
"""

import pytest
import torch
from torch import nn

import bayou
from bayou.inference.point import PointModel
from tests.training.runs import interrupt_at_call

F64 = torch.float64
START = bayou.MAP(batch_size=3, steps=4)
FREE = bayou.Normal(0.5, learn=True)
METHODS = [
    bayou.SWAG(start=START, steps=8, batch_size=5, every=2),
    bayou.HMC(start=START, chains=1, draws=1, warmup=0, leapfrogs=1),
    bayou.SGLD(start=START, chains=1, steps=2, draws=1, batch_size=5),
    bayou.Laplace(start=START, batch_size=5),
]


def fit(method, **options):
    x = torch.arange(10, dtype=F64).unsqueeze(1) / 10
    net = nn.Linear(1, 1, dtype=F64)
    with torch.no_grad():
        net.weight.fill_(0.5)
        net.bias.fill_(0.0)
    return bayou.fit(net, (x, 2 * x), method, likelihood=bayou.Gaussian(0.5), **options)


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_a_start_has_its_own_batch_size(method, monkeypatch):
    sizes = []
    plain = PointModel.loss

    def watched(self, x, y):
        sizes.append(len(y))
        return plain(self, x, y)

    monkeypatch.setattr(PointModel, "loss", watched)
    fit(method)
    assert sizes[:4] == [3, 3, 3, 1]


@pytest.mark.parametrize("method", METHODS, ids=lambda method: type(method).__name__)
def test_ctrl_c_in_the_start_ends_the_run_and_the_same_call_goes_on(method, monkeypatch, tmp_path):
    with monkeypatch.context() as patch:
        interrupt_at_call(patch, 3, KeyboardInterrupt, of=PointModel)
        assert fit(method, checkpoint=tmp_path / "run").stopped == "interrupted"
    went_on, whole = fit(method, checkpoint=tmp_path / "run"), fit(method)
    assert went_on.stopped == "finished"
    expected = whole.sample(2, seed=0)
    torch.testing.assert_close(went_on.sample(2, seed=0), expected, rtol=0, atol=0)


@pytest.mark.parametrize("prior", [FREE, {"weight": FREE, "bias": bayou.Normal(0.5)}])
def test_vi_starts_at_the_mode_of_a_prior_that_it_then_learns(prior):
    mode = fit(bayou.MAP(steps=30), prior=bayou.Normal(0.5), seed=3)
    q = fit(
        bayou.VI(bayou.MeanField(), start=bayou.MAP(steps=30), steps=1, lr=1e-12),
        prior=prior,
        seed=3,
    )
    torch.testing.assert_close(q.mean(), mode.mean(), rtol=0, atol=1e-9)
    assert q.target.learned_priors

"""Steps of ``fit`` on a GPU that are recorded once and replayed equal single steps."""

import pytest
import torch
from torch import nn

from bayou.flows import (
    Chain,
    Continuous,
    DiagonalAffine,
    Transform,
    continuous,
    glow_image,
    image_flow,
    maf,
    residual,
)
from bayou.flows.fitting.fit import fit
from bayou.training.graphs import Replay
from tests.flows.test_continuous import Contraction
from tests.flows.tools import seeded, standard

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def plain(params, lr):
    """Adam of the same steps that cannot be recorded."""
    return torch.optim.Adam(params, lr=lr, fused=True)


def train(make, data, **options):
    torch.manual_seed(0)
    flow = make().cuda()
    result = fit(
        flow, data, steps=30, check_every=10, batch_size=64, seed=3, progress=False, **options
    )
    return result, torch.cat([p.detach().flatten() for p in flow.parameters()])


@pytest.fixture
def replays(monkeypatch):
    """The steps that were replayed."""
    seen = []
    call = Replay.__call__

    def note(self, x, y, step):
        numbers = call(self, x, y, step)
        seen.append(step)
        return numbers

    monkeypatch.setattr(Replay, "__call__", note)
    return seen


ROWS = torch.randn(300, 2, generator=seeded(0)) * torch.tensor([1.0, 3.0]) + 1
PIXELS = torch.randint(0, 256, (300, 1, 8, 8), generator=seeded(0)).float()
CASES = {
    "maf": (lambda: standard(maf(2)), ROWS, {}),
    "image": (
        lambda: image_flow(glow_image((1, 8, 8), levels=1, steps=2, hidden=8), 256, "uniform"),
        PIXELS,
        {},
    ),
    "continuous": (lambda: standard(continuous(2)), ROWS, {}),
    "matching": (lambda: standard(continuous(2)), ROWS, {"matching": True}),
}


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_replayed_steps_equal_single_steps(name, replays):
    make, data, options = CASES[name]
    fast, weights = train(make, data, **options)
    assert len(replays) == 27
    slow, expected = train(make, data, optimizer=plain, **options)
    assert len(replays) == 27
    for one, two in zip(fast.history, slow.history, strict=True):
        assert one.loss == pytest.approx(two.loss, rel=1e-3)
        assert one.score == pytest.approx(two.score, rel=1e-3)
        assert one.gradient_norm == pytest.approx(two.gradient_norm, rel=1e-2)
    torch.testing.assert_close(weights, expected, rtol=1e-2, atol=1e-3)


class Branching(Transform):
    """The identity, by code that reads a number."""

    event_shape = (2,)

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def _forward(self, x, context):
        return x, x.new_zeros(x.shape[:-1]) if x.sum().item() < 1e30 else x[..., 0]

    _inverse = _forward


@needs_cuda
@pytest.mark.parametrize(
    "make", [Branching, lambda: residual(2, layers=1, hidden=(8,), determinant="roulette")]
)
def test_maps_that_cannot_be_recorded_are_run_step_by_step(make, replays):
    found, _ = train(lambda: standard(Chain(DiagonalAffine((2,)), make())), ROWS)
    assert not replays
    assert found.steps == 30


@needs_cuda
def test_a_replayed_step_that_goes_wrong_is_noticed_and_undone():
    torch.manual_seed(0)
    flow = standard(maf(2)).cuda()
    with pytest.raises(FloatingPointError, match="keeps its last good parameters"):
        fit(
            flow,
            ROWS,
            steps=100,
            check_every=10,
            lr=1e30,
            clip=None,
            schedule="constant",
            seed=0,
            progress=False,
        )
    assert all(bool(p.isfinite().all()) for p in flow.parameters())


@needs_cuda
def test_a_clock_ends_a_replayed_run(replays):
    torch.manual_seed(0)
    found = fit(standard(maf(2)).cuda(), ROWS, seconds=1.5, patience=None, progress=False)
    assert found.stopped == "finished"
    assert 1.4 < found.seconds < 10
    assert replays


@needs_cuda
def test_a_step_is_recorded_again_when_its_solver_takes_more_steps(replays):
    results = []
    for optimizer in (None, plain):
        core = Continuous(2, Contraction(), steps=1)
        with pytest.warns(UserWarning, match="steps of RK4 are too few"):
            results.append(
                train(
                    lambda core=core: standard(core),
                    0.02 * ROWS,
                    optimizer=optimizer,
                )
            )
        assert core.steps > 1
    assert len(replays) == 27
    (fast, weights), (slow, expected) = results
    assert fast.best == pytest.approx(slow.best, rel=1e-3)
    torch.testing.assert_close(weights, expected, rtol=1e-2, atol=1e-3)

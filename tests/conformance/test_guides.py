"""The conformance suite of guides, over every family."""

import copy
import functools
import math
import socket
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.guides.guide import KL

FAMILIES = {
    "Delta": lambda: bayou.Delta(),
    "Delta, penalty": lambda: bayou.Delta(penalty=True),
    "MeanField": lambda: bayou.MeanField(std=0.05),
    "MeanField, weights": lambda: bayou.MeanField(std=0.05, local=False),
    "MeanField, positions": lambda: bayou.MeanField(std=0.05, local="positions"),
    "MNF": lambda: bayou.MNF(options={"hidden": [6]}),
    "MNF, positions": lambda: bayou.MNF(options={"hidden": [6]}, z="example", local="positions"),
    "MNF, paper": lambda: bayou.MNF(options={"hidden": [6]}, auxiliary="paper"),
    "MNF, per example": lambda: bayou.MNF(options={"hidden": [6]}, z="example"),
    "MNF, mixture": lambda: bayou.MNF(None, components=2),
    "MNF, resampled masks": lambda: bayou.MNF("gated_resampled", {"hidden": [6]}),
    "MNF, continuous": lambda: bayou.MNF("continuous", {"hidden": [4], "steps": 1}),
    "MNF, residual": lambda: bayou.MNF("residual", {"layers": 1, "hidden": [4], "lipschitz": 0.5}),
    "MNF, no flow": lambda: bayou.MNF(None),
    "NodeNoise, per example": lambda: bayou.NodeNoise(where="both", z="example"),
    "RankOne": lambda: bayou.guides.RankOne(),
    "RankOne, Gaussian": lambda: bayou.guides.RankOne(3, std=0.1, penalty=False),
    "Dropout": lambda: bayou.Dropout(0.2),
    "Dropout, concrete": lambda: bayou.Dropout(0.2, rate="concrete"),
    "Dropout, reinforce": lambda: bayou.Dropout(0.2, rate="reinforce"),
    "Dropout, per weight": lambda: bayou.Dropout(0.2, per="weight"),
    "SparseVD": lambda: bayou.SparseVD(),
    "NormalJeffreys": lambda: bayou.guides.NormalJeffreys(),
    "HalfCauchy": lambda: bayou.guides.HalfCauchy(),
    "HalfCauchy, z per example": lambda: bayou.guides.HalfCauchy(z="example", local="positions"),
    "JointFlow": lambda: bayou.JointFlow(options={"layers": 1, "hidden": [8]}),
    "JointFlow, continuous": lambda: bayou.JointFlow(
        "continuous", {"hidden": [4], "steps": 1, "trace": "hutchinson"}
    ),
    "JointFlow, residual": lambda: bayou.JointFlow(
        "residual", {"layers": 1, "hidden": [4], "lipschitz": 0.5}
    ),
    "LowRank": lambda: bayou.LowRank(rank=3),
    "Inducing": lambda: bayou.Inducing(points=4),
    "SIVI": lambda: bayou.guides.SIVI(draws=20, latent=4, hidden=(6,)),
    "UIVI": lambda: bayou.guides.UIVI(draws=20, latent=4, hidden=(6,), steps=2, leapfrogs=3),
}
for where, components in (("output", 1), ("both", 4)):
    FAMILIES[f"NodeNoise, {where}, {components}"] = partial(
        bayou.NodeNoise, where=where, components=components
    )
    FAMILIES[f"NodeFlow, {where}, {components}"] = partial(
        bayou.NodeFlow, options={"hidden": [6]}, where=where, components=components
    )
KINDS = {  # of a family, unless one of its variants says otherwise
    "Delta": {KL.exact},
    "Delta, penalty": {KL.constant},
    "MeanField": {KL.exact},
    "MNF": {KL.bound, KL.exact},  # of the weights, and of the biases
    "NodeNoise": {KL.exact},
    "NodeFlow": {KL.exact},
    "RankOne": {KL.constant},
    "RankOne, Gaussian": {KL.bound, KL.exact},  # of the weights, and of the biases
    "Dropout": {KL.constant},
    "SparseVD": {KL.constant},
    "NormalJeffreys": {KL.constant, KL.exact},  # of the weights, and of the biases
    "HalfCauchy": {KL.bound, KL.exact},
    "JointFlow": {KL.exact},
    "JointFlow, continuous": {KL.estimate},
    "JointFlow, residual": {KL.estimate},
    "LowRank": {KL.exact},
    "Inducing": {KL.exact},
    "SIVI": {KL.bound},
    "UIVI": {KL.bound},
}
NO_MOMENTS = {  # behind a flow or a network, mean and std have no closed form
    *(
        f"MNF{variant}"
        for variant in (
            "",
            ", positions",
            ", paper",
            ", per example",
            ", resampled masks",
        )
    ),
    *("JointFlow", "Inducing", "SIVI", "UIVI"),
    *(
        f"{family}, {flow}"
        for family in ("MNF", "JointFlow")
        for flow in ("continuous", "residual")
    ),
}
ROWS, CLASSES = 5, 3
every = pytest.mark.parametrize("family", FAMILIES)


def make_net(dtype=torch.float64):
    """A convolution and a dense layer: 59 weights."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, 2, 3, stride=2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(8, CLASSES),
        nn.Tanh(),
        nn.Linear(3, CLASSES),
    ).to(dtype)


def make_data(rows=ROWS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(rows, 1, 6, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, x.flatten(1)[:, :CLASSES].argmax(1)


def make(family, dtype=torch.float64):
    torch.manual_seed(0)
    return bayou.bayesianize(make_net(dtype), FAMILIES[family](), example=make_data(dtype=dtype)[0])


def fitted(family):
    method = bayou.VI(FAMILIES[family](), steps=3, batch_size=8)
    return bayou.fit(make_net(), make_data(16), method=method, seed=0, progress=False)


@functools.cache
def once(family):
    """A fit that tests only look at."""
    torch.manual_seed(1)
    return fitted(family)


def same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def close(a, b):
    """Equal up to rounding: the order of a sum may change with the number of draws that are
    computed together.
    """
    assert a.keys() == b.keys()
    for name, value in a.items():
        slack = 1000 * torch.finfo(value.dtype).eps if value.is_floating_point() else 0
        assert_close(value, b[name], rtol=slack, atol=slack)


@every
def test_a_draw_has_finite_outputs_and_gradients(family):
    x, y = make_data()
    bnn = make(family)
    for samples, examples in ((None, None), (None, ROWS), (3, None), (3, ROWS)):
        bnn.zero_grad()
        draw = bnn.draw(samples, examples=examples)
        out = draw(x)
        assert out.shape == ((ROWS, CLASSES) if samples is None else (samples, ROWS, CLASSES))
        assert draw.kl.shape == ()
        assert (draw.score is not None) == (family == "Dropout, reinforce")
        if draw.score is not None:
            assert draw.score.numel() in (samples or 1, (samples or 1) * (examples or 1))
        loss = F.cross_entropy(out.reshape(-1, CLASSES), y.repeat(samples or 1)) + draw.kl / 100
        loss.backward()
        trained = {name: p.grad for name, p in bnn.named_parameters() if p.requires_grad}
        assert trained
        for name, gradient in trained.items():
            assert gradient is not None, name
            assert gradient.isfinite().all(), name
    assert not any(name.startswith("net.") for name, _ in bnn.named_parameters())


@every
def test_samples(family):
    """Shapes and names; a seed reproduces; a draw is a function of its index, up to rounding; draws
    differ.
    """
    bnn = make(family).eval()
    shapes = {name: p.shape for name, p in make_net().named_parameters()}
    with torch.no_grad():
        sample = bnn.sample(7, seed=5)
        assert {name: w.shape for name, w in sample.items()} == {
            name: (7, *shape) for name, shape in shapes.items()
        }
        assert list(sample) == list(shapes)
        same(bnn.sample(7, seed=5), sample)
        for start, n in ((0, 3), (6, 1)):
            close(
                bnn.sample(n, seed=5, start=start),
                {k: w[start : start + n] for k, w in sample.items()},
            )
        if not family.startswith("Delta"):
            assert any(not torch.equal(w[0], w[1]) for w in sample.values())
            other = bnn.sample(7, seed=6)
            assert any(not torch.equal(other[k], w) for k, w in sample.items()) == (
                family != "RankOne"
            )  # points
        first = torch.Generator().manual_seed(3)
        second = torch.Generator().manual_seed(3)
        same(bnn.sample(4, seed=first), bnn.sample(4, seed=second))
        torch.manual_seed(3)
        one = bnn.sample(4)
        torch.manual_seed(3)
        same(bnn.sample(4), one)
        assert bnn.sample(0, seed=5)["0.weight"].shape == (0, *shapes["0.weight"])


@every
def test_a_function_draw_is_reproducible(family):
    x, _ = make_data()
    bnn = make(family).eval()
    with torch.no_grad():
        a, b = (bnn.draw(3, local=False, seed=2) for _ in range(2))
        assert torch.equal(a(x), b(x))
        assert torch.equal(a.kl, b.kl)
        assert torch.equal(bnn.draw(seed=2).kl, bnn.draw(seed=2).kl)
        torch.manual_seed(4)
        c = bnn.draw(3)
        out = c(x)
        torch.manual_seed(4)
        assert torch.equal(bnn.draw(3)(x), out)


@every
def test_the_kl(family):
    """Not negative in expectation where it is a KL or a bound of one; scalar, in nats, and of its
    declared kind.
    """
    bnn = make(family)
    with torch.no_grad():
        for p in bnn.parameters():
            p.add_(0.1 * torch.randn_like(p))
        for guide in bnn.guides:
            if guide.kl_kind is KL.constant:
                continue
            for local in (True, False):
                kl = guide.draw(400, local=local, seed=0).kl
                assert kl.shape == (400,)
                assert float(kl.mean()) >= -4 * float(kl.std()) / math.sqrt(400)
    assert {guide.kl_kind for guide in bnn.guides} == KINDS[
        family if family in KINDS else family.split(",")[0]
    ]


@every
def test_mean_and_std_are_those_of_draws_or_an_error(family):
    """After all parameters have moved, within 5 standard errors of 4,000 draws; a flow has neither
    in closed form.
    """
    bnn, n = make(family).eval(), 4000
    with torch.no_grad():
        for p in bnn.parameters():
            p.add_(0.1 * torch.randn_like(p))
    posterior = bnn.posterior(bayou.Categorical(), ROWS)
    if family in NO_MOMENTS or family.split(",")[0] == "NodeFlow":
        for moment in (posterior.mean, posterior.std):
            with pytest.raises(
                ValueError, match=r"no mean and std in closed form; take those of posterior\.sample"
            ):
                moment()
        with pytest.raises(ValueError, match="in closed form.*; for a network draw one"):
            posterior.to_module()
        return
    draws, mean, std = posterior.sample(n, seed=0), posterior.mean(), posterior.std()
    assert list(mean) == list(std) == list(draws)
    for name, drawn in draws.items():
        assert mean[name].shape == std[name].shape == drawn.shape[1:]
        assert not mean[name].requires_grad
        assert not std[name].requires_grad
        spread = (drawn - mean[name]).square()
        wide, error = 5 / math.sqrt(n), (drawn.mean(0) - mean[name]).abs()
        assert (error <= wide * std[name] + 1e-12).all(), name
        assert (
            (spread.mean(0) - std[name].square()).abs() <= wide * spread.std(0) + 1e-12
        ).all(), name


@every
def test_dtype_and_device_are_kept(family):
    single = partial(make, family, torch.float32)
    modules = {"made": single(), "widened": single().double(), "narrowed": make(family).float()}
    for how, module in modules.items():
        dtype = torch.float64 if how == "widened" else torch.float32
        x, _ = make_data(dtype=dtype)
        assert {p.dtype for p in module.parameters()} == {dtype}
        with torch.no_grad():
            for samples in (None, 2):
                draw = module.draw(samples)
                assert draw(x).dtype == dtype
                assert draw.kl.dtype == dtype
            assert {w.dtype for w in module.sample(2, seed=0).values()} == {dtype}
            assert {w.dtype for w in module.mean().values()} == {dtype}
    meta = modules["made"].to("meta")
    assert {w.device.type for w in meta.mean().values()} == {"meta"}
    assert {w.device.type for w in meta.draw(2, local=False).parts.values()} == {"meta"}


@every
def test_state_dict_round_trip(family):
    a, b = make(family).eval(), make(family).eval()
    with torch.no_grad():
        for p in a.parameters():
            p.add_(0.1 * torch.randn_like(p))
    state = a.state_dict()
    assert not any(name.startswith("net.") for name in state), "placeholders were saved"
    b.load_state_dict(state)
    with torch.no_grad():
        same(a.sample(3, seed=0), b.sample(3, seed=0))
        same(copy.deepcopy(a).sample(3, seed=0), b.sample(3, seed=0))


@every
def test_fit_predict_save_load(family, tmp_path):
    x, y = make_data(7)
    before = make_net().state_dict()
    posterior = once(family)
    record = posterior.history[-1]
    assert record["elbo"] == pytest.approx(record["log_likelihood"] - record["kl"], rel=1e-9)
    p = posterior.predict(x, samples=6, seed=1)
    assert p.means.shape == (6, 7, CLASSES)
    assert p.mean.shape == p.std.shape == (7, CLASSES)
    assert (
        p.entropy.shape
        == p.mutual_information.shape
        == p.log_prob(y).shape
        == p.quantile(0.5).shape
        == (7,)
    )
    assert p.prediction_set(0.9).shape == (7, CLASSES)
    assert (p.mutual_information >= 0).all()
    for options in ({"chunk": 4}, {"chunk": 5, "batch_size": 3}):
        other = posterior.predict(x, samples=6, seed=1, **options)
        assert_close(other.outputs, p.outputs, rtol=1e-12, atol=1e-12)
    posterior.save(tmp_path / "p.bayou")
    net = make_net()
    loaded = bayou.load(tmp_path / "p.bayou", net)
    same(loaded.sample(4, seed=9), posterior.sample(4, seed=9))
    assert torch.equal(loaded.predict(x, samples=6, seed=1).outputs, p.outputs)
    a, b = (bayou.elbo(q, (x, y), samples=4, seed=0) for q in (loaded, posterior))
    assert a == b
    for key, value in net.state_dict().items():
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("family", ["MNF", "Dropout, reinforce", "JointFlow", "Inducing", "UIVI"])
def test_fit_is_a_function_of_its_seed(family):
    torch.manual_seed(2)
    same(fitted(family).sample(2, seed=0), once(family).sample(2, seed=0))


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def training_loss(bnn, samples, examples):
    def loss(x, y):
        draw = bnn.draw(samples, examples=examples)
        out = draw(x)
        total = F.cross_entropy(out.flatten(0, -2), y.repeat(samples or 1)) + draw.kl / 100
        return total if draw.score is None else total + draw.score.mean()

    return loss


def check_compiled(family, backend):
    if family == "Inducing" and torch.__version__.startswith("2.9."):
        pytest.xfail("torch 2.9 cannot trace a network inside a mode")
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(1, 2, 2, bias=False), nn.Tanh(), nn.Flatten(), nn.Linear(6, CLASSES)
    ).double()
    x, y = torch.randn(ROWS, 1, 4, dtype=torch.float64), make_data()[1]
    bnn = bayou.bayesianize(net, FAMILIES[family](), example=x)
    loss = training_loss(bnn, None, ROWS if bnn.per_example else None)
    compiled = torch.compile(loss, fullgraph=True, backend=backend)
    trained = [p for p in bnn.parameters() if p.requires_grad]
    results = []
    for f in (loss, compiled):
        torch.manual_seed(7)
        value = f(x, y)
        results.append((value, torch.autograd.grad(value, trained)))
    assert_close(results[1], results[0], rtol=1e-9, atol=1e-11)


QUICK = (
    "MeanField",
    "MNF",
    "LowRank",
    "Inducing",
    "Dropout",
)  # compiling takes seconds each


@pytest.mark.parametrize("family", QUICK)
def test_the_training_loss_is_one_graph(family, fresh_dynamo):
    check_compiled(family, "eager")


# One per code path of a draw. Inductor compiles MeanField and MNF below; the flows have their own
# test of compilation.
PATHS = (
    "Delta, penalty", "MeanField, positions", "MNF, paper", "MNF, per example",
    "MNF, resampled masks", "NodeFlow, both, 4", "Dropout, concrete", "Dropout, reinforce",
    "SparseVD", "HalfCauchy, z per example", "JointFlow", "JointFlow, residual", "LowRank",
    "Inducing", "UIVI",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", PATHS)
def test_the_training_loss_compiles_whole(family, fresh_dynamo):
    check_compiled(family, "aot_eager")


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch"
)  # torch's own, while it imports inductor
def test_the_training_loss_compiles_with_inductor(fresh_dynamo):
    """MNF on the weights and MeanField on the biases."""
    from torch._inductor import config

    with config.patch(fallback_random=True):  # inductor has a random stream of its own
        check_compiled("MNF", "inductor")


# --- two processes ------------------------------------------------------------------------------

SHARED = ("MeanField", "MNF", "LowRank", "Inducing")


class IntegerIdentity(nn.Module):
    """A user's module around the network, as training frameworks have it."""

    def __init__(self, bnn):
        super().__init__()
        self.bnn = bnn

    def forward(self, x, **options):
        return self.bnn(x, **options)


def _train(bnn, x, y):
    """Gradients of three steps of SGD, with noise that is a function of the step."""
    found = []
    for step in range(3):
        bnn.zero_grad()
        out, kl = bnn(x, local=False, seed=step)
        (F.cross_entropy(out, y) + kl / 100).backward()
        with torch.no_grad():
            for p in bnn.parameters():
                if p.requires_grad:
                    found.append(p.grad.clone())
                    p -= 0.1 * p.grad
    return found


def _half(family, rank):
    """The gradients of half the rows. The module must be gone before its process group: its end
    would wait for ever.
    """
    x, y = make_data(8)
    bnn = nn.parallel.DistributedDataParallel(
        make(family) if family == "MNF" else IntegerIdentity(make(family))
    )
    return _train(bnn, x[4 * rank : 4 * rank + 4], y[4 * rank : 4 * rank + 4])


def _rank(rank, port):
    """The gradients of this rank, family by family."""
    address, patience = f"tcp://127.0.0.1:{port}", timedelta(seconds=100)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2, timeout=patience)
    try:
        return {family: _half(family, rank) for family in SHARED}
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one():
    """Half the batch on each of two ranks, with shared noise, is the whole batch on one: gradients
    to 1e-12.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    other = mp.get_context("spawn").Process(target=_rank, args=(1, port))
    other.start()
    results = _rank(0, port)
    other.join(100)
    assert other.exitcode == 0
    for family in SHARED:
        want = _train(make(family), *make_data(8))
        assert_close(results[family], want, rtol=0, atol=1e-12)

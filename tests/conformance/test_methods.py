"""One suite over every method: what all of them promise. A new method is tested by being listed in
METHODS.
"""

import copy
import functools
import itertools

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.posteriors import Empirical, GaussianPosterior, Masked, Mixture
from bayou.training import checkpoints

QUICK = {"steps": 12, "checkpoint_every": 3, "batch_size": 8}
CHAINS = {"draws": 5, "warmup": 10, "checkpoint_every": 4}
ANNEALED = {"draws": 4, "temperatures": 5, "leapfrogs": 2}
SHORT = bayou.MAP(**QUICK)
METHODS = {
    "VI": lambda: bayou.VI(bayou.MeanField(), **QUICK),
    "VI, prior by unit": lambda: bayou.VI(bayou.MNF(None), **QUICK),
    "MLE": lambda: bayou.MLE(**QUICK),
    "MAP": lambda: bayou.MAP(**QUICK),
    "MAP, constrained": lambda: bayou.MAP(
        **QUICK,
        max_norm=1.0,
        input_noise=0.1,
        gradient_noise=0.1,
    ),
    "MAP, noise": lambda: bayou.MAP(**QUICK, weight_noise=0.1, l2=1e-3),
    "TFB": lambda: bayou.methods.TFB(start=SHORT, samples=3),
    "VBLL": lambda: bayou.methods.VBLL(**QUICK),
    "VBLL, low rank": lambda: bayou.methods.VBLL(2, **QUICK),
    "VBLL, diagonal": lambda: bayou.methods.VBLL(0, **QUICK, validation=0.2),
    "SWAG": lambda: bayou.SWAG(start=SHORT, **QUICK),
    "SWAG, batch norm": lambda: bayou.SWAG(start=SHORT, **QUICK, draws=4),
    "IVON": lambda: bayou.IVON(**QUICK),
    "IVON, local": lambda: bayou.IVON(**QUICK, local=True, samples=2),
    "Ensemble": lambda: bayou.Ensemble(3, of=SHORT),
    "Ensemble, vmap": lambda: bayou.Ensemble(3, of=SHORT, parallel="vmap"),
    "Ensemble of VI": lambda: bayou.Ensemble(2, of=METHODS["VI"]()),
    "Ensemble of MCDropout": lambda: bayou.Ensemble(2, of=bayou.MCDropout(SHORT)),
    "MCDropout": lambda: bayou.MCDropout(SHORT),
    "SGLD": lambda: bayou.SGLD(**QUICK, draws=5),
    "PSGLD": lambda: bayou.PSGLD(**QUICK, draws=3, chains=2, lr=1e-3),
    "SGHMC": lambda: bayou.SGHMC(**QUICK, draws=5, start=SHORT, lr=1e-3),
    "cyclical": lambda: bayou.SGLD(
        **QUICK,
        draws=4,
        lr=1e-3,
        schedule=bayou.methods.Cyclical(cycles=2, explore=0.5, noise=False),
    ),
    "HMC": lambda: bayou.HMC(**CHAINS, most_leapfrogs=3),
    "HMC, leapfrogs": lambda: bayou.HMC(**CHAINS, leapfrogs=2),
    "MCLMC": lambda: bayou.MCLMC(**CHAINS, steps=2),
    "MCLMC, stochastic": lambda: bayou.MCLMC(**CHAINS, steps=2, stochastic=True, batch_size=8),
    "Laplace, full": lambda: bayou.Laplace("full", start=SHORT),
    "Laplace, prior by unit": lambda: bayou.Laplace("full", start=SHORT),
    "Laplace, diagonal": lambda: bayou.Laplace("diagonal", start=SHORT),
    "Laplace, kronecker": lambda: bayou.Laplace("kronecker", start=SHORT),
    "Laplace, last layer": lambda: bayou.Laplace(
        "full", where="last", start=SHORT, prior="evidence"
    ),
    "Annealed": lambda: bayou.Annealed(METHODS["VI"](), **ANNEALED, checkpoint_every=2),
    "Annealed, adapted": lambda: bayou.Annealed(
        bayou.VI(steps=2, checkpoint_every=2),
        **ANNEALED,
        checkpoint_every=2,
        adapt=True,
    ),
    "Annealed, prior by unit": lambda: bayou.Annealed(
        bayou.VI(bayou.MNF(), steps=4, checkpoint_every=4, batch_size=8),
        **ANNEALED,
        checkpoint_every=2,
    ),
    "Annealed, Laplace": lambda: bayou.Annealed(
        METHODS["Laplace, kronecker"](),
        **ANNEALED,
    ),
    "NUTS": lambda: bayou.NUTS(**CHAINS, max_depth=2, batch_size=16, chains=2),
}
# Methods whose posterior further rows can change; all others refuse.
UPDATED = {
    "VI",
    "TFB",
    "VBLL",
    "VBLL, low rank",
    "VBLL, diagonal",
    "SWAG",
    "IVON",
    "IVON, local",
    "Ensemble of VI",
    "Laplace, full",
    "Laplace, prior by unit",
    "Laplace, diagonal",
    "Laplace, kronecker",
    "Laplace, last layer",
}
# Methods that need something of a network name it here; the others get a plain one.
NEEDS = {
    "SWAG, batch norm": lambda: nn.BatchNorm1d(12),
    "MCDropout": lambda: nn.Dropout(0.3),
    "Ensemble of MCDropout": lambda: nn.Dropout(0.3),
    "TFB": lambda: Adapter(12),
}
# Methods that are to learn a prior have it here; the others get the default.
LEARNED = ("VI, prior by unit", "Laplace, prior by unit", "Annealed, prior by unit")
PRIORS = dict.fromkeys(LEARNED, bayou.Normal("fan_in", learn="units"))
ROWS, CLASSES = 20, 3
every = pytest.mark.parametrize("name", METHODS)


class Adapter(nn.Module):
    """x + B·A·x."""

    def __init__(self, width, rank=2):
        super().__init__()
        self.lora_A = nn.Linear(width, rank, bias=False)
        self.lora_B = nn.Linear(rank, width, bias=False)

    def forward(self, x):
        return x + self.lora_B(self.lora_A(x))


def make_net(name="", dtype=torch.float64):
    """A convolution and a dense layer, with a dropout, batch norm or adapter between them where the
    method needs it.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        between = [NEEDS[name]()] if name in NEEDS else []
        layers = nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Tanh(), *between, nn.Linear(12, CLASSES)
        return nn.Sequential(*layers).to(dtype)


def make_data(rows=ROWS, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 1, 4, 4, generator=generator).to(dtype), torch.arange(rows) % CLASSES


def fitted(name, dtype=torch.float64, net=None, **options):
    options = {"prior": PRIORS.get(name), "progress": False} | options
    net = net or make_net(name, dtype)
    return bayou.fit(net, make_data(dtype=dtype), method=METHODS[name](), **options)


@functools.cache
def once(name):
    """A fit that tests only look at."""
    torch.manual_seed(1)
    return fitted(name)


def same(a, b):
    assert_close(a, b, rtol=0, atol=0)


def close(a, b):
    """Equal up to rounding: the order of a sum may change with the number of draws that are
    computed together.
    """
    assert a.keys() == b.keys()
    for name, value in a.items():
        slack = 1000 * torch.finfo(value.dtype).eps if value.is_floating_point() else 0
        assert_close(value, b[name], rtol=slack, atol=slack)


@every
def test_the_constructor_does_nothing_and_the_method_is_frozen(name):
    method = METHODS[name]()
    assert method == METHODS[name]()
    with pytest.raises(AttributeError):
        method.batch_size = 1


@every
def test_samples_depend_on_their_seed_and_index(name):
    """Shapes and names; a seed reproduces; a draw depends on its index alone, up to rounding."""
    posterior = once(name)
    shapes = {n: p.shape for n, p in make_net(name).named_parameters()}
    sample = posterior.sample(7, seed=5)
    assert {n: sample[n].shape for n in shapes} == {n: (7, *shape) for n, shape in shapes.items()}
    assert all(value.isfinite().all() for value in sample.values())
    same(posterior.sample(7, seed=5), sample)
    for start, n in ((0, 3), (3, 4), (6, 1)):
        close(
            posterior.sample(n, seed=5, start=start),
            {k: w[start : start + n] for k, w in sample.items()},
        )
    torch.manual_seed(3)
    one = posterior.sample(4)
    torch.manual_seed(3)
    same(posterior.sample(4), one)
    assert posterior.sample(0, seed=5)[next(iter(shapes))].shape[0] == 0
    with pytest.raises(ValueError, match="whole number"):
        posterior.sample(-1)
    assert any(not torch.equal(w[0], w[1]) for w in sample.values()) == (posterior.draws != 1)


@every
def test_mean_std_module_and_chains_are_of_the_draws(name):
    """E[w] and the std of every tensor, one network, and draws by chain; or an error with the way
    out.
    """
    posterior, x = once(name), make_data(5)[0]
    assert_moments(posterior)
    draw = {key: value[0] for key, value in posterior.sample(1, seed=4).items()}
    sampled = posterior.using("sampled") if isinstance(posterior, GaussianPosterior) else posterior
    member = posterior.component(draw) if isinstance(posterior, Mixture) else posterior
    masked = isinstance(member, Masked)  # a plain network has no masks
    expected = member.network.evaluate(member.weights, x) if masked else sampled.call(draw, x)
    assert_close(posterior.to_module(draw)(x), expected, rtol=1e-12, atol=1e-12)
    if (posterior.draws or 1) > 1 or isinstance(posterior, Mixture):
        with pytest.raises(ValueError, match="has no one network.*to_module\\(seed=0\\)"):
            posterior.to_module()
    else:
        plain = posterior.to_module()
        assert type(plain) is nn.Sequential
        assert not plain.training
        assert torch.equal(plain(x), posterior.network.evaluate(posterior.mean(), x))
    if isinstance(posterior, Masked):
        with pytest.raises(ValueError, match=r"random in its masks.*posterior\.predict"):
            posterior.by_chain()
        return
    found = posterior.by_chain()
    if isinstance(posterior, Empirical):
        same({key: value.flatten(0, 1) for key, value in found.items()}, posterior.stack)
        with pytest.raises(ValueError, match="omit samples="):
            posterior.by_chain(10)
    else:
        assert {key: value.shape for key, value in found.items()} == {
            k: (1, 1000, *v.shape) for k, v in draw.items()
        }
        same(
            {k: v[0] for k, v in posterior.by_chain(3, seed=4).items()}, posterior.sample(3, seed=4)
        )


def assert_moments(posterior):
    """Mean and std of draws within 5 standard errors, and of points exactly; of every tensor that
    is drawn.
    """
    parts = posterior.components if isinstance(posterior, Mixture) else [posterior]
    masked = [part for part in parts if isinstance(part, Masked)]
    if masked:
        whole = {
            key: torch.stack([part.weights[key] for part in masked]).mean(0)
            for key in masked[0].weights
        }
        same(posterior.mean(), whole)
        with pytest.raises(ValueError, match=r"random in its masks.*posterior\.predict"):
            posterior.std()
        return
    points = posterior.draws is not None
    draws = posterior.sample(posterior.draws or 1000, seed=0)
    mean, std = posterior.mean(), posterior.std()
    assert {*mean} == {*std} == {key for key, value in draws.items() if value.is_floating_point()}
    for key, drawn in ((key, draws[key]) for key in mean):
        assert mean[key].shape == std[key].shape == drawn.shape[1:]
        assert not mean[key].requires_grad
        assert not std[key].requires_grad
        error, spread = drawn - mean[key], (drawn - mean[key]).square()
        allowed = 0.0 if points else 5 / 1000**0.5
        assert (error.mean(0).abs() <= allowed * std[key] + 1e-10).all(), key
        assert (
            (spread.mean(0) - std[key].square()).abs()
            <= allowed * spread.std(0, correction=0) + 1e-10
        ).all(), key


@every
def test_fit_predict_save_load(name, tmp_path):
    x, y = make_data(7)
    posterior = once(name)
    assert posterior.stopped == "finished"
    assert posterior.history
    assert repr(posterior)
    p = posterior.predict(x, samples=6, seed=1)
    assert p.means.shape == (6, 7, CLASSES)
    assert p.entropy.shape == p.log_prob(y).shape == (7,)
    assert (p.mutual_information >= 0).all()
    for options in ({"chunk": 4}, {"chunk": 5, "batch_size": 3}):
        other = posterior.predict(x, samples=6, seed=1, **options)
        assert_close(other.outputs, p.outputs, rtol=1e-10, atol=1e-10)
    assert posterior.predict(x, seed=0).outputs.shape[0] == min(100, posterior.draws or 100)
    posterior.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", make_net(name))
    assert type(loaded) is type(posterior)
    same(loaded.sample(4, seed=9), posterior.sample(4, seed=9))
    assert torch.equal(loaded.predict(x, samples=6, seed=1).outputs, p.outputs)
    assert loaded.history == posterior.history
    loaded.save(tmp_path / "again.bayou")
    with pytest.raises(bayou.posteriors.FileError, match="another network"):
        bayou.load(tmp_path / "p.bayou", nn.Linear(2, 2))


@every
def test_new_rows_update_the_posterior_or_it_says_what_to_use_instead(name, tmp_path):
    """Of the same class, of more rows, saved and loaded; the posterior before stays as it was."""
    posterior = once(name)
    rows = make_data(6)
    before = posterior.sample(2, seed=3)
    if name not in UPDATED:
        with pytest.raises(ValueError, match="cannot be updated: .*; use .*fit again"):
            posterior.update(rows)
        with pytest.raises(ValueError, match="cannot be reduced by rows: .*fit again"):
            posterior.downdate(rows)
        return
    updated = posterior.update(rows)
    assert type(updated) is type(posterior)
    assert updated.target.n == posterior.target.n + 6
    assert (updated.updates.calls, updated.updates.added) == (1, 6)
    same(posterior.sample(2, seed=3), before)
    assert not posterior.updates.calls
    p = updated.predict(rows[0], samples=4, seed=1)
    assert bool(p.outputs.isfinite().all())
    updated.save(tmp_path / "p.bayou")
    loaded = bayou.load(tmp_path / "p.bayou", make_net(name))
    assert torch.equal(loaded.predict(rows[0], samples=4, seed=1).outputs, p.outputs)
    assert loaded.updates == updated.updates
    with pytest.raises(ValueError, match=r"exactly.*fit again"):
        updated.downdate(rows)  # classes


@every
def test_fit_is_a_function_of_its_seed_and_leaves_network_and_global_stream_alone(
    name,
):
    first = once(name)
    torch.manual_seed(2)
    state, net = torch.get_rng_state(), make_net(name)
    before = copy.deepcopy(net.state_dict())
    again = fitted(name, net=net)
    assert torch.equal(torch.get_rng_state(), state)
    same(dict(net.state_dict()), before)
    same(first.sample(2, seed=0), again.sample(2, seed=0))


@every
def test_float32_stays_float32_and_progress_is_a_line_on_stderr(name, capfd):
    posterior = fitted(name, torch.float32, progress="plain")
    out, err = capfd.readouterr()
    assert not out
    assert err.strip()
    x, _ = make_data(4, torch.float32)
    assert posterior.predict(x, samples=2, seed=0).outputs.dtype == torch.float32
    names = [n for n, _ in make_net(name).named_parameters()]
    assert {posterior.sample(2, seed=0)[n].dtype for n in names} == {torch.float32}
    with pytest.raises(ValueError, match="float64"):
        posterior.predict(x.double())


@every
def test_bad_data_are_errors_before_training(name):
    x, y = make_data()
    method = METHODS[name]()
    for bad, words in (
        ((x, y + 1), "classes"),
        ((x[:, :, :3], y), "cannot take"),
        ((x.float(), y), "float32"),
        ((torch.full_like(x, torch.nan), y), "NaN"),
        ((x[:5], y), "rows"),
        ((x, y.double()), "classes use y.long()"),
    ):
        with pytest.raises(ValueError, match=words):
            bayou.fit(make_net(name), bad, method=method, progress=False)
    with pytest.raises(ValueError, match="seed"):
        bayou.fit(make_net(name), (x, y), method=method, seed=1.5, progress=False)


class Killed(BaseException):
    """Nothing catches it, so that a run ends as if the machine had: only what it wrote is left."""


@every
def test_a_stopped_run_continues_bit_for_bit(name, tmp_path, monkeypatch):
    """An end in the middle, then the same call again: the posterior of a run that was left alone,
    bit for bit.
    """
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "write_file", killed_after(2, checkpoints.write_file))
        with pytest.raises(Killed):
            fitted(name, checkpoint=tmp_path / "stopped")
    same_run(fitted(name, checkpoint=tmp_path / "stopped"), once(name))
    with pytest.raises(bayou.posteriors.FileError, match="another run"):
        fitted(name, checkpoint=tmp_path / "stopped", seed=7)


def same_run(a, b):
    same(a.sample(3, seed=0), b.sample(3, seed=0))
    one, two = (
        [{k: v for k, v in record.items() if k != "seconds"} for record in p.history]
        for p in (a, b)
    )
    assert one == two


def killed_after(count, function):
    """A function that ends the run once it has been called so many times: most of the work is to
    come.
    """
    calls = itertools.count(1)

    def watched(*args, **kwargs):
        function(*args, **kwargs)
        if next(calls) == count:
            raise Killed

    return watched

"""Markov chains: their log joint, their start, what is sampled, and how a run ends."""

import signal
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, TensorDataset

import bayou
from bayou import SGLD
from bayou.kernels import Joint
from bayou.network import Network
from bayou.network.target import Target
from bayou.training.data import as_data
from bayou.training.seeds import part_seed
from tests.methods.chains import measures
from tests.methods.draws import normal

F64 = torch.float64
N = 24
LEARNED = bayou.Gaussian(0.3, learn=True)


def data(seed=0):
    x = normal(N, 3, seed=seed)
    return x, torch.sin(x[:, :1])


def mlp(*extra):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 4), *extra, nn.Tanh(), nn.Linear(4, 1)).to(F64)


def target(net, noise=None):
    return Target.build(net, noise or bayou.Gaussian(0.3), None, N)


def joint(net, noise=None, **options):
    t = target(net, noise)
    return Joint(t, Network(net), t.start(), **options)


def fitted(method, net=None, rows=None, **options):
    options = {"likelihood": bayou.Gaussian(0.3), "progress": False} | options
    return bayou.fit(net or mlp(), rows or data(), method=method, **options)


def positions(j, chains=3):
    noise = normal(chains, len(j.start), seed=1)
    return j.start + 0.3 * noise


@pytest.mark.parametrize("loop", [False, True])
@pytest.mark.parametrize("learn", [False, True])
def test_the_joint_is_that_of_the_target_and_its_gradient_that_of_autograd(loop, learn):
    """A batch of 8 of 24, shared and one for each chain; a learned noise has its own value in every
    chain.
    """
    net, noise = mlp(nn.Dropout(0.5)), bayou.Gaussian(0.3, learn=learn)
    net.train()
    j = joint(net, noise, loop=loop)
    w = positions(j)
    x, y = data()
    batches = [(x[8 * c : 8 * c + 8], y[8 * c : 8 * c + 8]) for c in range(3)]
    own = j(
        w,
        torch.stack([b[0] for b in batches]),
        torch.stack([b[1] for b in batches]),
        per_chain=True,
    )
    shared = j(w, *batches[0])
    stacked = j.tensors(w)
    for c in range(len(w)):
        draw = {name: value[c] for name, value in stacked.items()}
        t = target(
            mlp(nn.Dropout(0.5)).eval(),
            bayou.Gaussian(float(draw.pop("likelihood.log_scale").exp()) if learn else 0.3),
        )
        for found, batch in ((own, batches[c]), (shared, batches[0])):
            params = {name: value.clone().requires_grad_() for name, value in draw.items()}
            value = t.log_joint(params, *batch)
            assert_close(found[0][c], value.detach(), rtol=1e-12, atol=1e-12)
            gradient = torch.autograd.grad(value, list(params.values()))
            unflat = j.tensors(found[1])
            for name, expected in zip(params, gradient, strict=True):
                assert_close(unflat[name][c], expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("learn", [False, True])
@pytest.mark.parametrize("loop", [False, True])
def test_all_data_in_batches_are_all_data_at_once(learn, loop):
    """Traced or not, in one batch or in uneven ones."""
    j = joint(mlp(), bayou.Gaussian(0.3, learn=learn), loop=loop)
    w, (x, y) = positions(j), data()
    value, gradient = j(w, x, y)
    for rows in (N, 7):
        density = j.density(list(zip(x.split(rows), y.split(rows), strict=True)), w)
        for shift in (0.0, 0.5):  # a trace must be right elsewhere too
            found = density(w + shift)
            expected = j(w + shift, x, y) if shift else (value, gradient)
            assert_close(found[0], expected[0], rtol=1e-11, atol=1e-11)
            assert_close(found[1], expected[1], rtol=1e-9, atol=1e-9)


def test_a_network_without_vmap_is_evaluated_chain_by_chain():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.LSTM(3, 2, batch_first=True), nn.Linear(2, 1)

        def forward(self, x):
            out = self.head(self.rnn(x.unsqueeze(1))[0][:, -1])
            return -out if bool(out.sum() > 1e9) else out  # a branch on values

    torch.manual_seed(0)
    net = Recurrent().double()
    j = joint(net)
    j.density([data()], positions(j))
    assert j.loop
    for method in (
        SGLD(steps=6, draws=2, chains=2, batch_size=8),
        bayou.NUTS(draws=4, warmup=4, max_depth=2),
    ):
        assert fitted(method, net).stack["rnn.weight_hh_l0"].isfinite().all()


CHAINS = {"chains": 3, "start": None}
GRADIENTS = {"chains": 3, "steps": 12, "draws": 4, "batch_size": 8}
METHODS = {
    "SGLD": SGLD(**GRADIENTS),
    "PSGLD": bayou.PSGLD(**GRADIENTS, dispersal="prior"),
    "SGHMC": bayou.SGHMC(**GRADIENTS, start=None),
    "HMC": bayou.HMC(**CHAINS, draws=4, warmup=12, leapfrogs=3),
    "HMC, adapted": bayou.HMC(**CHAINS, draws=4, warmup=24, most_leapfrogs=9),
    "NUTS": bayou.NUTS(**CHAINS, draws=3, warmup=8, max_depth=3),
    "MCLMC": bayou.MCLMC(**CHAINS, draws=3, warmup=10, steps=1),
    "MCLMC, stochastic": bayou.MCLMC(
        **CHAINS, draws=3, warmup=10, steps=2, stochastic=True, batch_size=8
    ),
    "MCLMC, adjusted": bayou.MCLMC(**CHAINS, draws=3, warmup=6, steps=1, adjusted=True),
}


@pytest.mark.parametrize("name", METHODS)
def test_a_chain_does_not_depend_on_the_others(name):
    """Chain c is a function of (seed, c): batches, noise, adaptation and all."""
    method = METHODS[name]
    together = fitted(method, seed=3).by_chain()
    for c in (0, 2):
        begun = method._prepare(method._arguments(target(mlp()), data(), 3, None, False))
        alone = begun(range(c, c + 1), None, False).run()
        expected = {tensor: draws[c : c + 1] for tensor, draws in together.items()}
        assert_close(alone.by_chain(), expected, rtol=0, atol=1e-10)
    assert not torch.equal(together["0.weight"][0], together["0.weight"][1])


def test_an_ensemble_starts_one_chain_at_each_member():
    """MILE: without a dispersal and with steps that do not move, the draws are the members, also
    their noise.
    """
    members = bayou.Ensemble(3, of=bayou.MAP(steps=5), init="reset")
    method = bayou.MCLMC(
        chains=3, draws=1, warmup=0, step_size=1e-9, adapt=False, start=members, dispersal=0.0
    )
    found = fitted(method, seed=3, likelihood=LEARNED)
    points = fitted(members, seed=part_seed(3, "start"), likelihood=LEARNED)
    assert_close(found.stack, points.stack, rtol=0, atol=1e-6)
    assert not torch.equal(found.stack["0.weight"][0], found.stack["0.weight"][1])
    with pytest.raises(ValueError, match=r"or in 2 such as Ensemble\(2\), got Ensemble"):
        fitted(bayou.MCLMC(chains=2, draws=1, warmup=0, start=members))


def test_draws_are_grouped_by_chain_in_order():
    """A chain that forgets nothing between two draws: its neighbors in the stack are its own."""
    with pytest.warns(bayou.MixingWarning, match="R-hat"):
        p = fitted(
            SGLD(chains=2, steps=40, draws=40, burn_in=0, lr=1e-9, batch_size=8, dispersal=1.0)
        )
    assert (p.chains, p.draws) == (2, 80)
    w = p.stack["0.weight"].flatten(1)
    assert (w[:40] - w[0]).abs().max() < 1e-2 < (w[40] - w[39]).abs().max()
    assert p.by_chain()["0.weight"].shape == (2, 40, 4, 3)


def test_a_loader_is_shared_by_all_chains():
    loader = DataLoader(TensorDataset(*data()), batch_size=8, shuffle=True)
    a = fitted(SGLD(chains=2, steps=7, draws=2), rows=loader)
    b = fitted(SGLD(chains=2, steps=7, draws=2), rows=loader)
    assert torch.equal(a.stack["0.weight"], b.stack["0.weight"])
    short = DataLoader(TensorDataset(*data()), batch_size=7, drop_last=True)
    with pytest.raises(ValueError, match="drop the last batch"):
        fitted(bayou.HMC(draws=1, warmup=0), rows=short)


@pytest.mark.slow
def test_a_learned_noise_is_sampled_from_its_posterior():
    """With outputs of 0 and a flat prior on log σ, Σy²/σ² ~ χ²(N): mean N, variance 2N."""
    net = nn.Linear(1, 1, bias=False, dtype=F64)
    y = normal(N, 1)
    p = fitted(
        bayou.NUTS(chains=16, draws=80, warmup=60, start=None),
        net,
        (torch.zeros_like(y), y),
        likelihood=bayou.Gaussian(0.5, learn=True),
    )
    chi = y.square().sum() * (-2 * p.by_chain()["likelihood.log_scale"]).exp()
    for values, exact in ((chi, float(N)), ((chi - N).square(), 2.0 * N)):
        assert abs(values.mean() - exact) < 4.5 * float(measures.mcse(values))
    predicted = p.predict(torch.zeros(2, 1, dtype=F64), seed=0)
    spread = p.sample(100, seed=0)["likelihood.log_scale"].exp()
    assert float(predicted.std.mean()) == pytest.approx(
        float(spread.square().mean().sqrt()), rel=0.01
    )


def test_chains_take_weights_statistics_and_noise_of_their_start():
    """Batch norm runs on the statistics of the start; without one, on those of the network, even in
    train mode.
    """
    net = mlp(nn.BatchNorm1d(4))
    x, _ = data()
    started = SGLD(
        start=bayou.MAP(steps=50, lr=0.01), steps=2, draws=1, lr=1e-12, dispersal=0.0, chains=2
    )
    p = fitted(started, net, likelihood=LEARNED, seed=5)
    assert p.network.net[1].running_mean.abs().sum() > 0
    assert float(net[1].running_mean.abs().sum()) == 0
    seed = part_seed(5, "start")
    again = fitted(started.start, net, likelihood=LEARNED, seed=seed)
    assert_close(p.predict(x).outputs[0, ..., 0], again.predict(x).outputs[0], rtol=1e-4, atol=1e-4)
    noise = again.target.likelihood.log_scale.detach()
    assert_close(p.stack["likelihood.log_scale"], noise.expand(2), rtol=1e-4, atol=1e-4)
    assert float(noise) != pytest.approx(np.log(0.3))
    plain = fitted(SGLD(steps=2, draws=1, lr=1e-12, dispersal=0.0, chains=1), net.train())
    assert_close(plain.predict(x).outputs[0], net.eval()(x).detach(), rtol=1e-4, atol=1e-4)


def test_chains_begin_around_a_point_or_at_the_prior():
    short = {"steps": 1, "draws": 1, "burn_in": 0, "lr": 1e-14, "chains": 2000}
    near = fitted(SGLD(dispersal=0.05, **short)).stack["2.bias"]
    assert float(near.std()) == pytest.approx(0.05, rel=0.1)
    prior = fitted(
        SGLD(dispersal="prior", **short),
        prior={"2.*": bayou.Normal(3.0), "*": bayou.Normal(0.1)},
    )
    assert float(prior.stack["2.bias"].std()) == pytest.approx(3, rel=0.1)
    assert float(prior.stack["0.bias"].std()) == pytest.approx(0.1, rel=0.1)


def test_the_history_of_a_run():
    p = fitted(bayou.NUTS(chains=2, draws=10, warmup=10, log_every=5, max_depth=3))
    assert [record["step"] for record in p.history] == [0, 5, 10, 15, 19]
    assert {"log_joint", "accept", "step_size", "leapfrogs", "divergences", "seconds"} <= p.history[
        0
    ].keys()
    exact = target(mlp())
    last = {k: v[:, -1] for k, v in p.by_chain().items()}
    each = [{name: value[c] for name, value in last.items()} for c in range(2)]
    values = [float(exact.log_joint(w, *data())) for w in each]
    assert p.history[-1]["log_joint"] == pytest.approx(np.mean(values))


@pytest.mark.parametrize("method", [SGLD(), bayou.VI(), bayou.IVON(), bayou.Annealed()])
def test_at_a_mode_few_rows_are_one_batch_in_fewer_steps(method):
    def plan(rows, own):
        x = torch.zeros(rows, 1)
        data = as_data((x, x), own.batch_size)
        own = own.at_mode(0.3, data).with_planned_length(data)
        own = own.of if isinstance(own, bayou.Annealed) else own
        return own.steps, own.batch_size

    short, long = (3333, 3333) if isinstance(method, SGLD) else (300, 600)
    assert plan(512, method) == (short, 512)
    assert plan(513, method) == (long, 128)
    if not isinstance(method, bayou.Annealed):
        assert plan(512, replace(method, steps=70)) == (70, 128)


class Pressing(nn.Linear):
    """A layer that presses Ctrl-C at its n-th call."""

    def __init__(self, at):
        super().__init__(3, 1, dtype=F64)
        self.at, self.calls = at, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.at:
            signal.raise_signal(signal.SIGINT)
        return super().forward(x)


def test_ctrl_c_returns_the_draws_so_far_and_the_same_call_continues(tmp_path):
    method = SGLD(chains=2, steps=20, draws=8, burn_in=4, batch_size=8, lr=4e-4)
    torch.manual_seed(0)
    net = Pressing(-1)
    whole = fitted(method, net)
    net.at = 14  # a few calls at the door, then one a step
    p = fitted(method, net, checkpoint=tmp_path / "run")
    assert p.stopped == "interrupted"
    assert 0 < p.draws < whole.draws
    for name, draws in p.by_chain().items():
        assert torch.equal(draws, whole.by_chain()[name][:, : p.draws // 2])
    net.at = -1
    again = fitted(method, net, checkpoint=tmp_path / "run")
    assert again.stopped == "finished"
    assert torch.equal(again.stack["weight"], whole.stack["weight"])
    finished = fitted(method, net, checkpoint=tmp_path / "run")  # nothing left to do
    assert torch.equal(finished.stack["weight"], whole.stack["weight"])


def test_ctrl_c_before_the_first_draw_is_raised(tmp_path):
    method = SGLD(chains=2, steps=20, draws=5, burn_in=10, batch_size=8, lr=4e-4)
    with pytest.raises(KeyboardInterrupt, match=r"before its first draw \(step 12\)"):
        fitted(method, Pressing(6), checkpoint=tmp_path / "run")
    assert (tmp_path / "run").exists()


class Square(nn.Module):
    """f(x) = w²·x: a posterior with quartic tails, where a step that is too large runs away."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(1, dtype=F64))

    def forward(self, x):
        return self.w.square() * x


def test_divergence_error_names_the_chain_and_has_the_draws_of_others():
    x = torch.ones(4, 1, dtype=F64)
    method = SGLD(chains=6, steps=50, draws=50, burn_in=0, lr=0.05, dispersal=4.0)
    options = {"rows": (x, x), "likelihood": bayou.Gaussian(1.0), "seed": 2}
    with pytest.raises(
        bayou.methods.DivergenceError, match=r"step \d+: chain \d of SGLD is not finite.*smaller lr"
    ) as caught:
        fitted(method, Square(), **options)
    assert isinstance(caught.value, FloatingPointError)
    kept = caught.value.posterior
    assert kept.stopped == "diverged"
    assert kept.stack["w"].isfinite().all()
    _, step, _, chain, *_ = str(caught.value).replace(":", "").split()
    assert kept.by_chain()["w"].shape[1] == int(step)  # one draw for each step before
    alone = replace(method, steps=int(step), draws=int(step))
    before = fitted(alone, Square(), **options).by_chain()["w"]
    others = [c for c in range(6) if c != int(chain)]
    assert kept.chains < 6
    for found in kept.by_chain()["w"]:
        assert any(torch.equal(found, before[c]) for c in others)


def test_divergence_before_the_first_draw_has_no_posterior():
    with pytest.raises(bayou.methods.DivergenceError) as caught:
        fitted(SGLD(steps=200, draws=2, lr=10.0))
    assert caught.value.posterior is None
    with pytest.raises(FloatingPointError, match="chain 0 is not finite at its start"):
        fitted(bayou.NUTS(draws=2, warmup=2, dispersal=1e200))


def test_a_prior_scale_to_learn_is_an_error():
    with pytest.raises(ValueError, match="SGLD cannot learn a prior"):
        fitted(SGLD(steps=2, draws=1), prior=bayou.Normal(1.0, learn=True))

"""Ensembles: members one by one, stacked or anchored, their initial weights and their folder."""

import math
import signal
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bayou
from bayou import MAP, Ensemble
from bayou.core import rng
from bayou.inference import initial_weights, members
from bayou.inference.members import draw_anchor, draw_targets, member_seed
from bayou.inference.modes import Modes
from bayou.inference.point import PointModel
from bayou.network.target import Target
from bayou.posteriors import Empirical, Mixture
from tests.methods.draws import normal

F64 = torch.float64
ROWS = 24
SHORT = MAP(steps=12, batch_size=8, lr=0.01, checkpoint_every=3)
STILL = MAP(steps=1, lr=1e-300)
NOISE = 0.4
PRIOR = 0.8


def make_net(*extra):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 5), *extra, nn.Tanh(), nn.Linear(5, 1)).to(F64)


def make_data(rows=ROWS):
    x = normal(rows, 2, seed=1)
    return x, (x[:, :1] * 2).sin() + 0.1 * x[:, 1:]


def fitted(method, net=None, data=None, **options):
    options = {"likelihood": bayou.Gaussian(0.1), "progress": False, "seed": 3} | options
    return bayou.fit(
        make_net() if net is None else net,
        make_data() if data is None else data,
        method=method,
        **options,
    )


def ensemble(count, net=None, data=None, **options):
    """The posterior of an ensemble of short fits; ``of``, ``init`` and ``parallel`` are its
    settings.
    """
    settings = {key: options.pop(key) for key in ("of", "init", "parallel") if key in options}
    return fitted(Ensemble(count, **({"of": SHORT} | settings)), net, data, **options)


def select(posterior, rows):
    return {name: value[rows] for name, value in posterior.stack.items()}


def same(a, b):
    assert_close(a, b, rtol=0, atol=0)


class Items(Dataset):
    """The data as a Dataset that presses Ctrl-C when item number ``at`` is asked for."""

    def __init__(self, at=-1):
        self.data, self.at, self.asked = make_data(), at, 0

    def __len__(self):
        return ROWS

    def __getitem__(self, i):
        self.asked += 1
        if self.asked == self.at:
            signal.raise_signal(signal.SIGINT)
        return self.data[0][i], self.data[1][i]


def test_a_member_is_the_fit_of_its_seed():
    """With the network's own weights kept, member i is a plain MAP fit whose seed is fold(seed,
    "member", i).
    """
    posterior = ensemble(3, init="keep")
    assert isinstance(posterior, Empirical)
    assert posterior.draws == 3
    for member in range(3):
        seed = rng.fold(3, "member", member)
        same(select(posterior, member), fitted(SHORT, seed=seed).template())
    assert {record["member"] for record in posterior.history} == {0.0, 1.0, 2.0}


def test_members_start_at_their_own_weights():
    net = make_net()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    posterior = ensemble(4, net, of=STILL)
    same(dict(net.state_dict()), before)
    weight = posterior.stack["0.weight"]
    assert len({tuple(w.flatten().tolist()) for w in [*weight, net[0].weight.detach()]}) == 5
    assert (weight.abs() <= 2**-0.5).all()  # nn.Linear starts uniformly within 1/√fan_in
    kept = ensemble(2, net, of=STILL, init="keep")
    for member in range(2):
        same(select(kept, member), before)
    halved = ensemble(2, net, of=STILL, init=lambda net: net[0].weight.mul_(0.5))
    assert torch.equal(halved.stack["0.weight"][1], before["0.weight"] / 2)
    drawn = ensemble(2, net, of=STILL, init=lambda net: net[0].weight.normal_())
    assert not torch.equal(drawn.stack["0.weight"][0], drawn.stack["0.weight"][1])


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter, B of which begins at 0 (Hu et al. 2021)."""

    def __init__(self):
        super().__init__()
        self.base, self.a = nn.Linear(2, 1, dtype=F64), nn.Linear(2, 2, bias=False, dtype=F64)
        self.b = nn.Linear(2, 1, bias=False, dtype=F64)
        nn.init.zeros_(self.b.weight)
        self.base.requires_grad_(False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


def worn(kind):
    if kind == "adapter":
        return Adapted()
    net = nn.Sequential(
        nn.Linear(2, 50, dtype=F64), nn.BatchNorm1d(50, dtype=F64), nn.Linear(50, 1, dtype=F64)
    )
    if kind == "trained":
        net[1] = nn.Tanh()
        return fitted(MAP(steps=100, lr=0.1), net, prior=bayou.Normal(9.0)).to_module()
    if kind == "statistics":
        net(make_data()[0])
    elif kind == "norm":
        net[1].weight.data[0] = 1.1
    else:
        nn.init.normal_(net[0].weight, std=9.0)
    return net


WORN = {
    "adapter": "b.weight",
    "trained": r"\d.(weight|bias)",
    "statistics": "1.running_mean",
    "norm": "1.weight",
    "own": "0.weight",
}


@pytest.mark.parametrize("kind", WORN)
def test_trained_weights_are_not_reset_by_default(kind):
    with pytest.raises(
        ValueError,
        match=rf"'{WORN[kind]}' is not as drawn by reset_parameters.*init='keep'.*init='reset'",
    ):
        ensemble(2, worn(kind), of=STILL)
    if kind in ("adapter", "trained"):
        with pytest.raises(ValueError, match=f"'{WORN[kind]}' is not as drawn by reset_parameters"):
            ensemble(2, worn(kind), of=STILL, parallel="vmap")


def test_init_keep_keeps_the_zeros_of_an_adapter():
    kept = ensemble(2, Adapted(), of=STILL, init="keep")
    assert (kept.stack["b.weight"].abs() < 1e-200).all()
    drawn = ensemble(2, Adapted(), of=STILL, init="reset")
    assert (drawn.stack["b.weight"].abs() > 1e-200).all()


def test_fresh_layers_are_not_mistaken_for_trained_ones():
    kinds = [
        lambda: nn.Linear(3, 40),
        lambda: nn.Linear(1, 1),
        lambda: nn.Conv2d(1, 4, 3),
        lambda: nn.GRU(2, 5, 2),
        lambda: nn.Embedding(30, 6, padding_idx=0),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.TransformerEncoderLayer(4, 2, 16),
        lambda: nn.BatchNorm1d(7),
        lambda: nn.Bilinear(2, 3, 4),
        lambda: nn.PReLU(3),
    ]
    for seed in range(8):
        for make in kinds:
            torch.manual_seed(seed)
            net, drawn = make(), make()
            initial_weights.reset(drawn)
            initial_weights.check_fresh(net, drawn)


def test_reset_draws_all_modules_except_frozen_parameters():
    net = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(4, 2),
            "norm": nn.BatchNorm1d(3),
            "last": nn.Linear(4, 2),
        }
    )
    net["last"].bias.requires_grad_(False)
    with torch.no_grad():
        for tensor in [*net.parameters(), net["norm"].running_mean]:
            tensor.fill_(7.0)
    initial_weights.reset(net)
    assert (
        net["attention"].out_proj.bias == 0
    ).all()  # what attention sets, after its Linear set it otherwise
    assert (net["norm"].weight == 1).all()
    assert (net["norm"].running_mean == 0).all()
    assert (net["last"].bias == 7).all()
    assert (net["last"].weight != 7).all()
    frozen = nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 1))
    frozen[0].requires_grad_(False)
    frozen[0].running_mean.fill_(7.0)
    initial_weights.reset(frozen)
    assert (frozen[0].running_mean == 7).all()


class Bare(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(2, dtype=F64))
        self.weight = nn.Parameter(torch.randn(2, 1, dtype=F64))

    def forward(self, x):
        return (x * self.scale) @ self.weight


class Positions(nn.Module):
    """Bare parameters beside a layer: random positions, a constant token and a table of sines."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(1, 16, dtype=F64)
        self.positions = nn.Parameter(0.02 * torch.randn(2, 16, dtype=F64))
        self.token = nn.Parameter(torch.zeros(16, dtype=F64))
        angles = torch.linspace(0, 3, 32, dtype=F64).reshape(2, 16)
        self.table = nn.Parameter(angles.sin())
        self.head = nn.Linear(16, 1, dtype=F64)

    def forward(self, x):
        z = self.embed(x.unsqueeze(-1)) + self.positions + self.token + self.table
        return self.head(z.tanh().mean(1))


def test_members_of_a_last_layer_share_the_rest():
    """A sub-ensemble (Valdenegro-Toro 2019): where="last" keeps the body, and each member resets
    its own last layer.
    """
    net = make_net()
    trained = fitted(SHORT, net).to_module()
    posterior = ensemble(3, trained, init="reset", where="last")
    assert {name: value.shape for name, value in posterior.stack.items()} == {
        "2.weight": (3, 1, 5),
        "2.bias": (3, 1),
    }
    x, features = make_data()[0], trained[:2](make_data()[0]).detach()
    each = zip(posterior.stack["2.weight"], posterior.stack["2.bias"], strict=True)
    known = torch.stack([nn.functional.linear(features, weight, bias) for weight, bias in each])
    assert_close(posterior.predict(x).outputs, known)
    assert known.std(0).min() > 0


def test_weights_without_reset_parameters_are_an_error():
    with pytest.raises(ValueError, match=r"'scale' \(of a Bare\).*init='keep'"):
        ensemble(2, Bare())
    ensemble(2, Bare(), init="keep")
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(2, 1, dtype=F64)))
    with pytest.raises(ValueError, match="reset_parameters"):
        ensemble(2, normed)


def test_bare_parameters_are_shuffled_unless_they_are_constants_or_tables():
    """Positions beside layers that can be reset: members start at other draws of the same
    values.
    """
    torch.manual_seed(0)
    net = Positions()
    target = Target.build(net, bayou.Gaussian(0.1), None, 8)
    drawn = [members.member_target(target, None, seed).net for seed in range(2)]
    given = net.positions.detach().flatten()
    for member in drawn:
        assert not torch.equal(member.positions.flatten(), given)
        assert torch.equal(member.positions.detach().flatten().sort().values, given.sort().values)
        assert torch.equal(member.token, net.token)
        assert torch.equal(member.table, net.table)
    assert not torch.equal(drawn[0].positions, drawn[1].positions)
    posterior = ensemble(3, net)
    assert posterior.stack["positions"].std(0).min() > 0


def test_members_have_their_own_statistics_and_noise():
    """Predictions are the mixture of what each member predicts by itself, with its own batch norm
    and noise.
    """
    net, (x, y) = make_net(nn.BatchNorm1d(5)), make_data(9)
    noise = bayou.Gaussian(0.3, learn=True)
    posterior = ensemble(3, net, init="keep", likelihood=noise)
    assert {"1.running_mean", "1.running_var", "likelihood.log_scale"} <= posterior.stack.keys()
    alone = [fitted(SHORT, net, likelihood=noise, seed=rng.fold(3, "member", i)) for i in range(3)]
    one = [member.predict(x) for member in alone]
    p = posterior.predict(x, seed=0)
    expected = (
        torch.stack([member.log_prob(y) for member in one]).logsumexp(0)
        - torch.tensor(3.0, dtype=F64).log()
    )
    assert_close(p.log_prob(y), expected, rtol=1e-12, atol=1e-12)
    assert_close(
        p.mean, torch.stack([member.mean for member in one]).mean(0), rtol=1e-12, atol=1e-12
    )
    assert len({member.target.likelihood.log_scale.item() for member in alone}) == 3


LONG = {"steps": 15, "batch_size": 7, "lr": 0.01}  # 24 rows: batches of 7, 7, 7 and 3


@pytest.mark.parametrize(
    ("of", "options"),
    [
        (MAP(**LONG), {}),
        (
            bayou.MLE(**LONG, clip=0.5, schedule="cosine"),
            {"likelihood": bayou.Gaussian(0.3, learn=True)},
        ),
        (MAP(**LONG, l2=0.01), {}),
        (MAP(**(LONG | {"batch_size": 100})), {"init": "keep"}),
        (MAP(**LONG), {"data": Items(), "frozen": True}),
    ],
)
def test_stacked_members_are_the_sequential_ones(of, options):
    options, net = dict(options), make_net()
    net[0].bias.requires_grad_(not options.pop("frozen", False))
    one = ensemble(4, net, of=of, **options)
    two = ensemble(4, net, of=of, parallel="vmap", **options)
    assert_close(two.stack, one.stack, rtol=0, atol=1e-6)
    assert torch.equal(two.target.net[0].weight, net[0].weight)
    assert_close(two.target.log_prior(two.template()), one.target.log_prior(one.template()))
    x, y = make_data(5)
    assert_close(two.predict(x).log_prob(y), one.predict(x).log_prob(y), rtol=1e-5, atol=1e-5)
    if "init" not in options:
        # members that differ, or the test would say nothing
        assert one.stack["0.weight"].std(0).min() > 1e-3


def test_clipping_is_per_member():
    """One member with a huge gradient must not shorten the steps of the others."""
    start = iter([1e3, 1.0, 1e3, 1.0])
    method = Ensemble(
        2,
        of=bayou.MLE(**(LONG | {"steps": 3, "clip": 1.0})),
        init=lambda n: n[2].weight.mul_(next(start)),
    )
    one = fitted(method)
    two = fitted(replace(method, parallel="vmap"))
    assert_close(two.stack, one.stack, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("method", "net", "words"),
    [
        (bayou.VI(steps=2), None, "MLE and MAP"),
        (MAP(steps=2, max_norm=1.0), None, "max_norm"),
        (MAP(steps=2, validation=0.3), None, "validation"),
        (MAP(steps=2, optimizer=torch.optim.SGD), None, "optimizer"),
        (SHORT, lambda: make_net(nn.BatchNorm1d(5)), "running statistics"),
        (SHORT, lambda: Recurrent(), "cannot be mapped"),
        (SHORT, lambda: Counting(), "'calls' changes"),
    ],
)
def test_methods_and_networks_that_cannot_be_stacked_are_errors(method, net, words):
    with pytest.raises(ValueError, match=f"{words}.*parallel=None"):
        ensemble(2, net and net(), of=method, parallel="vmap")


def test_a_loader_cannot_be_stacked():
    loader = DataLoader(TensorDataset(*make_data()), batch_size=8)
    with pytest.raises(ValueError, match="DataLoader.*parallel=None"):
        ensemble(2, parallel="vmap", data=loader)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(2, 3, dtype=F64), nn.Linear(3, 1, dtype=F64)

    def forward(self, x):
        return self.out(self.rnn(x.unsqueeze(0))[0][0])


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(2, 1, dtype=F64)
        self.register_buffer("calls", torch.zeros((), dtype=F64))

    def forward(self, x):
        self.calls = self.calls + 1
        return self.out(x)


def test_stacked_members_have_their_own_dropout():
    """From the same weights and on full batches, dropout is all that can tell members apart."""
    method = Ensemble(3, of=bayou.MLE(steps=3), parallel="vmap", init="keep")
    for extra, different in (((), 1), ((nn.Dropout(0.5),), 3)):
        found = fitted(method, make_net(*extra)).stack["0.weight"]
        assert (
            len({tuple(weight.flatten().round(decimals=9).tolist()) for weight in found})
            == different
        )


def test_stacked_training_continues_after_ctrl_c_within_an_epoch(
    tmp_path,
):
    method = Ensemble(2, of=MAP(steps=14, batch_size=7, lr=0.01), parallel="vmap")
    whole = fitted(method, data=Items())
    data = Items(120)
    posterior = fitted(method, data=data, checkpoint=tmp_path / "run")
    assert posterior.stopped == "interrupted"
    assert posterior.draws == 2
    again = fitted(method, data=Items(), checkpoint=tmp_path / "run")
    assert len(posterior.history) == 1
    same(again.stack, whole.stack)
    assert not torch.equal(posterior.stack["0.weight"], whole.stack["0.weight"])


def test_finished_members_in_the_folder_are_not_trained_again(tmp_path, monkeypatch):
    method, folder = Ensemble(3, of=SHORT), tmp_path / "run"
    whole = fitted(method, checkpoint=folder)
    names = ["ensemble.run", "member-000.bayou", "member-001.bayou", "member-002.bayou"]
    assert sorted(path.name for path in folder.iterdir()) == names
    member = bayou.load(folder / "member-001.bayou", make_net())
    same(member.template(), select(whole, 1))
    monkeypatch.setattr(PointModel, "loss", None)  # no step can be made
    again = ensemble(3, of=replace(SHORT, checkpoint_every=5), checkpoint=folder)
    same(again.stack, whole.stack)
    assert again.history == whole.history
    assert again.stopped == "finished"


def test_folders_of_other_runs_are_errors(tmp_path):
    method, folder = Ensemble(2, of=SHORT), tmp_path / "run"
    fitted(method, checkpoint=folder)
    for other, options in (
        (Ensemble(3, of=SHORT), {}),
        (Ensemble(2, of=bayou.MLE(steps=12)), {}),
        (method, {"seed": 4}),
        (method, {"data": make_data(20)}),
    ):
        with pytest.raises(bayou.posteriors.FileError, match="another run"):
            fitted(other, checkpoint=folder, **options)
    (folder / "ensemble.run").unlink()
    (tmp_path / "file").write_text("x")
    for name, words in (
        ("run", "ensemble.run"),
        ("file", "is a file"),
        ("no/run", "does not exist"),
    ):
        with pytest.raises(bayou.posteriors.FileError, match=words):
            fitted(method, checkpoint=tmp_path / name)


def test_members_that_files_cannot_hold_are_restored_from_their_runs(tmp_path):
    """A posterior with a density as its prior cannot be loaded without it; its run can be finished
    again at once.
    """
    prior = {
        "*.weight": bayou.priors.DensityPrior(lambda w: -w.square().sum((-1, -2)) / 2),
        "*": bayou.priors.DensityPrior(lambda w: -w.square().sum(-1) / 2),
    }
    whole = ensemble(2, checkpoint=tmp_path / "run", prior=prior)
    assert (tmp_path / "run" / "member-000.run").exists()
    again = ensemble(2, checkpoint=tmp_path / "run", prior=prior)
    same(again.stack, whole.stack)


def test_ctrl_c_returns_the_finished_members(tmp_path):
    method, items = Ensemble(3, of=SHORT), 12 * 8 + 8 * 6  # 12 steps of 8 rows, and 6 more
    whole = fitted(method, data=Items())
    data = Items(items)
    some = fitted(method, data=data, checkpoint=tmp_path / "run")
    assert some.stopped == "interrupted"
    assert some.draws == 1
    same(some.stack, select(whole, slice(1)))
    same(fitted(method, data=Items(), checkpoint=tmp_path / "run").stack, whole.stack)
    first = fitted(method, data=Items(40))
    assert first.stopped == "interrupted"
    assert first.draws == 1
    assert not torch.equal(first.stack["0.weight"], whole.stack["0.weight"][:1])


def spoiled(*bad):
    """An init that gives some of the members weights that are no numbers."""
    count = iter(range(100))

    def init(net):
        initial_weights.reset(net)
        if next(count) in bad:
            net[0].weight.fill_(torch.inf)

    return init


def test_members_that_fail_are_named_and_the_others_kept(tmp_path):
    whole = ensemble(3)
    with pytest.raises(
        bayou.methods.EnsembleError,
        match="1 of 3 members did not finish. member 1: Floating.*posterior",
    ) as raised:
        ensemble(3, init=spoiled(1), checkpoint=tmp_path / "run")
    assert list(raised.value.failures) == [1]
    assert isinstance(raised.value.__cause__, FloatingPointError)
    assert str(tmp_path / "run") in str(raised.value)
    assert isinstance(raised.value.posterior, Empirical)
    same(raised.value.posterior.stack, select(whole, [0, 2]))
    assert {path.name for path in (tmp_path / "run").glob("member*")} == {
        "member-000.bayou", "member-002.bayou"
    }  # fmt: skip
    with pytest.raises(bayou.methods.EnsembleError) as raised:
        ensemble(2, init=spoiled(0, 1))
    assert raised.value.posterior is None


def test_a_mixture_needs_posteriors_and_has_no_bound():
    data = torch.randn(6, 2), torch.randint(2, (6,))
    one = bayou.fit(nn.Linear(2, 2), data, MAP(steps=1), progress=False)
    with pytest.raises(ValueError, match="at least one posterior"):
        Mixture([])
    with pytest.raises(ValueError, match="of an ensemble, a component"):
        bayou.elbo(Mixture([one, one]), data)


def linear(rows=12):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 3, generator=generator, dtype=F64)
    y = x[:, :1] + NOISE * torch.randn(rows, 1, generator=generator, dtype=F64)
    torch.manual_seed(0)
    net = nn.Linear(3, 1, bias=False, dtype=F64)
    return Target.build(net, bayou.Gaussian(NOISE), bayou.Normal(PRIOR), rows), (x, y)


@pytest.mark.parametrize(("count", "spread"), [(4000, 1.0), (3, 0.5)])
def test_anchored_members_of_a_linear_model_are_draws_of_its_posterior(count, spread):
    """Their mean is that of the posterior for any number; of many, so is their covariance."""
    target, (x, y) = linear()
    randomized = Ensemble(count, anchored=spread).randomize(target, y, 0)
    masks = torch.ones(count, len(y), dtype=torch.bool)
    modes = Modes(target, (x, y), masks, [{}] * count, 1e-14, None, *randomized)
    weights = modes.run(300)["weight"].squeeze(1)
    covariance = torch.linalg.inv(x.T @ x / NOISE**2 + torch.eye(3, dtype=F64) / PRIOR**2)
    mean = (covariance @ x.T @ y / NOISE**2).squeeze(1)
    assert_close(weights.mean(0), mean, atol=1e-4, rtol=0)
    assert (weights - mean).abs().max() > 0.01
    if spread == 1:
        scale = torch.outer(covariance.diagonal(), covariance.diagonal()).sqrt()
        errors = (weights.T.cov() - covariance) / scale
        assert errors.abs().max() < 5 * math.sqrt(2 / count)


def test_an_anchored_member_is_the_mode_around_its_anchor():
    target, (x, y) = linear()
    method = Ensemble(2, of=MAP(steps=200, lr=0.05), init="keep", anchored=True)
    posterior = method.fit(target, (x, y), seed=3, progress=False)
    weights = posterior.sample(2, seed=0)["weight"]
    precision = x.T @ x / NOISE**2 + torch.eye(3, dtype=F64) / PRIOR**2
    expected = []
    for member in range(2):
        seed = member_seed(3, member)
        anchor = draw_anchor(target, seed)["weight"].T / PRIOR**2
        expected.append(
            torch.linalg.solve(precision, x.T @ draw_targets(target, y, seed) / NOISE**2 + anchor).T
        )
    distance = torch.cdist(weights.flatten(1), torch.stack(expected).flatten(1)).amin(0)
    assert distance.max() < 1e-2
    assert (expected[0] - expected[1]).norm() > 0.05
    assert (
        float(posterior.target.priors["weight"].mean.abs().max()) == 0.0
    )  # that of the posterior is not moved


def test_classes_have_anchors_and_keep_their_labels():
    target = Target.build(nn.Linear(2, 2), bayou.Categorical(), bayou.Normal(1.0), 6)
    labels = torch.arange(6) % 2
    randomized = Ensemble(2, anchored=True).randomize(target, labels, 0)
    assert randomized is not None
    anchors, targets = randomized
    assert torch.equal(targets, torch.stack([labels, labels]))
    assert not torch.equal(anchors["weight"][0], anchors["weight"][1])
    assert Ensemble(2).randomize(target, labels, 0) is None


def test_anchors_need_a_known_noise_and_tensors():
    target, (x, y) = linear()
    method = Ensemble(2, of=MAP(steps=2), init="keep", anchored=True)
    learned = Target.build(
        target.net, bayou.Gaussian(NOISE, learn=True), bayou.Normal(PRIOR), len(y)
    )
    with pytest.raises(ValueError, match="whose size must be known"):
        method.fit(learned, (x, y), progress=False)
    with pytest.raises(ValueError, match=r"needs tensors \(x, y\)"):
        method.fit(target, DataLoader(TensorDataset(x, y), 4), progress=False)

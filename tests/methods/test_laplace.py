"""Laplace: which weights are random, predictions, the start and errors."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.testing import assert_close
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bayou
from bayou.methods.laplace_run import SCALES
from bayou.priors import DensityPrior
from tests.methods.draws import normal

F64 = torch.float64
N, CLASSES = 24, 3


def net(*extra, bias=True):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(
            nn.Linear(4, 5, bias=bias), nn.Tanh(), *extra, nn.Linear(5, CLASSES, bias=bias)
        ).double()


def rows(n=N):
    return normal(n, 4, seed=1), torch.arange(n) % CLASSES


def fitted(model=None, data=None, *, likelihood=None, prior_rules=None, seed=0, **options):
    method = bayou.Laplace(**({"structure": "full", "start": None} | options))
    settings = {"likelihood": likelihood, "prior": prior_rules, "seed": seed, "progress": False}
    return bayou.fit(model or net(), data or rows(), method, **settings)


every_structure = pytest.mark.parametrize("structure", ["full", "diagonal", "kronecker"])


def jacobian(model, x, names):
    """(B, K, D), by autograd."""
    own = [dict(model.named_parameters())[name] for name in names]
    each = [
        [torch.autograd.grad(f, own, retain_graph=True) for f in row.reshape(-1)]
        for row in model(x)
    ]
    return torch.stack(
        [torch.stack([torch.cat([g.reshape(-1) for g in row]) for row in one]) for one in each]
    )


def dense(posterior):
    """Σ, in the order of its tensors."""
    covariance = posterior.covariance
    spread = covariance.spread(covariance.from_vector(torch.eye(covariance.size, dtype=F64)))
    return spread @ spread.mT


def of_the_data(posterior):
    """The precision of all weights without that of their prior."""
    return torch.linalg.inv(dense(posterior)) - torch.eye(43, dtype=F64)


@pytest.mark.parametrize(
    ("where", "names"),
    [
        ("*", ["0.weight", "0.bias", "2.weight", "2.bias"]),
        ("2.*", ["2.weight", "2.bias"]),
        ("last", ["2.weight", "2.bias"]),
        (("0.bias", "2.w*"), ["0.bias", "2.weight"]),
    ],
)
@every_structure
def test_where_selects_the_random_tensors(where, names, structure):
    posterior = fitted(where=where, structure=structure)
    assert list(posterior.covariance.shapes) == names
    drawn = posterior.sample(3, seed=0)
    for name, value in net().named_parameters():
        moved = not torch.equal(drawn[name][0], value)
        assert moved == (name in names)


def test_the_last_layer_is_the_one_that_is_used_last():
    """Not the one that is registered last."""

    class Backwards(nn.Module):
        def __init__(self):
            super().__init__()
            self.head, self.body = nn.Linear(5, CLASSES), nn.Linear(4, 5)

        def forward(self, x):
            return self.head(self.body(x).tanh())

    posterior = fitted(Backwards().double(), where="last")
    assert list(posterior.covariance.shapes) == ["head.weight", "head.bias"]


def test_a_last_layer_posterior_is_a_block_of_the_full_precision():
    full, last = fitted(), fitted(where="last")
    block = torch.linalg.inv(dense(full))[-18:, -18:]
    assert_close(torch.linalg.inv(dense(last)), block, rtol=1e-8, atol=1e-8)


@every_structure
@pytest.mark.parametrize("where", ["*", "last"])
def test_the_function_has_the_variance_of_its_linearization(structure, where):
    model = net()
    posterior = fitted(model, structure=structure, where=where)
    x, _ = rows(7)
    mean, covariance = posterior.function(x)
    assert_close(mean, model(x).detach())
    j = jacobian(model, x, list(posterior.covariance.shapes))
    expected = j @ dense(posterior) @ j.mT
    assert_close(covariance, expected, rtol=1e-8, atol=1e-10)
    for options in ({"batch_size": 1}, {"batch_size": 3}):
        assert_close(posterior.function(x, **options)[1], covariance)
    assert_close(posterior.function(x, diagonal=True)[1], covariance.diagonal(dim1=1, dim2=2))


def test_linearized_draws_are_linear_in_the_weights():
    model = net()
    posterior = fitted(model)
    x, _ = rows(5)
    assert posterior.predictive == "linearized"
    p, drawn = posterior.predict(x, 6, seed=3), posterior.sample(6, seed=3)
    j = jacobian(model, x, list(drawn))
    shift = torch.cat([(drawn[n] - dict(model.named_parameters())[n]).flatten(1) for n in drawn], 1)
    expected = model(x) + torch.einsum("bkd,sd->sbk", j, shift)
    assert_close(p.outputs, expected.detach(), rtol=1e-9, atol=1e-9)


def test_sampled_draws_are_networks():
    model = net()
    posterior = fitted(model, predictive="sampled")
    x, _ = rows(5)
    p, drawn = posterior.predict(x, 3, seed=3), posterior.sample(3, seed=3)
    each = [functional_call(model, {n: v[s] for n, v in drawn.items()}, (x,)) for s in range(3)]
    assert_close(p.outputs, torch.stack(each).detach())
    other = fitted(model).predict(x, 3, seed=3, predictive="sampled")
    assert_close(other.outputs, p.outputs)


def test_probit_is_its_formula():
    posterior = fitted(predictive="probit")
    x, y = rows(5)
    mean, covariance = posterior.function(x)
    scaled = mean / (1 + math.pi / 8 * covariance.diagonal(dim1=1, dim2=2)).sqrt()
    p = posterior.predict(x)
    assert_close(p.mean, scaled.softmax(-1))
    assert p.log_prob(y).shape == (5,)
    assert_close(fitted().predict(x, predictive="probit").mean, p.mean)
    with pytest.raises(ValueError, match="one function"):
        posterior.predict(x, 10)


@pytest.mark.parametrize("predictive", ["linearized", "sampled", "probit"])
def test_files_keep_the_way_of_predicting_and_the_evidence(predictive, tmp_path):
    posterior = fitted(predictive=predictive, structure="kronecker")
    posterior.save(tmp_path / "p")
    loaded = bayou.load(tmp_path / "p", net())
    assert loaded.predictive == predictive
    assert loaded.log_evidence == posterior.log_evidence
    x, _ = rows(4)
    assert torch.equal(loaded.predict(x, seed=1).outputs, posterior.predict(x, seed=1).outputs)


def test_recurrent_networks_are_linearized_too():
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, CLASSES)

        def forward(self, x):
            return self.head(self.cell(x.reshape(-1, 2, 2))[0][:, -1])

    torch.manual_seed(0)
    model = Recurrent().double()
    posterior = fitted(model)
    x, _ = rows(3)
    j = jacobian(model, x, list(posterior.covariance.shapes))
    assert_close(posterior.function(x)[1], j @ dense(posterior) @ j.mT)
    assert posterior.predict(x, 4, seed=0).outputs.shape == (4, 3, CLASSES)


def test_temperature_divides_the_precision():
    for structure in ("full", "diagonal", "kronecker"):
        warm, cold = fitted(structure=structure), fitted(structure=structure, temperature=0.25)
        assert_close(dense(cold), 0.25 * dense(warm), rtol=1e-8, atol=1e-10)
        assert cold.log_evidence == warm.log_evidence


def test_a_mean_field_posterior_as_the_prior():
    """A precision for every weight: full and diagonal add it exactly, Kronecker refuses."""
    first = bayou.fit(net(), rows(), method=bayou.VI(bayou.MeanField(), steps=3), progress=False)
    rules = first.as_prior()
    for structure in ("full", "diagonal"):
        posterior = fitted(structure=structure, prior_rules=rules)
        assert posterior.log_evidence is not None
    with pytest.raises(ValueError, match=r"one prior scale for all of '0\.weight'"):
        fitted(structure="kronecker", prior_rules=rules)


def test_a_validated_prior_predicts_best():
    x, y = rows(80)
    start = bayou.MAP(steps=100, lr=0.02)
    posterior = fitted(
        net(), (x, y), start=start, prior="validation", validation=0.25, structure="diagonal"
    )
    tried = [record for record in posterior.history if "prior_scale" in record]
    assert len(tried) == len(SCALES)
    lowest = min(record["validation"] for record in tried)
    scale = math.exp(float(posterior.target.priors["0.weight"].log_scale))
    selected = next(record for record in tried if record["prior_scale"] == pytest.approx(scale))
    assert selected["validation"] < lowest + 0.3  # one standard error of 20 rows
    assert posterior.target.n == 60
    with pytest.raises(ValueError, match="split a DataLoader's data yourself"):
        fitted(net(), DataLoader(TensorDataset(x, y), 8), prior="validation")


def test_an_evidence_prior_survives_a_file(tmp_path):
    posterior = fitted(structure="kronecker", prior_rules=bayou.Normal(1.0, learn=True))
    posterior.save(tmp_path / "p")
    loaded = bayou.load(tmp_path / "p", net())
    scales = {n: float(p.log_scale) for n, p in posterior.target.priors.items()}
    assert {n: float(p.log_scale) for n, p in loaded.target.priors.items()} == scales
    assert scales["0.weight"] == pytest.approx(scales["0.bias"])  # a layer shares its factor
    assert len({round(value, 9) for value in scales.values()}) == 2
    plain = fitted(structure="kronecker")
    assert posterior.log_evidence is not None
    assert plain.log_evidence is not None
    assert posterior.log_evidence > plain.log_evidence


def test_a_learned_scale_is_shared_by_a_layer():
    rules = {"0.weight": bayou.Normal(1.0, learn=True), "*": bayou.Normal(1.0)}
    with pytest.raises(ValueError, match=r"0\.weight and 0\.bias share a scale"):
        fitted(structure="kronecker", prior_rules=rules)
    posterior = fitted(structure="full", prior_rules=rules, start=bayou.MAP(steps=5))
    scales = {n: math.exp(float(p.log_scale)) for n, p in posterior.target.priors.items()}
    assert scales["0.weight"] != pytest.approx(1.0)
    assert all(scales[name] == pytest.approx(1.0) for name in ("0.bias", "2.weight", "2.bias"))


def test_the_center_is_the_point_of_the_start():
    start = bayou.MAP(steps=7, batch_size=8, log_every=1)
    point = bayou.fit(net(), rows(), method=start, progress=False, seed=3)
    posterior = fitted(start=start, seed=3, batch_size=5)
    same = point.sample(1, seed=0)
    assert all(torch.equal(posterior.center[name], same[name][0]) for name in posterior.center)
    steps = [record["step"] for record in posterior.history]
    assert steps == [*map(float, range(7)), 7.0]
    parts = posterior.history[-1]
    formula = (
        parts["log_likelihood"]
        + parts["log_prior"]
        + 43 / 2 * math.log(2 * math.pi)
        - parts["log_det"] / 2
    )
    assert posterior.log_evidence == pytest.approx(formula)


def test_the_prior_of_weight_decay_is_the_prior_of_laplace():
    posterior = fitted(start=bayou.MAP(steps=2, l2=0.01))
    prior = posterior.target.priors["0.weight"]
    assert math.exp(-2 * float(prior.log_scale)) == pytest.approx(N * 0.01)


@every_structure
def test_pretrained_networks_with_norms_and_dropout(structure):
    """In eval mode, whatever mode they are handed over in; neither weights nor running statistics
    move.
    """
    model = net(nn.BatchNorm1d(5), nn.Dropout(0.5), nn.LayerNorm(5))
    x, y = rows()
    for _ in range(3):
        model(x)
    model.train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    posterior = fitted(model, (x, y), structure=structure)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.training
    assert_close(posterior.function(x)[0], model.eval()(x).detach())


def test_datasets_and_loaders_give_the_same_curvature():
    class Pairs(Dataset[tuple[Tensor, int]]):
        def __len__(self):
            return N

        def __getitem__(self, index):
            return rows()[0][index], index % CLASSES

    expected = dense(fitted())
    for data in (
        Pairs(),
        DataLoader(Pairs(), 7),
        DataLoader(TensorDataset(*rows()), 5, shuffle=True),
    ):
        assert_close(dense(fitted(data=data)), expected)


def test_curvature_is_scaled_to_rows_that_a_loader_drops():
    """drop_last leaves 20 of 24 rows: the sum is scaled to all of them."""
    x, y = rows()
    posterior = fitted(data=DataLoader(TensorDataset(x, y), 10, drop_last=True))
    few = fitted(data=(x[:20], y[:20]))
    assert_close(of_the_data(posterior), of_the_data(few) * N / 20, rtol=1e-8, atol=1e-9)


class Stopping(Dataset[tuple[Tensor, int]]):
    """Data that press Ctrl-C after some rows."""

    def __init__(self, after):
        self.left = after

    def __len__(self):
        return N

    def __getitem__(self, index):
        self.left -= 1
        if self.left < 0:
            raise KeyboardInterrupt
        return rows()[0][index], index % CLASSES


def test_ctrl_c_extrapolates_the_curvature_so_far():
    """Checks read the first batch a few times; after that, two of three batches are read."""
    uninterrupted = Stopping(10**6)
    fitted(data=uninterrupted, batch_size=8)
    # all rows are read for the curvature, and again to compare the posterior with its mode
    before = 10**6 - uninterrupted.left - 2 * N
    posterior = fitted(data=Stopping(before + 16), batch_size=8)
    assert posterior.stopped == "interrupted"
    x, y = rows()
    few = fitted(data=(x[:16], y[:16]))
    assert_close(of_the_data(posterior), of_the_data(few) * N / 16, rtol=1e-8, atol=1e-9)
    with pytest.raises(KeyboardInterrupt):
        fitted(data=Stopping(before), batch_size=8)


@every_structure
def test_many_outputs_do_not_cost_a_backward_pass_each(structure):
    calls = []
    model = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 101)).double()
    model[1].register_full_backward_hook(lambda *_: calls.append(1))
    x, y = torch.randn(8, 3, dtype=F64), torch.arange(8)
    fitted(model, (x, y), structure=structure, prior_rules=bayou.Normal())
    assert len(calls) <= 4  # with checks of the first batch


def test_a_full_covariance_has_a_limit():
    model = nn.Sequential(nn.Linear(4, 2000), nn.Linear(2000, CLASSES)).double()
    with pytest.raises(
        ValueError, match=r"16,003 weights has 256,096,009 entries; at most 5,000.*where='last'"
    ):
        fitted(model, start=bayou.MAP(steps=10**6))  # before the start is run


@pytest.mark.filterwarnings(
    "ignore:no gradient of the outputs"
)  # an error follows, unless it is left out
def test_a_tensor_that_is_never_used_is_an_error():
    model = net()
    model.register_parameter("idle", nn.Parameter(torch.zeros(3, dtype=F64)))
    with pytest.raises(ValueError, match=r"'idle' is never used.*leave it out of `where`"):
        fitted(model)
    assert "idle" not in fitted(model, where=("0.*", "2.*")).covariance.shapes


@every_structure
def test_curvature_that_is_not_finite_is_named(structure):
    model = net()
    model[2].weight.data[0, 0] = torch.inf
    with pytest.raises(FloatingPointError, match="outputs of the network are not finite"):
        fitted(model, structure=structure)
    model = net()
    x, y = rows()
    x[-1] = 1e200  # in a batch that the dry run does not see
    model[0] = nn.Identity()
    model[1] = nn.Identity()
    model[2] = nn.Linear(4, CLASSES).double()
    with pytest.raises(
        FloatingPointError, match=r"the curvature of .* is not finite at this point"
    ):
        fitted(
            model,
            (x, (y % 2).double().unsqueeze(1).expand(-1, 3)),
            structure=structure,
            likelihood=bayou.Gaussian(),
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"where": "last", "prior_rules": bayou.Normal(1.0, learn=True)},
            r"'0\.weight' is a point here .*learn=False",
        ),
        (
            {"prior_rules": bayou.priors.StudentT()},
            r"needs Normal priors, and the prior of '0\.weight' is a BoundStudentT",
        ),
        (
            {
                "prior_rules": DensityPrior(lambda w: -w.square().flatten(-2).sum(-1)),
                "where": "*.weight",
            },
            "BoundDensity",
        ),
        # softmax does not see a common shift of the logits: only the prior holds it
        ({"prior_rules": bayou.Normal(1e30)}, r"not positive definite.*Normal\(1\.0\)"),
        (
            {
                "predictive": "probit",
                "likelihood": bayou.Gaussian(),
                "data": (rows()[0], rows()[0][:, :3]),
            },
            "probit predictions are for classes",
        ),
    ],
)
def test_unsuitable_priors_and_predictions_are_errors(options, message):
    with pytest.raises(ValueError, match=message):
        fitted(**options)


def test_a_point_may_have_any_prior():
    fitted(prior_rules={"0.*": bayou.priors.StudentT(), "*": bayou.Normal()}, where="2.*")


def test_ways_of_predicting_are_checked():
    posterior = fitted()
    with pytest.raises(ValueError, match="predictive must be one of"):
        posterior.predict(rows()[0], predictive="closed")


def test_a_wide_prior_in_float32_has_a_positive_precision():
    """JᵀJ of 20 rows has 61 − 20 zero eigenvalues, which rounding to float32 would move below
    −1/30².
    """
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1))
    x = torch.linspace(-10, 10, 20)[:, None]
    likelihood, prior = bayou.Gaussian(1e-3), bayou.Normal(30.0)
    posterior = fitted(wide, (x, x.sin()), likelihood=likelihood, prior_rules=prior)
    assert posterior.predict(x, 10, seed=0).mean.isfinite().all()

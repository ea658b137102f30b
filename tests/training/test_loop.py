"""The training loop: steps, early stopping, reproducibility and the checks of arguments."""

import itertools
import math

import numpy as np
import pytest
import torch
from torch import nn

import bayou
from bayou.methods import vi
from bayou.posteriors.guided import Bayesian
from bayou.training.data import Rows, as_data
from tests.training.runs import (
    RUNS,
    assert_same,
    classes,
    curve,
    die_at_call,
    fit_run,
    make_objective,
    result,
    small,
)

F64 = torch.float64

# --- early stopping ------------------------------------------------------------------------------


def test_early_stopping_keeps_the_best_parameters(monkeypatch):
    scores = iter([3.0, 1.0, 2.0, 2.5, 9.0, 9.0])
    kept = []

    def watched(target, held_out, call, stack):
        kept.append({name: value.clone() for name, value in call.__self__.state_dict().items()})
        return next(scores)

    monkeypatch.setattr("bayou.methods.evidence_bound.validation_loss", watched)
    posterior = small(validation=0.2, patience=2, steps=500)
    assert posterior.stopped == "early"
    assert len(kept) == 4
    for name, value in posterior.bayesian.state_dict().items():
        assert torch.equal(value, kept[1][name])
    assert [r["validation"] for r in posterior.history if "validation" in r] == [3.0, 1.0, 2.0, 2.5]


def test_validation_is_the_negative_log_predictive_density_of_rows_that_are_not_trained_on():
    posterior = small(validation=0.25, steps=6)
    assert posterior.target.n == 45
    _, held_out = as_data(classes(), 16).split(0.25, vi.part_seed(0, "validation"))
    xs, ys = next(Rows(held_out.source, held_out.index, held_out.n).epoch())
    p = posterior.sample(8, seed=0)
    outputs = torch.stack([posterior.call({k: v[s] for k, v in p.items()}, xs) for s in range(8)])
    expected = -bayou.Predictive(posterior.target.likelihood, outputs).log_prob(ys).mean()
    best = min(record["validation"] for record in posterior.history if "validation" in record)
    assert best == pytest.approx(float(expected), rel=1e-5)
    assert len(set(held_out.index.tolist())) == 15


def test_a_validation_split_without_rows_raises():
    with pytest.raises(ValueError, match="leaves one part empty"):
        small(validation=0.001)


# --- what a step does ---------------------------------------------------------------------------


def make_recorder():
    """Return an optimizer, and its learning rates and the norm of its gradient in every step."""
    rates, norms = [], []

    class Recorder(torch.optim.SGD):
        def step(self, closure=None):
            rates.append([group["lr"] for group in self.param_groups])
            gradients = [
                p.grad for g in self.param_groups for p in g["params"] if p.grad is not None
            ]
            norms.append(float(torch.nn.utils.get_total_norm(gradients)))
            return super().step(closure)

    return Recorder, rates, norms


@pytest.mark.parametrize(
    ("schedule", "factor"),
    [
        ("constant", lambda done: 1.0),
        ("linear", lambda done: 1 - done),
        ("cosine", lambda done: math.cos(math.pi * done / 2) ** 2),
        ("tail", lambda done: min(1.0, 4 * (1 - done))),
        (lambda done: 0.1 ** int(3 * done), lambda done: 0.1 ** int(3 * done)),
    ],
)
def test_a_schedule_multiplies_both_learning_rates(schedule, factor):
    recorder, rates, _ = make_recorder()
    small(optimizer=recorder, schedule=schedule, lr=0.01, scale_lr=0.05, steps=12)
    expected = [(0.01 * factor(t / 12), 0.05 * factor(t / 12)) for t in range(12)]
    assert np.allclose(rates, expected)


def test_scale_lr_is_the_rate_of_log_stds_only():
    frozen = small(lr=1e-12, scale_lr=0.1)
    start = small(lr=1e-12, scale_lr=1e-12)
    for one, two in zip(frozen.bayesian.guides, start.bayesian.guides, strict=True):
        assert (one.center - two.center).abs().max() < 1e-9
        assert (one.log_std - two.log_std).abs().max() > 0.1


@pytest.mark.parametrize(
    ("guide", "prior", "scales"),
    [
        (bayou.MeanField(), bayou.Normal(1.0), {"log_std"}),
        (bayou.Dropout(rate="concrete"), bayou.Normal(1.0), {"logit_p"}),
        (bayou.MeanField(), bayou.Normal(1.0, learn=True), {"log_std", "log_scale"}),
        (
            bayou.MeanField(),
            bayou.priors.ScaleMixture(learn=True),
            {"log_std", "log_scale1", "log_scale2"},
        ),
    ],
)
def test_stds_dropout_rates_and_prior_scales_have_scale_lr(guide, prior, scales):
    bayesian = Bayesian(nn.Linear(3, 2), guide, prior)
    rest, group = vi.parameter_groups(bayesian, 0.1, 1.0)
    assert (rest["lr"], group["lr"]) == (0.1, 1.0)
    names = {id(p): name.rpartition(".")[2] for name, p in bayesian.named_parameters()}
    assert {names[id(p)] for p in group["params"]} == scales
    assert {names[id(p)] for p in rest["params"]} == set(names.values()) - scales


@pytest.mark.parametrize("optimizer", [torch.optim.NAdam, torch.optim.Rprop])
def test_other_optimizers_resume_bit_for_bit(optimizer, tmp_path):
    options = {"optimizer": optimizer, "checkpoint": tmp_path / "c", "checkpoint_every": 5}
    die_at_call(8, small, **options)
    assert_same(small(**options), small(optimizer=optimizer))


def test_optimizers_that_cannot_be_used_raise():
    with pytest.raises(ValueError, match="LBFGS"):
        small(optimizer=lambda groups: torch.optim.LBFGS(groups[0]["params"]))
    with pytest.raises(ValueError, match="must return a torch optimizer, got list"):
        small(optimizer=list)


def test_clip_bounds_the_norm_of_the_gradient():
    recorder, _, norms = make_recorder()
    small(optimizer=recorder)
    assert max(norms) > 0.05
    norms.clear()
    small(optimizer=recorder, clip=0.05)
    assert max(norms) <= 0.05 * (1 + 1e-5)


def test_the_gradient_of_a_minibatch_is_that_of_all_data_on_average():
    loss, bayesian, x, y = make_objective(bayou.Delta(penalty=True))
    one = torch.ones((), dtype=F64)

    def gradient(rows):
        bayesian.zero_grad()
        loss(x[rows], y[rows], one)[0].backward()
        return torch.cat([p.grad.flatten() for p in bayesian.parameters()])

    full = gradient(list(range(8)))
    for size in (1, 2, 3):
        parts = [gradient(list(rows)) for rows in itertools.combinations(range(8), size)]
        assert torch.allclose(torch.stack(parts).mean(0), full, atol=1e-12)


def test_rows_of_a_smaller_last_batch_have_the_same_weight_on_average():
    rows = as_data((torch.arange(10.0).unsqueeze(1), torch.arange(10)), 4)
    assert [len(y) for _, y in rows.epoch(0)] == [4, 4, 2]
    counts = torch.zeros(3, 10)
    for seed in range(600):
        for number, (_, y) in enumerate(rows.epoch(seed)):
            counts[number, y] += 10 / len(y) / 600  # N/M, once per row
    assert (counts - 1).abs().max() < 6 * math.sqrt(4 / 600)


@pytest.mark.parametrize(
    "guide", [bayou.MeanField(std=0.3), bayou.MeanField(std=0.3, local=False), bayou.MNF(std=0.3)]
)
def test_beta_scales_the_kl_in_the_loss_and_not_in_the_history(guide):
    loss, _, x, y = make_objective(guide, samples=3)
    values = []
    for beta in (0.0, 0.5, 1.0):
        torch.manual_seed(1)
        value, report = loss(x, y, torch.tensor(beta, dtype=F64))
        assert float(report["elbo"]) == pytest.approx(
            float(report["log_likelihood"] - report["kl"]), rel=1e-12
        )
        assert float(-8 * value.detach()) == pytest.approx(
            float(report["log_likelihood"] - beta * report["kl"]), rel=1e-12
        )
        values.append({name: float(number) for name, number in report.items()})
    assert values[0] == values[1] == values[2]


def test_warmup_raises_beta_linearly(monkeypatch):
    seen, plain = [], vi.EvidenceBound.loss

    def watched(self, x, y):
        seen.append(float(self.beta))
        return plain(self, x, y)

    monkeypatch.setattr(vi.EvidenceBound, "loss", watched)
    small(beta=0.5, warmup=0.5, steps=12)
    assert seen == pytest.approx([0.5 * min(1, (t + 1) / 6) for t in range(12)])


def test_the_width_of_a_tempered_posterior_is_exact():
    x, y = curve()

    def width(beta):
        posterior = small(net=nn.Linear(1, 1), data=(x, y), likelihood=bayou.Gaussian(0.5), beta=beta, steps=200,
                          lr=0.02, scale_lr=0.05, batch_size=60, samples=32)  # fmt: skip
        return posterior.bayesian.guides[0].log_std.exp().item()

    cold, warm = width(0.1), width(1.0)
    precision = float((x**2).sum()) / 0.25  # of the likelihood; q's variance is β/(precision + β)
    assert cold == pytest.approx(math.sqrt(0.1 / (precision + 0.1)), rel=0.05)
    assert warm == pytest.approx(math.sqrt(1 / (precision + 1)), rel=0.05)


def test_eight_samples_divide_the_variance_of_the_gradient_by_eight():
    def variance(samples):
        loss, bayesian, x, y = make_objective(bayou.MeanField(std=0.5), samples)
        gradients = []
        for seed in range(100):
            torch.manual_seed(seed)
            bayesian.zero_grad()
            loss(x, y, torch.ones((), dtype=F64))[0].backward()
            gradients.append(torch.cat([p.grad.flatten() for p in bayesian.parameters()]))
        return float(torch.stack(gradients).var(0).sum())

    assert variance(1) / variance(8) == pytest.approx(8, rel=0.5)


def test_history_has_the_terms_of_the_elbo_at_every_logging_step():
    posterior = small(steps=23, log_every=5)
    assert [record["step"] for record in posterior.history] == [0, 5, 10, 15, 20, 22]
    for record in posterior.history:
        assert record["elbo"] == pytest.approx(record["log_likelihood"] - record["kl"], rel=1e-5)
        assert record["kl"] > 0 > record["log_likelihood"]
        assert record["seconds"] >= 0
        assert set(record) - {"rising"} == {"step", "elbo", "log_likelihood", "kl", "seconds"}
    first = posterior.history[0]
    assert first["log_likelihood"] == pytest.approx(
        -60 * math.log(2), rel=0.3
    )  # a sum over all 60, from 16 of them


# --- randomness and the user's things -----------------------------------------------------------


@pytest.mark.parametrize("name", ["dataset", "loader_generator"])
def test_a_fit_is_reproducible_and_restores_the_random_streams(name):
    first = fit_run(name)
    torch.manual_seed(0)
    net, data, options = RUNS[name]()
    state = torch.get_rng_state()
    generator = getattr(data, "generator", None)
    generator_state = None if generator is None else generator.get_state()
    second = bayou.fit(net, data, seed=3, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert generator is None or torch.equal(generator.get_state(), generator_state)
    assert_same(second, first)
    tensors, others = (result(posterior)["tensors"] for posterior in (first, fit_run(name, seed=4)))
    assert any(not torch.equal(v, others[k]) for k, v in tensors.items() if "center" in k)


def test_a_fit_is_independent_of_the_global_random_stream():
    net = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 2))
    posteriors = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        method = bayou.VI(bayou.MNF(), steps=5)
        posteriors.append(bayou.fit(net, classes(), method))
    assert_same(*posteriors)


def test_the_network_of_the_user_is_not_changed():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.2), nn.Linear(4, 2))
    net[1].eval()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    modes = [module.training for module in net.modules()]
    posterior = small(net=net)
    posterior.predict(torch.randn(5, 3), samples=2)
    bayou.elbo(posterior, classes(), samples=2)
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert modes == [module.training for module in net.modules()]
    assert all(p.grad is None and p.requires_grad for p in net.parameters())
    moved = posterior.net.state_dict()["1.running_mean"]
    assert not torch.equal(
        moved, before["1.running_mean"]
    )  # the posterior has statistics of its own


@pytest.mark.parametrize("seed", [None, 1.5, "0", True])
def test_a_seed_must_be_a_whole_number(seed):
    with pytest.raises(ValueError, match="seed of a run must be a whole number"):
        small(seed=seed)


def test_seeds_may_be_of_any_size_and_of_numpy():
    assert_same(small(seed=np.int64(3)), small(seed=3))
    assert small(seed=-(2**70)).stopped == "finished"


# --- arguments ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"epochs": 1, "steps": 1}, "give epochs or steps, not both"),
        ({"epochs": 0}, "epochs must be a whole number of at least 1, got 0"),
        ({"batch_size": 2.5}, "batch_size must be a whole number"),
        ({"samples": True}, "samples must be a whole number"),
        ({"lr": -1.0}, "lr must be positive and finite, got -1.0"),
        ({"scale_lr": math.nan}, "scale_lr must be positive"),
        ({"clip": 0}, "clip must be positive"),
        ({"beta": -1}, "beta must be in"),
        ({"warmup": 2}, "warmup must be in"),
        ({"validation": 1.0}, "validation < 1"),
        ({"patience": 3}, "set validation"),
        ({"schedule": "cosin"}, "one of constant, linear, cosine, tail"),
        ({"guide": bayou.MNF}, "must be a family such as MNF"),
        ({"guide": None}, "must be a family such as MNF"),
        ({"guide": {}}, "must be a family such as MNF"),
        ({"guide": {"*": 3}}, "must be a family such as MNF"),
    ],
)
def test_invalid_settings_raise(options, message):
    with pytest.raises(ValueError, match=message):
        bayou.VI(**options)


def test_the_length_of_a_run():
    rows = as_data((torch.zeros(100, 1), torch.zeros(100)), 10)
    assert bayou.VI().total_steps(rows) == 2000
    assert bayou.VI(epochs=3).total_steps(rows) == 30
    assert bayou.VI(steps=7).total_steps(rows) == 7
    many = as_data((torch.zeros(10_000, 1), torch.zeros(10_000)), 10)
    assert bayou.VI().total_steps(many) == 10_000


def test_the_progress_line_has_a_title_and_elbo_nll_kl(capsys, monkeypatch):
    monkeypatch.setattr("bayou.core.progress.LINE", 0.0)
    small(guide={"*.weight": bayou.MNF(), "*": bayou.Delta()}, progress="plain")
    line = capsys.readouterr().err.splitlines()[-1]
    for part in ("VI(*.weight: MNF, *: Delta) 12/12", "elbo ", "nll ", "kl "):
        assert part in line

"""Scores of unusual inputs against closed forms, brute force and the papers; p-values against
their uniform distribution.
"""

import math

import numpy as np
import pytest
import torch
from scipy import spatial, special, stats
from torch import nn
from torch.testing import assert_close

import bayou
from bayou.likelihoods.predictive import Predictive
from bayou.operations.ood import ConformalRanks, InexactRanksWarning, UnsupportedScore
from bayou.operations.ood.feature_scores import (
    ClassDensity,
    Mahalanobis,
    NearestNeighbors,
    RelativeMahalanobis,
    TrainingFeatures,
    VirtualLogit,
    shrunk_covariance,
)
from bayou.operations.ood.features import compute_features, feature_networks
from bayou.operations.ood.output_scores import output_scores
from bayou.operations.ood.typicality import Typicality
from tests.operations.fits import METHODS, fitted, normal

F64 = torch.float64
CLASSES = 3
inexact = pytest.mark.filterwarnings("ignore::bayou.operations.ood.InexactRanksWarning")


def features(rows=200, size=6, seed=0):
    classes = torch.arange(rows) % CLASSES
    mixing = normal(size, size, seed=seed + 1)
    z = normal(rows, size, seed=seed) @ mixing + 2 * normal(CLASSES, size, seed=seed + 2)[classes]
    return z, classes


def shrinkage_of(z):
    """The weight of the identity by the formulas of Ledoit & Wolf 2004, with loops over rows."""
    rows, size = z.shape
    sample = sum(np.outer(row, row) for row in z) / rows
    mean = np.trace(sample) / size
    distance = ((sample - mean * np.eye(size)) ** 2).sum() / size
    error = sum(((np.outer(row, row) - sample) ** 2).sum() for row in z) / size / rows**2
    return min(error / distance, 1.0), sample, mean


def covariance_of(z):
    weight, sample, mean = shrinkage_of(z)
    return (1 - weight) * sample + weight * mean * np.eye(len(sample))


@pytest.mark.parametrize("rows", [5, 40, 4000])
def test_the_shrunk_covariance_is_that_of_the_formulas(rows):
    z = features(rows)[0]
    z = z - z.mean(0)
    assert_close(shrunk_covariance(z).numpy(), covariance_of(z.numpy()))
    assert float(torch.linalg.eigvalsh(shrunk_covariance(z))[0]) > 0


@pytest.mark.peers
def test_the_shrunk_covariance_is_that_of_scikit_learn():
    from sklearn.covariance import ledoit_wolf

    z = features(50)[0]
    expected, _ = ledoit_wolf(z.numpy())
    assert_close(shrunk_covariance(z - z.mean(0)).numpy(), expected)


def test_mahalanobis_distances_are_those_of_scipy():
    z, classes = features()
    new = 3 * normal(20, 6, seed=9)
    means = np.stack([z[classes == label].numpy().mean(0) for label in range(CLASSES)])
    inverse = np.linalg.inv(covariance_of(z.numpy() - means[classes]))
    expected = spatial.distance.cdist(new.numpy(), means, "mahalanobis", VI=inverse).min(1) ** 2
    rows = TrainingFeatures(z, classes)
    np.testing.assert_allclose(Mahalanobis.fit(rows).of(new).numpy(), expected, rtol=1e-9)

    center = z.numpy().mean(0, keepdims=True)
    inverse = np.linalg.inv(covariance_of(z.numpy() - center))
    total = spatial.distance.cdist(new.numpy(), center, "mahalanobis", VI=inverse)[:, 0] ** 2
    relative = RelativeMahalanobis.fit(rows).of(new).numpy()
    np.testing.assert_allclose(relative, expected - total, rtol=1e-9, atol=1e-9)
    of_numbers = Mahalanobis.fit(TrainingFeatures(z, None)).of(new).numpy()
    np.testing.assert_allclose(of_numbers, total, rtol=1e-9)


@pytest.mark.parametrize("k", [1, 7])
def test_neighbors_are_those_of_brute_force(k):
    z, classes = features()
    new = normal(20, 6, seed=9)
    score = NearestNeighbors.fit(TrainingFeatures(z, classes, neighbors=k)).of(new)
    for row, value in zip(new.numpy(), score.tolist(), strict=True):
        unit = row / math.sqrt((row**2).sum())
        distances = sorted(
            math.dist(unit, other / math.sqrt((other**2).sum())) for other in z.numpy()
        )
        assert value == pytest.approx(distances[k - 1], rel=1e-6)  # of squares near 0


def test_neighbors_of_one_feature_keep_their_size():
    z = torch.tensor([[1.0], [2.0], [4.0]], dtype=F64)
    score = NearestNeighbors.fit(TrainingFeatures(z, None, neighbors=2))
    assert_close(score.of(torch.tensor([[10.0]], dtype=F64)), torch.tensor([8.0], dtype=F64))
    with pytest.raises(ValueError, match="between 1 and the 3 training rows, got 4"):
        NearestNeighbors.fit(TrainingFeatures(z, None, neighbors=4))


def test_the_virtual_logit_is_that_of_the_paper():
    z, classes = features(300, 7)
    weight = normal(CLASSES, 7, seed=5)
    bias = normal(CLASSES, seed=6)
    new = 2 * normal(20, 7, seed=9)
    # Wang et al. 2022, as their listing has it, with a principal space of ⌊7/2⌋ dimensions.
    w, b = weight.numpy(), bias.numpy()
    u = -np.matmul(np.linalg.pinv(w), b)
    train = z.numpy() - u
    eigenvalues, eigenvectors = np.linalg.eig(train.T @ train / len(train))
    null_space = eigenvectors.real[:, np.argsort(eigenvalues.real * -1)[3:]]
    logits = z.numpy() @ w.T + b
    residuals = np.linalg.norm(train @ null_space, axis=-1)
    alpha = logits.max(-1).mean() / residuals.mean()
    virtual = np.linalg.norm((new.numpy() - u) @ null_space, axis=-1) * alpha
    expected = virtual - special.logsumexp(new.numpy() @ w.T + b, axis=-1)
    score = VirtualLogit.fit(TrainingFeatures(z, classes, weight, bias)).of(new)
    np.testing.assert_allclose(score.numpy(), expected, rtol=1e-9, atol=1e-9)
    # The order of rows is that of the probability of the virtual class.
    probability = special.softmax(np.c_[new.numpy() @ w.T + b, virtual], axis=1)[:, -1]
    assert np.array_equal(np.argsort(score.numpy()), np.argsort(probability))


def test_the_virtual_logit_needs_a_null_space():
    z = torch.cat([normal(50, 2), torch.zeros(50, 4, dtype=F64)], 1)
    rows = TrainingFeatures(z, torch.arange(50) % 2, normal(2, 6))
    with pytest.raises(UnsupportedScore, match="vary in more than 3 of 6 directions"):
        VirtualLogit.fit(rows)
    with pytest.raises(UnsupportedScore, match="the last layer makes a logit"):
        VirtualLogit.fit(TrainingFeatures(z, torch.arange(50) % 2))


def test_the_density_of_classes_is_that_of_scipy():
    z, classes = features()
    classes = (classes * 2).clamp_max(2).div(2, rounding_mode="floor")  # of unequal sizes
    new = 2 * normal(20, 6, seed=9)
    terms = []
    for label in (0, 1):
        rows = z[classes == label].numpy()
        density = stats.multivariate_normal(rows.mean(0), covariance_of(rows - rows.mean(0)))
        terms.append(np.log(len(rows) / len(z)) + density.logpdf(new.numpy()))
    score = ClassDensity.fit(TrainingFeatures(z, classes)).of(new)
    np.testing.assert_allclose(score.numpy(), -np.logaddexp(*terms), rtol=1e-9)
    with pytest.raises(UnsupportedScore, match="two rows of each class"):
        ClassDensity.fit(TrainingFeatures(z[:3], torch.tensor([0, 0, 1])))


@pytest.mark.slow
def test_typicality_is_two_sided():
    """Of a Gaussian |log p − E log p| = ½·| |v|² − d |: the center is as unusual as the edge."""
    size = 8
    z = normal(1500, size)
    score = Typicality.fit(TrainingFeatures(z, None))
    radius = torch.tensor([0.0, math.sqrt(size), math.sqrt(2 * size)], dtype=F64)
    directions = nn.functional.normalize(normal(50, size, seed=3), dim=1)
    center, shell, edge = (score.of(r * directions).mean() for r in radius)
    assert float(shell) < 1.5
    assert float(center) == pytest.approx(size / 2, abs=1.5)
    assert float(edge) == pytest.approx(size / 2, abs=1.5)


def test_typicality_is_saved_with_its_flow(monkeypatch, tmp_path):
    monkeypatch.setattr(bayou.operations.ood.typicality, "STEPS", 20)
    posterior, x, y, _ = fitted("map", "numbers", rows=200, train=100)
    options = {"held_out": (x[100:], y[100:]), "scores": ["typicality"], "layer": "inputs"}
    detector = bayou.ood.fit(posterior, (x[:100], y[:100]), **options)
    (scores,) = detector.feature_scores
    typicality = scores["typicality"]
    components = (x.double() - typicality.mean) @ typicality.projection
    expected = (typicality.flow.log_prob(components) - typicality.expectation).abs()
    rows = detector.score(x)
    assert_close(rows.scores["typicality"], expected)
    assert torch.equal(rows.p_value, rows.p_values["typicality"])
    detector.save(tmp_path / "d.bayou")
    again = bayou.ood.load(tmp_path / "d.bayou", posterior).score(x)
    assert torch.equal(again.scores["typicality"], rows.scores["typicality"])
    with pytest.raises(UnsupportedScore, match="50 training rows or more, got 40"):
        bayou.ood.fit(posterior, (x[:40], y[:40]), **options)


def test_scores_of_predictions_have_their_closed_forms():
    logits = 3 * normal(4, 20, CLASSES)
    p = Predictive(bayou.Categorical().bind(dtype=F64), logits)
    names = ["entropy", "mutual_information", "max_probability", "energy", "max_logit"]
    scores = {name: value.numpy() for name, value in output_scores(p, names).items()}
    f = logits.numpy()
    each = special.softmax(f, -1)
    mean = each.mean(0)
    entropy = special.entr(mean).sum(-1)
    assert_close(scores["entropy"], entropy)
    assert_close(scores["mutual_information"], entropy - special.entr(each).sum(-1).mean(0))
    assert_close(scores["max_probability"], 1 - mean.max(-1))
    assert_close(scores["energy"], -special.logsumexp(f, -1).mean(0))
    assert_close(scores["max_logit"], -f.max(-1).mean(0))

    shifted = Predictive(p.likelihood, logits + normal(4, 1, 1, seed=1))
    moved = output_scores(shifted, ["energy"])["energy"].numpy() - scores["energy"]
    assert_close(moved, np.full(20, moved[0]))  # no order of rows changes


def test_the_maximum_probability_does_not_cancel():
    logits = torch.tensor([[[50.0, 0.0, 0.0], [60.0, 0.0, 0.0]]])
    p = Predictive(bayou.Categorical().bind(), logits)
    score = output_scores(p, ["max_probability"])["max_probability"]
    assert_close(score, 2 * torch.tensor([-50.0, -60.0], dtype=F64).exp(), rtol=1e-6, atol=0)


def test_scores_of_numbers_do_not_depend_on_their_units():
    outputs = normal(5, 20, 2)
    likelihood = bayou.Gaussian(0.3).bind(dtype=F64)
    scores = output_scores(Predictive(likelihood, outputs), ["std", "epistemic_std"])
    variance = outputs.var(0, correction=0)
    assert_close(scores["epistemic_std"], variance.log().mean(1).mul(0.5).exp())
    assert_close(scores["std"], (variance + 0.09).log().mean(1).mul(0.5).exp())


# Ranks.


def dependent_scores(rows, seed):
    shared = normal(rows, 1, seed=seed)
    return torch.cat([shared + 0.3 * normal(rows, 3, seed=seed + 1), shared.exp()], 1)


def test_p_values_count_held_out_rows():
    held_out = torch.tensor([[1.0], [2.0], [2.0], [3.0]], dtype=F64)
    ranks = ConformalRanks(("a",), held_out)
    new = torch.tensor([[0.0], [1.0], [2.0], [2.5], [4.0]], dtype=F64)
    expected = torch.tensor([1.0, 1.0, 0.8, 0.4, 0.2], dtype=F64)
    assert_close(ranks.p_values(new)[:, 0], expected)
    for rule in ("fisher", "stouffer", "minimum"):
        assert_close(ranks.combine(new, ["a"], rule), expected)


@pytest.mark.parametrize("rule", ["fisher", "stouffer", "minimum"])
def test_combined_p_values_are_those_of_brute_force(rule):
    names = ("a", "b", "c", "d")
    held_out = dependent_scores(30, 0)
    new = dependent_scores(12, 10)
    combined = ConformalRanks(names, held_out).combine(new, names, rule)
    for row, value in zip(new.numpy(), combined.tolist(), strict=True):
        all_rows = np.vstack([held_out.numpy(), row])
        u = (len(all_rows) + 1 - stats.rankdata(all_rows, axis=0) - 0.5) / len(all_rows)
        statistic = {
            "fisher": -np.log(u).sum(1),
            "stouffer": stats.norm.ppf(1 - u).sum(1),
            "minimum": -u.min(1),
        }[rule]
        assert value == pytest.approx((statistic >= statistic[-1] - 1e-9).mean())


@pytest.mark.parametrize("rule", ["fisher", "stouffer", "minimum"])
def test_combined_p_values_of_rows_like_the_held_out_ones_are_uniform(rule):
    """Exactly uniform on multiples of 1/(n + 1), over held-out rows too: 40 sets of held-out rows
    with 50 new rows each. P-values that share held-out rows are positively dependent; one p-value
    of each set gives independent ones, and the mean over sets a smaller error.
    """
    n, sets, new_rows = 99, 400, 10
    names = ("a", "b", "c", "d")
    p_values = torch.stack(
        [
            ConformalRanks(names, dependent_scores(n, 1000 + 7 * k)).combine(
                dependent_scores(new_rows, 100_000 + 7 * k), names, rule
            )
            for k in range(sets)
        ]
    )
    independent = p_values[:, 0].numpy()
    distance = stats.kstest(independent, "uniform").statistic
    # 1/(n + 1) for the steps, and the 99.9 % point of Kolmogorov's distribution. The minimum has
    # ties, which make p-values larger.
    if rule != "minimum":
        assert distance < 1 / (n + 1) + 1.95 / math.sqrt(sets)
    for level in (0.05, 0.1, 0.5):
        fractions = (p_values <= level + 1e-12).double().mean(1)
        error = float(fractions.std()) / math.sqrt(sets)
        assert float(fractions.mean()) < level + 4 * error
        if rule != "minimum":
            assert float(fractions.mean()) > level - 4 * error


def test_ranks_refuse_what_they_cannot_order():
    ranks = ConformalRanks(("a", "b"), normal(30, 2))
    with pytest.raises(ValueError, match="rule must be one of fisher, stouffer, minimum, got 'mu'"):
        ranks.combine(normal(3, 2), ["a"], "mu")
    with pytest.raises(ValueError, match="some of a, b, got 'c'"):
        ranks.combine(normal(3, 2), ["c"], "fisher")
    with pytest.raises(ValueError, match="NaN"):
        ranks.p_values(torch.full((1, 2), math.nan, dtype=F64))
    with pytest.raises(ValueError, match="held-out rows is NaN"):
        ConformalRanks(("a",), torch.full((3, 1), math.nan))


# Features.


class Branches(nn.Module):
    """Two inputs, and a head whose layer is registered first."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)
        self.a = nn.Linear(3, 5)
        self.b = nn.Linear(2, 3)

    def forward(self, a, b):
        return self.head(torch.cat([self.a(a), self.b(b).tanh()], 1))


@inexact
def test_features_are_what_the_last_layer_reads():
    torch.manual_seed(0)
    net = Branches()
    a, b = torch.randn(1200, 3), torch.randn(1200, 2)
    y = (a[:, 0] > 0).long()
    posterior = bayou.fit(net, ((a, b), y), bayou.MAP(steps=5), seed=0, progress=False)
    (network,) = feature_networks(posterior, 5, 0)
    got = compute_features(posterior, network, posterior.place((a, b)), None)
    expected = torch.cat([network.a(a), network.b(b).tanh()], 1).double()
    assert_close(got.values, expected, atol=1e-6, rtol=1e-5)
    assert torch.equal(got.weight, network.head.weight.double())
    named = compute_features(posterior, network, posterior.place((a, b)), "b")
    assert_close(named.values, b.double())
    assert named.weight is None
    inputs = compute_features(posterior, network, posterior.place((a, b)), "inputs")
    assert_close(inputs.values, torch.cat([a, b], 1).double())
    with pytest.raises(ValueError, match=r"\(head, a, b\), or be 'inputs', got 'c'"):
        compute_features(posterior, network, posterior.place((a, b)), "c")
    detector = bayou.ood.fit(posterior, ((a, b), y), samples=5)
    assert "vim" in detector.names
    assert detector.score((a[:30], b[:30])).p_value.shape == (30,)


def test_positions_of_images_and_sequences_are_averaged():
    torch.manual_seed(0)
    pooled = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Conv2d(4, 3, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    )
    x, y = torch.randn(60, 1, 8, 8), torch.arange(60) % 3
    posterior = bayou.fit(pooled, (x, y), bayou.MAP(steps=3), seed=0, progress=False)
    (network,) = feature_networks(posterior, 5, 0)
    got = compute_features(posterior, network, posterior.place(x), None)
    assert_close(got.values, network[:2](x).mean((2, 3)).double(), atol=1e-6, rtol=1e-5)
    assert got.weight is None
    assert "vim" not in bayou.ood.fit(posterior, (x, y), held_out=(x + 0.1, y)).names
    with pytest.raises(UnsupportedScore, match="the last layer makes a logit"):
        bayou.ood.fit(posterior, (x, y), held_out=(x + 0.1, y), scores=["vim"])


# Detectors.


@pytest.mark.parametrize("task", ["classes", "numbers", "heteroscedastic"])
@pytest.mark.parametrize("method", [*METHODS])
def test_every_posterior_has_a_detector_that_is_saved_bit_for_bit(task, method, tmp_path):
    posterior, x, y, net = fitted(method, task, rows=240, train=120)
    detector = bayou.ood.fit(posterior, (x[:120], y[:120]), held_out=(x[120:200], y[120:200]))
    assert detector.is_exact
    near, far = detector.score(x[200:]), detector.score(6 + x[200:])
    assert bayou.metrics.auroc(-near.p_value, -far.p_value) > 0.9
    assert float(near.p_value.min()) >= 1 / 81
    assert float((near.p_value <= 0.1).double().mean()) < 0.3  # of 40 rows: 4 sd above .1
    assert {"mahalanobis", "knn"} <= set(detector.names)
    single = task != "classes" and method == "map"
    assert ("epistemic_std" in detector.names) == (task != "classes" and not single)

    detector.save(tmp_path / "detector.bayou")
    posterior.save(tmp_path / "posterior.bayou")
    again = bayou.load(tmp_path / "posterior.bayou", net)
    loaded = bayou.ood.load(tmp_path / "detector.bayou", again)
    after = loaded.score(x[200:])
    assert loaded.names == detector.names
    for name in detector.names:
        assert torch.equal(after.scores[name], near.scores[name])
    assert torch.equal(after.p_value, near.p_value)
    posterior.temperature = 2.0
    with pytest.raises(ValueError, match="another posterior"):
        bayou.ood.load(tmp_path / "detector.bayou", posterior)


@inexact
@pytest.mark.parametrize("method", [bayou.VI(bayou.MNF(), steps=20), bayou.VI(steps=20)])
def test_variational_posteriors_have_features_of_draws_or_of_the_mean(method):
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    posterior = bayou.fit(net, (x, y), method, seed=0, progress=False)
    detector = bayou.ood.fit(posterior, (x, y), functions=3, samples=10)
    has_mean = isinstance(method.guide, bayou.MeanField)
    assert len(detector.feature_scores) == (1 if has_mean else 3)
    assert not detector.is_exact
    scores = detector.score(x[:7])
    averaged = []
    for network, functions in zip(
        feature_networks(posterior, 3, 0), detector.feature_scores, strict=True
    ):
        z = network[:2](x[:7]).double()
        averaged.append(functions["mahalanobis"].of(z))
    expected = torch.stack(averaged).mean(0)
    assert_close(scores.scores["mahalanobis"], expected.detach(), rtol=1e-4, atol=1e-5)
    once = bayou.ood.score(posterior, x[:7], data=(x, y), functions=3, samples=10)
    assert torch.equal(once.p_value, scores.p_value)


@inexact
def test_wide_networks_and_their_mixtures_have_inputs_as_features():
    torch.manual_seed(0)
    x = torch.randn(120, 3)
    y = x[:, :1] + 0.1 * torch.randn(120, 1)
    wide = bayou.fit(nn.Linear(3, 1), (x, y), bayou.methods.Wide(), seed=0, progress=False)
    detector = bayou.ood.fit(wide, (x, y), samples=20)
    assert {"std", "mahalanobis", "knn"} <= set(detector.names)
    assert float(detector.score(x[:20] + 8).p_value.max()) < 0.1

    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    point = bayou.fit(net, (x, y), bayou.MAP(steps=20), seed=0, progress=False)
    mixture = bayou.Mixture([wide, point])
    mixed = bayou.ood.fit(mixture, (x, y), samples=20, functions=4)
    sizes = {len(scores["mahalanobis"].root) for scores in mixed.feature_scores}
    assert sizes == {3, 8}


@inexact
def test_points_of_a_chain_are_functions_of_their_own():
    torch.manual_seed(0)
    x = torch.randn(150, 2)
    y = (x[:, 0] > 0).long()
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2))
    method = bayou.HMC(draws=6, warmup=10, most_leapfrogs=3)
    posterior = bayou.fit(net, (x, y), method, seed=0, progress=False)
    detector = bayou.ood.fit(posterior, (x, y), functions=4)
    assert len(detector.feature_scores) == 4
    assert "mutual_information" in detector.names


def test_ranks_among_training_rows_are_announced():
    posterior, x, y, _ = fitted("map", "classes", rows=200, train=200)
    with pytest.warns(InexactRanksWarning, match=r"too small; .* held_out=\(x, y\)"):
        detector = bayou.ood.fit(posterior, (x, y))
    assert not detector.is_exact
    assert detector.ranks.rows == 40


def test_p_values_of_new_rows_are_uniform():
    """Held-out and test rows are alike: the distance of two samples of 400, at the 99.9 % point of
    their distribution.
    """
    posterior, x, y, _ = fitted("map", "classes", rows=900, train=100)
    detector = bayou.ood.fit(posterior, (x[:100], y[:100]), held_out=(x[100:500], y[100:500]))
    rows = detector.score(x[500:])
    limit = 1.95 * math.sqrt(2 / 400) + 1 / 401
    for p_values in (*rows.p_values.values(), rows.p_value, rows.combine(["knn", "energy"])):
        assert stats.kstest(p_values.numpy(), "uniform").statistic < limit
    assert torch.equal(rows.is_unusual(0.05), rows.p_value <= 0.05)
    with pytest.raises(ValueError, match="level must lie between 0.0025"):
        rows.is_unusual(0.001)


@pytest.mark.parametrize(
    ("scale", "least"),
    [(2.0, 0.6), (6.0, 0.9)],
)
def test_a_larger_shift_is_easier_to_detect(scale, least):
    posterior, x, y, _ = fitted("ensemble", "classes", rows=600, train=200)
    rows = bayou.ood.fit(posterior, (x[:200], y[:200]), held_out=(x[200:400], y[200:400]))
    near, far = rows.score(x[400:]), rows.score(scale * x[400:])
    assert bayou.metrics.auroc(-near.p_value, -far.p_value) > least
    assert bayou.metrics.auroc(near.scores["mahalanobis"], far.scores["mahalanobis"]) > least


@inexact
def test_class_scores_of_numbers_are_refused():
    posterior, x, y, _ = fitted("map", "numbers", rows=120, train=100)
    for name in ("max_probability", "energy", "max_logit"):
        with pytest.raises(UnsupportedScore, match=f"{name!r} is for classes, and y are numbers"):
            bayou.ood.fit(posterior, (x, y), scores=[name])
    for name in ("relative_mahalanobis", "vim"):
        with pytest.raises(UnsupportedScore, match="needs one class for each row"):
            bayou.ood.fit(posterior, (x, y), scores=[name])
    for name in ("mutual_information", "epistemic_std"):
        with pytest.raises(UnsupportedScore, match="needs several functions"):
            bayou.ood.fit(posterior, (x, y), scores=[name])
    with pytest.raises(UnsupportedScore, match="'std' is the same for all held-out rows"):
        bayou.ood.fit(posterior, (x, y), scores=["std"])


@inexact
def test_invalid_arguments_are_refused():
    posterior, x, y, _ = fitted("map", "classes", rows=120, train=100)
    data = (x[:100], y[:100])
    with pytest.raises(UnsupportedScore, match="'std' is for numbers, and y are classes"):
        bayou.ood.fit(posterior, data, scores=["std"])
    with pytest.raises(ValueError, match="different names among entropy"):
        bayou.ood.fit(posterior, data, scores=["enrgy"])
    with pytest.raises(ValueError, match="different names among entropy"):
        bayou.ood.fit(posterior, data, scores="energy")
    with pytest.raises(ValueError, match="rule must be one of"):
        bayou.ood.fit(posterior, data, rule="mean")
    with pytest.raises(ValueError, match="are also training rows"):
        bayou.ood.fit(posterior, data, held_out=(x[:50], y[:50]))
    with pytest.raises(
        ValueError, match="20 held-out rows or more beside the training rows, got 5"
    ):
        bayou.ood.fit(posterior, data, held_out=(x[100:105], y[100:105]))
    with pytest.raises(ValueError, match="neighbors must be a whole number"):
        bayou.ood.fit(posterior, data, neighbors=0)
    detector = bayou.ood.fit(posterior, data, held_out=(x[100:], y[100:]), scores=["entropy"])
    with pytest.raises(ValueError, match="x has no rows"):
        detector.score(x[:0])


@inexact
def test_bernoulli_and_ordinal_outcomes_have_classes():
    torch.manual_seed(0)
    x = torch.randn(200, 2)
    y = (x[:, :1] > 0).float()
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1))
    options = {"likelihood": bayou.Bernoulli(), "seed": 0, "progress": False}
    posterior = bayou.fit(net, (x, y), bayou.MAP(steps=20), **options)
    detector = bayou.ood.fit(posterior, (x, y))
    assert {"energy", "relative_mahalanobis", "density"} <= set(detector.names)
    assert "vim" not in detector.names
    logits = posterior.predict(x[:5]).outputs[0, :, 0].double()
    expected = -torch.stack([logits / 2, -logits / 2]).logsumexp(0)
    assert_close(detector.score(x[:5]).scores["energy"], expected)

"""Classes of tokens and pixels: labels that are ignored, shifted, smoothed or weighted, and maps of
uncertainty.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

import bayou
from bayou import metrics
from bayou.curvature.information import information
from bayou.likelihoods import Bernoulli, Categorical, HeteroscedasticGaussian
from bayou.likelihoods.predictive import Predictive
from tests.test_likelihoods import F64, doubles, labels, noise, predictive

may_warn = pytest.mark.filterwarnings("ignore::bayou.BayouWarning")
fit = partial(bayou.fit, progress=False)
S, B, T, C = 3, 5, 7, 4
PAD = -100
WEIGHT = (0.5, 2.0, 0.0, 1.5)
CASES = {
    "plain": {},
    "ignored": {"ignore_index": PAD},
    "shifted": {"shift": 1},
    "by two": {"shift": 2, "ignore_index": PAD},
    "smoothed": {"label_smoothing": 0.2, "ignore_index": PAD},
    "weighted": {"weight": WEIGHT},
    "all": {"ignore_index": PAD, "shift": 1, "label_smoothing": 0.3, "weight": WEIGHT},
}


def tokens(ignored=True):
    y = labels(C, B, T)
    if ignored:
        y[0, 3:] = y[2, :2] = y[4] = PAD  # the end, the start, a whole row
    return y


def loss(f, y, case):
    """−log p of torch for every label: (B, T − shift)."""
    shift, weight = case.get("shift", 0), case.get("weight")
    f, y = f[:, : T - shift], y[:, shift:]
    scored = {"ignore_index", "label_smoothing"}
    options = {name: value for name, value in case.items() if name in scored}
    weight = None if weight is None else doubles(weight)
    return F.cross_entropy(f.movedim(-1, 1), y, weight, reduction="none", **options)


@pytest.mark.parametrize("name", CASES)
def test_log_probabilities_are_those_of_torch(name):
    case = CASES[name]
    f, y = noise(S, B, T, C), tokens("ignore_index" in case)
    likelihood = Categorical(**case).bind(dtype=F64)
    likelihood.validate(f.shape[1:], y)
    expected = torch.stack([-loss(one, y, case).sum(1) for one in f])
    assert_close(likelihood.log_prob(f, y), expected)
    scored = {key: value for key, value in case.items() if key in ("ignore_index", "shift")}
    own = (
        torch.stack([-loss(one, y, scored).sum(1) for one in f]).logsumexp(0)
        - torch.tensor(S).log()
    )
    assert_close(Predictive(likelihood, f).log_prob(y), own)  # a density: without weights


@pytest.mark.parametrize("name", CASES)
def test_curvature_counts_labels_as_the_loss_does(name):
    case = CASES[name]
    f, y = noise(B, T, C), tokens("ignore_index" in case)
    likelihood = Categorical(**case).bind(dtype=F64)
    hessian = torch.func.hessian(lambda f: loss(f, y, case).sum())(f)  # (B, T, C, B, T, C)
    h = information(likelihood, f, y, "ggn")
    own = torch.einsum("btcbTC->btcTC", hessian)
    assert_close(sum(torch.einsum("btc,bTC->btcTC", s, s) for s in h.columns()), own)


def test_sampled_curvature_is_unbiased_where_labels_are_shifted_and_ignored():
    case, draws = CASES["all"], 4000
    f, y = noise(B, T, C), tokens()
    likelihood = Categorical(**case).bind(dtype=F64)
    exact = torch.stack([s.square() for s in information(likelihood, f, y, "ggn").columns()]).sum(0)
    sampled = information(likelihood, f, y, "sampled", draws, seed=0)
    found = torch.stack([s.square() for s in sampled.columns()]).sum(0)
    # The square of a score lies between 0 and its weight, which is the largest standard deviation
    # it can have.
    assert float((exact - found).abs().max()) < 5 * max(WEIGHT) / draws**0.5
    assert bool((exact == 0).any())
    assert bool((found[exact == 0] == 0).all())


class Tokens(nn.Module):
    """(B, T) tokens to (B, T, C) logits."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(6, 3), nn.Linear(3, C)

    def forward(self, ids):
        return self.head(torch.tanh(self.embedding(ids)))


def fit_tokens(y, **options):
    """A short fit of the labels with the inputs of the same length."""
    data = (y.clamp_min(0), y)
    return fit(Tokens(), data, bayou.MAP(steps=1), likelihood=Categorical(**options))


@may_warn
@pytest.mark.parametrize("structure", ["full", "diagonal"])
def test_rows_without_labels_do_not_change_a_laplace_approximation(structure):
    ids = labels(6, B, T)
    net, y = Tokens().double(), tokens()
    y[:4] = tokens(ignored=False)[:4]
    method = bayou.Laplace(structure, start=None, curvature="ggn")
    options = {"prior": bayou.Normal(1.0), "likelihood": Categorical(ignore_index=PAD)}
    whole, part = (fit(net, (ids[:n], y[:n]), method, **options) for n in (5, 4))
    for name, std in whole.std().items():
        assert_close(std, part.std()[name], atol=1e-9, rtol=1e-6)


@pytest.mark.parametrize("method", [bayou.MAP(steps=40, lr=0.1), bayou.VI(steps=40, lr=0.1)])
@may_warn
def test_a_shifted_fit_predicts_the_next_token(method):
    ids = torch.arange(T).repeat(12, 1).add(torch.arange(12).unsqueeze(1)) % C
    posterior = fit(Tokens(), (ids, ids), method, likelihood=Categorical(shift=1))
    p = posterior.predict(ids, 20, seed=0)
    assert torch.equal(
        p.mean.argmax(-1), (ids + 1) % C
    )  # of the last position too, for which there is no label
    assert metrics.accuracy(p, ids) == 1.0
    assert set(metrics.summary(p, ids)) >= {"nll", "ece", "rejection"}


def test_maps_have_the_terms_of_the_sums():
    p = predictive(Categorical(class_axis=-3), noise(S, B, C, 2, 3))
    assert p.entropy_map.shape == p.mutual_information_map.shape == (B, 2, 3)
    assert_close(p.entropy_map.sum((1, 2)), p.entropy)
    assert_close(p.mutual_information_map.sum((1, 2)), p.mutual_information)
    assert_close(p.entropy_map, torch.distributions.Categorical(p.probabilities).entropy())
    vector = predictive(Categorical(), noise(S, B, C))
    assert torch.equal(vector.entropy_map, vector.entropy)


def test_scores_leave_out_what_is_ignored():
    f, y = noise(S, B, T, C), tokens()
    p = predictive(Categorical(ignore_index=PAD), f)
    known = y != PAD
    flat = predictive(Categorical(), f[:, known])
    for score in (metrics.accuracy, metrics.brier, metrics.ece):
        assert score(p, y) == pytest.approx(score(flat, y[known]), abs=1e-12)
    wrong = (p.probabilities.argmax(-1) != y).double().where(known, torch.nan)
    rejection = metrics.error_rejection(p, y, torch.arange(B))
    assert rejection.error[0] == pytest.approx(float(wrong[0].nanmean()))
    assert rejection.error[-1] == pytest.approx(float(wrong[:4].nanmean(1).mean()))
    assert len(rejection.error) == 4  # the last row has no labels
    with pytest.raises(ValueError, match="no examples to score"):
        metrics.accuracy(p, torch.full_like(y, PAD))


@may_warn
def test_a_guarantee_needs_all_labels():
    y = tokens()
    posterior = fit_tokens(y, ignore_index=PAD)
    with pytest.raises(ValueError, match="every label of the held-out rows, but some are ignored"):
        bayou.conformal(posterior, (y.clamp_min(0), y), 0.5)


class Pixels(nn.Module):
    def __init__(self, outputs, last=False):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.last = nn.Conv2d(1, outputs, 3, padding=1), last

    def forward(self, x):
        return self.conv(x).movedim(1, -1) if self.last else self.conv(x)


@may_warn
def test_the_axis_of_the_classes_is_found_from_the_shapes():
    x, y = noise(6, 1, 4, 5).float(), labels(3, 6, 4, 5)
    y[0] = 255
    likelihood, point = Categorical(ignore_index=255), bayou.MAP(steps=2)
    fits = [fit(Pixels(3, last), (x, y), point, likelihood=likelihood) for last in (False, True)]
    assert [one.target.likelihood_spec for one in fits] == [
        Categorical(class_axis=axis, ignore_index=255) for axis in (-3, -1)
    ]
    probabilities = [one.predict(x).probabilities for one in fits]
    assert probabilities[0].shape == (6, 4, 5, 3)
    assert_close(*probabilities, atol=1e-5, rtol=1e-5)
    with pytest.raises(
        ValueError, match=r"classes on axis 1 or on the last; give Categorical\(class_axis=-3\) or"
    ):
        fit(Pixels(4), (noise(6, 1, 4, 4).float(), labels(4, 6, 4, 4)), point)
    zeros = torch.zeros(6, C).long()
    sequences = fit(Tokens(), (zeros, zeros), point)
    assert sequences.target.likelihood_spec == Categorical(class_axis=-1)  # T = C: the last


class Lengths:
    """Batches of two lengths."""

    def __init__(self, odd):
        self.odd = odd

    def __iter__(self):
        yield torch.zeros(4, 3).long(), torch.zeros(4, 3).long()
        yield torch.zeros(4, 2).long(), torch.full((4, 2), self.odd)


def test_labels_that_are_no_classes_are_sentences_before_a_step():
    y = tokens()
    for odd, options, message in [
        (y, {}, r"in 0 .. 3 for 4 classes, got -100 .. 3; .* Categorical\(ignore_index=-100\)"),
        (y + 1, {"ignore_index": PAD + 1}, r"got 1 .. 4; count the classes from 0"),
        (y.clamp_min(0), {"weight": (1.0, 2.0)}, "Categorical has 2 weights for 4 classes"),
        (
            y[:, :1].clamp_min(0),
            {"shift": 1},
            r"y \(5, 1\) has no label 1 after another, as shift=1 needs",
        ),
    ]:
        with pytest.raises(ValueError, match=message):
            fit_tokens(odd, **options)
    with pytest.raises(ValueError, match="y must lie in 0 .. 3 for 4 classes, got 9 .. 9"):
        fit(Tokens(), Lengths(9), bayou.MAP(steps=2))
    fit(Tokens(), Lengths(2), bayou.MAP(steps=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shift": -1}, "shift must be a whole number of at least 0, got -1"),
        ({"ignore_index": 1.5}, "ignore_index must be a whole number or None, got 1.5"),
        ({"label_smoothing": 1.0}, r"label_smoothing must be in \[0, 1\), got 1.0"),
        ({"weight": (1.0, -1.0)}, r"weight must be non-negative, got \(1.0, -1.0\)"),
        ({"shift": 1, "class_axis": -3}, r"shift=1 is for f \(B, T, C\), got class_axis=-3"),
    ],
)
def test_settings_that_mean_nothing_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Categorical(**options)


def test_settings_survive_a_file(tmp_path):
    y = tokens()
    posterior = fit_tokens(y, **CASES["all"])
    posterior.save(tmp_path / "a.bayou")
    loaded = bayou.load(tmp_path / "a.bayou", Tokens())
    assert loaded.target.likelihood_spec == posterior.target.likelihood_spec
    f = noise(B, T, C).float()
    own, other = (one.target.likelihood.log_prob(f, y) for one in (posterior, loaded))
    assert torch.equal(own, other)


@may_warn
def test_several_labels_of_a_row_are_independent():
    x = noise(40, 2)
    y = (x @ doubles([[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]]) > 0).float()
    net = nn.Linear(2, 3).double()
    method = bayou.Laplace(start=bayou.MAP(steps=50, lr=0.1))
    posterior = fit(net, (x, y), method, likelihood=Bernoulli())
    p = posterior.predict(x, 10, seed=0)
    assert p.entropy_map.shape == (40, 3)
    assert metrics.accuracy(p, y) > 0.9
    each = [metrics.accuracy(predictive(Bernoulli(), p.outputs[..., k]), y[:, k]) for k in range(3)]
    assert metrics.accuracy(p, y) == pytest.approx(sum(each) / 3)


def test_images_with_their_own_noise_have_channels_first():
    f, y = noise(S, B, 4, 3, 2), noise(B, 2, 3, 2).roll(1)
    first, last = (HeteroscedasticGaussian(0.1, axis=axis).bind() for axis in (-3, -1))
    assert first.target_shape(f.shape[1:]) == y.shape
    back, y_last = f.movedim(-3, -1), y.movedim(-3, -1)
    assert_close(first.log_prob(f, y), last.log_prob(back, y_last))
    own, other = (
        sum(s.square() for s in one.information(at).columns())
        for one, at in ((first, f[0]), (last, back[0]))
    )
    assert_close(own.movedim(-3, -1), other)
    p, q = Predictive(first, f), Predictive(last, back)
    for name in ("mean", "std", "entropy_map"):
        assert_close(getattr(p, name).movedim(-3, -1), getattr(q, name))
    assert_close(p.quantile(0.9).movedim(-3, -1), q.quantile(0.9))
    with pytest.raises(
        ValueError, match="axis must be a negative whole number, from the end, got 1"
    ):
        HeteroscedasticGaussian(axis=1)

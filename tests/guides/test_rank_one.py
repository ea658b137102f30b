"""RankOne: draw i is member i mod K, a step passes each row through its member, the KL is the mean
over members.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Normal, kl_divergence
from torch.testing import assert_close

import bayou
from bayou.core.specs import to_json
from bayou.guides import RankOne
from bayou.guides.nodes import MemberGuide

K = 3


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 2)).double()


def make_data(rows=10):
    torch.manual_seed(1)
    x = torch.randn(rows, 1, 6, dtype=torch.float64)
    return x, (x.sum((1, 2)) > 0).long()


def by_hand(bnn, k, x):
    """The outputs of member k: convolution and linear layer with W ∘ (s·rᵀ), biases shared."""
    weights, mean = {}, bnn.mean()
    for guide in bnn.guides:
        if isinstance(guide, MemberGuide):
            z = dict(zip(guide.axes, (gain.mean[k] for gain in guide.gains), strict=True))
            rank_one = torch.outer(z[0], z[1])
            weights[guide.name] = guide.center * rank_one.reshape(
                *rank_one.shape, *[1] * (guide.center.ndim - 2)
            )
    hidden = F.conv1d(x, weights["0.weight"], mean["0.bias"]).tanh().flatten(1)
    return F.linear(hidden, weights["3.weight"], mean["3.bias"])


def test_a_pass_of_a_batch_has_row_i_in_member_i_mod_k_and_draw_i_is_that_member():
    x, _ = make_data()
    bnn = bayou.bayesianize(make_net(), RankOne(K), example=x)
    members = torch.stack([by_hand(bnn, k, x) for k in range(K)])
    rows = torch.arange(len(x))
    assert_close(bnn.draw(examples=len(x))(x), members[rows % K, rows])
    draws = bnn.sample(2 * K, seed=0)
    outputs = torch.stack([bnn.call({n: w[i] for n, w in draws.items()}, x) for i in range(2 * K)])
    assert_close(outputs, torch.cat((members, members)))
    later = bnn.draw(local=False, start=K + 1)
    assert_close(later(x), members[1])


def test_a_fit_has_k_members_that_predict_once_each_and_moments_of_all():
    data = x, _ = make_data()
    posterior = bayou.fit(make_net(), data, bayou.VI(RankOne(K), steps=20, lr=0.01), progress=False)
    assert posterior.draws == K
    assert posterior.predict(x).outputs.shape == (K, 10, 2)
    assert posterior.predict(x).mutual_information.max() > 1e-4  # members differ
    draws = posterior.sample(K)
    for name, value in posterior.mean().items():
        assert_close(draws[name].mean(0), value)
        assert_close(draws[name].std(0, correction=0), posterior.std()[name], rtol=1e-6, atol=1e-9)
    one = bayou.elbo(posterior, data, samples=K).log_likelihood
    each = torch.stack(
        [
            posterior.predict(x).likelihood.log_prob(f, data[1]).sum()
            for f in posterior.predict(x).outputs
        ]
    )
    assert one == pytest.approx(float(each.mean()))


def test_the_kl_of_gaussian_gains_is_the_mean_over_members_and_draws_have_their_moments():
    x, _ = make_data()
    bnn = bayou.bayesianize(
        make_net(), RankOne(K, std=0.2, prior_std=0.3, penalty=False), example=x
    )
    prior = Normal(torch.ones((), dtype=torch.float64), 0.3)
    gains = [gain for guide in bnn.guides if isinstance(guide, MemberGuide) for gain in guide.gains]
    known = sum(
        kl_divergence(Normal(gain.mean, gain.variance.sqrt()), prior).sum() / K for gain in gains
    )
    assert_close(bnn.draw(examples=len(x)).kl, known)
    guide = next(guide for guide in bnn.guides if isinstance(guide, MemberGuide))
    n = 3000
    with torch.no_grad():
        draws, mean, std = (
            guide.sample(n, seed=0)[guide.name],
            guide.mean()[guide.name],
            guide.std()[guide.name],
        )
    assert ((draws.mean(0) - mean).abs() <= 5 * std / n**0.5).all()
    spread = (draws - mean).square()
    assert ((spread.mean(0) - std.square()).abs() <= 5 * spread.std(0) / n**0.5).all()
    kinds = [guide.parameter_kinds()[gain.log_std].value for gain in guide.gains]
    assert kinds == ["scale", "scale"]


def test_a_weight_whose_rows_cannot_have_members_of_their_own_is_an_error():
    net = nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2))
    x = torch.randint(5, (4, 2))
    with pytest.raises(ValueError, match=r"RankOne needs weights.*'0.weight'"):
        bayou.bayesianize(net, RankOne(K), example=x)
    bayou.bayesianize(
        net, {"0.*": bayou.Delta(), "*.bias": bayou.Delta(), "*": RankOne(K)}, example=x
    )
    for bad in ({"members": 0}, {"std": -1.0}, {"spread": 0.0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            RankOne(**bad)


def test_biases_have_members_where_asked_for():
    x = torch.randn(6, 4, dtype=torch.float64)
    torch.manual_seed(0)
    net = nn.Linear(4, 2).double()
    bnn = bayou.bayesianize(net, RankOne(K, biases=True), example=x)
    draws = bnn.sample(K, seed=0)
    assert draws["bias"].std(0).min() > 1e-3
    members = torch.stack([F.linear(x, draws["weight"][k], draws["bias"][k]) for k in range(K)])
    rows = torch.arange(len(x))
    assert_close(bnn.draw(examples=len(x))(x), members[rows % K, rows])
    written = to_json(RankOne(K))
    assert "biases" not in written["fields"]  # older files keep their identity

"""Transformers: fused attention has no second derivative and no batching rule, and nobody has to
know.
"""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jvp
from torch.testing import assert_close

import bayou
from bayou.network import Network, PlainAttention

assert_same = partial(assert_close, rtol=1e-12, atol=1e-12)
X = torch.randn(16, 5, 3, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0, 0] > 0).long()
START = bayou.MAP(steps=3)
METHODS = {
    "kronecker": bayou.Laplace(start=START),
    "last": bayou.Laplace(where="last", start=START),
    "probit": bayou.Laplace("diagonal", predictive="probit", start=START),
    "SGLD": bayou.SGLD(steps=3, draws=2, start=START),
    "HMC": bayou.HMC(draws=2, warmup=2, leapfrogs=2, start=START),
    "VI": bayou.VI(steps=3),
}


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
        self.into, self.encoder, self.out = (
            nn.Linear(3, 4),
            nn.TransformerEncoder(layer, 1),
            nn.Linear(4, 2),
        )

    def forward(self, x):
        return self.out(self.encoder(self.into(x)).mean(1))


class Direct(nn.Module):
    """Calls the fused function itself, with a mask."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.into, self.out = nn.Linear(3, 12), nn.Linear(4, 2)

    def forward(self, x):
        q, k, v = self.into(x).chunk(3, -1)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.7).mean(1))


@pytest.mark.parametrize("make", [Encoder, Direct])
@pytest.mark.parametrize("name", METHODS)
def test_every_method_takes_a_transformer(name, make):
    flash, fast = torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()
    posterior = bayou.fit(make(), (X, Y), method=METHODS[name], progress=False)
    p = posterior.predict(X, None if name == "probit" else 3, seed=0)
    assert bool(p.mean.isfinite().all())
    assert (torch.backends.cuda.flash_sdp_enabled(), torch.backends.mha.get_fastpath_enabled()) == (
        flash,
        fast,
    )


@pytest.mark.parametrize("make", [Encoder, Direct])
def test_plain_attention_is_the_fused_one(make):
    net, x = make().double().eval(), X.double()
    expected = net(x)
    with PlainAttention():
        assert_same(net(x), expected)


@pytest.mark.parametrize("kind", ["none", "bool", "float", "causal"])
def test_masks_mean_what_they_mean(kind):
    generator = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 2, 2, 5, 4, dtype=torch.float64, generator=generator)
    shift = torch.randn(5, 5, dtype=torch.float64, generator=generator)
    mask = {"bool": shift > -0.5, "float": shift}.get(kind)
    options = {"is_causal": True, "scale": 0.3} if kind == "causal" else {}
    expected = F.scaled_dot_product_attention(q, k, v, mask, **options)
    with PlainAttention():
        for found in (
            F.scaled_dot_product_attention(q, k, v, mask, 0.0, **options),
            F.scaled_dot_product_attention(q, k, value=v, attn_mask=mask, **options),
        ):
            assert_same(found, expected)


@pytest.mark.parametrize("need", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_weights_are_given_where_they_are_asked_for(need, causal):
    torch.manual_seed(0)
    layer, x = (
        nn.MultiheadAttention(4, 2, batch_first=True).double().eval(),
        torch.randn(2, 5, 4, dtype=torch.float64),
    )
    mask = (
        nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64) if causal else None
    )

    def call():
        return layer(x, x, x, need_weights=need, attn_mask=mask, is_causal=causal)

    expected = call()
    with PlainAttention():
        out, weights = call()
    assert_same(out, expected[0])
    assert (weights is None) == (not need)
    if need:
        assert_same(weights, expected[1])


def test_the_linearized_function_of_an_encoder_is_its_jacobian():
    """J·(w − mean) of a prediction against J by torch.func, in float64, on the plain network."""
    net, x = Encoder().double(), X[:3].double()
    method = bayou.Laplace("diagonal", start=None)
    posterior = bayou.fit(net, (X.double(), Y), method=method, progress=False)
    mean, draw = (
        posterior.mean(),
        {name: value[0] for name, value in posterior.sample(1, seed=0).items()},
    )
    network = Network(net)
    with PlainAttention():
        tangents = {name: draw[name] - value for name, value in mean.items()}
        _, expected = jvp(lambda w: network.evaluate(w, x), (mean,), (tangents,))
    found = posterior.predict(x, 1, seed=0).outputs[0] - network.evaluate(mean, x)
    assert_close(found, expected, rtol=1e-8, atol=1e-10)

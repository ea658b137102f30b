"""Networks that take their inputs by keyword and give several outputs, as those of transformers
do.
"""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

import bayou
from bayou.core.files import FileError
from bayou.training.data import as_data

N = 24
X, SCALE = (
    torch.randn(N, 3, generator=torch.Generator().manual_seed(0)),
    torch.linspace(0.5, 1.5, N).unsqueeze(1),
)
Y = (X[:, 0] > 0).long()
BATCH = {"scale": SCALE, "features": X, "labels": Y}


class Outputs(OrderedDict[str, Any]):
    """What networks of transformers return: a dict whose values are attributes, too."""

    def __getattr__(self, name):
        return self[name]


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, scale, features):
        return self.b(torch.tanh(self.a(features) * scale))


class Named(Plain):
    """The same network by keyword; labels must not reach it, since its loss would be computed for
    nothing.
    """

    def __init__(self, made=lambda logits: Outputs(loss=None, logits=logits)):
        super().__init__()
        self.made = made

    def forward(self, *, features, scale, labels=None):
        assert labels is None
        return self.made(super().forward(scale, features))


fit = partial(bayou.fit, progress=False)


def outputs(net, data, x, method, **options):
    return fit(net, data, method, **options).predict(x, 4, seed=0).outputs


POINT = bayou.MAP(steps=5)
METHODS = {
    "map": POINT,
    "several draws": bayou.VI(bayou.MNF(), steps=2, samples=2),
    "laplace": bayou.Laplace("full", start=POINT),
    "chains": bayou.SGLD(steps=6, chains=2, burn_in=2),
    "hmc": bayou.HMC(draws=2, warmup=2, chains=2),
    "stacked ensemble": bayou.Ensemble(2, POINT, parallel="vmap"),
}


@pytest.mark.filterwarnings("ignore::bayou.BayouWarning")
@pytest.mark.parametrize("name", METHODS)
def test_mappings_give_the_posterior_of_positional_inputs(name):
    plain = outputs(Plain(), ((SCALE, X), Y), (SCALE, X), METHODS[name])
    assert torch.equal(outputs(Named(), UserDict(BATCH), UserDict(BATCH), METHODS[name]), plain)


class Items:
    """A data set of another library: not a torch Dataset, its items are dicts."""

    def __len__(self):
        return N

    def __getitem__(self, index):
        return {name: value[index] for name, value in BATCH.items()}


class Stream(IterableDataset[Any]):
    def __iter__(self):
        return (Items()[index] for index in range(N))


class Reader:
    """A loader of another library: no Dataset, no length."""

    def __iter__(self):
        return ({name: value[i : i + 8] for name, value in BATCH.items()} for i in range(0, N, 8))


FORMS = {
    "a mapping": UserDict(BATCH),
    "a pair": ({"scale": SCALE, "features": X}, Y),
    "a data set": Items(),
    "a loader": DataLoader(Items(), 8),
    "a loader of a stream": DataLoader(Stream(), 8),
    "another loader": Reader(),
}


@pytest.mark.parametrize("form", FORMS)
def test_data_of_mappings_have_the_same_rows(form):
    data = as_data(FORMS[form], 8)
    assert (data.n, data.batches) == (N, 3)
    for number, (x, y) in enumerate(data.epoch()):
        rows = slice(8 * number, 8 * number + 8)
        assert x[2] == ("scale", "features")
        assert all(map(torch.equal, (x[0], x[1], y), (SCALE[rows], X[rows], Y[rows])))
    assert number == 2


@dataclass
class Attributes:
    logits: Tensor


OUTPUTS = {
    "a dict": (lambda f: {"hidden": 2 * f, "logits": f}, None),
    "attributes": (Attributes, None),
    "a name": (lambda f: {"aux": 2 * f, "out": f}, "out"),
    "not the logits": (lambda f: Outputs(logits=2 * f, out=f), "out"),
    "an index": (lambda f: (2 * f, f), 1),
    "a function": (lambda f: (f, f), lambda pair: (pair[0] + pair[1]) / 2),
}


@pytest.mark.parametrize("name", OUTPUTS)
def test_selected_output_is_fitted_and_stored_in_files(name, tmp_path):
    made, output = OUTPUTS[name]
    net = Named(made)
    posterior = fit(net, BATCH, POINT, output=output)
    expected = outputs(Plain(), ((SCALE, X), Y), (SCALE, X), POINT)
    assert torch.equal(posterior.predict(BATCH, 4, seed=0).outputs, expected)
    assert not {**net._forward_hooks, **net._forward_pre_hooks}  # the network is not changed
    posterior.save(tmp_path / "a.bayou")
    if callable(output):
        with pytest.raises(
            FileError, match=r"pass the output it was fitted with: load\(..., output=...\)"
        ):
            bayou.load(tmp_path / "a.bayou", net)
    loaded = bayou.load(tmp_path / "a.bayou", net, **{"output": output} if callable(output) else {})
    assert torch.equal(loaded.predict(BATCH, 4, seed=0).outputs, expected)


def test_invalid_output_raises():
    with pytest.raises(
        ValueError, match=r"output must be a name, an index or a function of the outputs, got 1.5"
    ):
        bayou.fit(Named(), BATCH, POINT, output=1.5)
    with pytest.raises(
        ValueError, match="must return one tensor, got Outputs of loss, logits; select"
    ):
        fit(Named(), BATCH, POINT, output="other")


def test_draws_take_keywords():
    named, plain = (bayou.bayesianize(net, bayou.MNF()) for net in (Named(), Plain()))
    for samples in (None, 3):
        found, expected = (bnn.draw(samples, seed=0) for bnn in (named, plain))
        torch.manual_seed(0)
        f = found(**BATCH)
        torch.manual_seed(0)
        assert torch.equal(f, expected(SCALE, X))
    torch.manual_seed(0)
    f, kl = named(seed=0, **BATCH)
    torch.manual_seed(0)
    g, other = plain(SCALE, X, seed=0)
    assert all(map(torch.equal, (f, kl), (g, other)))


@pytest.mark.filterwarnings("ignore::bayou.BayouWarning")
def test_a_network_of_keywords_is_compressed():
    class Traced(Plain):
        def forward(self, *, features, scale):
            return {"logits": super().forward(scale, features)}

    posterior = fit(Traced(), BATCH, bayou.VI(steps=3))
    small = bayou.compress(posterior, example_x=UserDict(BATCH))
    assert small(features=X, scale=SCALE)["logits"].shape == (N, 2)
    assert small.compression.difference is not None


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (
            {"features": X.tolist(), "labels": Y},
            "'features' of x is a list, expected a tensor; use return_tensors='pt'",
        ),
        ({"features": X, "scale": SCALE}, "a batch with the keys features, scale has no labels"),
        ({"features": X[:3], "labels": Y}, "x has 3 rows but y has 24"),
        (
            BATCH | {"odd": X},
            r"float32 \(24, 3\), named scale, features, odd: .*unexpected keyword argument 'odd'",
        ),
    ],
)
def test_invalid_mappings_raise(data, message):
    with pytest.raises(ValueError, match=message):
        fit(Named(), data, POINT)


def test_flags_of_a_mapping_are_arguments_of_the_network():
    class Flagged(Named):
        def forward(self, *, double, **inputs):
            return (1 + double) * super().forward(**inputs).logits

    batch = {"double": True} | BATCH
    posterior = fit(Flagged(), batch, bayou.MAP(steps=1, lr=1e-9))
    f = posterior.predict(batch).outputs
    torch.testing.assert_close(f[0], 2 * Plain()(SCALE, X), atol=1e-6, rtol=1e-5)

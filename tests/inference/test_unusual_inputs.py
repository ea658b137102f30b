"""Networks, data and settings that cannot be fitted as they are: a sentence that says so, or
support.
"""

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bayou
from bayou import (
    HMC,
    IVON,
    MAP,
    MLE,
    SGHMC,
    SGLD,
    VI,
    Categorical,
    Gaussian,
    Laplace,
)
from bayou.flows import DiagonalNormal
from bayou.guides import Dropout
from bayou.methods import IVONOptimizer
from bayou.select.fit import warn_of_binary_targets
from bayou.training.data import Loader, Rows, as_data

X = torch.linspace(-1, 1, 60).reshape(20, 3)
Y = X.sum(1, keepdim=True)
CLASSES = (X[:, 0] > 0).long()
IDS = torch.arange(60).reshape(20, 3) % 7
NOISE = Gaussian(0.3)
STEPS = 3
SHORT_CHAIN = SGLD(chains=1, start=None, steps=8, draws=2)


def fit(net, data, method=None, **options):
    method = MAP(steps=STEPS) if method is None else method
    return bayou.fit(net, data, method, **options)


def refuse(message, function, *arguments, **options):
    """Check that a call raises this sentence."""
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)


def regression(method=None, net=None, **options):
    return fit(net or nn.Linear(3, 1), (X, Y), method, likelihood=NOISE, **options)


def classification(y=CLASSES, method=None, **options):
    return fit(nn.Linear(3, 2), (X, y), method, **options)


@pytest.mark.parametrize("block", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("method", [MAP(steps=STEPS), "map"])
def test_fit_without_gradients_names_the_block(method, block):
    message = rf"needs gradients, which torch.{block.__name__}\(\) switches off"
    with block(), pytest.raises(ValueError, match=message):
        regression(method)


class Words(nn.Module):
    """A sparse embedding below a linear layer."""

    def __init__(self, bag):
        super().__init__()
        self.table = nn.EmbeddingBag(7, 4, sparse=True) if bag else nn.Embedding(7, 4, sparse=True)
        self.bag = bag
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        z = self.table(x)
        out = self.head(z if self.bag else z.mean(1))
        return out


SPARSE = [
    MLE(steps=STEPS),
    VI(steps=STEPS),
    IVON(steps=STEPS),
    Laplace(start=MAP(steps=STEPS)),
    SGHMC(chains=1, draws=2, steps=8),
    HMC(chains=1, draws=2, warmup=4, start=MAP(steps=STEPS)),
]


@pytest.mark.parametrize("bag", [False, True], ids=["embedding", "bag"])
@pytest.mark.parametrize("method", SPARSE, ids=lambda method: type(method).__name__)
def test_sparse_embeddings_have_dense_gradients_in_a_fit(method, bag):
    net = Words(bag)
    if bag and isinstance(method, Laplace):
        with pytest.raises(ValueError, match="without the derivatives that this method needs.*VI"):
            fit(net, (IDS, CLASSES), method)
        return
    posterior = fit(net, (IDS, CLASSES), method)
    assert posterior.predict(IDS, samples=2).outputs.isfinite().all()
    assert net.table.sparse  # the network itself is not changed


def test_exported_program_is_refused_with_a_sentence():
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    program = torch.export.export(net, (X,)).module()
    refuse(r"program of torch.export.*pass the module that was exported", regression, net=program)
    refuse(r"program of torch.export", regression, net=nn.Sequential(program, nn.Linear(1, 1)))


def test_traced_graph_of_fx_is_fitted():
    net = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1)))
    assert regression(net=net).predict(X).mean.shape == (20, 1)


class EncoderDecoder(nn.Module):
    """The interface of an encoder-decoder of transformers."""

    class Config:
        is_encoder_decoder = True

    config = Config()

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7)

    def forward(self, input_ids, decoder_input_ids=None):
        if decoder_input_ids is None:
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        z = self.table(decoder_input_ids) + self.table(input_ids).mean(1, keepdim=True)
        return {"logits": self.head(z)}


def test_encoder_decoder_with_labels_only_asks_for_the_inputs_of_the_decoder():
    data = {"input_ids": IDS, "labels": IDS}
    refuse(
        "decoder_input_ids=net.prepare_decoder_input_ids_from_labels", fit, EncoderDecoder(), data
    )
    complete = data | {"decoder_input_ids": IDS.roll(1, 1)}
    assert fit(EncoderDecoder(), complete).predict(complete).outputs.shape == (1, 20, 3, 7)


@pytest.mark.parametrize("void", [255, -1])
def test_void_label_names_ignore_index(void):
    y = CLASSES.clone()
    y[0] = void
    refuse(
        rf"if {void} marks labels to leave out, Categorical\(ignore_index={void}\)",
        classification,
        y,
    )
    assert classification(y, likelihood=Categorical(ignore_index=void)).predict(X).mean.shape == (
        20,
        2,
    )
    refuse("or give more outputs$", classification, torch.arange(20))


@pytest.mark.parametrize("method", [VI(steps=STEPS), Laplace(start=MAP(steps=STEPS)), "laplace"])
def test_labels_that_are_all_ignored_are_refused(method):
    y = torch.full((20,), -100)
    likelihood = Categorical(ignore_index=-100)
    refuse("no label to learn from", classification, y, method, likelihood=likelihood)
    loader = DataLoader(TensorDataset(X, y), batch_size=8)
    refuse("no label to learn from", fit, nn.Linear(3, 2), loader, likelihood=likelihood)
    y[-1] = 1  # the first batch may have none
    assert fit(nn.Linear(3, 2), loader, likelihood=likelihood).stopped == "finished"


def test_output_of_a_network_with_one_tensor_is_refused_unless_it_means_that_tensor():
    for output in ("zz", 3):
        with pytest.raises(ValueError, match=r"returns one tensor \(20, 1\); leave output= out"):
            regression(output=output)
    for output in ("logits", 0):
        assert regression(output=output).stopped == "finished"


def test_ivon_refuses_a_rate_beyond_a_newton_step():
    refuse(r"IVON lr must be at most 1/hessian = 10, .* got lr=10000000000.0", IVON, lr=1e10)
    refuse("at most 1/hessian = 2", IVON, lr=3.0, hessian=0.5)
    assert IVON(lr=10.0).lr == 10.0


@pytest.mark.parametrize(
    "make",
    [
        lambda v: IVONOptimizer(nn.Linear(3, 1).parameters(), n=10, prior_std=v),
        lambda v: DiagonalNormal(2, std=v),
        lambda v: DiagonalNormal(2, mean=v),
        lambda v: SGLD(dispersal=v),
        lambda v: SGLD(temperature=v),
        lambda v: HMC(step_size=v),
        lambda v: Laplace(temperature=v),
        lambda v: MAP(lr=v),
        lambda v: MAP(clip=v),
        lambda v: IVON(hessian=v),
        lambda v: VI(beta=v),
        lambda v: Dropout(temperature=v),
    ],
)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_infinite_settings_are_refused_at_once(make, value):
    with pytest.raises(ValueError, match=r"finite|strictly|in \[0, "):
        make(value)


def test_list_of_batches_is_all_their_rows():
    net = nn.Linear(3, 1)
    batches = [(X[:8], Y[:8]), (X[8:13], Y[8:13]), (X[13:], Y[13:])]
    rows = as_data(batches, 20)
    assert isinstance(rows, Rows)
    assert torch.equal(rows.targets(), Y)
    method = MAP(steps=STEPS, batch_size=20)
    expected = regression(method, net).stack["weight"]
    named = [{"input": X[:8], "labels": Y[:8]}, {"input": X[8:], "labels": Y[8:]}]
    for data in (batches, tuple(batches), [*batches[:1], (X[8:], Y[8:])], named):
        assert torch.equal(fit(net, data, method, likelihood=NOISE).stack["weight"], expected)
    pair = as_data([((X, X), Y)], 20)
    assert isinstance(pair, Rows)
    assert len(pair.source[0]) == 2


def test_list_of_batches_of_different_shapes_stays_batches():
    batches = [(IDS[:8], CLASSES[:8]), (IDS[8:, :2], CLASSES[8:])]
    data = as_data(batches)
    assert isinstance(data, Loader)
    assert (data.n, data.batches) == (20, 2)
    assert [x.shape[1] for x, _ in data.epoch(3)] == [3, 2]
    assert fit(Words(bag=False), batches).predict(IDS).mean.shape == (20, 2)


def test_list_of_examples_is_a_data_set():
    data = as_data([(x, int(y)) for x, y in zip(X, CLASSES, strict=True)], 5)
    assert isinstance(data, Rows)
    x, y = next(data.epoch())
    assert torch.equal(x, X[:5])
    assert torch.equal(y, CLASSES[:5])
    vectors = as_data(list(zip(X, X, strict=True)), 5)  # x (3,) and y (3,) are one example
    assert vectors.n == 20


@pytest.mark.parametrize("data", [[], [X, X, X], [(X, Y), 3], [(X, Y, Y)]])
def test_list_of_other_things_is_refused(data):
    refuse("data must be a pair of tensors", as_data, data)


class Named(Dataset[Any]):
    """Rows as mappings with labels."""

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return {"input": X[index], "labels": Y[index]}


@pytest.mark.parametrize(
    "data",
    [TensorDataset(X, Y), TensorDataset(X), X, Named()],
    ids=["pairs", "only inputs", "tensor", "mappings"],
)
def test_predictions_for_a_data_loader_are_those_for_all_its_rows(data):
    posterior = regression(VI(steps=STEPS))
    loader = DataLoader(data, batch_size=7)
    expected = posterior.predict(X, samples=4).outputs
    assert torch.equal(posterior.predict(loader, samples=4).outputs, expected)


def test_predictions_for_a_data_loader_that_shuffles_are_refused():
    posterior = regression()
    refuse(
        "shuffle=False",
        posterior.predict,
        DataLoader(TensorDataset(X, Y), batch_size=7, shuffle=True),
    )
    ragged = DataLoader([(torch.zeros(n), 0.0) for n in (3, 3, 4, 4)], batch_size=2)
    refuse("rows of different shapes", posterior.predict, ragged)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [
        (TensorDataset(X, Y), r"got TensorDataset; use DataLoader\(x, batch_size=256\)"),
        (
            [(X[:5], Y[:5]), (X[5:], Y[5:])],
            r"got a list of batches or rows; use the inputs alone, torch.cat",
        ),
    ],
)
def test_predictions_for_a_dataset_or_a_list_of_batches_name_what_to_pass(inputs, words):
    posterior = regression()
    refuse(words, posterior.predict, inputs)


def initial_noise(posterior):
    """Return the noise at which a Gaussian likelihood with a learned noise started."""
    spec = posterior.target.likelihood_spec
    assert isinstance(spec, Gaussian)
    assert spec.learn
    return float(spec.noise)


@pytest.mark.parametrize(
    "method",
    [MAP(steps=STEPS), Laplace(start=None), SHORT_CHAIN],
    ids=lambda method: type(method).__name__,
)
def test_likelihood_of_a_method_object_is_inferred_from_y(method):
    posterior = classification(method=method)
    assert isinstance(posterior.target.likelihood_spec, Categorical)
    scales = torch.tensor([0.5, 1.5])
    y = scales * (Y - Y.mean()) / Y.std(correction=0)  # the mean standard deviation is 1
    posterior = classification(y, method)
    assert initial_noise(posterior) == pytest.approx(0.5)
    posterior = fit(nn.Linear(3, 1), DataLoader(TensorDataset(X, Y), batch_size=5), MAP(steps=1))
    assert initial_noise(posterior) == pytest.approx(0.5 * float(Y.std(correction=0)))


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (torch.stack([CLASSES, CLASSES.roll(1)], 1), r"likelihood=bayou.Bernoulli\(\) for labels"),
        (torch.stack([CLASSES, 1 - CLASSES], 1), r"y.argmax\(1\)"),
        (CLASSES.unsqueeze(1), r"likelihood=bayou.Bernoulli\(\) for labels"),
    ],
    ids=["several labels", "one-hot", "one label"],
)
def test_float_labels_without_a_likelihood_warn_once_of_the_gaussian(y, words):
    with pytest.warns(bayou.BayouWarning, match=f"has only 0 and 1.*{words}") as caught:
        fit(nn.Linear(3, y.shape[1]), (X, y.float()))
    assert len(caught) == 1
    # a second warning would be an error in these tests
    fit(nn.Linear(3, y.shape[1]), (X, y.float()), likelihood=bayou.Bernoulli())


def test_fit_by_name_warns_of_float_labels():
    def stop(x):
        raise RuntimeError("stop")

    y = CLASSES.float().unsqueeze(1)
    with (
        pytest.warns(bayou.BayouWarning, match="has only 0 and 1"),
        pytest.raises(ValueError, match="stop"),
    ):
        fit(nn.Linear(3, 1), (X, y), "map", output=stop)


@pytest.mark.parametrize("y", [CLASSES, Y, torch.zeros(20, 2), torch.ones(20, 1)])
def test_other_targets_have_no_warning_of_labels(y):
    warn_of_binary_targets(as_data((X, y)))  # a warning is an error in these tests

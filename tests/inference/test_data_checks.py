"""What is wrong with a network, its data or an argument is said in a sentence, before the first
step.
"""

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import bayou
from bayou.network import Network
from bayou.training.convergence import ConvergenceWarning

X = torch.randn(24, 3, generator=torch.Generator().manual_seed(0))
Y = X[:, :1].sin()
LABELS = torch.arange(24) % 3
QUICK = bayou.MAP(steps=2, lr=1e-3)
NOISE = bayou.Gaussian(0.1)


def make_net(outputs=1):
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs))


class Around(nn.Module):
    """A network that a function is written around: ``function(layers, x)``."""

    def __init__(self, function, outputs=1):
        super().__init__()
        self.layers, self.function = make_net(outputs), function

    def forward(self, *inputs):
        return self.function(self.layers, *inputs)


def fitted(net=None, data=(X, Y), **options):
    options = {"method": QUICK, "likelihood": NOISE} | options
    return bayou.fit(make_net() if net is None else net, data, **options)


def refuse(message, *arguments, function=fitted, **options):
    """Check that a fit, or another function, raises this sentence."""
    with pytest.raises(ValueError, match=message):
        function(*arguments, **options)


METHODS = {
    "MLE": bayou.MLE(steps=2),
    "MAP": QUICK,
    "VI": bayou.VI(steps=2),
    "IVON": bayou.IVON(steps=2),
    "NUTS": bayou.NUTS(draws=1, warmup=1, chains=1, start=None),
    "HMC": bayou.HMC(draws=1, warmup=1, chains=1, start=None),
    "SGLD": bayou.SGLD(steps=2, start=None),
    "SWAG": bayou.SWAG(steps=2, start=None),
    "Laplace": bayou.Laplace(start=None),
    "Ensemble": bayou.Ensemble(2, of=QUICK),
    "vmap": bayou.Ensemble(2, of=QUICK, parallel="vmap"),
    "Annealed": bayou.Annealed(bayou.VI(steps=2)),
}


@pytest.mark.parametrize("name", METHODS)
def test_no_method_fits_a_network_whose_outputs_no_gradient_leaves(name):
    net = Around(lambda layers, x: layers(x).detach())
    refuse(
        r"no gradient of the outputs of Around reaches any of its parameters.*detach",
        net,
        method=METHODS[name],
    )


CUTS = {
    "numpy": lambda layers, x: torch.from_numpy(layers(x).detach().numpy()),
    "no_grad": lambda layers, x: torch.no_grad()(layers)(x),
    "data": lambda layers, x: layers(x).data,
    "whole numbers": lambda layers, x: layers(x).round().long(),
}


@pytest.mark.parametrize("name", CUTS)
def test_every_way_to_cut_the_gradient_is_found(name):
    refuse("no gradient of the outputs", Around(CUTS[name]))


@pytest.mark.parametrize("method", [QUICK, bayou.VI(steps=2)], ids=["MAP", "VI"])
def test_a_tensor_that_no_gradient_reaches_is_named(method):
    net = Around(lambda layers, x: layers[2](layers[0](x).detach()))
    with pytest.warns(
        UserWarning,
        match=r"reaches 'layers.0.weight', 'layers.0.bias': the data do not affect them",
    ):
        fitted(net, method=method)


def test_frozen_tensors_and_those_that_training_alone_uses_are_not_missed():
    net = Around(lambda layers, x: layers[2](layers[0](x).detach()))
    net.layers[0].requires_grad_(False)
    fitted(net)

    class Auxiliary(nn.Module):
        def __init__(self):
            super().__init__()
            self.main, self.aside, self.norm = make_net(), nn.Linear(3, 1), nn.BatchNorm1d(3)

        def forward(self, x):
            x = self.norm(x)
            return self.main(x) + self.aside(x) if self.training else self.main(x)

    net = Auxiliary()
    network, params = Network(net), {name: value.detach() for name, value in net.named_parameters()}
    assert network.unreached_names(params, list(params), (X,)) == []
    assert int(network.buffers()["norm.num_batches_tracked"]) == 0
    assert network.unreached_names(params, ["aside.weight"], (X,)) == []
    assert all(value.grad is None for value in net.parameters())


def test_only_all_rows_need_to_reach_an_expert():
    def experts(layers, x):
        return (
            layers(x) if bool((x[:, 0] > 2).any()) else layers[2](layers[1](layers[0](x).detach()))
        )

    x = X.clone()
    x[5, 0] = 3.0  # neither the first row nor the last
    fitted(Around(experts), (x, Y))


@pytest.mark.parametrize("name", ["MAP", "VI", "SGLD"])
def test_a_network_that_mixes_rows_is_named(name):
    with pytest.warns(UserWarning, match="Around mixes the rows of a batch"):
        fitted(Around(lambda layers, x: layers(x - x.mean(0))), method=METHODS[name])


WRITERS = {
    "mul_": lambda layers, x: layers(x.mul_(2)),
    "relu_": lambda layers, x: layers(F.relu_(x)),
    "a view": lambda layers, x: layers(x.view(-1).add_(1).view(-1, 3)),
    "inplace=True": lambda layers, x: layers(nn.ReLU(inplace=True)(x)),
}


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("method", ["MAP", "VI", "HMC"])
def test_a_network_that_writes_into_its_input_is_refused_and_the_data_stay(name, method):
    x = X.clone()
    refuse(
        "modifies its input x by an in-place operation",
        Around(WRITERS[name]),
        (x, Y),
        method=METHODS[method],
    )
    assert torch.equal(x, X)


def test_the_probe_neither_changes_the_network_nor_the_stream():
    net = nn.Sequential(
        nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 1)
    ).train()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    bayou.inference.point.PointModel(
        QUICK, bayou.network.target.Target.build(net, NOISE, None, 24)
    ).check_first_batch(bayou.training.data.as_data((X, Y)))
    assert torch.equal(torch.get_rng_state(), state)
    assert net.training
    assert net[1].training
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())


@pytest.mark.parametrize(
    ("method", "rows"),
    [
        (bayou.MAP(steps=48, batch_size=8), 1),
        (bayou.VI(steps=48, batch_size=1), 24),
        (bayou.SWAG(steps=48, batch_size=8, start=None), 17),
    ],
)
def test_batch_norm_with_a_batch_of_one_row_raises(method, rows):
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    refuse(
        "batch norm needs more than one row in every batch, and of",
        net,
        (X[:rows], Y[:rows]),
        method=method,
    )


def test_batch_norm_of_one_image_is_fine():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 1))
    fitted(net, (torch.randn(3, 1, 4, 4), Y[:3]), method=bayou.MAP(steps=2, batch_size=2))


@pytest.mark.parametrize("method", [bayou.MAP, bayou.MLE])
def test_a_run_that_ends_worse_than_it_began_names_the_learning_rate(method):
    with pytest.warns(
        ConvergenceWarning, match=r"ended worse than it started: .* lr=1e\+10 is too large"
    ):
        fitted(method=method(lr=1e10, steps=20))


def test_members_that_diverge_together_are_told_too():
    with pytest.warns(
        ConvergenceWarning, match=r"2 × MAP ended worse than it started: .* lr=1e\+10"
    ):
        fitted(method=bayou.Ensemble(2, of=bayou.MAP(lr=1e10, steps=3), parallel="vmap"))


def sparse_net():
    net = make_net()
    net[0].weight = nn.Parameter(net[0].weight.detach().to_sparse())
    return net


def complex_net():
    net = make_net()
    net[2].bias = nn.Parameter(torch.zeros(1, dtype=torch.complex64))
    return net


def net_with_meta_buffer():
    net = make_net()
    net.register_buffer("table", torch.zeros(2, device="meta"))
    return net


NETWORKS = {
    "meta buffer": (net_with_meta_buffer, "'table' of Sequential is on the meta device"),
    "meta": (
        lambda: make_net().to("meta"),
        "'0.weight' of Sequential is on the meta device and has no values; use",
    ),
    "complex": (
        complex_net,
        "'2.bias' of Sequential is torch.complex64; parameters must be real and dense",
    ),
    "sparse": (sparse_net, r"'0.weight' of Sequential is torch.sparse_coo.*use to_dense\(\)"),
    "lazy": (
        lambda: nn.Sequential(nn.LazyLinear(1)),
        r"'0.weight' of Sequential is lazy .* call .* net\(x\)",
    ),
    "a class": (lambda: nn.Linear, "net must be an nn.Module, got type; pass the network itself"),
    "a function": (lambda: lambda x: x, "net must be an nn.Module, got function"),
    "no weights": (nn.ReLU, "ReLU has no parameters"),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_no_network_of_real_dense_tensors_is_refused(name):
    make, message = NETWORKS[name]
    refuse(message, make())
    refuse(message, make(), bayou.MeanField(), function=bayou.bayesianize)


OUTPUTS = {
    "a tuple": (
        lambda layers, x: (layers(x), x),
        r"must return one tensor, got tuple; select .*output=0",
    ),
    "a dict": (
        lambda layers, x: {"a": layers(x), "b": x},
        "must return one tensor, got dict of a, b; select",
    ),
    "nothing": (lambda layers, x: (layers(x), None)[1], "must return one tensor, got NoneType"),
    "a mean": (
        lambda layers, x: layers(x).mean(),
        r"outputs \(\) for a batch of 24 rows; their first axis",
    ),
}


@pytest.mark.parametrize("name", OUTPUTS)
@pytest.mark.parametrize("method", ["VI", "HMC"])
def test_outputs_that_no_likelihood_takes_are_refused(name, method):
    make, message = OUTPUTS[name]
    refuse(message, Around(make), method=METHODS[method])


# --- arguments ----------------------------------------------------------------------------------

ARGUMENTS = [
    (
        {"prior": 1.0},
        r"prior must be a Prior such as Normal\(1.0\).* got 1.0; .* write Normal\(1.0\)",
    ),
    ({"prior": {"*": 2}}, r"got 2; for a standard deviation of 2 write Normal\(2\)"),
    ({"prior": bayou.Normal}, "prior must be a Prior such as .* got <class"),
    ({"method": "laplac"}, r"there is no method 'laplac' \(did you mean 'laplace'\?\)"),
    ({"method": bayou.VI}, r"call it: VI\(\)"),
    (
        {"method": 3},
        r"method must be a name such as 'mnf' or a Method such as VI\(MNF\(\)\), got 3$",
    ),
    ({"likelihood": 0.1}, r"likelihood must be a Likelihood such as .* got 0.1"),
    ({"likelihood": "gausian"}, r"no likelihood 'gausian' \(did you mean 'gaussian'\?\)"),
]


@pytest.mark.parametrize(("options", "message"), ARGUMENTS)
def test_wrong_arguments_of_fit_are_sentences(options, message):
    refuse(message, **options)


def test_wrong_arguments_of_bayesianize_are_sentences():
    family = r"rules must be a family such as MeanField\(\), .* got"
    for rules in (3.0, bayou.MeanField, "ffg", {"*": 3.0}):
        refuse(family, make_net(), rules, function=bayou.bayesianize)
    prior = "prior must be a Prior .* got 3.0"
    refuse(prior, make_net(), bayou.MeanField(), prior=3.0, function=bayou.bayesianize)


def test_wrong_arguments_of_load_are_sentences(tmp_path):
    path = tmp_path / "point.bayou"
    fitted().save(path)
    for arguments in ((None,), (None, make_net()), (path,), (path, None), (make_net(), path)):
        message = r"load needs the name of a file and the network .* load\('post"
        refuse(message, *arguments, function=bayou.load)


class Items(Dataset[Any]):
    def __init__(self, item):
        self.item = item

    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return self.item(index)


NAMED = Items(lambda i: ({"a": X[i]}, Y[i]))
DATA = [
    (
        ({"a": X}, Y),
        r"cannot take x = float32 \(24, 3\), named a: .* unexpected keyword argument 'a'",
    ),
    (NAMED, "unexpected keyword argument 'a'"),
    (DataLoader(NAMED, batch_size=8), "unexpected keyword argument 'a'"),
    ((X.to_sparse(), Y), r"x is a sparse tensor .*; use to_dense\(\)"),
    (
        (X.double(), Y),
        r"x is torch.float64 but the network is torch.float32; use x.to\(torch.float32\)",
    ),
    ((X.long(), Y), r"cannot take x = int64 \(24, 3\): .* use x.float\(\)"),
    ((X.numpy(), Y), "got x of type ndarray; use torch.as_tensor"),
    (
        (X, Y[:, 0]),
        r"y has shape \(24,\), but outputs of shape \(24, 1\) need \(24, 1\); use y.unsqueeze\(-1\)",
    ),
    ((X, np.array(["a"] * 24)), "got y of type ndarray"),
    ((X[:0], Y[:0]), "data has no rows"),
    ((X.to("meta"), Y), "x .* is on the meta device and has no values"),
    ((X, Y.to("meta")), "y .* is on the meta device and has no values"),
    (DataLoader(TensorDataset(X.to("meta"), Y), batch_size=5), "meta device"),
    ((X[:, :2], Y), r"cannot take x = float32 \(24, 2\)"),
]


@pytest.mark.parametrize(("data", "message"), DATA)
def test_data_that_do_not_fit_are_sentences(data, message):
    refuse(message, Around(lambda layers, x: layers(x)), data)


CLASSES = [
    (3, LABELS.float(), r"needs class indices .* got torch.float32; .* pass y.long\(\)"),
    (3, LABELS + 1, r"y must lie in 0 .. 2 for 3 classes, got 1 .. 3; count the classes from 0"),
    (
        1,
        LABELS % 2,
        r"y must lie in 0 .. 0 for 1 classes, got 0 .. 1; use Bernoulli\(\) for one output",
    ),
]


@pytest.mark.parametrize(("outputs", "y", "message"), CLASSES)
def test_labels_that_are_no_classes_are_sentences(outputs, y, message):
    refuse(message, make_net(outputs), (X, y), likelihood=bayou.Categorical())


def test_whole_numbers_and_doubles_are_numbers_to_a_regression():
    net, whole = make_net(), Y.round()
    plain = fitted(net, (X, whole)).stack
    for y in (whole.long(), whole.int(), whole.double()):
        for name, value in fitted(net, (X, y)).stack.items():
            torch.testing.assert_close(value, plain[name], rtol=1e-5, atol=1e-5)


def test_what_cannot_be_predicted_is_a_sentence():
    posterior = fitted()
    for x, message in [
        (X[0], r"outputs \(1,\) for 3 rows of x; .* x.unsqueeze\(0\) for one"),
        ({"a": X}, "unexpected keyword argument 'a'"),
        ({"a": X.tolist()}, r"'a' of x is a list, expected a tensor; use return_tensors='pt'"),
        (X.numpy(), r"got ndarray; use torch.as_tensor\(x, dtype=torch.float32\)"),
        (X.double(), r"x is torch.float64 .* use x.to\(torch.float32\)"),
        (X.to("meta"), "meta device"),
    ]:
        refuse(message, x, function=posterior.predict)
    message = r"y must be a tensor, got ndarray; use torch.as_tensor\(y\)"
    refuse(message, Y.numpy(), function=posterior.predict(X).log_prob)

"""where=: a posterior over an adapter or a last layer is as light as that, whatever the method."""

import os

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import bayou
from bayou.posteriors import FileError

X = torch.randn(24, 64, generator=torch.Generator().manual_seed(0))
Y = (X[:, 0] > 0).long()
START = bayou.MAP(steps=2)
LARGE = 64 * 1024 * 4  # bytes of a matrix of the base; nothing else here is as large
METHODS = {
    "MAP": bayou.MAP(steps=2, validation=0.2, patience=1),
    "ensemble": bayou.Ensemble(2, START, init="keep"),
    "vmap": bayou.Ensemble(2, START, init="keep", parallel="vmap"),
    "mixture": bayou.Ensemble(2, bayou.VI(steps=2), init="keep"),
    "VI": bayou.VI(steps=2, samples=2),
    "MNF": bayou.VI(bayou.MNF(), steps=2),
    "IVON": bayou.IVON(steps=2),
    "Laplace": bayou.Laplace("diagonal", start=START),
    "SWAG": bayou.SWAG(start=START, steps=4, every=2, rank=2),
    "SGLD": bayou.SGLD(steps=4, draws=2, chains=2, start=START),
    "HMC": bayou.HMC(draws=2, warmup=2, leapfrogs=2, chains=2, start=START),
    "Annealed": bayou.Annealed(bayou.VI(steps=2), draws=2, temperatures=2),
    "dropout": bayou.MCDropout(START),
}


class Lora(nn.Module):
    """A linear layer and a low-rank adapter, B of which begins at 0 (Hu et al. 2021)."""

    def __init__(self, inputs, outputs, rank=4):
        super().__init__()
        self.base = nn.Linear(inputs, outputs)
        self.lora_a = nn.Parameter(torch.randn(rank, inputs) / inputs**0.5)
        self.lora_b = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, x):
        return self.base(x) + x @ self.lora_a.T @ self.lora_b.T


class Net(nn.Module):
    """Two large layers, a norm with statistics, a mask and a small head."""

    def __init__(self, width=1024, norm=nn.BatchNorm1d):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 64), norm(64))
        self.drop, self.head = nn.Dropout(0.2), nn.Linear(64, 2)
        self.register_buffer("mask", torch.ones(LARGE, dtype=torch.bool))

    def forward(self, x):
        return self.head(self.drop(self.body(x)))


def make(kind=Net, **options):
    torch.manual_seed(0)
    return kind(**options)


def adapted():
    torch.manual_seed(0)
    return nn.Sequential(Lora(64, 64, 8), nn.Tanh(), Lora(64, 64, 8), nn.Tanh(), nn.Linear(64, 2))


def fit(method, net=None, where="head.*", **options):
    return bayou.fit(net or make(), (X, Y), method=method, where=where, progress=False, **options)


class Allocations(TorchDispatchMode):
    """The operations that make a tensor as large as one of the base."""

    def __init__(self, net):
        super().__init__()
        self.base = {
            tensor.untyped_storage().data_ptr() for tensor in (*net.parameters(), *net.buffers())
        }
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage.nbytes() >= LARGE and storage.data_ptr() not in self.base:
                    self.found.append(f"{func} {tuple(leaf.shape)}")
        return out


@pytest.mark.parametrize("name", METHODS)
def test_the_base_is_never_copied_stacked_changed_or_stored(name, tmp_path):
    options = (
        {"norm": nn.LayerNorm} if name in ("vmap", "SWAG") else {}
    )  # members share statistics, draws of them are large
    net = make(**options)
    before = {key: value.clone() for key, value in net.state_dict().items()}
    with Allocations(net) as seen:
        posterior = fit(METHODS[name], net)
        outputs = posterior.predict(X, 4, seed=0).outputs
        posterior.save(tmp_path / "p.bayou")
    assert not seen.found
    assert all(torch.equal(value, before[key]) for key, value in net.state_dict().items())
    assert all(parameter.requires_grad for parameter in net.parameters())
    known = {"likelihood.", "member", "dropout.seed", "head.weight", "head.bias"}
    assert all(
        any(key.startswith(start) for start in known)
        for key in posterior.sample(2, seed=0)
        if "run" not in key
    )
    assert os.path.getsize(tmp_path / "p.bayou") < LARGE
    back = bayou.load(tmp_path / "p.bayou", make(**options))
    assert torch.equal(back.predict(X, 4, seed=0).outputs, outputs)
    plain = posterior.to_module(seed=1)
    assert type(plain) is Net
    assert plain.body[0].weight.data_ptr() == net.body[0].weight.data_ptr()
    assert not torch.equal(plain.head.weight, net.head.weight)


def test_a_copy_would_be_noticed():
    net = make()
    with Allocations(net) as seen:
        kept = [parameter.clone() for parameter in net.body.parameters()]
    assert [line.split()[0] for line in seen.found] == ["aten.clone.default"] * 2
    assert kept


@pytest.mark.parametrize("name", ["MAP", "VI", "Laplace"])
def test_it_is_the_posterior_of_the_same_network_with_the_rest_frozen(name):
    frozen = make()
    frozen.body.requires_grad_(False)
    by_hand = bayou.fit(frozen, (X, Y), method=METHODS[name], progress=False)
    assert torch.equal(
        by_hand.predict(X, 3, seed=0).outputs, fit(METHODS[name]).predict(X, 3, seed=0).outputs
    )


def test_patterns_lists_and_the_last_layer():
    assert fit(START, where="last").target.free == ["head.weight", "head.bias"]
    assert fit(START, where=["body.0.*", "*.bias"]).target.free == [
        "body.0.weight", "body.0.bias", "body.2.bias", "body.3.bias", "head.bias",
    ]  # fmt: skip
    for laplace in (bayou.Laplace(where="last", start=START), bayou.Laplace(start=START)):
        assert list(fit(laplace).covariance.shapes) == ["head.weight", "head.bias"]

    for rest in (
        {"body.*": bayou.MeanField()},
        {},
    ):  # a frozen tensor needs no family and no prior, but may have one
        prior = dict.fromkeys(rest, bayou.Normal(0.1)) | {"head.*": bayou.Normal(2.0)}
        posterior = fit(bayou.VI(rest | {"head.*": bayou.MeanField()}, steps=2), prior=prior)
        assert (
            list(posterior.bound_priors())
            == list(posterior.as_prior())
            == ["head.weight", "head.bias"]
        )


def frozen_head():
    net = make()
    net.head.requires_grad_(False)
    return net


@pytest.mark.parametrize(
    ("net", "where", "message"),
    [
        (make(), "tail.*", r"pattern 'tail\.\*' matches no name; the names are 'body"),
        (make(), ["head.*", "tail.*"], r"pattern 'tail\.\*' matches no name"),
        (make(), [], r"where must be a pattern .* a list of them or 'last', got \[\]"),
        (make(), 3, "where must be a pattern"),
        (
            frozen_head(),
            ["body.*", "head.*"],
            r"'head\.\*' matches only frozen parameters such as 'head\.weight'",
        ),
        (
            frozen_head(),
            "last",
            "where='last' selects head.weight, head.bias, and 'head.weight' is frozen; unfreeze",
        ),
    ],
)
def test_wrong_patterns_are_errors_before_the_first_step(net, where, message):
    with pytest.raises(ValueError, match=message):
        fit(START, net, where)


def test_a_pattern_of_laplace_is_one_of_the_free_parameters():
    with pytest.raises(ValueError, match=r"pattern 'body\.\*' matches no name; .* 'head"):
        fit(bayou.Laplace(where="body.*"))


@pytest.mark.parametrize(
    ("method", "random", "copies"),
    [
        (bayou.VI({"*lora_a*": bayou.MeanField(), "*": bayou.Delta()}, steps=2), "a", 1.5),  # BLoB
        (bayou.MAP(steps=2), "", 1),
        (bayou.VI(bayou.MeanField(), steps=2), "ab", 2),
        (bayou.Laplace("diagonal", start=START), "ab", 2),
        (bayou.Ensemble(3, bayou.MAP(steps=2, batch_size=8), init="keep"), "ab", 3),
    ],
)
def test_adapters_by_every_method(method, random, copies, tmp_path):
    """Which factors are random, and a file as large as its weights."""
    posterior = fit(method, adapted(), where="*lora*")
    assert {name[-1] for name, std in posterior.std().items() if std.any()} == set(random)
    posterior.save(tmp_path / "p.bayou")
    # names, settings, checks and checksums
    assert 0 < os.path.getsize(tmp_path / "p.bayou") - 4 * copies * 4 * 8 * 64 < 5000
    before = bayou.metrics.nll(posterior.predict(X, seed=0), Y)
    assert bayou.calibrate(posterior, (X, Y)).after <= before + 1e-3


def test_another_base_is_refused_and_what_differs_is_named(tmp_path):
    posterior = fit(bayou.VI(steps=3))
    posterior.save(tmp_path / "p.bayou")
    other = make()
    other.body[2].weight.data[3, 5] += 1e-6
    with pytest.raises(
        FileError, match=r"other values of 'body\.2\.weight' \(1 of \d+ frozen tensors differ\)"
    ):
        bayou.load(tmp_path / "p.bayou", other)
    other = make()
    other.body[3].running_mean += 1.0
    with pytest.raises(FileError, match=r"other values of 'body\.3\.running_mean'"):
        bayou.load(tmp_path / "p.bayou", other)
    with pytest.raises(
        FileError, match=r"'body\.0\.weight' is \[1024, 64\] in the file and \[32, 64\] here"
    ):
        bayou.load(tmp_path / "p.bayou", Net(32))
    head = make()
    nn.init.ones_(head.head.weight)  # was fitted, so that its value does not matter
    same = bayou.load(tmp_path / "p.bayou", head.requires_grad_(False))
    assert torch.equal(same.predict(X, 3, seed=0).outputs, posterior.predict(X, 3, seed=0).outputs)


def test_statistics_that_the_fit_changed_are_stored(tmp_path):
    net = make()
    posterior = fit(START, net)
    changed = posterior.network.buffers()["body.3.running_mean"]
    assert not torch.equal(changed, net.body[3].running_mean)
    posterior.save(tmp_path / "p.bayou")
    assert torch.equal(
        bayou.load(tmp_path / "p.bayou", net).network.buffers()["body.3.running_mean"], changed
    )


@pytest.mark.parametrize("method", [bayou.MAP(steps=6), bayou.VI(steps=6)])
def test_a_run_does_not_continue_on_another_base(method, tmp_path):
    file = tmp_path / "run"
    fit(method, checkpoint=file)
    assert os.path.getsize(file) < LARGE
    again = fit(method, checkpoint=file)
    assert torch.equal(
        again.sample(1, seed=0)["head.weight"], fit(method).sample(1, seed=0)["head.weight"]
    )
    other = make()
    other.body[0].bias.data += 1.0
    with pytest.raises(FileError, match="another run: another base"):
        fit(method, other, checkpoint=file)


def test_what_happens_to_the_network_later_does_not_change_what_is_random(tmp_path):
    net = make()
    posterior = fit(bayou.VI(steps=3), net)
    outputs = posterior.predict(X, 3, seed=0).outputs
    net.requires_grad_(False).double()  # new tensors: the old ones stay where they are shared
    assert torch.equal(posterior.predict(X, 3, seed=0).outputs, outputs)
    assert posterior.target.free == ["head.weight", "head.bias"]


class Speaker(nn.Module):
    """A network with a method of its own, which calls it."""

    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(7, 4), nn.Linear(4, 7)

    def forward(self, tokens):
        return self.out(self.table(tokens).mean(1))

    def generate(self, tokens, steps=3):
        for _ in range(steps):
            tokens = torch.cat([tokens, self(tokens).argmax(-1, keepdim=True)], 1)
        return tokens


def test_a_drawn_network_has_the_methods_of_the_users_class():
    net, tokens = make(Speaker), torch.arange(21).reshape(3, 7) % 7
    data = tokens, torch.tensor([0, 1, 2])
    posterior = bayou.fit(
        net, data, bayou.VI(bayou.MeanField(0.5), steps=2), where="last", progress=False
    )
    drawn = posterior.to_module(seed=3)
    assert drawn.generate(tokens=tokens).shape == (3, 10)
    assert torch.equal(drawn(tokens), posterior.predict(tokens, 1, seed=3).outputs[0])
    assert drawn.table.weight.data_ptr() == net.table.weight.data_ptr()
    assert not torch.equal(drawn.out.weight, posterior.to_module(seed=4).out.weight)
    assert torch.equal(posterior.to_module().out.weight, posterior.mean()["out.weight"])

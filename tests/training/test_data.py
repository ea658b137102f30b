"""Data as batches: their order, and the errors for data that cannot be used."""

import math

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import bayou
from bayou.training.data import Rows, as_data

X, Y = torch.arange(20.0).reshape(10, 2), torch.arange(10)


class Items(Dataset):
    def __init__(self, items):
        self.items = items

    def __len__(self):
        return len(self.items)

    def __getitem__(self, i):
        return self.items[i]


class Noisy(Items):
    def __getitem__(self, i):
        x, y = self.items[i]
        return x + torch.randn(()), y


class Stream(IterableDataset):
    def __init__(self, n=None):
        self.n = n

    def __iter__(self):
        return iter(zip(X, Y, strict=True))


class Counted(Stream):
    def __len__(self):
        return 10


ROWS = list(zip(X, Y, strict=True))


def fit(net=None, data=(X, Y), **options):
    options = {
        "likelihood": bayou.Categorical(),
        "method": bayou.VI(steps=2, batch_size=4),
    } | options
    return bayou.fit(nn.Linear(2, 10) if net is None else net, data, **options)


# --- what is taken ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [(X, Y), [X, Y], TensorDataset(X, Y), Items(ROWS), DataLoader(Items(ROWS), 4, shuffle=True)],
    ids=["pair", "list", "tensors", "dataset", "loader"],
)
def test_an_epoch_has_every_row_once_in_the_order_of_its_seed(data):
    rows = as_data(data, 4)
    assert (rows.n, rows.batches) == (10, 3)
    orders = []
    for seed in (1, 1, 2):
        batches = list(rows.epoch(seed))
        assert [len(y) for _, y in batches] == [4, 4, 2]
        y = torch.cat([y for _, y in batches])
        assert torch.equal(torch.cat([x for x, _ in batches]), X[y])
        assert sorted(y.tolist()) == list(range(10))
        orders.append(y.tolist())
    assert orders[0] == orders[1] != orders[2]
    in_order = [torch.cat([y for _, y in rows.epoch()]).tolist() for _ in range(2)]
    assert in_order[0] == in_order[1]
    assert sorted(in_order[0]) == list(range(10))
    if isinstance(rows, Rows):
        assert in_order[0] == list(range(10))


NOISY = Noisy(ROWS)
WEIGHTED = WeightedRandomSampler([1.0] * 10, 10, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    "data",
    [
        NOISY,
        DataLoader(NOISY, 2, shuffle=True),
        pytest.param(DataLoader(NOISY, 2, shuffle=True, num_workers=2), marks=pytest.mark.slow),
        DataLoader(NOISY, 2, shuffle=True, generator=torch.Generator()),
        DataLoader(NOISY, 2, sampler=WEIGHTED),
    ],
    ids=["dataset", "loader", "workers", "generator", "weighted"],
)
def test_an_epoch_without_its_first_batches_has_the_other_ones(data):
    batches = as_data(data, 2)
    state = torch.get_rng_state()
    whole = list(batches.epoch(5))
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(17)  # wherever the global stream is
    for skip in (0, 2, 4):
        rest = list(batches.epoch(5, skip))
        assert len(rest) == 5 - skip
        torch.testing.assert_close(rest, whole[skip:], rtol=0, atol=0)


def test_the_generator_of_a_loader_is_restored_if_an_epoch_ends_early():
    generator = torch.Generator().manual_seed(3)
    before = generator.get_state()
    epoch = as_data(DataLoader(Items(ROWS), 2, shuffle=True, generator=generator)).epoch(0)
    next(epoch)
    epoch.close()
    assert torch.equal(generator.get_state(), before)


def test_the_rows_of_a_loader_with_a_subset_are_those_of_the_subset():
    subset = as_data(DataLoader(Items(ROWS), 2, sampler=SubsetRandomSampler([1, 2, 3, 4])))
    assert (subset.n, subset.batches) == (4, 2)
    assert as_data(DataLoader(Items(ROWS), 2, drop_last=True, shuffle=True)).n == 10


def test_a_full_batch_keeps_its_order():
    ((x, _),) = as_data((X, Y), 50).epoch(3)
    assert torch.equal(x, X)


def test_a_tuple_of_inputs_becomes_the_arguments_of_the_network():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(2, 10), nn.Linear(3, 10)

        def forward(self, a, b):
            return self.a(a) + self.b(b)

    more = torch.randn(10, 3)
    one = fit(Two(), ((X, more), Y))
    assert one.predict((X, more), samples=3).mean.shape == (10, 10)
    items = [((x, m), y) for x, m, y in zip(X, more, Y, strict=True)]
    for data in (Items(items), DataLoader(Items(items), 4)):
        assert fit(Two(), data).stopped == "finished"
    assert math.isfinite(bayou.elbo(one, ((X, more), Y), samples=2).value)


def test_integers_are_inputs_of_an_embedding():
    net = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10))
    assert fit(net, (Y, Y)).predict(Y, samples=2).mean.shape == (10, 10)


def test_batches_may_have_sequences_of_different_lengths():
    batches = [(torch.randn(2, t, 3), torch.randint(4, (2, t))) for t in (5, 3)]
    loader = DataLoader(Items(batches), batch_size=None)
    assert fit(nn.Linear(3, 4), loader).stopped == "finished"


def test_different_data_have_different_fingerprints():
    other = X.clone()
    other[9, 1] += 1e-6
    prints = [
        as_data(d, 4).fingerprint()
        for d in ((X, Y), (other, Y), (X, Y.flip(0)), Items(ROWS), Items(ROWS[:9]))
    ]
    assert len({str(p) for p in prints}) == 5
    assert as_data((X.clone(), Y.clone()), 4).fingerprint() == prints[0]
    assert as_data(Noisy(ROWS)).fingerprint() == as_data(Noisy(ROWS)).fingerprint()


# --- what is refused ----------------------------------------------------------------------------

NAN = X.clone()
NAN[3, 1] = math.nan


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ((X, Y[:9]), "x has 10 rows but y has 9"),
        (((X, X[:7]), Y), "x has 7 rows but y has 10"),
        ((NAN, Y), "x has 1 NaN or infinite values; remove or impute"),
        ((X, NAN[:, 1]), "y has 1 NaN or infinite values"),
        ((X / 0, Y), "x has 20 NaN or infinite"),
        (((), Y), "x is an empty tuple"),
        ((X, Y.tolist()), "y of type list"),
        ((torch.tensor(1.0), torch.tensor(1)), "x is a single number"),
        ((X, Y, Y), "got a tuple of 3"),
        (X, "got a Tensor"),
        (None, "got a NoneType"),
        (Items([]), "the Dataset is empty"),
        (Stream(), "cannot be indexed; wrap it in a DataLoader"),
        (Counted(), "cannot be indexed"),
        (iter(ROWS), "got a "),
        (DataLoader(Items([])), "the DataLoader is empty"),
        (
            DataLoader(Items(ROWS), 11, drop_last=True),
            "gives no batch: drop_last with a batch_size of 11",
        ),
        (Items([(x, y, y) for x, y in ROWS]), r"pairs \(x, y\).*got a list of 3"),
        (Items([{"x": x, "z": y} for x, y in ROWS]), "a batch with the keys x, z has no labels"),
        (
            Items([{"x": x.tolist(), "y": y} for x, y in ROWS]),
            "'x' of x is a list, expected a tensor",
        ),
        (DataLoader(Items(list(X)), 2), r"pairs \(x, y\).*got a Tensor of 2"),
        ((X.clone().requires_grad_(), Y), "use detach"),
    ],
)
def test_invalid_data_raise(data, message):
    with pytest.raises(ValueError, match=message):
        fit(data=data)


@pytest.mark.parametrize(
    ("net", "data", "likelihood", "message"),
    [
        (
            None,
            ((X, X), Y),
            None,
            r"the network cannot take x = float32 \(4, 2\), float32 \(4, 2\): .*positional",
        ),
        (None, (X, nn.functional.one_hot(Y)), None, "class indices, not one-hot"),
        (None, (X, Y.unsqueeze(1)), None, r"y has shape \(10, 1\).*squeeze"),
        (nn.Linear(2, 1), (X, X[:, :1]), bayou.Bernoulli(), "y must be 0 or 1"),
        (nn.Linear(2, 1), (X, -X[:, :1] - 1), bayou.Poisson(), "y must"),
        (nn.Linear(2, 3), (X, X[:, :1]), bayou.HeteroscedasticGaussian(), "even length"),
        (nn.Embedding(2, 10), (Y, Y), None, "the network cannot take x = int64"),
        (nn.Flatten(0), None, None, "no parameters"),
    ],
)
def test_data_of_another_network_or_likelihood_raise_before_the_first_step(
    net, data, likelihood, message, monkeypatch
):
    monkeypatch.setattr(
        "bayou.methods.vi.fit_module", lambda *a, **k: pytest.fail("a step was taken")
    )
    with pytest.raises(ValueError, match=message):
        fit(net, (X, Y) if data is None else data, likelihood=likelihood or bayou.Categorical())


@pytest.mark.parametrize(
    "wrap", [Items, lambda items: DataLoader(Items(items), 2)], ids=["dataset", "loader"]
)
@pytest.mark.parametrize(
    ("odd", "message"),
    [
        ((X[0], torch.tensor(10)), "y must lie in 0 .. 9"),
        ((X[0] * math.nan, Y[0]), "x has 2 NaN"),
        ((X[0].double(), Y[0]), None),  # collating makes one dtype of a batch
    ],
)
def test_invalid_rows_of_a_dataset_raise_in_the_first_epoch(wrap, odd, message):
    # torch collates with an error of its own
    errors = (ValueError, RuntimeError) if message is None else ValueError
    with pytest.raises(errors, match=message):
        fit(data=wrap([*ROWS[:9], odd]), method=bayou.VI(epochs=1, batch_size=2))


def test_a_loader_with_fewer_batches_than_its_length_raises():
    class Short(Counted):
        def __iter__(self):
            return iter(ROWS[:4])

    with pytest.raises(ValueError, match="had 2 batches in an epoch, expected 5"):
        fit(data=DataLoader(Short(), batch_size=2), method=bayou.VI(steps=20))


@pytest.mark.parametrize("batch_size", [0, -1, 2.5, True])
def test_an_invalid_batch_size_raises(batch_size):
    with pytest.raises(ValueError, match="batch_size must be a whole number of at least 1"):
        as_data((X, Y), batch_size)


def test_a_validation_split_of_a_loader_raises():
    with pytest.raises(ValueError, match="validation split needs tensors or a Dataset"):
        fit(data=DataLoader(Items(ROWS)), method=bayou.VI(steps=2, validation=0.5))


def test_items_of_numpy_numbers_are_accepted():
    items = [(np.float32(x.numpy()), int(y)) for x, y in ROWS]
    assert fit(data=Items(items)).stopped == "finished"

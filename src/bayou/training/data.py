"""Data as batches that are a function of (seed, step), so that a killed run can be resumed."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from bayou import rng

Batch = tuple[Any, Tensor]
CPU = torch.device("cpu")
LABELS = ("labels", "label", "y")  # the keys of y in a mapping


class Keywords(tuple[str, ...]):
    """The last item of a tuple of inputs: the names of those before it that a network takes by
    keyword.
    """


def forward_inputs(x: Any) -> tuple[Any, ...]:
    """The arguments of a network: of a mapping its values and their ``Keywords``; anything else
    than a tuple is one.

    The labels of a mapping are left out, unless they are all it has. Its tensors come first.
    """
    if not isinstance(x, Mapping):
        return tuple(x) if isinstance(x, (tuple, list)) else (x,)
    names = [name for name in x if name not in LABELS] or list(x)
    for name in names:
        if not isinstance(x[name], Tensor | bool | int | float | None):
            raise ValueError(
                f"{name!r} of x is a {type(x[name]).__name__}, expected a tensor; use return_tensors='pt' of a "
                "tokenizer, with_format('torch') of a data set or a collate_fn that pads, and remove columns of text"
            )
    names.sort(key=lambda name: not isinstance(x[name], Tensor))
    return (*(x[name] for name in names), Keywords(names))


def rows_of(inputs: tuple[Any, ...], index: Any) -> tuple[Any, ...]:
    """These rows of all inputs that are tensors: ``index`` is a slice or a tensor of numbers."""
    return tuple(item[index] if isinstance(item, Tensor) else item for item in inputs)


def combined(
    function: Callable[[tuple[Tensor, ...]], Tensor], several: Iterable[Any]
) -> tuple[Any, ...]:
    """Several inputs as one: ``function`` (torch.cat or torch.stack) of their tensors, the rest as
    in the first.
    """
    each = zip(*map(forward_inputs, several), strict=True)
    return tuple(function(parts) if isinstance(parts[0], Tensor) else parts[0] for parts in each)


class Data(ABC):
    """N examples; ``epoch(seed)`` gives its batches in an order determined by the seed."""

    n: int
    rows_first: bool = (
        True  # whether the first axis of a batch is its rows, which several processes can share
    )

    @abstractmethod
    def epoch(self, seed: int, skip: int = 0) -> Iterator[Batch]:
        """The batches (x, y) of one pass, shuffled by the seed, without the first ``skip``."""

    @abstractmethod
    def ordered(self) -> Iterator[Batch]:
        """The batches of one pass, in the order of the data."""

    @property
    @abstractmethod
    def batches(self) -> int:
        """How many batches an epoch has."""

    @abstractmethod
    def fingerprint(self) -> list[Any]:
        """The identity of these data, as plain JSON values."""

    def targets(self) -> Tensor | None:
        """All y as one tensor, if available."""
        return None


class Rows(Data):
    """Tensors or a map-style Dataset, in batches by index."""

    def __init__(self, source: Any, index: Tensor, batch_size: int) -> None:
        self.source, self.index = source, index
        self.n, self.batch_size = len(index), min(batch_size, len(index))

    @property
    def batches(self) -> int:
        return -(-self.n // self.batch_size)

    def _take(self, index: Tensor, seed: rng.Seed) -> Batch:
        if isinstance(self.source, tuple):
            x, y = self.source
            return rows_of(x, index) if isinstance(x, tuple) else x[index], y[index]
        assert isinstance(seed, int)
        with rng.isolated(
            seed, CPU
        ):  # a Dataset may augment at random: each batch has its own random stream
            return pair(default_collate([self.source[int(i)] for i in index]))

    def epoch(self, seed: int, skip: int = 0) -> Iterator[Batch]:
        order = self.index[rng.permutation(self.n, seed)]
        if self.batch_size == self.n:
            order = (
                self.index
            )  # a full batch is not shuffled, so that its rounding errors do not vary
        if isinstance(self.source, tuple):
            order = order.to(
                self.source[1].device
            )  # once, so that no batch waits for a copy of its index
        for number, part in enumerate(order.split(self.batch_size)):
            if number >= skip:
                yield self._take(part, rng.fold(seed, "batch", number))

    def ordered(self) -> Iterator[Batch]:
        for number, part in enumerate(self.index.split(self.batch_size)):
            yield self._take(part, rng.fold(0, "batch", number))

    def split(self, fraction: float, seed: int) -> tuple[Rows, Rows]:
        """A training and a validation part."""
        count = round(self.n * fraction)
        if not 0 < count < self.n:
            raise ValueError(
                f"a validation fraction of {fraction} of {self.n} samples leaves one part empty; give more samples, "
                "or another fraction"
            )
        order = self.index[rng.permutation(self.n, seed)]
        held, rest = order[:count].sort().values, order[count:].sort().values
        return Rows(self.source, rest, self.batch_size), Rows(self.source, held, self.batch_size)

    def cut(self, batch_size: int) -> Rows:
        """The same rows in batches of another size."""
        return Rows(self.source, self.index, batch_size)

    def fingerprint(self) -> list[Any]:
        if isinstance(self.source, tuple):
            return ["tensors", self.n, digest(self.source)]
        return [type(self.source).__name__, self.n, digest(next(self.ordered()))]

    def targets(self) -> Tensor | None:
        return self.source[1][self.index] if isinstance(self.source, tuple) else None


class Batches(Data):
    """Batches ``first`` .. ``stop`` − 1 of data that cannot be indexed by rows, in their fixed
    order.
    """

    def __init__(self, data: Data, first: int, stop: int) -> None:
        self.data, self.first, self.stop = data, first, stop
        self.n = max(1, round(data.n * (stop - first) / data.batches))

    @property
    def batches(self) -> int:
        return self.stop - self.first

    def epoch(self, seed: int, skip: int = 0) -> Iterator[Batch]:
        return islice(self.data.ordered(), self.first + skip, self.stop)

    def ordered(self) -> Iterator[Batch]:
        return self.epoch(0)

    def fingerprint(self) -> list[Any]:
        return [*self.data.fingerprint(), self.first, self.stop]


def last_batches(data: Data, fraction: float) -> tuple[Data, Data | None]:
    """The data without a fraction of the last batches, and these batches; None if there is only
    one.
    """
    if data.batches < 2:
        return data, None
    cut = data.batches - max(1, round(fraction * data.batches))
    return Batches(data, 0, cut), Batches(data, cut, data.batches)


def batches_from(
    step: int,
    data: Sequence[Data],
    seeds: Callable[[int], Sequence[int]],
    check: Callable[[Batch], None] | None,
) -> Iterator[tuple[Batch, ...]]:
    """The batches of parallel runs from a step on, without an end; ``seeds``: epoch → the seed of
    each run.

    ``check`` is applied to the batches of the first epoch.
    """
    while True:
        epoch, done = divmod(step, data[0].batches)
        before = step
        for several in zip(
            *(part.epoch(s, done) for part, s in zip(data, seeds(epoch), strict=True)), strict=True
        ):
            if check is not None and epoch == 0:
                for batch in several:
                    check(batch)
            yield several
            step += 1
        if step == before:
            raise ValueError(f"the data had {done} batches in an epoch, expected {data[0].batches}")


def stacked(batches: tuple[Batch, ...]) -> Batch:
    """The batches of K runs as one, (K, M, ...); inputs that are no tensors are shared."""
    xs, ys = zip(*batches, strict=True)
    try:
        return combined(torch.stack, xs), torch.stack(ys)
    except RuntimeError as error:
        raise ValueError(
            f"the batches of parallel runs need rows of one shape: {error}; run them in turn"
        ) from error


class Steps(Data):
    """No data, only a number of steps: for a loss that generates its own samples."""

    rows_first = False

    def __init__(self, steps: int) -> None:
        self.n = self.steps = steps

    @property
    def batches(self) -> int:
        return self.steps

    def epoch(self, seed: int, skip: int = 0) -> Iterator[Batch]:
        empty = torch.empty(0)
        return (((), empty) for _ in range(skip, self.steps))

    def ordered(self) -> Iterator[Batch]:
        return self.epoch(0)

    def fingerprint(self) -> list[Any]:
        return ["steps", self.steps]


class Loader(Data):
    """The user's DataLoader, or another iterable of batches, as it is, with the streams it draws
    from seeded.

    These are torch's global stream and the generators of the loader and its samplers, all restored
    afterwards. A sampler or a Dataset that draws from ``random`` or numpy in this process is not
    seeded. Without a length (a stream) its rows and batches are counted in one pass.
    """

    def __init__(self, loader: Any) -> None:
        try:
            self.n, self.count = len(loader.dataset), len(loader)
        except (TypeError, AttributeError):
            sizes = [len(pair(batch)[1]) for batch in loader]
            self.n, self.count = sum(sizes), len(sizes)
        if self.n == 0:
            raise ValueError("the DataLoader is empty")
        if self.count == 0:
            raise ValueError(
                f"the DataLoader gives no batch: drop_last with a batch_size of {loader.batch_size} for {self.n} rows"
            )
        self.loader = loader
        self._samplers = [
            s
            for name in ("sampler", "batch_sampler")
            if (s := getattr(loader, name, None)) is not None
        ]
        self._samplers += [
            inner
            for s in list(self._samplers)
            if (inner := getattr(s, "sampler", None)) is not None
        ]
        subset = next((s for s in self._samplers if isinstance(s, SubsetRandomSampler)), None)
        if subset is not None:
            self.n = len(subset)  # the data of this run are the subset

    @property
    def batches(self) -> int:
        return self.count

    def epoch(self, seed: int, skip: int = 0) -> Iterator[Batch]:
        owners = [self.loader, *self._samplers]
        generators = {
            id(g): g
            for o in owners
            if isinstance(g := getattr(o, "generator", None), torch.Generator)
        }
        with ExitStack() as stack:
            for number, generator in enumerate(generators.values()):
                stack.enter_context(_seeded(generator, rng.fold(seed, "generator", number)))
            with rng.isolated(seed, CPU):
                iterator = iter(self.loader)
            for number in range(self.batches):
                part = rng.fold(seed, "batch", number)
                assert isinstance(part, int)
                with rng.isolated(part, CPU):
                    batch = next(iterator, None)
                if batch is None:
                    return
                if number >= skip:
                    yield pair(batch)

    def ordered(self) -> Iterator[Batch]:
        return self.epoch(0)

    def fingerprint(self) -> list[Any]:
        source = getattr(self.loader, "dataset", self.loader)
        return [type(source).__name__, self.n, self.batches, digest(next(self.ordered()))]


@contextmanager
def _seeded(generator: torch.Generator, seed: rng.Seed) -> Iterator[None]:
    """Seed a generator of the user, and restore its state afterwards."""
    assert isinstance(seed, int)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def pair(batch: Any) -> Batch:
    """A batch as (x, y), or an error with what was got instead; of a mapping, y are its labels."""
    if isinstance(batch, Mapping):
        label = next((name for name in LABELS if name in batch), None)
        if label is None:
            raise ValueError(
                f"a batch with the keys {', '.join(map(str, batch))} has no labels; give them the key 'labels', or "
                "give pairs (x, y)"
            )
        batch = batch, batch[label]
    if not isinstance(batch, tuple | list) or len(batch) != 2 or not isinstance(batch[1], Tensor):
        what = (
            f"{type(batch).__name__} of {len(batch)}"
            if hasattr(batch, "__len__")
            else type(batch).__name__
        )
        raise ValueError(
            f"a Dataset or DataLoader must give pairs (x, y) with y a tensor or a number, got a {what}; several "
            "inputs go into a tuple: ((x1, x2), y), or a dict with 'labels'"
        )
    x, y = batch
    inputs = forward_inputs(x)
    for item, name in (*((item, "x") for item in inputs), (y, "y")):
        if isinstance(item, Tensor):
            check_values(name, item)
    return inputs if isinstance(x, Mapping) else x, y


def whole(value: Tensor) -> Tensor:
    """The tensor of which each process has a part, a DTensor, from all of them; any other as it
    is.
    """
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def digest(tree: Any) -> str:
    """SHA-256 of all tensors in nested tuples, with their shapes and dtypes."""
    found = hashlib.sha256()

    def walk(item: Any) -> None:
        if isinstance(item, Tensor) and item.is_quantized:
            walk(item.dequantize())
        elif isinstance(item, Tensor):
            found.update(f"{tuple(item.shape)}{item.dtype}".encode())
            found.update(
                whole(item).detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            )
        elif isinstance(item, tuple | list):
            for part in item:
                walk(part)
        else:
            found.update(repr(type(item)).encode())

    walk(tree)
    return found.hexdigest()[:16]


def check_finite(batch: Any) -> None:
    """A ValueError where x or y has NaN or infinite values."""
    x, y = batch
    parts = x if isinstance(x, tuple | list) else (x,)
    for part, name in (*((part, "x") for part in parts), (y, "y")):
        if isinstance(part, Tensor):
            check_values(name, part)
        if (
            isinstance(part, Tensor)
            and part.is_floating_point()
            and not bool(part.isfinite().all())
        ):
            bad = int((~part.isfinite()).sum())
            raise ValueError(
                f"{name} has {bad} NaN or infinite values; remove or impute them first"
            )


def check_values(name: str, value: Tensor) -> None:
    """Raise a ValueError for a tensor on the meta device, which has a shape and no values."""
    if value.is_meta:
        raise ValueError(
            f"{name} {tuple(value.shape)} is on the meta device and has no values; build it on a device: device='cpu'"
        )


def inputs_of_batches(loader: DataLoader[Any]) -> tuple[Any, ...]:
    """Return the inputs of all batches of a DataLoader as one; labels are left out.

    Args:
        loader: gives pairs (x, y), x alone, or mappings, in a fixed order.

    Raises:
        ValueError: for a DataLoader that shuffles, whose rows could not be told apart afterwards,
            for an empty one and for batches whose rows have different shapes.
    """
    if isinstance(loader.sampler, RandomSampler | SubsetRandomSampler):
        raise ValueError(
            "the DataLoader shuffles, so that it is not known which row a prediction belongs to; use shuffle=False"
        )
    batches = [_inputs_of(batch) for batch in loader]
    if not batches:
        raise ValueError("the DataLoader gives no batch")
    try:
        return combined(torch.cat, batches)
    except RuntimeError as error:
        raise ValueError(
            f"the batches of the DataLoader have rows of different shapes ({error}); predict one batch at a time"
        ) from error


def _inputs_of(batch: Any) -> tuple[Any, ...]:
    """Return the inputs of a batch with or without labels."""
    if isinstance(batch, Tensor | Mapping):
        return forward_inputs(batch)
    if isinstance(batch, tuple | list) and len(batch) == 1:
        return forward_inputs(batch[0])
    return forward_inputs(pair(batch)[0])


def as_data(data: Any, batch_size: int | None = None) -> Data:
    """A pair of tensors (or a mapping with labels), a Dataset, a DataLoader or a list of batches as
    batches.

    ``Rows`` get a new batch size. A list of batches is all their rows or, where their shapes
    differ, these batches in this order. Anything else with ``__getitem__`` and ``__len__`` whose
    items are pairs or mappings is a Dataset (also a list of examples), and what can only be
    iterated, repeatedly, is a DataLoader.
    """
    if isinstance(data, Data):
        return data.cut(batch_size) if isinstance(data, Rows) and batch_size is not None else data
    batch_size = 128 if batch_size is None else batch_size
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    if isinstance(data, DataLoader):
        return Loader(data)
    if isinstance(data, Mapping):
        data = pair(data)
    if type(data) is TensorDataset and len(data.tensors) == 2:
        data = data.tensors
    if _is_list_of_pairs(data):
        return _from_list(data, batch_size)
    if isinstance(data, tuple | list) and len(data) == 2:
        return _tensors(data[0], data[1], batch_size)
    if isinstance(data, Dataset) or _map_style(data):
        if isinstance(data, IterableDataset) or not hasattr(data, "__getitem__"):
            raise ValueError("the Dataset cannot be indexed; wrap it in a DataLoader")
        if not hasattr(data, "__len__"):
            raise ValueError(
                "the Dataset has no length, so the KL cannot be scaled; give it __len__"
            )
        if len(data) == 0:
            raise ValueError("the Dataset is empty")
        return Rows(data, torch.arange(len(data)), batch_size)
    if (
        isinstance(data, Iterable)
        and not hasattr(data, "__getitem__")
        and not isinstance(data, Iterator)
    ):
        return Loader(data)
    what = f"a {type(data).__name__}" + (
        f" of {len(data)}" if isinstance(data, tuple | list) else ""
    )
    raise ValueError(
        f"data must be a pair of tensors (x, y), a Dataset, a DataLoader or a list of batches (x, y), got {what}"
    )


def _is_list_of_pairs(data: Any) -> bool:
    """Return whether this is a list of pairs or mappings, and not a pair (x, y) whose x is a
    tuple.
    """
    if not isinstance(data, tuple | list) or not data or isinstance(data[-1], Tensor):
        return False
    return all(
        isinstance(item, Mapping) or (isinstance(item, tuple | list) and len(item) == 2)
        for item in data
    )


def _is_batch(item: Any) -> bool:
    """Return whether a pair or mapping is a batch, x (B, ...) and y (B, ...), rather than one
    example.
    """
    if isinstance(item, Mapping):
        item = pair(item)
    x, y = item
    first = next(iter(forward_inputs(x)), None)
    if not isinstance(first, Tensor) or not isinstance(y, Tensor):
        return False
    return first.ndim > 1 and y.ndim > 0 and len(first) == len(y)


def _from_list(items: Sequence[Any], batch_size: int) -> Data:
    """Return the rows of a list of batches or of examples; batches of different shapes remain as
    they are.
    """
    if not all(_is_batch(item) for item in items):
        return Rows(items, torch.arange(len(items)), batch_size)
    batches = [pair(item) for item in items]
    tensors = [
        [part for part in (*forward_inputs(x), y) if isinstance(part, Tensor)] for x, y in batches
    ]
    if len({tuple(part.shape[1:] for part in parts) for parts in tensors}) > 1:
        return Loader(_Repeated(batches))
    inputs = combined(torch.cat, [x for x, _ in batches])
    y = torch.cat([y for _, y in batches])
    return _tensors(inputs if len(inputs) > 1 else inputs[0], y, batch_size)


class _Repeated:
    """Batches in a fixed order, as a DataLoader without a Dataset gives them."""

    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def _map_style(data: Any) -> bool:
    """Whether this has rows that are pairs or mappings, as a data set of another library does."""
    if isinstance(data, tuple | list | Tensor | str):
        return False
    try:
        return len(data) > 0 and isinstance(data[0], tuple | list | Mapping)
    except Exception:  # a table, say, whose columns are indexed
        return False


def _tensors(x: Any, y: Any, batch_size: int) -> Rows:
    inputs = forward_inputs(x)
    named = inputs and isinstance(inputs[-1], Keywords)
    parts = tuple(part for part in inputs if isinstance(part, Tensor)) if named else inputs
    for part, name in (*((part, "x") for part in parts), (y, "y")):
        if not isinstance(part, Tensor):
            raise ValueError(
                f"data must be a pair of tensors (x, y), got {name} of type {type(part).__name__}; use torch.as_tensor"
            )
        if part.layout != torch.strided:
            raise ValueError(
                f"{name} is a sparse tensor ({part.layout}), whose rows cannot be indexed; use to_dense()"
            )
        if part.ndim == 0:
            raise ValueError(f"{name} is a single number; its first axis must be the examples")
    if not parts:
        raise ValueError(
            f"x is an empty {type(x).__name__}; it must hold the inputs of the network"
        )
    for part in parts:
        if len(part) != len(y):
            raise ValueError(
                f"x has {len(part)} rows but y has {len(y)}; they must be the same examples"
            )
    if len(y) == 0:
        raise ValueError("data has no rows")
    rows = (inputs if isinstance(x, tuple | list | Mapping) else x, y)
    check_finite(rows)
    if y.requires_grad or any(part.requires_grad for part in parts):
        raise ValueError("x or y requires a gradient; use detach()")
    return Rows(rows, torch.arange(len(y), device=CPU), batch_size)

"""Data as batches that are a function of (seed, step), so that a killed run can be resumed."""

from __future__ import annotations

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
    SubsetRandomSampler,
    TensorDataset,
    default_collate,
)

from bayou.core import rng
from bayou.training.blocks import Blocks
from bayou.training.inputs import (
    Batch,
    Keywords,
    check_finite,
    combine_inputs,
    digest,
    forward_inputs,
    pair,
    rows_of,
    tensors_of,
)
from bayou.training.seeds import part_seed

CPU = torch.device("cpu")
DEFAULT_BATCH_SIZE = 128


class Data(ABC):
    """N examples; ``epoch(seed)`` gives its batches in an order determined by the seed."""

    n: int
    # Whether the first axis of a batch is its rows, which several processes can share.
    rows_first: bool = True

    @abstractmethod
    def epoch(self, seed: int | None = None, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches (x, y) of one pass.

        Args:
            seed: the seed of the order, and of what a Dataset draws. Default: None, the order of
                the data.
            skip: the number of batches to leave out at the start. Default: 0.
        """

    @property
    @abstractmethod
    def batches(self) -> int:
        """The number of batches in an epoch."""

    @abstractmethod
    def fingerprint(self) -> list[Any]:
        """Return the identity of these data, as plain JSON values."""

    def targets(self) -> Tensor | None:
        """Return all y as one tensor, if available."""
        return None


class Rows(Data):
    """Tensors or a map-style Dataset, in batches by index.

    Args:
        source: the pair (x, y) of tensors, or a Dataset.
        index: the numbers of the rows, (N,).
        batch_size: rows in a batch; at most N are taken.
        blocks: rows of the source that are held out together; None (the default) for none.
    """

    def __init__(
        self, source: Any, index: Tensor, batch_size: int, blocks: Blocks | None = None
    ) -> None:
        self.source = source
        self.index = index
        self.n: int = len(index)
        self.batch_size: int = min(batch_size, self.n)
        self.blocks = blocks

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return -(-self.n // self.batch_size)

    def take(self, index: Tensor, seed: int = 0) -> Batch:
        """Return some of the rows of the source as one batch.

        Args:
            index: the numbers of these rows.
            seed: the seed of what a Dataset draws. Default: 0.
        """
        if isinstance(self.source, tuple):
            x, y = self.source
            return rows_of(x, index), y[index]
        with rng.isolated(seed, CPU):
            return pair(default_collate([self.source[int(i)] for i in index]))

    def epoch(self, seed: int | None = None, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of one pass, shuffled by the seed.

        A full batch is not shuffled, so that its rounding errors do not vary.
        """
        order = self.index
        if seed is not None and self.batch_size < self.n:
            order = self.index[rng.permutation(self.n, seed)]
        if isinstance(self.source, tuple):
            # Moved once, so that no batch waits for a copy of its index.
            order = order.to(self.source[1].device)
        for number, rows in enumerate(order.split(self.batch_size)):
            if number >= skip:
                yield self.take(rows, part_seed(seed or 0, "batch", number))

    def split(self, fraction: float, seed: int) -> tuple[Rows, Rows]:
        """Split the rows into training and validation data: at random, or by their blocks.

        Args:
            fraction: the fraction of the validation data.
            seed: the seed of the choice.

        Raises:
            ValueError: if one of the two would be empty.
        """
        count = round(self.n * fraction)
        if not 0 < count < self.n:
            raise ValueError(
                f"a validation fraction of {fraction} of {self.n} samples leaves one part empty; "
                "give more samples, or another fraction"
            )
        if self.blocks is not None:
            is_held_out = self.blocks.hold_out(self.index, fraction, seed)
            return self.at(self.index[~is_held_out]), self.at(self.index[is_held_out])
        order = self.index[rng.permutation(self.n, seed)]
        return self.at(order[count:].sort().values), self.at(order[:count].sort().values)

    def at(self, index: Tensor) -> Rows:
        """Return other rows of the same source.

        Args:
            index: their numbers.
        """
        return Rows(self.source, index, self.batch_size, self.blocks)

    def without(self, index: Tensor) -> Rows:
        """Return these rows without some of them.

        Args:
            index: the numbers of the rows to leave out.
        """
        return self.at(self.index[torch.isin(self.index, index, invert=True)])

    def with_source(self, source: Any) -> Rows:
        """Return the rows of another source, such as the same rows in other units.

        Args:
            source: has as many rows as that of these.
        """
        return Rows(source, self.index, self.batch_size, self.blocks)

    def with_batch_size(self, batch_size: int) -> Rows:
        """Return the same rows in batches of another size."""
        return Rows(self.source, self.index, batch_size, self.blocks)

    def with_blocks(self, blocks: Blocks | None) -> Rows:
        """Return the same rows, of which those of a block are held out together.

        Args:
            blocks: of the rows of the source; None for rows that are held out at random.
        """
        return Rows(self.source, self.index, self.batch_size, blocks)

    def fingerprint(self) -> list[Any]:
        """Return the identity of these data: of a Dataset, by its first batch."""
        if isinstance(self.source, tuple):
            values = ["tensors", self.n, digest(self.source)]
        else:
            values = [type(self.source).__name__, self.n, digest(next(self.epoch()))]
        if self.blocks is not None:
            values += [digest(self.blocks.number), self.blocks.are_ordered]
        return values

    def targets(self) -> Tensor | None:
        """Return all y as one tensor; None for a Dataset."""
        if isinstance(self.source, tuple):
            y: Tensor = self.source[1][self.index]
            return y
        return None


class BatchRange(Data):
    """Consecutive batches, in their fixed order, of data that cannot be indexed by rows.

    Args:
        data: the data.
        first: the first batch.
        stop: the batch after the last.
    """

    def __init__(self, data: Data, first: int, stop: int) -> None:
        self.data = data
        self.first = first
        self.stop = stop
        self.n: int = max(1, round(data.n * (stop - first) / data.batches))

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return self.stop - self.first

    def epoch(self, seed: int | None = None, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of one pass, in their fixed order."""
        return islice(self.data.epoch(), self.first + skip, self.stop)

    def fingerprint(self) -> list[Any]:
        """Return the identity of these data, as plain JSON values."""
        return [*self.data.fingerprint(), self.first, self.stop]


def last_batches(data: Data, fraction: float) -> tuple[Data, Data | None]:
    """Split off the last batches of data.

    Args:
        data: the data.
        fraction: the fraction of the batches to split off, at least one.

    Returns:
        The data without these batches, and these batches; None if there is only one in all.
    """
    if data.batches < 2:
        return data, None
    first = data.batches - max(1, round(fraction * data.batches))
    return BatchRange(data, 0, first), BatchRange(data, first, data.batches)


def batches_from(
    step: int,
    data: Sequence[Data],
    seeds: Callable[[int], Sequence[int]],
    check: Callable[[Batch], None] | None,
) -> Iterator[tuple[Batch, ...]]:
    """Yield the batches of parallel runs from a step on, without an end.

    Args:
        step: the number of steps that are done.
        data: the data of each run.
        seeds: gives the seed of each run in an epoch.
        check: is applied to the batches of the first epoch; None: no check.

    Raises:
        ValueError: if an epoch has fewer batches than the data said.
    """
    while True:
        epoch, batches_done = divmod(step, data[0].batches)
        first_step = step
        epoch_seeds = seeds(epoch)
        passes = [
            run_data.epoch(seed, batches_done)
            for run_data, seed in zip(data, epoch_seeds, strict=True)
        ]
        for batches in zip(*passes, strict=True):
            if check is not None and epoch == 0:
                for batch in batches:
                    check(batch)
            yield batches
            step += 1
        if step == first_step:
            raise ValueError(
                f"the data had {batches_done} batches in an epoch, expected {data[0].batches}"
            )


def stack_batches(batches: tuple[Batch, ...]) -> Batch:
    """Stack the batches of K runs, (K, M, ...); inputs that are no tensors are shared.

    Raises:
        ValueError: for rows of different shapes.
    """
    xs, ys = zip(*batches, strict=True)
    try:
        return combine_inputs(torch.stack, xs), torch.stack(ys)
    except RuntimeError as error:
        raise ValueError(
            f"the batches of parallel runs need rows of one shape: {error}; run them in turn"
        ) from error


def join_batches(batches: Iterable[Batch]) -> tuple[Any, Tensor]:
    """Join the rows of several batches.

    Args:
        batches: pairs (x, y).

    Returns:
        x and y of all rows.

    Raises:
        ValueError: for rows of different shapes.
    """
    xs, ys = zip(*batches, strict=True)
    try:
        inputs = combine_inputs(torch.cat, xs)
        return inputs if len(inputs) > 1 else inputs[0], torch.cat(ys)
    except RuntimeError as error:
        raise ValueError(
            f"the batches cannot be joined: {error}; pad all rows to one length"
        ) from error


def row_shapes(batch: Batch) -> list[torch.Size]:
    """Return the shapes of one row of all tensors of a batch."""
    x, y = batch
    return [item.shape[1:] for item in (*tensors_of(x), y)]


class StepCount(Data):
    """No data, only a number of steps: for a loss that generates its own samples.

    Args:
        steps: the number of steps in an epoch.
    """

    rows_first = False

    def __init__(self, steps: int) -> None:
        self.n = steps
        self.steps = steps

    @property
    def batches(self) -> int:
        """The number of steps in an epoch."""
        return self.steps

    def epoch(self, seed: int | None = None, skip: int = 0) -> Iterator[Batch]:
        """Yield empty batches."""
        empty = torch.empty(0)
        return (((), empty) for _ in range(skip, self.steps))

    def fingerprint(self) -> list[Any]:
        """Return the identity of these data, as plain JSON values."""
        return ["steps", self.steps]


class Loader(Data):
    """The user's DataLoader, or another iterable of batches, with the streams it draws from seeded.

    These are torch's global stream and the generators of the loader and its samplers, all restored
    afterwards. A sampler or a Dataset that draws from ``random`` or numpy in this process is not
    seeded. Without a length (a stream) its rows and batches are counted in one pass.

    Args:
        loader: gives batches each time it is iterated.
    """

    def __init__(self, loader: Any) -> None:
        try:
            self.n: int = len(loader.dataset)
            self.count: int = len(loader)
        except (TypeError, AttributeError):
            sizes = [len(pair(batch)[1]) for batch in loader]
            self.n = sum(sizes)
            self.count = len(sizes)
        if self.n == 0:
            raise ValueError("the DataLoader is empty")
        if self.count == 0:
            raise ValueError(
                "the DataLoader gives no batch: drop_last with a batch_size of "
                f"{loader.batch_size} for {self.n} rows"
            )
        self.loader = loader
        self._samplers = _samplers(loader)
        subset = next((s for s in self._samplers if isinstance(s, SubsetRandomSampler)), None)
        if subset is not None:
            self.n = len(subset)  # the data of this run are the subset

    @property
    def batches(self) -> int:
        """The number of batches in an epoch."""
        return self.count

    def epoch(self, seed: int | None = None, skip: int = 0) -> Iterator[Batch]:
        """Yield the batches of one pass of the loader, with its streams seeded."""
        seed = seed or 0
        with ExitStack() as stack:
            for number, generator in enumerate(self._generators()):
                generator_seed = part_seed(seed, "generator", number)
                stack.enter_context(_seed_generator(generator, generator_seed))
            with rng.isolated(seed, CPU):
                iterator = iter(self.loader)
            for number in range(self.batches):
                with rng.isolated(part_seed(seed, "batch", number), CPU):
                    batch = next(iterator, None)
                if batch is None:
                    return
                if number >= skip:
                    yield pair(batch)

    def _generators(self) -> list[torch.Generator]:
        """Return the different generators of the loader and its samplers."""
        owners = (self.loader, *self._samplers)
        generators = [getattr(owner, "generator", None) for owner in owners]
        by_id = {id(item): item for item in generators if isinstance(item, torch.Generator)}
        return list(by_id.values())

    def fingerprint(self) -> list[Any]:
        """Return the identity of these data, by their first batch."""
        source = getattr(self.loader, "dataset", self.loader)
        return [type(source).__name__, self.n, self.batches, digest(next(self.epoch()))]


def _samplers(loader: Any) -> list[Any]:
    """Return the samplers of a DataLoader, and those inside them."""
    outer = [getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)]
    inner = [getattr(sampler, "sampler", None) for sampler in outer]
    return [sampler for sampler in (*outer, *inner) if sampler is not None]


@contextmanager
def _seed_generator(generator: torch.Generator, seed: int) -> Iterator[None]:
    """Seed a generator of the user, and restore its state afterwards."""
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


def as_data(data: Any, batch_size: int | None = None) -> Data:
    """Return anything that ``fit`` takes as batches.

    Args:
        data: a pair of tensors (or a mapping with labels), a Dataset, a DataLoader or a list of
            batches. A list of batches is all their rows or, where their shapes differ, these
            batches in this order. Anything else with ``__getitem__`` and ``__len__`` whose items
            are pairs or mappings is a Dataset (also a list of examples), and what can only be
            iterated, repeatedly, is a DataLoader.
        batch_size: rows in a batch; ``Rows`` get a new one. Default: 128, or that of the data.

    Raises:
        ValueError: for anything else, with what it is.
    """
    if isinstance(data, Data):
        if isinstance(data, Rows) and batch_size is not None:
            return data.with_batch_size(batch_size)
        return data
    if batch_size is None:
        batch_size = DEFAULT_BATCH_SIZE
    if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
        raise ValueError(f"batch_size must be a whole number of at least 1, got {batch_size!r}")
    if isinstance(data, DataLoader):
        return Loader(data)
    if isinstance(data, Mapping):
        data = pair(data)
    if type(data) is TensorDataset and len(data.tensors) == 2:
        data = data.tensors
    if _is_list_of_pairs(data):
        return _data_from_list(data, batch_size)
    if isinstance(data, tuple | list) and len(data) == 2:
        return _rows_of_tensors(data[0], data[1], batch_size)
    if isinstance(data, Dataset) or _is_map_style(data):
        return _rows_of_dataset(data, batch_size)
    is_repeatable = isinstance(data, Iterable) and not isinstance(data, Iterator)
    if is_repeatable and not hasattr(data, "__getitem__"):
        return Loader(data)
    description = f"a {type(data).__name__}"
    if isinstance(data, tuple | list):
        description = f"{description} of {len(data)}"
    raise ValueError(
        "data must be a pair of tensors (x, y), a Dataset, a DataLoader or a list of batches "
        f"(x, y), got {description}"
    )


def _rows_of_dataset(dataset: Any, batch_size: int) -> Rows:
    """Return the rows of a Dataset that can be indexed and has a length."""
    if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
        raise ValueError("the Dataset cannot be indexed; wrap it in a DataLoader")
    if not hasattr(dataset, "__len__"):
        raise ValueError("the Dataset has no length, so the KL cannot be scaled; give it __len__")
    if len(dataset) == 0:
        raise ValueError("the Dataset is empty")
    return Rows(dataset, torch.arange(len(dataset)), batch_size)


def _is_list_of_pairs(data: object) -> bool:
    """Return whether this is a list of pairs or mappings, not a pair (x, y) whose x is a tuple."""
    if not isinstance(data, tuple | list) or not data or isinstance(data[-1], Tensor):
        return False
    return all(
        isinstance(item, Mapping) or (isinstance(item, tuple | list) and len(item) == 2)
        for item in data
    )


def _is_batch(item: Any) -> bool:
    """Return whether a pair or mapping is a batch, with rows in x and y, and not one example."""
    if isinstance(item, Mapping):
        item = pair(item)
    x, y = item
    first = next(iter(forward_inputs(x)), None)
    if not isinstance(first, Tensor) or not isinstance(y, Tensor):
        return False
    return first.ndim > 1 and y.ndim > 0 and len(first) == len(y)


def _data_from_list(items: Sequence[Any], batch_size: int) -> Data:
    """Return the rows of a list of batches or of examples.

    Batches whose rows have different shapes remain as they are.
    """
    if not all(_is_batch(item) for item in items):
        return Rows(items, torch.arange(len(items)), batch_size)
    batches = [pair(item) for item in items]
    if any(row_shapes(batch) != row_shapes(batches[0]) for batch in batches):
        return Loader(batches)
    x, y = join_batches(batches)
    return _rows_of_tensors(x, y, batch_size)


def _is_map_style(data: Any) -> bool:
    """Return whether this has rows that are pairs or mappings, as data sets of libraries do."""
    if isinstance(data, tuple | list | Tensor | str):
        return False
    try:
        return len(data) > 0 and isinstance(data[0], tuple | list | Mapping)
    except Exception:  # a table, say, whose columns are indexed
        return False


def _rows_of_tensors(x: Any, y: Any, batch_size: int) -> Rows:
    """Return the rows of tensors, after checks of their values."""
    inputs = forward_inputs(x)
    tensors = inputs
    if inputs and isinstance(inputs[-1], Keywords):
        tensors = tuple(tensors_of(inputs))
    for item, name in (*((item, "x") for item in tensors), (y, "y")):
        _check_tensor(name, item)
    if not tensors:
        raise ValueError(
            f"x is an empty {type(x).__name__}; it must hold the inputs of the network"
        )
    for item in tensors:
        if len(item) != len(y):
            raise ValueError(
                f"x has {len(item)} rows but y has {len(y)}; they must be the same examples"
            )
    if len(y) == 0:
        raise ValueError("data has no rows")
    source = (inputs if isinstance(x, tuple | list | Mapping) else x, y)
    check_finite(source)
    if y.requires_grad or any(item.requires_grad for item in tensors):
        raise ValueError("x or y requires a gradient; use detach()")
    return Rows(source, torch.arange(len(y), device=CPU), batch_size)


def _check_tensor(name: str, value: object) -> None:
    """Raise a ValueError unless this is a dense tensor whose first axis can be the rows."""
    if not isinstance(value, Tensor):
        raise ValueError(
            f"data must be a pair of tensors (x, y), got {name} of type {type(value).__name__}; "
            "use torch.as_tensor"
        )
    if value.layout != torch.strided:
        raise ValueError(
            f"{name} is a sparse tensor ({value.layout}), whose rows cannot be indexed; use "
            "to_dense()"
        )
    if value.ndim == 0:
        raise ValueError(f"{name} is a single number; its first axis must be the examples")

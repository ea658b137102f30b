"""Units of x and y for methods by name: which inputs and targets are standardized, and by what."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from bayou.core import rng
from bayou.core.progress import BayouWarning
from bayou.likelihoods import Likelihood
from bayou.network import Keywords, Network, forward_inputs, rows_of
from bayou.network.units import Standardization, Units
from bayou.select.column_scales import column_scales, is_coded, is_standard
from bayou.select.far_values import is_flattened_image, replace_sentinels
from bayou.select.target_units import describe_targets
from bayou.training.data import Data, Rows
from bayou.training.inputs import Batch
from bayou.training.rows import all_rows, some_rows

# Of data that are not tensors, from which means and scales are estimated.
MAX_SAMPLED_ROWS: Final = 5_000
MAX_TRIED_ROWS: Final = 1_000  # on which the network as given is compared with a constant
MIN_EXPLAINED: Final = 0.1  # share of the variance of y that a pretrained network explains
# Of the deviations of predictions, with which those of a random network improve.
STRETCH: Final = 1.5
FAR: Final = 30.0  # a mean or a standard deviation by this factor from 1 is far from unit scale
MAX_PROBED_ROWS: Final = 8  # on which gradients of the outputs in the inputs are computed
# Of whole numbers, of which each is tried as a number where some are indices.
MAX_TRIED_COLUMNS: Final = 64


class UnitsWarning(BayouWarning):
    """x or y is far from unit scale, and the method was asked to fit them as they are."""


def choose_units(
    net: nn.Module,
    rows: Data,
    likelihood: Likelihood | None,
    *,
    shares_scale: bool = True,
) -> Units | None:
    """Choose the standardization of x and y for a method by name.

    Floating-point columns of tables (N, D) and features of sequences (N, T, D) are standardized by
    mean and standard deviation; real-valued y as well. These are left as they are: whole numbers
    (token ids, codes, one-hot columns), columns that the network uses as an index, images, and
    keyword arguments. A constant column is divided by its value. Rows that are standardized already
    stay as they are, to the last bit. A network with frozen parameters, or one that already
    predicts y better than a constant, keeps all of its units. So do the inputs of a network of
    ``bayou.networks`` that knows the quantiles of its columns.

    Args:
        net: the network as given.
        rows: the training data, in the user's units.
        likelihood: the likelihood as given; None for the default one.
        shares_scale: whether all outputs share one scale under a given likelihood, which may have
            one noise for all of them.

    Returns:
        The units, not active yet, or None if nothing is to be standardized.
    """
    if not all(parameter.requires_grad for parameter in net.parameters()):
        return None
    inputs, y = sampled_rows(rows)
    if is_pretrained(net, inputs, y, likelihood):
        return None
    columns: dict[int, Columns] = {}
    if not takes_raw_inputs(net) and not any(isinstance(item, Keywords) for item in inputs):
        for number, item in enumerate(inputs):
            described = describe_columns(net, item)
            if described is not None:
                columns[number] = described
    maps: list[Standardization | None] = [None] * len(inputs)
    for number, described in leave_indices(net, inputs, columns).items():
        maps[number] = described.affine()
    target_units = describe_targets(y, likelihood, shares_scale=shares_scale)
    if target_units is None and all(item is None for item in maps):
        return None
    size = math.prod(y.shape[1:])
    output = None if target_units is None else target_units.values
    target = None if target_units is None else target_units.target_map()
    if likelihood is None or likelihood.scale_axis is None:
        return Units(maps, output, target_size=size, target=target)
    has_log_variances = likelihood.has_log_variances
    return Units(
        maps,
        output,
        log_variances=int(has_log_variances),
        axis=likelihood.scale_axis,
        target_size=size,
        target=target,
        keeps_scales=not has_log_variances,
    )


def takes_raw_inputs(net: nn.Module) -> bool:
    """Return whether a module of a network knows the units of its inputs.

    Args:
        net: the network; modules say so by an attribute ``takes_raw_inputs``. What is no module is
            refused later, by ``Target.build``.
    """
    if not isinstance(net, nn.Module):
        return False
    return any(getattr(module, "takes_raw_inputs", False) for module in net.modules())


def without_sentinels(rows: Data, likelihood: Likelihood | None) -> Data:
    """Replace values that are absurdly far from all others of their column by the median.

    A warning names them. Targets are not replaced: such a target is an error without a likelihood
    of the user, and a warning with one. Data sets and loaders are returned as they are.

    Args:
        rows: the training data, in the user's units.
        likelihood: the likelihood as given; None for the default one.
    """
    if not isinstance(rows, Rows) or not isinstance(rows.source, tuple):
        return rows
    x, y = rows.source
    inputs = forward_inputs(x)
    replaced = replace_sentinels(inputs, y, refuses_targets=likelihood is None)
    if all(new is item for new, item in zip(replaced, inputs, strict=True)):
        return rows
    return rows.with_source((replaced if isinstance(x, tuple) else replaced[0], y))


def apply_units(units: Units, rows: Data) -> Data:
    """Return the data in standard units.

    Args:
        units: the units of x and y.
        rows: data in the user's units.
    """
    if not isinstance(rows, Rows):
        return StandardizedBatches(rows, units)
    if not isinstance(rows.source, tuple):
        return rows.with_source(StandardizedDataset(rows.source, units))
    x, y = rows.source
    inputs = units.standardize_inputs(forward_inputs(x))
    return rows.with_source(
        (inputs if isinstance(x, tuple) else inputs[0], units.standardize_targets(y))
    )


def warn_if_far_from_unit_scale(net: nn.Module, rows: Data) -> None:
    """Warn once if y or a column of x is far from unit scale.

    This is for a method that fits the data as they are.

    Args:
        net: the network, which may know the units of its inputs.
        rows: the training data.
    """
    if isinstance(rows, Rows) and isinstance(rows.source, tuple):
        inputs, y = sampled_rows(rows)
    else:
        x, y = next(rows.epoch())  # to read more of a data set may take long
        inputs = forward_inputs(x)
    scales = {"y": _describe_scale(y)}
    for number, item in enumerate(() if takes_raw_inputs(net) else inputs):
        name = "x" if len(inputs) == 1 else f"input {number} of x"
        scales[name] = _describe_scale(item)
    messages = [f"{name} {text}" for name, text in scales.items() if text]
    if not messages:
        return
    warnings.warn(
        f"{' and '.join(messages)}, far from unit scale, and a method object fits data as they "
        "are: priors, learning rates and the initial noise assume numbers near 1; standardize "
        'them, or give the method by name, such as "laplace", which does this itself and predicts '
        "in your units",
        UnitsWarning,
        stacklevel=3,
    )


def sampled_rows(rows: Data) -> tuple[tuple[Any, ...], Tensor]:
    """Return inputs and targets of all rows of tensors, or of at most 5,000 rows of other data.

    Args:
        rows: the training data.
    """
    if isinstance(rows, Rows) and isinstance(rows.source, tuple):
        x, y = all_rows(rows)
    else:
        x, y = some_rows(rows, MAX_SAMPLED_ROWS)
    return forward_inputs(x), y


@torch.no_grad()
def is_pretrained(
    net: nn.Module,
    inputs: tuple[Any, ...],
    y: Tensor,
    likelihood: Likelihood | None,
) -> bool:
    """Return whether the network as given predicts y, rather than having random weights.

    It does if it explains a tenth of the variance of y (of the class indicators for classes), and
    would not explain more if its predictions deviated more from their mean: those of random weights
    are small, and any correlation with y grows when they are stretched.

    Args:
        net: the network as given.
        inputs: its arguments for the rows.
        y: the targets.
        likelihood: the likelihood as given; None for the default one.
    """
    index = rng.permutation(len(y), 0)[:MAX_TRIED_ROWS].to(y.device)
    sample = rows_of(inputs, index)
    network = Network(net)
    first = next(net.parameters())
    sample = tuple(item.to(first.device) if isinstance(item, Tensor) else item for item in sample)
    try:
        with rng.isolated(0, first.device):
            outputs = network.evaluate(
                {name: value.detach() for name, value in net.named_parameters()}, *sample
            )
    except Exception:  # the fit itself describes what is wrong with the inputs
        return False
    if not isinstance(outputs, Tensor) or not outputs.is_floating_point():
        return False
    predictions, truth = _predictions_and_truth(outputs, y[index].to(outputs.device), likelihood)
    if predictions.shape != truth.shape or len(truth) < 2:
        return False
    total = (truth - truth.mean(0)).square().sum()
    center = predictions.mean(0)

    def explained_variance(stretch: float) -> float:
        """Return the share of the variance of y that stretched predictions explain."""
        residual = truth - center - stretch * (predictions - center)
        return float(1 - residual.square().sum() / total)

    share = explained_variance(1.0)
    return share > MIN_EXPLAINED and share >= explained_variance(STRETCH)


def _predictions_and_truth(
    outputs: Tensor, y: Tensor, likelihood: Likelihood | None
) -> tuple[Tensor, Tensor]:
    """Return means of y under the network and y itself, (N, K) each.

    For classes these are probabilities and indicators.
    """
    outputs = outputs.double()
    has_classes = not y.is_floating_point() and outputs.ndim == y.ndim + 1
    if has_classes and y.ndim == 1:
        known = (y >= 0) & (y < outputs.shape[-1])
        return outputs.softmax(-1)[known], one_hot(y[known], outputs.shape[-1]).double()
    y = y.double()
    if likelihood is not None:
        if likelihood.scale_axis is not None:
            outputs = outputs.chunk(2, likelihood.scale_axis)[0]
        if likelihood.companion != "none":
            y = y.chunk(2, -1)[0]
        if likelihood.of_log() is not None:
            y = y.log().nan_to_num()
    return outputs.reshape(len(outputs), -1), y.reshape(len(y), -1)


@final
@dataclass(frozen=True)
class Columns:
    """The columns of one input of the network, and how they would be standardized.

    Args:
        shift: mean of every column, (D,).
        scale: standard deviation of every column, (D,).
        is_standardized: which columns are to be standardized, (D,).
        is_whole: which columns hold whole numbers only, (D,).
        row_shape: the shape that D numbers need to broadcast to one row of the input.
        axis: the axis of the input that has the D columns.
    """

    shift: Tensor
    scale: Tensor
    is_standardized: Tensor
    is_whole: Tensor
    row_shape: tuple[int, ...]
    axis: int

    def affine(self) -> Standardization | None:
        """Return the standardization of the input; None if no column is standardized."""
        if not bool(self.is_standardized.any()):
            return None
        shift = torch.where(self.is_standardized, self.shift, 0.0)
        scale = torch.where(self.is_standardized, self.scale, 1.0)
        return Standardization(shift.reshape(self.row_shape), scale.reshape(self.row_shape))

    def without(self, is_left: Tensor) -> Columns:
        """Return the same columns with some of them left as they are.

        Args:
            is_left: the columns that are left, (D,).
        """
        return replace(self, is_standardized=self.is_standardized & ~is_left)


def describe_columns(net: nn.Module, x: Any) -> Columns | None:
    """Describe the columns of an input, (N,), (N, D) or (N, T, D).

    None for images, whole numbers and what is not a tensor.

    Args:
        net: the network, which decides on the axis of the features of sequences.
        x: the input.
    """
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.ndim > 3:
        return None
    if is_flattened_image(x):
        return None
    axis = _feature_axis(net) if x.ndim == 3 else -1
    values = _as_table(x.detach().double(), axis)
    shift, scale = column_scales(values)
    is_constant = (values == values[0]).all(0)
    # 2024 in every row becomes 1: another bias, also in a network without one.
    size = values[0].abs()
    has_size = is_constant & (size > 0) & (size != 1)
    shift = torch.where(is_constant, 0.0, shift)
    scale = torch.where(has_size, size, torch.where(is_constant, 1.0, scale))
    is_varied = ~is_constant & ~is_coded(values) & ~is_standard(shift, scale)
    row_shape: tuple[int, ...] = tuple(x.shape[1:])
    if x.ndim == 3:
        row_shape = (values.shape[1], 1) if axis == 1 else (values.shape[1],)
    return Columns(
        shift,
        scale,
        is_standardized=is_varied | has_size,
        is_whole=(values == values.round()).all(0),
        row_shape=row_shape,
        axis=axis,
    )


def _as_table(x: Tensor, axis: int) -> Tensor:
    """Return the numbers of an input with its features on one axis as a table (·, D)."""
    if x.ndim == 1:
        return x.unsqueeze(1)
    return x.movedim(axis, -1).flatten(0, -2)


def leave_indices(
    net: nn.Module, inputs: tuple[Any, ...], columns: Mapping[int, Columns]
) -> dict[int, Columns]:
    """Leave columns of whole numbers as they are that the network uses as an index.

    No gradient of the outputs reaches such a column, or the network raises an error for its
    standardized values. Where the network fails with all columns standardized, those of whole
    numbers are tried one by one.

    Args:
        net: the network as given.
        inputs: its arguments for all rows.
        columns: the columns of inputs, by their number.
    """
    columns = dict(columns)
    if not any(bool((item.is_whole & item.is_standardized).any()) for item in columns.values()):
        return columns
    reached = _reached_columns(net, inputs, columns)
    if reached is not None:
        return {k: item.without(item.is_whole & ~reached[k]) for k, item in columns.items()}
    kept = {k: item.without(item.is_whole) for k, item in columns.items()}
    return {k: _with_numeric_columns(net, inputs, columns[k], kept, k) for k in columns}


def _with_numeric_columns(
    net: nn.Module,
    inputs: tuple[Any, ...],
    columns: Columns,
    kept: dict[int, Columns],
    number: int,
) -> Columns:
    """Standardize columns of whole numbers of one input that the network accepts so."""
    result = kept[number]
    candidates = (columns.is_whole & columns.is_standardized).nonzero().flatten()
    for column in candidates[:MAX_TRIED_COLUMNS].tolist():
        is_standardized = result.is_standardized.clone()
        is_standardized[column] = True
        trial = replace(result, is_standardized=is_standardized)
        reached = _reached_columns(net, inputs, kept | {number: trial})
        if reached is not None and bool(reached[number][column]):
            result = trial
    return result


def _reached_columns(
    net: nn.Module, inputs: tuple[Any, ...], columns: Mapping[int, Columns]
) -> dict[int, Tensor] | None:
    """Return which columns of each input a gradient of the outputs reaches.

    None if the network fails.
    """
    first = next(net.parameters())
    arguments = [
        item[:MAX_PROBED_ROWS].to(first.device) if isinstance(item, Tensor) else item
        for item in inputs
    ]
    for number, item in columns.items():
        affine = item.affine()
        if affine is not None:
            arguments[number] = affine.standardize(arguments[number])
        arguments[number] = arguments[number].detach().clone().requires_grad_()
    parameters = {name: value.detach() for name, value in net.named_parameters()}
    try:
        with torch.enable_grad(), rng.isolated(0, first.device):
            outputs = Network(net).evaluate(parameters, *arguments)
            weights = torch.linspace(
                0.5, 1.5, outputs.numel(), dtype=outputs.dtype, device=outputs.device
            )
            gradients = torch.autograd.grad(
                (outputs.flatten() * weights).sum(),
                [arguments[number] for number in columns],
                materialize_grads=True,
            )
    except Exception:  # the fit itself describes what is wrong with the inputs
        return None
    reached = {}
    for (number, item), gradient in zip(columns.items(), gradients, strict=True):
        is_reached = _as_table(gradient != 0, item.axis).any(0)
        reached[number] = is_reached.to(item.shift.device)
    return reached


def _feature_axis(net: nn.Module) -> int:
    """Return the axis of the features of sequences (N, ·, ·): the second for a convolution, else
    the last.
    """
    for module in net.modules():
        if isinstance(module, nn.Conv1d):
            return 1
        if next(module.parameters(recurse=False), None) is not None:
            return 2
    return 2


def _describe_scale(values: Any) -> str:
    """Return "has a standard deviation of ..." for numbers far from unit scale; an empty string for
    others.
    """
    if not isinstance(values, Tensor) or not values.is_floating_point() or values.numel() < 2:
        return ""
    if is_flattened_image(values):
        return ""
    columns = values.detach().double()
    if columns.ndim != 2:
        columns = columns.reshape(-1, 1)
    std = columns.std(0, correction=0)
    mean = columns.mean(0)
    size = torch.maximum(mean.abs(), std)
    varies = std > 1e-9 * size
    distance = torch.where(varies, torch.maximum(size.log(), -std.log()), 0.0)
    worst = int(distance.argmax())
    if float(distance[worst]) <= math.log(FAR):
        return ""
    position = f" in column {worst}" if columns.shape[1] > 1 else ""
    return (
        f"has a mean of {float(mean[worst]):.3g} and a standard deviation of "
        f"{float(std[worst]):.3g}{position}"
    )


@final
@dataclass(frozen=True)
class StandardizedDataset:
    """A map-style data set in standard units.

    Args:
        source: the data set of the user, whose items are pairs (x, y).
        units: the units of x and y.
    """

    source: Any
    units: Units

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> Any:
        x, y = self.source[index]
        inputs = self.units.standardize_inputs(forward_inputs(x))
        y = self.units.standardize_targets(torch.as_tensor(y))
        return (inputs if isinstance(x, tuple | list) else inputs[0]), y


@final
class StandardizedBatches(Data):
    """Batches of other data in standard units.

    Args:
        data: batches in the user's units.
        units: the units of x and y.
    """

    def __init__(self, data: Data, units: Units) -> None:
        self.data = data
        self.units = units
        self.n: int = data.n
        self.rows_first: bool = data.rows_first

    @property
    def batches(self) -> int:
        return self.data.batches

    def _standardize(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """Yield batches in standard units."""
        for x, y in batches:
            inputs = self.units.standardize_inputs(forward_inputs(x))
            yield inputs, self.units.standardize_targets(y)

    def epoch(self, seed: int | None = None, skip: int = 0) -> Iterator[Batch]:
        return self._standardize(self.data.epoch(seed, skip))

    def fingerprint(self) -> list[Any]:
        return [*self.data.fingerprint(), "standardized"]

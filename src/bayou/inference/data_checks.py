"""Checks before the first step of a fit: the first batch, the network and the likelihood agree."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.progress import BayouWarning
from bayou.curvature.sweep import make_plan
from bayou.network import (
    Keywords,
    Network,
    check_dtype,
    check_tensor,
    clear_errors,
    combine_inputs,
    evaluating,
    forward_inputs,
    rows_of,
)
from bayou.network.target import Target
from bayou.training.data import Data
from bayou.training.inputs import Batch, check_finite
from bayou.training.loop import move

LAST = "last"  # the value of ``where`` for the tensors of the last layer


def first_inputs(target: Target, data: Data) -> tuple[Any, ...]:
    """Return the inputs of the first batch, checked and on the device of the network.

    Args:
        target: has the network.
        data: all batches.
    """
    parameter = next(target.net.parameters())
    batch = next(data.epoch())
    check_finite(batch)
    check_dtype(batch[0], parameter)
    inputs = forward_inputs(move(batch, parameter)[0])
    check_decoder_inputs(target.net, inputs)
    return inputs


def check_decoder_inputs(net: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise a ValueError for an encoder-decoder without inputs of its decoder.

    Labels go to the likelihood and are not passed on to the network.

    Args:
        net: the network of the user.
        inputs: its arguments for one batch.
    """
    names = inputs[-1] if isinstance(inputs[-1], Keywords) else ()
    if not names or not getattr(getattr(net, "config", None), "is_encoder_decoder", False):
        return
    if not {"decoder_input_ids", "decoder_inputs_embeds"} & set(names):
        raise ValueError(
            f"{type(net).__name__} is an encoder with a decoder, and x has {', '.join(names)} "
            "only: labels go to the likelihood, not to the network; give what the decoder reads, "
            "too: decoder_input_ids=net.prepare_decoder_input_ids_from_labels(labels)"
        )


def check_gradients_enabled() -> None:
    """Raise a ValueError inside ``torch.no_grad`` or ``torch.inference_mode``."""
    if not torch.is_grad_enabled():
        block = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ValueError(
            f"a fit needs gradients, which torch.{block}() switches off; "
            "call bayou.fit outside of it"
        )


def check_labels(target: Target, data: Data, first_targets: Tensor) -> None:
    """Raise a ValueError if the likelihood leaves out all labels of all batches.

    Args:
        target: has the likelihood.
        data: all batches.
        first_targets: y of the first batch.
    """
    if _has_labels(target, first_targets):
        return
    if any(_has_labels(target, y) for _, y in data.epoch()):
        return
    raise ValueError(
        f"y has no label to learn from: {target.likelihood_spec!r} leaves all of them out; "
        "check ignore_index"
    )


def _has_labels(target: Target, y: Tensor) -> bool:
    """Return whether the likelihood uses any label of a batch."""
    return bool(target.likelihood.labels(y)[1].any())


def some_inputs(target: Target, data: Data, rows: int, seed: int) -> tuple[Any, ...]:
    """Return the inputs of some examples that are drawn by a seed.

    Args:
        target: has the network, on whose device the inputs are placed.
        data: all batches.
        rows: the number of examples; fewer are returned if there are not as many of one shape.
        seed: of the draw.
    """
    parameter = next(target.net.parameters())
    batches: list[tuple[Any, ...]] = []
    for batch in data.epoch(seed):
        inputs = forward_inputs(move(batch, parameter)[0])
        if batches and _row_shapes(inputs) != _row_shapes(batches[0]):
            break
        batches.append(inputs)
        if sum(len(inputs[0]) for inputs in batches) >= rows:
            break
    inputs = combine_inputs(torch.cat, batches)
    # The rows of a batch of all data are in their own order, so that they are permuted here.
    index = rng.permutation(len(inputs[0]), seed)[:rows].to(parameter.device)
    return rows_of(inputs, index)


def _row_shapes(inputs: tuple[Any, ...]) -> list[torch.Size]:
    """Return the shape of one row of each tensor."""
    return [item.shape[1:] for item in inputs if isinstance(item, Tensor)]


def last_layer(target: Target, data: Data) -> list[str]:
    """Return the names of the tensors of the layer that computes the outputs.

    Args:
        target: has the network.
        data: all batches.

    Raises:
        ValueError: if one of them is frozen.
    """
    network = Network(target.net)
    params = {name: value.detach() for name, value in target.net.named_parameters()}
    with evaluating(network.net):
        names = make_plan(network.call, params, None, first_inputs(target, data)).wanted
    if frozen := [name for name in names if name not in target.free]:
        raise ValueError(
            f"where='last' selects {', '.join(names)}, and {frozen[0]!r} is frozen; unfreeze it"
        )
    return names


@torch.no_grad()
def check_first_batch(
    target: Target, data: Data, call: Callable[..., Tensor]
) -> Callable[[Batch], None] | None:
    """Compute the outputs of the first batch and check network, likelihood and all y with them.

    Args:
        target: network, likelihood and prior.
        data: all batches.
        call: computes the outputs of the network from its inputs.

    Returns:
        A check for every further batch; None if all y are in memory and were checked here.

    Raises:
        ValueError: if they are inconsistent.
    """
    inputs = first_inputs(target, data)
    check_inputs_unchanged(target.network.dry_run(target.start, inputs).writes)
    with clear_errors(inputs):
        outputs = call(*inputs)
    _, first_targets = next(data.epoch())
    check_tensor(outputs)
    if outputs.ndim == 0 or len(outputs) != len(first_targets):
        raise ValueError(
            f"the network gives outputs {tuple(outputs.shape)} for a batch of "
            f"{len(first_targets)} rows; their first axis must be the rows"
        )
    warn_of_dependent_rows(target, inputs)
    check_gradients_reach_parameters(target, inputs)
    y = data.targets()
    if y is not None:
        target.likelihood.validate((len(y), *outputs.shape[1:]), y)
    else:
        target.likelihood.validate(outputs.shape, first_targets)
    check_labels(target, data, first_targets)
    if y is not None:
        return None
    return _batch_check(target, outputs.shape, first_targets.shape[1:])


def _batch_check(
    target: Target, output_shape: torch.Size, target_shape: torch.Size
) -> Callable[[Batch], None]:
    """Return the check of further batches of a DataLoader.

    Args:
        target: network and likelihood.
        output_shape: of the outputs of the first batch, (B, *out).
        target_shape: of y of one row of the first batch.
    """
    parameter = next(target.net.parameters())

    def check(batch: Batch) -> None:
        x, y = batch
        check_dtype(x, parameter)
        check_finite(batch)
        if y.shape[1:] == target_shape:
            target.likelihood.validate((len(y), *output_shape[1:]), y)
        else:  # sequences of another length have outputs of another shape
            target.likelihood._validate_values(output_shape, y)

    return check


def check_inputs_unchanged(writes: bool) -> None:
    """Raise a ValueError if a network modifies its input.

    Args:
        writes: whether it does.
    """
    if writes:
        raise ValueError(
            "the network modifies its input x by an in-place operation (x.mul_(2), F.relu_(x), "
            "inplace=True of its first layer), which would change your data; use an operation "
            "that returns a new tensor"
        )


def warn_of_dependent_rows(target: Target, inputs: tuple[Any, ...]) -> None:
    """Warn if the output of the network for a row depends on the other rows of its batch.

    Args:
        target: has the network.
        inputs: its arguments for one batch.
    """
    if not target.network.dry_run(target.start, inputs).rows_apart:
        warnings.warn(
            f"{type(target.net).__name__} mixes the rows of a batch: its output for a row depends "
            "on the other rows (x - x.mean(0), a batch norm without running statistics), but the "
            "likelihood is a product over rows, and what is predicted depends on the batch; take "
            "such statistics from the training data once and keep them in buffers",
            BayouWarning,
            stacklevel=7,
        )


def check_gradients_reach_parameters(target: Target, inputs: tuple[Any, ...]) -> None:
    """Warn of parameters that get no gradient of the outputs.

    Args:
        target: has the network.
        inputs: its arguments for one batch.

    Raises:
        ValueError: if no parameter gets one.
    """
    network_name = type(target.net).__name__
    with clear_errors(inputs):
        unreached = target.network.unreached_names(target.start(), target.free, inputs)
    if unreached and len(unreached) == len(target.free):
        raise ValueError(
            f"no gradient of the outputs of {network_name} reaches any of its parameters, so that "
            "nothing can be learned from data; remove what blocks them: detach(), .data, "
            "torch.no_grad(), numpy, round() or argmax()"
        )
    if unreached:
        pronoun = "it" if len(unreached) == 1 else "them"
        warnings.warn(
            f"no gradient of the outputs of {network_name} reaches "
            f"{', '.join(map(repr, unreached))}: the data do not affect {pronoun}; freeze "
            "constant parameters by requires_grad_(False), and remove unused ones",
            BayouWarning,
            stacklevel=7,
        )

"""Checks on the first batch of a fit: inconsistent network, likelihood and data raise an error
before any step.
"""

from __future__ import annotations

import math
import warnings
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, size
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
from bayou.target import Target
from bayou.training.data import Data
from bayou.training.inputs import Batch, check_finite
from bayou.training.loop import move
from bayou.training.problem import Problem
from bayou.training.threads import largest_product

LAST = "last"  # the value of ``where`` for the tensors of the last layer


def first_inputs(target: Target, data: Data) -> tuple[Any, ...]:
    """The inputs of the first batch, checked and on the device of the network."""
    like = next(target.net.parameters())
    batch = next(data.ordered())
    check_finite(batch)
    check_dtype(batch[0], like)
    inputs = forward_inputs(move(batch, like)[0])
    check_decoder_inputs(target.net, inputs)
    return inputs


def check_decoder_inputs(net: nn.Module, inputs: tuple[Any, ...]) -> None:
    """Raise a ValueError for an encoder-decoder without inputs of its decoder: the labels are not
    passed on.
    """
    names = inputs[-1] if isinstance(inputs[-1], Keywords) else ()
    if not names or not getattr(getattr(net, "config", None), "is_encoder_decoder", False):
        return
    if not {"decoder_input_ids", "decoder_inputs_embeds"} & set(names):
        raise ValueError(
            f"{type(net).__name__} is an encoder with a decoder, and x has {', '.join(names)} only: labels go to the "
            "likelihood, not to the network; give what the decoder reads, too: "
            "decoder_input_ids=net.prepare_decoder_input_ids_from_labels(labels)"
        )


def check_gradients_enabled() -> None:
    """Raise a ValueError inside ``torch.no_grad`` or ``torch.inference_mode``, where nothing can be
    fitted.
    """
    if not torch.is_grad_enabled():
        block = "inference_mode" if torch.is_inference_mode_enabled() else "no_grad"
        raise ValueError(
            f"a fit needs gradients, which torch.{block}() switches off; call bayou.fit outside of it"
        )


def check_labels(target: Target, data: Data, first: Tensor) -> None:
    """Raise a ValueError if the likelihood leaves out all labels of all batches; those of the first
    are given.
    """
    if _has_labels(target, first) or any(_has_labels(target, y) for _, y in data.ordered()):
        return
    raise ValueError(
        f"y has no label to learn from: {target.likelihood_spec!r} leaves all of them out; check ignore_index"
    )


def _has_labels(target: Target, y: Tensor) -> bool:
    return bool(target.likelihood.labels(y)[1].any())


def some_inputs(target: Target, data: Data, rows: int, seed: int) -> tuple[Any, ...]:
    """The inputs of ``rows`` examples drawn by a seed; fewer, if there are not as many of one
    shape.
    """
    like = next(target.net.parameters())
    parts: list[tuple[Any, ...]] = []
    for batch in data.epoch(seed):
        inputs = forward_inputs(move(batch, like)[0])
        if parts and _shapes(inputs) != _shapes(parts[0]):
            break
        parts.append(inputs)
        if sum(len(part[0]) for part in parts) >= rows:
            break
    whole = combine_inputs(torch.cat, parts)
    index = rng.permutation(len(whole[0]), seed)[:rows].to(
        like.device
    )  # a batch of all rows has their order
    return rows_of(whole, index)


def _shapes(inputs: tuple[Any, ...]) -> list[torch.Size]:
    return [item.shape[1:] for item in inputs if isinstance(item, Tensor)]


def last_layer(target: Target, data: Data) -> list[str]:
    """The names of the tensors of the layer that makes the outputs; a ValueError if one of them is
    frozen.
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
    """Try ``call(*inputs)`` on the first batch, and check all y against it; returns a check for
    further batches.
    """
    like = next(target.net.parameters())
    inputs = first_inputs(target, data)
    check_written(target.network.dry_run(target.start, inputs).writes)
    with clear_errors(inputs):
        outputs = call(*inputs)
    batch = next(data.ordered())
    check_tensor(outputs)
    if outputs.ndim == 0 or len(outputs) != len(batch[1]):
        raise ValueError(
            f"the network gives outputs {tuple(outputs.shape)} for a batch of {len(batch[1])} rows; their first axis "
            "must be the rows"
        )
    check_rows_and_gradients(target, inputs)
    y = data.targets()
    if y is not None:
        target.likelihood.validate((len(y), *outputs.shape[1:]), y)
    else:
        target.likelihood.validate(outputs.shape, batch[1])
    check_labels(target, data, batch[1])
    if y is not None:
        return None
    first = batch[1].shape[1:]

    def check(batch: Batch) -> None:
        check_dtype(batch[0], like)
        check_finite(batch)
        if batch[1].shape[1:] == first:
            target.likelihood.validate((len(batch[1]), *outputs.shape[1:]), batch[1])
        else:  # sequences of another length have outputs of another shape
            target.likelihood._validate_values(outputs.shape, batch[1])

    return check


def check_written(writes: bool) -> None:
    """A ValueError if a network modifies its input."""
    if writes:
        raise ValueError(
            "the network modifies its input x by an in-place operation (x.mul_(2), F.relu_(x), inplace=True of its "
            "first layer), which would change your data; use an operation that returns a new tensor"
        )


def check_rows_and_gradients(target: Target, inputs: tuple[Any, ...]) -> None:
    """Checks by passes over a few rows: whether rows depend on each other, and which parameters get
    no gradient.
    """
    network, free, who = target.network, target.free, type(target.net).__name__
    if not network.dry_run(target.start, inputs).rows_apart:
        warnings.warn(
            f"{who} mixes the rows of a batch: its output for a row depends on the other rows (x - x.mean(0), a "
            "batch norm without running statistics), but the likelihood is a product over rows, and what is predicted "
            "depends on the batch; take such statistics from the training data once and keep them in buffers",
            BayouWarning,
            stacklevel=7,
        )
    with clear_errors(inputs):
        cut = network.unreached_names(target.start(), free, inputs)
    if cut and len(cut) == len(free):
        raise ValueError(
            f"no gradient of the outputs of {who} reaches any of its parameters, so that nothing can be learned from "
            "data; remove what blocks them: detach(), .data, torch.no_grad(), numpy, round() or argmax()"
        )
    if cut:
        warnings.warn(
            f"no gradient of the outputs of {who} reaches {', '.join(map(repr, cut))}: the data do not affect "
            f"{'it' if len(cut) == 1 else 'them'}; freeze constant parameters by requires_grad_(False), "
            "and remove unused ones",
            BayouWarning,
            stacklevel=7,
        )


class NetworkProblem(Problem):
    """A problem with a network: its first batch is tried before any step, the others of the first
    epoch are checked.
    """

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        self.couplings, self.priors = (
            target.couplings,
            target.priors,
        )  # created here: not possible in a compiled loss

    @abstractmethod
    def outputs(self, *inputs: Any) -> Tensor:
        """The outputs of the network without sampling noise."""

    def check_first_batch(self, data: Data) -> None:
        """A ValueError if network, likelihood and data are inconsistent."""
        with evaluating(self):
            self.check_batch, self.work = largest_product(
                lambda: check_first_batch(self.target, data, self.outputs)
            )
        if any(
            isinstance(module, nn.modules.batchnorm._BatchNorm)
            for module in self.target.net.modules()
        ):
            self._check_single_rows(data)

    @torch.no_grad()
    def _check_single_rows(self, data: Data) -> None:
        """A ValueError if a batch has one row, which has no variance for batch norm."""
        x, y = move(next(data.ordered()), next(self.target.net.parameters()))
        if 1 not in (len(y), data.n - (data.batches - 1) * len(y)):
            return
        network = Network(self.target.net)  # a copy, whose statistics may change
        network.net.train()
        one = rows_of(forward_inputs(x), slice(1))
        try:
            with rng.isolated(0, y.device):
                network.call(self.target.start(), *one)
        except ValueError as error:
            raise ValueError(
                f"batch norm needs more than one row in every batch, and of {data.n} rows in batches of {len(y)} one "
                f"is left over ({error}); give another batch_size, or drop_last=True to a DataLoader"
            ) from error


@torch.no_grad()
def validation_loss(
    target: Target, held: Data, call: Callable[..., Tensor], stack: Params
) -> float:
    """Mean negative log predictive density of held-out data, averaged over the draws of a stack."""
    like = next(iter(stack.values()))
    draws, total = size(stack), 0.0
    for raw in held.ordered():
        x, y = move(raw, like)
        outputs = torch.stack(
            [call({k: v[s] for k, v in stack.items()}, *forward_inputs(x)) for s in range(draws)]
        )
        each = target.likelihood.log_prob(outputs, y)
        total -= float((each.logsumexp(0) - math.log(draws)).sum())
    return total / held.n

"""The training objective of a method with a network: its first batch is checked before any step."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params, size
from bayou.inference.data_checks import check_first_batch
from bayou.network import Network, evaluating, forward_inputs, rows_of
from bayou.network.target import Target
from bayou.priors.base import BoundPrior
from bayou.priors.joint import JointCorrection
from bayou.training.data import Data
from bayou.training.inputs import Batch
from bayou.training.loop import move
from bayou.training.problem import Problem
from bayou.training.threads import largest_product


class NetworkProblem(Problem):
    """A problem with a network, which checks the first batch and those of the first epoch.

    Args:
        target: network, likelihood and prior.
    """

    check_batch: Callable[[Batch], None] | None
    work: int | None

    def __init__(self, target: Target) -> None:
        super().__init__()
        self.target = target
        # Both are created here because a compiled loss cannot create them.
        self.couplings: list[JointCorrection] = target.couplings
        self.priors: dict[str, BoundPrior] = target.priors

    @abstractmethod
    def outputs(self, *inputs: object) -> Tensor:
        """Compute the outputs of the network without sampling noise."""

    def check_first_batch(self, data: Data) -> None:
        """Raise a ValueError if network, likelihood and data are inconsistent."""
        with evaluating(self):
            self.check_batch, self.work = largest_product(
                lambda: check_first_batch(self.target, data, self.outputs)
            )
        modules = self.target.net.modules()
        if any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in modules):
            self._check_single_rows(data)

    @torch.no_grad()
    def _check_single_rows(self, data: Data) -> None:
        """Raise a ValueError if a batch has one row, which has no variance for batch norm."""
        x, y = move(next(data.epoch()), next(self.target.net.parameters()))
        if 1 not in (len(y), data.n - (data.batches - 1) * len(y)):
            return
        network = Network(self.target.net)  # a copy, whose statistics may change
        network.net.train()
        first_row = rows_of(forward_inputs(x), slice(1))
        try:
            with rng.isolated(0, y.device):
                network.call(self.target.start(), *first_row)
        except ValueError as error:
            raise ValueError(
                f"batch norm needs more than one row in every batch, and of {data.n} rows in "
                f"batches of {len(y)} one is left over ({error}); give another batch_size, or "
                "drop_last=True to a DataLoader"
            ) from error


@torch.no_grad()
def validation_loss(
    target: Target, held_out_rows: Data, call: Callable[..., Tensor], draws: Params
) -> float:
    """Compute the mean negative log predictive density of held-out rows.

    −1/N Σ_n log 1/S Σ_s p(y_n | f_s(x_n)), averaged over S draws of the weights.

    Args:
        target: has the likelihood.
        held_out_rows: N rows.
        call: computes outputs from the tensors of one draw and the inputs.
        draws: a stack of tensors, (S, *shape) each.
    """
    parameter = next(iter(draws.values()))
    count = size(draws)
    total = 0.0
    for batch in held_out_rows.epoch():
        x, y = move(batch, parameter)
        outputs = []
        for index in range(count):
            draw = {name: values[index] for name, values in draws.items()}
            outputs.append(call(draw, *forward_inputs(x)))
        log_prob = target.likelihood.log_prob(torch.stack(outputs), y)
        total -= float((log_prob.logsumexp(0) - math.log(count)).sum())
    return total / held_out_rows.n

"""What a recipe must know that replaces the given network by a network of tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from bayou.core import rng
from bayou.likelihoods import Likelihood
from bayou.network import Network, evaluating, forward_inputs
from bayou.network.target import Target
from bayou.network.units import units_of, with_units
from bayou.networks import TableNetwork
from bayou.select.search_run import SearchRun
from bayou.training.data import Data, Rows
from bayou.training.rows import all_rows


def check_replaceable(target: Target, method: str) -> None:
    """Raise a ValueError where parts of the given network are to be kept.

    Args:
        target: network, likelihood and prior.
        method: the name of the method that replaces the network.
    """
    if target.frozen:
        raise ValueError(
            f"{method} replaces the whole network, and {next(iter(target.frozen))!r} is frozen; "
            "omit where= and unfreeze it, or use laplace"
        )
    if target.prior_given and isinstance(target.prior, Mapping):
        raise ValueError(
            f"{method} replaces the network, so that priors by the names of its tensors have none; "
            "give one prior, or use laplace"
        )


def table_of(data: Data, method: str) -> Tensor:
    """Return the inputs of all rows as a matrix, or raise a ValueError if they are none.

    Args:
        data: the training data.
        method: the name of the method that reads them.
    """
    if not isinstance(data, Rows):
        raise ValueError(
            f"{method} reads all rows, which {type(data).__name__} does not support; give (x, y)"
        )
    x, _ = all_rows(data)
    inputs = forward_inputs(x)
    is_matrix = len(inputs) == 1 and inputs[0].is_floating_point() and inputs[0].ndim == 2
    if not is_matrix:
        raise ValueError(
            f"{method} is for tables: one tensor of real numbers (rows, columns), got "
            f"{', '.join(_describe_input(item) for item in inputs)}; use laplace or ensemble"
        )
    matrix: Tensor = inputs[0]
    return matrix


def _describe_input(item: object) -> str:
    """Return the type and, of a tensor, the shape of an argument of a network."""
    if isinstance(item, Tensor):
        return f"{item.dtype} {tuple(item.shape)}"
    return type(item).__name__


@torch.no_grad()
def count_outputs(target: Target, x: Tensor, method: str) -> int:
    """Return how many numbers the given network returns for a row.

    Args:
        target: has the network.
        x: rows of the table, (N, D).
        method: the name of the method that replaces the network.
    """
    network = Network(target.net)
    parameter = next(target.net.parameters())
    with evaluating(network.net):
        outputs = network.call(target.start(), x[:1].to(parameter))
    if outputs.ndim != 2:
        raise ValueError(
            f"{method} needs a network that returns a row of numbers for each row of x, got "
            f"{tuple(outputs.shape)}; use laplace or ensemble"
        )
    return outputs.shape[1]


def with_table_network(
    target: Target,
    build: Callable[[], TableNetwork],
    method: str,
    run: SearchRun,
    likelihood: Likelihood | None = None,
) -> Target:
    """Return the target of a network of tables, in the units of the given network.

    Files of its posteriors contain the network, so that ``bayou.load`` takes any other.

    Args:
        target: network, likelihood and prior.
        build: makes the network; its initial weights are a function of the seed of the run.
        method: the name of the method that replaces the network.
        run: of the search.
        likelihood: in place of that of the target; None (default) keeps it.
    """
    parameter = next(target.net.parameters())
    with rng.isolated(run.part_seed(method), parameter.device):
        net = build()
    net.is_in_files = True
    net = net.to(device=parameter.device, dtype=parameter.dtype)
    units = units_of(target.net)
    if units is not None and likelihood is not None:
        units = units.with_scales(has_logs=likelihood.has_log_variances)
    if units is not None:
        net = with_units(net, units)
    prior = target.prior if target.prior_given else None
    return Target.build(net, likelihood or target.likelihood_spec, prior, target.n)

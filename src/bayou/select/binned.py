"""The recipe of a network that sees every number in bins: for tables whose columns act in steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, final

import torch
from torch import Tensor

from bayou.core import rng
from bayou.network import Network, evaluating, forward_inputs
from bayou.network.target import Target
from bayou.network.units import units_of, with_units
from bayou.networks import TableLayout, TableNetwork
from bayou.select.plans import Plan
from bayou.select.recipes import Recipe
from bayou.select.search_run import SearchRun
from bayou.training.data import Data, Rows, as_data
from bayou.training.rows import all_rows

HIDDEN: Final = (50,)  # units of the hidden layers: more are slower and not better


@final
@dataclass(frozen=True)
class Binned(Recipe):
    """A method by name for the network of tables, which takes the place of the given network.

    ``TableNetwork`` sees every number as it is and in bins between the quantiles of the training
    rows, so that functions with steps and edges are easy for it (Gorishniy et al. 2022). Where all
    columns act smoothly the given network predicts better. The posterior contains its network:
    ``bayou.load`` takes any other in its place.

    Args:
        recipe: the method, of this network.
        hidden: units of the hidden layers.

    Paper: Gorishniy, Rubachev & Babenko 2022, https://arxiv.org/abs/2203.05556.
    """

    recipe: Recipe
    hidden: tuple[int, ...] = HIDDEN

    @property
    def batch_size(self) -> int:
        """The batch size of the method."""
        return self.recipe.batch_size

    def check_target(self, target: Target, data: Data) -> None:
        """Raise a ValueError where the network cannot be replaced.

        Args:
            target: network, likelihood and prior.
            data: the training data.
        """
        if target.frozen:
            raise ValueError(
                f"bins replaces the whole network, and {next(iter(target.frozen))!r} is frozen; "
                "omit where= and unfreeze it, or use laplace"
            )
        if target.prior_given and isinstance(target.prior, Mapping):
            raise ValueError(
                "bins replaces the network, so that priors by the names of its tensors have none; "
                "give one prior, or use laplace"
            )
        if any(isinstance(module, TableNetwork) for module in target.net.modules()):
            raise ValueError(
                "the network is a TableNetwork, which has bins of its own; use laplace, ensemble "
                "or tabm"
            )
        _table_of(data)

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Plan the fit of the network of tables."""
        rows = as_data(data, self.batch_size)
        self.check_target(target, rows)
        x = _table_of(rows)
        layout = TableLayout.fit(x)
        binned_target = self._replace_network(target, layout, _count_outputs(target, x), run)
        plan = self.recipe.make_plan(binned_target, rows, run)
        decision = f"a network of tables: {layout.describe()}"
        narrowed = None if plan.narrowed is None else replace(self, recipe=plan.narrowed)
        return replace(plan, decisions=(decision, *plan.decisions), narrowed=narrowed)

    def _replace_network(
        self, target: Target, layout: TableLayout, outputs: int, run: SearchRun
    ) -> Target:
        """Return the target of the network of tables, in the units of the given network."""
        parameter = next(target.net.parameters())
        with rng.isolated(run.part_seed("bins"), parameter.device):
            net = TableNetwork(layout, outputs, self.hidden)
        net.is_in_files = True
        net = net.to(device=parameter.device, dtype=parameter.dtype)
        units = units_of(target.net)
        if units is not None:
            net = with_units(net, units)
        prior = target.prior if target.prior_given else None
        return Target.build(net, target.likelihood_spec, prior, target.n)


def _table_of(data: Data) -> Tensor:
    """Return the inputs of all rows as a matrix, or raise a ValueError if they are none."""
    if not isinstance(data, Rows):
        raise ValueError(
            f"bins reads all rows, which {type(data).__name__} does not support; give (x, y)"
        )
    x, _ = all_rows(data)
    inputs = forward_inputs(x)
    is_matrix = len(inputs) == 1 and inputs[0].is_floating_point() and inputs[0].ndim == 2
    if not is_matrix:
        raise ValueError(
            "bins is for tables: one tensor of real numbers (rows, columns), got "
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
def _count_outputs(target: Target, x: Tensor) -> int:
    """Return how many numbers the given network returns for a row."""
    network = Network(target.net)
    parameter = next(target.net.parameters())
    with evaluating(network.net):
        outputs = network.call(target.start(), x[:1].to(parameter))
    if outputs.ndim != 2:
        raise ValueError(
            "bins needs a network that returns a row of numbers for each row of x, got "
            f"{tuple(outputs.shape)}; use laplace or ensemble"
        )
    return outputs.shape[1]

"""The recipe of a linear model: exact for numbers, and a safe choice beyond the training rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from torch import Tensor

from bayou.network.target import Target
from bayou.networks import TableLayout, TableNetwork
from bayou.select.plans import Plan
from bayou.select.recipes import Recipe
from bayou.select.replaced_network import (
    check_replaceable,
    count_outputs,
    table_of,
    with_table_network,
)
from bayou.select.search_run import SearchRun
from bayou.training.data import Data, as_data

NAME: Final = "linear"  # in messages


@final
@dataclass(frozen=True)
class LinearModel(Recipe):
    """A method by name for one linear layer, which takes the place of the given network.

    f(x) = W x + b on standardized columns. With Gaussian noise the posterior of the weights given
    the noise is exact. Far from the training rows a linear model continues their trend, where a
    network of ReLU units continues that of its last kinks and boosted trees are constant. The
    posterior contains its network: ``bayou.load`` takes any other in its place.

    Args:
        recipe: the method, of this network.
    """

    recipe: Recipe

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
        check_replaceable(target, NAME)
        table_of(data, NAME)

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Plan the fit of the linear layer."""
        rows = as_data(data, self.batch_size)
        self.check_target(target, rows)
        x = table_of(rows, NAME)
        outputs = count_outputs(target, x, NAME)

        def build() -> TableNetwork:
            return TableNetwork(_layout_without_bins(target, x), outputs, hidden=())

        linear_target = with_table_network(target, build, NAME, run)
        plan = self.recipe.make_plan(linear_target, rows, run)
        narrowed = None if plan.narrowed is None else replace(self, recipe=plan.narrowed)
        decisions = ("one linear layer", *plan.decisions)
        return replace(plan, decisions=decisions, narrowed=narrowed)


def _layout_without_bins(target: Target, x: Tensor) -> TableLayout:
    """Return the columns as numbers and, where the given network has codes of categories, those."""
    levels: dict[int, int] = {}
    for module in target.net.modules():
        if isinstance(module, TableNetwork):
            counts = module.layout.levels
            levels = {index: count for index, count in enumerate(counts) if count}
    return TableLayout.fit(x, bins=0, levels=levels)

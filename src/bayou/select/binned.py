"""The recipe of a network that sees every number in bins: for tables whose columns act in steps."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, final

from bayou.core.specs import later_field
from bayou.methods.wide import Wide
from bayou.network.target import Target
from bayou.networks import TableLayout, TableNetwork
from bayou.select.likelihood_choice import has_frequent_value
from bayou.select.noise import describe_rounding
from bayou.select.plans import Plan
from bayou.select.recipes import Recipe
from bayou.select.replaced_network import (
    check_replaceable,
    count_outputs,
    table_of,
    with_table_network,
)
from bayou.select.search_run import SearchRun
from bayou.training.data import Data, Rows, as_data
from bayou.training.rows import all_rows

HIDDEN: Final = (50,)  # units of the hidden layers: more are slower and not better
MIN_ROWS_OF_THRESHOLDS: Final = 100  # of the infinite network


@final
@dataclass(frozen=True)
class Binned(Recipe):
    """A method by name for the network of tables, which takes the place of the given network.

    ``TableNetwork`` sees every number as it is and in bins between the quantiles of the training
    rows, so that functions with steps and edges are easy for it (Gorishniy et al. 2022). Where all
    columns act smoothly the given network predicts better. The posterior contains its network:
    ``bayou.load`` takes any other in its place.

    A regression with Gaussian noise of up to 3,000 rows has a network of infinite width whose units
    see thresholds in place of bins, where ``exact`` is given.

    Args:
        recipe: the method, of this network.
        hidden: units of the hidden layers.
        exact: the method of a network of infinite width, in place of ``recipe`` where it is
            applicable; None (default) for ``recipe`` everywhere.

    Paper: Gorishniy, Rubachev & Babenko 2022, https://arxiv.org/abs/2203.05556.
    """

    recipe: Recipe
    hidden: tuple[int, ...] = HIDDEN
    exact: Wide | None = later_field(None)

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
        check_replaceable(target, "bins")
        if any(isinstance(module, TableNetwork) for module in target.net.modules()):
            raise ValueError(
                "the network is a TableNetwork, which has bins of its own; use laplace, ensemble "
                "or tabm"
            )
        table_of(data, "bins")

    def make_plan(self, target: Target, data: Data, run: SearchRun) -> Plan:
        """Plan the fit of the network of tables."""
        rows = as_data(data, self.batch_size)
        self.check_target(target, rows)
        x = table_of(rows, "bins")
        suited = self.suited_to(target, rows)
        if suited.exact is not None:
            decision = (
                f"a network of infinite width with up to {suited.exact.thresholds:,} thresholds of "
                "each column"
            )
            decisions = (decision, *describe_rounding(target, rows))
            return Plan(target, suited.exact, rows, run.seed, decisions=decisions)
        layout = TableLayout.fit(x)
        outputs = count_outputs(target, x, "bins")

        def build() -> TableNetwork:
            return TableNetwork(layout, outputs, self.hidden)

        binned_target = with_table_network(target, build, "bins", run)
        plan = self.recipe.make_plan(binned_target, rows, run)
        decision = f"a network of tables: {layout.describe()}"
        narrowed = None if plan.narrowed is None else replace(self, recipe=plan.narrowed)
        return replace(plan, decisions=(decision, *plan.decisions), narrowed=narrowed)

    def suited_to(self, target: Target, data: Data) -> Binned:
        """Return this recipe without the exact method where that is not applicable.

        Args:
            target: network, likelihood and prior.
            data: all rows.
        """
        if self.exact is None:
            return self
        _, y = all_rows(data)
        # Of few rows, or where rows depend on each other by groups, times or a frequent value, the
        # evidence of many thresholds leaves too little noise.
        has_blocks = isinstance(data, Rows) and data.blocks is not None
        is_unsuitable = has_blocks or len(y) < MIN_ROWS_OF_THRESHOLDS or has_frequent_value(y)
        try:
            self.exact.check_target(target, data)
        except ValueError:
            return replace(self, exact=None)
        return replace(self, exact=None) if is_unsuitable else self

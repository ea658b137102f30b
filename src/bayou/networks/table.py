"""The network of a table: embeddings of its columns, then an MLP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Final

import torch
from torch import Tensor, nn

from bayou.networks.embeddings import Categories, PiecewiseLinear
from bayou.networks.layout import TableLayout

MAX_EMBEDDING_WIDTH: Final = 16


class TableNetwork(nn.Module):
    """Embeddings of the columns of a table, side by side, and an MLP on them.

    Numbers are embedded by ``PiecewiseLinear``, codes of categories by ``Categories``. The initial
    weights of bins are 0, so that the network begins as an MLP on standardized numbers; the first
    layer learns how far each column departs from linear. All parameters belong to ``nn.Linear`` and
    ``nn.Embedding``, which every method understands, and the network takes columns in their own
    units: ``bayou.fit`` does not standardize them.

    Args:
        layout: the columns, by ``TableLayout.fit(x)``.
        outputs: numbers for each row.
        hidden: units of the hidden layers, (128, 128) by default.
        activation: the name of a class of ``torch.nn``, "ReLU" by default.
        dropout: probability of a unit to be dropped after each hidden layer, 0 by default.
        width: of the vector of a category; by default 1.6·levels^0.56 of the largest column, at
            most 16.

    Example:
        >>> net = bayou.networks.TableNetwork(bayou.networks.TableLayout.fit(x), outputs=1)
        >>> posterior = bayou.fit(net, (x, y), "tabm")
    """

    takes_raw_inputs: ClassVar[bool] = True
    # Whether files of posteriors contain the description of this network: of one that a method made
    # in place of the user's.
    is_in_files: bool = False
    number_columns: Tensor
    category_columns: Tensor

    def __init__(
        self,
        layout: TableLayout,
        outputs: int,
        hidden: Sequence[int] = (128, 128),
        activation: str = "ReLU",
        dropout: float = 0.0,
        width: int | None = None,
    ) -> None:
        super().__init__()
        self.settings: dict[str, Any] = {
            "outputs": outputs,
            "hidden": list(hidden),
            "activation": activation,
            "dropout": dropout,
            "width": width,
        }
        self.layout = layout
        self.columns: int = layout.columns
        self.numbers: PiecewiseLinear | None = None
        self.categories: Categories | None = None
        numbers = layout.numbers
        features = 0
        if numbers:
            self.numbers = PiecewiseLinear(
                [layout.edges[index] for index in numbers],
                [layout.mean[index] for index in numbers],
                [layout.scale[index] for index in numbers],
            )
            features = self.numbers.width
        if layout.categories:
            counts = [layout.levels[index] for index in layout.categories]
            if width is None:
                width = min(MAX_EMBEDDING_WIDTH, round(1.6 * max(counts) ** 0.56))
            self.categories = Categories(counts, width)
            features += self.categories.width
        self.register_buffer("number_columns", torch.tensor(numbers, dtype=torch.long))
        category_columns = torch.tensor(layout.categories, dtype=torch.long)
        self.register_buffer("category_columns", category_columns)
        layers: list[nn.Module] = []
        for size in hidden:
            layers += [nn.Linear(features, size), getattr(nn, activation)()]
            if dropout:
                layers.append(nn.Dropout(dropout))
            features = size
        self.layers: nn.Sequential = nn.Sequential(*layers, nn.Linear(features, outputs))
        self.reset_parameters()

    def to_json(self) -> dict[str, Any]:
        """Return the layout and the settings as plain values, from which ``from_json`` builds it.

        The weights are not among them.
        """
        return {"layout": self.layout.to_json(), **self.settings}

    @staticmethod
    def from_json(values: Mapping[str, Any]) -> TableNetwork:
        """Return the network that ``to_json`` described, with new weights.

        Args:
            values: plain values.

        Raises:
            ValueError: they do not describe a network.
        """
        try:
            layout = TableLayout.from_json(values["layout"])
            settings = {name: value for name, value in values.items() if name != "layout"}
            return TableNetwork(layout, **settings)
        except (TypeError, KeyError, AttributeError) as problem:
            raise ValueError(f"this does not describe a network of tables: {problem}") from problem

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw new initial weights; those of bins are 0."""
        for module in self.layers:
            if isinstance(module, nn.Linear):
                module.reset_parameters()
        if self.categories is not None:
            self.categories.reset_parameters()
        first = next(module for module in self.layers if isinstance(module, nn.Linear))
        if self.numbers is not None:
            first.weight[:, self.numbers.inputs : self.numbers.width] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs, (N, outputs).

        Args:
            x: rows of the table, (N, D).
        """
        if x.shape[-1] != self.columns:
            raise ValueError(f"the network has {self.columns} columns, got {tuple(x.shape)}")
        features = []
        if self.numbers is not None:
            features.append(self.numbers(x.index_select(-1, self.number_columns)))
        if self.categories is not None:
            features.append(self.categories(x.index_select(-1, self.category_columns)))
        outputs: Tensor = self.layers(torch.cat(features, -1))
        return outputs

"""Networks of tables: embeddings of numbers and categories, as modules for any network."""

from bayou.networks.embeddings import Categories, Periodic, PiecewiseLinear
from bayou.networks.layout import TableLayout
from bayou.networks.table import TableNetwork

__all__ = ["Categories", "Periodic", "PiecewiseLinear", "TableLayout", "TableNetwork"]

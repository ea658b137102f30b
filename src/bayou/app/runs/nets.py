"""Networks by name, built for the shape of an input and the number of outputs.

Torch is imported when a network is built.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, final

from bayou.core.specs import nearest

if TYPE_CHECKING:
    from torch import Tensor, nn

    from bayou.data.dataset import DataSet
    from bayou.networks import TableLayout

Shape = tuple[int, ...]
# A regression of more rows than this has this network by default: ReLU fits rough functions.
MAX_SMALL_NET_ROWS = 5000
LARGE_NET = "mlp-128"
SMALL_NET = "silu-50"
# Its columns are read from training rows.
TABLE_NET = "table"
# From so many training rows on, the default network of a table is the better of two on held-out
# rows: the one without bins, and TABLE_NET.
MIN_TABLE_NET_ROWS = 2000


@final
@dataclass(frozen=True)
class Net:
    """A named network.

    Args:
        name: as in ``--net``.
        summary: one line for ``bayou list nets``.
        builder: the name of a function in ``layers``.
        settings: arguments of the builder.
        smallest: height and width that an image needs at least; None for any input.
        reads_columns: whether it is built for the layout of the columns of training rows.
    """

    name: str
    summary: str
    builder: str
    settings: dict[str, Any] = field(default_factory=dict)
    smallest: int | None = None
    reads_columns: bool = False

    def describe(self) -> str:
        """Return the summary and requirements in one line."""
        if not self.smallest:
            return self.summary
        return f"{self.summary}; images of {self.smallest}×{self.smallest} or more"

    def build(
        self,
        shape: Shape,
        outputs: int,
        seed: int | None = None,
        layout: TableLayout | None = None,
    ) -> nn.Module:
        """Build the network.

        Args:
            shape: of one input.
            outputs: numbers for each row.
            seed: of the initial weights; None for torch's stream.
            layout: of the columns, for a network that needs it.

        Raises:
            ValueError: the network cannot take such inputs, or has no layout.
        """
        self._check(tuple(shape), outputs)
        settings = self.settings
        if self.reads_columns:
            if layout is None:
                raise ValueError(
                    f"{self.name} needs the columns of training rows: "
                    "layout=bayou.networks.TableLayout.fit(x)"
                )
            settings = settings | {"layout": layout}
        from contextlib import nullcontext

        import torch

        from bayou.app.runs import layers
        from bayou.core import rng

        with nullcontext() if seed is None else rng.isolated(seed, torch.device("cpu")):
            return getattr(layers, self.builder)(tuple(shape), outputs, **settings)

    def _check(self, shape: Shape, outputs: int) -> None:
        """Raise a ValueError if the network cannot take inputs of this shape."""
        if outputs < 1 or not shape or min(shape) < 1:
            raise ValueError(
                f"a network needs inputs and outputs, got inputs of shape {shape} and {outputs} "
                "outputs"
            )
        if self.reads_columns and len(shape) != 1:
            raise ValueError(f"{self.name} needs rows of numbers, got inputs of shape {shape}")
        if self.smallest is None:
            return
        size = "×".join(map(str, shape))
        if len(shape) != 3:
            raise ValueError(
                f"{self.name} needs images (channels, height, width), got inputs of {size}; use mlp"
            )
        if min(shape[1:]) < self.smallest:
            usable = [net.name for net in NETS.values() if (net.smallest or 0) <= min(shape[1:])]
            raise ValueError(
                f"{self.name} needs images of at least {self.smallest}×{self.smallest}, "
                f"got {size}; these fit: {', '.join(usable)}"
            )


def _dense(name: str, summary: str, *hidden: int, **settings: Any) -> Net:
    """Return a network of linear layers."""
    return Net(name, summary, "dense", {"hidden": hidden, **settings})


def _with_and_without_dropout(
    name: str, layers: str, hidden: tuple[int, ...], rate: float
) -> tuple[Net, Net]:
    """Return a network of ReLU layers, and the same with dropout."""
    return (
        _dense(name, f"{layers}, ReLU", *hidden),
        _dense(f"{name}-dropout", f"{layers}, ReLU, dropout {rate}", *hidden, dropout=rate),
    )


def _lenet(name: str, summary: str, *widths: int, **settings: Any) -> Net:
    """Return a convolutional network."""
    return Net(name, summary, "lenet", {"widths": widths, **settings}, 16)


_CIFAR = "5×5 convolutions 192 and 192, 1000 units"
_NETS = (
    _dense("linear", "one linear layer: logistic or linear regression"),
    *_with_and_without_dropout("mlp", "two hidden layers of 50 units", (50, 50), 0.1),
    *_with_and_without_dropout("relu-50", "one hidden layer of 50 units", (50,), 0.05),
    _dense(
        "silu-50",
        "one hidden layer of 50 smooth units, SiLU: for small tables",
        50,
        activation="SiLU",
    ),
    _dense("silu-100", "one hidden layer of 100 smooth units, SiLU", 100, activation="SiLU"),
    *_with_and_without_dropout("relu-100", "one hidden layer of 100 units", (100,), 0.05),
    _dense(
        "mlp-128",
        "two hidden layers of 128 units, ReLU: for regressions of more than 5,000 rows",
        128,
        128,
    ),
    Net(
        TABLE_NET,
        "columns in bins between quantiles beside their values, two hidden layers of 128 units, "
        "ReLU",
        "table",
        {"hidden": (128, 128)},
        reads_columns=True,
    ),
    *(
        net
        for units in (400, 800, 1200)
        for net in _with_and_without_dropout(
            f"mlp-{units}", f"two hidden layers of {units} units", (units, units), 0.5
        )
    ),
    _dense(
        "tanh-20",
        "one hidden layer of 20 tanh units: that of the HMC reference on cubic",
        20,
        activation="Tanh",
    ),
    _dense("digits", "two hidden layers of 100 units, ReLU: for the 8×8 digits", 100, 100),
    _lenet("lenet", "5×5 convolutions 20 and 50, 500 units", 20, 50, 500),
    _lenet(
        "lenet-dropout",
        "lenet with dropout: 0.25 on convolutions, 0.5 on units",
        20,
        50,
        500,
        dropout=True,
    ),
    _lenet("lenet-cifar", _CIFAR, 192, 192, 1000),
    _lenet("lenet-cifar-dropout", f"{_CIFAR}, dropout", 192, 192, 1000, dropout=True),
    _lenet("lenet-cifar-moved", f"{_CIFAR}, augmented", 192, 192, 1000, moved=True),
    _lenet(
        "lenet-cifar-moved-dropout",
        f"{_CIFAR}, dropout, augmented",
        192,
        192,
        1000,
        dropout=True,
        moved=True,
    ),
)
NETS: dict[str, Net] = {net.name: net for net in _NETS}


@final
@dataclass(frozen=True)
class NetChoice:
    """The default network of a table, and why it was chosen.

    Args:
        name: one of ``NETS``.
        note: a sentence for the report; empty if nothing was compared.
        record: the candidates with their NLL, as a stage of a selection; none if there was one.
    """

    name: str
    note: str = ""
    record: dict[str, Any] | None = None


def find(name: str) -> Net:
    """Return the network of a name.

    Args:
        name: one of ``NETS``.

    Raises:
        ValueError: there is no such network; the nearest name is suggested.
    """
    if name not in NETS:
        suggestion = nearest(name, list(NETS))
        raise ValueError(
            f"there is no network {name!r}{suggestion}; the names are {', '.join(NETS)}"
        )
    return NETS[name]


def build(
    name: str,
    shape: Shape,
    outputs: int,
    seed: int | None = None,
    layout: TableLayout | None = None,
) -> nn.Module:
    """Build the network of a name.

    Args:
        name: one of ``NETS``.
        shape: of one input.
        outputs: numbers for each row.
        seed: of the initial weights; None for torch's stream.
        layout: of the columns, for a network that needs it (``layout_for``).

    Raises:
        ValueError: there is no such network, or it cannot take such inputs.
    """
    return find(name).build(shape, outputs, seed, layout)


def layout_for(name: str, x: Tensor) -> TableLayout | None:
    """Return the layout of the columns of training rows if a network needs it.

    Args:
        name: one of ``NETS``.
        x: the training rows.
    """
    if not find(name).reads_columns or x.ndim != 2:
        return None
    from bayou.networks import TableLayout

    return TableLayout.fit(x)


def default_net(dataset: DataSet) -> str:
    """Return the name of the default network for a data set.

    For a large table ``choose_net`` compares it with ``TABLE_NET``.

    Args:
        dataset: its task, shape and number of rows decide.
    """
    shape = dataset.input_shape
    if dataset.name == "cubic":
        return "tanh-20"
    if len(shape) != 3 or min(shape[1:]) < 4:
        if dataset.task == "regression" and dataset.n > MAX_SMALL_NET_ROWS:
            return LARGE_NET
        is_large = dataset.n >= 2000 or len(shape) == 3
        return "mlp" if is_large else SMALL_NET
    if min(shape[1:]) < 16:
        return "digits"
    return "lenet" if shape[0] == 1 else "lenet-cifar"


def is_compared(shape: Shape, rows: int) -> bool:
    """Return whether a table has enough rows for a comparison of networks.

    Args:
        shape: of one input.
        rows: training rows.
    """
    return len(shape) == 1 and rows >= MIN_TABLE_NET_ROWS

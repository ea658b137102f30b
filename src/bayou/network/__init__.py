"""A network as a function of its named tensors, and what can be asked about them."""

from bayou.network.each import Each, PlainAttention, out_of_memory
from bayou.network.function import Look, Network, Shell, skeleton
from bayou.network.layout import NORMS, Layout, fan_ins, layouts
from bayou.network.watch import Call, Watch

__all__ = [
    "NORMS",
    "Call",
    "Each",
    "Layout",
    "Look",
    "Network",
    "PlainAttention",
    "Shell",
    "Watch",
    "fan_ins",
    "layouts",
    "out_of_memory",
    "skeleton",
]

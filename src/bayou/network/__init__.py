"""A network as a function of its named tensors, and what can be asked about them."""

from bayou.network.function import DryRun, Network, Shell, channels_last, check_network, close, skeleton
from bayou.network.layout import NORMS, Layout, fan_ins, layouts
from bayou.network.mapping import PlainAttention, VmapOrLoop, out_of_memory
from bayou.network.watch import Call, Watch

__all__ = [
    "NORMS",
    "Call",
    "DryRun",
    "Layout",
    "Network",
    "PlainAttention",
    "Shell",
    "VmapOrLoop",
    "Watch",
    "channels_last",
    "check_network",
    "close",
    "fan_ins",
    "layouts",
    "out_of_memory",
    "skeleton",
]

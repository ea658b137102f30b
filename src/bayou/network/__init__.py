"""A network as a function of its named tensors, its evaluation, and the roles of its tensors."""

from bayou.network.evaluation import Map, by_rows, evaluating
from bayou.network.function import DryRun, Network, Shell, channels_last, check_network, close, is_constant, shared_copy
from bayou.network.inputs import check_dtype, clear_errors, forward_inputs, placed, rows_of
from bayou.network.layout import NORMS, Layout, fan_ins, layouts
from bayou.network.mapping import PlainAttention, VmapOrLoop, out_of_memory
from bayou.network.watch import Call, Watch

__all__ = [
    "NORMS",
    "Call",
    "DryRun",
    "Layout",
    "Map",
    "Network",
    "PlainAttention",
    "Shell",
    "VmapOrLoop",
    "Watch",
    "by_rows",
    "channels_last",
    "check_dtype",
    "check_network",
    "clear_errors",
    "close",
    "evaluating",
    "fan_ins",
    "forward_inputs",
    "is_constant",
    "layouts",
    "out_of_memory",
    "placed",
    "rows_of",
    "shared_copy",
]

"""A network as a function of its named tensors, its evaluation, and the roles of its tensors."""

from bayou.network.evaluation import Map, by_rows, evaluating
from bayou.network.function import (
    DryRun,
    Network,
    Shell,
    channels_last,
    check_network,
    close,
    is_constant,
    shared_copy,
)
from bayou.network.inputs import (
    adapted,
    called,
    check_dtype,
    check_tensor,
    clear_errors,
    output_of,
    placed,
    selecting,
)
from bayou.network.layout import NORMS, Layout, fan_ins, layouts
from bayou.network.mapping import PlainAttention, VmapOrLoop, out_of_memory
from bayou.network.sharded import is_sharded
from bayou.network.watch import Call, Watch
from bayou.training.data import Keywords, combined, forward_inputs, rows_of

__all__ = [
    "NORMS", "Call", "DryRun", "Keywords", "Layout", "Map", "Network", "PlainAttention", "Shell", "VmapOrLoop",
    "Watch", "adapted", "by_rows", "called", "channels_last", "check_dtype", "check_network", "check_tensor",
    "clear_errors", "close", "combined", "evaluating", "fan_ins", "forward_inputs", "is_constant", "is_sharded",
    "layouts", "out_of_memory", "output_of", "placed", "rows_of", "selecting", "shared_copy",
]  # fmt: skip

"""A network as a function of its named tensors, its evaluation, and the roles of its tensors."""

from bayou.network.checks import check_network
from bayou.network.copies import Shell, is_constant, shared_copy
from bayou.network.dry_run import DryRun, channels_last, close
from bayou.network.evaluation import Map, by_rows, evaluating
from bayou.network.function import Network
from bayou.network.inputs import (
    adapt,
    call_network,
    check_dtype,
    check_tensor,
    clear_errors,
    output_of,
    place_inputs,
    with_output,
)
from bayou.network.layout import NORMS, Layout, fan_ins, layouts
from bayou.network.mapping import PlainAttention, VmapOrLoop, out_of_memory
from bayou.network.sharded import is_sharded
from bayou.network.watch import Call, Watch
from bayou.training.inputs import Keywords, combine_inputs, forward_inputs, rows_of

__all__ = [
    "NORMS",
    "Call",
    "DryRun",
    "Keywords",
    "Layout",
    "Map",
    "Network",
    "PlainAttention",
    "Shell",
    "VmapOrLoop",
    "Watch",
    "adapt",
    "by_rows",
    "call_network",
    "channels_last",
    "check_dtype",
    "check_network",
    "check_tensor",
    "clear_errors",
    "close",
    "combine_inputs",
    "evaluating",
    "fan_ins",
    "forward_inputs",
    "is_constant",
    "is_sharded",
    "layouts",
    "out_of_memory",
    "output_of",
    "place_inputs",
    "rows_of",
    "shared_copy",
    "with_output",
]

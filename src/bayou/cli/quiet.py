"""Warnings of torch that ask nothing of whoever runs a command; a program of one's own keeps them."""

from __future__ import annotations

import warnings

HARMLESS = (
    "TensorFloat32 tensor cores",  # products stay in float32 unless one asks for less
    "\nOnline softmax is disabled",  # a matter of speed
    "mkldnn_matmul failed",  # bfloat16 on a processor without it: slower, and as right
    "`torch.jit.script_method` is deprecated",  # by torch itself
)


def hush() -> None:
    """Do not show them in this process."""
    for start in HARMLESS:
        warnings.filterwarnings("ignore", start)

"""ONNX files of exported programs."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.export import ExportedProgram

from bayou.core.extras import extra
from bayou.core.files import writing


def write_onnx(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    input_names: Sequence[str],
    output_names: Sequence[str],
    feature: str,
) -> Path:
    """Write a program as one ONNX file, with the names of its inputs and outputs.

    Args:
        program: of ``torch.export``.
        path: the file to write.
        input_names: a name for each input of the program, in their order.
        output_names: a name for each output, in their order.
        feature: the function that needs onnx, for the error.

    Returns:
        The path of the file.

    Raises:
        ImportError: if onnx or onnxscript is not installed.
    """
    require_onnx(feature)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and onnxscript
        onnx_program = torch.onnx.export(
            program, (), dynamo=True, input_names=list(input_names), verbose=False
        )
    if onnx_program is None:
        raise RuntimeError("torch.onnx.export returned no program")
    graph = onnx_program.model.graph
    names = {id(value): name for value, name in zip(graph.outputs, output_names, strict=True)}
    for value in (value for node in graph for value in node.outputs):
        # The exporter names outputs without checking intermediate values, some of which have the
        # same names.
        value.name = names.get(id(value), f"{value.name}_")
    with writing(path) as stream:
        stream.write(onnx_program.model_proto.SerializeToString())
    return Path(path)


def require_onnx(feature: str) -> None:
    """Raise an ImportError with the command to install what writes ONNX files, if it is missing.

    Args:
        feature: the function that needs it.
    """
    with extra("onnx", feature):
        import onnxscript  # noqa: F401  the exporter of torch is made with it

"""A posterior of a run as a small exported program, from raw rows to predictions in original units."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from bayou.data.catalogue import DataError
from bayou.data.encoders import MAX_DEVIATIONS, Number
from bayou.data.preprocess import ImagePreprocessor, Preprocessor, TablePreprocessor
from bayou.files import StrPath, writing
from bayou.network import Network
from bayou.operations import compress as make_small
from bayou.operations.export import export
from bayou.posteriors import Empirical, Posterior
from bayou.runs.folder import Run, RunError


def compress(
    folder: StrPath,
    out: StrPath,
    *,
    method: str | None = None,
    seed: int | None = None,
    threshold: float | None = None,
    keep: float | None = None,
    bits: bool = False,
    force: bool = False,
) -> str:
    """Compress a posterior of a run and write it as a program of torch.export; returns a summary of the compression.

    The program takes x (B, columns), a number for each column of the table in the order of ``columns.json`` in the file
    (NaN where it is missing, of categories the place among its levels, −1 for another), or pixels (B, C, H, W). It
    gives "outputs" of the network, "mean" (probabilities of classes, or y in its units), "std" of y given the weights.
    """
    path = Path(out)
    if path.exists() and not force:
        raise RunError(f"{path} already exists; choose another --out, or use --force to overwrite it")
    run = Run.open(folder)
    posterior, preprocessor, job = run.posterior(method, seed)
    if not _has_spread(posterior):
        raise RunError(
            f"the weights of {job.name} have no variance that shows which units are irrelevant; compress a method "
            "with a variance for each weight: sparse (made for this), ffg, mnf, ivon"
        )
    x = torch.zeros(2, *run.facts()["input_shape"], dtype=next(iter(posterior.like().values())).dtype)
    try:
        rows = run.load_data(job.split).test
    except (DataError, OSError):  # the run may have come here without its data
        rows = None
    small: Any = make_small(posterior, threshold, keep=keep, bits=bits, example_x=x.to(_device(posterior)), data=rows)
    program = as_program(posterior, small, preprocessor, x)
    described = {
        "columns": [vars(column) for column in getattr(preprocessor, "columns", ())],
        "classes": preprocessor.class_names,
        "method": job.name,
    }
    with writing(path) as stream:
        torch.export.save(program, stream, extra_files={"columns.json": json.dumps(described, indent=1)})
    return str(small.compression)


def _has_spread(posterior: Posterior) -> bool:
    draws = posterior.sample(2, seed=0)
    return any(not torch.equal(*draws[name]) for name, _ in posterior.target.net.named_parameters())


def _device(posterior: Posterior) -> torch.device:
    return next(iter(posterior.like().values())).device


@torch.no_grad()
def as_program(posterior: Posterior, small: nn.Module, preprocessor: Preprocessor, x: Tensor) -> ExportedProgram:
    """The small network as a point posterior, exported together with the preprocessing."""
    small = small.cpu().requires_grad_(False)
    target = replace(posterior.target.copy(), net=small)
    target.likelihood.cpu()
    point = Empirical(target, Network(small), {name: value[None] for name, value in small.state_dict().items()})
    point.temperature = posterior.temperature
    inner = export(point, x, samples=1)
    raw = torch.zeros(2, len(preprocessor.columns)) if isinstance(preprocessor, TablePreprocessor) else x.float()
    module = _AsInFile(preprocessor, inner.module(), x.dtype)
    return torch.export.export(module, (raw,), dynamic_shapes=({0: Dim.DYNAMIC},))


@final
class _AsInFile(nn.Module):
    """Raw rows of the file → inputs of the network → predictions in the units of the file."""

    def __init__(self, preprocessor: Preprocessor, program: nn.Module, dtype: torch.dtype) -> None:
        super().__init__()
        self.preprocessor, self.program, self.dtype = preprocessor, program, dtype

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        """A dict of predictions; numbers in the units of the target."""
        found = self.program(self._encoded(x.double()).to(self.dtype))
        if self.preprocessor.task == "regression":
            scale = self.preprocessor.y_scale
            found = found | {"mean": self.preprocessor.original(found["mean"]), "std": found["std"] * scale}
        return {name: found[name] for name in ("outputs", "mean", "std")}

    def _encoded(self, x: Tensor) -> Tensor:
        """``Preprocessor.encode`` for tensors."""
        if isinstance(self.preprocessor, ImagePreprocessor):
            mean, scale = (x.new_tensor(v).reshape(-1, 1, 1) for v in (self.preprocessor.mean, self.preprocessor.scale))
            return (x / self.preprocessor.white - mean) / scale
        assert isinstance(self.preprocessor, TablePreprocessor)
        parts: list[Tensor] = []
        for column, values in zip(self.preprocessor.columns, x.unbind(1), strict=True):
            if isinstance(column, Number):
                lost = values.isnan()
                scaled = (torch.where(lost, column.median, values) - column.mean) / column.scale
                parts += [scaled.clamp(-MAX_DEVIATIONS, MAX_DEVIATIONS), lost.to(x.dtype)][: len(column.features)]
            else:
                parts += [(values == place).to(x.dtype) for place in range(len(column.levels))]
        return torch.stack(parts, 1)

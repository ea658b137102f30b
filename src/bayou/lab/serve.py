"""Using a run folder: predictions for new rows, scores on other data, one page from several runs."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bayou import metrics
from bayou.lab.data.preprocess import Preprocessor
from bayou.lab.runs import Job, Run, RunError, report, write_text
from bayou.posteriors import Posterior
from bayou.predictive import Predictive

ROWS = 4096  # predicted at a time


def predict(
    folder: str | os.PathLike[str],
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    method: str | None = None,
    seed: int | None = None,
    samples: int = 100,
    level: float = 0.9,
    force: bool = False,
) -> list[str]:
    """Predict the rows of a file and write a CSV; notes about what was odd in the file.

    Classes: row, class, probability, entropy, mutual_information, p(...) of every class. Numbers: row, mean, std,
    epistemic_std, lower, upper (the central interval of probability ``level``), entropy, mutual_information.
    """
    path = Path(out)
    if path.exists() and not force:
        raise RunError(f"{path} exists already; choose another --out, or --force to write over it")
    if not 0 < level < 1:
        raise RunError(f"level must lie between 0 and 1, got {level}")
    posterior, preprocessor, _ = Run.open(folder).posterior(method, seed)
    rows = preprocessor.rows(source)
    x = rows.x.to(next(iter(posterior.like().values())).dtype)
    lines: list[list[str]] = []
    for start in range(0, len(x), ROWS):
        p = posterior.predict(x[start : start + ROWS], samples=samples, seed=0)
        lines += _lines(p, preprocessor, level)
    numbers = [str(index + 1) for index in rows.kept]
    part = path.with_name(f".{path.name}.part")
    with open(part, "w", newline="", encoding="utf-8") as stream:
        writer = csv.writer(stream)
        writer.writerow(["row", *_heads(preprocessor, level)])
        writer.writerows([number, *line] for number, line in zip(numbers, lines, strict=True))
    part.replace(path)
    return list(rows.notes)


def _heads(preprocessor: Preprocessor, level: float) -> list[str]:
    if preprocessor.task == "classification":
        classes = [f"p({name})" for name in preprocessor.class_names]
        return ["class", "probability", "entropy", "mutual_information", *classes]
    low, high = (f"{100 * q:g}%" for q in (0.5 - level / 2, 0.5 + level / 2))
    return ["mean", "std", "epistemic_std", low, high, "entropy", "mutual_information"]


def _lines(p: Predictive, preprocessor: Preprocessor, level: float) -> list[list[str]]:
    if preprocessor.task == "classification":
        mean = p.mean
        best = mean.argmax(-1)
        names = [preprocessor.class_names[index] for index in best.tolist()]
        columns = [mean.max(-1).values, p.entropy, p.mutual_information, *mean.unbind(-1)]
        return [[name, *numbers] for name, numbers in zip(names, _text(columns), strict=True)]
    low, high = p.interval(level)
    scale, mean_y = preprocessor.y_scale, preprocessor.y_mean
    shift = torch.tensor(scale).log()
    columns = [
        *(value[:, 0] * factor + offset for value, factor, offset in (
            (p.mean, scale, mean_y),
            (p.std, scale, 0.0),
            (p.epistemic_std, scale, 0.0),
            (low, scale, mean_y),
            (high, scale, mean_y),
        )),
        p.entropy + shift,
        p.mutual_information,
    ]  # fmt: skip
    return _text(columns)


def _text(columns: list[Tensor]) -> list[list[str]]:
    return [[f"{value:.6g}" for value in row] for row in torch.stack([c.double().cpu() for c in columns], 1).tolist()]


def evaluate(
    folder: str | os.PathLike[str], source: str | None, *, method: str | None = None, samples: int = 100
) -> tuple[list[dict[str, Any]], list[str]]:
    """Scores of every finished method of a run (or of one), on a file or on its own test data; and notes."""
    run = Run.open(folder)
    jobs = [job for job in run.jobs if method in (None, job.method) and (run.place(job) / "posterior.bayou").exists()]
    if not jobs:
        raise RunError(f"{folder} has no finished {method or 'method'}; `bayou resume {folder}` finishes it")
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    x: Tensor | None = None
    y: Tensor | None = None
    for job in jobs:
        posterior, preprocessor, _ = run.posterior(job.method, job.seed)
        if x is None:
            if source is None:
                x, y = run.load_data().test
            else:
                rows = preprocessor.rows(source, need_target=True)
                x, y, notes = rows.x, rows.y, list(rows.notes)
        assert y is not None
        found.append(_score(posterior, job, x, y, preprocessor, samples))
    return found, notes


def _score(
    posterior: Posterior, job: Job, x: Tensor, y: Tensor, preprocessor: Preprocessor, samples: int
) -> dict[str, Any]:
    like = next(iter(posterior.like().values()))
    p = posterior.predict(x.to(like.dtype), samples=min(samples, posterior.draws or samples), seed=0)
    y = (y.to(like.dtype) if y.is_floating_point() else y).to(p.outputs.device)
    return {"method": job.name} | metrics.summary(p, y, scale=preprocessor.y_scale)


def join_reports(folders: list[Path], out: Path, command: str) -> Path:
    """One page from several runs on the same data; methods that occur twice get the name of their folder."""
    runs = [Run.open(folder) for folder in folders]
    facts = runs[0].facts()
    results: list[dict[str, Any]] = []
    failures: dict[str, str] = {}
    for run in runs:
        if run.config.data != runs[0].config.data or run.config.split != runs[0].config.split:
            first, other = runs[0].config, run.config
            raise RunError(
                f"{run.folder} is about {other.data} (split {other.split}), {runs[0].folder} about {first.data} (split "
                f"{first.split}); a page compares methods on the same data"
            )
        failures |= run.failures()
        for result in run.results():
            taken = {(r["label"], r["seed"]) for r in results}
            if (result["label"], result["seed"]) in taken:
                result = result | {"label": f"{result['label']} ({run.folder.name})"}
            results.append(result)
    if not results:
        raise RunError(f"none of {', '.join(map(str, folders))} has a finished method")
    write_text(out, report(results, runs[0].config, facts, command, failures))
    return out

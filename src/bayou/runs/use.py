"""Using a run folder: predictions for new rows, and scores on other data."""

from __future__ import annotations

import csv
import io
import math
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

import bayou
from bayou.data import CATALOGUE
from bayou.data.preprocess import Preprocessor, Rows
from bayou.files import StrPath, write_text
from bayou.posteriors import Posterior
from bayou.posteriors.checks import describe_flag
from bayou.predictive import Predictive, check_level
from bayou.progress import spell
from bayou.runs.folder import Run, RunError

if TYPE_CHECKING:
    from bayou.diagnostics.baselines import Baseline
    from bayou.report.page import Report

ROWS = 2048  # predicted at a time
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r")


def predict(
    folder: StrPath,
    source: StrPath,
    out: StrPath,
    *,
    method: str | None = None,
    seed: int | None = None,
    samples: int | None = None,
    level: float = 0.9,
    force: bool = False,
    conformal: StrPath | None = None,
) -> list[str]:
    """Predict the rows of a file and write a CSV; returns notes about the file.

    Classes: row, class, probability, entropy, mutual_information, p(...) of every class. Numbers:
    row, mean, std, epistemic_std, lower, upper (the central interval of probability ``level``),
    entropy, epistemic_share_of_variance. Both have the id of a row, if the run has an id column,
    and for a table its ``distance`` beyond the range of the training data, in standard deviations
    (``bayou.data.preprocess.Rows``). A text that a spreadsheet would run as a formula, since it
    begins with =, +, -, @, a tab or a carriage return, has a quote before it. ``samples`` networks
    are averaged: by default as in the run, and at most as many as there are.
    ``conformal``: a file of rows with their target that were not used in training; it adds
    conformal_lower and conformal_upper, or conformal_set (classes separated by |), which contain y
    for a fraction ``level`` of all rows, whether or not the posterior is calibrated.
    """
    path = Path(out)
    if path.exists() and path.resolve() == Path(source).resolve():
        raise RunError(f"{path} is the input file; choose another --out")
    if path.exists() and not force:
        raise RunError(
            f"{path} already exists; choose another --out, or use --force to overwrite it"
        )
    check_level(level)
    run = Run.open(folder)
    posterior, preprocessor, job = run.posterior(method, seed)
    samples = count(posterior, samples, run)
    rows = preprocessor.rows(source)
    dtype = next(iter(posterior.like().values())).dtype
    x, notes = rows.x.to(dtype), [*run.describe_interruption(job, posterior), *rows.notes]
    guarantee = None
    if conformal is not None:
        held = preprocessor.rows(conformal, need_target=True)
        guarantee = _guarantee(run, posterior, held, dtype, level, samples)
        notes += [f"{conformal}: {note}" for note in held.notes]
    columns: dict[str, list[str]] = {}
    for start in range(0, len(x), ROWS):
        p = posterior.predict(x[start : start + ROWS], samples=samples, seed=0)
        found = said(p, preprocessor, level) | (
            {} if guarantee is None else _held(guarantee, p, preprocessor)
        )
        for name, cells in found.items():
            columns.setdefault(name, []).extend(cells if isinstance(cells, list) else _text(cells))
    before = {"row": [str(index + 1) for index in rows.kept]}
    if rows.ids is not None:
        name = str(preprocessor.id)
        before[f"{name} (id)" if name in ("row", "distance", *columns) else name] = rows.ids
    if rows.distance is not None:
        columns["distance"] = [f"{value:.4g}" for value in rows.distance]
        far = int((rows.distance > 1).sum())
        if far:
            notes.append(
                f"{far} of {len(x)} rows lie more than a standard deviation outside the range of the training data: "
                "see the column distance."
            )
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    table = before | columns
    writer.writerow(map(escape_formula, table))
    writer.writerows(map(escape_formula, row) for row in zip(*table.values(), strict=True))
    write_text(path, stream.getvalue())
    return notes


def escape_formula(cell: str) -> str:
    """Put a quote before a text that a spreadsheet would run as a formula; numbers stay as they
    are.

    Args:
        cell: the text of a cell.
    """
    if not cell.startswith(FORMULA_STARTS):
        return cell
    try:
        float(cell)
    except ValueError:
        return f"'{cell}"
    return cell


def count(posterior: Posterior, samples: int | None, run: Run) -> int:
    """The number of networks to average: as given, else as in the run, and at most as many as there
    are.
    """
    wanted = run.config.samples if samples is None else samples
    if wanted < 1:
        raise RunError(f"{spell('samples', '--samples')} must be at least 1, got {wanted}")
    return min(wanted, posterior.draws or wanted)


def said(p: Predictive, preprocessor: Preprocessor, level: float) -> dict[str, list[str] | Tensor]:
    """The predictions of each row in original units: the columns of the output file."""
    if preprocessor.task == "classification":
        mean, names = p.mean, preprocessor.class_names
        numbers = {
            "probability": mean.max(-1).values,
            "entropy": p.entropy,
            "mutual_information": p.mutual_information,
        }
        numbers |= {f"p({name})": mean[:, k] for k, name in enumerate(names)}
        return {"class": [names[k] for k in mean.argmax(-1).tolist()], **numbers}
    scale, shift = preprocessor.y_scale, preprocessor.y_mean
    ends = [f"{100 * q:g}%" for q in (0.5 - level / 2, 0.5 + level / 2)]
    places = {"mean": p.mean, **dict(zip(ends, p.interval(level), strict=True))}
    found = {name: value[:, 0].double() * scale + shift for name, value in places.items()}
    found |= {name: getattr(p, name)[:, 0].double() * scale for name in ("std", "epistemic_std")}
    found["entropy"] = p.entropy + math.log(scale)
    # Not the mutual information: the entropy of a density can be negative, so that it says little
    # beside it.
    found["epistemic_share_of_variance"] = _epistemic_share(p)
    order = ("mean", "std", "epistemic_std", *ends, "entropy", "epistemic_share_of_variance")
    return {name: found[name] for name in order}


def _epistemic_share(p: Predictive) -> Tensor:
    """The part of the predictive variance of each row that more data would reduce, from 0 to 1; 0
    without any.
    """
    std = p.std[:, 0].double()
    share = (p.epistemic_std[:, 0].double() / std).square().clamp(0.0, 1.0)
    return torch.where(std == 0, torch.zeros_like(share), share)


def _guarantee(
    run: Run, posterior: Posterior, held: Rows, dtype: torch.dtype, level: float, samples: int
) -> bayou.operations.Conformal:
    """The conformal guarantee by rows of a file, which must not be training rows."""
    assert held.y is not None
    y = held.y.to(dtype) if held.y.is_floating_point() else held.y
    try:
        train = run.load_data().train
    except ValueError:  # no longer available
        train = None
    return bayou.operations.conformal(
        posterior, (held.x.to(dtype), y), level, samples=samples, seed=0, train=train
    )


def _held(
    guarantee: bayou.operations.Conformal, p: Predictive, preprocessor: Preprocessor
) -> dict[str, list[str] | Tensor]:
    """Conformal intervals or sets as text."""
    if preprocessor.task == "classification":
        names = preprocessor.class_names
        sets = guarantee.set(p).tolist()
        return {
            "conformal_set": [
                "|".join(n for n, inside in zip(names, row, strict=True) if inside) for row in sets
            ]
        }
    ends = zip(("conformal_lower", "conformal_upper"), guarantee.interval(p), strict=True)
    return {name: preprocessor.original(end[:, 0].double()) for name, end in ends}


def _text(values: Tensor) -> list[str]:
    return [f"{value:.8g}" for value in values.double().tolist()]


def evaluate(
    folder: StrPath, source: str | None, *, method: str | None = None, samples: int | None = None
) -> tuple[list[dict[str, Any]], list[str]]:
    """Scores of every finished method of a run (or of one), on a file or on its own test data; and
    notes.

    Notes are about the rows, and every result of ``bayou.diagnostics.check`` that is not ok.
    """
    from bayou.report.judge import prediction, score

    run = Run.open(folder)
    jobs = [job for job in run.finished() if method in (None, job.method)]
    if not jobs:
        raise RunError(run.lacks(method))
    if source == run.config.data and source in CATALOGUE:
        source = None
    elif source in CATALOGUE:
        raise RunError(
            f"{folder} was trained on {run.config.data}, not {source}; give --data a file, or omit it"
        )
    found: list[dict[str, Any]] = []
    notes: list[str] = []
    x = y = ood = None
    against = _baselines(run)
    for job in jobs:
        posterior, preprocessor, _ = run.posterior(job.method, job.seed)
        if x is None and source is None:
            data = run.load_data()
            (x, y), ood = data.test, data.ood
        elif x is None:
            rows = preprocessor.rows(source, need_target=True)
            x, y, notes = rows.x, rows.y, [*notes, *rows.notes]
        notes += [note for note in run.describe_interruption(job, posterior) if note not in notes]
        assert x is not None
        assert y is not None
        dtype = next(iter(posterior.like().values())).dtype  # as in the run, for the same scores
        test = (x.to(dtype), y.to(dtype) if y.is_floating_point() else y)
        options = prediction(posterior, count(posterior, samples, run), job.seed)
        away = None if ood is None else ood.to(dtype)
        p, _, scores = score(posterior, test, away, preprocessor.y_scale, options)
        checks = bayou.diagnostics.check(
            posterior, None, test, scale=preprocessor.y_scale, against=against, predictive=p
        )
        notes += [
            f"{job.name}: {describe_flag(flag.name, flag.status, flag.text)}"
            for flag in checks.flags
        ]
        found.append({"method": job.name} | scores)
    return found, notes


def report(
    folders: Sequence[StrPath], out: StrPath | None = None, *, force: bool = False
) -> tuple[Path, list[str]]:
    """Write the report of a run again, or one page that compares several runs on the same test
    rows.

    Returns the file (by default that of the run, or comparison.html) and the conclusion in
    sentences. Methods of several runs have the names of their folders, and all are compared with
    the first.
    """
    from bayou.report.page import Report

    pages = {str(folder): Run.open(folder).report() for folder in folders}
    (name, page), *others = pages.items()
    path = Path(out or ("comparison.html" if others else f"{name}/report.html"))
    if path.exists() and not force and (others or out is not None):
        raise RunError(
            f"{path} already exists; choose another --out, or use --force to overwrite it"
        )
    if others:
        splits = _shared_splits(pages)
        results = []
        for folder, own in pages.items():
            for one in (one for one in own.results.all if one["split"] in splits):
                label = folder if len(own.results.labels) == 1 else f"{folder}: {one['label']}"
                seed = (
                    one["seed"] - own.results.all[0]["seed"]
                )  # the first seeds of two runs are a pair
                results.append(one | {"label": label, "seed": seed})
        commands = [
            *(own.config["command"] for own in pages.values()),
            f"bayou report {shlex.join(pages)}",
        ]
        shown = {"runs": len(pages), "notes": [], "failures": {}, "command": "\n".join(commands)}
        page = Report(results, page.config | shown | {"reference": results[0]["label"]})
    write_text(path, page.html(), through_links=out is not None)
    return path, page.verdict


def _shared_splits(pages: dict[str, Report]) -> set[int]:
    """The splits that all runs have; a RunError unless these have the same test rows in the same
    order.
    """
    known = {}
    for name, page in pages.items():
        facts = page.results.facts
        parts = {facts["split"]: facts} | {
            int(split): one for split, one in facts["splits"].items()
        }
        known[name] = {split: one.get("targets", []) for split, one in parts.items()}
    (first, ours), *others = known.items()
    for name, theirs in others:
        for split in ours.keys() & theirs.keys():
            got, expected = theirs[split], ours[split]
            near = (
                math.isclose(a, b, rel_tol=1e-4, abs_tol=1e-9)
                for a, b in zip(got, expected, strict=False)
            )
            if len(got) != len(expected) or not got or not all(near):
                each = (
                    f"{len(y):,} rows, y = {', '.join(f'{v:g}' for v in y[:4])}, ..."
                    for y in (got, expected)
                )
                raise RunError(
                    f"{name} was not tested on the rows of {first}: got {next(each)}; expected {next(each)}; "
                    "differences are paired over rows: give runs with the same data, --target, --task and --split"
                )
    shared = set.intersection(*(set(one) for one in known.values()))
    if not shared:
        got = ", ".join(f"{name} has {sorted(one)}" for name, one in known.items())
        raise RunError(
            f"these runs have no split in common: {got}; train them with the same --split"
        )
    return shared


def _baselines(run: Run) -> dict[str, Baseline]:
    """Baselines of the training data, if these are still available."""
    try:
        return run.baselines(run.load_data())
    except ValueError:
        return {}

"""The page of the study of tables, from its rows alone: summaries, differences, all numbers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from experiments import study
from experiments.study import Found
from experiments.tables.contestants import MODE, MODELS, NAMES, OWN, applies, title
from experiments.tables.jobs import LIMIT, OK, OVER_TIME
from experiments.tables.scores import CLASS_SCORES, NUMBER_SCORES
from experiments.tables.sources import REPORTED, TABLES, TUNING, Table

Row = dict[str, Any]
MARGIN = 0.02  # nats behind the best that count
TASKS = {"regression": "Numbers", "classification": "Classes"}
COLUMNS = {"regression": NUMBER_SCORES, "classification": CLASS_SCORES}
HEADS = {
    "nll": "NLL",
    "crps": "CRPS",
    "rmse": "RMSE",
    "coverage": "90 % covers",
    "width": "width",
    "brier": "Brier",
    "error": "error",
    "ece": "ECE",
    "seconds": "s",
    "megabytes": "MB",
}
GROUPS = {
    "uci": "UCI, published splits",
    "mile": "UCI, the tables of MILE",
    "real": "Tables as people have them",
    "generated": "Generated",
    "large": "Large",
}
# RMSE and NLL in standard deviations of y, as published.
PUBLISHED = {
    "airfoil": {"bde": (0.1215, -0.913), "TabPFN v2": (0.1359, -0.934)},
    "bikesharing": {"bde": (0.2261, -0.7315), "TabPFN v2": (0.2103, -0.6856)},
}
INTRODUCTION = (
    "`bayou train` as it comes beside models of other libraries with the defaults of their "
    "documentation, on the same rows. UCI sets have their published splits; of the others a fifth "
    "of the rows is tested on, generated tables on fresh rows. Numbers are means over splits ± one "
    "standard error; where a model was tried on fewer splits than bayou, ranks and the best row "
    "count by the mean difference on these splits. Scores are in the units of y. "
    "Times are processor seconds of the fit on one thread (with the prediction for other "
    "libraries), memory is that above the imports. Rows that give quantiles only have no NLL; a "
    "model without a noise of its own has that of held-out residuals. A fit that is over time was "
    f"stopped: after {LIMIT:.0f} s or more of a machine that also did other things. Settings of "
    "bayou are chosen on other tables, listed at the end, which no summary counts."
)


def render(heading: str, found: Found) -> str:
    """Return the page in markdown.

    Args:
        heading: its title.
        found: rows and runs.
    """
    lines = [f"# {heading}", "", INTRODUCTION, ""]
    for task in TASKS:
        lines += _summary(found, task)
    lines += _behind_best(found)
    lines += _by_name(found)
    lines += _published(found)
    for group, group_title in GROUPS.items():
        names = [name for name, table in REPORTED.items() if table.group == group]
        lines += _group(found, names, group_title)
    lines += _group(found, list(TUNING), "Tables for tuning, which no summary counts")
    lines += _not_run(found)
    return "\n".join([*lines, study.made_by(found), ""])


# --- rows ----------------------------------------------------------------------------------------


def select(found: Found, table: str, label: str) -> list[Row]:
    """Return the rows of a table and a label with scores, one for each split.

    Args:
        found: rows and runs.
        table: its name.
        label: of the row.
    """
    return [
        row
        for row in found["rows"]
        if row["data"] == table and row["label"] == label and row["status"] == OK
    ]


def mean_scores(
    found: Found, table: str, name: str, labels: Sequence[str] = MODELS
) -> dict[str, float]:
    """Return the mean of a score over the splits of a table, by label.

    The splits are those of the first label. A row that was tried on fewer of them counts by its
    mean difference to the first label on these splits, so that easy splits favor no row. Labels
    that have no score of a split that they were tried on are left out. Without the first label the
    means are over common splits.

    Args:
        found: rows and runs.
        table: its name.
        name: of the score.
        labels: of the rows that are compared; by default those of models, without names.
    """
    values = {label: _scores_of_splits(found, table, label, name) for label in labels}
    base = values[labels[0]]
    if not base or None in base.values():
        return _means_of_common_splits(found, table, values)
    means: dict[str, float] = {}
    for label, scores in values.items():
        shared = [split for split in scores if split in base]
        if not shared or any(scores[split] is None for split in shared):
            continue
        differences = [scores[split] - base[split] for split in shared]  # type: ignore[operator]
        means[label] = fmean(base.values()) + fmean(differences)  # type: ignore[arg-type]
    return means


def _scores_of_splits(found: Found, table: str, label: str, name: str) -> dict[int, float | None]:
    """Return a score of the splits that a row was tried on; None where there is no score."""
    return {
        row["seed"]: row.get(name) if row["status"] == OK else None
        for row in found["rows"]
        if row["data"] == table
        and row["label"] == label
        and not row["status"].startswith("not run")
    }


def _means_of_common_splits(
    found: Found, table: str, values: Mapping[str, Mapping[int, float | None]]
) -> dict[str, float]:
    """Return the means over the splits that every row was tried on."""
    splits = common_splits(found, table, tuple(values))
    means: dict[str, float] = {}
    for label, scores in values.items():
        known = [value for split in splits if (value := scores.get(split)) is not None]
        if known and len(known) == len(splits):
            means[label] = fmean(known)
    return means


def common_splits(found: Found, table: str, labels: Sequence[str] = MODELS) -> set[int]:
    """Return the splits of a table on which every row was tried that was tried on any.

    Args:
        found: rows and runs.
        table: its name.
        labels: of the rows that are compared; by default those of models, without names.
    """
    by_label: dict[str, set[int]] = {}
    for row in found["rows"]:
        is_tried = row["data"] == table and not row["status"].startswith("not run")
        if is_tried and row["label"] in labels:
            by_label.setdefault(row["label"], set()).add(row["seed"])
    return set.intersection(*by_label.values()) if by_label else set()


def ranks(scores: Mapping[str, float]) -> dict[str, float]:
    """Return ranks from 1, the lowest score first; equal scores share the mean of their ranks.

    Args:
        scores: by label.
    """
    ordered = sorted(scores.values())
    return {
        label: fmean(place + 1 for place, other in enumerate(ordered) if other == value)
        for label, value in scores.items()
    }


def _tried(found: Found, table: Table, label: str) -> bool:
    """Return whether a row counts for a table: it was run, and its model is for such tables."""
    rows = [row for row in found["rows"] if row["data"] == table.name and row["label"] == label]
    is_run = any(not row["status"].startswith("not run") for row in rows)
    return is_run and applies(label, table)


def complete_scores(found: Found, table: Table, name: str) -> dict[str, float]:
    """Return mean scores by label; infinity for a row that failed or took too long.

    Args:
        found: rows and runs.
        table: of the study.
        name: of the score.
    """
    scores = mean_scores(found, table.name, name)
    for label in MODELS:
        has_score = any(
            row.get(name) is not None
            for other in TABLES.values()
            if other.task == table.task
            for row in select(found, other.name, label)
        )
        if label not in scores and has_score and _tried(found, table, label):
            scores[label] = math.inf
    return scores


# --- parts of the page ---------------------------------------------------------------------------


def _summary(found: Found, task: str) -> list[str]:
    """Return ranks, wins and losses of every row over the reported tables of a task."""
    tables = [table for table in REPORTED.values() if table.task == task]
    by_nll = [scores for table in tables if (scores := complete_scores(found, table, "nll"))]
    second = "crps" if task == "regression" else "brier"
    by_second = [scores for table in tables if (scores := complete_scores(found, table, second))]
    if not by_nll:
        return []
    heads = ["row", "tables", "mean rank, NLL", "best", f"> {MARGIN} behind the best"]
    heads += [f"mean rank, {HEADS[second]}", "best", "median s", "over time", "failed"]
    if task == "regression":
        heads.append("mean cover of 90 %")
    lines = [
        f"## {TASKS[task]}",
        "",
        f"Over {len(by_nll)} tables. A row that failed or took too long has the last rank.",
        "",
        f"| {' | '.join(heads)} |",
        f"|---|{'---:|' * (len(heads) - 1)}",
    ]
    order = {label: _mean_rank(by_second, label) for label in MODELS}
    for label in sorted(MODELS, key=lambda name: order[name]):
        rows = [row for table in tables for row in select(found, table.name, label)]
        if not rows:
            continue
        states = Counter(
            row["status"].split(":")[0]
            for row in found["rows"]
            if row["label"] == label and row["data"] in {table.name for table in tables}
        )
        cells = [title(label), str(sum(label in scores for scores in by_second))]
        cells += [_number(_mean_rank(by_nll, label)), _count_best(by_nll, label)]
        cells.append(_count_behind(by_nll, label))
        cells += [_number(order[label]), _count_best(by_second, label)]
        cells.append(f"{median(row['seconds'] for row in rows):.1f}")
        cells += [str(states.get(OVER_TIME, 0) or ""), str(states.get("failed", 0) or "")]
        if task == "regression":
            covers = [row["coverage"] for row in rows if row.get("coverage") is not None]
            cells.append(f"{fmean(covers):.3f}" if covers else "")
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _mean_rank(tables: Sequence[Mapping[str, float]], label: str) -> float:
    """Return the mean rank of a label over the tables that have it; infinity without any."""
    places = [ranks(scores)[label] for scores in tables if label in scores]
    return fmean(places) if places else math.inf


def _number(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else ""


def _count_best(tables: Sequence[Mapping[str, float]], label: str) -> str:
    mine = [scores for scores in tables if label in scores]
    if not mine:
        return ""
    return str(sum(scores[label] == min(scores.values()) for scores in mine))


def _count_behind(tables: Sequence[Mapping[str, float]], label: str) -> str:
    mine = [scores for scores in tables if label in scores]
    if not mine:
        return ""
    count = sum(scores[label] > min(scores.values()) + MARGIN for scores in mine)
    return f"{count} of {len(mine)}"


def _behind_best(found: Found) -> list[str]:
    """Return the tables on which the default of bayou has a higher NLL than some other model."""
    default = MODELS[0]
    lines = []
    for name in REPORTED:
        scores = mean_scores(found, name, "nll")
        best = min(scores, key=lambda label: scores[label], default=default)
        if default not in scores or scores[default] <= scores[best] + MARGIN:
            continue
        differences = paired_differences(found, name, "nll", default, best)
        lines.append(f"| {name} | {best} | {study.cell(differences, 3)} | {len(differences)} |")
    if not lines:
        return []
    return [
        f"## Where {title(default)} is behind the best model by more than {MARGIN} nats",
        "",
        "Mean difference of the NLL over the splits of both, ± one standard error over splits.",
        "",
        "| data | best model | NLL behind it | splits |",
        "|---|---|---:|---:|",
        *lines,
        "",
    ]


def paired_differences(
    found: Found, table: str, name: str, label: str, other: str
) -> list[float | None]:
    """Return a score of one row minus that of another, one for each split that both have.

    Args:
        found: rows and runs.
        table: its name.
        name: of the score.
        label: of the row.
        other: the label of the row that is subtracted.
    """
    subtracted = {row["seed"]: row.get(name) for row in select(found, table, other)}
    return [
        row[name] - value
        for row in select(found, table, label)
        if row.get(name) is not None and (value := subtracted.get(row["seed"])) is not None
    ]


def _by_name(found: Found) -> list[str]:
    """Return the NLL of single methods of bayou beside their mode and the default mixture."""
    labels = (MODELS[0], *NAMES)
    by_table: dict[str, dict[str, float]] = {}
    for name in REPORTED:
        scores = mean_scores(found, name, "nll", labels)
        if sum(label in scores for label in NAMES) > 1:
            by_table[name] = scores
    if not by_table:
        return []
    titles = [title(label).removeprefix(OWN) for label in labels]
    lines = []
    for name, scores in by_table.items():
        texts = [f"{scores[label]:.3f}" if label in scores else "" for label in labels]
        count = len(common_splits(found, name, tuple(scores)))
        lines.append(f"| {name} | {' | '.join(texts)} | {count} |")
    return [
        "## Single methods, by name",
        "",
        "Mean NLL over the splits of the first; of a method with fewer splits by the mean difference.",
        "",
        f"| data | {' | '.join(titles)} | splits |",
        f"|---|{'---:|' * (len(labels) + 1)}",
        *lines,
        "",
        *_behind_own_mode(by_table),
    ]


def _behind_own_mode(by_table: Mapping[str, Mapping[str, float]]) -> list[str]:
    """Return where a method of bayou has a higher NLL than the mode.

    Args:
        by_table: NLL by table and label.
    """
    lines = []
    for label in (*NAMES, MODELS[0]):
        losses = []
        for name, scores in by_table.items():
            if label in scores and OWN + MODE in scores:
                difference = scores[label] - scores[OWN + MODE]
                if difference > MARGIN:
                    losses.append(f"{name} (+{difference:.2f})")
        if losses:
            lines.append(f"- `{label.removeprefix(OWN)}`: {', '.join(losses)}")
    if not lines:
        return [f"No method is behind `map` by more than {MARGIN} nats on any of them.", ""]
    return [f"Behind `map` by more than {MARGIN} nats:", "", *lines, ""]


def _published(found: Found) -> list[str]:
    """Return airfoil and bike sharing in standard deviations of y, beside published figures."""
    lines = []
    for name, figures in PUBLISHED.items():
        for label in MODELS:
            rows = [row for row in select(found, name, label) if row.get("nll") is not None]
            if rows:
                rmse = [row["rmse"] / row["scale"] for row in rows]
                nll = [row["nll"] - math.log(row["scale"]) for row in rows]
                cells = [
                    name,
                    title(label),
                    study.cell(rmse, 3),
                    study.cell(nll, 3),
                    str(len(rows)),
                ]
                lines.append(f"| {' | '.join(cells)} |")
        for label, (rmse_published, nll_published) in figures.items():
            lines.append(f"| {name} | {label}, published | {rmse_published} | {nll_published} | |")
    if all("published" in line for line in lines):
        return []
    return [
        "## Beside published figures",
        "",
        "RMSE and NLL in standard deviations of y. Published (the paper of sklearn-contrib-bde and "
        "MILE, Sommer 2025): other splits, networks of four layers of 16 units, ten members, "
        "1,000 draws each.",
        "",
        "| data | row | RMSE | NLL | splits |",
        "|---|---|---:|---:|---:|",
        *lines,
        "",
    ]


def _group(found: Found, names: Sequence[str], heading: str) -> list[str]:
    """Return all numbers of some tables: means over splits ± one standard error."""
    lines = []
    for task, columns in COLUMNS.items():
        rows = [
            line
            for name in names
            if TABLES[name].task == task
            for line in _table_lines(found, name, columns)
        ]
        if rows:
            heads = [HEADS[column] for column in (*columns, "seconds", "megabytes")]
            lines += [
                f"| data | row | {' | '.join(heads)} | splits |",
                f"|---|---|{'---:|' * (len(heads) + 1)}",
                *rows,
                "",
            ]
    return [f"## {heading}", "", *lines] if lines else []


def _table_lines(found: Found, name: str, columns: Sequence[str]) -> list[str]:
    """Return the lines of one table; the lowest mean of a score but coverage and width is bold."""
    best = {
        column: min(mean_scores(found, name, column).values(), default=None)
        for column in columns
        if column not in ("coverage", "width")
    }
    lines = []
    for label in MODELS:
        rows = select(found, name, label)
        if not rows:
            continue
        cells = []
        for column in columns:
            text = _cell([row.get(column) for row in rows])
            mean = mean_scores(found, name, column).get(label)
            is_best = column in best and mean is not None and mean == best[column]
            cells.append(f"**{text}**" if is_best else text)
        seconds = fmean(row["seconds"] for row in rows)
        memory = fmean(row["megabytes"] for row in rows)
        cells += [f"{seconds:.1f}", f"{memory:.0f}", str(len(rows))]
        lines.append(f"| {name} | {title(label)} | {' | '.join(cells)} |")
    return lines


def _cell(values: Sequence[float | None]) -> str:
    """Return a mean ± one standard error, with three digits after the point of small numbers."""
    known = [abs(value) for value in values if value is not None]
    large = max(known, default=0.0)
    digits = 3
    if large >= 1000:
        digits = 0
    elif large >= 100:
        digits = 1
    return study.cell(values, digits)


def _not_run(found: Found) -> list[str]:
    """Return which rows have no scores, and why."""
    reasons: dict[tuple[str, str], set[str]] = {}
    for row in found["rows"]:
        if row["status"] != OK:
            reasons.setdefault((row["label"], row["status"]), set()).add(row["data"])
    lines = [
        f"- {label}: {status} ({', '.join(sorted(tables))})"
        for (label, status), tables in sorted(reasons.items())
    ]
    return ["## Without scores", "", *lines, ""] if lines else []


# --- the picture ---------------------------------------------------------------------------------


def draw(found: Found, path: Path) -> bool:
    """Draw the NLL of every row minus that of the best row of a table, one dot for each table.

    Args:
        found: rows and runs.
        path: of the picture.

    Returns:
        Whether there was anything to draw.
    """
    import matplotlib as mpl

    from experiments.plots import STYLE, canvas

    losses: dict[str, list[float]] = {}
    for name in REPORTED:
        scores = mean_scores(found, name, "nll")
        for label, value in scores.items():
            losses.setdefault(label, []).append(value - min(scores.values()))
    if sum(map(len, losses.values())) < 2:
        return False
    order = sorted(losses, key=lambda label: median(losses[label]), reverse=True)
    with mpl.rc_context(STYLE):
        figure = canvas(8, 0.34 * len(order) + 1.2)
        axes = figure.subplots()
        for place, label in enumerate(order):
            color = "#d1732f" if label.startswith(OWN) else "#3b75af"
            shown = [min(value, 2.0) for value in losses[label]]
            axes.plot(shown, [place] * len(shown), "o", color=color, alpha=0.45, ms=5, mew=0)
            axes.plot(median(shown), place, "|", color=color, ms=18, mew=2.5)
        axes.set_xscale("symlog", linthresh=MARGIN)
        axes.set_xlim(-MARGIN / 4, 2.2)
        axes.axvline(MARGIN, color="#8a919c", lw=0.8, ls=":")
        axes.set_yticks(range(len(order)), [title(label) for label in order])
        axes.set_xlabel("NLL minus that of the best row, nats; one dot a table, a bar the median")
        figure.savefig(path, dpi=110, metadata={"Software": None})
    return True

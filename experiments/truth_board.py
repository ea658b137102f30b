"""The files of ``bayou.truth``: committed rows of each reference, and the reference of digits.

    python -m experiments.truth_board

makes ``hmc-cifar10.json``, ``hmc-digits.json`` and ``hmc-digits.npz`` of ``src/bayou/truth`` from
``results/hmc-cifar10.json``, ``results/truth.json`` and ``truth_digits.safetensors``. Entries of
other people are in ``truth_entries.json``, as ``bayou score --out`` writes them. Run it after rows
of these results have changed; a test compares the files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load_file

from bayou import truth
from bayou.truth.board import Row, fidelity, mean_row, rows_json
from bayou.truth.predictions import class_predictive
from experiments.hmc_cifar import HMCCifar
from experiments.truth import LINES
from experiments.truth_reference import PROBLEMS

HERE = Path(__file__).parent
PACKAGE = Path(truth.__file__).parent
RESULTS = HERE / "results"
REFERENCE = "HMC"
# Labels that are said by the line above them in the table of results.
FULL_LABELS = {"mixture of 5 of it": "FFG, by unit, β = ½, mixture of 5"}


def cifar10_rows() -> list[Row]:
    """Return the rows of the residual network on CIFAR-10, one for each label and length."""
    found = json.loads((RESULTS / "hmc-cifar10.json").read_text(encoding="utf-8"))
    rows = []
    for group in HMCCifar().lines(found):
        scores = [{**row, "accuracy": row["accuracy"] / 100} for row in group]
        rows.append(mean_row(group[0]["label"], scores))
    return rows


def digits_rows() -> list[Row]:
    """Return the rows of the small network on digits, with its reference."""
    found = json.loads((RESULTS / "truth.json").read_text(encoding="utf-8"))
    tensors = digits_reference()
    predictive = class_predictive(tensors["log_probs"])
    rows = [mean_row(REFERENCE, [fidelity(predictive, predictive, tensors["y"])])]
    for label in (line.label for line in LINES):
        group = [row for row in found["rows"] if (row["data"], row["label"]) == ("digits", label)]
        scores = [
            {**row, "accuracy": 1 - row["error"] / 100, "minutes": row["seconds"] / 60}
            for row in group
        ]
        if scores:
            rows.append(mean_row(FULL_LABELS.get(label, label), scores))
    return rows


def digits_reference() -> dict[str, Any]:
    """Return log P(class) of HMC (359, 10), and the classes (359,), of the test rows of digits."""
    tensors = load_file(PROBLEMS["digits"].path())
    return {"log_probs": tensors["log_probabilities"], "y": tensors["y_test"]}


def entries(against: str) -> list[Row]:
    """Return the entries of other people.

    Args:
        against: the name of the reference.
    """
    found: list[dict[str, Any]] = json.loads(
        (HERE / "truth_entries.json").read_text(encoding="utf-8")
    )
    return [Row(**entry["row"]) for entry in found if entry["against"] == against]


def boards() -> dict[str, str]:
    """Return the text of the file of rows of each reference."""
    rows: dict[str, Sequence[Row]] = {"hmc-cifar10": cifar10_rows(), "hmc-digits": digits_rows()}
    return {name: rows_json([*rows[name], *entries(name)]) for name in truth.REFERENCES}


def main() -> None:
    """The command."""
    for name, text in boards().items():
        (PACKAGE / f"{name}.json").write_text(text, encoding="utf-8")
    tensors = digits_reference()
    np.savez_compressed(
        PACKAGE / "hmc-digits.npz",
        log_probs=tensors["log_probs"].numpy(),
        y=tensors["y"].numpy().astype(np.uint8),
    )


if __name__ == "__main__":
    main()

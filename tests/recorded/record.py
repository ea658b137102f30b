"""Record the results of ``cases.py``, or compare them with a record.

    python -m tests.recorded.record write FILE [PREFIX]
    python -m tests.recorded.record compare FILE [PREFIX]

On one machine with the same torch, an unchanged computation gives the same bits. PREFIX selects
cases by the beginning of their names, such as ``flows/`` or ``regression/vi``.
"""

from __future__ import annotations

import sys
import traceback
import warnings

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.recorded.cases import CASES


def compute(prefix: str) -> tuple[dict[str, Tensor], list[str]]:
    """Return the results of the cases whose names begin with a prefix, and the names of those that
    failed.
    """
    results = {}
    failed = []
    for name, case in CASES.items():
        if not name.startswith(prefix):
            continue
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                torch.manual_seed(0)
                values = case()
        except Exception:
            traceback.print_exc()
            failed.append(name)
            continue
        for key, value in values.items():
            results[f"{name}:{key}"] = value.detach().contiguous().clone()
    return results, failed


def main(action: str, file: str, prefix: str = "") -> int:
    """Write a record, or print what differs from it; return the number of differences."""
    torch.set_num_threads(1)
    results, failed = compute(prefix)
    for name in failed:
        print(f"failed: {name}")
    if action == "write":
        save_file(results, file)
        print(f"{len(results)} results, {len(failed)} failed")
        return len(failed)
    recorded = {name: value for name, value in load_file(file).items() if name.startswith(prefix)}
    differences = 0
    for name in sorted(recorded.keys() | results.keys()):
        before, after = recorded.get(name), results.get(name)
        if before is None or after is None:
            print(f"{'new' if before is None else 'missing'}: {name}")
        elif before.shape != after.shape:
            print(f"shape: {name}: {tuple(before.shape)} before, {tuple(after.shape)} now")
        elif not torch.equal(before.nan_to_num(nan=1e300), after.nan_to_num(nan=1e300)):
            print(
                f"differs: {name}: by at most {float((before.double() - after.double()).abs().max()):.3g}"
            )
        else:
            continue
        differences += 1
    print(f"{len(recorded)} recorded, {differences} differ")
    return differences


if __name__ == "__main__":
    sys.exit(bool(main(*sys.argv[1:])))

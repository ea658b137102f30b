"""What a reader of the README does first, with the installed bayou[lab]: its example, the commands of
the shell, and ``bayou verify``. It needs nothing of the repository: the README is in the metadata.

    python first_use.py            after: pip install 'bayou[lab]'
    python first_use.py --quick    without bayou verify
"""

from __future__ import annotations

import csv
import math
import os
import platform
import re
import subprocess
import sys
import tempfile
from importlib.metadata import metadata
from pathlib import Path

HERE = Path(__file__).resolve().parents[2]


def readme_example() -> str:
    """Return the first block of Python in the README of the installed distribution."""
    text = metadata("bayou").get_payload()
    match = re.search(r"```python\n(.*?)```", str(text), re.DOTALL)
    if match is None:
        raise SystemExit("the metadata of bayou has no README with an example")
    return match[1]


def run(*words: str) -> str:
    """Run a command and return what it printed; an error ends this program."""
    done = subprocess.run(
        words, capture_output=True, text=True, encoding="utf-8", timeout=900, check=False
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(words)} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    print("ok:", " ".join(Path(word).name for word in words))
    return done.stdout


def write_table(path: Path, has_target: bool) -> None:
    """Write 60 rows of a sine of one column."""
    with open(path, "w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["x", "shop", "y"][: 2 + has_target])
        for i in range(60):
            row = [f"{i / 10:.1f}", "ab"[i % 2], f"{math.sin(i / 10) + 0.1 * (i % 2):.4f}"]
            table.writerow(row[: 2 + has_target])


def main() -> None:
    """Run everything in an empty folder."""
    import bayou

    location = Path(bayou.__file__)
    if HERE / "src" in location.parents:
        raise SystemExit(f"bayou is imported from {location}, not from an installed wheel")
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        exec(compile(readme_example(), "README.md", "exec"), {})
        print("ok: the example of the README")
        command = str(Path(sys.executable).with_name("bayou"))
        if bayou.__version__ not in run(command, "--version"):
            raise SystemExit("bayou --version prints another version")
        run(command, "--help")
        run(command, "list", "methods")
        write_table(Path("train.csv"), has_target=True)
        write_table(Path("new.csv"), has_target=False)
        run(command, "train", "train.csv", "--target", "y", "--method", "map", "--steps", "50",
            "--out", "run", "--quiet")  # fmt: skip
        run(command, "predict", "run", "--input", "new.csv", "--out", "predictions.csv")
        with open("predictions.csv", encoding="utf-8") as stream:
            if sum(1 for _ in stream) != 61:
                raise SystemExit("predictions.csv has not one line for each row of new.csv")
        if "--quick" not in sys.argv[1:]:
            run(command, "verify")
        os.chdir(Path(folder).parent)  # Windows removes no current folder
    print(
        f"bayou {bayou.__version__} works on Python {platform.python_version()}, {platform.platform()}"
    )


if __name__ == "__main__":
    main()

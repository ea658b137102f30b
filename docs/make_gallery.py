"""The gallery: run the scripts of ``examples/`` and keep what they print and draw.

    python -m docs.make_gallery              # run the scripts whose result in docs/gallery is out
    of date
    python -m docs.make_gallery laplace mnf  # run these; --all runs every one

A script has cells in the percent format and runs in a process of its own.
``docs/gallery/NAME.json`` keeps the digest of its code, its seconds and what each cell printed,
``NAME-1.png`` and so on its figures. The label of a figure, ``plt.subplots(num="...")``, is its
alternative text. Sphinx makes pages and notebooks from these files and runs no script
(``write_pages``, called by ``conf.py``).
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import sys
import time
import tomllib
from dataclasses import dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CACHE = ROOT / "docs" / "gallery"
MAX_BYTES = 40_000  # of a picture
QUALITY = (
    (96, 256),
    (96, 128),
    (96, 64),
    (80, 64),
    (72, 64),
    (64, 32),
)  # dots per inch and colors, the first that fits
SOURCE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["urls"][
    "Source"
]
# The notebooks of the published site (docs/releasing.md).
COLAB = (
    SOURCE.replace("https://github.com/", "https://colab.research.google.com/github/")
    + "/blob/gh-pages/latest/notebooks"
)
INSTALL = '%pip install -q "bayou[lab]"'
# What examples import beside the lab extra, by the name of the package.
OTHER_LIBRARIES = ("accelerate", "botorch", "lightning", "peft", "transformers")
THEMES = {
    "start": (
        "First steps",
        "What a posterior over weights says, and how to get one for your own network.",
    ),
    "methods": ("Methods", "Each method on the same curve with a gap and on the same two moons."),
    "operations": ("Operations", "What to do with a posterior, whichever method fitted it."),
    "models": (
        "Noise, priors and checks",
        "The parts of the model, and how to see whether they fit.",
    ),
    "flows": ("Flows", "Normalizing flows by kind, on densities that can be drawn."),
    "libraries": (
        "Other libraries",
        "bayou with scikit-learn, Hugging Face, Lightning, BoTorch, a server.",
    ),
}


@dataclass(frozen=True)
class Example:
    """One script, and its result in ``folder``."""

    path: Path
    folder: Path = CACHE

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def theme(self) -> str:
        return self.path.parent.name

    @cached_property
    def text(self) -> str:
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def digest(self) -> str:
        """Of the code: what a script prints and draws does not depend on its text."""
        code = "\n".join(source for is_code, source in self.cells if is_code)
        return hashlib.sha256(code.encode()).hexdigest()[:16]

    @cached_property
    def cells(self) -> list[tuple[bool, str]]:
        """(is code, source) of each cell; the source of a text cell is Markdown."""
        parts = re.split(r"^# %%(.*)\n", self.text, flags=re.MULTILINE)[1:]
        pairs = [
            (not kind.strip(), body.strip("\n"))
            for kind, body in zip(parts[::2], parts[1::2], strict=True)
        ]
        return [
            (code, body if code else re.sub(r"^# ?", "", body, flags=re.MULTILINE))
            for code, body in pairs
        ]

    @cached_property
    def title(self) -> str:
        return self.cells[0][1].partition("\n")[0].removeprefix("# ")

    @cached_property
    def result(self) -> dict[str, Any] | None:
        """The cached result; None if there is none."""
        path = self.folder / f"{self.name}.json"
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None

    def pictures(self) -> dict[str, str]:
        """The alternative text of each picture, by its file."""
        cells = self.result["cells"] if self.result else []
        return {one["file"]: one["alt"] for cell in cells for one in cell["pictures"]}

    def is_stale(self) -> bool:
        return self.result is None or self.result["digest"] != self.digest

    def names(self) -> list[str]:
        """Public names of bayou that the code uses, such as ``bayou.flows.fit``."""
        tree, found, alias = ast.parse(self.text), set(), {"bayou": "bayou"}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("bayou"):
                alias |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
        for node in ast.walk(tree):
            if isinstance(node, ast.Name | ast.Attribute):
                head, *rest = ast.unparse(node).split(".")
                found.add(".".join([alias.get(head, "-"), *rest]))
        return sorted(name for name in found if _is_public(name))


def _is_public(name: str) -> bool:
    module, _, last = name.rpartition(".")
    try:
        home = import_module(module)
    except (ImportError, ValueError):
        return False
    return last in getattr(home, "__all__", ()) and callable(getattr(home, last))


def examples(folder: Path = CACHE) -> dict[str, Example]:
    """Every script of a theme by its name, which is unique, in the order of the page."""
    paths = sorted((ROOT / "examples").glob("*/*.py"))
    found = [Example(path, folder) for path in paths if path.parent.name in THEMES]
    found.sort(key=lambda e: (list(THEMES).index(e.theme), e.title.lower()))
    named = {e.name: e for e in found}
    if len(named) < len(found):
        raise ValueError(f"two scripts have one name: {sorted(e.name for e in found)}")
    return named


def execute(example: Example) -> dict[str, Any]:
    """Run the cells of a script in this process and write its result; returns the names that it
    defined.

    The seconds are those of one core after the imports of torch and bayou.
    """
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from PIL import Image

    import_module("bayou.select.fit"), import_module("bayou.flows")
    begun, cells, count = time.process_time(), [], 0
    plt.show = lambda: None
    module = sys.modules[f"gallery_{example.name}"] = ModuleType(
        f"gallery_{example.name}"
    )  # for the compiler of torch
    space = module.__dict__
    for code, source in example.cells:
        if not code:
            continue
        printed, pictures = io.StringIO(), []
        with contextlib.redirect_stdout(printed):
            exec(compile(source, f"{example.name}.py", "exec"), space)
        for figure in map(plt.figure, plt.get_fignums()):
            count += 1
            path = example.folder / f"{example.name}-{count}.png"
            for dpi, colors in QUALITY:
                figure.savefig(drawn := io.BytesIO(), dpi=dpi)
                image = Image.open(drawn).convert(
                    "RGB"
                )  # an octree keeps the colors of thin lines, and not quite white
                image = image.quantize(colors, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
                image.putpalette(
                    [255 if value > 248 else value for value in image.getpalette() or ()]
                )
                image.save(path, optimize=True)
                if path.stat().st_size <= MAX_BYTES:
                    break
            if not figure.get_label():
                raise ValueError(
                    f"{path.name} has no alternative text: plt.subplots(..., num='what one sees')"
                )
            pictures.append({"file": path.name, "alt": figure.get_label()})
        plt.close("all")
        cells.append({"printed": printed.getvalue().rstrip(), "pictures": pictures})
    result = {
        "digest": example.digest,
        "seconds": round(time.process_time() - begun, 1),
        "machine": platform.machine(),
    }
    text = json.dumps(result | {"cells": cells}, indent=1, ensure_ascii=False) + "\n"
    (example.folder / f"{example.name}.json").write_text(text, encoding="utf-8")
    return space


def run(example: Example) -> str:
    """Run a script in a process of its own; returns what went wrong, warnings included, or
    nothing.
    """
    example.folder.mkdir(parents=True, exist_ok=True)
    for old in example.folder.glob(f"{example.name}-[0-9].png"):
        old.unlink()
    command = [sys.executable, __file__, "--execute", str(example.path), str(example.folder)]
    paths = [str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    given = os.environ | {
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    done = subprocess.run(command, capture_output=True, text=True, env=given, check=False)
    wrong = done.stderr or (f"exit status {done.returncode}" if done.returncode else "")
    if wrong:  # a result that came with a warning is none
        (example.folder / f"{example.name}.json").unlink(missing_ok=True)
    return wrong


def page(example: Example) -> str:
    """The Markdown page of an example from its cached result."""
    result = example.result or {"seconds": 0, "machine": "", "cells": []}
    script = os.path.relpath(example.path, CACHE)
    parts, ran = [], iter(result["cells"])
    for code, source in example.cells:
        parts.append(f"```python\n{source}\n```" if code else source)
        shown = (
            next(ran, {"printed": "", "pictures": []}) if code else {"printed": "", "pictures": []}
        )
        parts += [f"```text\n{shown['printed']}\n```"] if shown["printed"] else []
        parts += [
            f"```{{image}} {one['file']}\n:alt: {one['alt']}\n```" for one in shown["pictures"]
        ]
    fetch = (
        f"Download: {{download}}`script <{script}>` · {{download}}`notebook <{example.name}.ipynb>`"
    )
    fetch += f" · [open in Colab]({COLAB}/{example.name}.ipynb)"
    parts.insert(1, f"{fetch} · {result['seconds']:.0f} s on one core ({result['machine']})")
    if names := example.names():
        parts.append("API: " + ", ".join(f"{{py:obj}}`{name}`" for name in names))
    return "\n\n".join(parts) + "\n"


def install(example: Example) -> str:
    """Return the first cell of a notebook: bayou, and the other libraries that it imports."""
    imported = re.findall(r"^\s*(?:import|from) (\w+)", example.text, re.MULTILINE)
    return " ".join([INSTALL, *(name for name in OTHER_LIBRARIES if name in imported)])


def notebook(example: Example) -> str:
    """The script as a notebook (nbformat 4.5), which installs what it needs after its title."""
    cells: list[dict[str, Any]] = []
    title, *others = example.cells
    for k, (code, source) in enumerate([title, (True, install(example)), *others]):
        cell = {"id": f"cell-{k}", "metadata": {}, "source": source.splitlines(keepends=True)}
        extra = (
            {"cell_type": "code", "execution_count": None, "outputs": []}
            if code
            else {"cell_type": "markdown"}
        )
        cells.append(cell | extra)
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    return (
        json.dumps(
            {"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}, indent=1
        )
        + "\n"
    )


def cards(found: dict[str, Example]) -> str:
    """The index: a grid of cards for each theme."""
    lines = []
    for theme, (title, text) in THEMES.items():
        lines += [f"## {title}\n\n{text}\n", "::::{container} gallery-grid"]
        for e in (e for e in found.values() if e.theme == theme and e.pictures()):
            file, alt = next(iter(e.pictures().items()))
            link = f"[![{alt}](gallery/{file})](gallery/{e.name}.md)"
            lines += [
                ":::{container} gallery-card",
                f"{link}\n\n[{e.title}](gallery/{e.name}.md)",
                ":::",
            ]
        lines.append("::::\n")
    return "\n".join(lines)


def write_pages() -> None:
    """Write the pages, the notebooks and the index, where they have changed; called by
    ``conf.py``.
    """
    found = examples()
    files = {CACHE / f"{e.name}.md": page(e) for e in found.values()}
    files |= {CACHE / f"{e.name}.ipynb": notebook(e) for e in found.values()}
    files[ROOT / "docs" / "_generated" / "gallery.md"] = cards(found)
    for old in {*CACHE.glob("*.md"), *CACHE.glob("*.ipynb")} - set(files):
        old.unlink()
    for path, text in files.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m docs.make_gallery", description="Run the scripts of the gallery."
    )
    parser.add_argument(
        "names", nargs="*", help="scripts to run (default: those whose result is out of date)"
    )
    parser.add_argument("--all", action="store_true", help="run every script")
    parser.add_argument("--execute", nargs=2, metavar=("SCRIPT", "FOLDER"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.execute:
        execute(Example(*map(Path, options.execute)))
        return
    failed, found = [], examples()
    for old in {*CACHE.glob("*.json"), *CACHE.glob("*.png")}:
        if re.sub(r"-\d+$", "", old.stem) not in found:
            old.unlink()
    for name in options.names or [name for name, e in found.items() if options.all or e.is_stale()]:
        wrong = run(found[name])
        failed += [name] if wrong else []
        print(f"{name}: {wrong or Example(found[name].path).result['seconds']}", flush=True)  # type: ignore[index]
    sys.exit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()

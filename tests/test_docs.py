"""The code in the pages runs as written, with shorter fits and searches (that of the README:
test_readme.py).
"""

from __future__ import annotations

import re
from pathlib import Path

import matplotlib
import pytest
import torch

import bayou
from bayou.training.settings import Settings

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    page.relative_to(ROOT).as_posix()
    for page in (ROOT / "docs").rglob("*.md")
    if not {"_build", "_generated"} & set(page.parts)
)
RUN_ELSEWHERE = {
    "docs/elsewhere.md",
    "docs/flows.md",
}  # tests/examples, and parts of it in tests/flows
SHORT = {
    "docs/huggingface.md",
    "docs/start/density.md",
    "docs/flows/surjections.md",
    "docs/flows/discrete.md",
}
PAGES = [
    page if page in SHORT else pytest.param(page, marks=pytest.mark.slow)
    for page in SOURCES
    if "```python\n" in (ROOT / page).read_text(encoding="utf-8")
    and page not in RUN_ELSEWHERE
    and not page.startswith("docs/gallery")
]

PROSE = ["README.md", "CONTRIBUTING.md", *SOURCES]
METAPHORS = re.compile(
    r"\b(rooms?|houses?|doors?|arrive[sd]?|of before|handed to)\b", re.IGNORECASE
)
BRITISH = re.compile(
    r"\b\w*((optim|minim|maxim|general|normal|standard|linear|penal|random|initial|regular|vector|amort)is(e[ds]?|ing|ation)"
    r"|(col|behavi|neighb|fav)our|[bd]elled|catalogue|towards|centre)\w*\b",
    re.IGNORECASE,
)


@pytest.mark.parametrize("page", PROSE)
def test_prose_is_plain_and_american(page):
    """Outside code, no metaphors of rooms and doors, and the spelling of PyTorch."""
    code = re.compile(r"```.*?```|`[^`]*`|^    [^\n]*$", re.DOTALL | re.MULTILINE)
    text = code.sub("", (ROOT / page).read_text(encoding="utf-8"))
    assert not [match.group() for words in (METAPHORS, BRITISH) for match in words.finditer(text)]


@pytest.mark.filterwarnings("ignore::bayou.training.convergence.ConvergenceWarning")  # so few steps
@pytest.mark.filterwarnings("ignore::bayou.inference.probe.MixingWarning")
@pytest.mark.parametrize("page", PAGES)
def test_the_code_of_a_page_runs(page, tmp_path, monkeypatch, short_search):
    monkeypatch.setattr(Settings, "total_steps", lambda self, data: 20)
    fit = bayou.flows.fit

    def short(flow, data, **options):
        return fit(flow, data, **{**options, "steps": 10, "progress": False})

    monkeypatch.setattr(bayou.flows, "fit", short)
    monkeypatch.chdir(tmp_path)
    matplotlib.use("Agg")
    blocks = re.findall(
        r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL
    )
    assert blocks, f"{page} has no code"
    torch.manual_seed(0)
    namespace = {}
    for block in blocks:
        exec(compile(block, page, "exec"), namespace)

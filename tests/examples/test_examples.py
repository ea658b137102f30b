"""The scripts of the gallery run and show what their pages say; the committed results belong to the
committed code.
"""

import ast
import json
import math
import re
import sys
from pathlib import Path
from typing import Any

import pytest

import bayou
from bayou.training.settings import Settings
from tests.test_docs import BRITISH, METAPHORS

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import make_gallery  # noqa: E402

EXAMPLES = make_gallery.examples()
LIBRARIES = {"accelerate", "botorch", "lightning", "peft", "transformers"}
MAX_LINES = 120
MAX_SECONDS = 60
MAX_TOTAL_BYTES = 2_000_000

Space = dict[str, Any]
# What a page says of its numbers, by the names of the script.
CLAIMS = {
    "map": lambda s: float(s["plane"].mutual_information.max()) < 1e-6,
    "laplace": lambda s: _at(s, -0.1) > 5 * _at(s, 1.2),
    "ensemble": lambda s: _at(s, 3.0) > 2 * _at(s, 1.2),
    "regression": lambda s: (
        _is_sure_in_the_gap(s["bands"]["map"]) and not _is_sure_in_the_gap(s["bands"]["laplace"])
    ),
    "pretrained": lambda s: _posteriors_improve_the_network(s["found"], s["y"]),
    "calibrate": lambda s: s["found"].after < s["found"].before,
    "decide": lambda s: (
        s["asking"].expected_utility.mean()
        > s["plain"].expected_utility.mean()
        > -s["always"].min()
    ),
    "conformal": lambda s: abs(s["coverage"]["conformal"] - 0.9) < 5 * (0.09 / 400) ** 0.5,
    "conformal_sets": lambda s: len(s["sets"]) == 4,
    "acquire": lambda s: (
        s["curves"]["random"][0] == s["curves"]["batchbald"][0]
    ),  # the same 20 labels
    "watch": lambda s: s["report"].verdict == s["stream"].verdict == "the relation has changed",
    "continual": lambda s: s["curves"]["VCL"][-1][0] > s["curves"]["fine-tuning"][-1][0],
    "codec": lambda s: len(s["stream"]) < 1.001 * s["ideal"] + 40,
    "compress": lambda s: all(units[1] < 100 for units, _ in s["found"].values()),
    "check_transform": lambda s: not s["report"].passed,
    "two_modes": lambda s: _finds_both(s),
    "vae": lambda s: float(s["bound"].mean()) < float(s["exact"].mean()),
    "optimize": lambda s: s["best"] == sorted(s["best"]) and s["best"][-1] > s["best"][0],
    "trainer": lambda s: (
        bayou.metrics.accuracy(s["p"], s["batch"]["labels"]) > 0.5
    ),  # of three classes
}


def _at(space, x):
    """The standard deviation of f at x."""
    return float(space["curve"].epistemic_std[(space["line"][:, 0] - x).abs().argmin()])


def _is_sure_in_the_gap(p):
    """Whether the standard deviation of f at 0 is less than a tenth of the noise."""
    middle = len(p.mean) // 2
    return bool(p.epistemic_std[middle] < 0.1 * p.aleatoric_std[middle])


def _posteriors_improve_the_network(found, y):
    """Whether each posterior has a lower NLL, by three standard errors, and more entropy of
    letters.
    """
    (digits, letters), *posteriors = found.values()
    improved = []
    for p, away in posteriors:
        gain = bayou.metrics.row_nll(digits, y) - bayou.metrics.row_nll(p, y)
        improved.append(bool(gain.mean() > 3 * gain.std() / len(gain) ** 0.5))
        improved.append(bool(away.entropy.mean() > 1.25 * letters.entropy.mean()))
    return all(improved)


def _finds_both(space):
    """Mean field is in one mode; the last family in both, and log Z − ELBO ≥ log 2 − the entropy of
    its side.
    """
    one = float((space["draws"]["mean field"] @ space["TRUE"] > 0).double().mean())
    right, elbo = space["right"], space["elbo"]
    least = math.log(2) + sum(p * math.log(p) for p in (right, 1 - right) if p > 0)
    return (
        one in (0.0, 1.0)
        and 0.2 < right < 0.8
        and least - 4 * elbo.standard_error < space["short"] < 0.6
    )


def marked(name):
    """With the libraries that a script imports: those that bayou does not need are peers."""
    nodes = ast.walk(ast.parse(EXAMPLES[name].text))
    modules = {
        node.module.partition(".")[0]
        for node in nodes
        if isinstance(node, ast.ImportFrom) and node.module
    }
    peer = modules & LIBRARIES or "bayou[serve]" in EXAMPLES[name].text
    return pytest.param(name, marks=[pytest.mark.peers] if peer else [])


def shorter(example, folder):
    """The script with a tenth of its steps, draws and effort: ten steps and five draws at least."""

    def tenth(match):
        return f"{match[1]}={max(5 if match[1] == 'draws' else 10, int(match[2]) // 10)}"

    text = re.sub(r"\b(steps|warmup|epochs|draws)=(\d{2,})", tenth, example.text)
    path = folder / example.theme / example.path.name
    path.parent.mkdir()
    path.write_text(text.replace("effort=0.", "effort=0.0"), encoding="utf-8")
    return make_gallery.Example(path, folder)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.filterwarnings("error::bayou.core.progress.BayouWarning")
@pytest.mark.parametrize("name", [marked(name) for name in EXAMPLES if name in CLAIMS])
def test_runs_and_shows_what_its_page_says(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    example = make_gallery.Example(EXAMPLES[name].path, tmp_path)
    space = make_gallery.execute(example)
    assert not example.is_stale()
    assert example.pictures() == EXAMPLES[name].pictures()
    assert CLAIMS[name](space)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
@pytest.mark.filterwarnings("ignore::bayou.core.progress.BayouWarning")  # of runs as short as these
@pytest.mark.parametrize("name", [marked(name) for name in EXAMPLES if name not in CLAIMS])
def test_runs_and_draws_what_its_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, short_search: None
) -> None:
    """No number of these is tested, so that short runs are enough; ``make gallery`` runs them in
    full, unwarned.
    """
    monkeypatch.chdir(tmp_path)
    whole = Settings.total_steps
    default = lambda self, data: whole(self, data) if self.steps or self.epochs else 20  # noqa: E731
    monkeypatch.setattr(Settings, "total_steps", default)
    example = shorter(EXAMPLES[name], tmp_path)
    make_gallery.execute(example)
    assert example.pictures() == EXAMPLES[name].pictures()


@pytest.mark.parametrize("name", EXAMPLES)
def test_is_short_and_its_result_belongs_to_its_code(name):
    example = EXAMPLES[name]
    assert len(example.text.splitlines()) < MAX_LINES
    assert example.text.startswith("# %% [markdown]\n# # ")
    assert not example.is_stale(), f"the code of {name} has changed: python -m docs.make_gallery"
    assert example.result["seconds"] < MAX_SECONDS
    assert example.pictures()
    for file, alt in example.pictures().items():
        assert (make_gallery.CACHE / file).stat().st_size <= make_gallery.MAX_BYTES
        assert len(alt) > 20


@pytest.mark.parametrize("name", EXAMPLES)
def test_text_is_plain_and_american(name):
    text = re.sub(
        r"`[^`]*`", "", "\n".join(source for code, source in EXAMPLES[name].cells if not code)
    )
    assert not [match.group() for words in (METAPHORS, BRITISH) for match in words.finditer(text)]


def test_pictures_are_small_and_nothing_is_left_over():
    files = {path.name for path in make_gallery.CACHE.iterdir() if path.suffix in (".png", ".json")}
    known = {f"{name}.json" for name in EXAMPLES} | {
        file for e in EXAMPLES.values() for file in e.pictures()
    }
    assert files == known
    assert (
        sum((make_gallery.CACHE / file).stat().st_size for file in known if file.endswith(".png"))
        < MAX_TOTAL_BYTES
    )


def test_claims_name_scripts():
    assert CLAIMS.keys() <= EXAMPLES.keys()


SCRIPT = """# %% [markdown]
# # Three
#
# A text.

# %%
import matplotlib.pyplot as plt

import bayou

print(1 + 2, bayou.Laplace.__name__)
fig, axis = plt.subplots(figsize=(2, 1), num="A line that goes up")
axis.plot([0, 1])
plt.show()
"""


def test_a_result_is_stale_when_the_code_changes_not_the_text(tmp_path):
    path = tmp_path / "start" / "three.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    example = make_gallery.Example(path, tmp_path)
    assert example.is_stale()
    make_gallery.execute(example)
    example = make_gallery.Example(path, tmp_path)
    assert not example.is_stale()
    assert example.pictures() == {"three-1.png": "A line that goes up"}
    page = make_gallery.page(example)
    assert "```text\n3 Laplace\n```" in page
    assert ":alt: A line that goes up" in page
    assert "{py:obj}`bayou.Laplace`" in page
    notebook = json.loads(make_gallery.notebook(example))
    assert [cell["cell_type"] for cell in notebook["cells"]] == ["markdown", "code", "code"]
    assert notebook["cells"][1]["source"] == [make_gallery.INSTALL]
    path.write_text(SCRIPT.replace("A text.", "Another text."))
    assert not make_gallery.Example(path, tmp_path).is_stale()
    path.write_text(SCRIPT.replace("1 + 2", "1 + 3"))
    assert make_gallery.Example(path, tmp_path).is_stale()


def test_warnings_and_errors_of_a_script_are_reported(tmp_path):
    path = tmp_path / "start" / "three.py"
    path.parent.mkdir()
    path.write_text(SCRIPT + "import warnings; warnings.warn('careful')\n1 / 0\n")
    report = make_gallery.run(make_gallery.Example(path, tmp_path))
    assert "careful" in report
    assert "ZeroDivisionError" in report
    assert make_gallery.Example(path, tmp_path).is_stale()


def test_scripts_that_pages_name_exist():
    pages = [
        ROOT / "README.md",
        *(ROOT / "docs").glob("*.md"),
        *(ROOT / "experiments" / "results").glob("*.md"),
    ]
    named = {
        path
        for page in pages
        for path in re.findall(r"examples/[\w/]+\.py", page.read_text(encoding="utf-8"))
    }
    assert named
    assert not [path for path in named if not (ROOT / path).exists()]


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable:UserWarning"
)  # of torch up to 2.11
def test_page_for_people_who_live_elsewhere(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, short_search: None
) -> None:
    """Blocks marked ``python`` run as written, but for the number of steps; ``py`` ones need what
    is not installed.
    """
    monkeypatch.chdir(tmp_path)
    for method in (bayou.VI, bayou.MAP):
        monkeypatch.setattr(method, "total_steps", lambda self, data: 10)
    page = (ROOT / "docs" / "elsewhere.md").read_text(encoding="utf-8")
    space: dict[str, object] = {}
    blocks = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    assert len(blocks) >= 3
    for block in blocks:
        exec(compile(block, "elsewhere.md", "exec"), space)

"""A warning of bayou fails the test that did not expect it, and one of another library does not."""

import ast
import builtins
import warnings
from importlib import import_module
from pathlib import Path

import pytest

import bayou
from bayou.core.progress import BayouWarning

ROOT = Path(bayou.__file__).parent


def raised():
    """Every call of ``warnings.warn`` in the sources, by file and line, with its category."""
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for call in ast.walk(ast.parse(text)) if "warn(" in text else ():
            if not isinstance(call, ast.Call) or ast.unparse(call.func) not in (
                "warnings.warn",
                "warn",
            ):
                continue
            given = [
                *call.args[1:2],
                *(word.value for word in call.keywords if word.arg == "category"),
            ]
            module = import_module(
                ".".join(("bayou", *path.relative_to(ROOT).with_suffix("").parts))
            )
            name = ast.unparse(given[0]) if given else "UserWarning"
            yield (
                f"{path.relative_to(ROOT)}:{call.lineno}",
                getattr(module, name, getattr(builtins, name, None)),
            )


# A deprecation is a DeprecationWarning, as of any other library; pyproject.toml makes those of bayou
# errors by their sentence.
WARNINGS = {
    place: category for place, category in raised() if not place.startswith("core/deprecation.py")
}


def test_every_warning_of_the_sources_is_found():
    assert {place.split(":")[0] for place in WARNINGS} >= {
        "training/monitors.py",
        "inference/probe.py",
    }
    assert {
        bayou.ConvergenceWarning,
        bayou.MixingWarning,
        bayou.methods.WorseThanModeWarning,
        bayou.methods.CollapseWarning,
    } <= set(WARNINGS.values())


@pytest.mark.parametrize("place", WARNINGS)
def test_a_warning_of_bayou_is_an_error(place):
    category = WARNINGS[place]
    assert category is not None, f"{place}: the category is no name of its module"
    assert issubclass(category, BayouWarning), (
        f"{place} warns of a {category.__name__}, which is no BayouWarning"
    )
    for level in (1, 2):  # it may point at its caller, in a test
        with pytest.raises(category, match="something"):
            warnings.warn("something", category, stacklevel=level)


@pytest.mark.parametrize("module", ["torch.nn.functional", "bayou.flows.check", __name__])
@pytest.mark.parametrize(
    "category", [UserWarning, DeprecationWarning, FutureWarning, RuntimeWarning]
)
def test_a_warning_of_another_library_is_shown(category, module):
    """Also where it points at the line of bayou, or of a test, that called the other library."""
    with warnings.catch_warnings(record=True) as shown:
        warnings.warn_explicit("no bf16 on this processor", category, "somewhere.py", 1, module)
    assert [str(warning.message) for warning in shown] == ["no bf16 on this processor"]


def test_a_file_that_bayou_leaves_open_is_an_error():
    with pytest.raises(ResourceWarning):
        warnings.warn_explicit(
            "unclosed file", ResourceWarning, "somewhere.py", 1, "bayou.core.files"
        )

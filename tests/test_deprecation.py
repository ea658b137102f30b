"""A deprecated name works and warns, and is gone in the release that was to remove it."""

import inspect
import pkgutil
import sys
import types
import warnings
from importlib import import_module

import pytest

import bayou
from bayou.core import deprecation
from bayou.core.deprecation import (
    Deprecation,
    deprecated,
    deprecated_attributes,
    expired,
    release,
    renamed_arguments,
)

CYCLE = {"since": "1.2", "removed_in": "2.0"}


@pytest.fixture(autouse=True)
def _empty_record(monkeypatch):
    monkeypatch.setattr(deprecation, "DEPRECATIONS", [])


def test_a_deprecated_function_warns_at_the_line_of_its_caller_and_gives_the_same_result():
    @deprecated(**CYCLE, use="bayou.new", name="bayou.old")
    def old(x, *, scale=2.0):
        """Return x·scale."""
        return x * scale

    sentence = "bayou.old is deprecated since bayou 1.2 and will be removed in 2.0; use bayou.new"
    line = inspect.currentframe().f_lineno + 2
    with pytest.warns(DeprecationWarning, match=f"^{sentence}$") as caught:
        assert old(3.0, scale=4.0) == 12.0
    (warning,) = caught
    assert (warning.filename, warning.lineno) == (__file__, line)
    assert (old.__name__, old.__doc__) == ("old", "Return x·scale.")
    assert str(inspect.signature(old)) == "(x, *, scale=2.0)"


def test_a_deprecated_class_is_a_class_that_warns_when_it_is_created():
    @deprecated(**CYCLE, use="bayou.New")
    class Old:
        def __init__(self, n):
            self.n = n

    assert isinstance(Old, type)
    with pytest.warns(DeprecationWarning, match="use bayou.New") as caught:
        assert Old(3).n == 3
    assert caught[0].filename == __file__


def test_an_old_argument_is_passed_under_its_new_name():
    @renamed_arguments(**CYCLE, epochs="steps", rate="lr")
    def fit(x, steps=1, lr=0.1):
        return x, steps, lr

    with pytest.warns(DeprecationWarning, match=r"fit\(epochs=\) is deprecated.*use steps=$"):
        assert fit("x", epochs=5) == ("x", 5, 0.1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit("x", 5, lr=1.0) == fit("x", steps=5, lr=1.0)
    with pytest.raises(TypeError, match="pass steps= alone"):
        fit("x", epochs=5, steps=6)
    assert list(inspect.signature(fit).parameters) == ["x", "steps", "lr"]
    with pytest.raises(ValueError, match="no names"):
        renamed_arguments(**CYCLE)


def test_an_old_name_of_a_module_is_found_until_it_is_removed():
    module = types.ModuleType("old_module")
    module.__getattr__ = deprecated_attributes(
        "old_module", {"old": ("old_module.new", lambda: 7)}, **CYCLE
    )
    with pytest.warns(DeprecationWarning, match="old_module.old is .* use old_module.new") as got:
        assert module.old == 7
    assert got[0].filename == __file__
    with pytest.raises(AttributeError, match="no attribute 'older'"):
        _ = module.older
    find = deprecated_attributes("m", {}, **CYCLE, otherwise=str.upper)
    assert find("name") == "NAME"


def test_a_name_expires_in_the_release_that_removes_it():
    deprecated(**CYCLE, use="new", name="old")(lambda: None)
    for version in ("1.2.0", "1.9.3", "1.99"):
        assert expired(version) == []
    for version in ("2.0.0.dev0", "2.0rc1", "2.0", "2.0.0", "10.1"):
        assert [entry.name for entry in expired(version)] == ["old"]


def test_versions_are_checked():
    assert release("1.2") < release("1.10.0") < release("2.0")
    for version in ("one", "1", ""):
        with pytest.raises(ValueError, match="two or three numbers"):
            release(version)
    for last in ("1.2", "1.1"):
        with pytest.raises(ValueError, match="a later release"):
            Deprecation("old", "1.2", last, "new")
    with pytest.raises(ValueError, match="needs use="):
        Deprecation("old", "1.2", "2.0", "")


def test_bayou_has_no_name_that_this_version_was_to_remove(monkeypatch):
    """Delete the names in the message, and list them under "Removed" in the changelog."""
    monkeypatch.undo()
    for module in pkgutil.walk_packages(bayou.__path__, "bayou."):
        if module.name not in sys.modules and not module.name.startswith(
            ("bayou.app", "bayou.adapters", "bayou.__main__")
        ):
            import_module(module.name)
    assert [entry.message for entry in expired(bayou.__version__)] == []

"""Optional dependencies: the error for a missing one names the command that installs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, feature: str) -> Iterator[None]:
    """Name the command that installs what is missing, around the imports of a feature.

    Args:
        name: the extra of pyproject.toml that installs it.
        feature: what needs it, as the subject of a sentence.

    Raises:
        ImportError: for a module that is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{feature} needs {error.name}, which is not installed: pip install 'bayou[{name}]'",
            name=error.name,
        ) from None

"""Optional dependencies: a module that is missing is one sentence, with the command that installs
it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str, what: str) -> Iterator[None]:
    """Around the imports of ``what``, which the extra ``name`` of pyproject.toml installs."""
    try:
        yield
    except ModuleNotFoundError as error:
        sentence = f"{what} needs {error.name}, which is not installed: pip install 'bayou[{name}]'"
        raise ImportError(sentence, name=error.name) from None

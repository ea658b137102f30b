"""Deprecation of public names: a warning until a release removes them, and a list of them all.

A deprecated name keeps working, warns with a ``DeprecationWarning`` that points to the line of the
caller, and is recorded in ``DEPRECATIONS``. A test fails as soon as the version of bayou reaches
the release that removes a recorded name.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import wraps
from typing import Any, Final, TypeVar, final

Decorated = TypeVar("Decorated", bound=Callable[..., Any])
VERSION = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?")


@final
@dataclass(frozen=True)
class Deprecation:
    """A public name that a release deprecates and a later release removes.

    Args:
        name: the full name, such as "bayou.old", or "bayou.fit(epochs=)" for an argument.
        since: the release that deprecates it, such as "1.2".
        removed_in: the release that removes it, such as "2.0".
        use: what replaces it, such as "bayou.new".

    Raises:
        ValueError: if a version is not two or three numbers, or ``removed_in`` is not the later
            one.
    """

    name: str
    since: str
    removed_in: str
    use: str

    def __post_init__(self) -> None:
        """Check the versions."""
        if release(self.removed_in) <= release(self.since):
            raise ValueError(
                f"{self.name} is deprecated since {self.since} and removed in {self.removed_in}; "
                "it must be removed in a later release"
            )
        if not self.use:
            raise ValueError(f"the deprecation of {self.name} needs use=, what replaces it")

    @property
    def message(self) -> str:
        """The sentence of the warning."""
        return (
            f"{self.name} is deprecated since bayou {self.since} and will be removed in "
            f"{self.removed_in}; use {self.use}"
        )

    def warn(self, stacklevel: int = 2) -> None:
        """Issue the warning.

        Args:
            stacklevel: how many calls above this one the warning points; 2 is the caller of the
                function that calls ``warn``.
        """
        warnings.warn(self.message, DeprecationWarning, stacklevel=stacklevel + 1)


DEPRECATIONS: Final[list[Deprecation]] = []  # all that imported modules declare


def release(version: str) -> tuple[int, int, int]:
    """Return the numbers of a version; what follows them, such as ".dev0" or "rc1", is ignored.

    Args:
        version: such as "1.2" or "1.2.3".

    Raises:
        ValueError: if it does not begin with two numbers.
    """
    match = VERSION.match(version)
    if match is None:
        raise ValueError(f"got the version {version!r}, expected two or three numbers, as in 1.2")
    return int(match[1]), int(match[2]), int(match[3] or 0)


def expired(version: str) -> list[Deprecation]:
    """Return the recorded deprecations whose names a version must not have any more.

    Args:
        version: the version of bayou.
    """
    now = release(version)
    return [entry for entry in DEPRECATIONS if release(entry.removed_in) <= now]


def record(name: str, since: str, removed_in: str, use: str) -> Deprecation:
    """Add a deprecation to ``DEPRECATIONS``, once, and return it.

    Args:
        name: the full name.
        since: the release that deprecates it.
        removed_in: the release that removes it.
        use: what replaces it.
    """
    entry = Deprecation(name, since, removed_in, use)
    if entry not in DEPRECATIONS:
        DEPRECATIONS.append(entry)
    return entry


def deprecated(
    *, since: str, removed_in: str, use: str, name: str | None = None
) -> Callable[[Decorated], Decorated]:
    """Return a decorator of a function, method or class that warns when it is called.

    Args:
        since: the release that deprecates it.
        removed_in: the release that removes it.
        use: what replaces it.
        name: the public name in the message; None: module and qualified name of the definition.

    Example:
        >>> from bayou.core.deprecation import DEPRECATIONS, deprecated
        >>> @deprecated(since="1.2", removed_in="2.0", use="bayou.new", name="bayou.old")
        ... def old(x):
        ...     return x
        >>> DEPRECATIONS.pop().message
        'bayou.old is deprecated since bayou 1.2 and will be removed in 2.0; use bayou.new'
    """

    def decorate(target: Decorated) -> Decorated:
        entry = record(name or f"{target.__module__}.{target.__qualname__}", since, removed_in, use)
        if isinstance(target, type):
            target.__init__ = _warning_first(target.__init__, entry)  # type: ignore[misc]
            return target
        return _warning_first(target, entry)

    return decorate


def _warning_first(function: Any, entry: Deprecation) -> Any:
    """Return a function that issues the warning and calls ``function``."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        entry.warn()
        return function(*args, **kwargs)

    return call


def renamed_arguments(
    *, since: str, removed_in: str, **names: str
) -> Callable[[Decorated], Decorated]:
    """Return a decorator of a function that accepts the old names of its arguments, with a warning.

    The signature of the function has the new names only.

    Args:
        since: the release that deprecates the old names.
        removed_in: the release that removes them.
        names: the new name of each old name: ``epochs="steps"``.

    Raises:
        ValueError: without names. The decorated function raises a TypeError if it gets both names
            of an argument.

    Example:
        >>> from bayou.core.deprecation import DEPRECATIONS, renamed_arguments
        >>> @renamed_arguments(since="1.2", removed_in="2.0", epochs="steps")
        ... def fit(steps):
        ...     return steps
        >>> DEPRECATIONS.pop().use
        'steps='
    """
    if not names:
        raise ValueError("renamed_arguments got no names; pass old_name='new_name'")

    def decorate(function: Decorated) -> Decorated:
        title = f"{function.__module__}.{function.__qualname__}"
        entries = {
            old: record(f"{title}({old}=)", since, removed_in, f"{new}=")
            for old, new in names.items()
        }

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old, entry in entries.items():
                if old not in kwargs:
                    continue
                if names[old] in kwargs:
                    raise TypeError(
                        f"{title} got {old}= and {names[old]}=, which are two names of one "
                        f"argument; pass {names[old]}= alone"
                    )
                entry.warn()
                kwargs[names[old]] = kwargs.pop(old)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def deprecated_attributes(
    module: str,
    names: Mapping[str, tuple[str, Callable[[], Any]]],
    *,
    since: str,
    removed_in: str,
    otherwise: Callable[[str], Any] | None = None,
) -> Callable[[str], Any]:
    """Return a ``__getattr__`` of a module that still finds names it had, with a warning (PEP 562).

    Args:
        module: the name of the module, ``__name__``.
        names: for each old name, the full name of its replacement and a function that returns it.
        since: the release that deprecates the names.
        removed_in: the release that removes them.
        otherwise: the ``__getattr__`` for all other names, such as that of ``lazy_imports``.

    Returns:
        The function to assign to ``__getattr__`` in the module.

    Example:
        ``__getattr__ = deprecated_attributes(__name__, {"old": ("bayou.new", lambda: new)},
        since="1.2", removed_in="2.0")``
    """
    entries = {
        old: record(f"{module}.{old}", since, removed_in, use) for old, (use, _) in names.items()
    }

    def find(name: str) -> Any:
        """Return the replacement of an old name, with a warning."""
        if name in entries:
            entries[name].warn()
            return names[name][1]()
        if otherwise is not None:
            return otherwise(name)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return find

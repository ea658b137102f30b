"""Normalizing flows: transforms with their log-determinants, and the distributions they make."""

from bayou.core.lazy import lazy

_homes, __getattr__, __dir__ = lazy(__name__, __file__)
__all__ = sorted(_homes)  # noqa: PLE0605

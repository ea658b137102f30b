"""The old name of ``bayou.data``."""

from bayou.data import *  # noqa: F403

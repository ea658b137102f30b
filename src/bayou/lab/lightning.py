"""The old name of ``bayou.adapters.lightning``."""

from bayou.adapters.lightning import *  # noqa: F403

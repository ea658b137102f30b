"""The old name of ``bayou.adapters.loggers``."""

from bayou.adapters.loggers import *  # noqa: F403

"""The old name of ``bayou.operations.export``."""

from bayou.operations.export import *  # noqa: F403

"""The old name of ``bayou.adapters.sklearn``."""

from bayou.adapters.sklearn import *  # noqa: F403

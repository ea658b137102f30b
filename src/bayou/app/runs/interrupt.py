"""Ctrl-C in a program of many fits.

``bayou.fit`` returns the posterior so far, and the caller must stop, too.
"""

from __future__ import annotations

from bayou.posteriors import Posterior


class Interrupted(Exception):
    """Ctrl-C: finished methods are in the folder, and the current one in its checkpoint."""


def raise_if_interrupted(posterior: Posterior) -> Posterior:
    """Return the posterior, or raise a KeyboardInterrupt if Ctrl-C cut its training short.

    Args:
        posterior: as returned by ``bayou.fit``.
    """
    if posterior.stopped == "interrupted":
        raise KeyboardInterrupt
    return posterior

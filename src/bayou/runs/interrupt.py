"""Ctrl-C in a program of many fits: ``bayou.fit`` returns the posterior so far, and the caller must
stop, too.
"""

from __future__ import annotations

from bayou.posteriors import Posterior


def raise_if_interrupted(posterior: Posterior) -> Posterior:
    """The posterior, or a KeyboardInterrupt if Ctrl-C cut its training short."""
    if posterior.stopped == "interrupted":
        raise KeyboardInterrupt
    return posterior

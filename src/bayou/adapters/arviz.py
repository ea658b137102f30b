"""Draws of a posterior for ArviZ, which has summaries and plots of chains: pip install arviz."""

from __future__ import annotations

from typing import Any

from bayou import rng
from bayou.posteriors import Posterior


def to_arviz(posterior: Posterior, samples: int | None = None, *, seed: rng.Seed = 0) -> Any:
    """Draws as an arviz ``InferenceData`` (a ``DataTree`` from arviz 1.0 on).

    Points (chains, ensembles) chain by chain; for a distribution ``samples`` independent draws (by default 1,000)
    as one chain, with the ``member`` of a mixture of each. Shapes: (chains, draws, *shape) of each tensor.
    """
    try:
        import arviz
    except ImportError:
        raise ImportError("to_arviz needs arviz, which is not installed: pip install arviz") from None
    draws = {name: value.cpu().numpy() for name, value in posterior.by_chain(samples, seed).items()}
    if int(arviz.__version__.partition(".")[0]) >= 1:
        return arviz.from_dict({"posterior": draws})
    return arviz.from_dict(posterior=draws)

"""The start of methods that need a trained network: the result of another method, or the network as
given.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bayou.files import StrPath
from bayou.inference.first_batch import check_first_batch
from bayou.inference.method import Method
from bayou.network import Network, evaluating
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE
from bayou.posteriors.state import with_state
from bayou.progress import Show
from bayou.target import Target
from bayou.training.data import Data


def network_at(point: Empirical) -> nn.Module:
    """A copy of the user's network with the weights and the buffers of a point."""
    state = {name: value[0] for name, value in point.stack.items() if not name.startswith(NOISE)}
    return with_state(point.target.net, point.network.buffers() | state)


def starting_point(
    start: Method | None, target: Target, data: Data, *, seed: int, checkpoint: StrPath | None, progress: Show,
    points: int = 1,
) -> Empirical:  # fmt: skip
    """One point: fitted by ``start`` (a separate run, in the file ``checkpoint``.start), or the
    network as given.

    The target of the point has the learned likelihood; the network has its running statistics.
    ``points``: a ``start`` may also end in so many points.
    """
    if start is not None:
        file = None if checkpoint is None else Path(f"{os.fspath(checkpoint)}.start")
        point = start.fit(target, data, seed=seed, checkpoint=file, progress=progress)
        if not isinstance(point, Empirical) or point.draws not in (1, points):
            several = "" if points == 1 else f", or in {points} such as Ensemble({points})"
            raise ValueError(
                f"start must be a method that ends in one point, such as MAP(){several}, got {start!r}"
            )
        return point
    target = target.copy(data.n)
    network, params = Network(target.net), target.start()

    def call(*inputs: Any) -> Tensor:
        with evaluating(network.net):
            return network.call(params, *inputs)

    check_first_batch(target, data, call)
    return Empirical(target, network, {name: value.unsqueeze(0) for name, value in params.items()})

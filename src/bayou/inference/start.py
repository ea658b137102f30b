"""The start of methods that need a trained network: another method's result, or the network."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from bayou.core.files import StrPath
from bayou.core.progress import Show
from bayou.inference.data_checks import check_first_batch
from bayou.inference.method import Method
from bayou.network import Network, evaluating
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import NOISE
from bayou.posteriors.state import with_state
from bayou.training.data import Data


def network_at(point: Empirical) -> nn.Module:
    """Return a copy of the user's network with the weights and the buffers of a point.

    Args:
        point: a posterior whose first point is used.
    """
    state = {name: value[0] for name, value in point.stack.items() if not name.startswith(NOISE)}
    return with_state(point.target.net, point.network.buffers() | state)


def starting_point(
    start: Method | None,
    target: Target,
    data: Data,
    *,
    seed: int,
    checkpoint: StrPath | None,
    progress: Show,
    points: int = 1,
) -> Empirical:
    """Return the point at which a method starts.

    The target of the point has the learned likelihood; the network has its running statistics.

    Args:
        start: the method that fits it, in a run with the checkpoint ``checkpoint``.start; None for
            the weights that the network has.
        target: network, likelihood and prior.
        data: the rows.
        seed: of the fit.
        checkpoint: of the method that starts there.
        progress: whether and how progress is shown.
        points: ``start`` may also end in this number of points.

    Raises:
        ValueError: if ``start`` ends in neither one point nor that number.
    """
    if start is None:
        return _network_as_point(target.copy(data.n), data)
    file = None
    if checkpoint is not None:
        file = Path(f"{os.fspath(checkpoint)}.start")
    point = start.fit(target, data, seed=seed, checkpoint=file, progress=progress)
    if not isinstance(point, Empirical) or point.draws not in (1, points):
        alternative = "" if points == 1 else f", or in {points} such as Ensemble({points})"
        raise ValueError(
            "start must be a method that ends in one point, such as MAP()"
            f"{alternative}, got {start!r}"
        )
    return point


def _network_as_point(target: Target, data: Data) -> Empirical:
    """Return the network with its current weights as a point, after a check of the first batch."""
    network = Network(target.net)
    params = target.start()

    def call(*inputs: Any) -> Tensor:
        with evaluating(network.net):
            return network.call(params, *inputs)

    check_first_batch(target, data, call)
    return Empirical(target, network, {name: value.unsqueeze(0) for name, value in params.items()})

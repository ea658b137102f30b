"""A method over some tensors of a network, with the others as points."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, final

from bayou.core.files import StrPath
from bayou.core.progress import Show
from bayou.inference.method import Method
from bayou.network import shared_copy
from bayou.network.target import Target
from bayou.posteriors.empirical import Empirical
from bayou.posteriors.posterior import Posterior


@final
@dataclass(frozen=True)
class RestrictedMethod(Method):
    """A method over some tensors; the others keep their values, which its draws contain.

    Args:
        method: the method, whose draws are points of the whole network.
        names: of the tensors that are random.
    """

    method: Method
    names: tuple[str, ...]

    @property
    def batch_size(self) -> int:  # type: ignore[override]
        """The batch size of the method."""
        return self.method.batch_size

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> Posterior:
        """Fit the method with all other tensors frozen."""
        part = replace(target, net=shared_copy(target.net, list(self.names)))
        posterior = self.method.fit(part, data, seed=seed, checkpoint=checkpoint, progress=progress)
        if isinstance(posterior, Empirical):  # draws of these tensors alone
            fixed = {
                name: value.expand(posterior.draws, *value.shape)
                for name, value in target.start().items()
            }
            posterior.target = target
            posterior.network = target.network
            posterior.stack = fixed | posterior.stack
        return posterior

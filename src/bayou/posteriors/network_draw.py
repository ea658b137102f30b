"""Networks drawn from a guide, with the KL of the draw."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bayou.core.params import Params
from bayou.guides.guide import Draw, Weight
from bayou.guides.local import sample_outputs
from bayou.network import Keywords, VmapOrLoop, combine_inputs, forward_inputs

if TYPE_CHECKING:
    from bayou.posteriors.guided import Bayesian


# Hashed by identity: torch.compile hashes a callable before its fields are set.
@dataclass(frozen=True, eq=False)
class NetworkDraw:
    """One network drawn from q, or S of them, with the KL of this draw.

    Call it on inputs; ``kl`` is in nats.

    Args:
        bayesian: the network with its guides.
        draws: the draw of each guide.
        samples: S, the number of networks.
        single: whether the outputs have no leading axis of draws.
        coupling: log p − Σ log p of each tensor by itself, (S,), with a prior over several tensors.

    Example:
        >>> draw = bayou.bayesianize(net, bayou.MNF()).draw()
        >>> loss = torch.nn.functional.cross_entropy(draw(x), y) + draw.kl / n
    """

    bayesian: Bayesian
    draws: tuple[Draw, ...]
    samples: int
    single: bool
    coupling: Tensor | None = None

    @property
    def kl(self) -> Tensor:
        """Return Σ over tensors of KL(q ‖ p), averaged over the draws: a scalar, never rescaled."""
        kls = [draw.kl for draw in self.draws]
        if len({len(kl) for kl in kls}) == 1:
            total = torch.stack(kls).mean(1).sum()
        else:  # some have a draw for every example
            total = torch.stack([kl.mean() for kl in kls]).sum()
        return total if self.coupling is None else total - self.coupling.mean()

    @property
    def score(self) -> Tensor | None:
        """Return the log-probability of discrete choices, for REINFORCE; None without any.

        One per draw (S,), or one per row (S·rows,).
        """
        scores = [draw.score for draw in self.draws if draw.score is not None]
        if not scores:
            return None
        rows = max(map(len, scores))
        return torch.stack([score.repeat_interleave(rows // len(score)) for score in scores]).sum(0)

    @property
    def parts(self) -> dict[str, Tensor | Weight]:
        """Return every tensor: sampled weights (S, *shape), or Gaussians given their gains."""
        return {name: value for draw in self.draws for name, value in draw.parts.items()}

    def subset(self, indices: slice) -> NetworkDraw:
        """Return the networks of some of the draws; ``kl`` stays that of all.

        Args:
            indices: the draws to keep.
        """

        def take(value: Tensor) -> Tensor:
            # The leading axis has one entry per draw, or per draw and example.
            return value.unflatten(0, (self.samples, -1))[indices].flatten(0, 1)

        draws = []
        for draw in self.draws:
            parts: dict[str, Tensor | Weight] = {}
            for name, value in draw.parts.items():
                parts[name] = take(value) if isinstance(value, Tensor) else value.with_gains(take)
            score = None if draw.score is None else take(draw.score)
            draws.append(replace(draw, parts=parts, score=score))
        return replace(self, draws=tuple(draws), samples=len(range(self.samples)[indices]))

    def __call__(self, *inputs: object, **named: Any) -> Tensor:
        """Evaluate the network: outputs (B, ...), or (S, B, ...) for S draws.

        Of a network with several outputs it returns the ``logits``.

        Args:
            inputs: inputs of the network.
            named: inputs that the network takes by keyword, ``draw(**batch)``; labels are left out.
        """
        inputs = (*inputs, *forward_inputs(named)) if named else inputs
        if not self.bayesian.traced and not torch.compiler.is_compiling():
            self.bayesian.trace(inputs)
        sampled: Params = {}
        points: Params = {}
        unsampled: dict[str, Weight] = {}
        for name, part in self.parts.items():
            value = self._sample_if_needed(name, part)
            if isinstance(value, Tensor):
                sampled[name] = value
            elif value.is_point:
                points[name] = value.mean
            else:
                unsampled[name] = value
        if self.single:
            params = points | {name: value[0] for name, value in sampled.items()}
            return self._evaluate(params, unsampled, inputs)
        rows_independent = self.bayesian.rows_independent
        shares = self.bayesian.shares and rows_independent and not torch.compiler.is_compiling()
        has_row_gains = all(gain.axis < 2 for w in unsampled.values() for gain in w.gains)
        has_plain_inputs = all(isinstance(value, (Tensor, Keywords)) for value in inputs)
        can_tile = has_row_gains and has_plain_inputs and rows_independent and not shares
        if unsampled and not sampled and can_tile:
            return self._evaluate_tiled(points, unsampled, inputs)
        device = next(self.bayesian.parameters()).device
        uses_vmap = shares or (
            device.type == "cuda" and not unsampled and not self.bayesian.training
        )

        def evaluate(index: Tensor, params: Params) -> Tensor:
            return self._evaluate(points | params, self._select_gains(unsampled, index), inputs)

        evaluate_all = VmapOrLoop(evaluate, (0, 0), loop=not uses_vmap)
        outputs: Tensor = evaluate_all(torch.arange(self.samples, device=device), sampled)
        if shares and evaluate_all.loop:
            self.bayesian.shares = False  # an operation has no batching rule
        return outputs

    def _sample_if_needed(self, name: str, value: Tensor | Weight) -> Tensor | Weight:
        """Sample a weight that was drawn before the dry run found that it must be sampled."""
        if isinstance(value, Tensor) or value.is_point or name in self.bayesian.local_names:
            return value
        return value.with_gains(lambda z: z[:: len(z) // self.samples]).sample(self.samples)

    def _evaluate_tiled(
        self, points: Params, unsampled: dict[str, Weight], inputs: tuple[Any, ...]
    ) -> Tensor:
        """Evaluate all S draws in one pass over S copies of the rows.

        Local noise is independent per row anyway.
        """
        rows = len(inputs[0])

        def widen(z: Tensor) -> Tensor:
            return z if len(z) == self.samples * rows else z.repeat_interleave(rows, 0)

        wide = {name: weight.with_gains(widen) for name, weight in unsampled.items()}
        copies = combine_inputs(torch.cat, [inputs] * self.samples)
        return self._evaluate(points, wide, copies).unflatten(0, (self.samples, rows))

    def _select_gains(self, unsampled: dict[str, Weight], index: Tensor) -> dict[str, Weight]:
        """Return the gains of one draw; ``vmap`` takes a tensor as index, but no number."""

        def select(z: Tensor) -> Tensor:
            by_draw = z.unflatten(0, (self.samples, -1))
            return by_draw.index_select(0, index.reshape(1)).squeeze(0)

        return {name: weight.with_gains(select) for name, weight in unsampled.items()}

    def _evaluate(
        self, params: Params, unsampled: dict[str, Weight], inputs: tuple[Any, ...]
    ) -> Tensor:
        """Evaluate one network, with the noise of ``unsampled`` drawn at the outputs of layers."""
        if not unsampled:
            return self.bayesian.call(params, *inputs)
        return sample_outputs(lambda means: self.bayesian.call(params | means, *inputs), unsampled)

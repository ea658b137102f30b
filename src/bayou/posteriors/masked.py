"""The posterior of MC dropout: one set of weights and random masks over the units that dropout
reaches.
"""

from __future__ import annotations

import inspect
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayou import rng
from bayou.network import Network
from bayou.params import Params, under
from bayou.posteriors.posterior import Posterior, check_count
from bayou.posteriors.state import restore_network, restore_target, target_state
from bayou.target import Target

SEED, MASK = (
    "dropout.seed",
    "dropout.mask",
)  # tensors of a draw: the seed of its masks, or the masks themselves

UNITS = {F.dropout, torch.dropout, torch.dropout_}  # a mask entry per unit
CHANNELS = {
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    torch.feature_dropout,
    torch.feature_dropout_,
}  # per channel
IN_PLACE = {torch.dropout_, torch.feature_dropout_}
CALLS = UNITS | CHANNELS
BATCHED = {F.dropout1d: 3, F.dropout3d: 5}  # axes of a batch; one fewer is a single example


class Masks(TorchFunctionMode):
    """Inside: every dropout call, of a module or a function, in train or eval mode, applies a mask
    made of ``seed``.

    m ~ Bernoulli(1 − p), x ↦ x ⊙ m/(1 − p); call number k of a pass has mask k. The mask has the
    shape of one row, so that all rows see the same network. ``masks``: those to use, in the order
    of the calls; missing ones are drawn and appended. ``nn.MultiheadAttention`` drops weights of
    its attention by a mask (heads, queries, keys).
    """

    def __init__(
        self, seed: int, p: float | None = None, masks: list[Tensor] | None = None
    ) -> None:
        super().__init__()
        self.seed, self.p, self.masks = seed, p, masks
        self.shapes: list[torch.Size] = []  # of the inputs of the calls so far
        self.rates: list[float] = []  # of these calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.multi_head_attention_forward:
            return self._attend(inspect.signature(func).bind(*args, **(kwargs or {})))
        if func not in CALLS:
            return func(*args, **(kwargs or {}))
        return self._drop(func, args, kwargs)

    def _drop(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Apply the next mask to the input of a dropout call."""
        given = dict(zip(("input", "p", "training", "inplace"), args, strict=False)) | (
            kwargs or {}
        )
        x, p = given["input"], self.p if self.p is not None else given.get("p", 0.5)
        if x.ndim < BATCHED.get(func, 0):
            raise ValueError(
                f"{func.__name__} got an input {tuple(x.shape)}, which it takes for one example; its first axis must "
                "count the rows"
            )
        number = len(self.shapes)
        self.shapes.append(x.shape)
        self.rates.append(p)
        if self.masks is None or number == len(self.masks):
            event = (*x.shape[1:2], *[1] * (x.ndim - 2)) if func in CHANNELS else tuple(x.shape[1:])
            keep = rng.uniform(1, event, x, rng.fold(self.seed, "mask", number))[0] >= p
            if self.masks is not None:
                self.masks.append(keep)
        else:
            keep = self.masks[number]
        y = x * (keep.to(x.dtype) / (1 - p)) if p < 1 else x * 0.0
        return x.copy_(y) if given.get("inplace", False) or func in IN_PLACE else y

    def _attend(self, call: inspect.BoundArguments) -> tuple[Tensor, Tensor | None]:
        """Compute multi-head attention whose weights are dropped: softmax(q·kᵀ) ⊙ m/(1 − p)·v for
        each head.

        The function computes all heads of a batch as one axis, and drops with a rate that an eval
        mode sets to 0.
        """
        call.apply_defaults()
        given = call.arguments
        p = given["dropout_p"]
        wants_weights = given["need_weights"]
        wants_average = given["average_attn_weights"]
        if p == 0:
            return F.multi_head_attention_forward(*call.args, **call.kwargs)
        if given["query"].ndim != 3:
            raise ValueError(
                f"attention got a query {tuple(given['query'].shape)}, which it takes for one example; it needs an "
                "axis of rows"
            )
        given["dropout_p"] = 0.0
        given["need_weights"] = True
        given["average_attn_weights"] = False
        _, weights = F.multi_head_attention_forward(*call.args, **call.kwargs)
        weights = self._drop(F.dropout, (weights, p), None)
        heads = weights @ _values_by_head(given)
        joined = heads.permute(2, 0, 1, 3).flatten(2)
        out = F.linear(joined, given["out_proj_weight"], given["out_proj_bias"])
        if not wants_weights:
            return out, None
        return out, weights.mean(1) if wants_average else weights


def _values_by_head(given: dict[str, Any]) -> Tensor:
    """Return the values v of multi-head attention, (rows, heads, keys, size of a head), from its
    arguments.
    """
    heads = given["num_heads"]
    value = given["value"]
    rows = value.shape[1]
    if given["static_v"] is not None:
        v = given["static_v"].unflatten(0, (rows, heads))
    else:
        joint = given["in_proj_weight"]
        weight = given["v_proj_weight"] if given["use_separate_proj_weight"] else joint.chunk(3)[2]
        bias = given["in_proj_bias"]
        projected = F.linear(value, weight, None if bias is None else bias.chunk(3)[2])
        if given["bias_v"] is not None:
            projected = torch.cat([projected, given["bias_v"].expand(1, rows, -1)])
        v = projected.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    if given["add_zero_attn"]:
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    return v


@final
class Masked(Posterior):
    """q: the weights are a point, the units are dropped at random (Gal & Ghahramani 2016).

    A draw is a function: one mask for each dropout call, shared by all rows, made of the int64
    tensor ``dropout.seed``
    of the draw. ``p``: a rate for all calls instead of their own.
    """

    kind = "masked"
    mappable = False  # a mask depends on the value of a seed, which vmap hides

    def __init__(
        self,
        target: Target,
        network: Network,
        weights: Params,
        history: list[dict[str, float]] | None = None,
        *,
        p: float | None = None,
    ) -> None:
        self.target, self.network, self.p = target, network, p
        self.weights = {name: value.detach() for name, value in weights.items()}
        self.history, self.stopped = history or [], ""

    def like(self) -> Params:
        return self.weights | {SEED: torch.zeros((), dtype=torch.long, device=self._device)}

    @property
    def _device(self) -> torch.device:
        return next(iter(self.weights.values()), next(self.target.net.parameters())).device

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """The weights, expanded to (n, *shape), and n seeds; with an int seed, draw i is a function
        of (seed, i).
        """
        check_count(n)
        seed = rng.integer(seed)
        seeds = [rng.integer(rng.fold(seed, "dropout", start + i)) for i in range(n)]
        stack = {name: value.expand(n, *value.shape) for name, value in self.weights.items()}
        return stack | {SEED: torch.tensor(seeds, dtype=torch.long, device=self._device)}

    def mean(self) -> Params:
        """The weights; the network in eval mode has them."""
        return dict(self.weights)

    def std(self) -> Params:
        raise ValueError(
            "MC dropout is random in its masks, not in its weights, so that they have no std; its "
            "uncertainty is that of its outputs, posterior.predict(x).epistemic_std"
        )

    def by_chain(self, samples: int | None = None, seed: rng.Seed = 0) -> Params:
        raise ValueError(
            "MC dropout is random in its masks, not in its weights: nothing to summarize; look at its outputs, "
            "posterior.predict(x).outputs"
        )

    def call(self, params: Params, *inputs: Any) -> Tensor:
        weights = {
            name: value for name, value in params.items() if not name.startswith((SEED, MASK))
        }
        masks = (
            None
            if SEED in params
            else [value for name, value in params.items() if name.startswith(MASK)]
        )
        with Masks(int(params[SEED]) if masks is None else 0, self.p, masks):
            return self.network.evaluate(weights, *inputs)

    def traceable(self, draw: Params, inputs: tuple[Any, ...]) -> tuple[Posterior, Params]:
        """The draw with its masks as tensors: a graph cannot make them of a seed."""
        weights = {name: value for name, value in draw.items() if name != SEED}
        masks: list[Tensor] = []
        with Masks(int(draw[SEED]), self.p, masks):
            self.network.evaluate({name: weights[name] for name in self.weights}, *inputs)
        return self, weights | {f"{MASK}{number}": mask for number, mask in enumerate(masks)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, config = target_state(self, weights=self.weights)
        return tensors, config | {"p": self.p}

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any
    ) -> Masked:
        target = restore_target(tensors, config, net, **options)
        device = next(net.parameters()).device
        weights = {name: value.to(device) for name, value in under("weights.", tensors).items()}
        network = restore_network(target, tensors, config)
        return cls(target, network, weights, config["history"], p=config["p"])

    def __repr__(self) -> str:
        weights = sum(value.numel() for value in self.weights.values())
        rate = "its own rates" if self.p is None else f"p = {self.p}"
        return f"Masked({type(self.target.net).__name__}: dropout with {rate} over {weights:,} weights)"

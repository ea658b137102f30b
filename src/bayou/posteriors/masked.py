"""The posterior of MC dropout: one set of weights, and random masks over the units it drops."""

from __future__ import annotations

import inspect
from typing import Any, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayou.core import rng
from bayou.core.params import Params
from bayou.network import Network
from bayou.network.target import Target
from bayou.posteriors.posterior import Posterior, check_count
from bayou.posteriors.state import SavedState, target_state

SEED = "dropout.seed"  # the tensor of a draw from which its masks are made
MASK = "dropout.mask"  # prefix of the tensors of a draw that are the masks themselves

UNIT_CALLS = {F.dropout, torch.dropout, torch.dropout_}  # a mask entry per unit
CHANNEL_CALLS = {  # a mask entry per channel
    F.dropout1d,
    F.dropout2d,
    F.dropout3d,
    torch.feature_dropout,
    torch.feature_dropout_,
}
IN_PLACE_CALLS = {torch.dropout_, torch.feature_dropout_}
DROPOUT_CALLS = UNIT_CALLS | CHANNEL_CALLS
BATCH_AXES = {F.dropout1d: 3, F.dropout3d: 5}  # axes of a batch; one fewer is a single example


class Masks(TorchFunctionMode):
    """Applies a mask in every dropout call inside it, of a module or a function, in any mode.

    m ~ Bernoulli(1 − p), x ↦ x ⊙ m/(1 − p); call number k of a pass has mask k. The mask has the
    shape of one row, so that all rows see the same network. ``nn.MultiheadAttention`` drops weights
    of its attention by a mask (heads, queries, keys).

    Args:
        seed: from which the masks are made.
        p: a rate for all calls instead of their own; None (the default) for their own.
        masks: those to use, in the order of the calls; missing ones are drawn and appended. None
            (the default) draws all of them.
    """

    def __init__(
        self, seed: int, p: float | None = None, masks: list[Tensor] | None = None
    ) -> None:
        super().__init__()
        self.seed = seed
        self.p = p
        self.masks = masks
        self.shapes: list[torch.Size] = []  # of the inputs of the calls so far
        self.rates: list[float] = []  # of these calls

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Replace a dropout call, and make any other."""
        if func is F.multi_head_attention_forward:
            return self._attend(inspect.signature(func).bind(*args, **(kwargs or {})))
        if func not in DROPOUT_CALLS:
            return func(*args, **(kwargs or {}))
        return self._drop(func, args, kwargs)

    def _drop(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        """Apply the next mask to the input of a dropout call."""
        arguments = dict(zip(("input", "p", "training", "inplace"), args, strict=False))
        arguments |= kwargs or {}
        x = arguments["input"]
        p = self.p if self.p is not None else arguments.get("p", 0.5)
        if x.ndim < BATCH_AXES.get(func, 0):
            raise ValueError(
                f"{func.__name__} got an input {tuple(x.shape)}, which it takes for one example; "
                "its first axis must count the rows"
            )
        keep = self._next_mask(x, p, by_channel=func in CHANNEL_CALLS)
        y = x * (keep.to(x.dtype) / (1 - p)) if p < 1 else x * 0.0
        if arguments.get("inplace", False) or func in IN_PLACE_CALLS:
            return x.copy_(y)
        return y

    def _next_mask(self, x: Tensor, p: float, *, by_channel: bool) -> Tensor:
        """Return the mask of the next call, of the shape of one row or its channels."""
        number = len(self.shapes)
        self.shapes.append(x.shape)
        self.rates.append(p)
        if self.masks is not None and number < len(self.masks):
            return self.masks[number]
        shape = tuple(x.shape[1:])
        if by_channel:
            shape = (*x.shape[1:2], *[1] * (x.ndim - 2))
        keep = rng.uniform(1, shape, x, rng.fold(self.seed, "mask", number))[0] >= p
        if self.masks is not None:
            self.masks.append(keep)
        return keep

    def _attend(self, call: inspect.BoundArguments) -> tuple[Tensor, Tensor | None]:
        """Compute multi-head attention whose weights are dropped.

        softmax(q·kᵀ) ⊙ m/(1 − p)·v for each head. The function of torch computes all heads of a
        batch as one axis, and drops with a rate that an eval mode sets to 0.
        """
        call.apply_defaults()
        arguments = call.arguments
        p = arguments["dropout_p"]
        wants_weights = arguments["need_weights"]
        wants_average = arguments["average_attn_weights"]
        if p == 0:
            return F.multi_head_attention_forward(*call.args, **call.kwargs)
        query = arguments["query"]
        if query.ndim != 3:
            raise ValueError(
                f"attention got a query {tuple(query.shape)}, which it takes for one example; it "
                "needs an axis of rows"
            )
        arguments["dropout_p"] = 0.0
        arguments["need_weights"] = True
        arguments["average_attn_weights"] = False
        _, weights = F.multi_head_attention_forward(*call.args, **call.kwargs)
        weights = self._drop(F.dropout, (weights, p), None)
        heads = weights @ _values_by_head(arguments)
        concatenated = heads.permute(2, 0, 1, 3).flatten(2)
        out = F.linear(concatenated, arguments["out_proj_weight"], arguments["out_proj_bias"])
        if not wants_weights:
            return out, None
        return out, weights.mean(1) if wants_average else weights


def _values_by_head(arguments: dict[str, Any]) -> Tensor:
    """Return the values of multi-head attention: (rows, heads, keys, size of a head)."""
    heads = arguments["num_heads"]
    value = arguments["value"]
    rows = value.shape[1]
    if arguments["static_v"] is not None:
        v = arguments["static_v"].unflatten(0, (rows, heads))
    else:
        weight = arguments["v_proj_weight"]
        if not arguments["use_separate_proj_weight"]:
            weight = arguments["in_proj_weight"].chunk(3)[2]
        bias = arguments["in_proj_bias"]
        projected = F.linear(value, weight, None if bias is None else bias.chunk(3)[2])
        if arguments["bias_v"] is not None:
            projected = torch.cat([projected, arguments["bias_v"].expand(1, rows, -1)])
        v = projected.unflatten(-1, (heads, -1)).permute(1, 2, 0, 3)
    if arguments["add_zero_attn"]:
        v = torch.cat([v, torch.zeros_like(v[:, :, :1])], 2)
    return v


@final
class Masked(Posterior):
    """q of MC dropout: the weights are a point, the units are dropped at random.

    A draw is a function (Gal & Ghahramani 2016): one mask for each dropout call, shared by all
    rows, made of the int64 tensor ``dropout.seed`` of the draw.

    Args:
        target: network, likelihood and prior.
        network: the network as a function of its tensors.
        weights: the point, (*shape) each.
        history: records of the fit; none by default.
        p: a rate for all calls instead of their own; None (the default) for their own.
    """

    kind = "masked"
    no_update = "MC dropout is random in its masks, and its weights are a point"
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
        self.target = target
        self.network = network
        self.p = p
        self.weights: dict[str, Tensor] = {name: value.detach() for name, value in weights.items()}
        self.history: list[dict[str, float]] = history or []
        self.stopped = ""

    def template(self) -> Params:
        """Return the weights and a seed."""
        return self.weights | {SEED: torch.zeros((), dtype=torch.long, device=self._device)}

    @property
    def _device(self) -> torch.device:
        """The device of the weights."""
        return next(iter(self.weights.values()), next(self.target.net.parameters())).device

    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Return the weights, expanded to (n, *shape), and n seeds of masks.

        With an int seed, draw i is a function of (seed, i).

        Args:
            n: the number of draws.
            seed: of the draws; None (the default) takes them from torch's global stream.
            start: the number of the first draw.
        """
        check_count(n)
        seed = rng.integer(seed)
        seeds = [rng.integer(rng.fold(seed, "dropout", start + index)) for index in range(n)]
        stack = {name: value.expand(n, *value.shape) for name, value in self.weights.items()}
        return stack | {SEED: torch.tensor(seeds, dtype=torch.long, device=self._device)}

    def mean(self) -> Params:
        """Return the weights; the network in eval mode has them."""
        return dict(self.weights)

    def std(self) -> Params:
        """Raise a ValueError: the weights have no standard deviation."""
        raise ValueError(
            "MC dropout is random in its masks, not in its weights, so that they have no std; its "
            "uncertainty is that of its outputs, posterior.predict(x).epistemic_std"
        )

    def by_chain(self, samples: int | None = None, seed: rng.Seed = 0) -> Params:
        """Raise a ValueError: the weights have no distribution to summarize."""
        raise ValueError(
            "MC dropout is random in its masks, not in its weights: nothing to summarize; look at "
            "its outputs, posterior.predict(x).outputs"
        )

    def call(self, params: Params, *inputs: object) -> Tensor:
        """Compute the network's outputs with the masks of a draw.

        Args:
            params: weights with a seed or with masks, by name.
            inputs: the arguments of the network, on its device.
        """
        weights: Params = {}
        masks: list[Tensor] = []
        for name, value in params.items():
            if name.startswith(MASK):
                masks.append(value)
            elif not name.startswith(SEED):
                weights[name] = value
        mode = Masks(0, self.p, masks)
        if SEED in params:
            mode = Masks(int(params[SEED]), self.p)
        with mode:
            return self.network.evaluate(weights, *inputs)

    def traceable(self, draw: Params, inputs: tuple[Any, ...]) -> tuple[Posterior, Params]:
        """Return the draw with its masks as tensors, which a graph cannot make of a seed.

        Args:
            draw: weights and a seed, by name.
            inputs: the arguments of the network, as an example.
        """
        weights = {name: value for name, value in draw.items() if name != SEED}
        masks: list[Tensor] = []
        with Masks(int(draw[SEED]), self.p, masks):
            self.network.evaluate({name: weights[name] for name in self.weights}, *inputs)
        return self, weights | {f"{MASK}{number}": mask for number, mask in enumerate(masks)}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Return the weights and the rate."""
        tensors, config = target_state(self, weights=self.weights)
        return tensors, config | {"p": self.p}

    @classmethod
    def restore(cls, saved: SavedState, net: nn.Module) -> Masked:
        """Return the posterior with a ``state``, see ``Posterior.restore``."""
        target = saved.target(net)
        network = saved.network(target)
        config = saved.config
        return cls(target, network, saved.group("weights"), config["history"], p=config["p"])

    def __repr__(self) -> str:
        net = type(self.target.net).__name__
        weights = sum(value.numel() for value in self.weights.values())
        rate = "its own rates" if self.p is None else f"p = {self.p}"
        return f"Masked({net}: dropout with {rate} over {weights:,} weights)"

"""The operations of a network that use each of its tensors, recorded in one dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from bayou.core.interception import Intercept
from bayou.core.params import Params

_CONV = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CONV_TRANSPOSE = (
    "input",
    "weight",
    "bias",
    "stride",
    "padding",
    "output_padding",
    "groups",
    "dilation",
)
_BATCH_NORM = (
    "input",
    "running_mean",
    "running_var",
    "weight",
    "bias",
    "training",
    "momentum",
    "eps",
)
_EMBEDDING = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)


@final
class Call:
    """A call that the network made: the function, and its arguments by name.

    Args:
        func: the function, one of ``ARGUMENTS``.
        args: its positional arguments.
        kwargs: its keyword arguments.
    """

    ARGUMENTS = {
        F.linear: ("input", "weight", "bias"),
        F.conv1d: _CONV,
        F.conv2d: _CONV,
        F.conv3d: _CONV,
        F.conv_transpose1d: _CONV_TRANSPOSE,
        F.conv_transpose2d: _CONV_TRANSPOSE,
        F.conv_transpose3d: _CONV_TRANSPOSE,
        F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
        F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
        F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
        F.batch_norm: _BATCH_NORM,
        F.embedding: _EMBEDDING,
    }

    def __init__(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]
    ) -> None:
        self.func = func
        self.given: dict[str, Any] = dict(zip(self.ARGUMENTS[func], args, strict=False)) | kwargs

    @property
    def x(self) -> Tensor:
        """The input."""
        x: Tensor = self.given["input"]
        return x

    @property
    def weight(self) -> Tensor | None:
        """The weight, if any."""
        return self.given.get("weight")

    @property
    def bias(self) -> Tensor | None:
        """The bias, if any."""
        return self.given.get("bias")


@final
class Watch(Intercept):
    """Records the calls that take a tensor as weight or bias, and which tensors reach other calls.

    ``calls`` are pairs of a call and the names of its weight and bias, ``uses`` counts them by
    name, ``other`` are the names of tensors that anything else uses, and ``last`` are those of the
    last call that used any. ``copies`` has the input of each call as it was and as it is.

    Args:
        params: the tensors by name.
        takes_tensors: says whether a call counts as one that takes a tensor as weight or bias.
        copies: whether to keep the inputs. Default: False.
    """

    def __init__(
        self, params: Params, takes_tensors: Callable[[Call], bool], *, copies: bool = False
    ) -> None:
        super().__init__(self._handle)
        self.names: dict[int, str] = {id(tensor): name for name, tensor in params.items()}
        self.takes_tensors = takes_tensors
        self.keeps_inputs = copies
        self.calls: list[tuple[Call, str | None, str | None]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.uses: Counter[str] = Counter()
        self.other: set[str] = set()
        self.last: list[str] = []

    def _handle(self, func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Call an operation, and record which tensors it uses."""
        if func in Call.ARGUMENTS and self._record(Call(func, args, kwargs)):
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        # Reading .shape or .dtype uses nothing, reading .T does.
        is_attribute = getattr(func, "__name__", "") == "__get__"
        if not is_attribute or isinstance(out, Tensor):
            names = self._names_in((args, kwargs))
            self.other.update(names)
            self.last = names or self.last
        return out

    def _record(self, call: Call) -> bool:
        """Record a call if it takes a tensor as weight or bias; return whether it does."""
        weight = self.names.get(id(call.weight))
        bias = self.names.get(id(call.bias))
        if not (weight or bias) or not self.takes_tensors(call):
            return False
        self.last = [name for name in (weight, bias) if name is not None]
        self.uses.update(self.last)
        settings = {
            key: value for key, value in call.given.items() if key not in ("weight", "bias")
        }
        self.other.update(self._names_in(settings))
        self.calls.append((call, weight, bias))
        if self.keeps_inputs:
            self.copies.append((call.x.detach().clone(), call.x))
        return True

    def _names_in(self, tree: object) -> list[str]:
        """Return the names of the tensors in nested arguments."""
        return [self.names[id(leaf)] for leaf in tree_leaves(tree) if id(leaf) in self.names]

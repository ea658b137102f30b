"""The operations of a network that use each of its tensors, recorded in one dry run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, final

import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bayou.params import Params


@final
class Call:
    """A call that the network made: the function, its input, and its arguments by name."""

    ARGUMENTS = {
        F.linear: ("input", "weight", "bias"),
        F.conv1d: ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
        F.conv_transpose1d: (
            "input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation",
        ),
        F.layer_norm: ("input", "normalized_shape", "weight", "bias", "eps"),
        F.rms_norm: ("input", "normalized_shape", "weight", "eps"),
        F.group_norm: ("input", "num_groups", "weight", "bias", "eps"),
        F.batch_norm: ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps"),
        F.embedding: ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse"),
    }  # fmt: skip
    ARGUMENTS |= dict.fromkeys((F.conv2d, F.conv3d), ARGUMENTS[F.conv1d])
    ARGUMENTS |= dict.fromkeys(
        (F.conv_transpose2d, F.conv_transpose3d), ARGUMENTS[F.conv_transpose1d]
    )

    def __init__(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.func, self.given = func, dict(zip(self.ARGUMENTS[func], args, strict=False)) | kwargs

    @property
    def x(self) -> Tensor:
        found: Tensor = self.given["input"]
        return found

    @property
    def weight(self) -> Tensor | None:
        return self.given.get("weight")

    @property
    def bias(self) -> Tensor | None:
        return self.given.get("bias")


@final
class Watch(TorchFunctionMode):
    """Records the calls that take a tensor whole as weight or bias, and which tensors reach
    anything else.

    ``whole``: the calls that count as such. ``copies``: whether to keep the input of each, as it
    was and as it is.
    """

    def __init__(
        self, params: Params, whole: Callable[[Call], bool], *, copies: bool = False
    ) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in params.items()}
        self.whole, self.copying = whole, copies
        self.calls: list[tuple[Call, str | None, str | None]] = []
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.uses: Counter[str] = Counter()  # as a whole
        self.other: set[str] = set()
        self.last: list[str] = []  # those of the last call that took any

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = Call(func, args, kwargs) if func in Call.ARGUMENTS else None
        names = (
            [None, None]
            if call is None
            else [self.names.get(id(t)) for t in (call.weight, call.bias)]
        )
        if call is not None and any(names) and self.whole(call):
            self.last = [name for name in names if name is not None]
            self.uses.update(self.last)
            self.other.update(
                self._named({k: v for k, v in call.given.items() if k not in ("weight", "bias")})
            )
            self.calls.append((call, names[0], names[1]))
            if self.copying:
                self.copies.append((call.x.detach().clone(), call.x))
            return func(*args, **kwargs)
        out = func(*args, **kwargs)
        if getattr(func, "__name__", "") != "__get__" or isinstance(out, Tensor):
            used = self._named(
                (args, kwargs)
            )  # reading .shape or .dtype uses nothing, reading .T does
            self.other.update(used)
            self.last = used or self.last
        return out

    def _named(self, tree: Any) -> list[str]:
        return [self.names[id(leaf)] for leaf in tree_leaves(tree) if id(leaf) in self.names]

"""A block in which a function receives every operation of torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch.overrides import TorchFunctionMode

# (operation, its arguments, its keyword arguments) -> its result
Handler = Callable[[Callable[..., Any], Sequence[Any], dict[str, Any]], Any]


class Intercept(TorchFunctionMode):
    """A block in which every operation of torch is passed to a handler.

    Operations inside the handler are passed to the blocks around this one. A block inside another
    one receives the operations first.

    Args:
        handler: receives the operation, its arguments and its keyword arguments, and returns the
            result.
    """

    def __init__(self, handler: Handler) -> None:
        super().__init__()
        self.handler = handler

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Return the result of the handler."""
        return self.handler(func, args, kwargs or {})

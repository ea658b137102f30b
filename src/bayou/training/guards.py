"""Guards of a training step: values that are not finite, and Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from bayou.training.ranks import current


class Watch:
    """Detects the first step whose loss or gradients are not finite, and names the tensor.

    On a CPU this happens in the step itself. On other devices the values of the first bad step stay
    there until ``read``, so that no step synchronizes with the device.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, name_of: Callable[[str], str] = str
    ) -> None:
        self.named, self.name_of, self.eager = (
            list(module.named_parameters()),
            name_of,
            device.type == "cpu",
        )
        self.norm: Tensor | None = None  # of all gradients of the last step, on a CPU
        self._found: Tensor | None = None  # (2 + gradients,): step, loss, sizes of the gradients
        self._names: list[str] = []
        self._first: Tensor | None = (
            None  # the first bad step of a recorded run, -1 if there was none
        )

    def look(self, value: Tensor, step: int, x: Any, y: Tensor) -> None:
        """Check a loss and its gradients."""
        graded = [(name, p.grad) for name, p in self.named if p.grad is not None]
        names, gradients = [name for name, _ in graded], [gradient for _, gradient in graded]
        if self.eager:
            self.norm = nn.utils.get_total_norm(gradients)  # keeps NaN and inf
            if not math.isfinite(float(value.detach()) + float(self.norm)):
                self._look_closer(value, step, x, y, graded)
            return
        sizes = [value.detach().abs(), *torch._foreach_norm(gradients, math.inf)]
        found = torch.stack([size.double() for size in sizes])
        found = torch.cat([found.new_full((1,), float(step)), found])
        if self._found is None or len(self._found) != len(found):
            self.read()
            self._found, self._names = found, names
        else:
            self._found = torch.where(self._found.isfinite().all(), found, self._found)

    def prepare(self) -> None:
        """Allocate the tensor of ``mark`` on the device."""
        device = self.named[0][1].device
        self._first = torch.full((), -1, dtype=torch.long, device=device)
        self.now = torch.zeros((), dtype=torch.long, device=device)

    def mark(self, value: Tensor) -> None:
        """``look`` for a recorded step: store the number of the first bad step (``now``) on the
        device.
        """
        assert self._first is not None
        gradients = [p.grad for _, p in self.named if p.grad is not None]
        total = torch.stack([value.detach().abs(), *torch._foreach_norm(gradients, math.inf)]).sum()
        bad = ~total.isfinite() & (self._first < 0)
        self._first.copy_(torch.where(bad, self.now, self._first))

    def read(self) -> None:
        """Raise for a bad step detected on the device."""
        if self._first is not None and (first := int(self._first)) >= 0:
            bad = [name for name, p in self.named if not bool(p.isfinite().all())]
            what = f"the parameter {self.name_of(bad[0])}" if bad else "a gradient or the loss"
            raise FloatingPointError(_message(first, None, what))
        if self._found is None:
            return
        step, loss, *sizes = self._found.tolist()
        bad = [
            name for name, size in zip(self._names, sizes, strict=True) if not math.isfinite(size)
        ]
        if bad:
            raise FloatingPointError(
                _message(int(step), loss, f"the gradient of {self.name_of(bad[0])}")
            )
        if not math.isfinite(loss):
            raise FloatingPointError(_message(int(step), loss, "the loss itself"))

    def parameters(self, step: int) -> None:
        """Raise if a parameter is not finite after ``step`` steps: such values are never saved or
        returned.
        """
        self.read()
        for name, parameter in self.named:
            if not math.isfinite(float(parameter.detach().sum())) and not bool(
                parameter.isfinite().all()
            ):
                raise FloatingPointError(
                    _message(step - 1, None, f"the parameter {self.name_of(name)}")
                )

    def _look_closer(
        self, value: Tensor, step: int, x: Any, y: Tensor, graded: list[tuple[str, Tensor]]
    ) -> None:
        """The first of: an input, a parameter, a gradient, the loss; None if only the total norm
        overflowed.
        """
        inputs = x if isinstance(x, tuple | list) else (x,)
        data = [("the input x of this batch", item) for item in inputs if isinstance(item, Tensor)]
        candidates = [
            *data,
            ("the target y of this batch", y),
            *((f"the parameter {self.name_of(name)}", p) for name, p in self.named),
            *((f"the gradient of {self.name_of(name)}", gradient) for name, gradient in graded),
            ("the loss itself", value),
        ]
        for what, tensor in candidates:
            if not bool(tensor.detach().isfinite().all()):
                raise FloatingPointError(_message(step, float(value.detach()), what))


def _message(step: int, loss: float | None, what: str) -> str:
    seen = "" if loss is None else f" (the loss is {loss})"
    return (
        f"step {step}: {what} is not finite{seen}. The run stops, and the last checkpoint is kept; try a "
        "smaller lr, clip=1.0 or standardized inputs"
    )


class Interrupt:
    """Ctrl-C takes effect at the end of a step, the same one in all processes; a second one
    immediately.
    """

    def __init__(self) -> None:
        self._ranks = current()
        self._held = self._pending = self._installed = False

    def __enter__(self) -> Self:
        main = threading.current_thread() is threading.main_thread()
        if (
            main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
        ):  # keep a handler of the user
            signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._held or self._pending:
            raise KeyboardInterrupt
        self._pending = True

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the first Ctrl-C is deferred to the end."""
        self._held = True
        try:
            yield
        finally:
            self._held = self._ranks.size > 1  # until the end of the next step
        self._pending = self._ranks.any(self._pending)
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

"""Guards of a training step: values that are not finite, and Ctrl-C."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Self

import torch
from torch import Tensor, nn

from bayou.training.inputs import Inputs, tensors_of
from bayou.training.ranks import current


class FiniteCheck:
    """Detects the first step whose loss or gradients are not finite, and names the tensor.

    On a CPU this happens in the step itself. On other devices the values of the first bad step stay
    there until ``read``, so that no step synchronizes with the device.

    Args:
        module: has the parameters.
        device: that of the parameters.
        name_of: the user's name for a parameter of the module; by default its own.
    """

    def __init__(
        self, module: nn.Module, device: torch.device, name_of: Callable[[str], str] = str
    ) -> None:
        self.parameters: list[tuple[str, nn.Parameter]] = list(module.named_parameters())
        self.name_of = name_of
        self.is_immediate: bool = device.type == "cpu"
        self.norm: Tensor | None = None  # of all gradients of the last step, on a CPU
        self._sizes: Tensor | None = None  # (2 + gradients,): step, loss, sizes of the gradients
        self._names: list[str] = []
        # The first bad step of a recorded run, −1 if there was none.
        self._first_bad_step: Tensor | None = None

    def look(self, value: Tensor, step: int, x: Inputs, y: Tensor) -> None:
        """Check a loss and its gradients.

        Args:
            value: the loss.
            step: the number of the step.
            x: the inputs of the batch, which an error may name.
            y: its targets.
        """
        gradients = [(name, p.grad) for name, p in self.parameters if p.grad is not None]
        if self.is_immediate:
            # The norm keeps NaN and inf.
            self.norm = nn.utils.get_total_norm([gradient for _, gradient in gradients])
            if not math.isfinite(float(value.detach()) + float(self.norm)):
                self._raise_for_first(value, step, x, y, gradients)
            return
        largest = torch._foreach_norm([gradient for _, gradient in gradients], math.inf)
        sizes = torch.stack([size.double() for size in [value.detach().abs(), *largest]])
        sizes = torch.cat([sizes.new_full((1,), float(step)), sizes])
        if self._sizes is None or len(self._sizes) != len(sizes):
            self.read()
            self._sizes = sizes
            self._names = [name for name, _ in gradients]
        else:
            self._sizes = torch.where(self._sizes.isfinite().all(), sizes, self._sizes)

    def prepare(self) -> None:
        """Allocate the tensors of ``mark`` on the device."""
        device = self.parameters[0][1].device
        self._first_bad_step = torch.full((), -1, dtype=torch.long, device=device)
        self.now: Tensor = torch.zeros((), dtype=torch.long, device=device)

    def mark(self, value: Tensor) -> None:
        """Check a recorded step: store the number of the first bad one (``now``) on the device."""
        if self._first_bad_step is None:
            raise RuntimeError("prepare() allocates the tensors of mark()")
        gradients = [p.grad for _, p in self.parameters if p.grad is not None]
        sizes = [value.detach().abs(), *torch._foreach_norm(gradients, math.inf)]
        total = torch.stack(sizes).sum()
        is_first = ~total.isfinite() & (self._first_bad_step < 0)
        self._first_bad_step.copy_(torch.where(is_first, self.now, self._first_bad_step))

    def read(self) -> None:
        """Raise a FloatingPointError for a bad step detected on the device."""
        if self._first_bad_step is not None:
            first = int(self._first_bad_step)
            if first >= 0:
                self._raise_for_recorded_step(first)
        if self._sizes is None:
            return
        step, loss, *sizes = self._sizes.tolist()
        sizes_by_name = zip(self._names, sizes, strict=True)
        bad = [name for name, size in sizes_by_name if not math.isfinite(size)]
        if bad:
            gradient = f"the gradient of {self.name_of(bad[0])}"
            raise FloatingPointError(_message(int(step), loss, gradient))
        if not math.isfinite(loss):
            raise FloatingPointError(_message(int(step), loss, "the loss itself"))

    def _raise_for_recorded_step(self, step: int) -> None:
        """Raise a FloatingPointError that names a parameter, if one is not finite."""
        bad = [name for name, p in self.parameters if not bool(p.isfinite().all())]
        tensor = "a gradient or the loss"
        if bad:
            tensor = f"the parameter {self.name_of(bad[0])}"
        raise FloatingPointError(_message(step, None, tensor))

    def check_parameters(self, steps_done: int) -> None:
        """Raise a FloatingPointError if a parameter is not finite after so many steps.

        Such values are never saved or returned.
        """
        self.read()
        for name, parameter in self.parameters:
            # A finite sum needs no second pass.
            if math.isfinite(float(parameter.detach().sum())):
                continue
            if not bool(parameter.isfinite().all()):
                tensor = f"the parameter {self.name_of(name)}"
                raise FloatingPointError(_message(steps_done - 1, None, tensor))

    def _raise_for_first(
        self, value: Tensor, step: int, x: Inputs, y: Tensor, gradients: list[tuple[str, Tensor]]
    ) -> None:
        """Raise for the first of: an input, a parameter, a gradient, the loss.

        Nothing is raised if only the total norm overflowed.
        """
        candidates = [
            *(("the input x of this batch", item) for item in tensors_of(x)),
            ("the target y of this batch", y),
            *((f"the parameter {self.name_of(name)}", p) for name, p in self.parameters),
            *((f"the gradient of {self.name_of(name)}", gradient) for name, gradient in gradients),
            ("the loss itself", value),
        ]
        for description, tensor in candidates:
            if not bool(tensor.detach().isfinite().all()):
                raise FloatingPointError(_message(step, float(value.detach()), description))


def _message(step: int, loss: float | None, tensor: str) -> str:
    """Return the text of the error for a tensor that is not finite."""
    loss_text = "" if loss is None else f" (the loss is {loss})"
    return (
        f"step {step}: {tensor} is not finite{loss_text}. The run stops, and the last checkpoint "
        "is kept; try a smaller lr, clip=1.0 or standardized inputs"
    )


class Interrupt:
    """Ctrl-C, which takes effect at the end of a step, the same one in all processes.

    A second Ctrl-C takes effect immediately. A handler that the user installed is kept.
    """

    def __init__(self) -> None:
        self._ranks = current()
        self._is_deferred = False
        self._is_pending = False
        self._is_installed = False

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._handle)
            self._is_installed = True
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_installed:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_deferred or self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True

    @contextmanager
    def defer(self) -> Iterator[None]:
        """Defer the first Ctrl-C in the block to its end."""
        self._is_deferred = True
        try:
            yield
        finally:
            # Several processes stop after the same step: until the end of the next one.
            self._is_deferred = self._ranks.size > 1
        self._is_pending = self._ranks.any(self._is_pending)
        if self._is_pending:
            self._is_pending = False
            raise KeyboardInterrupt

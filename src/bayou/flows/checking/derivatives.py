"""The check of derivatives: gradients agree with finite differences."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call

from bayou.flows.checking.case import Case, Noise
from bayou.flows.checking.report import Result
from bayou.flows.core.compose import Direction
from bayou.flows.core.transform import Ladj, Pair

FIRST_STEP = 1e-6  # of the finite differences of first derivatives
# A root has an error of 1e-12, which differences divide by 1e-6.
ABSOLUTE_TOLERANCE = 1e-7
ABSOLUTE_TOLERANCE_ITERATIVE = 1e-6
INTEGER_NOTE = "integers: gradients are straight-through and not derivatives"

Inputs = tuple[Tensor | None, ...]  # the input, the context, and all parameters as one vector


@dataclass(frozen=True)
class JointFunction:
    """A direction of a map as a function of its input, its context and a vector of parameters.

    Args:
        name: of the direction.
        direction: the direction as a module.
        noise: of the pass.
    """

    name: str
    direction: Direction
    noise: Noise

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the parameters by name."""
        return dict(self.direction.named_parameters())

    def __call__(self, x: Tensor, context: Tensor | None, values: Tensor | None) -> Pair:
        """Compute (y, ladj) with the parameters replaced by these values."""
        parameters = self.parameters
        pieces = () if values is None else values.split([p.numel() for p in parameters.values()])
        pairs = zip(parameters.items(), pieces, strict=True)
        replacements = {key: piece.reshape(p.shape) for (key, p), piece in pairs}
        pair: Pair = functional_call(
            self.direction,
            replacements,
            (x, context),
            {"noise": self.noise},
        )
        return pair


def joint_functions(case: Case, rows: int) -> Iterator[tuple[JointFunction, Inputs]]:
    """Yield both directions as functions, with their inputs.

    Inputs that have no derivative require no gradient.

    Args:
        case: the map to check.
        rows: the number of random inputs.
    """
    for name, direction, x, context, noise in case.passes(rows):
        parameters = [p.detach().flatten() for p in direction.parameters()]
        values = torch.cat(parameters) if parameters else None
        is_integer = case.transform.whole_in if name == "forward" else case.transform.whole_out
        inputs = (
            x.detach().clone().requires_grad_(not is_integer),
            _differentiable_copy(context),
            _differentiable_copy(values),
        )
        yield JointFunction(name, direction, noise), inputs


def _differentiable_copy(tensor: Tensor | None) -> Tensor | None:
    """Return a leaf with the same values that requires a gradient, or None for None."""
    return None if tensor is None else tensor.detach().clone().requires_grad_()


def has_no_gradient(inputs: Inputs) -> bool:
    """Return whether no input requires a gradient: x is integer, and there is nothing else.

    Args:
        inputs: of a ``JointFunction``.
    """
    return not any(tensor is not None and tensor.requires_grad for tensor in inputs)


def gradcheck(case: Case) -> Iterator[Result]:
    """Compare gradients in the input, the context and all parameters with finite differences.

    Args:
        case: the map to check.
    """
    if case.is_discrete:
        yield Result.skip("gradcheck", INTEGER_NOTE)
        return
    for f, inputs in joint_functions(case, 2):
        if has_no_gradient(inputs):
            yield Result.skip(f"gradcheck {f.name}", "integers, and no parameters")
        else:
            yield _check_gradient(case, f, inputs)


def _check_gradient(case: Case, f: JointFunction, inputs: Inputs) -> Result:
    """Compare the gradients of a direction with finite differences."""
    # The gradient of an estimate need not be that of its value; the ladj rows compare it.
    is_estimate = case.transform.ladj_kind is Ladj.estimate

    def outputs(x: Tensor, context: Tensor | None, values: Tensor | None) -> Tensor:
        # One tensor, since gradcheck ignores an output without gradient.
        y, ladj = f(x, context, values)
        return y.flatten() if is_estimate else torch.cat([y.flatten(), ladj.flatten()])

    try:
        torch.autograd.gradcheck(
            outputs,
            inputs,  # type: ignore[arg-type]
            eps=FIRST_STEP,
            atol=ABSOLUTE_TOLERANCE_ITERATIVE if case.is_iterative else ABSOLUTE_TOLERANCE,
            rtol=case.tolerances["gradcheck"],
            fast_mode=True,
        )
    except GradcheckError as error:
        return Result(f"gradcheck {f.name}", False, note=str(error))
    return Result(f"gradcheck {f.name}", True)

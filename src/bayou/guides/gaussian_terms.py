"""What the draw and the KL of Gaussian weights have in common, in few passes over the weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from types import EllipsisType
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from bayou.priors import BoundNormal, BoundPrior

# Entries that are worked on at once. Some such blocks fit into the second-level cache of a CPU,
# where a pass takes a third of its time in memory.
BLOCK_SIZE = 2**17

# Entries of a tensor whose norm torch computes in single precision without loss: its error grows
# with the size.
MAX_SMALL_SIZE = 2**15

Block = slice | EllipsisType


class GaussianTerms(NamedTuple):
    """Terms of q(W) = Π N(M, σ²) with the prior N(0, s²) of every weight.

    Args:
        center: M.
        std: σ.
        kl: KL(q ‖ p), a scalar.
    """

    center: Tensor
    std: Tensor
    kl: Tensor


class GainTerms(NamedTuple):
    """Terms of q(W|z) = Π N(z_i·M_ij, σ_ij²) with the prior N(0, s²) of every weight.

    KL(q(W|z) ‖ p) = kl_at_zero + ½·Σ_i z_i²·quadratic_i.

    Args:
        center: M.
        std: σ.
        kl_at_zero: the KL at z = 0, a scalar.
        quadratic: Σ_j M_ij²/s², (D,).
        information: Σ_j M_ij²/σ_ij², (D,).
    """

    center: Tensor
    std: Tensor
    kl_at_zero: Tensor
    quadratic: Tensor
    information: Tensor


def has_simple_prior(prior: BoundPrior) -> TypeGuard[BoundNormal]:
    """Return whether the functions of this file suit the prior of a tensor, here and now.

    It must be N(0, s²) with one scale, on a CPU: elsewhere the time of a step is not that of its
    passes. Compiled and mapped code has plain operations, too.

    Args:
        prior: the prior.
    """
    if type(prior) is not BoundNormal or prior.mean.device.type != "cpu":
        return False
    if torch.compiler.is_compiling() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    has_numbers = prior.log_scale.numel() == prior.mean.numel() == 1
    return has_numbers and float(prior.mean) == 0.0


def gain_terms(center: Tensor, log_std: Tensor, prior: BoundNormal, axis: int) -> GainTerms:
    """Compute the terms of one tensor with gains, with few passes in both directions.

    The gradient of the KL is added to that of the rest of the loss in the pass that computes it:
    use the returned center and std instead of the parameters.

    Args:
        center: M.
        log_std: log σ.
        prior: a prior for which ``has_simple_prior`` holds.
        axis: the axis of the gains.
    """
    return GainTerms(*_Terms.apply(axis, center, log_std, prior.log_scale))  # type: ignore[no-untyped-call]


def gaussian_terms(
    centers: Sequence[Tensor], log_stds: Sequence[Tensor], priors: Sequence[BoundNormal]
) -> list[GaussianTerms]:
    """Compute the terms of several tensors without gains, the small ones in the same calls.

    As for ``gain_terms``, use the returned centers and stds instead of the parameters.

    Args:
        centers: M of each tensor.
        log_stds: log σ of each.
        priors: priors for which ``has_simple_prior`` holds.
    """
    terms: dict[int, GaussianTerms] = {}
    small: list[int] = []
    for i, (center, log_std, prior) in enumerate(zip(centers, log_stds, priors, strict=True)):
        if center.numel() <= MAX_SMALL_SIZE:
            small.append(i)
            continue
        outputs = _Terms.apply(None, center, log_std, prior.log_scale)  # type: ignore[no-untyped-call]
        terms[i] = GaussianTerms(*outputs[:3])
    if small:
        kls, *others = _SmallTerms.apply(  # type: ignore[no-untyped-call]
            len(small),
            *(centers[i] for i in small),
            *(log_stds[i] for i in small),
            *(priors[i].log_scale for i in small),
        )
        parts = zip(others[: len(small)], others[len(small) :], kls.unbind(), strict=True)
        terms |= {i: GaussianTerms(*part) for i, part in zip(small, parts, strict=True)}
    return [terms[i] for i in range(len(centers))]


def _blocks(tensor: Tensor) -> Iterator[Block]:
    """Yield consecutive blocks of a tensor along its first axis."""
    if tensor.numel() <= BLOCK_SIZE:
        yield ...
        return
    rows = max(1, BLOCK_SIZE * len(tensor) // tensor.numel())
    for start in range(0, len(tensor), rows):
        yield slice(start, start + rows)


def _sum_of_squares(x: Tensor) -> Tensor:
    """Compute Σ x² without a tensor of squares."""
    flat = x.reshape(-1)
    return flat.dot(flat)


def _sum_but(x: Tensor, axis: int) -> Tensor:
    """Sum over all axes but one."""
    others = [other for other in range(x.ndim) if other != axis]
    return x.sum(others) if others else x


def _along(values: Tensor, axis: int, ndim: int) -> Tensor:
    """Return values of every gain, (D,), shaped to multiply a weight."""
    shape = [1] * ndim
    shape[axis] = -1
    return values.reshape(shape)


class _Terms(torch.autograd.Function):
    """The fields of ``GainTerms`` from the axis, M, log σ and log s; those of
    ``GaussianTerms`` and two None without an axis.
    """

    @staticmethod
    def forward(
        ctx: Any, axis: int | None, center: Tensor, log_std: Tensor, log_scale: Tensor
    ) -> tuple[Tensor | None, ...]:
        scalar_log_scale = log_scale.reshape(())
        precision = torch.exp(-2 * scalar_log_scale)
        std = torch.empty_like(log_std)
        squares = []  # of σ, and of M without gains
        log_std_sums = []
        quadratic = information = None
        if axis is not None:
            quadratic = center.new_zeros(center.shape[axis])
            information = torch.zeros_like(quadratic)
        for block in _blocks(center):
            mean = center[block]
            block_std = torch.exp(log_std[block], out=std[block])
            squares.append(_sum_of_squares(block_std))
            log_std_sums.append(log_std[block].sum())
            if axis is None or quadratic is None or information is None:
                squares.append(_sum_of_squares(mean))
                continue
            gains = block if axis == 0 else ...
            square = mean * mean
            quadratic[gains] += _sum_but(square, axis)
            ratio = square.div_(block_std).div_(block_std)
            information[gains] += _sum_but(ratio, axis)
        if quadratic is not None:
            quadratic *= precision
        kl = center.numel() * (scalar_log_scale - 0.5)
        kl = torch.addcmul(kl, reduce(torch.add, squares), precision, value=0.5)
        kl -= reduce(torch.add, log_std_sums)
        ctx.axis = axis
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(center, std, log_scale)
        return center, std, kl, quadratic, information

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        center, std, log_scale = ctx.saved_tensors
        of_center, of_std, of_kl, of_quadratic, of_information = gradients
        precision = (-2 * log_scale.reshape(())).exp()
        if of_kl is None:
            of_kl = torch.zeros_like(precision)
        row_gradients = None
        if ctx.axis is not None:
            zeros = center.new_zeros(center.shape[ctx.axis])
            of_quadratic = zeros if of_quadratic is None else of_quadratic
            of_information = zeros if of_information is None else of_information
            row_gradients = (
                _along(of_quadratic * precision, ctx.axis, center.ndim).expand_as(center),
                _along(of_information, ctx.axis, center.ndim).expand_as(center),
            )
        pull = _Pull(of_kl * precision, -of_kl)
        of_log_scale = None
        if ctx.needs_input_grad[3]:
            gradient = _scale_gradient(center, std, precision, of_kl, of_quadratic, ctx.axis)
            of_log_scale = gradient.reshape(log_scale.shape)
        if torch.is_grad_enabled():  # the derivative is to be differentiated again
            of_parameters = pull(center, std, of_center, of_std, row_gradients)
            return None, *of_parameters, of_log_scale
        center_gradient = torch.empty_like(center)
        log_std_gradient = torch.empty_like(std)
        for block in _blocks(center):
            of_rows = None
            if row_gradients is not None:
                of_rows = (row_gradients[0][block], row_gradients[1][block])
            pull(
                center[block],
                std[block],
                None if of_center is None else of_center[block],
                None if of_std is None else of_std[block],
                of_rows,
                center_gradient[block],
                log_std_gradient[block],
            )
        return None, center_gradient, log_std_gradient, of_log_scale


class _Pull(NamedTuple):
    """Computes gradients of M and log σ from those of a loss with the KL.

    Args:
        of_squares: twice the gradient of Σ M² (without gains) and of Σ σ².
        of_log_std: that of Σ log σ.
    """

    of_squares: Tensor
    of_log_std: Tensor

    def __call__(
        self,
        center: Tensor,
        std: Tensor,
        of_center: Tensor | None,
        of_std: Tensor | None,
        of_rows: tuple[Tensor, Tensor] | None,
        center_out: Tensor | None = None,
        log_std_out: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the gradients of M and log σ.

        Args:
            center: M, or a block of it.
            std: σ.
            of_center: the gradient of M in the rest of the loss; None for 0.
            of_std: that of σ.
            of_rows: those of Σ_j M² and of the information, in the shape of M; None without gains.
            center_out: receives the gradient of M; None (the default) for a new tensor.
            log_std_out: likewise for log σ.
        """
        if of_std is None:
            of_std = std * self.of_squares
        else:
            of_std = torch.addcmul(of_std, std, self.of_squares)
        of_log_std = torch.addcmul(self.of_log_std, of_std, std, out=log_std_out)
        if of_rows is None:
            factor, value = self.of_squares, 1.0
        else:
            of_square, of_information = of_rows
            of_ratio = (of_information / std).div_(std)
            of_log_std = of_log_std.addcmul_(of_ratio * center, center, value=-2)
            factor, value = of_ratio + of_square, 2.0
        if of_center is None:
            of_center = torch.mul(center, factor * value, out=center_out)
        else:
            of_center = torch.addcmul(of_center, center, factor, value=value, out=center_out)
        return of_center, of_log_std


def _scale_gradient(
    center: Tensor,
    std: Tensor,
    precision: Tensor,
    of_kl: Tensor,
    of_quadratic: Tensor | None,
    axis: int | None,
) -> Tensor:
    """Compute the gradient of log s."""
    squares = std.square().sum()
    if axis is None:
        squares = squares + center.square().sum()
    gradient = of_kl * (center.numel() - precision * squares)
    if axis is None or of_quadratic is None:
        return gradient
    quadratic = _sum_but(center.square(), axis) * precision
    return gradient - 2 * (of_quadratic * quadratic).sum()


class _SmallTerms(torch.autograd.Function):
    """KL of G tensors without gains, (G,), then their centers and stds; from M, log σ and log s."""

    @staticmethod
    def forward(ctx: Any, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        centers = tensors[:count]
        log_stds = tensors[count : 2 * count]
        log_scales = torch.stack([log_scale.reshape(()) for log_scale in tensors[2 * count :]])
        stds = torch._foreach_exp(log_stds)
        norms = torch.stack(torch._foreach_norm([*centers, *stds])).square_()
        squares = norms[:count] + norms[count:]
        sizes = log_scales.new_tensor([center.numel() for center in centers])
        log_std_sums = torch.stack([log_std.sum() for log_std in log_stds])
        kls = sizes * (log_scales - 0.5) - log_std_sums
        kls.addcmul_(squares, torch.exp(-2 * log_scales), value=0.5)
        ctx.count = count
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*centers, *stds, *tensors[2 * count :])
        return kls, *centers, *stds

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        count = ctx.count
        centers = ctx.saved_tensors[:count]
        stds = ctx.saved_tensors[count : 2 * count]
        log_scales = torch.stack([s.reshape(()) for s in ctx.saved_tensors[2 * count :]])
        of_kls = gradients[0]
        if of_kls is None:
            of_kls = torch.zeros_like(log_scales)
        zero = of_kls.new_zeros(())
        of_centers = [zero if g is None else g for g in gradients[1 : count + 1]]
        of_stds = [zero if g is None else g for g in gradients[count + 1 :]]
        of_squares = of_kls * torch.exp(-2 * log_scales)
        weights = of_squares.unbind()
        of_all_stds = torch._foreach_addcmul(of_stds, stds, weights)
        of_log_stds = torch._foreach_addcmul(of_kls.neg().unbind(), of_all_stds, stds)
        of_all_centers = torch._foreach_addcmul(of_centers, centers, weights)
        of_log_scales: list[Tensor | None] = [None] * count
        for i in range(count):
            if ctx.needs_input_grad[1 + 2 * count + i]:
                squares = centers[i].square().sum() + stds[i].square().sum()
                gradient = of_kls[i] * centers[i].numel() - of_squares[i] * squares
                of_log_scales[i] = gradient.reshape(ctx.saved_tensors[2 * count + i].shape)
        return None, *of_all_centers, *of_log_stds, *of_log_scales

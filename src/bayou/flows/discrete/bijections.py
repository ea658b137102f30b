"""Bijections of integers (stored as floats), with term 0: integer discrete flows and modulo flows.

A bijection permutes probabilities and cannot change them; it can bring them into an order that a
simple base (``DiscretizedLogistic``, ``Categorical``) can represent. Gradients are
straight-through: of t for round(t), of a softmax for an argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from bayou.flows.core.arguments import as_event, check_size
from bayou.flows.core.compose import Chain, Inverse, MapChain
from bayou.flows.core.nets import mlp, zero_init
from bayou.flows.core.transform import Cost, Event, Map, Pair, Symmetric
from bayou.flows.layers.conditioners import MADE, Conditioner, CoordinateSteps, MaskedLinear, Order
from bayou.flows.layers.coupling import Mask, broadcast_context, coupling_mask


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """The values of ``hard`` with the gradient of ``soft``."""
    return hard.detach() + (soft - soft.detach())


class DiscreteMap(Map):
    """A bijection of integers, with term 0."""

    whole_in = whole_out = True
    event_in: tuple[int, ...]
    event_out: tuple[int, ...]

    def _no_term(self, x: Tensor, event: Event) -> Tensor:
        return x.new_zeros(x.shape[: x.ndim - len(event)])


class IntegerIdentity(DiscreteMap):
    """y = x with data in 0 .. levels − 1: the last map of a chain.

    Args:
        event: the shape of x and y.
        levels: by default y is unbounded.
    """

    def __init__(self, event: int | Sequence[int], levels: int | None = None) -> None:
        super().__init__()
        self.event_in = self.event_out = as_event(event)
        self.levels_out = None if levels is None else check_size(levels, "the number of levels")

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        return x, self._no_term(x, self.event_in)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        return y, self._no_term(y, self.event_in)


class IntegerCoupling(Symmetric, DiscreteMap):
    r"""y = x + (1 − m) ⊙ round(s·net(m ⊙ x / s)) with a mask m of the kept entries (Hoogeboom et
    al. 2019).

    Args:
        event: the size of a vector, or (C, H, W).
        mask: as in ``Coupling``, of the flattened event; by default the first "half", and a
            checkerboard for images.
        flip: exchange kept and changed entries.
        hidden: widths of the default network, an MLP for vectors and a CNN for images, whose last
            layer starts at 0.
        scale: s, the magnitude of the numbers; half of the levels is usual.
        net: any module (n, \*event) → (n, \*event).
        levels: L; the result is y mod L, in 0 .. L − 1, so that the base may be bounded.
        context_dim: the size of a context that is an additional input of the network, as entries or
            channels.
    """

    kept: Tensor

    def __init__(
        self,
        event: int | Sequence[int],
        mask: Mask | None = None,
        flip: bool = False,
        hidden: Sequence[int] = (64, 64),
        scale: float = 128.0,
        net: nn.Module | None = None,
        levels: int | None = None,
        context_dim: int = 0,
    ) -> None:
        super().__init__()
        self.event_in = self.event_out = shape = as_event(event)
        if not scale > 0:
            raise ValueError(
                f"the scale of IntegerCoupling must be positive, got {scale}; half of the levels is usual"
            )
        self.levels, self.context_dim = levels, context_dim
        self.scale = scale
        if mask is None and len(shape) == 1:
            mask = "half"
        elif mask is None:  # a checkerboard
            mask = ((torch.arange(shape[-2])[:, None] + torch.arange(shape[-1])) % 2 == 0).expand(
                shape
            )
        kept = coupling_mask(
            math.prod(shape),
            mask if isinstance(mask, str) else torch.as_tensor(mask).flatten(),
            flip,
        )
        self.register_buffer("kept", kept.reshape(shape))
        if net is None:
            if len(shape) not in (1, 3):
                raise ValueError(
                    f"IntegerCoupling takes vectors or images (C, H, W), got {shape}; pass net="
                )
            net = (mlp if len(shape) == 1 else cnn)(shape[0] + context_dim, hidden, shape[0])
        self.net = net

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        kept, dims = self.kept.to(x), len(self.event_in)
        seen = x * kept / self.scale
        if context is not None:
            seen, context = broadcast_context(seen, context, dims)
            assert context is not None
            pixels = context.reshape(*context.shape, *[1] * (dims - 1))
            planes = pixels.expand(*context.shape, *self.event_in[1:])
            seen = torch.cat([seen, planes], -dims)
        t = self.net(seen.reshape(-1, *seen.shape[-dims:])).reshape(
            *seen.shape[:-dims], *self.event_in
        )
        t = self.scale * t * (1 - kept)
        shift = straight_through(t.round(), t)
        y = x - shift if inverse else x + shift
        return y if self.levels is None else y.remainder(self.levels), self._no_term(
            y, self.event_in
        )


def cnn(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """3×3 convolutions and a last 1×1 convolution that starts at 0."""
    layers: list[nn.Module] = []
    for width in hidden:
        layers += [nn.Conv2d(inputs, width, 3, padding=1), nn.ReLU()]
        inputs = width
    return nn.Sequential(*layers, zero_init(nn.Conv2d(inputs, outputs, 1)))


def integer(
    event: int | Sequence[int],
    levels: int = 256,
    layers: int = 4,
    hidden: Sequence[int] = (64, 64),
    wrap: bool = False,
    context_dim: int = 0,
) -> MapChain:
    """An integer discrete flow (Hoogeboom et al. 2019).

    Args:
        event: the size of a vector, or (C, H, W).
        levels: data are in 0 .. levels − 1.
        layers: the number of couplings.
        hidden: widths of their networks.
        wrap: compute modulo ``levels``, so that x has the same range as the data.
        context_dim: the size of the context, 0 for none.
    """
    size, bound = check_size(levels, "the number of levels") / 2, levels if wrap else None
    couplings = [
        IntegerCoupling(
            event, None, bool(i % 2), hidden, size, levels=bound, context_dim=context_dim
        )
        for i in range(check_size(layers, "the number of layers"))
    ]
    return Chain(*couplings, IntegerIdentity(event, levels))


# --- modulo ----------------------------------------------------------------------------------------------------------


def units(classes: int) -> list[int]:
    """The numbers with an inverse modulo K."""
    return [k for k in range(1, classes) if math.gcd(k, classes) == 1]


class OneHot(DiscreteMap):
    """y_d = argmax_k x_dk: one-hot rows (D, K) as class indices (D,).

    Args:
        dim: D.
        classes: K.
    """

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.classes = self.levels_out = check_size(classes, "the number of classes")
        self.levels_in = 2
        self.event_in, self.event_out = (check_size(dim, "OneHot"), classes), (dim,)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        return x.argmax(-1).to(x), self._no_term(x, self.event_in)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        return one_hot(y.long(), self.classes).to(y), self._no_term(y, self.event_out)


class Modulo(nn.Module):
    """y = (μ + σ·x) mod K on one-hot rows, with μ and σ, one of the U units of K, from logits (...,
    K + U).

    y_j = Σ μ_m σ_u x_k over all m + u·k ≡ j, multilinear in the one-hot μ, σ and x, so that the
    straight-through gradient of a softmax applies (Tran et al. 2019). Without gradients the
    integers are computed directly.

    Args:
        classes: K.
        scale: whether σ is learned; otherwise it is 1.
        temperature: of the softmax.
    """

    numbers: Tensor  # the units and their inverses, (2, U)

    def __init__(self, classes: int, scale: bool = True, temperature: float = 1.0) -> None:
        super().__init__()
        if classes < 2 or not temperature > 0:
            raise ValueError(
                f"a modulo flow needs 2 classes and a positive temperature, got {classes}, {temperature}"
            )
        self.classes, self.temperature = classes, temperature
        k, found = torch.arange(classes), torch.tensor(units(classes) if scale else [1])
        self.params = classes + (len(found) if len(found) > 1 else 0)
        inverses = torch.tensor([pow(u, -1, classes) for u in found.tolist()])
        self.register_buffer("numbers", torch.stack([found, inverses]), persistent=False)
        for name, result in (
            ("plus", k[:, None] + k),
            ("minus", k - k[:, None]),
            ("times", found[:, None] * k),
            ("over", inverses[:, None] * k),
        ):  # (a, k) ↦ the one-hot row of the result, (A·K, K)
            self.register_buffer(
                name, one_hot(result % classes, classes).flatten(0, 1).float(), persistent=False
            )

    def _chosen(self, logits: Tensor) -> Tensor:
        hard = one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)
        return straight_through(hard, (logits / self.temperature).softmax(-1))

    def forward(self, x: Tensor, logits: Tensor, inverse: bool = False) -> Tensor:
        """x (..., K), logits (..., K + U)."""
        if not (torch.is_grad_enabled() and (x.requires_grad or logits.requires_grad)):
            k, shift, unit = (
                x.argmax(-1),
                logits[..., : self.classes].argmax(-1),
                self.numbers[int(inverse), :1],
            )
            if self.params > self.classes:
                unit = self.numbers[int(inverse)][logits[..., self.classes :].argmax(-1)]
            k = unit * (k - shift) if inverse else unit * k + shift
            return one_hot(k % self.classes, self.classes).to(x)
        steps = [("minus" if inverse else "plus", self._chosen(logits[..., : self.classes]))]
        if self.params > self.classes:
            steps.append(
                ("over" if inverse else "times", self._chosen(logits[..., self.classes :]))
            )
        for name, chosen in steps if inverse else steps[::-1]:
            pairs = (chosen.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
            x = pairs @ getattr(self, name).to(x)
        return x


class ModuloCoupling(Symmetric, DiscreteMap):
    """y = (μ + σ·x) mod K with μ and σ from the kept rows and the context, (D, K) → (D, K) (Tran et
    al. 2019).

    Args:
        dim: D, at least 2.
        classes: K.
        mask, flip, hidden, context_dim: as in ``Coupling``.
        scale, temperature: whether σ is learned, and the temperature of its softmax.
    """

    order: Tensor
    back: Tensor

    def __init__(
        self, dim: int, classes: int, mask: Mask = "half", flip: bool = False, hidden: Sequence[int] = (64, 64),
        scale: bool = True, temperature: float = 1.0, context_dim: int = 0,
    ) -> None:  # fmt: skip
        super().__init__()
        kept = coupling_mask(dim, mask, flip)
        self.event_in = self.event_out = (dim, classes)
        self.context_dim = context_dim
        self.kept, self.changed = int(kept.sum()), int((~kept).sum())
        order = torch.cat([kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]])
        self.register_buffer("order", order)
        self.register_buffer("back", order.argsort())
        self.modulo = Modulo(classes, scale, temperature)
        self.conditioner = mlp(
            self.kept * classes + context_dim, hidden, self.changed * self.modulo.params
        )

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        x, context = broadcast_context(x, context, 2)
        kept, rest = x[..., self.order, :].split([self.kept, self.changed], -2)
        seen = kept.flatten(-2)
        if context is not None:
            seen = torch.cat([seen, context], -1)
        logits = self.conditioner(seen).unflatten(-1, (self.changed, -1))
        y = torch.cat([kept, self.modulo(rest, logits, inverse)], -2)[..., self.back, :]
        return y, self._no_term(y, self.event_in)


class OneHotMADE(MADE):
    """A ``MADE`` whose inputs are one-hot rows, (..., D, K) → (..., D, P)."""

    axis = -2

    def __init__(
        self,
        dim: int,
        classes: int,
        params: int,
        hidden: Sequence[int] = (64, 64),
        order: Order = None,
        context_dim: int = 0,
    ) -> None:
        super().__init__(dim, params, hidden, order, context_dim=context_dim)
        self.classes = classes
        self.layers[0] = MaskedLinear(self.layers[0].mask.repeat_interleave(classes, 1))

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        return super().forward(x.flatten(-2), context)

    def steps(self, like: Tensor, context: Tensor | None = None) -> CoordinateSteps:
        return Conditioner.steps(self, like, context)  # one whole pass per row


class ModuloAutoregressive(DiscreteMap):
    """y_d = (μ + σ·x_d) mod K with μ and σ from the rows x_{<d} (Tran et al. 2019).

    Forward is one pass, the inverse goes row by row; ``Inverse`` of it computes log-probabilities
    in one pass.

    Args:
        conditioner: a network of rows, (..., D, K) → (..., D, params), such as ``OneHotMADE``.
        classes: K.
        scale, temperature: as in ``ModuloCoupling``.
    """

    inverse_kind = Cost.autoregressive

    def __init__(
        self, conditioner: Conditioner, classes: int, scale: bool = True, temperature: float = 1.0
    ) -> None:
        super().__init__()
        self.event_in = self.event_out = (conditioner.dim, classes)
        self.context_dim = conditioner.context_dim
        self.modulo = Modulo(classes, scale, temperature)
        if conditioner.out != self.modulo.params:
            raise ValueError(
                f"a modulo flow of {classes} classes takes {self.modulo.params} parameters per row but the conditioner "
                f"returns {conditioner.out}; build it with params={self.modulo.params}"
            )
        self.conditioner = conditioner

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        x, context = broadcast_context(x, context, 2)
        y = self.modulo(x, self.conditioner(x, context))
        return y, self._no_term(y, self.event_in)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        y, context = broadcast_context(y, context, 2)
        steps, rows = self.conditioner.steps(y, context), list(y.unbind(-2))
        for d in self.conditioner.coordinates:
            rows[d] = self.modulo(rows[d], steps.params(), inverse=True)
            steps.push(rows[d])
        return torch.stack(rows, -2), self._no_term(y, self.event_in)


def modulo(
    dim: int, classes: int, layers: int = 4, hidden: Sequence[int] = (64, 64), autoregressive: bool = False,
    scale: bool = True, temperature: float = 1.0, context_dim: int = 0,
) -> MapChain:  # fmt: skip
    """A modulo flow from one-hot rows (D, K) to classes (D,) (Tran et al. 2019).

    Args:
        dim: D.
        classes: K.
        layers: the number of maps.
        hidden: widths of their networks.
        autoregressive: autoregressive maps, with log-probabilities in one pass, instead of
            couplings.
        scale, temperature: as in ``ModuloCoupling``.
        context_dim: the size of the context, 0 for none.
    """
    count = Modulo(classes, scale).params
    maps: list[Map] = []
    for i in range(check_size(layers, "the number of layers")):
        if autoregressive:
            net = OneHotMADE(
                dim, classes, count, hidden, range(dim)[::-1] if i % 2 else None, context_dim
            )
            maps.append(Inverse(ModuloAutoregressive(net, classes, scale, temperature)))
        else:
            maps.append(
                ModuloCoupling(
                    dim, classes, "half", bool(i % 2), hidden, scale, temperature, context_dim
                )
            )
    return Chain(*maps, OneHot(dim, classes))

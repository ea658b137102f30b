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
from bayou.flows.core.transform import Cost, Event, Map, Pair, Symmetric, broadcast_context
from bayou.flows.layers.conditioners import MADE, Conditioner, CoordinateSteps, MaskedLinear, Order
from bayou.flows.layers.coupling import Mask, coupling_mask

IMAGE_AXES = 3  # (C, H, W)


def straight_through(hard: Tensor, soft: Tensor) -> Tensor:
    """Return the values of ``hard`` with the gradient of ``soft``.

    Args:
        hard: a value without a useful gradient.
        soft: a differentiable approximation of it, of the same shape.
    """
    return hard.detach() + (soft - soft.detach())


class DiscreteMap(Map):
    """A bijection of integers, with term 0."""

    whole_in = whole_out = True
    event_in: tuple[int, ...]
    event_out: tuple[int, ...]

    def _no_term(self, x: Tensor, event: Event) -> Tensor:
        """Return 0 for every event of x."""
        return x.new_zeros(x.shape[: x.ndim - len(event)])


class IntegerIdentity(DiscreteMap):
    """The identity y = x of integers: the last map of a chain.

    It states the range of the data: y is in 0 .. levels − 1.

    Args:
        event: the shape of x and y: the size of a vector, or an event.
        levels: the number of values of y; None, the default, for all integers.

    Example:
        >>> import torch
        >>> from bayou.flows import IntegerIdentity
        >>> IntegerIdentity(2, levels=4)(torch.tensor([0.0, 3.0]))
        (tensor([0., 3.]), tensor(0.))
    """

    def __init__(self, event: int | Sequence[int], levels: int | None = None) -> None:
        super().__init__()
        self.event_in: tuple[int, ...] = as_event(event)
        self.event_out: tuple[int, ...] = self.event_in
        self.levels_out: int | None = (
            None if levels is None else check_size(levels, "the number of levels")
        )

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        """Return x and 0."""
        return x, self._no_term(x, self.event_in)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        """Return y and 0."""
        return y, self._no_term(y, self.event_in)


class IntegerCoupling(Symmetric, DiscreteMap):
    r"""An additive coupling of integers, the layer of integer discrete flows.

    y = x + (1 − m) ⊙ round(s·net(m ⊙ x / s)) with a mask m of the kept entries. The shift is an
    integer that depends on kept entries only, so that the inverse subtracts it. The gradient of
    round(t) is that of t.

    Args:
        event: the size of a vector, or (C, H, W).
        mask: the entries that are kept, as in ``Coupling``, of the flattened event: the first
            "half", "alternate" ones, or booleans; by default the first half, and a checkerboard for
            images.
        flip: whether to exchange kept and changed entries; False by default.
        hidden: the widths of the default network, (64, 64) by default: an MLP for vectors and a CNN
            for images, whose last layer starts at 0.
        scale: s, the magnitude of the numbers, 128 by default; half of the levels is usual.
        net: any module (n, \*event) → (n, \*event) to use instead; with a context, its input has
            ``context_dim`` further entries or channels.
        levels: L; the result is y mod L, in 0 .. L − 1, so that the base may be bounded. None, the
            default, for unbounded integers.
        context_dim: the size of a context that is an additional input of the network, as entries or
            channels; 0, the default, for none.

    Raises:
        ValueError: if the scale is not positive, or the default network does not fit the event.

    Shapes: x, y (..., \*event), context (..., context_dim), term (...), which is 0.

    Example:
        >>> import torch
        >>> from bayou.flows import IntegerCoupling
        >>> coupling = IntegerCoupling(4, mask="alternate", scale=8.0)
        >>> x = torch.tensor([[3.0, 0.0, 7.0, 1.0]])
        >>> y, term = coupling(x)
        >>> torch.equal(coupling.inverse(y)[0], x)
        True

    References:
        Hoogeboom, Peters, van den Berg & Welling 2019, Integer Discrete Flows and Lossless
        Compression.
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
        shape = as_event(event)
        self.event_in = shape
        self.event_out = shape
        if not scale > 0:
            raise ValueError(
                f"the scale of IntegerCoupling must be positive, got {scale}; "
                "half of the levels is usual"
            )
        self.levels = levels
        self.context_dim = context_dim
        self.scale = scale
        self.register_buffer("kept", _event_mask(shape, mask, flip))
        self.net: nn.Module = _default_net(shape, hidden, context_dim) if net is None else net

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        """Add the shift, or subtract it."""
        kept = self.kept.to(x)
        dims = len(self.event_in)
        inputs, context = broadcast_context(x * kept / self.scale, context, dims)
        if context is not None:  # constant entries or channels
            pixels = context.reshape(*context.shape, *[1] * (dims - 1))
            pixels = pixels.expand(*context.shape, *self.event_in[1:])
            inputs = torch.cat([inputs, pixels], -dims)
        t = self.net(inputs.reshape(-1, *inputs.shape[-dims:]))
        t = t.reshape(*inputs.shape[:-dims], *self.event_in)
        t = self.scale * t * (1 - kept)
        shift = straight_through(t.round(), t)
        y = x - shift if inverse else x + shift
        term = self._no_term(y, self.event_in)
        if self.levels is not None:
            y = y.remainder(self.levels)
        return y, term


def _event_mask(shape: tuple[int, ...], mask: Mask | None, flip: bool) -> Tensor:
    """Return the kept entries of an event: booleans of its shape."""
    if mask is None and len(shape) == 1:
        mask = "half"
    elif mask is None:  # a checkerboard
        distance = torch.arange(shape[-2])[:, None] + torch.arange(shape[-1])
        mask = (distance % 2 == 0).expand(shape)
    if not isinstance(mask, str):
        mask = torch.as_tensor(mask).flatten()
    return coupling_mask(math.prod(shape), mask, flip).reshape(shape)


def _default_net(shape: tuple[int, ...], hidden: Sequence[int], context_dim: int) -> nn.Module:
    """Build an MLP for vectors or a CNN for images, whose last layer starts at 0."""
    if len(shape) not in (1, IMAGE_AXES):
        raise ValueError(
            f"IntegerCoupling takes vectors or images (C, H, W), got {shape}; pass net="
        )
    build = mlp if len(shape) == 1 else cnn
    return build(shape[0] + context_dim, hidden, shape[0])


def cnn(inputs: int, hidden: Sequence[int], outputs: int) -> nn.Sequential:
    """Build 3×3 convolutions and a last 1×1 convolution that starts at 0.

    Args:
        inputs: the number of input channels.
        hidden: the channels of the 3×3 convolutions.
        outputs: the number of output channels.
    """
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
    """Build an integer discrete flow: integer couplings with alternating masks.

    Every coupling is ``IntegerCoupling``, y = x + (1 − m) ⊙ round(s·net(m ⊙ x / s)) with s half of
    the levels. The flow starts at the identity.

    Args:
        event: the size of a vector, or (C, H, W).
        levels: the number of values of the data, which are in 0 .. levels − 1; 256 by default.
        layers: the number of couplings.
        hidden: the widths of their networks, (64, 64) by default.
        wrap: whether to compute modulo ``levels``, so that x has the same range as the data; False
            by default.
        context_dim: the size of a context that every network reads; 0, the default, for none.

    Returns:
        A map of integers x, y (..., *event).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.DiscretizedLogistic(4, 16), flows.integer(4, levels=16))
        >>> y = flow.sample(10, seed=0).clamp(0, 15)
        >>> bool((flow.decompress(flow.compress(y)) == y).all())
        True

    References:
        Hoogeboom, Peters, van den Berg & Welling 2019, Integer Discrete Flows and Lossless
        Compression.
    """
    scale = check_size(levels, "the number of levels") / 2
    modulus = levels if wrap else None
    couplings = [
        IntegerCoupling(
            event,
            flip=bool(i % 2),
            hidden=hidden,
            scale=scale,
            levels=modulus,
            context_dim=context_dim,
        )
        for i in range(check_size(layers, "the number of layers"))
    ]
    return Chain(*couplings, IntegerIdentity(event, levels))


def units(classes: int) -> list[int]:
    """Return the numbers with an inverse modulo K.

    Args:
        classes: K.
    """
    return [k for k in range(1, classes) if math.gcd(k, classes) == 1]


class OneHot(DiscreteMap):
    """One-hot rows (D, K) as class indices (D,): y_d = argmax_k x_dk.

    It is the last map of a modulo flow, whose other maps and base have one-hot rows.

    Args:
        dim: the number of rows D.
        classes: the number of classes K.

    Example:
        >>> import torch
        >>> from bayou.flows import OneHot
        >>> OneHot(2, classes=3).inverse(torch.tensor([2.0, 0.0]))[0]
        tensor([[0., 0., 1.],
                [1., 0., 0.]])
    """

    def __init__(self, dim: int, classes: int) -> None:
        super().__init__()
        self.classes: int = check_size(classes, "the number of classes")
        self.levels_in: int | None = 2
        self.levels_out: int | None = self.classes
        self.event_in: tuple[int, ...] = (check_size(dim, "OneHot"), classes)
        self.event_out: tuple[int, ...] = (dim,)

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        """Return the class indices of one-hot rows, and 0."""
        return x.argmax(-1).to(x), self._no_term(x, self.event_in)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        """Return the one-hot rows of class indices, and 0."""
        return one_hot(y.long(), self.classes).to(y), self._no_term(y, self.event_out)


class Modulo(nn.Module):
    """The map y = (μ + σ·x) mod K of one-hot rows, with μ and σ from logits (..., K + U).

    σ is one of the U units of K, the numbers with an inverse. y_j = Σ μ_m σ_u x_k over all
    m + u·k ≡ j is multilinear in the one-hot μ, σ and x, so that the straight-through gradient of a
    softmax applies (Tran et al. 2019).

    Args:
        classes: K, at least 2.
        scale: whether σ is learned; otherwise it is 1.
        temperature: of the softmax; 1 by default.

    Raises:
        ValueError: if there are fewer than 2 classes, or the temperature is not positive.
    """

    def __init__(self, classes: int, scale: bool = True, temperature: float = 1.0) -> None:
        super().__init__()
        if classes < 2 or not temperature > 0:
            raise ValueError(
                "a modulo flow needs 2 classes and a positive temperature, "
                f"got {classes}, {temperature}"
            )
        self.classes = classes
        self.temperature = temperature
        k = torch.arange(classes)
        factors = torch.tensor(units(classes) if scale else [1])
        self.params: int = classes + (len(factors) if len(factors) > 1 else 0)
        inverses = torch.tensor([pow(unit, -1, classes) for unit in factors.tolist()])
        # (a, k) ↦ the one-hot row of the result, (A·K, K)
        self._register_table("plus", k[:, None] + k)
        self._register_table("minus", k - k[:, None])
        self._register_table("times", factors[:, None] * k)
        self._register_table("over", inverses[:, None] * k)

    def _register_table(self, name: str, values: Tensor) -> None:
        """Register the one-hot rows of integers (A, K) modulo K as a buffer (A·K, K)."""
        rows = one_hot(values % self.classes, self.classes).flatten(0, 1).float()
        self.register_buffer(name, rows, persistent=False)

    def _select_largest(self, logits: Tensor) -> Tensor:
        """Return the one-hot row of the largest logit, with the gradient of a softmax."""
        hard = one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)
        return straight_through(hard, (logits / self.temperature).softmax(-1))

    def forward(self, x: Tensor, logits: Tensor, inverse: bool = False) -> Tensor:
        """Compute y from x, or x from y.

        Args:
            x: one-hot rows (..., K).
            logits: of μ and σ, (..., K + U), or (..., K) if σ is 1.
            inverse: whether to compute x from y.
        """
        shift_table = "minus" if inverse else "plus"
        steps = [(shift_table, self._select_largest(logits[..., : self.classes]))]
        if self.params > self.classes:
            factor_table = "over" if inverse else "times"
            steps.append((factor_table, self._select_largest(logits[..., self.classes :])))
        for table, row in steps if inverse else steps[::-1]:
            pairs = (row.unsqueeze(-1) * x.unsqueeze(-2)).flatten(-2)
            x = pairs @ getattr(self, table).to(x)
        return x


class ModuloCoupling(Symmetric, DiscreteMap):
    """A coupling of classes, the layer of modulo flows: y_rest = (μ + σ·x_rest) mod K.

    μ and σ, one of the units of K, come from a network of the kept rows and the context; rows are
    one-hot. Gradients are those of a softmax instead of an argmax.

    Args:
        dim: the number of rows D, at least 2.
        classes: the number of classes K, at least 2.
        mask: the rows that are kept: the first "half" (the default), "alternate" ones, or D
            booleans.
        flip: whether to exchange kept and changed rows; False by default.
        hidden: the widths of the hidden layers of the network, (64, 64) by default.
        scale: whether σ is learned, which is the default; otherwise it is 1.
        temperature: of the softmax; 1 by default.
        context_dim: the size of a context that the network reads; 0, the default, for none.

    Raises:
        ValueError: if there are fewer than 2 classes, or the temperature is not positive.

    Shapes: x, y (..., D, K), context (..., context_dim), term (...), which is 0.

    Example:
        >>> import torch
        >>> from bayou.flows import ModuloCoupling
        >>> coupling = ModuloCoupling(4, classes=3)
        >>> x = torch.eye(3)[[0, 2, 1, 1]]
        >>> y, term = coupling(x)
        >>> torch.equal(coupling.inverse(y)[0], x)
        True

    References:
        Tran, Vafa, Agrawal, Dinh & Poole 2019, Discrete Flows: Invertible Generative Models of
        Discrete Data.
    """

    order: Tensor
    back: Tensor

    def __init__(
        self,
        dim: int,
        classes: int,
        mask: Mask = "half",
        flip: bool = False,
        hidden: Sequence[int] = (64, 64),
        scale: bool = True,
        temperature: float = 1.0,
        context_dim: int = 0,
    ) -> None:
        super().__init__()
        kept = coupling_mask(dim, mask, flip)
        self.event_in: tuple[int, ...] = (dim, classes)
        self.event_out: tuple[int, ...] = (dim, classes)
        self.context_dim = context_dim
        self.kept: int = int(kept.sum())
        self.changed: int = int((~kept).sum())
        order = torch.cat([kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]])
        self.register_buffer("order", order)
        self.register_buffer("back", order.argsort())
        self.modulo: Modulo = Modulo(classes, scale, temperature)
        self.conditioner: nn.Sequential = mlp(
            self.kept * classes + context_dim,
            hidden,
            self.changed * self.modulo.params,
        )

    def _both(self, x: Tensor, context: Tensor | None, inverse: bool) -> Pair:
        """Map the changed rows in either direction."""
        x, context = broadcast_context(x, context, 2)
        kept, rest = x[..., self.order, :].split([self.kept, self.changed], -2)
        inputs = kept.flatten(-2)
        if context is not None:
            inputs = torch.cat([inputs, context], -1)
        logits = self.conditioner(inputs).unflatten(-1, (self.changed, -1))
        y = torch.cat([kept, self.modulo(rest, logits, inverse)], -2)[..., self.back, :]
        return y, self._no_term(y, self.event_in)


class OneHotMADE(MADE):
    """A ``MADE`` whose inputs are one-hot rows: (..., D, K) → (..., D, P).

    The parameters of row d depend on the rows before d. It is a conditioner of
    ``ModuloAutoregressive`` and of ``Categorical``.

    Args:
        dim: the number of rows D.
        classes: the number of classes K.
        params: the number of parameters of each row, P.
        hidden: the widths of the hidden layers, (64, 64) by default.
        order: the order of the rows, a permutation of 0 .. D − 1; None, the default, for the
            natural one.
        context_dim: the size of a context that the network reads; 0, the default, for none.
    """

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
        """Compute the parameters of all rows, (..., D, P).

        Args:
            x: one-hot rows (..., D, K).
            context: (..., context_dim), or None.
        """
        return super().forward(x.flatten(-2), context)

    def steps(self, like: Tensor, context: Tensor | None = None) -> CoordinateSteps:
        """Start the passes of an inverse: one of the complete network for every row.

        Args:
            like: one-hot rows (..., D, K), for their shape, dtype and device.
            context: (..., context_dim), or None.
        """
        return Conditioner.steps(self, like, context)


class ModuloAutoregressive(DiscreteMap):
    """An autoregressive map of classes: y_d = (μ + σ·x_d) mod K with μ and σ from the rows x_{<d}.

    Forward is one pass, the inverse goes row by row; ``Inverse`` of it computes log-probabilities
    in one pass.

    Args:
        conditioner: a network of rows, (..., D, K) → (..., D, params), such as ``OneHotMADE``, with
            K + U parameters for the U units of K.
        classes: the number of classes K, at least 2.
        scale: whether σ, a unit of K, is learned, which is the default; otherwise it is 1.
        temperature: of the softmax whose gradient is used; 1 by default.

    Raises:
        ValueError: if the conditioner does not return the parameters of μ and σ.

    Shapes: x, y (..., D, K), context (..., context_dim), term (...), which is 0.

    Example:
        >>> import torch
        >>> from bayou.flows import ModuloAutoregressive, OneHotMADE
        >>> made = OneHotMADE(4, classes=3, params=3 + 2)  # 1 and 2 have inverses modulo 3
        >>> x = torch.eye(3)[[0, 2, 1, 1]]
        >>> y, term = ModuloAutoregressive(made, classes=3)(x)
        >>> y.shape
        torch.Size([4, 3])

    References:
        Tran, Vafa, Agrawal, Dinh & Poole 2019, Discrete Flows: Invertible Generative Models of
        Discrete Data.
    """

    inverse_kind = Cost.autoregressive

    def __init__(
        self,
        conditioner: Conditioner,
        classes: int,
        scale: bool = True,
        temperature: float = 1.0,
    ) -> None:
        super().__init__()
        self.event_in: tuple[int, ...] = (conditioner.dim, classes)
        self.event_out: tuple[int, ...] = (conditioner.dim, classes)
        self.context_dim: int = conditioner.context_dim
        self.modulo: Modulo = Modulo(classes, scale, temperature)
        params = self.modulo.params
        if conditioner.out != params:
            raise ValueError(
                f"a modulo flow of {classes} classes takes {params} parameters per row but the "
                f"conditioner returns {conditioner.out}; build it with params={params}"
            )
        self.conditioner = conditioner

    def _forward(self, x: Tensor, context: Tensor | None) -> Pair:
        """Map all rows in one pass."""
        x, context = broadcast_context(x, context, 2)
        y = self.modulo(x, self.conditioner(x, context))
        return y, self._no_term(y, self.event_in)

    def _inverse(self, y: Tensor, context: Tensor | None) -> Pair:
        """Invert row by row."""
        y, context = broadcast_context(y, context, 2)
        steps = self.conditioner.steps(y, context)
        rows = list(y.unbind(-2))
        for d in self.conditioner.coordinates:
            rows[d] = self.modulo(rows[d], steps.params(), inverse=True)
            steps.push(rows[d])
        return torch.stack(rows, -2), self._no_term(y, self.event_in)


def modulo(
    dim: int,
    classes: int,
    layers: int = 4,
    hidden: Sequence[int] = (64, 64),
    autoregressive: bool = False,
    scale: bool = True,
    temperature: float = 1.0,
    context_dim: int = 0,
) -> MapChain:
    """Build a modulo flow from one-hot rows (D, K) to classes (D,).

    Every map is y = (μ + σ·x) mod K with μ and σ from the kept or the preceding rows; masks or
    orders alternate.

    Args:
        dim: the number of symbols D.
        classes: the number of classes K, at least 2.
        layers: the number of maps.
        hidden: the widths of their networks, (64, 64) by default.
        autoregressive: whether to use autoregressive maps, with log-probabilities in one pass,
            instead of couplings; False by default.
        scale: whether σ, a unit of K, is learned, which is the default; otherwise it is 1.
        temperature: of the softmax whose gradient is used; 1 by default.
        context_dim: the size of a context that every network reads; 0, the default, for none.

    Returns:
        A map from x (..., D, K) to y (..., D).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.Categorical(4, 3), flows.modulo(4, 3, autoregressive=True))
        >>> y = flow.sample(10, seed=0)
        >>> y.shape, flow.log_prob(y).shape
        (torch.Size([10, 4]), torch.Size([10]))

    References:
        Tran, Vafa, Agrawal, Dinh & Poole 2019, Discrete Flows: Invertible Generative Models of
        Discrete Data.
    """
    params = Modulo(classes, scale).params
    maps: list[Map] = []
    for i in range(check_size(layers, "the number of layers")):
        if autoregressive:
            order = range(dim)[::-1] if i % 2 else None
            network = OneHotMADE(dim, classes, params, hidden, order, context_dim)
            maps.append(Inverse(ModuloAutoregressive(network, classes, scale, temperature)))
        else:
            coupling = ModuloCoupling(
                dim,
                classes,
                flip=bool(i % 2),
                hidden=hidden,
                scale=scale,
                temperature=temperature,
                context_dim=context_dim,
            )
            maps.append(coupling)
    return Chain(*maps, OneHot(dim, classes))

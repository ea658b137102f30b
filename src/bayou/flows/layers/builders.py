"""Published flows of vectors, built by name.

Every function returns a transform from base to data, to be joined with a base distribution by
``Flow``. All of them start at or near the identity, so that an untrained flow is close to its base.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from bayou.flows.core.arguments import check_size
from bayou.flows.core.compose import Chain, Inverse
from bayou.flows.core.transform import Transform
from bayou.flows.layers.autoregressive import Autoregressive
from bayou.flows.layers.conditioners import MADE, Recurrent
from bayou.flows.layers.coupling import Coupling, Mask, ResampledGate
from bayou.flows.layers.determinant import Form, Planar, Radial, Sylvester
from bayou.flows.layers.elementwise import (
    Additive,
    Affine,
    DeepSigmoid,
    Elementwise,
    Gate,
    Spline,
    logistic_mixture,
)
from bayou.flows.layers.linear import DiagonalAffine, LULinear
from bayou.flows.layers.normalization import ActNorm

Hidden = Sequence[int]


def nice(dim: int, layers: int = 4, hidden: Hidden = (64, 64), context_dim: int = 0) -> Chain:
    """Build NICE: additive couplings and a diagonal scale.

    Each coupling keeps one half of the coordinates and shifts the other half,
    y_rest = x_rest + t(x_kept), with ladj = 0; the halves alternate. The last map is
    y = exp(s) ⊙ x + b with ladj = Σ s. Densities and draws cost one pass of each network.

    Args:
        dim: the number of coordinates D, at least 2.
        layers: the number of couplings.
        hidden: the widths of the hidden layers of each network t, (64, 64) by default.
        context_dim: the size of a context that every t reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.nice(6))
        >>> y = flow.sample(100, seed=0)
        >>> y.shape, flow.log_prob(y).shape
        (torch.Size([100, 6]), torch.Size([100]))

    References:
        Dinh, Krueger & Bengio 2015, NICE: Non-linear Independent Components Estimation.
    """
    couplings = _chain_couplings(dim, Additive(), layers, hidden, context_dim)
    return Chain(couplings, DiagonalAffine(dim))


def realnvp(dim: int, layers: int = 4, hidden: Hidden = (64, 64), context_dim: int = 0) -> Chain:
    """Build RealNVP: affine couplings.

    Each coupling keeps one half of the coordinates and maps the other half by
    y_rest = exp(s(x_kept)) ⊙ x_rest + t(x_kept), with ladj = Σ s(x_kept); the halves alternate.
    Log-scales s are bounded by 3. Densities and draws cost one pass of each network.

    Args:
        dim: the number of coordinates D, at least 2.
        layers: the number of couplings.
        hidden: the widths of the hidden layers of each network (s, t), (64, 64) by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import torch, bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(2), flows.realnvp(2, context_dim=3))
        >>> context = torch.zeros(5, 3)  # one distribution of y for each row
        >>> flow.sample(10, context, seed=0).shape
        torch.Size([10, 5, 2])

    References:
        Dinh, Sohl-Dickstein & Bengio 2017, Density Estimation Using Real NVP.
    """
    return _chain_couplings(dim, Affine(), layers, hidden, context_dim)


def gated(dim: int, layers: int = 2, hidden: Hidden = (50,), context_dim: int = 0) -> Chain:
    """Build the gated couplings of multiplicative normalizing flows, with fixed masks.

    Each coupling keeps every second coordinate and maps the rest by
    y_rest = γ ⊙ x_rest + (1 − γ) ⊙ μ with γ in (0, 1) and μ from a network of x_kept, and
    ladj = Σ log γ; the masks alternate. The density is exact, which it is not with the random masks
    of ``gated_resampled``.

    Args:
        dim: the number of coordinates D, at least 2.
        layers: the number of couplings.
        hidden: the widths of the hidden layers of each network (μ, γ), (50,) by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.gated(6))
        >>> flow.kind
        <Ladj.exact: 0>

    References:
        Louizos & Welling 2017, Multiplicative Normalizing Flows for Variational Bayesian Neural
        Networks.
    """
    return _chain_couplings(dim, Gate(), layers, hidden, context_dim, mask="alternate")


def gated_resampled(
    dim: int,
    layers: int = 2,
    hidden: Hidden = (50,),
    context_dim: int = 0,
) -> Chain:
    """Build the gated couplings of multiplicative normalizing flows, with random masks.

    As ``gated``, but each map draws a new mask m ~ Bernoulli(½)^D in every training pass, as
    published: y = m ⊙ x + (1 − m) ⊙ (γ ⊙ x + (1 − γ) ⊙ μ). The density of y is a mixture over
    masks, so that the log-density that is computed with one mask is a bound.

    Args:
        dim: the number of coordinates D, at least 2.
        layers: the number of couplings.
        hidden: the widths of the hidden layers of each network (μ, γ), (50,) by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D), whose label is a bound.

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.gated_resampled(6))
        >>> flow.kind
        <Ladj.bound: 1>

    References:
        Louizos & Welling 2017, Multiplicative Normalizing Flows for Variational Bayesian Neural
        Networks.
    """
    return _chain_layers(layers, lambda _: ResampledGate(dim, hidden, context_dim))


def flowpp(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    components: int = 8,
    context_dim: int = 0,
) -> Chain:
    """Build the couplings of Flow++: CDFs of mixtures of logistics.

    Each coupling keeps one half of the coordinates and maps each coordinate of the other half by
    y = exp(s)·logit(Σ_j w_j·sigmoid(a_j·x + b_j)) + t, with all parameters from a network of
    x_kept; the halves alternate. The inverse finds one root per coordinate and layer.

    Args:
        dim: the number of coordinates D, at least 2.
        layers: the number of couplings.
        hidden: the widths of the hidden layers of each network, (64, 64) by default.
        components: the number of logistics in each mixture.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D). ``flowpp_image`` is the model of images.

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.flowpp(6, components=4))
        >>> y, log_prob = flow.sample_and_log_prob(100, seed=0)
        >>> y.shape, log_prob.shape
        (torch.Size([100, 6]), torch.Size([100]))

    References:
        Ho, Chen, Srinivas, Duan & Abbeel 2019, Flow++: Improving Flow-Based Generative Models with
        Variational Dequantization and Architecture Design.
    """
    return _chain_couplings(dim, logistic_mixture(components), layers, hidden, context_dim)


def spline_coupling(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    bins: int = 8,
    bound: float = 5.0,
    context_dim: int = 0,
) -> Chain:
    """Build neural spline couplings: monotone rational-quadratic splines.

    Each coupling keeps one half of the coordinates and maps each coordinate of the other half by a
    spline with knots from a network of x_kept; the halves alternate. Outside [−bound, bound] the
    spline is the identity. Densities and draws cost one pass of each network.

    Args:
        dim: the number of coordinates D, at least 2.
        layers: the number of couplings.
        hidden: the widths of the hidden layers of each network, (64, 64) by default.
        bins: the number of bins of a spline, from 2 to 999.
        bound: the half-width of the interval with the bins; standardize the data so that they are
            inside.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.spline_coupling(6, bins=16))
        >>> flow.log_prob(flow.sample(100, seed=0)).shape
        torch.Size([100])

    References:
        Durkan, Bekasov, Murray & Papamakarios 2019, Neural Spline Flows.
    """
    return _chain_couplings(dim, Spline(bins, bound), layers, hidden, context_dim)


def iaf(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    context_dim: int = 0,
    residual: bool = False,
    elementwise: Elementwise | None = None,
) -> Chain:
    """Build an inverse autoregressive flow, with fast draws.

    Each layer maps coordinate d by y_d = g(x_d; net(x_{<d})), by default the affine
    y_d = exp(s_d)·x_d + t_d, with ladj = Σ_d log ∂y_d/∂x_d. Every second layer reverses the order
    of the coordinates. A draw and its density cost one pass of each network, the density of other
    points D steps; ``maf`` is the reverse.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps.
        hidden: the widths of the hidden layers of each network (a ``MADE``), (64, 64) by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.
        residual: whether hidden layers are residual, h ← h + layer(relu(h)), which needs layers of
            one width; False by default.
        elementwise: g, an increasing function of one variable; ``Affine()`` by default.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.iaf(6, layers=2))
        >>> y, log_prob = flow.sample_and_log_prob(100, seed=0)
        >>> y.shape, log_prob.shape
        (torch.Size([100, 6]), torch.Size([100]))

    References:
        Kingma, Salimans, Jozefowicz, Chen, Sutskever & Welling 2016, Improving Variational
        Inference with Inverse Autoregressive Flow.
    """
    g = elementwise or Affine()

    def build(layer: int) -> Autoregressive:
        order = _layer_order(dim, layer)
        net = MADE(dim, g.params, hidden, order, residual, context_dim, g.circular)
        return Autoregressive(g, net)

    return _chain_layers(layers, build)


def maf(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    context_dim: int = 0,
    residual: bool = False,
) -> Chain:
    """Build a masked autoregressive flow, with fast densities.

    Each layer is the inverse of an affine layer of ``iaf``: y_d = (x_d − t_d)·exp(−s_d), with
    (s_d, t_d) = net(y_{<d}). A density costs one pass of each network, a draw D steps.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps.
        hidden: the widths of the hidden layers of each network (a ``MADE``), (64, 64) by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.
        residual: whether hidden layers are residual, h ← h + layer(relu(h)), which needs layers of
            one width; False by default.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import torch, bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.maf(6, hidden=(128, 128)))
        >>> loss = -flow.log_prob(torch.zeros(100, 6)).mean()
        >>> loss.backward()

    References:
        Papamakarios, Pavlakou & Murray 2017, Masked Autoregressive Flow for Density Estimation.
    """
    return _invert_links(iaf(dim, layers, hidden, context_dim, residual))


def spline_autoregressive(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    bins: int = 8,
    bound: float = 5.0,
    context_dim: int = 0,
) -> Chain:
    """Build an autoregressive neural spline flow, with fast densities.

    Each layer maps coordinate d by a monotone rational-quadratic spline with knots from
    net(y_{<d}); outside [−bound, bound] it is the identity. Every second layer reverses the order
    of the coordinates. A density costs one pass of each network, a draw D steps.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps.
        hidden: the widths of the hidden layers of each network (a ``MADE``), (64, 64) by default.
        bins: the number of bins of a spline, from 2 to 999.
        bound: the half-width of the interval with the bins; standardize the data so that they are
            inside.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import torch, bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.spline_autoregressive(6, layers=2))
        >>> flow.log_prob(torch.zeros(100, 6)).shape
        torch.Size([100])

    References:
        Durkan, Bekasov, Murray & Papamakarios 2019, Neural Spline Flows.
    """
    return _invert_links(iaf(dim, layers, hidden, context_dim, elementwise=Spline(bins, bound)))


def circular_spline(
    dim: int,
    layers: int = 4,
    hidden: Hidden = (64, 64),
    bins: int = 8,
    context_dim: int = 0,
    coupling: bool = True,
) -> Chain:
    """Build a spline flow of angles in [−π, π).

    Each coordinate is mapped by a rational-quadratic spline of the circle, with equal slopes at −π
    and π, and a shift modulo 2π. Networks read the cosine and sine of an angle, so that the density
    is continuous on the circle.

    Args:
        dim: the number of angles D, at least 2 with couplings.
        layers: the number of maps.
        hidden: the widths of the hidden layers of each network, (64, 64) by default.
        bins: the number of bins of a spline, from 2 to 999.
        context_dim: the size of a context that every network reads too; 0, the default, for none.
        coupling: whether the maps are couplings (the default), with fast densities and draws, or
            autoregressive, with fast densities.

    Returns:
        A transform of angles x, y (..., D), for a base of angles: ``Uniform`` or ``VonMises``.

    Example:
        >>> import math, bayou.flows as flows
        >>> base = flows.Uniform(2, low=-math.pi, high=math.pi)
        >>> flow = flows.Flow(base, flows.circular_spline(2, layers=2))
        >>> flow.log_prob(flow.sample(100, seed=0)).shape
        torch.Size([100])

    References:
        Rezende, Papamakarios, Racanière, Albergo, Kanwar, Shanahan & Cranmer 2020, Normalizing
        Flows on Tori and Spheres.
    """
    spline = Spline(bins, math.pi, circular=True)
    if coupling:
        return _chain_couplings(dim, spline, layers, hidden, context_dim)
    return _invert_links(iaf(dim, layers, hidden, context_dim, elementwise=spline))


def naf(
    dim: int,
    layers: int = 2,
    hidden: Hidden = (64, 64),
    units: int = 8,
    depth: int = 2,
    context_dim: int = 0,
) -> Chain:
    """Build a neural autoregressive flow with deep sigmoids, with fast draws.

    Each layer maps coordinate d by ``depth`` maps x ← logit(Σ_j w_j·sigmoid(a_j·x + b_j)) and an
    affine map, with all parameters from net(x_{<d}). Every second layer reverses the order of the
    coordinates. A draw and its density cost one pass of each network; the density of other points
    takes D steps with ``depth`` root findings each.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps.
        hidden: the widths of the hidden layers of each network (a ``MADE``), (64, 64) by default.
        units: the number of sigmoids in each sum.
        depth: the number of sums of sigmoids in each map.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.naf(6, units=16))
        >>> y, log_prob = flow.sample_and_log_prob(100, seed=0)
        >>> y.shape, log_prob.shape
        (torch.Size([100, 6]), torch.Size([100]))

    References:
        Huang, Krueger, Lacoste & Courville 2018, Neural Autoregressive Flows.
    """
    return iaf(dim, layers, hidden, context_dim, elementwise=DeepSigmoid(units, depth))


def tan(dim: int, layers: int = 2, hidden: int = 32, context_dim: int = 0) -> Chain:
    """Build a transformation autoregressive network.

    Each layer is a linear map y = L·U·x + b and then a recurrent affine map
    y_d = exp(s_d)·x_d + t_d, where a gated recurrent unit computes (s_d, t_d) from x_{<d}. Every
    second recurrent map reverses the order of the coordinates. Both directions take D steps.

    Args:
        dim: the number of coordinates D.
        layers: the number of pairs of a linear and a recurrent map.
        hidden: the size of the state of each recurrent unit.
        context_dim: the size of a context that sets the initial states; 0, the default, for none.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.tan(6, hidden=16))
        >>> flow.log_prob(flow.sample(100, seed=0)).shape
        torch.Size([100])

    References:
        Oliva, Dubey, Zaheer, Poczos, Salakhutdinov, Xing & Schneider 2018, Transformation
        Autoregressive Networks.
    """

    def build(layer: int) -> Chain:
        net = Recurrent(dim, 2, hidden, _layer_order(dim, layer), context_dim)
        return Chain(LULinear(dim), Autoregressive(Affine(), net))

    return _chain_layers(layers, build)


def planar(dim: int, layers: int = 8) -> Planar:
    """Build a stack of planar flows.

    Each layer is y = x + u·tanh(wᵀx + b) with det = 1 + (1 − tanh²(wᵀx + b))·uᵀw > 0, which
    stretches or compresses the space in one direction. The inverse finds one root per layer.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps.

    Returns:
        A transform of x, y (..., D): ``Planar``, which also takes a context.

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.planar(6, layers=16))
        >>> y, log_prob = flow.sample_and_log_prob(100, seed=0)
        >>> y.shape, log_prob.shape
        (torch.Size([100, 6]), torch.Size([100]))

    References:
        Rezende & Mohamed 2015, Variational Inference with Normalizing Flows.
    """
    return Planar(dim, layers)


def radial(dim: int, layers: int = 8) -> Chain:
    """Build a stack of radial flows.

    Each layer is y = x + β·(x − c)/(α + ‖x − c‖) with a learned center c, α > 0 and β ≥ −α, which
    moves points away from the center or towards it. The inverse is in closed form.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import torch, bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.radial(6))
        >>> flow.log_prob(torch.zeros(100, 6)).shape
        torch.Size([100])

    References:
        Rezende & Mohamed 2015, Variational Inference with Normalizing Flows.
    """
    return _chain_layers(layers, lambda _: Radial(dim))


def sylvester(
    dim: int,
    layers: int = 4,
    form: Form = "orthogonal",
    rank: int | None = None,
) -> Sylvester:
    """Build a stack of Sylvester flows.

    Each layer is y = x + Q·R·tanh(R̃·Qᵀx + b) with upper triangular R and R̃ and QᵀQ = I, which
    generalizes planar flows from one direction to ``rank`` directions:
    det = Π_i (1 + tanh′_i·R_ii·R̃_ii). The inverse finds ``rank`` roots per layer.

    Args:
        dim: the number of coordinates D.
        layers: the number of maps.
        form: the form of Q: "orthogonal" (the default; D × rank), "householder" (D × D, a product
            of at most 8 reflections) or "triangular" (the identity, and the reversal of the
            coordinates in every second layer).
        rank: the number of columns of an orthogonal Q, D // 2 by default; D for the other forms.

    Returns:
        A transform of x, y (..., D): ``Sylvester``, which also takes a context.

    Example:
        >>> import bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.sylvester(6, form="householder"))
        >>> y, log_prob = flow.sample_and_log_prob(100, seed=0)
        >>> y.shape, log_prob.shape
        (torch.Size([100, 6]), torch.Size([100]))

    References:
        van den Berg, Hasenclever, Tomczak & Welling 2018, Sylvester Normalizing Flows for
        Variational Inference.
    """
    return Sylvester(dim, layers, form, rank)


def glow(dim: int, layers: int = 4, hidden: Hidden = (64, 64), context_dim: int = 0) -> Chain:
    """Build Glow for vectors: an affine coupling, a learned linear map and act norm, repeated.

    Read from data to base, each layer standardizes the coordinates with the statistics of the first
    batch (act norm), mixes them by W = L·U, and maps one half given the other half as in
    ``realnvp``. ``glow_image`` is the model of images.

    Args:
        dim: the number of coordinates D, at least 2.
        layers: the number of repetitions.
        hidden: the widths of the hidden layers of each coupling's network, (64, 64) by default.
        context_dim: the size of a context that every network reads too; 0, the default, for none.

    Returns:
        A transform of x, y (..., D).

    Example:
        >>> import torch, bayou.flows as flows
        >>> flow = flows.Flow(flows.StandardNormal(6), flows.glow(6))
        >>> batch = torch.arange(60.0).reshape(10, 6)
        >>> flow.log_prob(batch).shape  # the first batch sets the statistics
        torch.Size([10])

    References:
        Kingma & Dhariwal 2018, Glow: Generative Flow with Invertible 1×1 Convolutions.
    """

    def build(layer: int) -> Chain:
        coupling = Coupling(dim, Affine(), "half", layer % 2 == 1, hidden, context_dim)
        return Chain(coupling, LULinear(dim), ActNorm(dim))

    return _chain_layers(layers, build)


def _chain_layers(layers: int, build: Callable[[int], Transform]) -> Chain:
    """Chain the maps that a function builds from the index of a layer."""
    check_size(layers, "the number of layers")
    return Chain(*(build(layer) for layer in range(layers)))


def _chain_couplings(
    dim: int,
    elementwise: Elementwise,
    layers: int,
    hidden: Hidden,
    context_dim: int,
    mask: Mask = "half",
) -> Chain:
    """Chain couplings that exchange the kept and the changed coordinates from layer to layer."""

    def build(layer: int) -> Coupling:
        return Coupling(dim, elementwise, mask, layer % 2 == 1, hidden, context_dim)

    return _chain_layers(layers, build)


def _layer_order(dim: int, layer: int) -> range | None:
    """Return the order of the coordinates in a layer: reversed in every second one."""
    if layer % 2:
        return range(dim)[::-1]
    return None


def _invert_links(chain: Chain) -> Chain:
    """Invert every link of a chain, which exchanges fast draws for fast densities."""
    return Chain(*(Inverse(link) for link in chain.transforms))

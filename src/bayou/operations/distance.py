"""Distance-aware networks: bounded weights, random features, and densities of features."""

from __future__ import annotations

import copy
import math
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal
from torch.nn.utils.parametrize import register_parametrization

from bayou.core import rng
from bayou.flows.contractive.contracting import schatten
from bayou.network import place_inputs, rows_of
from bayou.posteriors import Posterior
from bayou.training.data import as_data

BATCH_ROWS = 1000  # whose features are computed at a time


class SpectralBound(nn.Module):
    """The parametrization W·min(1, c/‖W‖) of a weight; see ``spectral_normalized``.

    Args:
        bound: c.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, weight: Tensor) -> Tensor:
        """Scale a weight down to the bound.

        Args:
            weight: of a linear layer or a convolution, (outputs, inputs, ...).
        """
        with torch.autocast(weight.device.type, enabled=False):
            factor = (self.bound / schatten(weight.flatten(1))).clamp_max(1.0)
            return weight * factor.to(weight.dtype)


def spectral_normalized(net: nn.Module, bound: float = 0.95) -> nn.Module:
    """Copy a network and bound the norms of its linear and convolutional weights.

    Each weight is W·min(1, c/‖W‖), so that its norm is c = ``bound`` at most. ‖W‖ =
    (Σ σ^258)^(1/258) over singular values σ is an upper bound of the largest, tight to a factor
    d^(1/258), d the smaller side of W, without the state of a power iteration, which gives a lower
    bound. For a convolution it is that of the matrix (outputs, inputs × kernel), as in SNGP; the
    norm of the map of images may be larger, by up to the square root of the kernel's size. A
    normalization layer behind a bounded one undoes the bound. The tensors that are learned are W,
    named ``<layer>.parametrizations.weight.original``.

    Args:
        net: the network. It is not changed.
        bound: c, the largest norm of a weight.

    Returns:
        A copy with bounded weights.

    Raises:
        ValueError: if the bound is not positive.

    References:
        Liu et al.: Simple and principled uncertainty estimation with deterministic deep learning
        via distance awareness, NeurIPS 2020 (SNGP).
    """
    if not bound > 0:
        raise ValueError(f"bound must be positive, got {bound!r}")
    bounded_net = copy.deepcopy(net)
    layers = [
        module
        for module in bounded_net.modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    ]
    for layer in layers:
        register_parametrization(layer, "weight", SpectralBound(bound))
    return bounded_net


class RandomFeatures(nn.Linear):
    """The layer √(2/M)·cos(W·h + b), (..., D) to (..., M); see ``random_feature_head``."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the features of h.

        Args:
            input: h, (..., D).
        """
        scale = math.sqrt(2 / self.out_features)
        with torch.autocast(input.device.type, enabled=False):  # an angle needs its digits
            angle = super().forward(input.to(self.weight.dtype))
            return scale * angle.cos()


@torch.no_grad()
def random_feature_head(
    net: nn.Module, features: int = 1024, length_scale: float = 1.0, *, seed: int = 0
) -> nn.Module:
    """Copy a network and replace its last linear layer by one of random Fourier features.

    f = B·φ(h), φ(h) = √(2/M)·cos(Ω·h/ℓ + b), of the inputs h of the last linear layer.
    Ω ~ N(0, 1) and b ~ U(0, 2π) are frozen: E[φ(h)·φ(h')] = exp(−½·|h − h'|²/ℓ²), with a standard
    deviation of 1/√M at most. With a prior N(0, s²) of B, f is a Gaussian process with s² times
    this kernel: far from the data its variance is the prior's. ``Laplace(where="last")`` is its
    posterior: SNGP, if the net has a body that is ``spectral_normalized``.

    Args:
        net: a network whose last ``nn.Linear``, in the order of its modules, gives the outputs. It
            is not changed.
        features: M, many more than the data determine.
        length_scale: ℓ, the distance |h − h'| beyond which rows say little of each other.
        seed: of Ω and b.

    Returns:
        A copy with the new head.

    Raises:
        ValueError: if the network has no linear layer.

    References:
        Rahimi, Recht: Random features for large-scale kernel machines, NeurIPS 2007.
    """
    net = copy.deepcopy(net)
    if isinstance(net, nn.Linear):
        net = nn.Sequential(net)
    name, last = _last_linear(net)
    fixed = RandomFeatures(last.in_features, features).to(last.weight).requires_grad_(False)
    omega = rng.normal(features, (last.in_features,), fixed.weight, rng.fold(seed, "frequency"))
    fixed.weight.copy_(omega / length_scale)
    fixed.bias.copy_(2 * math.pi * rng.uniform(features, (), fixed.bias, rng.fold(seed, "phase")))
    head = nn.Linear(features, last.out_features, bias=False).to(last.weight)
    net.set_submodule(name, nn.Sequential(fixed, head))
    return net


@final
class FeatureDensity(nn.Module):
    """A density of what the last linear layer of a network reads; see ``feature_density``.

    log p(z) = log Σ_c π_c·N(z; μ_c, L_c·L_cᵀ), (B,). Its ``state_dict`` has the network too, and
    can be loaded into ``FeatureDensity(net, classes)``.

    Args:
        net: the network, which is copied and frozen.
        classes: the number of Gaussians.
    """

    def __init__(self, net: nn.Module, classes: int) -> None:
        super().__init__()
        _, last = _last_linear(net)
        self.net: nn.Module = copy.deepcopy(net).requires_grad_(False).eval()
        mean = torch.zeros(
            classes, last.in_features, dtype=torch.float64, device=last.weight.device
        )
        self.mean: nn.Buffer = nn.Buffer(mean)
        self.root: nn.Buffer = nn.Buffer(torch.diag_embed(mean))  # L
        self.log_weight: nn.Buffer = nn.Buffer(mean[:, 0].clone())

    def features(self, inputs: tuple[Any, ...]) -> Tensor:
        """Return z in float64, (B, D).

        Args:
            inputs: of the network, on its device.
        """
        layer_inputs: list[Tensor] = []
        _, last = _last_linear(self.net)
        with last.register_forward_pre_hook(lambda _, args: layer_inputs.append(args[0])):
            self.net(*inputs)
        return layer_inputs[-1].double()

    @torch.no_grad()
    def forward(self, x: object) -> Tensor:
        """Return log p(z) of each row, (B,).

        Args:
            x: inputs of the network (B, ...).
        """
        components = MultivariateNormal(self.mean, scale_tril=self.root, validate_args=False)
        weights = Categorical(logits=self.log_weight)
        mixture = MixtureSameFamily(weights, components, validate_args=False)
        inputs = place_inputs(x, next(self.net.parameters()))
        log_densities = []
        for first in range(0, len(inputs[0]), BATCH_ROWS):
            batch = rows_of(inputs, slice(first, first + BATCH_ROWS))
            log_densities.append(mixture.log_prob(self.features(batch)))
        return torch.cat(log_densities)


@torch.no_grad()
def feature_density(
    model: nn.Module | Posterior, data: object, *, jitter: float = 1e-6
) -> FeatureDensity:
    """Fit Gaussian densities to the features z of a trained network, one for each class: DDU.

    π_c, μ_c and Σ_c are fraction, mean and covariance of the rows of a class, or of all rows if y
    are real numbers; −log p(z) is high for x that are unlike the training rows (``metrics.auroc``).
    Nothing is trained.

    Args:
        model: a network, or a posterior with ``to_module()``; z is what its last ``nn.Linear``
            reads.
        data: the training rows, as for ``bayou.fit``.
        jitter: jitter·(mean variance of the features) is added to all variances, since units may be
            constant.

    Returns:
        A module that maps x to log p(z), (B,).

    Raises:
        ValueError: if the features are not (B, D), or a class has fewer than two rows.

    References:
        Mukhoti et al.: Deep deterministic uncertainty, CVPR 2023.
    """
    net = model.to_module() if isinstance(model, Posterior) else model
    reference = next(net.parameters())
    batches = list(as_data(data, BATCH_ROWS).epoch())
    y = torch.cat([labels for _, labels in batches]).to(reference.device)
    if y.is_floating_point():
        y = y.new_zeros(len(y))
    _, classes = y.unique(return_inverse=True)
    density = FeatureDensity(net, int(classes.max()) + 1)
    z = torch.cat([density.features(place_inputs(x, reference)) for x, _ in batches])
    counts = classes.bincount() if z.ndim == 2 else None
    if counts is None or int(counts.min()) < 2:
        raise ValueError(
            f"a density needs features (B, D), got {tuple(z.shape)}, and two rows of each class "
            "at least"
        )
    class_features = [z[classes == k] for k in range(len(counts))]
    added_variance = jitter * z.var(0).mean() * torch.eye(z.shape[1]).to(z)
    covariances = [features.mT.cov() + added_variance for features in class_features]
    density.mean.copy_(torch.stack([features.mean(0) for features in class_features]))
    density.root.copy_(torch.linalg.cholesky(torch.stack(covariances)))
    density.log_weight.copy_((counts / len(z)).log())
    return density


def _last_linear(net: nn.Module) -> tuple[str, nn.Linear]:
    """Return the last linear layer, in the order of the modules, with its name."""
    for name, module in reversed(list(net.named_modules())):
        if isinstance(module, nn.Linear):
            return name, module
    raise ValueError(f"{type(net).__name__} has no nn.Linear, whose inputs would be its features")

"""Networks that know the distance to their training data: bounded weights, random features, densities of features."""

from __future__ import annotations

import copy
import math
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.distributions import Categorical, MixtureSameFamily, MultivariateNormal
from torch.nn.utils.parametrize import register_parametrization

from bayou import rng
from bayou.flows.contractive.contracting import schatten
from bayou.network import placed, rows_of
from bayou.posteriors import Posterior
from bayou.training.data import as_data

ROWS = 1000  # whose features are computed at a time


class SpectralBound(nn.Module):
    """W·min(1, c/‖W‖) of a weight, as the matrix W of its first axis and all others.

    ‖W‖ = (Σ σ^258)^(1/258) is an upper bound of the largest singular value σ, tight to a factor d^(1/258) with d the
    smaller side of W; it has no state, unlike a power iteration, which gives a lower bound.
    """

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            norm = schatten(weight.flatten(1))
        return weight * (self.bound / norm).clamp_max(1.0).to(weight.dtype)


def spectral_normalized(net: nn.Module, bound: float = 0.95) -> nn.Module:
    """A copy of a network whose linear and convolutional weights have a spectral norm of c = ``bound`` at most.

    The layers use W·min(1, c/‖W‖) (``SpectralBound``) of tensors named ``<layer>.parametrizations.weight.original``. Of
    a convolution the norm of the matrix (outputs, inputs × kernel) is bounded, as in SNGP (Liu et al. 2020); that of
    the map of images is larger, by up to the square root of the kernel's size. A residual block x + g(x) with a
    Lipschitz constant L < 1 of g changes distances by a factor of 1 − L to 1 + L. A normalization layer behind a
    bounded one undoes the bound.
    """
    if not bound > 0:
        raise ValueError(f"bound must be positive, got {bound!r}")
    net = copy.deepcopy(net)
    for layer in [module for module in net.modules() if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)]:
        register_parametrization(layer, "weight", SpectralBound(bound))
    return net


@final
class RandomFeatures(nn.Module):
    """φ(h) = √(2/M)·cos(Ω·h/ℓ + b), (..., D) to (..., M), with fixed Ω ~ N(0, 1) and b ~ U(0, 2π), which are buffers.

    E[φ(h)·φ(h')] = exp(−½·|h − h'|²/ℓ²), with a standard deviation of 1/√M at most (Rahimi & Recht 2007).
    """

    frequency: Tensor
    phase: Tensor

    def __init__(self, inputs: int, features: int, length_scale: float, like: Tensor, seed: int) -> None:
        super().__init__()
        omega = rng.normal(features, (inputs,), like, rng.fold(seed, "frequency"))
        self.register_buffer("frequency", omega / length_scale)
        self.register_buffer("phase", 2 * math.pi * rng.uniform(features, (), like, rng.fold(seed, "phase")))

    def forward(self, h: Tensor) -> Tensor:
        return math.sqrt(2 / len(self.phase)) * nn.functional.linear(h, self.frequency, self.phase).cos()


def random_feature_head(net: nn.Module, features: int = 1024, length_scale: float = 1.0, *, seed: int = 0) -> nn.Module:
    """A copy of a network with random features and a linear layer, f(x) = B·φ(h(x)), in place of the last linear layer.

    With a prior N(0, s²) of B this is a Gaussian process with the kernel s²·exp(−½·|h − h'|²/ℓ²) of what that layer
    read, whose variance far from the data is the prior's. Its posterior is ``Laplace(where="last")``: SNGP (Liu et al.
    2020), if the body is ``spectral_normalized`` before.

    Args:
        net: a network whose last ``nn.Linear``, in the order of its modules, makes the outputs.
        features: M of ``RandomFeatures``; many more than the data determine.
        length_scale: ℓ, the distance |h − h'| beyond which rows say little of each other.
        seed: of the random features.
    """
    (name, last), net = _last_linear(net), copy.deepcopy(net)
    head = nn.Linear(features, last.out_features, bias=False, device=last.weight.device, dtype=last.weight.dtype)
    fixed = RandomFeatures(last.in_features, features, length_scale, head.weight.detach(), seed)
    return _replaced(net, name, nn.Sequential(fixed, head))


@final
class FeatureDensity(nn.Module):
    """log p(z) = log Σ_c π_c·N(z; μ_c, L_c·L_cᵀ) of what the last linear layer of a network reads, (B,) in float64.

    Made by ``feature_density``; its ``state_dict`` has the network too, and is loaded into FeatureDensity(net, C).
    """

    mean: Tensor
    root: Tensor
    log_weight: Tensor

    def __init__(self, net: nn.Module, classes: int) -> None:
        super().__init__()
        (name, last), net = _last_linear(net), copy.deepcopy(net)
        self.body = _replaced(net, name, nn.Identity()).requires_grad_(False).eval()
        like = last.weight.detach().double()
        for label, shape in (("mean", (like.shape[1],)), ("root", (like.shape[1],) * 2), ("log_weight", ())):
            self.register_buffer(label, like.new_zeros(classes, *shape))

    @torch.no_grad()
    def forward(self, x: Any) -> Tensor:
        """log p(z(x)) of every row of the inputs x: low where they are unlike the training rows."""
        classes = MultivariateNormal(self.mean, scale_tril=self.root, validate_args=False)
        mixture = MixtureSameFamily(Categorical(logits=self.log_weight), classes, validate_args=False)
        inputs = placed(x, next(self.body.parameters()))
        parts = [rows_of(inputs, slice(first, first + ROWS)) for first in range(0, len(inputs[0]), ROWS)]
        return torch.cat([mixture.log_prob(self.body(*part).double()) for part in parts])


@torch.no_grad()
def feature_density(model: nn.Module | Posterior, data: Any, *, jitter: float = 1e-6) -> FeatureDensity:
    """Gaussian densities of the features z of a trained network, one for each class: DDU (Mukhoti et al. 2023).

    π_c, μ_c and Σ_c are fraction, mean and covariance of the rows of a class, or of all rows if y are real numbers.
    −log p(z) scores inputs that are unlike the training rows (``metrics.auroc``); nothing is trained.

    Args:
        model: a network whose outputs are those of its last ``nn.Linear``, or a posterior with ``to_module()``.
        data: the training rows, as for ``bayou.fit``.
        jitter: jitter·(mean variance of the features) is added to all variances, since units may be constant.
    """
    net = model.to_module() if isinstance(model, Posterior) else copy.deepcopy(model).eval()
    (name, last), rows = _last_linear(net), list(as_data(data, ROWS).ordered())
    y = torch.cat([labels for _, labels in rows]).to(last.weight.device)
    labels = torch.zeros_like(y) if y.is_floating_point() else y
    made = FeatureDensity(net, len(values := labels.unique()))
    inputs = [placed(x, last.weight) for x, _ in rows]
    z = torch.cat([made.body(*each) for each in inputs])
    outputs, ends = net(*inputs[0]), last(z[: len(inputs[0][0])]) if z.shape[1:] == (last.in_features,) else z
    if ends.shape != outputs.shape or not torch.allclose(ends, outputs, rtol=1e-4, atol=1e-5):
        raise ValueError(f"the outputs of {type(net).__name__} are not those of its last nn.Linear, {name!r}")
    z = z.double()
    parts = [z[labels == value] for value in values]
    if min(map(len, parts)) < 2:
        raise ValueError("a class has a single row, which has no covariance; leave it out")
    added = jitter * z.var(0).mean() * torch.eye(z.shape[1], dtype=z.dtype, device=z.device)
    made.root.copy_(torch.linalg.cholesky(torch.stack([part.mT.cov() + added for part in parts])))
    made.mean.copy_(torch.stack([part.mean(0) for part in parts]))
    made.log_weight.copy_(torch.tensor([len(part) / len(z) for part in parts]).log())
    return made


def _last_linear(net: nn.Module) -> tuple[str, nn.Linear]:
    found = [(name, module) for name, module in net.named_modules() if isinstance(module, nn.Linear)]
    if not found:
        raise ValueError(f"{type(net).__name__} has no nn.Linear, whose inputs would be its features")
    return found[-1]


def _replaced(net: nn.Module, name: str, module: nn.Module) -> nn.Module:
    if not name:
        return module
    net.set_submodule(name, module)
    return net

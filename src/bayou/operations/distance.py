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

ROWS = 1000  # whose features are computed at a time


class SpectralBound(nn.Module):
    """W·min(1, c/‖W‖), see ``spectral_normalized``."""

    def __init__(self, bound: float) -> None:
        super().__init__()
        self.bound = bound

    def forward(self, weight: Tensor) -> Tensor:
        with torch.autocast(weight.device.type, enabled=False):
            return weight * (self.bound / schatten(weight.flatten(1))).clamp_max(1.0).to(
                weight.dtype
            )


def spectral_normalized(net: nn.Module, bound: float = 0.95) -> nn.Module:
    """A copy of a network whose linear and convolutional weights W·min(1, c/‖W‖) have a norm of c =
    ``bound`` at most.

    ‖W‖ = (Σ σ^258)^(1/258) over singular values σ is an upper bound of the largest, tight to a
    factor d^(1/258), d the smaller side of W, without the state of a power iteration, which gives a
    lower bound. Of a convolution it is that of the matrix (outputs, inputs × kernel), as in SNGP
    (Liu et al. 2020); the norm of the map of images may be larger, by up to the square root of the
    kernel's size. A normalization layer behind a bounded one undoes the bound. The tensors that are
    learned are W, named ``<layer>.parametrizations.weight.original``.
    """
    if not bound > 0:
        raise ValueError(f"bound must be positive, got {bound!r}")
    net = copy.deepcopy(net)
    for layer in [
        module
        for module in net.modules()
        if isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
    ]:
        register_parametrization(layer, "weight", SpectralBound(bound))
    return net


class RandomFeatures(nn.Linear):
    """√(2/M)·cos(W·h + b), (..., D) to (..., M), see ``random_feature_head``."""

    def forward(self, input: Tensor) -> Tensor:
        with torch.autocast(input.device.type, enabled=False):  # an angle needs its digits
            return (
                math.sqrt(2 / self.out_features)
                * super().forward(input.to(self.weight.dtype)).cos()
            )


@torch.no_grad()
def random_feature_head(
    net: nn.Module, features: int = 1024, length_scale: float = 1.0, *, seed: int = 0
) -> nn.Module:
    """A copy of a network with f = B·φ(h), φ(h) = √(2/M)·cos(Ω·h/ℓ + b), in place of its last
    linear layer.

    Ω ~ N(0, 1) and b ~ U(0, 2π) are frozen: E[φ(h)·φ(h')] = exp(−½·|h − h'|²/ℓ²), with a standard
    deviation of 1/√M at most (Rahimi & Recht 2007). With a prior N(0, s²) of B, f is a Gaussian
    process with s² times this kernel: far from the data its variance is the prior's.
    ``Laplace(where="last")`` is its posterior: SNGP, if the net has a body that is
    ``spectral_normalized``.

    Args:
        net: a network whose last ``nn.Linear``, in the order of its modules, makes the outputs.
        features: M, many more than the data determine.
        length_scale: ℓ, the distance |h − h'| beyond which rows say little of each other.
        seed: of Ω and b.
    """
    net = nn.Sequential(copy.deepcopy(net)) if isinstance(net, nn.Linear) else copy.deepcopy(net)
    name, last = _last_linear(net)
    fixed = RandomFeatures(last.in_features, features).to(last.weight).requires_grad_(False)
    omega = rng.normal(features, (last.in_features,), fixed.weight, rng.fold(seed, "frequency"))
    fixed.weight.copy_(omega / length_scale)
    fixed.bias.copy_(2 * math.pi * rng.uniform(features, (), fixed.bias, rng.fold(seed, "phase")))
    net.set_submodule(
        name,
        nn.Sequential(fixed, nn.Linear(features, last.out_features, bias=False).to(last.weight)),
    )
    return net


@final
class FeatureDensity(nn.Module):
    """log p(z) = log Σ_c π_c·N(z; μ_c, L_c·L_cᵀ) of what the last linear layer reads, (B,): see
    ``feature_density``.

    Its ``state_dict`` has the network too, and can be loaded into ``FeatureDensity(net, classes)``.
    """

    def __init__(self, net: nn.Module, classes: int) -> None:
        super().__init__()
        self.net, last = copy.deepcopy(net).requires_grad_(False).eval(), _last_linear(net)[1]
        mean = torch.zeros(
            classes, last.in_features, dtype=torch.float64, device=last.weight.device
        )
        self.mean, self.root, self.log_weight = map(
            nn.Buffer, (mean, torch.diag_embed(mean), mean[:, 0].clone())
        )

    def features(self, inputs: tuple[Any, ...]) -> Tensor:
        """z (B, D) in float64."""
        seen: list[Tensor] = []
        with _last_linear(self.net)[1].register_forward_pre_hook(
            lambda _, args: seen.append(args[0])
        ):
            self.net(*inputs)
        return seen[-1].double()

    @torch.no_grad()
    def forward(self, x: Any) -> Tensor:
        classes = MultivariateNormal(self.mean, scale_tril=self.root, validate_args=False)
        mixture = MixtureSameFamily(
            Categorical(logits=self.log_weight), classes, validate_args=False
        )
        inputs = place_inputs(x, next(self.net.parameters()))
        parts = [
            rows_of(inputs, slice(first, first + ROWS)) for first in range(0, len(inputs[0]), ROWS)
        ]
        return torch.cat([mixture.log_prob(self.features(part)) for part in parts])


@torch.no_grad()
def feature_density(
    model: nn.Module | Posterior, data: Any, *, jitter: float = 1e-6
) -> FeatureDensity:
    """Gaussian densities of the features z of a trained network, one for each class: DDU (Mukhoti
    et al. 2023).

    π_c, μ_c and Σ_c are fraction, mean and covariance of the rows of a class, or of all rows if y
    are real numbers; −log p(z) is high for x that are unlike the training rows (``metrics.auroc``).
    Nothing is trained.

    Args:
        model: a network, or a posterior with ``to_module()``; z is what its last ``nn.Linear``
            reads.
        data: the training rows, as for ``bayou.fit``.
        jitter: jitter·(mean variance of the features) is added to all variances, since units may be
            constant.
    """
    net = model.to_module() if isinstance(model, Posterior) else model
    like, rows = next(net.parameters()), list(as_data(data, ROWS).ordered())
    y = torch.cat([labels for _, labels in rows]).to(like.device)
    _, labels = (y.new_zeros(len(y)) if y.is_floating_point() else y).unique(return_inverse=True)
    made = FeatureDensity(net, int(labels.max()) + 1)
    z = torch.cat([made.features(place_inputs(x, like)) for x, _ in rows])
    if z.ndim != 2 or int((counts := labels.bincount()).min()) < 2:
        raise ValueError(
            f"a density needs features (B, D), got {tuple(z.shape)}, and two rows of each class at least"
        )
    parts, added = (
        [z[labels == k] for k in range(len(counts))],
        jitter * z.var(0).mean() * torch.eye(z.shape[1]).to(z),
    )
    made.mean.copy_(torch.stack([part.mean(0) for part in parts]))
    made.root.copy_(torch.linalg.cholesky(torch.stack([part.mT.cov() + added for part in parts])))
    made.log_weight.copy_((counts / len(z)).log())
    return made


def _last_linear(net: nn.Module) -> tuple[str, nn.Linear]:
    for name, module in reversed(list(net.named_modules())):
        if isinstance(module, nn.Linear):
            return name, module
    raise ValueError(f"{type(net).__name__} has no nn.Linear, whose inputs would be its features")

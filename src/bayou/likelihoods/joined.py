"""Samples of several predictive distributions as those of one, such as of a mixture's components.

Each sample keeps its own p(y | f): noise of another scale, an exact Gaussian prediction beside
draws of a function, or a likelihood of another class.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import final

import torch
from torch import Tensor, nn

from bayou.core.rng import Seed
from bayou.likelihoods.base import BoundLikelihood
from bayou.likelihoods.continuous import BoundMarginal, BoundPaired, LocationScale
from bayou.likelihoods.survival import BoundCensored

Sampled = tuple[BoundLikelihood, Tensor]  # p(y | f) and outputs f, (S, B, *out)


def join_samples(samples: Sequence[Sampled]) -> Sampled:
    """Return one likelihood and the outputs of all samples, in order: (Σ_k S_k, B, ...).

    Equal likelihoods stay as they are. Locations and scales with one density of unit scale become
    outputs; any others are told apart by a channel of the outputs (``BoundSelected``). Of censored
    targets these are the likelihoods of the times.

    Args:
        samples: likelihoods with outputs (S_k, B, *out_k) at the same B rows.

    Raises:
        ValueError: if they are distributions of different things, such as numbers and classes.
    """
    likelihoods = [likelihood for likelihood, _ in samples]
    first, *others = likelihoods
    if all(_are_equal(first, other) for other in others):
        return first, torch.cat([outputs for _, outputs in samples])
    _check_targets(samples)
    times = [
        (likelihood.of, outputs)
        for likelihood, outputs in samples
        if isinstance(likelihood, BoundCensored)
    ]
    if len(times) == len(samples):
        of, outputs = join_samples(times)
        return BoundCensored(of), outputs
    if isinstance(first, LocationScale) and all(_share_unit(first, other) for other in others):
        return _join_scales(first, samples)
    return BoundSelected.join(samples)


def _are_equal(a: BoundLikelihood, b: BoundLikelihood) -> bool:
    """Return whether two likelihoods are the same p(y | f)."""
    if type(a) is not type(b) or not _share_unit(a, b):
        return False
    tensors_of_a = dict(a.named_parameters()) | dict(a.named_buffers())
    tensors_of_b = dict(b.named_parameters()) | dict(b.named_buffers())
    if tensors_of_a.keys() != tensors_of_b.keys():
        return False
    is_same = all(torch.equal(value, tensors_of_b[name]) for name, value in tensors_of_a.items())
    return is_same and _plain_fields(a) == _plain_fields(b)


def _plain_fields(likelihood: BoundLikelihood) -> dict[str, object]:
    """Return the settings of a likelihood that are not tensors."""
    return {
        name: value
        for name, value in vars(likelihood).items()
        if isinstance(value, bool | int | float | str | tuple | None) and name != "training"
    }


def _share_unit(a: BoundLikelihood, b: BoundLikelihood) -> bool:
    """Return whether both have the same density of unit scale, or both have none."""
    unit_of_a = getattr(a, "unit", None)
    unit_of_b = getattr(b, "unit", None)
    if unit_of_a is None or unit_of_b is None:
        return unit_of_a is unit_of_b
    return type(unit_of_a) is type(unit_of_b) and vars(unit_of_a) == vars(unit_of_b)


def _check_targets(samples: Sequence[Sampled]) -> None:
    """Raise a ValueError unless all samples are of the same rows and of y of one kind."""
    targets = {
        (likelihood.support, tuple(likelihood.target_shape(outputs.shape[1:])))
        for likelihood, outputs in samples
    }
    if len(targets) > 1:
        names = " and ".join(dict.fromkeys(type(likelihood).__name__ for likelihood, _ in samples))
        kinds = "; ".join(f"{kind} of shape {shape}" for kind, shape in sorted(targets))
        raise ValueError(
            f"a mixture needs predictions of the same y, got {names}: {kinds}; join posteriors "
            "that were fitted to the same targets"
        )


def _join_scales(first: LocationScale, samples: Sequence[Sampled]) -> Sampled:
    """Return locations and log-scales as outputs, with the variance of the function if any has."""
    has_variance = any(isinstance(likelihood, BoundMarginal) for likelihood, _ in samples)
    joined = []
    for likelihood, outputs in samples:
        if isinstance(likelihood, BoundMarginal):
            joined.append(outputs)
            continue
        location, log_scale = likelihood.location_log_scale(outputs)  # type: ignore[operator]
        channels = [location, log_scale.detach().expand_as(location)]
        if has_variance:
            channels.append(torch.zeros_like(location))
        joined.append(torch.stack(channels, -1))
    likelihood = BoundMarginal(first.unit) if has_variance else BoundPaired(first.unit)
    return likelihood, torch.cat(joined)


@final
class BoundSelected(BoundLikelihood):
    """p(y | f) of likelihood k, where the last channel of f holds k.

    Outputs (..., B, W + 1) hold those of their own likelihood, flattened and filled up with zeros
    to W channels. Every quantity is computed by each likelihood, and taken where it applies.

    Args:
        likelihoods: K likelihoods of the same y.
        shapes: the shape of one row of outputs, for each likelihood.
        event: the shape of one row of y.
    """

    def __init__(
        self,
        likelihoods: Sequence[BoundLikelihood],
        shapes: Sequence[Sequence[int]],
        event: Sequence[int],
    ) -> None:
        super().__init__()
        self.likelihoods: nn.ModuleList = nn.ModuleList(likelihoods)
        self.shapes: list[torch.Size] = [torch.Size(shape) for shape in shapes]
        self.event: torch.Size = torch.Size(event)
        self.support = likelihoods[0].support  # type: ignore[misc]
        self.is_linear_in_y = all(item.is_linear_in_y for item in likelihoods)  # type: ignore[misc]

    @classmethod
    def join(cls, samples: Sequence[Sampled]) -> Sampled:
        """Return the likelihood and the outputs of all samples, in order.

        Args:
            samples: likelihoods with outputs (S_k, B, *out_k).
        """
        likelihoods = [likelihood for likelihood, _ in samples]
        shapes = [outputs.shape[2:] for _, outputs in samples]
        event = likelihoods[0].target_shape(samples[0][1].shape[1:])[1:]
        selected = cls(likelihoods, shapes, event)
        encoded = [selected._encode(outputs, k) for k, (_, outputs) in enumerate(samples)]
        return selected, torch.cat(encoded)

    def target_shape(self, f_shape: Sequence[int]) -> torch.Size:
        return torch.Size((*f_shape[:-1], *self.event))

    def labels(self, y: Tensor) -> tuple[Tensor, Tensor]:
        first: BoundLikelihood = self.likelihoods[0]  # type: ignore[assignment]
        return first.labels(y)

    def for_targets(self, f: Tensor, y: Tensor) -> Sampled:
        samples = [likelihood.for_targets(outputs, y) for likelihood, outputs in self._decoded(f)]
        first, outputs = samples[0]
        if all(_are_equal(first, likelihood) for likelihood, _ in samples[1:]):
            number = f[..., -1].reshape(*f.shape[:-1], *[1] * (outputs.ndim - f.ndim + 1))
            for k, (_, others) in enumerate(samples[1:], 1):
                outputs = torch.where(number == k, others, outputs)
            return first, outputs
        return self._with_samples(f, samples, self.labels(y)[0].shape[1:])

    def pointwise(self, f: Tensor, y: Tensor) -> Tensor:
        return self._select(f, lambda likelihood, outputs: likelihood.pointwise(outputs, y))

    def mean(self, f: Tensor) -> Tensor:
        return self._select(f, lambda likelihood, outputs: likelihood.mean(outputs))

    def variance(self, f: Tensor) -> Tensor:
        return self._select(f, lambda likelihood, outputs: likelihood.variance(outputs))

    def entropy(self, f: Tensor) -> Tensor:
        return self._select(f, lambda likelihood, outputs: likelihood.entropy(outputs))

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return self._select(f, lambda likelihood, outputs: likelihood.cdf(outputs, y))

    def log_survival(self, f: Tensor, y: Tensor) -> Tensor:
        return self._select(f, lambda likelihood, outputs: likelihood.log_survival(outputs, y))

    def sample(self, f: Tensor, n: int | None = None, seed: Seed = None) -> Tensor:
        return self._select(f, lambda likelihood, outputs: likelihood.sample(outputs, n, seed))

    def function_variance(self, f: Tensor) -> Tensor:
        def variance(likelihood: BoundLikelihood, outputs: Tensor) -> Tensor:
            shape = likelihood.target_shape(outputs.shape)
            value = torch.as_tensor(likelihood.function_variance(outputs)).to(outputs)
            return value.expand(shape)

        return self._select(f, variance)

    def functions(self, f: Tensor, count: int) -> Sampled:
        samples = [likelihood.functions(outputs, count) for likelihood, outputs in self._decoded(f)]
        return self._with_samples(f.repeat(count, *[1] * (f.ndim - 1)), samples)

    def rescale(self, f: Tensor, shift: Tensor, scale: Tensor) -> Sampled | None:
        samples = []
        for likelihood, outputs in self._decoded(f):
            rescaled = likelihood.rescale(outputs, shift, scale)
            if rescaled is None:
                return None
            samples.append(rescaled)
        return self._with_samples(f, samples)

    def temper(self, f: Tensor, temperature: float) -> Sampled:
        samples = [
            likelihood.temper(outputs, temperature) for likelihood, outputs in self._decoded(f)
        ]
        return self._with_samples(f, samples)

    def _with_samples(
        self, f: Tensor, samples: Sequence[Sampled], event: Sequence[int] | None = None
    ) -> Sampled:
        """Return the likelihoods and outputs that take the place of those of f, (S, B, W + 1)."""
        likelihoods = [likelihood for likelihood, _ in samples]
        shapes = [outputs.shape[2:] for _, outputs in samples]
        selected = BoundSelected(likelihoods, shapes, self.event if event is None else event)
        number = f[..., -1:]
        joined = selected._encode(samples[0][1], 0)
        for k, (_, outputs) in enumerate(samples[1:], 1):
            joined = torch.where(number == k, selected._encode(outputs, k), joined)
        return selected, joined

    def _encode(self, outputs: Tensor, k: int) -> Tensor:
        """Return outputs (S, B, *out) of likelihood k as (S, B, W + 1)."""
        width = max(shape.numel() for shape in self.shapes)
        flat = outputs.reshape(*outputs.shape[:2], -1)
        encoded = flat.new_zeros(*flat.shape[:2], width + 1)
        encoded[..., : flat.shape[-1]] = flat
        encoded[..., -1] = k
        return encoded

    def _decoded(self, f: Tensor) -> list[Sampled]:
        """Return every likelihood with all outputs, as if they were all its own."""
        pairs = []
        for likelihood, shape in zip(self.likelihoods, self.shapes, strict=True):
            outputs = f[..., : shape.numel()].reshape(*f.shape[:-1], *shape)
            pairs.append((likelihood, outputs))
        return pairs  # type: ignore[return-value]

    def _select(self, f: Tensor, compute: Callable[[BoundLikelihood, Tensor], Tensor]) -> Tensor:
        """Compute a quantity per row and coordinate of y by the likelihood of each output."""
        number = f[..., -1].reshape(*f.shape[:-1], *[1] * len(self.event))
        selected = torch.zeros(())
        for k, (likelihood, outputs) in enumerate(self._decoded(f)):
            value = compute(likelihood, outputs)
            selected = value if k == 0 else torch.where(number == k, value, selected)
        return selected

"""Dropout as inference: Bernoulli gains with a fixed or a learned rate."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.params import Params
from bayou.guides.gaussian import Delta
from bayou.guides.guide import KL, Draw, Gain, GuideSpec, TensorGuide, Tensors, Weight
from bayou.priors import BoundNormal


class DropoutGuide(TensorGuide):
    """W = M ⊙ mask/(1 − p), mask ~ Bernoulli(1 − p) per unit along ``axis`` or per weight.

    KL = E[−log p(W)] − H(mask) = Σ M²/(2·(1 − p)·σ_p²) − H(mask) + log σ_p + ½·log 2π for a prior
    around 0: a mask has no density with respect to p(W), so it is up to a constant (Gal &
    Ghahramani 2016), and −log p(M) for p → 0.

    Args:
        tensors: the tensor with its Normal prior.
        axis: the axis of units; None for a mask per weight.
        p: the initial probability of a zero.
        rate: "fixed", or how p is learned.
        temperature: the temperature of the concrete relaxation.
    """

    kl_kind = KL.constant
    prior: BoundNormal
    scales: ClassVar[tuple[str, ...]] = ("logit_p",)

    def __init__(
        self, tensors: Tensors, axis: int | None, p: float, rate: str, temperature: float
    ) -> None:
        super().__init__(tensors)
        self.axis = axis
        self.rate = rate
        self.temperature = temperature
        value = tensors.value
        self.center: nn.Parameter = nn.Parameter(value.clone())
        logit = torch.tensor(math.log(p) - math.log1p(-p), dtype=value.dtype, device=value.device)
        self.logit_p: nn.Parameter = nn.Parameter(logit, requires_grad=rate != "fixed")

    def draw(self, n: int, *, local: bool = False, seed: rng.Seed = None, start: int = 0) -> Draw:
        shape = self.center.shape
        if self.axis is not None:
            shape = shape[self.axis : self.axis + 1]
        u = rng.uniform(n, shape, self.center, seed, start)
        keep_probability = torch.sigmoid(-self.logit_p)
        score = None
        if self.rate == "concrete" and self.training:
            u = u.clamp(torch.finfo(u.dtype).eps, 1 - torch.finfo(u.dtype).eps)
            mask = torch.sigmoid((u.logit() - self.logit_p) / self.temperature)
        else:
            mask = (u < keep_probability).to(u.dtype)
            if self.rate == "reinforce":
                log_q = mask * F.logsigmoid(-self.logit_p) + (1 - mask) * F.logsigmoid(self.logit_p)
                score = log_q.flatten(1).sum(1)
        z = mask / keep_probability
        value: Tensor | Weight
        if self.axis is None:
            value = self.center * z
        else:
            weight = Weight(self.center, None, (Gain(self.axis, z),))
            value = weight if local else weight.center(n)
        return Draw({self.name: value}, self._kl(math.prod(shape)).expand(n), score)

    def _kl(self, units: int) -> Tensor:
        """Compute E[−log p(W)] − H(mask): a scalar."""
        keep_probability = torch.sigmoid(-self.logit_p)
        entropy = F.softplus(self.logit_p) - (1 - keep_probability) * self.logit_p
        # E[(W − μ)²] = (M − μ)² + Var[W], Var[W] = M²·p/(1 − p); the odds p/(1 − p) are
        # exp(logit_p)
        spread = self.center.square() * self.logit_p.exp() * (-2 * self.prior.log_scale).exp()
        return 0.5 * spread.sum() - self.prior.log_prob(self.center) - units * entropy

    def mean(self) -> Params:
        return {self.name: self.center}

    def std(self) -> Params:
        return {self.name: self.center.abs() * (0.5 * self.logit_p).exp()}  # Var[W] = M²·p/(1 − p)


@dataclass(frozen=True)
class Dropout(GuideSpec):
    """Dropout as a posterior (Gal & Ghahramani 2016, arXiv:1506.02142).

    W = M ⊙ mask/(1 − p), mask ~ Bernoulli(1 − p), with a point M. A mask has no density with
    respect to a Normal prior N(0, σ²), so that the KL is up to a constant:
    E[−log p(W)] − H(mask) = Σ M²/(2·(1 − p)·σ²) − H(mask) + const.

    Args:
        p: the probability of a zero, or its initial value (default 0.1).
        per: one mask entry for each "unit" (input unit or input channel; the default) or each
            "weight" (drop-connect).
        rate: "fixed" (the default), or p is learned by the "concrete" relaxation (Gal et al. 2017)
            or by "reinforce" (score function with a running baseline).
        temperature: of the concrete relaxation (default 0.1); masks approach 0 and 1 as it
            decreases.

    Example:
        >>> posterior = bayou.fit(net, (x, y), method=bayou.VI(bayou.Dropout(0.2)))
    """

    p: float = 0.1
    per: Literal["unit", "weight"] = "unit"
    rate: Literal["fixed", "concrete", "reinforce"] = "fixed"
    temperature: float = 0.1
    noise: ClassVar[bool] = False

    @property
    def local(self) -> bool:  # type: ignore[override]
        """Return whether masks are drawn per row, which masks of units are."""
        return self.per == "unit"

    @property
    def per_example(self) -> bool:
        return self.per == "unit"

    def __post_init__(self) -> None:
        if not 0 < self.p < 1:
            raise ValueError(
                f"Dropout p must lie strictly between 0 and 1, got {self.p}; Delta() is p = 0"
            )
        self._check_positive("temperature")
        self._check_choice("per", ("unit", "weight"))
        self._check_choice("rate", ("fixed", "concrete", "reinforce"))

    def for_vectors(self) -> GuideSpec:
        return Delta(penalty=True)

    def build(self, tensors: Tensors) -> DropoutGuide:
        name, value, prior, layout = tensors.single
        if not isinstance(prior, BoundNormal):
            raise ValueError(
                f"Dropout needs a Normal prior for {name!r}, got {type(prior).__name__}"
            )
        axis: int | None
        if self.per == "weight":
            axis = None
        elif value.ndim == 1:
            axis = 0
        else:
            axis = layout.in_axis
        return DropoutGuide(tensors, axis, self.p, self.rate, self.temperature)

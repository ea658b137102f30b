"""Variational Bayesian last layer: a Gaussian over the last layer, trained with the rest by a bound
without draws.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from bayou.core import rng
from bayou.core.files import StrPath
from bayou.core.params import Params
from bayou.core.progress import Show
from bayou.curvature.covariance import Covariance, Diagonal, Full
from bayou.curvature.structures import MAX_FULL_WEIGHTS
from bayou.curvature.swag import LowRankPlusDiagonal
from bayou.inference.first_batch import first_inputs, last_layer
from bayou.inference.point import PointModel, Regularized
from bayou.network import Call, Network, clear_errors, evaluating
from bayou.posteriors.gaussian import (
    PREDICTIVES,
    GaussianPosterior,
    PredictiveKind,
    check_predictive,
)
from bayou.priors import BoundNormal
from bayou.target import Target
from bayou.training.data import Data
from bayou.training.loop import move
from bayou.training.settings import Settings

START = 0.01  # the initial standard deviation of the weights, as that of MeanField


@final
@dataclass(frozen=True)
class VBLL(Regularized):
    """q(w) = N(w̄, S) of the last layer, the rest a point: max E_q[Σ_n log p(y_n | w·φ_n)] − KL(q ‖
    p) + log p(rest).

    (Harrison, Willes & Snoek 2024.) The expectation has a closed form in the means f and variances
    v = φᵀSφ of the outputs, so that nothing is drawn: exact for Gaussian noise, log N(y | f, σ²) −
    ½·v/σ², and for Poisson; by Jensen a lower bound for classes, f_y − log Σ_k exp(f_k + ½·v_k),
    and for StudentT. With ``where="last"`` of ``bayou.fit`` the rest stays as it is; then for
    Gaussian noise and a full S the maximum is the log evidence.

    The outputs of the network must be those of a linear layer. ``posterior.log_evidence`` is the
    bound of all rows without log p(rest), which is for a model with this rest, not for a posterior
    of all weights. S learns at 10·lr.

    Args:
        rank: 0: a diagonal S; a number: diagonal plus low rank, for all outputs together. None: a
            full S for each output if the layer has up to 5,000 weights, else rank 8.
        predictive: see ``GaussianPosterior``; None: "exact" for Gaussian noise, else "sampled",
            which passes the rest of the network once for all draws.
    """

    rank: int | None = None
    predictive: PredictiveKind | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check(
            ("rank",),
            lambda rank: rank is None or (type(rank) is int and rank >= 0),
            "a whole number or None",
        )
        self._check(
            ("predictive",),
            lambda kind: kind is None or kind in PREDICTIVES,
            f"of {', '.join(PREDICTIVES)}",
        )
        self._check(
            ("weight_noise",), lambda std: std == 0, "0: the last layer has noise of its own"
        )

    def at_mode(self, noise: float, data: Data) -> Self:
        return replace(self, effort=self.effort / 10)  # the features are learned already

    def fit(
        self,
        target: Target,
        data: Any,
        *,
        seed: int = 0,
        checkpoint: StrPath | None = None,
        progress: Show = True,
    ) -> GaussianPosterior:
        """The Gaussian over the last layer, and the point of the rest."""
        problem, rows, state = self._run(target, data, seed, checkpoint, progress)
        assert isinstance(problem, LastLayer)
        with torch.no_grad():
            bound, mean = problem.total(rows) - float(problem.kl()), problem.weights()
            posterior = GaussianPosterior(
                problem.target, Network(problem.net.eval()), {name: value.clone() for name, value in mean.items()},
                problem.covariance(), state.history, predictive=problem.kind, log_evidence=bound,
            )  # fmt: skip
        posterior.stopped = state.stopped
        return posterior

    def _problem(self, target: Target, data: Data, held: Data | None, seed: int) -> LastLayer:
        inputs = first_inputs(target, data)
        with clear_errors(inputs):
            return LastLayer(self, target, held, seed, last_layer(target, data), inputs)


class LastLayer(PointModel):
    """The bound as a function of the weights, of log σ (K, D) and of U, with D weights (inputs,
    bias) of K outputs.

    S = diag(σ)·(I + U·Uᵀ)·diag(σ) with U (K·D, rank); a full S of an output is diag(σ)·(I + U)·(I +
    U)ᵀ·diag(σ) with a strictly upper triangular U (D, D).
    """

    method: VBLL

    def __init__(
        self,
        method: VBLL,
        target: Target,
        held: Data | None,
        seed: int,
        names: list[str],
        inputs: tuple[Any, ...],
    ) -> None:
        super().__init__(method, target, held, seed)
        kind = method.predictive or ("exact" if self.likelihood.is_gaussian else "sampled")
        self.kind, params, self.last = (
            check_predictive(kind, self.likelihood),
            self.weights(),
            names,
        )
        weight = params[names[0]]
        with torch.no_grad(), evaluating(self.net), Features(weight) as seen:
            outputs = self.net(*inputs).flatten()
        ends = [
            F.linear(x, weight, *(params[name] for name in names[1:])).flatten()
            for x in seen.inputs
        ]
        if len(ends) != 1 or ends[0].shape != outputs.shape or not torch.allclose(ends[0], outputs):
            raise ValueError(
                f"VBLL needs a network whose outputs are those of a linear layer, got {type(target.net).__name__}, "
                f"where {' and '.join(names)} come last; use Laplace(where='last'), or VI"
            )
        if target.couplings or not all(
            isinstance(target.priors[name], BoundNormal) for name in names
        ):
            raise ValueError(
                f"VBLL needs a Normal prior of each of {' and '.join(names)}; use such a prior, or VI"
            )
        shape = len(weight), weight.shape[1] + len(names) - 1
        self.full = method.rank is None and math.prod(shape) <= MAX_FULL_WEIGHTS
        self.log_std = nn.Parameter(weight.new_full(shape, math.log(START)))
        columns = shape[1] if self.full else 8 if method.rank is None else method.rank
        noise = rng.normal(
            shape[0], (shape[1], columns), weight, seed=0
        )  # a low rank of 0 would have no gradient
        self.mixing = nn.Parameter(noise * (0.0 if self.full else 1 / math.sqrt(math.prod(shape))))

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        scales = [
            self.log_std,
            self.mixing,
            *(p for p in self.likelihood.parameters() if p.requires_grad),
        ]
        groups = (list(self.weights().values()), settings.lr), (scales, 10 * settings.lr)
        return settings.make_optimizer([{"params": params, "lr": lr} for params, lr in groups])

    def factors(self) -> tuple[Tensor, Tensor]:
        """s (K, D) and C (K, D, ·): S = diag(s²) + C·Cᵀ; of a full S s = 0, and C (D, D) is its
        root.
        """
        std = self.log_std.exp()
        if not self.full:
            return std, std.unsqueeze(-1) * self.mixing
        eye = torch.eye(std.shape[1], dtype=std.dtype, device=std.device)
        return torch.zeros_like(std), std.unsqueeze(-1) * (eye + self.mixing.triu(1))

    def kl(self) -> Tensor:
        """KL(q ‖ p): Σ KL of the marginals, and Σ of their entropies less that of q."""
        std, columns = self.factors()
        variance, log_det = std.square() + columns.square().sum(-1), 2 * self.log_std.sum()
        if not self.full:
            u = self.mixing.flatten(0, 1)
            log_det = log_det + torch.logdet(
                torch.eye(u.shape[1], dtype=u.dtype, device=u.device) + u.mT @ u
            )
        total, weights = 0.5 * (variance.log().sum() - log_det), self.weights()
        for name, own in self.named(variance.sqrt()).items():
            total = total + self.target.priors[name].kl(weights[name], own)  # type: ignore[operator]
        return total

    def named(self, rows: Tensor) -> Params:
        """Rows (..., K, D) as the tensors of the layer."""
        bias = len(self.last) - 1
        return dict(
            zip(self.last, (rows[..., : rows.shape[-1] - bias], rows[..., -1]), strict=False)
        )

    def expected(self, x: Any, y: Tensor) -> Tensor:
        """E_q log p(y_n | f_n), or its bound, of every row."""
        seen = Features(self.weights()[self.last[0]])
        with seen:  # torch.compile does not support "as"
            outputs = self.training_outputs(x, y.device)
        std, columns = self.factors()
        phi = seen.inputs[0].to(std)
        phi = F.pad(phi, (0, std.shape[1] - phi.shape[-1]), value=1.0)  # of a bias
        variance = phi.square() @ std.square().mT + torch.einsum(
            "...d,kde->...ke", phi, columns
        ).square().sum(-1)
        return self.likelihood.log_prob(outputs, y, variance.reshape(outputs.shape))

    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        log_likelihood, kl = self.target.scale(self.expected(x, y)), self.kl()
        report = {"elbo": log_likelihood - kl, "log_likelihood": log_likelihood, "kl": kl}
        if rest := {name: value for name, value in self.weights().items() if name not in self.last}:
            report["log_prior"] = self.target.log_prior(rest)
        return -self.objective(report) / self.target.n, {
            name: number.detach() for name, number in report.items()
        }

    def objective(self, numbers: dict[str, Tensor]) -> Tensor:
        return numbers["elbo"] + numbers.get("log_prior", 0.0)

    @torch.no_grad()
    def total(self, data: Data) -> float:
        """Σ_n E_q log p(y_n | f_n) of all rows."""
        with evaluating(self):
            return sum(
                float(self.expected(*move(batch, self.log_std)).sum()) for batch in data.ordered()
            )

    def held_out_loss(self) -> float:
        assert self.held is not None
        return -self.total(self.held) / self.held.n

    def covariance(self) -> Covariance:
        """S as a covariance of the tensors of the layer."""
        std, columns = self.factors()
        own, factor = self.named(std), self.named(columns.movedim(-1, 0))
        shapes = {name: value.shape for name, value in own.items()}
        if self.full:
            places = self.named(
                torch.arange(std.numel(), device=std.device).reshape(std.shape)
            ).values()
            order = torch.cat([place.flatten() for place in places])  # weights, then biases
            return Full(shapes, {"root": torch.block_diag(*columns)[order][:, order]})
        if not self.mixing.numel():
            return Diagonal(shapes, own)
        parts = {f"std.{name}": value for name, value in own.items()}
        return LowRankPlusDiagonal(
            shapes, parts | {f"factor.{name}": value for name, value in factor.items()}
        )


class Features(TorchFunctionMode):
    """Records the ``inputs`` of linear calls with this weight."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.weight = weight
        self.inputs: list[Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear and (call := Call(func, args, kwargs or {})).weight is self.weight:
            self.inputs.append(call.x)
        return func(*args, **(kwargs or {}))

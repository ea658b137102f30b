"""Variational Bayesian last layer: trained with the rest of the network, without draws."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Any, Self, final

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from bayou.core import rng
from bayou.core.params import Params
from bayou.curvature.covariance import Covariance, Diagonal, Full
from bayou.curvature.structures import MAX_FULL_WEIGHTS
from bayou.curvature.swag import LowRankPlusDiagonal
from bayou.inference.data_checks import first_inputs, last_layer
from bayou.inference.method import FitArguments
from bayou.inference.point import PointModel, Regularized
from bayou.network import Network, clear_errors, evaluating
from bayou.network.target import Target
from bayou.posteriors.gaussian import (
    PREDICTIVES,
    GaussianPosterior,
    PredictiveKind,
    check_predictive,
)
from bayou.priors import BoundNormal
from bayou.training.data import Data
from bayou.training.loop import move
from bayou.training.settings import Settings

INITIAL_STD = 0.01  # of the weights, as that of MeanField
DEFAULT_RANK = 8  # of S, where a full one is too large


@final
@dataclass(frozen=True)
class VBLL(Regularized[GaussianPosterior]):
    """Variational Bayesian last layer: q(w) = N(w̄, S) of the last layer, the rest a point.

        max  E_q[Σ_n log p(y_n | w·φ_n)] − KL(q ‖ p) + log p(rest)

    The expectation has a closed form in the means f and variances v = φᵀSφ of the outputs, so that
    nothing is drawn: exact for Gaussian noise, log N(y | f, σ²) − ½·v/σ², and for Poisson; by
    Jensen a lower bound for classes, f_y − log Σ_k exp(f_k + ½·v_k), and for StudentT. With
    ``where="last"`` of ``bayou.fit`` the rest stays as it is; then for Gaussian noise and a full S
    the maximum is the log evidence.

    The outputs of the network must be those of a linear layer. ``posterior.log_evidence`` is the
    bound of all rows without log p(rest), which is for a model with this rest, not for a posterior
    of all weights. S learns at 10·lr.

    Args:
        rank: 0: a diagonal S; a number: diagonal plus low rank, for all outputs together. None
            (default): a full S for each output if the layer has up to 5,000 weights, else rank 8.
        predictive: see ``GaussianPosterior``; None (default): "exact" for Gaussian noise, else
            "sampled", which passes the rest of the network once for all draws.

    Returns:
        ``fit`` returns a ``GaussianPosterior`` over the last layer.

    Raises:
        ValueError: for a network that does not end in a linear layer, and priors of that layer that
            are not Normal.

    Paper: Harrison, Willes & Snoek 2024, https://arxiv.org/abs/2404.11599.
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
            lambda value: value is None or value in PREDICTIVES,
            f"of {', '.join(PREDICTIVES)}",
        )
        self._check(
            ("weight_noise",), lambda std: std == 0, "0: the last layer has noise of its own"
        )

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method with fewer steps: the features are learned already."""
        return replace(self, effort=self.effort / 10)

    def _fit(self, arguments: FitArguments) -> GaussianPosterior:
        """Return the Gaussian over the last layer, and the point of the rest."""
        problem, rows, state = self._run(arguments)
        if not isinstance(problem, LastLayerBound):
            raise TypeError(f"VBLL trains a LastLayerBound, got {type(problem).__name__}")
        with torch.no_grad():
            bound = problem.total(rows) - float(problem.kl())
            problem.hook.remove()
            posterior = GaussianPosterior(
                problem.target,
                Network(problem.net.eval()),
                {name: value.clone() for name, value in problem.weights().items()},
                problem.covariance(),
                state.history,
                predictive=problem.predictive,
                log_evidence=bound,
            )
        posterior.stopped = state.stopped
        return posterior

    def _problem(self, target: Target, data: Data, seed: int) -> LastLayerBound:
        """Return the objective of a run."""
        inputs = first_inputs(target, data)
        with clear_errors(inputs):
            return LastLayerBound(self, target, seed, last_layer(target, data), inputs)


class LastLayerBound(PointModel):
    """The bound of VBLL as a function of the weights and of S.

    With D weights (inputs, bias) of K outputs, log σ (K, D) and U: S = diag(σ)·(I + U·Uᵀ)·diag(σ)
    with U (K·D, rank); a full S of an output is diag(σ)·(I + U)·(I + U)ᵀ·diag(σ) with a strictly
    upper triangular U (D, D).

    Args:
        method: the settings.
        target: the likelihood, the priors and the number of rows.
        seed: of the run.
        names: of the weight and the bias of the last layer.
        inputs: of the network, a batch.
    """

    method: VBLL

    def __init__(
        self,
        method: VBLL,
        target: Target,
        seed: int,
        names: list[str],
        inputs: tuple[Any, ...],
    ) -> None:
        super().__init__(method, target, seed)
        predictive = method.predictive or ("exact" if self.likelihood.is_gaussian else "sampled")
        self.predictive = check_predictive(predictive, self.likelihood)
        self.last = names
        weight = self.weights()[names[0]]
        layer = self.net.get_submodule(names[0].rpartition(".")[0])
        self.features: list[Tensor] = []  # the inputs of the last layer in a forward pass
        self.hook: RemovableHandle = layer.register_forward_pre_hook(
            lambda _, arguments: self.features.append(arguments[0])
        )
        self._check_last_layer(layer, inputs)
        if target.couplings or not all(
            isinstance(target.priors[name], BoundNormal) for name in names
        ):
            raise ValueError(
                f"VBLL needs a Normal prior of each of {' and '.join(names)}; "
                "use such a prior, or VI"
            )
        shape = len(weight), weight.shape[1] + len(names) - 1
        self.full: bool = method.rank is None and math.prod(shape) <= MAX_FULL_WEIGHTS
        self.log_std: nn.Parameter = nn.Parameter(weight.new_full(shape, math.log(INITIAL_STD)))
        # U begins at 0 in a full S; a low rank of 0 would have no gradient
        rank = DEFAULT_RANK if method.rank is None else method.rank
        columns = shape[1] if self.full else rank
        scale = 0.0 if self.full else 1 / math.sqrt(math.prod(shape))
        noise = rng.normal(shape[0], (shape[1], columns), weight, seed=0)
        self.mixing: nn.Parameter = nn.Parameter(noise * scale)

    @torch.no_grad()
    def _check_last_layer(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        """Raise a ValueError unless the outputs of the network are those of the last layer."""
        with evaluating(self.net):
            outputs = self.net(*inputs).flatten()
            is_last = isinstance(layer, nn.Linear) and len(self.features) == 1
            if is_last:
                layer_outputs = layer(self.features[0]).flatten()
                is_last = layer_outputs.shape == outputs.shape
                is_last = is_last and torch.allclose(layer_outputs, outputs)
        if not is_last:
            raise ValueError(
                "VBLL needs a network whose outputs are those of a linear layer, got "
                f"{type(self.target.net).__name__}, where {' and '.join(self.last)} come last; "
                "use Laplace(where='last'), or VI"
            )

    def make_optimizer(self, settings: Settings, steps: int) -> torch.optim.Optimizer:
        """Return the optimizer of the settings, with 10·lr for S and the likelihood."""
        learned = [p for p in self.likelihood.parameters() if p.requires_grad]
        return settings.make_optimizer(
            [
                {"params": list(self.weights().values()), "lr": settings.lr},
                {"params": [self.log_std, self.mixing, *learned], "lr": 10 * settings.lr},
            ]
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return s (K, D) and C (K, D, ·): S = diag(s²) + C·Cᵀ.

        Of a full S s = 0, and C (D, D) is its root.
        """
        std = self.log_std.exp()
        if not self.full:
            return std, std.unsqueeze(-1) * self.mixing
        eye = torch.eye(std.shape[1], dtype=std.dtype, device=std.device)
        return torch.zeros_like(std), std.unsqueeze(-1) * (eye + self.mixing.triu(1))

    def kl(self) -> Tensor:
        """Return KL(q ‖ p): Σ KL of the marginals, and Σ of their entropies less that of q."""
        std, columns = self.factors()
        variance = std.square() + columns.square().sum(-1)
        log_det = 2 * self.log_std.sum()
        if not self.full:
            u = self.mixing.flatten(0, 1)
            eye = torch.eye(u.shape[1], dtype=u.dtype, device=u.device)
            log_det = log_det + torch.logdet(eye + u.mT @ u)
        kl = 0.5 * (variance.log().sum() - log_det)
        weights = self.weights()
        for name, marginal_std in self.split(variance.sqrt()).items():
            prior = self.target.priors[name]
            kl = kl + prior.kl(weights[name], marginal_std)  # type: ignore[operator]
        return kl

    def split(self, rows: Tensor) -> Params:
        """Return rows (..., K, D) as the tensors of the layer.

        Args:
            rows: the weights and, if the layer has one, the bias of every output.
        """
        bias_columns = len(self.last) - 1
        weight = rows[..., : rows.shape[-1] - bias_columns]
        return dict(zip(self.last, (weight, rows[..., -1]), strict=False))

    def expected_log_likelihood(self, x: object, y: Tensor) -> Tensor:
        """Return E_q log p(y_n | f_n), or its bound, of every row.

        Args:
            x: inputs.
            y: targets.
        """
        self.features.clear()
        outputs = self.training_outputs(x, y.device)
        std, columns = self.factors()
        phi = self.features.pop().to(std)
        phi = F.pad(phi, (0, std.shape[1] - phi.shape[-1]), value=1.0)  # of a bias
        projections = torch.einsum("...d,kde->...ke", phi, columns)
        variance = phi.square() @ std.square().mT + projections.square().sum(-1)
        return self.likelihood.log_prob(outputs, y, variance.reshape(outputs.shape))

    def loss(self, x: object, y: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the negative bound of a batch over N, and its terms in nats."""
        log_likelihood = self.target.scale(self.expected_log_likelihood(x, y))
        kl = self.kl()
        report = {"elbo": log_likelihood - kl, "log_likelihood": log_likelihood, "kl": kl}
        rest = {name: value for name, value in self.weights().items() if name not in self.last}
        if rest:
            report["log_prior"] = self.target.log_prior(rest)
        numbers = {name: number.detach() for name, number in report.items()}
        return -self.objective(report) / self.target.n, numbers

    def objective(self, numbers: dict[str, Tensor]) -> Tensor:
        """Return the objective in nats from reported numbers."""
        return numbers["elbo"] + numbers.get("log_prior", 0.0)

    @torch.no_grad()
    def total(self, data: Data) -> float:
        """Return Σ_n E_q log p(y_n | f_n) of all rows.

        Args:
            data: the rows.
        """
        log_likelihood = 0.0
        with evaluating(self):
            for batch in data.epoch():
                x, y = move(batch, self.log_std)
                log_likelihood += float(self.expected_log_likelihood(x, y).sum())
        return log_likelihood

    def held_out_loss(self, rows: Data) -> float:
        """Return the negative expected log-likelihood of a held-out row."""
        return -self.total(rows) / rows.n

    def covariance(self) -> Covariance:
        """Return S as a covariance of the tensors of the layer."""
        std, columns = self.factors()
        stds = self.split(std)
        shapes = {name: value.shape for name, value in stds.items()}
        if self.full:
            index = torch.arange(std.numel(), device=std.device).reshape(std.shape)
            order = torch.cat([value.flatten() for value in self.split(index).values()])
            # weights, then biases
            return Full(shapes, {"root": torch.block_diag(*columns)[order][:, order]})
        if not self.mixing.numel():
            return Diagonal(shapes, stds)
        factors = self.split(columns.movedim(-1, 0))
        tensors = {f"std.{name}": value for name, value in stds.items()}
        tensors |= {f"factor.{name}": value for name, value in factors.items()}
        return LowRankPlusDiagonal(shapes, tensors)

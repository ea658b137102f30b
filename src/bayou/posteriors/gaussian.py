"""Gaussian posteriors with a structured covariance: Laplace, SWAG, IVON."""

from __future__ import annotations

import copy
import glob
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any, Final, Literal, final

import torch
from torch import Tensor, nn

from bayou.core import rng
from bayou.core.files import FileError
from bayou.core.params import Params, size, under
from bayou.curvature import Covariance
from bayou.curvature.covariance import Diagonal, Full
from bayou.curvature.joint import JointNormal
from bayou.curvature.kronecker import Kronecker
from bayou.curvature.linearize import linearize, tangent
from bayou.curvature.sweep import QUIET
from bayou.likelihoods import BoundLikelihood
from bayou.network import Map, Network, VmapOrLoop, clear_errors, out_of_memory, rows_of
from bayou.network.units import Units
from bayou.posteriors.posterior import CHUNK_NUMBERS, Posterior, check_count
from bayou.posteriors.state import restore_network, restore_target, target_state
from bayou.predictive import Predictive
from bayou.priors import BoundNormal, BoundPart, DensityPrior, Prior, joint_rules
from bayou.target import Target, prior_specs

PredictiveKind = Literal["sampled", "linearized", "probit", "exact"]
LINEARITY_FACTOR = (
    8.0  # enlargement of a draw in the test whether a network is linear in its weights
)
ROWS = 256  # whose graph is held at a time while linearized functions are computed
PREDICTIVES: Final[tuple[PredictiveKind, ...]] = ("sampled", "linearized", "probit", "exact")
CLOSED = ("probit", "exact")  # without draws


@final
class GaussianPosterior(Posterior):
    """q(w) = N(mean, Σ) over some of the tensors; the others are points at their mean.

    ``predictive`` says which function a draw of weights is: ``"sampled"``, the network with these
    weights; ``"linearized"``, f(x, mean) + J(x)·(w − mean), the model that a Gauss-Newton curvature
    belongs to (Khan 2019, Immer 2021); and ``"probit"``, for classes: logits f/√(1 + π/8·v) with v
    the variances of the linearized logits, one function instead of many (Spiegelhalter & Lauritzen
    1990, MacKay 1992). ``"exact"``, for Gaussian noise σ: p(y) = N(f, v + σ²) of the linearized
    function. The single draws of both are linearized.
    ``log_evidence``: an estimate of log p(D), where the method has one.
    """

    kind = "gaussian"
    centered = True

    def __init__(
        self,
        target: Target,
        network: Network,
        mean: Params,
        covariance: Covariance,
        history: list[dict[str, float]] | None = None,
        *,
        predictive: PredictiveKind = "sampled",
        log_evidence: float | None = None,
    ) -> None:
        self.target, self.network, self.covariance = target, network, covariance
        self.center = {name: value.detach() for name, value in mean.items()}
        self.history, self.stopped = history or [], ""
        self.predictive, self.log_evidence = (
            check_predictive(predictive, target.likelihood),
            log_evidence,
        )

    @property
    def predicts_without_draws(self) -> bool:  # type: ignore[override]
        return self.predictive in CLOSED

    def like(self) -> Params:
        return dict(self.center)

    def call(self, params: Params, *inputs: Any) -> Tensor:
        """The outputs with these parameters: of the network, or of its linearization at the
        mean.
        """
        if self.predictive == "sampled":
            return self.network.evaluate(params, *inputs)
        own = self._random
        f, slope = tangent(
            self._at(inputs), own, {name: params[name] - value for name, value in own.items()}
        )
        return f + slope

    @property
    def _random(self) -> Params:
        """The mean of the tensors that are not points."""
        return {name: self.center[name] for name in self.covariance.shapes}

    def _at(self, inputs: Sequence[Any]) -> Callable[[Params], Tensor]:
        """The network on these inputs as a function of the tensors that are not points."""
        return lambda own: self.network.evaluate(self.center | own, *inputs)

    def _functions(self, inputs: tuple[Any, ...], *, loop: bool) -> Map:
        mapped = super()._functions(inputs, loop=loop)
        return mapped if self.predictive == "sampled" else partial(self._linearized_or, mapped)

    def _linearized_or(self, mapped: Map, stack: Params, *inputs: Any) -> Tensor:
        """Many linearized functions share what does not depend on the draw: for a last layer,
        nearly everything.
        """
        try:
            starts = range(0, max(1, len(inputs[0])), ROWS)
            return torch.cat(
                [self._linearized(stack, rows_of(inputs, slice(n, n + ROWS))) for n in starts], 1
            )
        except RuntimeError as error:  # an operation that cannot be differentiated twice
            if out_of_memory(error):
                raise
        return mapped(stack, *inputs)

    def _linearized(self, stack: Params, inputs: tuple[Any, ...]) -> Tensor:
        """f + J·(w_s − mean) for every draw, J· as the transpose of Jᵀ·: (S, B, *out)."""
        own = self._random
        f, pull = linearize(self._at(inputs), own)
        _, push = linearize(lambda u: pull(u)[0], torch.zeros_like(f))
        each = [
            push({name: stack[name][s] - value for name, value in own.items()})[0]
            for s in range(size(stack))
        ]
        return (f + torch.stack(each)).detach()

    def take_units(self, units: Units) -> None:
        if self.log_evidence is not None:
            self.log_evidence -= self.target.n * units.log_scale
        super().take_units(units)

    def using(self, predictive: PredictiveKind) -> GaussianPosterior:
        """The same distribution over weights, with another way to make functions of them."""
        other = copy.copy(self)
        other.predictive = check_predictive(predictive, self.target.likelihood)
        return other

    def predict(
        self,
        x: Any,
        samples: int | None = None,
        *,
        seed: rng.Seed = 0,
        chunk: int | None = None,
        batch_size: int | None = None,
        predictive: PredictiveKind | None = None,
    ) -> Predictive:
        """As every posterior predicts; ``predictive``: instead of the posterior's own.

        An exact prediction is one distribution, not a mixture of functions; with ``samples`` these
        are drawn.
        """
        if predictive is not None and predictive != self.predictive:
            return self.using(predictive).predict(
                x, samples, seed=seed, chunk=chunk, batch_size=batch_size
            )
        if self.predictive not in CLOSED or (self.predictive == "exact" and samples is not None):
            return super().predict(x, samples, seed=seed, chunk=chunk, batch_size=batch_size)
        if samples not in (None, 1):
            raise ValueError(
                f"a probit prediction is one function, got samples={samples}; use predictive='linearized'"
            )
        mean, variance = self.function(x, batch_size=batch_size, diagonal=True)
        own = copy.deepcopy(self.target.likelihood).requires_grad_(False)
        likelihood, outputs = own.marginal(mean, variance.reshape(mean.shape))
        return self.tempered(likelihood, outputs.unsqueeze(0))

    @torch.no_grad()
    def function(
        self, x: Any, *, batch_size: int | None = None, diagonal: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The linearized function, exactly: its mean f(x, mean), (B, *out), and covariance J·Σ·Jᵀ,
        (B, K, K).

        K is the number of outputs of one example; ``diagonal``: its variances alone, (B, K). The
        Jacobians of ``batch_size`` rows are held at a time (by default as many as fit).
        """
        inputs = self.place(x)
        means, covariances = [], []
        rows = batch_size or 1
        first = 0
        with clear_errors(inputs), QUIET:
            while first < len(inputs[0]):
                f, spread = self._spread(rows_of(inputs, slice(first, first + rows)))
                means.append(f)
                covariances.append(spread.square().sum(-1) if diagonal else spread @ spread.mT)
                first += rows
                rows = batch_size or max(
                    1, CHUNK_NUMBERS // max(1, f[0].numel() * self.covariance.size)
                )
        if not means:
            raise ValueError("x has no rows")
        return torch.cat(means), torch.cat(covariances)

    def _spread(self, inputs: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        """f (B, *out), and R (B, K, ·) with R·Rᵀ = J·Σ·Jᵀ."""

        def rows(one: tuple[Any, ...]) -> tuple[Tensor, Params]:
            network = self._at(
                [row.unsqueeze(0) if isinstance(row, Tensor) else row for row in one]
            )
            f, pull = linearize(lambda own: network(own).squeeze(0), self._random)
            eye = torch.eye(f.numel(), dtype=f.dtype, device=f.device).reshape(-1, *f.shape)
            return f, VmapOrLoop(lambda u: pull(u)[0], (0,))(eye)

        tensors = [item for item in inputs if isinstance(item, Tensor)]
        f, jacobian = VmapOrLoop(lambda *one: rows(_with(inputs, one)), (0,) * len(tensors))(
            *tensors
        )
        return f, self.covariance.spread(jacobian)

    @torch.no_grad()
    def sample(self, n: int, seed: rng.Seed = None, start: int = 0) -> Params:
        """Draws of all parameters, (n, *shape) each; with an int seed, draw i is a function of
        (seed, i) alone.
        """
        check_count(n)
        deviation = self.covariance.sample(n, seed, start)
        return {
            name: value + deviation[name] if name in deviation else value.expand(n, *value.shape)
            for name, value in self.center.items()
        }

    def mean(self) -> Params:
        return dict(self.center)

    def std(self) -> Params:
        points = {name: torch.zeros_like(value) for name, value in self.center.items()}
        return points | {name: value.sqrt() for name, value in self.covariance.variance().items()}

    def log_prob(self, params: Params) -> Tensor:
        """log q(w) of the tensors (..., *shape) that are not points."""
        return self.covariance.log_prob(
            {name: params[name] - self.center[name] for name in self.covariance.shapes}
        )

    def as_prior(self) -> dict[str, Prior]:
        """N(mean, Σ), the prior of the next task (online Laplace, Ritter 2018); points keep theirs.

        A diagonal Σ is a Normal of each tensor; any other is one density of all of them, with which
        MAP, VI and chains continue, and Laplace of the same structure, "full" or "kronecker".
        """
        random, made = self.covariance.shapes, prior_specs(self.target.prior, self.target.net)
        mean = self._random
        if isinstance(self.covariance, Diagonal):
            std = self.covariance.tensors
            made |= {
                n: DensityPrior(BoundNormal(value.shape, value, std[n].log()))
                for n, value in mean.items()
            }
        else:
            density = JointNormal(mean, self.covariance, self._base())
            made |= joint_rules(density, mean, self.std(), random)
        return {glob.escape(name): prior for name, prior in made.items()}

    def joined(self, other: Posterior, names: Collection[str]) -> GaussianPosterior | None:
        if not isinstance(other, GaussianPosterior) or not isinstance(
            other.covariance, Diagonal | Full | Kronecker
        ):
            return None
        mean = {
            name: other.center[name] if name in names else self.center[name]
            for name in other.center
        }
        theirs = other.covariance.marginal(
            [name for name in other.covariance.shapes if name in names]
        )
        rest = self.covariance.marginal(
            [name for name in self.covariance.shapes if name not in names]
        )
        apart = rest.with_independent(theirs)
        return GaussianPosterior(
            other.target, other.network, mean, apart, predictive=other.predictive
        )

    def traceable(self, draw: Params, inputs: tuple[Any, ...]) -> tuple[Posterior, Params]:
        """A linearized network needs derivatives, which torch.export does not support for every B.

        A network that is linear in its random tensors (a last layer) is its own linearization; a
        dry run with an enlarged draw tests this.
        """
        if self.predictive == "sampled":
            return self, draw
        if self.predictive == "probit":
            raise ValueError(
                "a probit prediction is no average over draws; export posterior.using('linearized') or "
                ".using('sampled')"
            )
        sampled = self.using("sampled")
        far = {
            name: value + LINEARITY_FACTOR * (draw[name] - value)
            for name, value in self.center.items()
        }
        linear, plain = self.call(far, *inputs), sampled.call(far, *inputs)
        if float((linear - plain).abs().max()) > 256 * torch.finfo(plain.dtype).eps * float(
            1 + plain.abs().max()
        ):
            raise ValueError(
                "a network that is linearized in more than its last layer needs derivatives for every x, which "
                "torch.export cannot take; export posterior.using('sampled'), or fit with Laplace(where='last')"
            )
        return sampled, draw

    def _base(self) -> Params:
        """The precision of the prior before any task, where it was Normal."""
        found: Params = {}
        for name, prior in self.target.priors.items():
            density = prior.density if isinstance(prior, BoundPart) else None
            if isinstance(density, JointNormal):
                found |= {name: density.base[name]} if name in density.base else {}
            elif isinstance(prior, BoundNormal) and density is None:
                found[name] = torch.exp(-2 * prior.log_scale.detach())
        return found

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, config = target_state(self, mean=self.center, covariance=self.covariance.tensors)
        config |= {"predictive": self.predictive, "log_evidence": self.log_evidence}
        config["covariance"] = [
            self.covariance.kind,
            {n: list(s) for n, s in self.covariance.shapes.items()},
        ]
        return tensors, config

    @classmethod
    def restore(
        cls, tensors: dict[str, Tensor], config: dict[str, Any], net: nn.Module, **options: Any
    ) -> GaussianPosterior:
        target = restore_target(tensors, config, net, **options)
        kinds = {family.kind: family for family in Covariance.__subclasses__()}
        kind, shapes = config["covariance"]
        if kind not in kinds:
            raise FileError(
                f"{config['path']} has a covariance of the kind {kind!r}; expected one of {', '.join(kinds)}"
            )
        device = next(net.parameters()).device
        placed = {name: value.to(device) for name, value in tensors.items()}
        covariance = kinds[kind](shapes, under("covariance.", placed))
        return cls(
            target, restore_network(target, tensors, config), under("mean.", placed), covariance, config["history"],
            predictive=config["predictive"], log_evidence=config["log_evidence"],
        )  # fmt: skip

    def __repr__(self) -> str:
        net, kind, size = type(self.target.net).__name__, self.covariance.kind, self.covariance.size
        total = sum(value.numel() for value in self.center.values())
        return f"GaussianPosterior({net}: {kind} over {size:,} of {total:,} weights)"


def _with(inputs: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
    """The inputs with these in the place of their tensors."""
    each = iter(tensors)
    return tuple(next(each) if isinstance(item, Tensor) else item for item in inputs)


def check_predictive(predictive: Any, likelihood: BoundLikelihood) -> PredictiveKind:
    """A ValueError unless this is a way to predict that suits the likelihood."""
    if predictive not in PREDICTIVES:
        raise ValueError(f"predictive must be one of {', '.join(PREDICTIVES)}, got {predictive!r}")
    if predictive == "exact" and not likelihood.is_gaussian:
        raise ValueError(
            f"exact predictions need Gaussian noise, got {type(likelihood).__name__}; use 'linearized'"
        )
    if predictive == "probit" and not likelihood.logits:
        raise ValueError(
            f"probit predictions are for classes (Categorical, Bernoulli), not {type(likelihood).__name__}; "
            "use 'linearized'"
        )
    return predictive

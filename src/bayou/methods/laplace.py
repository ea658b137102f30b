"""Laplace: a Gaussian at the mode of the posterior, with the curvature of the log joint there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Literal, Self, final

from bayou.core.params import match
from bayou.curvature.information import CURVATURE_TYPES, CurvatureType
from bayou.curvature.joint import JointNormal
from bayou.curvature.structures import MAX_FULL_WEIGHTS
from bayou.curvature.sweep import Plan, make_plan
from bayou.inference.curvature_passes import CurvaturePasses
from bayou.inference.data_checks import LAST, check_first_batch, first_inputs, last_layer
from bayou.inference.method import BatchedMethod, FitArguments, Method
from bayou.inference.prior_scale import rescale_priors
from bayou.inference.start import starting_point
from bayou.methods.laplace_run import CURVATURES, LaplaceRun
from bayou.methods.point import MAP
from bayou.network import Network, evaluating
from bayou.network.target import Target
from bayou.posteriors.gaussian import (
    PREDICTIVES,
    GaussianPosterior,
    PredictiveKind,
    check_predictive,
)
from bayou.priors import BoundNormal
from bayou.training.data import Data, Rows, last_batches
from bayou.training.inputs import Batch
from bayou.training.ranks import current
from bayou.training.seeds import part_seed

Structure = Literal["full", "diagonal", "kronecker"]
MIN_HELD_OUT_ROWS = 10  # for the selection of the prior scale
MAX_HELD_OUT_ROWS = 1000  # if ``validation`` was not given
MAX_EXACT_OUTPUTS = 100  # each costs a backward pass
MIN_ROWS_WITH_START = 20  # held-out rows, if they are also withheld from the search for the mode


@final
@dataclass(frozen=True)
class Laplace(BatchedMethod[GaussianPosterior]):
    """The Laplace approximation: a Gaussian at a mode w* with the curvature of the log joint there.

        q(w) = N(w*, Λ⁻¹),    Λ = Σ_n J_nᵀ·H_n·J_n + prior precision

    J_n is the Jacobian of the outputs of row n in the weights and H_n the Hessian of −log p(y | f)
    in the outputs (Gauss-Newton). It needs a trained network and one pass over the data.
    ``posterior.log_evidence`` = log p(D | w*) + log p(w*) + D/2·log 2π − ½·log |Λ|, over the random
    tensors alone.

    Args:
        structure: the structure of Λ. "kronecker" (default): layer by layer A ⊗ G (Ritter et al.
            2018; diagonal for embeddings, and for layers with more than 16,384 inputs or outputs);
            "diagonal"; or "full" (a few thousand weights).
        where: patterns of the tensors that become random, "*" by default; "last" for those of the
            last layer. The others stay points.
        start: the method that finds w*, ``MAP()`` by default; None for the network as it is,
            assumed to be at a mode.
        curvature: H. "ggn": the Fisher information of p(y | f), exact, with one backward pass for
            each output; "fisher": the empirical one; "sampled": unbiased, with labels drawn from
            the network. Both have one backward pass for each label. None (default) is "sampled" for
            a Kronecker structure or more than 100 outputs, else "ggn".
        samples: labels drawn for each row where ``curvature`` is "sampled"; 1 by default.
        prior: how the prior precision is chosen. None (default) takes the target's Normal priors,
            tensor by tensor, and maximizes the evidence over those with ``learn=True`` (by unit
            too; of a Kronecker structure by input unit). "evidence" maximizes it over one factor
            for all prior precisions, and over the noise of a ``Gaussian(learn=True)``; w* does not
            follow. "validation": the factor of a grid that predicts a held-out fraction best, for
            classes the one with the highest evidence among those whose NLL is within one standard
            error of the lowest. None has this meaning, too, where no prior was given and either
            ``start`` is None or the network has more weights than data.
        predictive: "linearized" (default), "sampled", "probit" or "exact", see
            ``GaussianPosterior``.
        temperature: the posterior has Λ/temperature; 1 by default.
        validation: the held-out fraction for ``prior="validation"``, 0.1 by default.
        batch_size: rows in one pass, 128 by default.

    Returns:
        ``fit`` returns a ``GaussianPosterior``. Where it predicts worse than its own mode, there is
        a ``WorseThanModeWarning``, and its history has both NLLs.

    Raises:
        ValueError: for priors that are not Normal, a full structure of too many weights, or
            settings out of range.

    >>> import bayou, torch
    >>> x = torch.linspace(-1, 1, 20).unsqueeze(1)
    >>> method = bayou.Laplace("full", start=bayou.MAP(steps=10))
    >>> net, likelihood = torch.nn.Linear(1, 1), bayou.Gaussian(0.1)
    >>> posterior = bayou.fit(net, (x, 2 * x), method, likelihood=likelihood, progress=False)
    >>> posterior.log_evidence < 0
    True

    Papers: MacKay 1992, https://doi.org/10.1162/neco.1992.4.3.448; Daxberger et al. 2021,
    https://arxiv.org/abs/2106.14806.
    """

    structure: Structure = "kronecker"
    _: KW_ONLY
    where: str | tuple[str, ...] = "*"
    start: Method | None = MAP()  # noqa: RUF009 (frozen)
    curvature: CurvatureType | None = None
    samples: int = 1
    prior: Literal["evidence", "validation"] | None = None
    predictive: PredictiveKind = "linearized"
    temperature: float = 1.0
    validation: float = 0.1
    batch_size: int = 128

    def __post_init__(self) -> None:
        self._check_choice("structure", tuple(CURVATURES))
        self._check_choice("predictive", PREDICTIVES)
        self._check_whole("samples", "batch_size")
        self._check_positive("temperature")
        if self.curvature is not None:
            self._check_choice("curvature", CURVATURE_TYPES)
        if self.prior is not None:
            self._check_choice("prior", ("evidence", "validation"))
        patterns = self._patterns
        is_tuple = isinstance(patterns, tuple) and bool(patterns)
        if not is_tuple or not all(isinstance(pattern, str) for pattern in patterns):
            raise ValueError(
                f"Laplace where must be a pattern or a tuple of patterns, got {self.where!r}"
            )
        self._check_start()
        self._check_interval("(0, 1)", "validation")

    @property
    def selects_narrow_priors(self) -> bool:
        """Whether held-out rows select the prior scale."""
        return self.prior == "validation"

    @property
    def _patterns(self) -> tuple[str, ...]:
        """Return ``where`` as a tuple."""
        return (self.where,) if isinstance(self.where, str) else self.where

    def curvature_for(self, outputs: int) -> CurvatureType:
        """Return the type of the curvature for a network.

        Args:
            outputs: the number of outputs of the network.
        """
        is_costly = self.structure == "kronecker" or outputs > MAX_EXACT_OUTPUTS
        return self.curvature or ("sampled" if is_costly else "ggn")

    @property
    def without_density(self) -> str | None:
        """Return the name of this method if some weights are points."""
        return None if self.where == "*" else f"Laplace(where={self.where!r})"

    def at_mode(self, noise: float, data: Data) -> Self:
        """Return this method at the network as it is, with the prior of the target."""
        return replace(self, start=None, prior=None)

    def _fit(self, arguments: FitArguments) -> GaussianPosterior:
        """Return the Gaussian at the mode."""
        current().note_unshared("the curvature of Laplace")
        seed = arguments.seed
        progress = arguments.progress
        batches, held_out = self._split(arguments.target, arguments.data, seed)
        target = replace(arguments.target, n=batches.n)
        check_predictive(self.predictive, target.likelihood)
        plan, check_batch = self._plan(target, batches)
        learned_priors = target.learned_priors
        learned = [name for name in plan.wanted if name in learned_priors]
        # the evidence learns these priors, not the start
        target = rescale_priors(target, dict.fromkeys(learned, 1.0))
        point = starting_point(
            self.start,
            target,
            batches,
            seed=seed,
            checkpoint=arguments.checkpoint,
            progress=progress,
        )
        passes = CurvaturePasses(self, plan, batches, check_batch, seed, progress)
        return LaplaceRun(self, passes, point, learned).posterior(held_out)

    def _split(self, target: Target, data: Data, seed: int) -> tuple[Data, Data | None]:
        """Split off rows for the selection of the prior scale, if it needs them."""
        fraction = self.validation
        split_seed = part_seed(seed, "validation")
        if self.prior == "validation":
            if not isinstance(data, Rows):
                raise ValueError(
                    "a validation split needs tensors or a Dataset; "
                    "split a DataLoader's data yourself"
                )
            return data.split(fraction, split_seed)
        has_given_prior = target.prior_given or getattr(self.start, "l2", None) is not None
        weights = sum(value.numel() for value in target.start().values())
        is_uncertain = self.start is None or weights > data.n
        min_rows = MIN_ROWS_WITH_START if self.start else MIN_HELD_OUT_ROWS
        has_few_rows = data.n * fraction < min_rows
        if self.prior is not None or has_given_prior or not is_uncertain or has_few_rows:
            return data, None
        if isinstance(data, Rows):
            return data.split(min(fraction, MAX_HELD_OUT_ROWS / data.n), split_seed)
        return last_batches(data, fraction) if self.start is None else (data, None)

    def _plan(self, target: Target, data: Data) -> tuple[Plan, Callable[[Batch], None] | None]:
        """Plan the pass over the data, and check the network and its priors before any work."""
        network = Network(target.net)
        params = target.start()
        if not target.free:
            raise ValueError(
                "every parameter of the network is frozen (requires_grad=False): nothing to learn"
            )
        with evaluating(network.net):
            check_batch = check_first_batch(
                target, data, lambda *inputs: network.call(params, *inputs)
            )
            names = last_layer(target, data) if self.where == LAST else self._match(target)
            plan = make_plan(network.call, params, names, first_inputs(target, data))
        self._check_priors(target, plan)
        self._check_joint_priors(target, plan)
        self._check_learned_priors(target, plan)
        weights = sum(params[name].numel() for name in plan.wanted)
        if self.structure == "full" and weights > MAX_FULL_WEIGHTS:
            raise ValueError(
                f"a full covariance over {weights:,} weights has {weights**2:,} entries; "
                f"at most {MAX_FULL_WEIGHTS:,} weights: use "
                "structure='kronecker', or where='last' for the last layer"
            )
        return plan, check_batch

    def _match(self, target: Target) -> list[str]:
        """Return the names of the free tensors that match a pattern of ``where``."""
        rules = dict.fromkeys(self._patterns, True)
        is_random = match(target.free, rules, default=False)
        return [name for name, random in is_random.items() if random]

    def _check_priors(self, target: Target, plan: Plan) -> None:
        """Raise a ValueError for a random tensor without a Normal prior."""
        for name in plan.wanted:
            if not isinstance(target.priors[name], BoundNormal):
                family = type(target.priors[name]).__name__
                raise ValueError(
                    f"Laplace needs Normal priors, and the prior of {name!r} is a {family}: "
                    "its curvature is not constant and may be negative; "
                    "use prior=Normal(...), or VI"
                )

    def _check_joint_priors(self, target: Target, plan: Plan) -> None:
        """Raise a ValueError unless joint priors come from this Laplace on earlier tasks."""
        for coupling in target.couplings:
            density = coupling.density
            structure = type(density).__name__
            can_continue = False
            if isinstance(density, JointNormal):
                structure = density.covariance.kind
                has_base = all(name in density.base for name in coupling.parts)
                can_continue = self.structure in ("full", "kronecker") and has_base
            if structure != self.structure or not can_continue:
                raise ValueError(
                    f"Laplace({self.structure!r}) cannot continue from a joint prior of kind "
                    f"{structure!r}: use the "
                    "structure of the earlier tasks, 'full', 'kronecker' or 'diagonal', or VI"
                )
            if self.prior is not None:
                raise ValueError(
                    "the prior of earlier tasks has no scale to learn: use prior=None, "
                    f"got {self.prior!r}"
                )
            points = [name for name in coupling.parts if name not in plan.wanted]
            if points:
                raise ValueError(
                    f"where={self.where!r} excludes {points[0]!r}, which has a joint prior with "
                    "others; include it"
                )

    def _check_learned_priors(self, target: Target, plan: Plan) -> None:
        """Raise a ValueError for a prior scale that this structure cannot learn."""
        learned = target.learned_priors
        points = [name for name in learned if name not in plan.wanted]
        if points:
            raise ValueError(
                f"{points[0]!r} is a point here (where={self.where!r}), so the scale of its prior "
                "cannot be learned; give it learn=False"
            )
        by_output = [name for name in learned if "out" in getattr(target.priors[name], "axes", ())]
        if by_output and self.structure == "kronecker":
            raise ValueError(
                "a Kronecker-factored posterior has one prior scale for all of "
                f"{by_output[0]!r}, or one for each of "
                "its inputs, so it cannot learn one by output unit; use learn='in' or learn=True, "
                "or structure='diagonal' or 'full'"
            )

"""Distillation of a posterior into one plain network (Balan 2015, Bulò 2016)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

from bayou.core import rng
from bayou.core.constants import LOG_2PI
from bayou.core.progress import Show
from bayou.likelihoods import (
    BoundCategorical,
    Categorical,
    FiniteLikelihood,
    HeteroscedasticGaussian,
    Likelihood,
)
from bayou.likelihoods.mixtures import average
from bayou.methods.langevin import GradientSampler
from bayou.methods.mcmc import Sampler
from bayou.network import (
    Network,
    adapted,
    clear_errors,
    evaluating,
    forward_inputs,
    placed,
    rows_of,
)
from bayou.network.units import units_of, with_units
from bayou.posteriors import Empirical, Posterior
from bayou.predictive import Predictive
from bayou.target import PriorRules, Target
from bayou.training.data import as_data
from bayou.training.loop import Numbers, Problem, fit_module
from bayou.training.rows import joined, unlabeled
from bayou.training.seeds import as_int_seed, part_seed
from bayou.training.settings import Settings

Keep = Literal["epistemic"]
Loss = Callable[[Tensor, Tensor], Tensor]
DEFAULT_DRAWS = 100  # of a kept distribution
TEACHER_ROWS = 1024  # rows per evaluation of the teacher


def distill(
    posterior: Posterior | Sampler,
    student: nn.Module,
    data: Any,
    *,
    net: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    prior: PriorRules | None = None,
    rows: Any = None,
    keep: Keep | None = None,
    samples: int | None = None,
    steps: int | None = None,
    lr: float = 1e-3,
    batch_size: int = 128,
    seed: int = 0,
    progress: Show = True,
) -> Empirical | Distilled:
    """Distill a posterior into one network for a single pass: min E_x E_{y ~ teacher}[−log
    p_student(y | x)].

    Classes: −Σ_c p_teacher(c | x)·log p_student(c | x), logits as the teacher's. Numbers: the
    student gives means m and log-variances s of y, (B, 2·D), and ½·(s + (v + (m − μ)²)·e^−s) is
    least at the mean μ and the variance v of the teacher. The result is a posterior of one point,
    which predicts, saves and exports.

    ``keep="epistemic"``: also the distribution of the draws, as ``Distilled``. Classes: α = exp(f)
    of a Dirichlet with the mean of the draws' probabilities and, summed over classes, their
    variance. Numbers: (B, 3·D), mean, log Var_s E[y | f_s] and log E_s Var[y | f_s].

    ``data``: rows (x, y), a Dataset, a DataLoader, or only x; y is not used, so that unlabeled rows
    are sufficient. The teacher is evaluated once for each row, with ``samples`` draws. The network
    ``student`` itself is not changed.

    **Online**, ``distill(SGLD(...), student, (x, y))``: a chain runs on the posterior of ``net``
    (by default the student's own network), ``likelihood`` and ``prior``. The student takes one step
    for each draw, which is not stored. All losses are linear in the statistics of a draw, so the
    expected gradient is that of distillation from all draws.
    ``rows``: the x of these steps, by default that of the data. ``steps``: the number of draws, by
    default all after the burn-in.

    Args:
        lr: the learning rate of Adam.
        batch_size: rows in a step.
        seed: of draws and batches.
        progress: whether to show progress, or a function that is called with it.
    """
    if keep not in (None, "epistemic"):
        raise ValueError(f"keep must be None or 'epistemic', got {keep!r}")
    seed = as_int_seed(seed)
    settings = Settings(steps=steps, lr=lr, batch_size=batch_size)
    chain: Iterator[Empirical] | None = None
    if isinstance(posterior, Sampler):
        if samples is not None:
            raise ValueError(
                "online distillation takes one step for each draw: samples= is for a posterior"
            )
        target = Target.build(
            student if net is None else net, likelihood or Categorical(), prior, as_data(data).n
        )
        method, settings = _one_step_a_draw(posterior, data, settings)
        chain = method.stream(target, data, seed=part_seed(seed, "teacher"), progress=progress)
        queries = unlabeled(data if rows is None else rows, batch_size)
        x, _ = next(iter(queries.ordered()))
        posterior = next(chain)
    elif not isinstance(posterior, Posterior):
        raise ValueError(
            f"distill needs a posterior, or a chain to run such as SGLD(), got {posterior!r}"
        )
    elif any(given is not None for given in (net, likelihood, prior, rows)):
        raise ValueError("net, likelihood, prior and rows are for a chain; a posterior has its own")
    else:
        x, targets = _teach(posterior, data, keep, samples, seed)
        queries = as_data((x, targets), batch_size)
    loss, spec, shape = _compared(posterior, x, keep)
    units = units_of(posterior.target.net)
    if (
        units is not None and units.is_active
    ):  # the student learns in standard units, as its teacher did
        student = with_units(student, units.for_student(log_variances=2 if keep else 1))
    small = copy.deepcopy(student)
    _check_student(small, x, shape)
    problem = _Student(small, loss, queries.n)
    if chain is not None:
        problem = _Follower(small, loss, queries.n, posterior, chain, keep)
    state = fit_module(problem, queries, settings, seed=seed, progress=progress)
    learned = ((name, value) for name, value in small.named_parameters() if value.requires_grad)
    stack = {name: value.detach().unsqueeze(0).clone() for name, value in learned}
    point = Empirical(
        Target.build(student, spec, None, queries.n), Network(small), stack, state.history
    )
    point.stopped = state.stopped
    return Distilled(point) if keep else point


def _one_step_a_draw(method: Sampler, data: Any, settings: Settings) -> tuple[Sampler, Settings]:
    """A chain with as many draws as steps, if it can, and settings with as many steps as draws."""
    steps, kept = method._plan(as_data(data, method.batch_size))
    if isinstance(method, GradientSampler):  # every step of the chain is a draw
        draws = (
            len(method._draw_density(steps).nonzero()[0])
            if settings.steps is None
            else settings.steps
        )
        method = replace(method, draws=draws)
        steps, kept = method._plan(as_data(data, method.batch_size))
    return method, replace(settings, steps=min(settings.steps or len(kept), len(kept)))


@final
class Distilled:
    """A plain network with a distribution over predictions: p(c | x) ~ Dirichlet(exp f), or a mean
    ~ N(m, e^s).

    ``point`` holds the network, as a posterior of one point: ``found.point.save(path)``, and
    ``Distilled(bayou.load(path, student))`` again. ``found.point.to_module()`` is the network
    itself.
    """

    def __init__(self, point: Empirical) -> None:
        self.point = point

    @torch.no_grad()
    def outputs(self, x: Any) -> Tensor:
        """The outputs of the network, in one pass: (B, *out)."""
        return self.point.outputs(self.point.stack, self.point.place(x))[0]

    def concentration(self, x: Any) -> Tensor:
        """α of the Dirichlet, the classes last: (B, *event, C); a larger sum means less epistemic
        uncertainty.
        """
        likelihood = self.point.target.likelihood
        if not isinstance(likelihood, BoundCategorical):
            raise ValueError(
                "concentration is for classes; for numbers use predict(x).epistemic_std"
            )
        return self.outputs(x).movedim(likelihood.class_axis, -1).exp()

    @torch.no_grad()
    def predict(self, x: Any, samples: int = DEFAULT_DRAWS, *, seed: rng.Seed = 0) -> Predictive:
        """Outputs for ``samples`` draws of the kept distribution, (samples, B, *out): one pass
        through the network.

        Rows are drawn independently: correlations of a posterior's functions between rows are not
        kept.
        """
        likelihood, f = copy.deepcopy(self.point.target.likelihood), self.outputs(x)
        if isinstance(likelihood, BoundCategorical):
            alpha = f.movedim(likelihood.class_axis, -1).exp()
            with rng.isolated(rng.integer(seed), f.device):
                p = torch.distributions.Dirichlet(alpha).sample((samples,))
            log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
            return Predictive(likelihood, log_p.movedim(-1, likelihood.class_axis))
        mean, between, within = f.chunk(3, -1)
        drawn = mean + (0.5 * between).exp() * rng.normal(samples, mean.shape, mean, seed)
        return Predictive(likelihood, torch.cat((drawn, within.expand_as(drawn)), -1))

    def __repr__(self) -> str:
        return f"Distilled({self.point!r})"


def soft_cross_entropy(likelihood: FiniteLikelihood) -> Loss:
    """−Σ_c p(c)·log p_student(c) of targets (B, *event, C)."""
    return lambda f, p: -(p * likelihood.log_pmf(f)).flatten(1).sum(1)


def dirichlet_loss(likelihood: BoundCategorical) -> Loss:
    """Mean and concentration of a Dirichlet apart: −Σ_c p̄_c·log m_c − r·log v − (1 − r)·log(1 −
    v).

    α = exp f, m = softmax f, α₀ = Σ_c α_c; v = 1/(1 + α₀) is the share of 1 − Σ_c m_c² that a
    Dirichlet varies by, and r = E_s Σ_c (p_sc − m_c)²/(1 − Σ_c m_c²) that of the draws. It is least
    at the teacher's mean, m = p̄, and at its variance, v = r. (The maximum-likelihood α has
    neither: it is dominated by small probabilities.) The gradient of α₀ is along (1 .. 1), which
    leaves m unchanged. Targets (p̄, E_s Σ_c p_sc²), (B, *event, C + 1).
    """

    def loss(f: Tensor, targets: Tensor) -> Tensor:
        f = f.movedim(likelihood.class_axis, -1)
        mean, log_m = targets[..., :-1], f.log_softmax(-1)
        m, tiny = log_m.detach().exp(), torch.finfo(f.dtype).eps
        rest = (1 - m.square().sum(-1)).clamp_min(tiny)
        share = (targets[..., -1] - 2 * (m * mean).sum(-1) + m.square().sum(-1)).clamp_min(
            0.0
        ) / rest
        shift = f.mean(-1)  # 0 in value below
        log_total = f.detach().logsumexp(-1) + shift - shift.detach()
        varied = (
            softplus(log_total) - (1 - share.clamp_max(1.0)) * log_total
        )  # −r·log v − (1 − r)·log(1 − v)
        each = varied - (mean * log_m).sum(-1)
        return each.flatten(1).sum(1) if each.ndim > 1 else each

    return loss


def gaussian_nll(f: Tensor, moments: Tensor) -> Tensor:
    """E[−log N(y; m, e^s)] for y of mean μ and variance v: ½·(log 2π + s + (v + (m − μ)²)·e^−s),
    targets (μ, v).
    """
    (m, s), (mean, variance) = f.chunk(2, -1), moments.chunk(2, -1)
    return 0.5 * (LOG_2PI + s + (variance + (m - mean).square()) * torch.exp(-s)).flatten(1).sum(1)


def two_variances_nll(f: Tensor, moments: Tensor) -> Tensor:
    """The means of the draws under N(m, e^s), and their noise under N(0, e^t); targets (μ, Var_s,
    E_s Var).
    """
    (m, s, t), (mean, between, within) = f.chunk(3, -1), moments.chunk(3, -1)
    noise = torch.cat((torch.zeros_like(m), t), -1)
    return gaussian_nll(torch.cat((m, s), -1), torch.cat((mean, between), -1)) + gaussian_nll(
        noise, torch.cat((torch.zeros_like(m), within), -1)
    )


def _teach(
    posterior: Posterior, data: Any, keep: Keep | None, samples: int | None, seed: int
) -> tuple[Any, Tensor]:
    """The rows, and the teacher's targets for them."""
    parts = []
    for x, _ in unlabeled(data, TEACHER_ROWS).ordered():
        p = posterior.predict(x, samples, seed=part_seed(seed, "teacher"))
        if keep and len(p.outputs) == 1:
            raise ValueError(
                "the teacher has one function, without epistemic uncertainty to keep; use keep=None"
            )
        parts.append((x, _statistics(p, keep)))
    x, targets = joined(parts)
    return x, targets.to(forward_inputs(x)[0].device)


def _compared(
    posterior: Posterior, x: Any, keep: Keep | None
) -> tuple[Loss, Likelihood, torch.Size]:
    """The loss that compares a student with this teacher, its likelihood, and the shape of its
    output.
    """
    p = posterior.predict(rows_of(forward_inputs(x), slice(2)), seed=0)
    likelihood = p.likelihood
    if isinstance(likelihood, FiniteLikelihood):
        loss = soft_cross_entropy(likelihood)
        if keep and isinstance(likelihood, BoundCategorical):
            loss = dirichlet_loss(likelihood)
        return loss, posterior.target.likelihood_spec, p.outputs.shape[2:]
    shape = _statistics(p, keep).shape[1:]
    return two_variances_nll if keep else gaussian_nll, HeteroscedasticGaussian(), shape


def _statistics(p: Predictive, keep: Keep | None) -> Tensor:
    """The targets of the student's loss for a prediction: (B, *event, numbers)."""
    likelihood, f = p.likelihood, p.outputs
    if isinstance(likelihood, FiniteLikelihood) and likelihood.support == "classes":
        if not keep:
            return p.probabilities
        if not isinstance(likelihood, BoundCategorical):
            raise ValueError(
                f"a Dirichlet needs Categorical(), got {type(likelihood).__name__}; use two classes"
            )
        square = average(lambda f: likelihood.log_pmf(f).exp().square().sum(-1, keepdim=True), f)
        return torch.cat((p.probabilities, square), -1)
    if likelihood.support != "real":
        raise ValueError(
            f"distill supports classes and real numbers, got the likelihood {type(likelihood).__name__}"
        )
    mean = p.mean
    if mean.ndim < 2:
        raise ValueError(
            f"a student of numbers has its mean and variance on a last axis, but y is {tuple(mean.shape)}"
        )
    parts = (
        (mean, p.epistemic_std.square(), p.aleatoric_std.square())
        if keep
        else (mean, p.std.square())
    )
    if not bool(torch.stack([part.isfinite().all() for part in parts]).all()):
        raise ValueError(
            f"the variance of {type(likelihood).__name__} is infinite: no Gaussian student can match it"
        )
    return torch.cat(parts, -1)


@torch.no_grad()
def _check_student(net: nn.Module, x: Any, expected: torch.Size) -> None:
    """A ValueError unless the student accepts these rows and gives outputs of the shape that its
    loss needs.
    """
    like = next(net.parameters())
    some = rows_of(placed(x, like), slice(2))
    with evaluating(net), clear_errors(some):
        got = net(*some)
    if not isinstance(got, Tensor) or got.shape != (len(some[0]), *expected):
        shape = tuple(got.shape) if isinstance(got, Tensor) else type(got).__name__
        raise ValueError(
            f"the student gives {shape} for {len(some[0])} rows, but this teacher needs (B, *{tuple(expected)}): "
            "logits as its own for classes, (mean, log-variance) of numbers, with keep='epistemic' two log-variances"
        )


class _Student(Problem):
    """The student in training."""

    title = "distill"

    def __init__(self, net: nn.Module, loss: Loss, n: int) -> None:
        super().__init__()
        self.net, self.compare, self.n = adapted(net), loss, n

    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, Numbers]:
        value = self.compare(self.net(*forward_inputs(x)), y).mean()
        return value, {"loss": value.detach()}

    def objective(self, numbers: Numbers) -> Tensor:
        return -self.n * numbers["loss"]


class _Follower(_Student):
    """A student trained at each step on the current draw of the chain."""

    def __init__(
        self,
        net: nn.Module,
        loss: Loss,
        n: int,
        teacher: Posterior,
        chain: Iterator[Empirical],
        keep: Keep | None,
    ) -> None:
        super().__init__(net, loss, n)
        self.teacher, self.chain, self.keep = teacher, chain, keep

    def before_step(self, step: int, steps: int) -> None:
        self.teacher = next(self.chain) if step else self.teacher

    def loss(self, x: Any, y: Tensor) -> tuple[Tensor, Numbers]:
        return super().loss(x, _statistics(self.teacher.predict(x, seed=None), self.keep))

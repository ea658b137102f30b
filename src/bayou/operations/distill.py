"""Distillation of a posterior into one plain network (Balan 2015, Bulò 2016)."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, final

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
from bayou.likelihoods.predictive import Predictive
from bayou.methods.langevin import GradientSampler
from bayou.methods.mcmc import Sampler
from bayou.network import (
    Network,
    adapt,
    clear_errors,
    evaluating,
    forward_inputs,
    place_inputs,
    rows_of,
)
from bayou.network.target import PriorRules, Target
from bayou.network.units import Units, units_of, with_units
from bayou.operations.augment import Augment
from bayou.operations.stored import TEACHER_ROWS, StoredPredictions
from bayou.posteriors import Empirical, Posterior
from bayou.training.data import Data, as_data, join_batches
from bayou.training.loop import fit_module
from bayou.training.problem import Numbers, Problem
from bayou.training.rows import as_unlabeled_data
from bayou.training.seeds import as_int_seed, part_seed
from bayou.training.settings import Schedule, Settings

Keep = Literal["epistemic"]
Loss = Callable[[Tensor, Tensor], Tensor]
DEFAULT_DRAWS = 100  # of a kept distribution
ONE_FUNCTION = "the teacher has one function, without epistemic uncertainty to keep; use keep=None"


def distill(
    posterior: Posterior | Sampler | StoredPredictions,
    student: nn.Module,
    data: object,
    *,
    net: nn.Module | None = None,
    likelihood: Likelihood | None = None,
    prior: PriorRules | None = None,
    rows: object = None,
    keep: Keep | None = None,
    augment: Augment | None = None,
    samples: int | None = None,
    steps: int | None = None,
    lr: float = 1e-3,
    batch_size: int = 128,
    schedule: Schedule = "tail",
    compile: bool = False,
    autocast: bool = False,
    seed: int = 0,
    progress: Show = True,
) -> Empirical | Distilled:
    """Distill a posterior into one network that predicts in a single pass.

    The student minimizes E_x E_{y ~ teacher}[−log p_student(y | x)]. Classes: its outputs are
    logits as the teacher's, and the loss is −Σ_c p_teacher(c | x)·log p_student(c | x). Numbers: it
    gives means m and log-variances s of y, (B, 2·D), and ½·(s + (v + (m − μ)²)·e^−s) is least at
    the mean μ and the variance v of the teacher.

    ``keep="epistemic"``: the student also gives the distribution of the draws. Classes: α = exp(f)
    of a Dirichlet with the mean of the draws' probabilities and, summed over classes, their
    variance. Numbers: (B, 3·D), mean, log Var_s E[y | f_s] and log E_s Var[y | f_s].

    **Stored predictions**, ``distill(StoredPredictions(...), student, x)``: the teacher is not
    there any more, but what it predicted for the rows of x. They may be those of several fits,
    whose mixture is the teacher.

    **Online**, ``distill(SGLD(...), student, (x, y))``: a chain runs on the posterior of ``net``,
    ``likelihood`` and ``prior``. The student takes one step for each draw, which is not stored. All
    losses are linear in the statistics of a draw, so the expected gradient is that of distillation
    from all draws.

    Args:
        posterior: the teacher: a posterior such as an ensemble or a ``Mixture``, stored predictions
            for the rows of ``data``, or a chain to run, such as ``SGLD()``.
        student: the network to train. The network itself is not changed.
        data: rows (x, y), a Dataset, a DataLoader, or only x. Of a posterior y is not used, so that
            unlabeled rows are sufficient; a chain is fitted to them. With stored predictions only
            x, in their order.
        net: of a chain, its network; by default that of the student.
        likelihood: of a chain, p(y | f); by default ``Categorical()``.
        prior: of a chain, as ``bayou.fit`` takes it.
        rows: of a chain, the x of the student's steps; by default those of the data.
        keep: "epistemic" to keep the distribution of the draws; by default only their predictive.
        augment: further rows, made from x, that a posterior is evaluated at; by default none. It
            usually brings the student closer to its teacher on new rows.
        samples: draws of a posterior, which is evaluated once for each row; None: as many as
            ``predict`` takes.
        steps: of the student. For a chain it is the number of draws, by default all after the
            burn-in.
        lr: the learning rate of Adam.
        batch_size: rows in a step.
        schedule: of the learning rate, as of ``MAP``: "constant", "linear", "cosine", "tail".
        compile: whether to compile the step of the student, on a GPU as one CUDA graph.
        autocast: whether to compute products in bfloat16.
        seed: of draws, batches and augmented rows.
        progress: whether to show progress, or a function that is called with it.

    Returns:
        A posterior of one point, which predicts, saves and exports; with ``keep`` a ``Distilled``.

    Raises:
        ValueError: if the student's outputs do not have the shape that its loss needs, the
            likelihood is neither of classes nor of real numbers, a posterior is combined with the
            arguments of a chain, or stored predictions are not those of as many rows as x has.

    Example:
        >>> student = torch.nn.Sequential(torch.nn.Linear(2, 20), torch.nn.SiLU(),
        ...                               torch.nn.Linear(20, 3))
        >>> point = bayou.distill(posterior, student, x)
        >>> point.predict(x_new).mean

    References:
        Balan, Rathod, Murphy, Welling: Bayesian dark knowledge, NeurIPS 2015. Bulò, Porzi,
        Kontschieder: Dropout distillation, ICML 2016.
    """
    if keep not in (None, "epistemic"):
        raise ValueError(f"keep must be None or 'epistemic', got {keep!r}")
    seed = as_int_seed(seed)
    settings = Settings(
        steps=steps,
        lr=lr,
        batch_size=batch_size,
        schedule=schedule,
        compile=compile,
        autocast=autocast,
    )
    if augment is not None and not isinstance(posterior, Posterior):
        raise ValueError(
            "augment evaluates a posterior at further rows; for stored predictions, store those at "
            "augment.inputs(x), and for a chain pass rows=augment.inputs(x)"
        )
    if isinstance(posterior, Sampler):
        if samples is not None:
            raise ValueError(
                "online distillation takes one step for each draw: samples= is for a posterior"
            )
        chain_net = student if net is None else net
        target = Target.build(chain_net, likelihood or Categorical(), prior, as_data(data).n)
        queries = data if rows is None else rows
        lesson = _online_lesson(posterior, target, data, queries, keep, settings, seed, progress)
    elif not isinstance(posterior, Posterior | StoredPredictions):
        raise ValueError(
            "distill needs a posterior, stored predictions, or a chain to run such as SGLD(), got "
            f"{posterior!r}"
        )
    elif any(argument is not None for argument in (net, likelihood, prior, rows)):
        raise ValueError("net, likelihood, prior and rows are for a chain; a posterior has its own")
    elif isinstance(posterior, StoredPredictions):
        if samples is not None:
            raise ValueError("samples= is for a posterior; stored predictions are means of draws")
        lesson = _stored_lesson(posterior, data, keep, settings)
    else:
        lesson = _offline_lesson(posterior, data, keep, augment, samples, settings, seed)
    point = _train_student(student, lesson, keep, seed, progress)
    return Distilled(point) if keep else point


@dataclass
class _Goal:
    """What a student is trained to give.

    Args:
        loss: of its outputs and the statistics of the teacher.
        likelihood: of the student as a posterior.
        output_shape: of its outputs for one row.
        units: in which the teacher was fitted; None if it has none.
    """

    loss: Loss
    likelihood: Likelihood
    output_shape: torch.Size
    units: Units | None = None


@dataclass
class _Lesson:
    """What a student learns from.

    Args:
        goal: what the student is trained to give.
        queries: the rows of its steps, with the statistics of the teacher as y if it is not a
            chain.
        example_x: some inputs of these rows.
        settings: of the training.
        draws: the draws of the chain, if the teacher is one.
    """

    goal: _Goal
    queries: Data
    example_x: object
    settings: Settings
    draws: Iterator[Empirical] | None = None


def _online_lesson(
    method: Sampler,
    target: Target,
    data: object,
    queries: object,
    keep: Keep | None,
    settings: Settings,
    seed: int,
    progress: Show,
) -> _Lesson:
    """Start a chain whose draws are the teachers of one step each."""
    method, settings = _match_draws_to_steps(method, data, settings)
    chain = method.stream(target, data, seed=part_seed(seed, "teacher"), progress=progress)
    batches = as_unlabeled_data(queries, settings.batch_size)
    x, _ = next(iter(batches.epoch()))
    first = next(chain)
    goal = _posterior_goal(first, x, keep)
    return _Lesson(goal, batches, x, settings, itertools.chain([first], chain))


def _offline_lesson(
    posterior: Posterior,
    data: object,
    keep: Keep | None,
    augment: Augment | None,
    samples: int | None,
    settings: Settings,
    seed: int,
) -> _Lesson:
    """Evaluate the teacher once for each row."""
    rows = as_unlabeled_data(data, TEACHER_ROWS)
    if augment is not None:
        x, _ = join_batches(rows.epoch())
        more_x = augment.inputs(x, part_seed(seed, "augment"))
        rows = as_unlabeled_data(more_x, TEACHER_ROWS)
    batches = []
    for x, _ in rows.epoch():
        p = posterior.predict(x, samples, seed=part_seed(seed, "teacher"))
        if keep and len(p.outputs) == 1:
            raise ValueError(ONE_FUNCTION)
        batches.append((x, _teacher_statistics(p, keep)))
    x, statistics = join_batches(batches)
    statistics = statistics.to(forward_inputs(x)[0].device)
    goal = _posterior_goal(posterior, x, keep)
    return _Lesson(goal, as_data((x, statistics), settings.batch_size), x, settings)


def _stored_lesson(
    stored: StoredPredictions, data: object, keep: Keep | None, settings: Settings
) -> _Lesson:
    """Take the statistics of the teacher from its predictions."""
    x, _ = join_batches(as_unlabeled_data(data, TEACHER_ROWS).epoch())
    first = forward_inputs(x)[0]
    if len(first) != stored.rows:
        raise ValueError(
            f"there are stored predictions of {stored.rows:,} rows, but x has {len(first):,}; they "
            "belong to the same rows in the same order"
        )
    statistics = stored.probabilities
    if keep:
        if stored.is_one_function:
            raise ValueError(ONE_FUNCTION)
        statistics = torch.cat((statistics, stored.square_sum.unsqueeze(-1)), -1)
    likelihood = Categorical()
    bound = likelihood.bind()
    loss = dirichlet_loss(bound) if keep else soft_cross_entropy(bound)
    goal = _Goal(loss, likelihood, stored.probabilities.shape[1:])
    statistics = statistics.to(first)
    return _Lesson(goal, as_data((x, statistics), settings.batch_size), x, settings)


def _train_student(
    student: nn.Module, lesson: _Lesson, keep: Keep | None, seed: int, progress: Show
) -> Empirical:
    """Train a copy of the student, and return it as a posterior of one point."""
    goal = lesson.goal
    if goal.units is not None and goal.units.is_active:
        # The student learns in standard units, as its teacher did.
        student = with_units(student, goal.units.for_student(log_variances=2 if keep else 1))
    trained = copy.deepcopy(student)
    _check_student(trained, lesson.example_x, goal.output_shape)
    n = lesson.queries.n
    problem = _Student(trained, goal.loss, n)
    if lesson.draws is not None:
        problem = _ChainStudent(trained, goal.loss, n, lesson.draws, keep)
    state = fit_module(problem, lesson.queries, lesson.settings, seed=seed, progress=progress)
    stack = {
        name: value.detach().unsqueeze(0).clone()
        for name, value in trained.named_parameters()
        if value.requires_grad
    }
    target = Target.build(student, goal.likelihood, None, n)
    point = Empirical(target, Network(trained), stack, state.history)
    point.stopped = state.stopped
    return point


def _match_draws_to_steps(
    method: Sampler, data: object, settings: Settings
) -> tuple[Sampler, Settings]:
    """Return a chain with as many draws as steps, if it can, and settings with as many steps."""
    rows = as_data(data, method.batch_size)
    steps, draw_steps = method._plan(rows)
    if isinstance(method, GradientSampler):  # every step of the chain is a draw
        draws = settings.steps
        if draws is None:
            draws = len(method.draw_density(steps).nonzero()[0])
        method = replace(method, draws=draws)
        _, draw_steps = method._plan(rows)
    draws = len(draw_steps)
    return method, replace(settings, steps=min(settings.steps or draws, draws))


@final
class Distilled:
    """A plain network with a distribution over predictions: a Dirichlet, or a normal of the mean.

    p(c | x) ~ Dirichlet(exp f(x)) for classes, E[y | x] ~ N(m, e^s) for numbers.

    Args:
        point: the network as a posterior of one point. Save ``distilled.point.save(path)`` and load
            ``Distilled(bayou.load(path, student))``; ``distilled.point.to_module()`` is the network
            itself.
    """

    def __init__(self, point: Empirical) -> None:
        self.point = point

    @torch.no_grad()
    def outputs(self, x: object) -> Tensor:
        """Return the outputs of the network, (B, *out), in one pass.

        Args:
            x: its inputs (B, ...).
        """
        return self.point.outputs(self.point.stack, self.point.place(x))[0]

    def concentration(self, x: object) -> Tensor:
        """Return α of the Dirichlet: a larger sum means less epistemic uncertainty.

        Args:
            x: inputs (B, ...).

        Returns:
            α with the classes last, (B, *event, C).

        Raises:
            ValueError: if y are numbers.
        """
        likelihood = self.point.target.likelihood
        if not isinstance(likelihood, BoundCategorical):
            raise ValueError(
                "concentration is for classes; for numbers use predict(x).epistemic_std"
            )
        return self.outputs(x).movedim(likelihood.class_axis, -1).exp()

    @property
    def is_dirichlet(self) -> bool:
        """Whether the kept distribution is one over class probabilities."""
        return isinstance(self.point.target.likelihood, BoundCategorical)

    def probabilities(self, x: object) -> Tensor:
        """Return the mean of the Dirichlet, α_c/Σα, without draws.

        Args:
            x: inputs (B, ...).

        Returns:
            Class probabilities with the classes last, (B, *event, C).

        Raises:
            ValueError: if y are numbers.
        """
        return self.concentration(x).log().softmax(-1)

    def mutual_information(self, x: object) -> Tensor:
        """Return the mutual information of class and probabilities in nats, without draws.

        H[m] + Σ_c m_c·(ψ(α_c + 1) − ψ(α₀ + 1)) with m = α/α₀ and α₀ = Σ_c α_c.

        Args:
            x: inputs (B, ...).

        Returns:
            Nats of each row, summed over the coordinates of y, (B,).

        Raises:
            ValueError: if y are numbers.
        """
        alpha = self.concentration(x).double()
        total = alpha.sum(-1, keepdim=True)
        mean = alpha / total
        expected_log = torch.digamma(alpha + 1) - torch.digamma(total + 1)
        information = torch.special.entr(mean).sum(-1) + (mean * expected_log).sum(-1)
        return information.clamp_min(0.0).reshape(len(alpha), -1).sum(1)

    @torch.no_grad()
    def predict(self, x: object, samples: int = DEFAULT_DRAWS, *, seed: rng.Seed = 0) -> Predictive:
        """Predict y by draws of the kept distribution, with one pass through the network.

        Rows are drawn independently: correlations of a posterior's functions between rows are not
        kept.

        Args:
            x: inputs (B, ...).
            samples: how many outputs to draw, 100 by default.
            seed: of the draws.

        Returns:
            The predictive, with outputs (samples, B, *out).
        """
        likelihood = copy.deepcopy(self.point.target.likelihood)
        f = self.outputs(x)
        if isinstance(likelihood, BoundCategorical):
            alpha = f.movedim(likelihood.class_axis, -1).exp()
            with rng.isolated(rng.integer(seed), f.device):
                p = torch.distributions.Dirichlet(alpha).sample((samples,))
            log_p = p.clamp_min(torch.finfo(p.dtype).tiny).log()
            return Predictive(likelihood, log_p.movedim(-1, likelihood.class_axis))
        mean, log_between, log_within = f.chunk(3, -1)
        noise = rng.normal(samples, mean.shape, mean, seed)
        means = mean + (0.5 * log_between).exp() * noise
        return Predictive(likelihood, torch.cat((means, log_within.expand_as(means)), -1))

    def __repr__(self) -> str:
        """Return the type with its network."""
        return f"Distilled({self.point!r})"


def soft_cross_entropy(likelihood: FiniteLikelihood) -> Loss:
    """Return the loss −Σ_c p(c)·log p_student(c) of outputs f and targets p (B, *event, C).

    Args:
        likelihood: gives log p_student of f.
    """
    return lambda f, p: -(p * likelihood.log_pmf(f)).flatten(1).sum(1)


def dirichlet_loss(likelihood: BoundCategorical) -> Loss:
    """Return a loss that fits mean and concentration of a Dirichlet separately.

    −Σ_c p̄_c·log m_c − r·log v − (1 − r)·log(1 − v) with α = exp f, m = softmax f and α₀ = Σ_c α_c;
    v = 1/(1 + α₀) is the fraction of 1 − Σ_c m_c² that a Dirichlet varies by, and
    r = E_s Σ_c (p_sc − m_c)²/(1 − Σ_c m_c²) that of the draws. It is least at the teacher's mean,
    m = p̄, and at its variance, v = r. (The maximum-likelihood α has neither: it is dominated by
    small probabilities.) The gradient of α₀ is along (1 .. 1), which leaves m unchanged.

    Args:
        likelihood: has the axis of the classes. Targets of the loss are (p̄, E_s Σ_c p_sc²),
            (B, *event, C + 1).
    """

    def loss(f: Tensor, targets: Tensor) -> Tensor:
        f = f.movedim(likelihood.class_axis, -1)
        mean = targets[..., :-1]
        log_m = f.log_softmax(-1)
        m = log_m.detach().exp()
        m_square = m.square().sum(-1)
        largest_variance = (1 - m_square).clamp_min(torch.finfo(f.dtype).eps)
        variance = targets[..., -1] - 2 * (m * mean).sum(-1) + m_square
        fraction = variance.clamp_min(0.0) / largest_variance
        shift = f.mean(-1)  # 0 in value below
        log_total = f.detach().logsumexp(-1) + shift - shift.detach()
        # −r·log v − (1 − r)·log(1 − v)
        concentration_loss = softplus(log_total) - (1 - fraction.clamp_max(1.0)) * log_total
        losses = concentration_loss - (mean * log_m).sum(-1)
        return losses.flatten(1).sum(1) if losses.ndim > 1 else losses

    return loss


def gaussian_nll(f: Tensor, moments: Tensor) -> Tensor:
    """Compute E[−log N(y; m, e^s)] for y of mean μ and variance v.

    ½·(log 2π + s + (v + (m − μ)²)·e^−s), summed over the coordinates of y: (B,).

    Args:
        f: m and s, (B, 2·D).
        moments: μ and v, (B, 2·D).
    """
    m, s = f.chunk(2, -1)
    mean, variance = moments.chunk(2, -1)
    return 0.5 * (LOG_2PI + s + (variance + (m - mean).square()) * torch.exp(-s)).flatten(1).sum(1)


def two_variances_nll(f: Tensor, moments: Tensor) -> Tensor:
    """Compute the NLL of the draws' means under N(m, e^s) and of their noise under N(0, e^t).

    Args:
        f: m, s and t, (B, 3·D).
        moments: μ, Var_s E[y | f_s] and E_s Var[y | f_s], (B, 3·D).
    """
    m, s, t = f.chunk(3, -1)
    mean, between, within = moments.chunk(3, -1)
    zeros = torch.zeros_like(m)
    nll_of_means = gaussian_nll(torch.cat((m, s), -1), torch.cat((mean, between), -1))
    nll_of_noise = gaussian_nll(torch.cat((zeros, t), -1), torch.cat((zeros, within), -1))
    return nll_of_means + nll_of_noise


def _posterior_goal(teacher: Posterior, x: object, keep: Keep | None) -> _Goal:
    """Return what a student of a posterior is trained to give."""
    p = teacher.predict(rows_of(forward_inputs(x), slice(2)), seed=0)
    likelihood = p.likelihood
    units = units_of(teacher.target.net)
    if isinstance(likelihood, FiniteLikelihood):
        loss = soft_cross_entropy(likelihood)
        if keep and isinstance(likelihood, BoundCategorical):
            loss = dirichlet_loss(likelihood)
        return _Goal(loss, teacher.target.likelihood_spec, p.outputs.shape[2:], units)
    shape = _teacher_statistics(p, keep).shape[1:]
    return _Goal(
        two_variances_nll if keep else gaussian_nll, HeteroscedasticGaussian(), shape, units
    )


def _teacher_statistics(p: Predictive, keep: Keep | None) -> Tensor:
    """Return the targets of the student's loss for a prediction: (B, *event, numbers)."""
    likelihood = p.likelihood
    name = type(likelihood).__name__
    is_plain = likelihood.is_linear_in_y and not likelihood.is_ordered
    if is_plain and isinstance(likelihood, FiniteLikelihood) and likelihood.support == "classes":
        return _class_statistics(p, likelihood, keep)
    if likelihood.support != "real" or not is_plain:
        raise ValueError(f"distill supports classes and real numbers, got the likelihood {name}")
    mean = p.mean
    if mean.ndim < 2:
        raise ValueError(
            "a student of numbers has its mean and variance on a last axis, but y is "
            f"{tuple(mean.shape)}"
        )
    stds = (p.epistemic_std, p.aleatoric_std) if keep else (p.std,)
    moments = [mean, *(std.square() for std in stds)]
    if not all(bool(moment.isfinite().all()) for moment in moments):
        raise ValueError(f"the variance of {name} is infinite: no Gaussian student can match it")
    return torch.cat(moments, -1)


def _class_statistics(p: Predictive, likelihood: FiniteLikelihood, keep: Keep | None) -> Tensor:
    """Return the mean probabilities, and with ``keep`` also the mean of their sum of squares."""
    if not keep:
        return p.probabilities
    if not isinstance(likelihood, BoundCategorical):
        raise ValueError(
            f"a Dirichlet needs Categorical(), got {type(likelihood).__name__}; use two classes"
        )

    def sum_of_squares(f: Tensor) -> Tensor:
        return likelihood.log_pmf(f).exp().square().sum(-1, keepdim=True)

    return torch.cat((p.probabilities, average(sum_of_squares, p.outputs)), -1)


@torch.no_grad()
def _check_student(net: nn.Module, x: object, expected: torch.Size) -> None:
    """Raise a ValueError unless the student gives outputs of the shape that its loss needs."""
    inputs = rows_of(place_inputs(x, next(net.parameters())), slice(2))
    with evaluating(net), clear_errors(inputs):
        outputs = net(*inputs)
    if isinstance(outputs, Tensor) and outputs.shape == (len(inputs[0]), *expected):
        return
    received = tuple(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
    raise ValueError(
        f"the student gives {received} for {len(inputs[0])} rows, but this teacher needs "
        f"(B, *{tuple(expected)}): logits as its own for classes, (mean, log-variance) of numbers, "
        "with keep='epistemic' two log-variances"
    )


class _Student(Problem):
    """The training of a student on the statistics of its teacher, which are the y of the rows."""

    title = "distill"

    def __init__(self, net: nn.Module, loss: Loss, n: int) -> None:
        super().__init__()
        self.net = adapt(net)
        self.compare = loss
        self.n = n

    def loss(self, x: object, y: Tensor) -> tuple[Tensor, Numbers]:
        """Return the mean loss of a batch."""
        value = self.compare(self.net(*forward_inputs(x)), y).mean()
        return value, {"loss": value.detach()}

    def objective(self, numbers: Numbers) -> Tensor:
        """Return the log-likelihood of all rows."""
        return -self.n * numbers["loss"]


class _ChainStudent(_Student):
    """The training of a student, at each step on the current draw of a chain."""

    def __init__(
        self,
        net: nn.Module,
        loss: Loss,
        n: int,
        draws: Iterator[Empirical],
        keep: Keep | None,
    ) -> None:
        super().__init__(net, loss, n)
        self.draws = draws
        self.teacher: Posterior = next(draws)
        self.keep = keep

    def before_step(self, step: int, steps: int) -> None:
        """Take the next draw of the chain."""
        if step:
            self.teacher = next(self.draws)

    def loss(self, x: object, y: Tensor) -> tuple[Tensor, Numbers]:
        """Return the mean loss of a batch for the current draw."""
        return super().loss(x, _teacher_statistics(self.teacher.predict(x, seed=None), self.keep))

"""Continuous flows against closed forms, independence of rows, and error messages."""

import math

import pytest
import torch
from torch import nn

from bayou import flows
from bayou.core import rng
from bayou.flows import (
    Continuous,
    DiagonalNormal,
    Flow,
    InversionError,
    Ladj,
    continuous,
)
from bayou.flows.fitting import objectives
from bayou.flows.fitting.objectives import FlowMatching
from experiments.measure.time_unet import TimeUNet
from tests.conformance.flow_properties import check
from tests.conformance.training import check_trained
from tests.flows.tools import (
    LIKE,
    close,
    derivative,
    double,
    identical,
    item_is,
    near,
    perturb,
    refuses,
    seeded,
    standard,
)

A = double([[0.3, -1.2], [0.7, -0.5]])


class Field(nn.Module):
    """A field without parameters.

    Args:
        velocity: a function of (t, z).
    """

    def __init__(self, velocity):
        super().__init__()
        self.velocity = velocity

    def forward(self, t, z):
        return self.velocity(t, z)


LINEAR = Field(lambda _, z: z @ A.T)
CUBIC = Field(lambda _, z: -(z**3))


def mean_velocity(t, z):
    """The mean velocity of (1 − t)·x0 + t·x1, x0 ~ N(0, 1), x1 ~ N(2, .25); its flow is 2 + x/2."""
    t = t.unsqueeze(-1)
    variance = (1 - t) ** 2 + t**2 / 4
    return 2 + (t / 4 - (1 - t)) / variance * (z - 2 * t)


class Contraction(nn.Module):
    """ż = rate·z, with y = x·exp(rate)."""

    def __init__(self):
        super().__init__()
        self.rate = nn.Parameter(torch.tensor(-4.0))

    def forward(self, t, z):
        return self.rate * z


@pytest.mark.parametrize("solver", ["rk4", "dopri5"])
def test_closed_forms(solver):
    options = {"solver": solver, "steps": 64, "tolerance": 1e-9}
    y, ladj = Continuous(2, LINEAR, **options)(double([1.0, 2.0]))
    assert y.tolist() == pytest.approx([-0.9972043, 1.1478990], abs=1e-7)
    item_is(ladj, -0.2, abs=1e-9)
    cubic = Continuous(1, CUBIC, **options)
    y, ladj = cubic(double([1.5]))
    assert (y.item(), ladj.item()) == pytest.approx((0.6396021, -2.5571221), abs=2e-6)
    assert cubic.evaluations >= 4 * 16
    y, ladj = Continuous(1, Field(mean_velocity), **options)(double([0.7]))
    assert (y.item(), ladj.item()) == pytest.approx((2.35, -math.log(2)), abs=1e-6)


def test_hutchinson_is_unbiased_with_the_variance_of_signs():
    flow = Continuous(2, LINEAR, trace="hutchinson", steps=4)
    assert flow.ladj_kind is Ladj.estimate
    x = double([1.0, 2.0]).expand(4096, 2)
    _, ladj = flow(x, seed=0)
    assert abs(ladj.mean().item() + 0.2) < 5 * 0.5 / 64
    item_is(ladj.var(), 0.25, rel=0.1)
    identical(flow(x[:3], seed=0, start=5)[1], ladj[5:8])


def test_adaptive_steps_of_a_row_do_not_depend_on_the_batch():
    flow = Continuous(1, CUBIC, solver="dopri5", tolerance=1e-4)
    x = double([[0.1], [8.0], [1.5]])
    together = flow(x)
    for i in range(3):
        alone = flow(x[i : i + 1])
        identical(alone[0][0], together[0][i])
        identical(alone[1][0], together[1][i])


def test_gradients_go_through_the_steps_with_and_without_checkpoints():
    found = []
    for solver, checkpoint in (("rk4", False), ("rk4", True), ("dopri5", False), ("dopri5", True)):
        torch.manual_seed(0)
        options = {"steps": 24, "tolerance": 1e-7, "checkpoint": checkpoint}
        flow = perturb(continuous(2, (8,), solver=solver, **options), 0.1)
        y, ladj = flow(double([[0.3, -0.2], [1.0, 0.5]]))
        (y.square().sum() + ladj.sum()).backward()
        found.append(torch.cat([p.grad.flatten() for p in flow.parameters() if p.grad is not None]))
    for first, second, error in ((0, 1, 1e-12), (2, 3, 1e-12), (0, 2, 1e-4)):  # of the solvers
        assert (found[first] - found[second]).abs().max() < error


def test_accuracy_bounds_the_error_of_the_solver_and_check_allows_it():
    flow = continuous(2, hidden=(8,), steps=8)
    assert flow.accuracy == pytest.approx((4 * math.pi / 8) ** 4 / 14400)
    assert (
        flows.Chain(flow, flow, flows.reverse(2)).accuracy
        == flows.Inverse(flow).accuracy * 2
        == 2 * flow.accuracy
    )
    assert continuous(2, field=flow.field.net, steps=8).accuracy == 8**-4  # a field of one's own
    assert continuous(2, solver="dopri5", tolerance=1e-7).accuracy == pytest.approx(1e-5)
    check_trained(flow, only=["inverse", "ladj", "batch"], train_steps=5).raise_if_failed()
    adaptive = continuous(2, hidden=(8,), solver="dopri5", tolerance=1e-5)
    check_trained(adaptive, only=["inverse", "ladj"], train_steps=3).raise_if_failed()

    report = check(Continuous(2, Field(lambda _, z: (12 * z).sin()), steps=8), only=["inverse"])
    assert not report.passed  # too rough for eight steps


def test_halving_a_step_divides_the_error_by_sixteen():
    x = double([1.0, 2.0])
    exact = torch.matrix_exp(A) @ x
    errors = [(Continuous(2, LINEAR, steps=n)(x)[0] - exact).norm().item() for n in (8, 16, 32)]
    assert errors[0] / errors[1] == pytest.approx(16, rel=0.1)
    assert errors[1] / errors[2] == pytest.approx(16, rel=0.1)


def test_uneven_steps_are_as_accurate_as_their_widest():
    x, noise = (
        double([1.0, 2.0]),
        torch.rand(5, generator=seeded(0)),
    )
    exact = torch.matrix_exp(A) @ x
    for steps in (16, 32):  # as many widths as there are numbers, again and again
        flow = Continuous(2, LINEAR, steps=steps, checkpoint=steps == 32)
        with flows.varied_steps(flow, noise.double()):
            y, ladj = flow(x.requires_grad_())
        assert (y - exact).norm() < (1.75 / 0.25 / steps) ** 4
        item_is(ladj, -0.2, abs=1e-12)
        gradient = derivative(y.sum(), x)
        close(gradient, torch.matrix_exp(A).sum(0), atol=1e-3)


def test_a_field_that_explodes_is_an_error():
    flow = Continuous(1, Field(lambda _, z: 3 * z.square()), solver="dopri5", tolerance=1e-2)
    with pytest.raises(InversionError, match="row 1 .* stiff or not finite"):
        flow(double([[0.01], [2.0]]))


test_arguments_that_do_not_fit_are_refused = refuses(
    (lambda: Continuous(1, CUBIC, solver="euler"), "solver must be"),
    (lambda: Continuous(1, CUBIC, trace="none"), "trace must be"),
    (lambda: continuous((1, 2, 2)), "needs a field="),
    (lambda: flows.fit(standard(flows.realnvp(2)), torch.zeros(9, 2), matching=True),
     "a continuous flow, got Chain"),
    (lambda: flows.fit(standard(continuous(2)), lambda x: x.sum(-1), matching=True),
     "matching fits data"),
    (lambda: TimeUNet((1, 2, 2), (4, 1)), r"at least 2, got \(4, 1\)"),
    (lambda: TimeUNet((1, 6, 6), channels=(8, 8, 8)), "multiples of 4"),
)  # fmt: skip


def test_fit_refines_the_steps_of_a_flow_that_exploits_solver_errors():
    """One step of RK4 across a contraction gives another density than two steps."""
    core = Continuous(1, Contraction(), steps=1)
    flow, data = standard(core), 0.02 * rng.normal(200, (1,), torch.zeros(()), 1)
    with pytest.warns(UserWarning, match="1 steps of RK4 are too few .* build it with steps="):
        found = flows.fit(flow, data, steps=20, lr=1e-3, progress=False)
    assert core.steps in (4, 8)
    scale = core.field.rate.detach().exp()  # y = x·exp(rate)
    exact = -torch.distributions.Normal(0.0, scale).log_prob(data).squeeze(-1)
    held = objectives.MaximumLikelihood(flow, data, None, 256, 0.1, 0).held_out_rows
    assert found.best == pytest.approx(exact[held].mean().item(), abs=0.01)


@pytest.mark.parametrize("solver", ["rk4", "dopri5"])
def test_varied_steps_and_refinement(solver):
    core = Continuous(1, CUBIC, steps=2, solver=solver, tolerance=1e-3)
    flow, x = (
        flows.Chain(core, flows.DiagonalAffine(1).double()),
        double([[3.0]]),
    )
    coarse = flow(x)[1].item()
    with flows.varied_steps(flow, double([0.2, 0.9])):
        assert (flow(x)[1].item() == coarse) == (solver == "dopri5")  # which has its own steps
    assert flow(x)[1].item() == coarse
    before, after = flows.refine(flow, lambda: flow(x)[1].mean(), 1e-3)
    assert (before, after) == ((2, core.steps) if solver == "rk4" else (0, 0))
    if solver == "rk4":
        error = abs(
            flow(x)[1].item() + 1.5 * math.log1p(2 * 9.0)
        )  # ladj of ż = −z³: −3/2·log(1 + 2z₀²)
        assert core.steps > 8
        assert error < 1e-3
    assert flows.refine(flow, lambda: flow(x)[1].mean(), 1e-3, most=1)[1] == after


# --- matching -----------------------------------------------------------------------------------


def test_the_least_loss_of_matching_two_gaussians():
    """Independent paths cross: πs/2 for s = ½. Paired by transport, they are nearly those of the
    flow itself.
    """
    flow = Flow(DiagonalNormal(1).double(), Continuous(1, Field(mean_velocity)))
    data = 2 + 0.5 * rng.normal(8000, (1,), LIKE, 1)
    objective = FlowMatching(flow, data, None, 256, 0.5, 0)
    losses = objective._distance(*objective._paths(objective.held_out_rows, 3))
    near(losses, math.pi / 4)


def test_a_matched_flow_has_the_density_of_its_data():
    data = 2 + 0.5 * torch.randn(2000, 1)
    flow = standard(continuous(1, hidden=(32,), steps=16))
    result = flows.fit(flow, data, matching=True, steps=400, lr=1e-2, progress=False)
    assert result.objective == "flow matching"
    assert "matching loss" in result.measure
    truth = torch.distributions.Normal(2.0, 0.5).log_prob(data).sum(-1)
    assert (truth - flow.log_prob(data).detach()).mean().abs() < 0.03  # nats


# --- images -------------------------------------------------------------------------------------


@torch.no_grad()
def test_accuracy_bounds_the_error_of_a_flow_of_images():
    flow = perturb(continuous((1, 2, 2), field=TimeUNet((1, 2, 2), (4, 8)), steps=8), 0.1)
    x = torch.randn(2, 1, 2, 2, dtype=torch.float64)
    noise = flow.noise(x, seed=0)
    coarse = flow(x, noise=noise)
    flow.steps = 24
    error = max(
        (a - b).abs().max().item() for a, b in zip(coarse, flow(x, noise=noise), strict=True)
    )
    flow.steps = 8
    assert 8.0**-4 < error <= flow.accuracy  # fast waves of the time cost more than steps⁻⁴


def test_fields_of_images_depend_on_time_and_context_and_start_at_zero():
    field = TimeUNet((3, 8, 8), (8, 16), context_dim=2)
    z, t, context = torch.randn(4, 3, 8, 8), torch.rand(4), torch.randn(4, 2)
    assert field(t, z, context).abs().max() == 0
    perturb(field.float(), 0.1).float()
    v = field(t, z, context)
    assert not torch.allclose(v, field(t + 0.3, z, context))
    assert not torch.allclose(v, field(t, z, context + 1))
    close(v[1], field(t[1], z[1], context[1]), atol=1e-5)


@pytest.mark.parametrize("hidden", [(6,), (6, 5), (4, 5, 6)])
def test_the_trace_of_a_field_of_vectors_is_that_of_its_jacobian(hidden):
    core = perturb(continuous(3, hidden, context_dim=2), 0.5)
    z, t, context = torch.randn(4, 3).double(), torch.rand(4).double(), torch.randn(4, 2).double()
    assert (core.field.with_trace is None) == (len(hidden) > 2)
    v, trace = core.derivative(context)(t, (z,))
    jacobian = torch.func.vmap(torch.func.jacrev(core.field, argnums=1))(t, z, context)
    close(v, core.field(t, z, context))
    close(trace, jacobian.diagonal(dim1=-2, dim2=-1).sum(-1))

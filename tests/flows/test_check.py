"""``check`` passes a correct transform; each faulty one fails the check of its fault and no
other.
"""

import copy
import warnings

import pytest
import torch
from torch import nn

from bayou.flows.checking.report import Report, Result
from bayou.flows.core.compose import Conditional, Inverse
from bayou.flows.core.implicit import refuse_second_derivative
from bayou.flows.core.transform import Cost, Ladj, Transform
from tests.conformance.flow_properties import all_properties, check
from tests.flows.tools import failed, identical


class Affine(Transform):
    """y = shift + exp(log_scale) x: correct, and the parent of everything broken below."""

    def __init__(self, dim=2):
        super().__init__()
        self.event_shape = (dim,)
        self.shift = nn.Parameter(torch.arange(1.0, dim + 1) / 5)
        self.log_scale = nn.Parameter(torch.arange(1.0, dim + 1) / 10)

    def _forward(self, x, context):
        return self.shift + self.log_scale.exp() * x, self.log_scale.sum().expand(x.shape[:-1])

    def _inverse(self, y, context):
        return (y - self.shift) * (-self.log_scale).exp(), -self.log_scale.sum().expand(
            y.shape[:-1]
        )


class Faulty(Affine):
    """An affine map with wrong inputs or results of one direction, or of both.

    Args:
        dim: the number of coordinates.
        x: from the input of forward to another one.
        forward: from the map and the results of forward to other ones.
        y: from the input of the inverse to another one.
        inverse: from the map and the results of the inverse to other ones.
    """

    def __init__(self, dim=2, x=None, forward=None, y=None, inverse=None):
        super().__init__(dim)
        self.change_x, self.change_y = x, y
        self.change_forward, self.change_inverse = forward, inverse

    def _forward(self, x, context):
        pair = super()._forward(self.change_x(x) if self.change_x else x, context)
        return self.change_forward(self, *pair) if self.change_forward else pair

    def _inverse(self, y, context):
        pair = super()._inverse(self.change_y(y) if self.change_y else y, context)
        return self.change_inverse(self, *pair) if self.change_inverse else pair


def detached_shift(f, x, ladj):
    return x + (f.shift - f.shift.detach()) * (-f.log_scale).exp(), ladj


class DetachedSecondOrder(Affine):
    """An implicit gradient at a constant root: right once, and wrong when it is differentiated
    again.
    """

    def _inverse(self, y, context):
        x, ladj = super()._inverse(y, context)
        root = x.detach()
        scale = self.log_scale.exp()
        residual = self.shift + scale * root - y
        return root - (residual - residual.detach()) / scale.detach(), ladj


def without_second_derivative(f, y, ladj):
    """The ladj has the gradient of the log-scale and no derivative of that gradient, where it is
    not zero.
    """
    square = f.log_scale.square().sum()
    surrogate = 2 * (f.log_scale.detach() * f.log_scale).sum()
    return y, ladj - square + square.detach() + surrogate - surrogate.detach()


def break_graph(x):
    torch._dynamo.graph_break()
    return x


class Double(torch.autograd.Function):
    """A function that vmap has no rule for."""

    @staticmethod
    def forward(x):
        return 2 * x

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class ForgottenState(Affine):
    """A running count that training changes and the state dict does not have."""

    def __init__(self, dim=2):
        super().__init__(dim)
        self.count = 0

    def _forward(self, x, context):
        self.count += self.training
        y, ladj = super()._forward(x, context)
        return y + self.count, ladj

    def _inverse(self, y, context):
        return super()._inverse(y - self.count, context)


def no_empty_batch(x):
    x.max()  # of nothing
    return x


# The map, the check of its fault, and the rows that fail. The ladj of the inverse is what a density
# is made of, so its faults are shown in three dimensions, without a grid.
BROKEN = {
    "wrong inverse": (
        Faulty(inverse=lambda f, x, ladj: (x + 1e-4, ladj)),
        "inverse",
        {"inverse of forward", "forward of inverse"},
    ),
    "wrong sign": (
        Faulty(forward=lambda f, y, ladj: (y, -ladj)),
        "ladj",
        {"ladj forward", "ladj opposite"},
    ),
    "wrong ladj of the inverse": (
        Faulty(inverse=lambda f, x, ladj: (x, ladj + 1e-7)),
        "ladj",
        {"ladj inverse", "ladj opposite"},
    ),
    "missing term in both directions": (
        Faulty(
            3,
            forward=lambda f, y, ladj: (y, ladj - f.log_scale[0]),
            inverse=lambda f, x, ladj: (x, ladj + f.log_scale[0]),
        ),
        "ladj",
        {"ladj forward", "ladj inverse"},
    ),
    # (0.5, 2.5) is covered twice, far from the few points that the other checks look at.
    **{
        f"overlapping in {dim}": (
            Faulty(
                dim,
                x=lambda x: torch.where(x > 2.5, x - 2, x),
                inverse=lambda f, x, ladj: (torch.where(x > 2.5, x + 2, x), ladj),
            ),
            "density",
            {"density"},
        )
        for dim in (1, 2)
    },
    "detached ladj": (
        Faulty(forward=lambda f, y, ladj: (y, ladj.detach())),
        "gradcheck",
        {"gradcheck forward"},
    ),
    "detached parameter": (Faulty(inverse=detached_shift), "gradcheck", {"gradcheck inverse"}),
    "detached second order": (DetachedSecondOrder(), "gradgradcheck", {"gradgradcheck inverse"}),
    "detached second order of a parameter": (
        Faulty(forward=without_second_derivative),
        "gradgradcheck",
        {"gradgradcheck forward"},
    ),
    "graph break": (Faulty(x=break_graph), "compile", {"compile"}),
    "other when compiled": (
        Faulty(inverse=lambda f, x, ladj: (x + 1e-6 * torch.compiler.is_compiling(), ladj)),
        "compile",
        {"compile inverse"},
    ),
    "not vmappable": (Faulty(x=lambda x: Double.apply(x) / 2), "vmap", {"vmap"}),
    "promoting": (
        Faulty(forward=lambda f, y, ladj: (y, ladj.double())),
        "dtype",
        {"float32 forward", "bfloat16 forward"},
    ),
    "losing eight digits": (
        Faulty(forward=lambda f, y, ladj: ((y + 1e5) - 1e5, ladj)),
        "dtype",
        {"float32 forward", "bfloat16 forward"},
    ),
    "forgotten state": (
        ForgottenState(),
        "state_dict",
        {"state_dict forward", "state_dict inverse"},
    ),
    "overflowing": (
        Faulty(x=lambda x: x.exp().log()),
        "tails",
        {"tails forward", "tails inverse"},
    ),
    "lossy tails": (
        Faulty(y=lambda y: y.clamp(-5e3, 5e3)),
        "tails",
        {"tails forward"},
    ),
    "rows that depend on their batch": (
        Faulty(
            x=lambda x: x + 0.1 * x.ndim,
            inverse=lambda f, x, ladj: (x - 0.1 * x.ndim, ladj),
        ),
        "batch",
        {f"batch {d} {w}" for d in ("forward", "inverse") for w in ("rows", "shapes")},
    ),
    "wrong batch shape": (
        Faulty(forward=lambda f, y, ladj: (y, ladj.flatten() if ladj.ndim else ladj)),
        "batch",
        {"batch forward shapes"},
    ),
    "no empty batch": (Faulty(x=no_empty_batch), "batch", {"batch forward shapes"}),
}


@pytest.mark.parametrize("dim", [1, 2, 3])
def test_a_correct_transform_passes_everything(dim):
    report = check(Affine(dim), dim, compile_backend="eager")
    report.raise_if_failed()
    assert ("skipped" in report["density"].note) == (dim > 2)


@pytest.mark.parametrize(("transform", "name", "rows"), BROKEN.values(), ids=BROKEN)
def test_each_fault_fails_its_own_check_and_no_other(transform, name, rows):
    assert failed(check(transform, only=[name], compile_backend="eager")) == rows
    # The derivative of a wrong gradient is wrong, too.
    skipped = [name, "gradgradcheck"] if name == "gradcheck" else [name]
    check(transform, skip=skipped, compile_backend="eager").raise_if_failed()


def dry(x):
    raise LookupError("the river is dry")


@pytest.mark.parametrize("name", all_properties())
def test_an_exception_is_a_failed_row(name):
    report = check(Faulty(x=dry), only=[name], compile_backend="eager")
    assert not report
    assert "the river is dry" in report.results[-1].note


def test_a_second_derivative_that_raises_is_not_a_wrong_one():
    def once(f, y, ladj):
        return refuse_second_derivative(y, "only once; use another map", f.log_scale), ladj

    report = check(Faulty(forward=once), only=["gradcheck", "gradgradcheck"])
    report.raise_if_failed()
    note = "raises SecondDerivativeError: only once; use another map"
    assert report["gradgradcheck forward"].note == note
    assert report["gradgradcheck inverse"].value is not None


def test_rows_measured_before_an_exception_are_kept():
    report = check(Faulty(y=dry), only=["gradcheck"])
    assert report["gradcheck forward"].passed
    assert not report["gradcheck"].passed


def test_check_leaves_the_transform_unchanged():
    transform = Affine(2).train()
    before, rng_state = copy.deepcopy(transform.state_dict()), torch.get_rng_state()
    check(transform, compile_backend="eager")
    assert all(torch.equal(before[key], value) for key, value in transform.state_dict().items())
    assert transform.training
    assert transform.shift.dtype == torch.float32
    assert transform.shift.grad is None
    identical(rng_state, torch.get_rng_state())


def test_conditional_transforms_are_checked_with_a_context():
    transform = Conditional(Affine(2), context_dim=3)
    report = check(transform, skip=["compile", "density"])
    report.raise_if_failed()
    assert report["batch forward context"].passed
    assert report["batch inverse context"].passed
    check(
        transform, context=torch.tensor([0.1, 0.2, 0.3]), only=["inverse", "density"]
    ).raise_if_failed()


def test_a_context_that_does_not_broadcast_is_found():
    class Stubborn(Affine):
        context_dim = 2

        def _forward(self, x, context):
            assert context is not None
            assert context.shape[:-1] == x.shape[:-1]
            return super()._forward(x, context)

    assert failed(check(Stubborn(), skip=["compile", "density", "tails"])) == {"batch"}
    assert failed(check(Stubborn(), only=["batch"])) == {"batch"}


class Sigmoid(Transform):
    """R to (0, 1), for the checks that respect domain and codomain."""

    codomain = (0.0, 1.0)

    def __init__(self, *event):
        super().__init__()
        self.event_shape = event

    def _forward(self, x, context):
        logsigmoid = nn.functional.logsigmoid
        return x.sigmoid(), (logsigmoid(x) + logsigmoid(-x)).flatten(-len(self.event_shape)).sum(-1)

    def _inverse(self, y, context):
        return y.logit(), -(y.log() + (-y).log1p()).flatten(-len(self.event_shape)).sum(-1)


@pytest.mark.parametrize(
    "transform", [Sigmoid(1), Inverse(Sigmoid(1)), Sigmoid(2), Inverse(Sigmoid(2))]
)
def test_bounded_domains_and_codomains(transform):
    report = check(transform, compile_backend="eager")
    report.raise_if_failed()
    assert report["density"].value < 1e-4
    assert "inputs only" in report["vmap forward"].note


def test_open_axes_and_events_of_several_axes():
    report = check(Sigmoid(3, None, None), compile_backend="eager")
    report.raise_if_failed()
    assert "3x2x2" in str(report)
    assert "1x1x2" in str(check(Sigmoid(None, None, None), dim=(1, 1), only=["density"]))


def test_a_fresh_construction_shows_state_that_is_not_saved():
    def unsaved(extra):
        return Faulty(x=lambda x: x + extra)

    assert check(unsaved(1.0), only=["state_dict"], fresh=lambda: unsaved(1.0))
    assert not check(unsaved(1.0), only=["state_dict"], fresh=lambda: unsaved(2.0))


@pytest.mark.parametrize("kind", [Ladj.bound, Ladj.estimate])
def test_inexact_ladjs_are_compared_with_draws(kind):
    for transform, rows in (
        (Affine(2), set()),
        (Faulty(forward=lambda f, y, ladj: (y, -ladj)), {"ladj forward"}),
    ):
        transform.ladj_kind = kind
        report = check(transform, only=["ladj", "density"])
        assert failed(report) - {"ladj forward gradient"} == rows
        assert "not exact" in report["density"].note


def test_iterative_transforms_get_their_own_tolerance():
    transform = Affine(2)
    transform.inverse_kind = Cost.iterative
    assert check(transform, only=["inverse"])["inverse of forward"].tolerance == 1e-8
    assert check(Affine(2), only=["inverse"])["inverse of forward"].tolerance == 1e-10
    custom = check(Affine(2), only=["inverse"], tolerances={"inverse": 1e-20})
    assert custom["inverse of forward"].tolerance == 1e-20
    assert not custom


def test_a_thin_ridge_is_integrated_along_its_own_axes():
    def shear(y, slope):
        return torch.stack([y[..., 0], y[..., 1] + slope * y[..., 0]], -1)

    ridge = Faulty(forward=lambda f, y, ladj: (shear(y, 1e3), ladj), y=lambda y: shear(y, -1e3))
    check(ridge, only=["density"]).raise_if_failed()


def test_a_steep_tail_passes():
    class Steep(Affine):
        """y₁ = x₁ e^(−min(|x₀|, 30)): no float remembers x₁ beside a large x₀ + x₁."""

        def _forward(self, x, context):
            log_slope = -x[..., 0].abs().clamp_max(30)
            y = torch.stack([x[..., 0], x[..., 1] * log_slope.exp() + x[..., 0]], -1)
            return y, log_slope

        def _inverse(self, y, context):
            log_slope = y[..., 0].abs().clamp_max(30)
            return torch.stack(
                [y[..., 0], (y[..., 1] - y[..., 0]) * log_slope.exp()], -1
            ), log_slope

    check(Steep(), only=["tails"]).raise_if_failed()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"only": ["jacobian"]}, r"unknown checks.*'jacobian'.*choose from"),
        ({"skip": ["jacobian"]}, "unknown checks"),
        ({"only": "ladj"}, r"pass \['ladj'\]"),
        ({"tolerances": {"lajd": 1.0}}, r"unknown entries.*choose from"),
        ({"perturb": -1.0}, "perturb must be a standard deviation of at least 0, got -1"),
        ({"dim": (3, 3)}, r"dim=\(3, 3\) does not fit Affine on events \(2,\)"),
    ],
)
def test_bad_arguments(options, message):
    with pytest.raises(ValueError, match=message):
        check(Affine(), **options)


def test_a_report_reads_as_a_table():
    report = Report(
        "Thing on 2", (Result.of("ladj", 1e-12, 1e-9), Result("compile", False, note="line\nbreak"))
    )
    assert not report
    assert not report.passed
    assert [r.name for r in report.failures] == ["compile"]
    assert str(report).splitlines() == [
        "Thing on 2: 1 of 2 FAILED",
        "check              error  allowed",
        "ladj     ok      1.0e-12  1.0e-09",
        "compile  FAILED        -        -  line break",
    ]
    with pytest.raises(AssertionError, match="1 of 2 FAILED"):
        report.raise_if_failed()
    with pytest.raises(KeyError, match="no row 'tails'"):
        report["tails"]
    with pytest.raises(AttributeError):
        report.subject = "other"
    assert not Result.of("x", float("nan"), 1.0).passed
    assert Report("nothing", ()).passed


def test_a_shape_that_raises_does_not_hide_the_others():
    report = check(Faulty(x=no_empty_batch), only=["batch"])
    note = report["batch forward shapes"].note
    assert note.startswith("batch (0,) raised RuntimeError: max()")
    assert "batch (2, 0) raised" in note
    assert report["batch inverse rows"].passed


class AtTheIdentity(Affine):
    """Right at the identity, where it starts, and nowhere else: the ladj is missing."""

    def __init__(self):
        super().__init__()
        nn.init.zeros_(self.shift)
        nn.init.zeros_(self.log_scale)

    def _forward(self, x, context):
        return super()._forward(x, context)[0], x.new_zeros(x.shape[:-1])


def test_a_fault_that_does_not_show_at_the_identity_is_found():
    transform = AtTheIdentity()
    assert check(transform, only=["ladj"], perturb=0.0)
    report = check(transform, only=["ladj"])
    assert failed(report) == {"ladj forward", "ladj opposite"}
    assert str(report).startswith("AtTheIdentity on 2, parameters perturbed by 0.2 (seed 0): ")
    assert "perturbed" not in str(check(transform, only=["ladj"], perturb=0.0))
    assert all(bool((p == 0).all()) for p in transform.parameters())


@pytest.mark.parametrize(
    ("module", "text", "passes"),
    [
        ("torch.nn.modules.linear", "a processor without some instruction", True),
        ("bayou.flows.core.nets", "a slow kernel (Triggered internally at Linear.cpp:1.)", True),
        ("bayou.flows.core.nets", "of bayou itself", False),
    ],
)
def test_only_warnings_of_bayou_itself_fail_a_transform(module, text, passes):
    def warn(x):
        warnings.warn_explicit(text, UserWarning, "somewhere.py", 1, module=module)
        return x

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert bool(check(Faulty(x=warn), only=["inverse"])) == passes

"""Transforms with the interfaces of zuko, nflows and normflows through ``check``: stand-ins, and
the libraries.
"""

import pytest
import torch
from torch import distributions, nn

from bayou.flows import Cost, Inverse, Ladj, realnvp
from experiments.measure.adapt import adapt
from tests.conformance.flow_properties import check
from tests.conformance.training import check_trained
from tests.flows.tools import close, double, failed, identical, item_is, refuses, standard

MATHEMATICS = ("inverse", "ladj", "density", "gradcheck", "state_dict", "batch")


class Shear(nn.Module):
    """y = (x₀, e^a·x₁ + sin x₀ + context₀), in the form of nflows: one batch axis, ladj (n,)."""

    def __init__(self, wrong=0.0):
        super().__init__()
        self.wrong = wrong
        self.log_scale = nn.Parameter(torch.tensor(0.3))

    def _shift(self, first, context):
        return first.sin() if context is None else first.sin() + context[:, :1]

    def forward(self, inputs, context=None):
        assert inputs.ndim == 2
        first, second = inputs[:, :1], inputs[:, 1:]
        y = torch.cat([first, second * self.log_scale.exp() + self._shift(first, context)], -1)
        return y, (self.log_scale + self.wrong).expand(len(inputs))

    def inverse(self, inputs, context=None):
        assert inputs.ndim == 2
        first, second = inputs[:, :1], inputs[:, 1:]
        x = torch.cat([first, (second - self._shift(first, context)) * (-self.log_scale).exp()], -1)
        return x, (-self.log_scale - self.wrong).expand(len(inputs))


@pytest.mark.parametrize(
    ("transform", "options"),
    [(Shear(), {}), (distributions.SigmoidTransform().inv, {"domain": (0.0, 1.0)})],
)
def test_a_correct_transform_passes(transform, options):
    report = check(adapt(transform, 2, **options), only=(*MATHEMATICS, "vmap", "tails"))
    report.raise_if_failed()


def test_a_wrong_log_determinant_is_found():
    report = check(adapt(Shear(wrong=0.01), 2), only=["inverse", "ladj"])
    assert failed(report) == {"ladj forward", "ladj inverse"}
    assert report["ladj forward"].value == pytest.approx(0.01)
    assert report.subject == "Shear on 2, parameters perturbed by 0.2 (seed 0)"


def test_the_wrapped_object_is_called_and_not_modified():
    shear = Shear().double()
    x = torch.randn(2, 3, 2, dtype=torch.float64)
    y, ladj = adapt(shear, 2)(x)
    expected_y, expected_ladj = shear(x.reshape(6, 2))
    identical(y.reshape(6, 2), expected_y)
    identical(ladj.reshape(6), expected_ladj)
    check_trained(adapt(shear, 2), only=["inverse"], train_steps=2)
    identical(shear.log_scale, Shear().double().log_scale)


def test_a_context_is_passed_on():
    adapted = adapt(Shear(), 2, context_dim=3)
    check(adapted, only=("inverse", "ladj", "gradcheck", "batch")).raise_if_failed()
    x, context = torch.zeros(4, 2), torch.randn(3)
    item_is(adapted(x, context)[0][0, -1], context[0].item())


class Hutchinson(nn.Module):
    """y = A x with an unbiased log-determinant: log|det A| plus noise of the global stream."""

    def __init__(self, bias=0.0):
        super().__init__()
        self.bias, self.log_scale = bias, nn.Parameter(torch.tensor([0.3, -0.1]))

    def _noisy(self, x):
        assert self.training
        return self.log_scale.sum() + 0.1 * torch.randn_like(x[:, 0]) + self.bias

    def forward(self, x):
        return x * self.log_scale.exp(), self._noisy(x)

    def inverse(self, x):
        return x * (-self.log_scale).exp(), -self._noisy(x)


def test_an_estimate_follows_the_seed_and_the_training_flag():
    def adapted(bias):
        return adapt(Hutchinson(bias), 2, ladj_kind=Ladj.estimate, training=True)

    check(adapted(0.0), only=["inverse", "ladj", "gradcheck"]).raise_if_failed()
    biased = check(adapted(0.02), only=["ladj"])
    assert failed(biased) == {"ladj forward", "ladj inverse"}
    x = torch.zeros(3, 2)
    first, again, other = (adapted(0.0)(x, seed=seed)[1] for seed in (0, 0, 1))
    identical(first, again)
    assert not torch.equal(first, other)
    state = torch.get_rng_state()
    adapted(0.0)(x, seed=0)
    identical(state, torch.get_rng_state())


class Triple(nn.Module):
    def forward(self, x):
        return x, x, x

    def inverse(self, x):
        return x, x  # no log-determinant of a row


test_objects_of_another_kind_are_refused = refuses(
    (lambda: adapt(nn.Linear(2, 2), 2), "Linear has none of the supported interfaces"),
    (lambda: adapt(lambda x: x, 2), "an instance; got function"),
    (lambda: adapt(Shear, 2), "got the class Shear"),
    (lambda: adapt(None, 2), "got NoneType"),
    (lambda: adapt(realnvp(2), 2), "Chain is already a map of bayou"),
    (lambda: adapt(Shear(), ()), "all above 0"),
    (lambda: adapt(Shear(), (2, -1)), "all above 0"),
    (lambda: adapt(Shear(), True), "all above 0"),
    (lambda: adapt(Triple(), 2)(torch.zeros(3, 2)), r"Triple gave tuple .* expected \(y, ladj\)"),
    (lambda: adapt(Triple(), 2).inverse(torch.zeros(3, 2)), r"gave shapes \(3, 2\) and \(3, 2\)"),
)  # fmt: skip


# --- the libraries ------------------------------------------------------------------------------


ONLY = ("inverse", "ladj", "density", "gradcheck")


def has_density(transform, peer):
    """A flow with this transform has the density of the library."""
    y = torch.randn(5, 2)
    close(standard(transform).log_prob(y), peer.log_prob(y), atol=1e-5)


@pytest.mark.peers
def test_zuko():
    import zuko

    for name in ("MAF", "NSF", "NICE"):
        flow = getattr(zuko.flows, name)(2, transforms=2, hidden_features=(8,))
        check_trained(adapt(flow, 2), only=(*ONLY, "vmap"), train_steps=3).raise_if_failed()
        has_density(Inverse(adapt(flow, 2)), flow())
    scale, shift = double([[1.0, 1.0], [0.3, -0.2]])
    eager = zuko.transforms.MonotonicAffineTransform(scale, shift)
    check(adapt(eager, 2), only=ONLY[:3]).raise_if_failed()
    conditional = zuko.flows.MAF(2, 3, transforms=1, hidden_features=(8,))
    check(adapt(conditional, 2, context_dim=3), only=ONLY[:2]).raise_if_failed()


@pytest.mark.peers
def test_a_row_of_a_continuous_flow_of_zuko_depends_on_its_batch_and_loses_gradients():
    import zuko

    flow = zuko.flows.CNF(2, hidden_features=(8,))
    with torch.no_grad():
        for p in flow.parameters():
            p.mul_(2)
    solved = {"forward_kind": Cost.iterative, "inverse_kind": Cost.iterative}
    report = check(
        adapt(flow, 2, **solved),
        only=("ladj", "batch"),
        tolerances={"ladj": 1e-5, "equal iterative": 1e-5},
    )
    assert {"ladj forward", "batch forward rows"} <= failed(report)
    x = torch.randn(4, 2, requires_grad=True)
    adapt(flow, 2).eval()(x)[1].sum().backward()
    assert x.grad is not None
    assert all(p.grad is None for p in flow.parameters())


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore:torch.triangular_solve is deprecated")
def test_nflows():
    from nflows.distributions.normal import StandardNormal as Theirs
    from nflows.flows.base import Flow as TheirFlow
    from nflows.transforms import LULinear, MaskedAffineAutoregressiveTransform

    flow = TheirFlow(MaskedAffineAutoregressiveTransform(2, 8), Theirs([2]))
    for theirs in (flow, LULinear(2)):
        check_trained(adapt(theirs, 2), only=ONLY, train_steps=3).raise_if_failed()
    has_density(Inverse(adapt(flow, 2)), flow)
    conditional = MaskedAffineAutoregressiveTransform(2, 8, context_features=3)
    check(adapt(conditional, 2, context_dim=3), only=ONLY[:2]).raise_if_failed()


@pytest.mark.peers
def test_normflows():
    import normflows as nf

    coupling = nf.flows.AffineCouplingBlock(nf.nets.MLP([1, 8, 2]))
    check_trained(adapt(coupling, 2), only=ONLY, train_steps=3).raise_if_failed()
    model = nf.NormalizingFlow(
        nf.distributions.DiagGaussian(2, trainable=False), [coupling, nf.flows.Permute(2)]
    )
    has_density(adapt(model, 2), model)
    report = check(adapt(model, 2), only=["ladj"])
    assert report["ladj forward"].value < 1e-6  # its log-determinant is float32 whatever comes in


@pytest.mark.peers
def test_a_residual_flow_of_normflows_weights_all_rows_as_the_first():
    import normflows as nf

    net = nf.nets.LipschitzMLP([3, 8, 3], init_zeros=False, lipschitz_const=0.9)
    adapted = adapt(nf.flows.Residual(net), 3, ladj_kind=Ladj.estimate, training=True)
    assert not check(adapted, only=["ladj"])["ladj forward gradient"].passed

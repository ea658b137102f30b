"""Residual flows: bounds of norms, exact and estimated determinants, inverses by fixed points."""

import math

import pytest
import torch
from torch import nn

from bayou.flows import (
    Contracting,
    ContractingConv,
    InversionError,
    Ladj,
    LipSwish,
    Residual,
    residual,
)
from bayou.flows.contractive.contracting import contracting_cnn, contracting_mlp, schatten
from tests.conformance.flow_properties import check
from tests.flows.tools import close, derivative, double, identical, item_is, near, refuses, seeded

B = double([[0.3, -0.5], [0.4, 0.2]])


def linear(determinant):
    g = nn.Linear(2, 2, bias=False).double()
    g.weight.data.copy_(B)
    return Residual(2, g, 0.7, determinant)


def test_the_determinant_of_a_linear_map_and_its_gradient():
    x = double([0.5, -1.0])
    flow = linear("exact")
    _, ladj = flow(x)
    item_is(ladj, 0.5653138, abs=1e-7)
    gradient = derivative(ladj, flow.g.weight)
    close(gradient, torch.tensor([[0.681818, -0.227273], [0.284091, 0.738636]]).double(), atol=1e-6)


def test_roulette_is_unbiased_in_value_and_gradient():
    flow, n = linear("roulette"), 20_000
    assert flow.ladj_kind is Ladj.estimate
    x = double([0.5, -1.0]).expand(n, 2)
    _, ladj = flow(x, seed=0)
    near(ladj, 0.5653138)
    weight = torch.randn(n, generator=seeded(0), dtype=torch.float64)
    gradient = derivative((weight * ladj).mean(), flow.g.weight)  # random weights of rows
    inverse = torch.linalg.inv(torch.eye(2).double() + B).T
    close(gradient, weight.mean() * inverse, atol=5 * 1.5 / math.sqrt(n))
    identical(flow(x[:3], seed=0, start=7)[1], ladj[7:10])


@pytest.mark.parametrize("shape", [(1, 1), (3, 3), (64, 20), (20, 64)])
def test_the_norm_is_an_upper_bound_that_is_nearly_reached(shape):
    for seed in range(5):
        w = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        ratio = (schatten(w) / torch.linalg.matrix_norm(w, 2)).item()
        assert 1 - 1e-12 <= ratio <= min(shape) ** (1 / 258) + 1e-12
    same = torch.eye(*shape, dtype=torch.float64)  # all singular values alike: the worst case
    item_is(schatten(same), min(shape) ** (1 / 258))


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128])
def test_the_gradient_of_the_norm_is_that_of_the_singular_values(dtype):
    w = torch.randn(3, 5, 4, generator=seeded(0), dtype=dtype).requires_grad_()
    values = torch.linalg.svdvals(w)
    largest = values.detach().amax(-1, keepdim=True)
    expected = largest.squeeze(-1) * ((values / largest) ** 258).sum(-1) ** (1 / 258)
    weights = double([1.0, -2.0, 3.0])
    found, truth = (torch.autograd.grad((n * weights).sum(), w)[0] for n in (schatten(w), expected))
    close(schatten(w), expected, rtol=1e-12)
    close(found, truth)


@pytest.mark.parametrize(
    ("net", "event"),
    [
        (lambda: contracting_mlp(3, (16, 16), 0.8), (3,)),
        (lambda: contracting_cnn(1, (6,), 0.8, squeeze=2), (1, 8, 8)),
    ],
)
def test_networks_contract_however_large_their_weights(net, event):
    g = net().double()
    with torch.no_grad():
        for p in g.parameters():
            p.mul_(20)
    size = math.prod(event)
    x = torch.randn(20, *event, dtype=torch.float64)
    jacobian = torch.func.vmap(torch.func.jacrev(g))(x).reshape(20, size, size)
    assert torch.linalg.matrix_norm(jacobian, 2).max() <= 0.8


def test_a_layer_of_zeros_returns_its_bias():
    layer = Contracting(2, 2, 0.9)
    nn.init.zeros_(layer.weight)
    identical(layer(torch.ones(3, 2)), layer.bias.expand(3, 2))


def test_networks_start_small_with_bent_units():
    """With straight units two moons stayed at the loss of a Gaussian for hundreds of steps."""
    for g, x in (
        (contracting_mlp(2, (64, 64), 0.9), torch.randn(50, 2)),
        (contracting_cnn(1, (16,), 0.9), torch.randn(5, 1, 8, 8)),
    ):
        assert g(x).norm() < 0.2 * x.norm() + 0.2
        item_is(nn.functional.softplus(g[1].raw), 10.0)


def test_the_slope_of_lipswish_is_at_most_one():
    swish = LipSwish().double()
    x = torch.linspace(-50, 50, 100_001, dtype=torch.float64, requires_grad=True)
    for raw in (-2.0, 0.5, 3.0):
        swish.raw.data.fill_(raw)
        slope = torch.autograd.grad(swish(x).sum(), x)[0].abs().max().item()
        assert slope == pytest.approx(1.0, abs=1e-6)


def test_the_determinant_is_exact_up_to_sixteen_dimensions():
    assert residual(16).ladj_kind is Ladj.exact
    assert residual(17).ladj_kind is Ladj.estimate


class Steep(nn.Module):
    def __init__(self, slope):
        super().__init__()
        self.slope = slope

    def forward(self, x):
        return self.slope * x


def test_the_norm_of_the_jacobian_is_measured_and_checked():
    flow = residual((1, 4, 4), layers=2, hidden=(8,), lipschitz=0.8).double()
    for layer, scale in zip(flow.transforms, (1.0, 20.0), strict=True):
        for p in layer.g.parameters():
            p.data.mul_(scale)
        x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
        jacobian = torch.func.vmap(torch.func.jacrev(layer.g))(x).reshape(3, 16, 16)
        truth = torch.linalg.matrix_norm(jacobian, 2)
        close(layer.jacobian_norm(x, iterations=300), truth, rtol=1e-3)
        assert (layer.jacobian_norm(x) <= truth * (1 + 1e-12)).all()
    row = check(flow, only=["inverse"])["lipschitz"]
    assert row.passed
    assert 0.1 < row.value < 1
    report = check(Residual(2, Steep(0.9), 0.8), only=["inverse"])
    assert not report["lipschitz"].passed
    assert report["lipschitz"].value == pytest.approx(0.9 / 0.8)


def test_a_map_that_does_not_contract_is_an_error():
    with pytest.raises(InversionError, match="Lipschitz constant of g is above 0.9"):
        Residual(1, Steep(1.5), 0.9).inverse(double([[2.0]]))


test_arguments_that_do_not_fit_are_refused = refuses(
    (lambda: Residual(1, nn.Identity(), 1.5), "between 0 and 1, got 1.5"),
    (lambda: Residual(1, nn.Identity(), 0.5, "truncated"), "determinant must be"),
    (lambda: residual((2, 3)), r"shape \(C, H, W\) of images, got \(2, 3\)"),
    (lambda: ContractingConv(2, 2, 4, 0.9), "odd kernel"),
)  # fmt: skip


# --- images -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel"), [(1, 5, 3), (4, 3, 3), (3, 3, 1), (2, 2, 5)]
)
def test_the_bound_of_a_convolution_is_above_its_norm_on_any_image(inputs, outputs, kernel):
    for seed in range(3):
        torch.manual_seed(seed)
        conv = ContractingConv(
            inputs, outputs, kernel, 10.0, grid=32
        ).double()  # leaves the weights alone
        bound = conv.bound().item()
        for side in (5, 12):
            zero = torch.zeros(1, inputs, side, side, dtype=torch.float64)
            matrix = torch.func.jacrev(lambda x, conv=conv: conv(x) - conv.bias[:, None, None])(
                zero
            )
            norm = torch.linalg.matrix_norm(matrix.reshape(-1, zero.numel()), 2).item()
            assert norm <= bound * (1 + 1e-12)
        assert bound <= 1.25 * norm  # on the larger image it is nearly reached
    with torch.no_grad():
        conv.weight.mul_(100)
    conv.lipschitz = 0.7
    small = torch.func.jacrev(conv)(zero).reshape(-1, zero.numel())
    assert torch.linalg.matrix_norm(small, 2) <= 0.7 * (1 + 1e-12)


def test_dropping_finished_rows_does_not_change_the_result():
    """Sorted and dropped, each row has the sum of its own terms."""
    flow = residual(9, layers=1, hidden=(12,), determinant="roulette").double().transforms[0]
    x = torch.randn(40, 9, dtype=torch.float64)
    probe, u = flow.noise(x, seed=3)
    found = flow(x, noise=(probe, u))[1]
    jacobian = torch.func.vmap(torch.func.jacrev(flow.g))(x)
    for i in range(len(x)):
        count = 1 + math.floor(math.log(u[i]) / math.log(0.9))
        power, total = probe[i], 0.0
        for k in range(1, count + 1):
            power = jacobian[i] @ power
            total = total + (-1) ** (k + 1) * (probe[i] @ power).item() / k / 0.9 ** (k - 1)
        item_is(found[i], total, abs=1e-12)


def test_rows_drop_out_to_powers_of_two():
    """A GPU tunes its convolutions to every new size: with any number of rows a step took twenty
    seconds.
    """
    sizes = []

    class Watched(nn.Linear):
        def forward(self, x):
            sizes.append(len(x))
            return 0.1 * super().forward(x)

    Residual(9, Watched(9, 9), 0.9, "roulette")(torch.randn(300, 9), seed=0)
    assert {300, 256, 16} <= set(sizes) <= {300, *(2**k for k in range(9))}

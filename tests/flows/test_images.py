"""Flows of images: whole models against the Jacobian of all their noise, bits, classes."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.utils._pytree import tree_flatten, tree_unflatten

from bayou.core import rng
from bayou.flows import (
    ActNorm,
    Affine,
    BoundedAffine,
    Dequantize,
    DiagonalNormal,
    Flow,
    ImageCoupling,
    Ladj,
    Side,
    Sigmoid,
    Squeeze,
    StandardNormal,
    Uniform,
    bits_per_dim,
    conv_net,
    dequantizer,
    fit,
    flowpp_image,
    gated_net,
    glow_image,
    image_flow,
    split_channels,
)
from bayou.flows.models.images import rotation
from tests.flows.tools import (
    LIKE,
    built,
    close,
    identical,
    item_is,
    perturb,
    refuses,
    seeded,
    standard,
)

EVENT = (1, 4, 4)
NET = partial(conv_net, hidden=4)


def glow(hidden=4, **options):
    """One step at each of two levels."""
    return glow_image(EVENT, levels=2, steps=1, hidden=hidden, **options)


def model(*dequantization, **options):
    return built(lambda: image_flow(glow(**options), *dequantization))


def pixels(n, event=EVENT, levels=256):
    return torch.randint(0, levels, (n, *event), generator=seeded(0))


# --- whole models -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: glow_image(EVENT, levels=2, steps=2, hidden=4),
        lambda: flowpp_image(EVENT, levels=2, steps=2, hidden=4, blocks=1, components=3, heads=2),
        lambda: flowpp_image(
            (2, 2, 4), levels=1, steps=2, hidden=4, blocks=1, components=2, heads=0
        ),
    ],
)
def test_the_density_is_that_of_all_noise_through_the_jacobian(make):
    """log p(y) = log N(z; 0, I) − log|det ∂y/∂z|, z the noise of the base and of every split."""
    chain = perturb(built(make), 0.1).eval()
    flow = Flow(StandardNormal(chain.event_in).double(), chain)
    x = flow.base.draw(1, seed=0)[0]
    noise, structure = tree_flatten(chain.noise(x, seed=0))
    pieces = [x, *noise]
    sizes = [piece.numel() for piece in pieces]

    def image(z):
        first, *rest = (
            part.reshape(p.shape) for part, p in zip(z.split(sizes), pieces, strict=True)
        )
        return chain(first, noise=tree_unflatten(rest, structure))[0].flatten()

    z = torch.cat([piece.flatten() for piece in pieces])
    assert z.numel() == 16
    jacobian = torch.autograd.functional.jacobian(image, z)
    expected = StandardNormal(16).double().log_prob(z) - torch.linalg.slogdet(jacobian)[1]
    y = image(z).reshape(chain.event_out)
    item_is(flow.log_prob(y), expected.item(), abs=1e-9)
    assert flow.kind is Ladj.exact


def test_a_squeeze_is_pixel_unshuffle():
    x = torch.arange(2 * 3 * 4 * 6.0).reshape(2, 3, 4, 6)
    y, term = Squeeze((3, 4, 6))(x)
    identical(y, F.pixel_unshuffle(x, 2))
    identical(term, torch.zeros(2))


@pytest.mark.parametrize("flip", [False, True])
def test_a_checkerboard_keeps_every_second_pixel(flip):
    coupling = perturb(
        built(lambda: ImageCoupling((2, 4, 6), Affine(), "checkerboard", flip, NET)), 0.1
    )
    x = rng.normal(3, (2, 4, 6), LIKE, 0)
    even = (torch.arange(4)[:, None] + torch.arange(6)) % 2 == 0
    identical(coupling(x)[0] == x, (even != flip).expand_as(x))


def test_a_rotation_is_one_and_starts_another_way_each_time():
    first, second = (rotation(6, seed).double() for seed in (0, 1))
    lower, upper = first.weight.factors()
    w = lower @ upper
    close(w @ w.T, torch.eye(6).double(), atol=1e-5)
    item_is(first.weight.log_diagonal.sum(), 0.0, abs=1e-5)
    assert not torch.equal(first.weight.lower, second.weight.lower)


def test_act_norm_standardizes_channels():
    norm = ActNorm((3, None, None)).double()
    scale = torch.tensor([1.0, 5.0, 0.1])[:, None, None]
    y = 2 + scale * rng.normal(10, (3, 4, 4), LIKE, 0)
    x, ladj = norm.inverse(y)
    close(x.mean((0, 2, 3)), 0)
    close(x.square().mean((0, 2, 3)), 1)
    item_is(ladj[0], -16 * norm.log_scale.sum().item())
    assert set(norm.state_dict()) == set(ActNorm(3).state_dict())


def test_a_coupling_in_half_precision_is_still_exact():
    coupling = built(
        lambda: ImageCoupling((2, 4, 4), Affine(), net=partial(conv_net, hidden=8, half=True))
    )
    with torch.no_grad():
        coupling.net[-1].weight.normal_(0, 0.3, generator=seeded(0))
    x = rng.normal(4, (2, 4, 4), torch.zeros(()), 0)
    y, ladj = coupling(x)
    back, opposite = coupling.inverse(y)
    whole = built(lambda: ImageCoupling((2, 4, 4), Affine(), net=partial(conv_net, hidden=8)))
    whole.load_state_dict(coupling.state_dict())
    assert y.dtype == ladj.dtype == torch.float32
    close(back, x, atol=1e-5)
    close(ladj, -opposite, atol=1e-5)
    assert 1e-4 < (whole(x)[0] - y).abs().max() < 0.1  # it did compute in half


@pytest.mark.parametrize("net", [conv_net, partial(gated_net, blocks=1, heads=0)])
def test_a_step_of_adam_moves_wide_networks_no_further_than_narrow_ones(net):
    """A Glow of 48 couplings with 256 hidden channels was infinite after one step of 1e-3."""
    x = rng.normal(2, (3, 4, 4), torch.zeros(()), 0)

    def moved(hidden):
        conditioner = built(lambda: net((3, 4, 4), 6, hidden=hidden))
        optimizer = torch.optim.Adam(conditioner.parameters(), 1e-3)
        conditioner(x).sum().backward()
        optimizer.step()
        return float(conditioner(x).detach().abs().mean())

    assert moved(256) < 1.5 * moved(64)


# --- bits ---------------------------------------------------------------------------------------


def test_a_uniform_model_scores_eight_bits():
    flow = Flow(Uniform((3, 4, 4)), Dequantize((3, 4, 4), 256))
    for samples in (1, 3):
        bits = bits_per_dim(flow, pixels(5, (3, 4, 4)).to(torch.uint8), samples)
        assert bits.shape == (5,)
        close(bits, 8.0, atol=1e-5)
    drawn = flow.sample(100, seed=0)
    identical(drawn, drawn.floor())
    assert (drawn.min() >= 0) & (drawn.max() < 256)


def test_bits_do_not_depend_on_the_batch():
    flow = perturb(model(16, "variational"), 0.05)
    y = pixels(5, levels=16)
    whole, parts = bits_per_dim(flow, y, 2), bits_per_dim(flow, y, 2, batch_size=2)
    close(whole, parts, atol=1e-10)
    assert (flow.kind, flow.label.inverse) == (Ladj.bound, Side.lower)
    assert not torch.equal(whole, bits_per_dim(flow, y, 2, seed=1))


def test_variational_dequantization_starts_uniform_and_closes_its_gap():
    """Bin [0, 1) of N(.5, .25²): log-mass −.0465679, uniform dequantization −.1993108, a learned
    one in between.
    """
    q = built(lambda: dequantizer((1, 2, 2), 2, steps=4, hidden=8)).double()
    flow = Flow(DiagonalNormal((1, 2, 2), 0.5, 0.25).double(), Dequantize((1, 2, 2), q=q))
    y = torch.zeros(64, 1, 2, 2, dtype=torch.float64)
    u, log_q = q.draw(rng.uniform(64, (1, 2, 2), y, 0), y, 3)
    close(log_q, 0, atol=1e-9)
    assert (u.min() > 0) & (u.max() < 1)

    def bound():
        return flow.log_prob(y.repeat(64, 1, 1, 1), seed=1).mean().item() / 4

    assert bound() == pytest.approx(-0.1993108, abs=0.01)
    optimizer = torch.optim.Adam(q.parameters(), 1e-2)
    for step in range(40):
        optimizer.zero_grad()
        (-flow.log_prob(y, seed=rng.fold(2, step)).mean()).backward()
        optimizer.step()
    with torch.no_grad():
        assert -0.1 < bound() < -0.04656


def test_more_dequantization_samples_tighten_the_bound():
    flow = model()
    y = pixels(200)
    flow.log_prob(y.float())  # training mode: act norm takes its statistics
    flow.eval()
    one, many = (bits_per_dim(flow, y, samples).mean().item() for samples in (1, 20))
    assert many < one - 1e-4


def test_bits_per_dim_does_not_initialize_act_norm():
    flow = model()
    before = {key: value.clone() for key, value in flow.state_dict().items()}
    bits_per_dim(flow, pixels(5))
    assert flow.training
    assert all(torch.equal(value, before[key]) for key, value in flow.state_dict().items())


def test_samples_are_images_and_depend_on_their_index():
    flow = model(17)
    flow.log_prob(pixels(20, levels=17).float())  # act norm takes its statistics
    drawn = flow.eval().sample(20, seed=0)
    assert drawn.shape == (20, 1, 4, 4)
    identical(drawn, drawn.round())
    identical(flow.sample(5, seed=0, start=3), drawn[3:8])
    extreme = perturb(flow, 1.0).sample(20, seed=0)  # pixels are rounded to 0 and 1
    for images in (drawn, extreme):
        assert images.min() >= 0
        assert images.max() <= 16


def test_densities_and_draws_by_class():
    flow = perturb(model(8, hidden=8, context_dim=3), 0.2).eval()
    y, classes = pixels(4, levels=8).double(), torch.eye(3).double()
    by_class = flow.log_prob(y[:, None].expand(-1, 3, -1, -1, -1), classes, seed=0)  # (4, 3)
    assert (by_class.std(1) > 1e-3).all()
    expected = bits_per_dim(flow, y, context=classes[1], batch_size=3)
    close(bits_per_dim(flow, y, context=classes[[1, 1, 1, 1]]), expected, atol=1e-10)
    assert not torch.allclose(bits_per_dim(flow, y, context=classes[0]), expected, atol=1e-3)
    drawn = flow.sample(8, classes, seed=0)  # one noise for each
    assert drawn.shape == (8, 3, 1, 4, 4)
    again = flow.sample(8, classes.flip(0), seed=0)
    assert not torch.equal(drawn, again)
    identical(drawn[:, 1], again[:, 1])
    with pytest.raises(ValueError, match=r"needs a context \(\.\.\., 3\) but got none"):
        flow.log_prob(y)


def test_a_class_is_learned():
    """Black images of class 0, white ones of class 1."""
    flow = model(16, hidden=8, context_dim=2)
    context = torch.eye(2).repeat(64, 1)
    y = 15 * context[:, 1:, None, None].expand(-1, -1, 4, 4)
    fit(flow, y, context=context, steps=60, lr=1e-2, batch_size=64, validation=0, progress=False)
    right, wrong = (
        bits_per_dim(flow, y, context=c).mean().item() for c in (context, context.flip(-1))
    )
    assert right < wrong - 0.5
    shades = flow.sample(20, torch.eye(2), seed=0).mean((0, 2, 3, 4))
    assert shades[1] > shades[0] + 3


# --- bad input ----------------------------------------------------------------------------------


def small():
    return Flow(Uniform(EVENT), Dequantize(EVENT, 256))


test_bad_input = refuses(
    (lambda: Squeeze((1, 7, 8)), r"even height and width, got 7×8 of \(1, 7, 8\); pad or crop"),
    (lambda: Squeeze((8, 8)), r"images \(channels, height, width\), got \(8, 8\)"),
    (lambda: glow_image((1, 28, 28), levels=3), "even height and width, got 7×7"),
    (lambda: ImageCoupling(EVENT, Affine()), "needs two"),
    (lambda: ImageCoupling((1, 3, 4), Affine(), "checkerboard"), "a checkerboard needs an even height"),
    (lambda: ImageCoupling((2, 4, 4), Affine(), "half"), "mask must be"),
    (lambda: flowpp_image(EVENT, hidden=6, heads=4), "multiple of the number of heads, got 6 and 4"),
    (lambda: glow_image(EVENT, 1, context_dim=-1), "context_dim=-1; pass at most one"),
    (lambda: ImageCoupling((2, 4, 4), Affine(), context=1, context_dim=2), "pass at most one"),
    (lambda: bits_per_dim(model(context_dim=3), pixels(2), context=torch.zeros(5, 3)), "2 images and contexts"),
    (lambda: model(context_dim=3).log_prob(torch.zeros(2, 1, 4, 4), torch.tensor([0, 1])), r"or one_hot\(k, n\)"),
    (lambda: split_channels((1, 2, 2)), "needs 0 < keep <"),
    (lambda: Sigmoid((1, 2, 2), 0.5), r"margin of Sigmoid lies in \[0, 0.5\)"),
    (lambda: Sigmoid((1, 1, 1)).inverse(torch.full((1, 1, 1), 255.0)), r"lie in \(0, 1\), got 255 to 255"),
    (lambda: image_flow(Sigmoid((1, 2, 2)), 256, "normal"), "dequantize must be"),
    (lambda: small().log_prob(pixels(1)), r"must be floating point, got torch.int64; use x.float\(\)"),
    (lambda: bits_per_dim(model(), torch.full((1, 1, 4, 4), 256)), "takes 0 to 255, got 256"),
    (lambda: fit(model(), torch.full((8, 1, 4, 4), 256.0), progress=False), "takes 0 to 255, got 256"),
    (lambda: glow().inverse(torch.full(EVENT, 2.0)), "got 2 to 2; divide pixels"),
    (lambda: bits_per_dim(small(), pixels(1, (4, 4))), r"tensor \(rows, 1, 4, 4\), got \(1, 4, 4\)"),
    (lambda: bits_per_dim(standard(Sigmoid(EVENT)), pixels(1)),
     "density of real numbers"),
)  # fmt: skip


def test_the_inverse_of_a_bounded_affine_map_expands_little():
    """From data to noise: sigmoid(q + 2)/sigmoid(2), the identity at p = 0, and never above
    1/sigmoid(2).

    q = 8·tanh(p/8): from noise to data a scale was infinite where a network said −1,000.
    """
    p = torch.stack([torch.zeros(101), torch.linspace(-30, 30, 101)], -1).double()
    y = torch.linspace(-3, 3, 101).double()
    x, log_slope = BoundedAffine().inverse(y, p)
    q = 8 * torch.tanh(p[:, 1] / 8)
    torch.testing.assert_close(
        log_slope.exp(), torch.sigmoid(q + 2) / torch.sigmoid(torch.tensor(2.0).double())
    )
    torch.testing.assert_close(x, y * log_slope.exp())
    torch.testing.assert_close(BoundedAffine().forward(x, p)[0], y)
    assert float(log_slope.exp().max()) < 1.136
    assert float(BoundedAffine().forward(y, 1e4 * p)[1].exp().max()) < 400

"""The conformance suite of flows: flows of vectors in several dimensions, initially and after
training, then all other maps. A new map is tested once it is in ``flows/_registry.py``; further
variants are in ``variants.py``.
"""

import inspect
from functools import partial

import pytest
import torch

from bayou import flows
from bayou.core import rng
from bayou.flows._registry import registry
from bayou.flows.checking.check import resolve_event
from bayou.flows.core.compose import Chain, Conditional, Inverse
from bayou.flows.core.transform import Ladj, Map, Side
from tests.conformance.flow_properties import check
from tests.conformance.training import check_trained, random_training
from tests.conformance.variants import VARIANTS
from tests.flows.tools import built, perturb

DIMS = (1, 2, 5, 16)
STEPS = 10
MATHEMATICS = ("inverse", "ladj", "gradcheck", "gradgradcheck", "vmap", "batch")
FLOWS = {name: entry.build for name, entry in registry("vector").items()}
NEED_TWO = {"nice", "realnvp", "gated", "gated_resampled", "glow", "flowpp", "spline_coupling"}
WITHOUT_PARAMETERS = {"reverse", "shuffle"}
WITHOUT_FREEDOM = {("householder", 1)}  # a reflection of the line is −1
CASES = [(name, dim) for name in FLOWS for dim in DIMS if dim > 1 or name not in NEED_TWO]
UNINTEGRATED = {"conv1x1", "pixelcnn", "gated_resampled"}  # images of 2×2 pixels; a bound
# One of a kind: an elementwise map, a triangular solve, a coupling, masks, a search of bins. All
# others are slow.
ONE_GRAPH = ("act_norm", "lu_linear", "realnvp", "maf", "spline_coupling")
# Of what is one graph, code is generated for a search of bins and for a solver: it takes most of a
# minute.
GENERATED = ("spline_coupling", "residual")
SMALL = {  # a solver of few steps, a series of few terms
    "continuous": {"hidden": [8], "steps": 6},
    "residual": {"layers": 2, "hidden": [8], "lipschitz": 0.5},
}
# In the quick suite two layers, one of each parity, stand for the stack of them that a constructor
# makes by default.
FEWER = {"naf": {"layers": 1, "hidden": [16], "units": 4}}
# Larger networks: before training, and at other dimensions, they are among the slow ones below.
CAUSAL = {"wavenet", "pixelcnn", "transformer_flow"}


def quick(name, dim, steps):
    """Whether a case is in the quick suite."""
    if name in CAUSAL:
        return bool(steps) and dim == 2
    if name in SMALL:
        return bool(steps) and dim in (2, 5)
    return dim == 2 or (bool(steps) and dim < 16)


def build(name, dim, seed=0, whole=False):
    """The flow, the same at every call, whatever its constructor draws from the global stream."""
    options = SMALL.get(name, {})
    if not options and not whole and "layers" in inspect.signature(FLOWS[name]).parameters:
        options = FEWER.get(name, {"layers": 2})
    return built(lambda: FLOWS[name](dim, **options), seed)


def holds(transform, *dim, **options):
    """The report of ``check_trained``, without failures."""
    report = check_trained(transform, *dim, **options)
    report.raise_if_failed()
    return report


def passes(name, dim, whole=False, **options):
    fresh = partial(build, name, dim, 1, whole)
    return holds(build(name, dim, whole=whole), dim, fresh=fresh, perturb=0.0, **options)


# The largest, and others than the smallest before training, are among the slow ones below; so is
# most of what solves.
QUICK = [(*case, steps) for case in CASES for steps in (0, STEPS) if quick(*case, steps)]


@pytest.mark.parametrize(("name", "dim", "steps"), QUICK)
def test_inverse_ladj_density_and_gradients(name, dim, steps):
    report = passes(name, dim, only=["inverse", "ladj", "density", "gradcheck"], train_steps=steps)
    assert ("skipped" in report["density"].note) == (name in UNINTEGRATED or dim > 2), str(report)


@pytest.mark.parametrize(("name", "dim"), [case for case in CASES if case[1] < 3])
def test_parameters_have_an_effect(name, dim):
    flow = build(name, dim).double()
    unmoved = name in WITHOUT_PARAMETERS or (name, dim) in WITHOUT_FREEDOM
    assert random_training(flow, resolve_event(flow, dim), 3) != unmoved


@pytest.mark.parametrize("name", FLOWS)
def test_vmap_dtype_state_tails_and_batch(name):
    passes(name, 5, only=["vmap", "dtype", "state_dict", "tails", "batch"], train_steps=STEPS)


@pytest.mark.parametrize("name", FLOWS)
def test_second_derivatives_in_both_directions(name):
    """``test_maps_of_all_kinds`` includes those of all other maps."""
    report = check(build(name, 2), only=["gradgradcheck"])
    for direction in ("forward", "inverse"):
        value = report[f"gradgradcheck {direction}"].value
        # also of a solver, for which ``check`` allows more
        assert value is not None, str(report)
        assert value < 1e-6, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dim", "steps"),
    [(name, dim, steps) for name, dim in CASES for at, steps in ((5, 0), (16, STEPS)) if dim == at],
)
def test_everything_but_compile(name, dim, steps):
    passes(name, dim, whole=True, skip=["compile"], train_steps=steps, seed=1)


def shallow(name):
    """The flow with one layer, RealNVP with two: a compiler unrolls them all, and the loops of root
    finding too.
    """
    options = {}
    if name == "continuous":
        options = {"hidden": [8], "steps": 2}
    elif "layers" in inspect.signature(FLOWS[name]).parameters:
        options = {"layers": 2 if name == "realnvp" else 1}
    return built(lambda: FLOWS[name](2, **options))


def slow_but(*quick):
    """The name of a flow or map as a parameter, slow unless it is one of these."""
    return lambda name: pytest.param(name, marks=[pytest.mark.slow] * (name not in quick))


@pytest.mark.parametrize("name", [*map(slow_but(*ONE_GRAPH), FLOWS)])
def test_compiles_to_one_graph(name):
    holds(shallow(name), only=["compile"], compile_backend="eager", train_steps=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_compiles_with_inductor(name):
    holds(shallow(name), only=["compile"], compile_backend="inductor", train_steps=2)


@pytest.mark.parametrize("name", sorted(NEED_TWO))
def test_a_coupling_of_one_dimension_is_refused(name):
    with pytest.raises(ValueError, match=r"at least 2 dimensions, got 1; in one dimension use"):
        build(name, 1)


@pytest.mark.parametrize("name", FLOWS)
def test_no_flow_has_less_than_one_dimension(name):
    with pytest.raises(ValueError, match="0"):
        build(name, 0)


def test_the_resampled_gate_is_exact_with_a_fixed_mask():
    flow = build("gated_resampled", 2)
    assert flow.ladj_kind is Ladj.bound
    flow.ladj_kind = Ladj.exact
    report = holds(flow, only=["ladj", "density"], train_steps=STEPS)
    assert "skipped" not in str(report)


CONDITIONAL = ["nice", "realnvp", "gated", "glow", "spline_coupling", "maf", "iaf", "spline_autoregressive",
               "maf_residual", "gated_resampled", "continuous"]  # fmt: skip
LARGER = ["flowpp", "naf", "tan", "wavenet", "transformer_flow"]


@pytest.mark.parametrize("name", [*map(slow_but(*CONDITIONAL), (*CONDITIONAL, *LARGER))])
def test_flows_that_take_a_context(name):
    constructor = FLOWS[name]
    flow = built(lambda: constructor(2, context_dim=3, **SMALL.get(name, {"layers": 2})))
    assert flow.context_dim == 3
    holds(flow, only=MATHEMATICS, train_steps=STEPS)
    contexts = torch.tensor([[1.0, 2.0, 3.0], [0.0, -1.0, 2.0]]).double()
    y, _ = perturb(flow).eval()(torch.zeros(2).double(), contexts)
    assert not torch.equal(y[0], y[1]), "the context has no effect"


@pytest.mark.parametrize("name", ["diagonal_affine", "lu_linear", "planar"])
def test_conditional_flows(name):
    holds(Conditional(build(name, 2), 3), only=MATHEMATICS, rows=4, train_steps=STEPS)


def test_chains_of_different_kinds():
    parts = [build(name, 2) for name in ("lu_linear", "planar", "realnvp", "maf", "act_norm")]
    for chain in (Chain(*parts), Inverse(Chain(*parts))):
        holds(chain, only=MATHEMATICS, train_steps=STEPS)


# --- maps of all kinds --------------------------------------------------------------------------

OTHERS = {name: entry for name, entry in registry().items() if name not in FLOWS} | VARIANTS
SIZES = {"argmax": 1, "binary_argmax": 1, "flowpp_image": 1, "glow_image": 1, "max": 3, "pointwise": 1, "sigmoid": 1,
         "sort": 3, "squeeze": 1, "random_order": 3}  # else 2  # fmt: skip
SKIPPED = {
    "dequantize an image": [
        "tails",
        "dtype",
    ],  # tails are outside of its levels; half precision rounds into others
    "mixture, gates and attention": ["vmap", "tails"],
}
COMPILED = (
    "image_coupling",
    "binary_argmax",
    "modulo_coupling",
    "one_hot",
)  # in the quick suite, one of a kind


def build_map(name):
    """A map and the options of ``check`` for it; maps of integers are perturbed, not trained."""
    entry, size = OTHERS[name], SIZES.get(name, 2)
    with rng.isolated(0, torch.device("cpu")):
        transform = entry.build(size)
        base = None if entry.base is None else perturb(entry.base(size))
    if entry.kind == "discrete":
        return perturb(transform), {"base": base}
    return transform, {"base": base, "train_steps": 3}


LONG = {"residual images, roulette", "continuous, hutchinson", "transformer, patches"}


@pytest.mark.parametrize("name", [*map(slow_but(*OTHERS.keys() - LONG), OTHERS)])
def test_maps_of_all_kinds(name):
    transform, options = build_map(name)
    skip = ["compile", *SKIPPED.get(name, [])]
    holds(transform, skip=skip, **options)
    label, is_random = transform.label, transform.takes_noise
    has_exact_inverse = Side.equal in (label.inverse, transform.opposite.inverse)
    kinds = {
        "bijective": label.kind is (Ladj.estimate if is_random else Ladj.exact),
        "surjective": is_random and has_exact_inverse,
        "stochastic": is_random and not has_exact_inverse,
        "discrete": transform.whole_in and transform.whole_out and label.kind is Ladj.exact,
    }
    assert kinds[OTHERS[name].kind], f"{name} is not {OTHERS[name].kind}: {label}"


# Compiled in both directions, so that an inverse adds nothing. Of the other forms those with a
# graph of their own: a context, attention, an estimate of the ladj. The inverse of a roulette is a
# loop until it converges: no graph.
FORMS = ("amortized, iaf", "pixelcnn, given", "transformer, patches", "continuous, hutchinson",
         "checkerboard, given an image", "mixture, gates and attention", "dequantizer", "glow, given a class",
         "dequantize, learned", "slice, conditional", "sort, tied", "integers, given",
         "modulo, autoregressive, given")  # fmt: skip
WHOLE = [name for name in OTHERS if name not in VARIANTS or name in FORMS]


@pytest.mark.parametrize("name", [*map(slow_but(*COMPILED), WHOLE)])
def test_maps_of_all_kinds_compile_to_one_graph(name):
    transform, options = build_map(name)
    holds(transform, only=["compile"], compile_backend="eager", **options)


def test_every_map_is_listed():
    """All maps but compositions are part of what ``registry()`` builds."""
    composed = {flows.Chain, flows.Inverse, flows.Conditional}
    public = {value for name in flows.__all__ if isinstance(value := getattr(flows, name), type)}
    maps = {kind for kind in public if issubclass(kind, Map) and not inspect.isabstract(kind)}
    listed = set()
    for name, entry in registry().items():
        listed |= {type(part) for part in entry.build(SIZES.get(name, 2)).modules()}
    assert maps - composed <= listed, maps - composed - listed
    assert set(registry("discrete")) < set(registry())

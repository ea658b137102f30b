"""Exported flows give the log-densities and draws of the flow, for every number of rows."""

import inspect
import sys

import pytest
import torch

from bayou.flows import (
    Chain,
    Conditional,
    Continuous,
    Cost,
    Flow,
    GaussianMixture,
    LULinear,
    StandardNormal,
    TimeMLP,
    Uniform,
    planar,
    realnvp,
    registry,
)
from bayou.flows.core.bases import Base
from bayou.flows.surjections.quantization import Dequantize
from bayou.operations.export_flow import export_flow, export_flow_onnx, flow_inputs
from tests.flows.tools import built, perturb

DIM = 4
SMALL = {"continuous": {"hidden": [8], "steps": 2}, "residual": {"layers": 2, "hidden": [8], "lipschitz": 0.5}}  # fmt: skip
ROWS = (5, 1)


class Drawn(Base):
    """A base that draws without a function of noise."""

    def draw(self, n, batch=(), seed=None, start=0):
        return torch.zeros(n, *batch, *self.event_shape)

    def log_prob(self, x):
        return x.sum(-1)


def trained(flow):
    """Return a flow whose maps are not the identity, in single precision."""
    return perturb(flow).float().eval()


def realnvp_flow():
    return trained(Flow(StandardNormal(DIM), built(lambda: realnvp(DIM, layers=2, hidden=(8,)))))


def conditional_flow():
    transform = built(lambda: realnvp(DIM, layers=2, hidden=(8,), context_dim=2))
    return trained(Flow(StandardNormal(DIM), transform))


def hypernetwork_flow():
    transform = built(lambda: Conditional(LULinear(DIM), context_dim=2, hidden=(8,)))
    return trained(Flow(StandardNormal(DIM), transform))


def mixture_flow():
    return trained(Flow(GaussianMixture(DIM, 3), built(lambda: LULinear(DIM))))


def ode_flow():
    field = built(lambda: TimeMLP(DIM, hidden=[8]))
    return trained(Flow(Uniform(DIM), Continuous(DIM, field, steps=2)))


def dequantized_flow():
    coupling = built(lambda: realnvp(DIM, layers=2, hidden=(8,)))
    return trained(Flow(StandardNormal(DIM), Chain(coupling, Dequantize(DIM))))


FLOWS = {
    "realnvp": realnvp_flow,
    "context": conditional_flow,
    "hypernetwork": hypernetwork_flow,
    "mixture": mixture_flow,
    "ode": ode_flow,
    "dequantized": dequantized_flow,
}


def expected(flow, part, rows, context, seed):
    """Return the inputs and the answers of the flow itself."""
    inputs = flow_inputs(flow, rows, part, context=context, seed=seed)
    with torch.no_grad():
        if part == "log_prob":
            return inputs, (flow.log_prob(inputs["y"], context, seed=seed),)
        shape = rows if context is None else ()
        return inputs, flow.sample_and_log_prob(shape, context, seed=seed)


def assert_answers(found, wanted):
    for value, reference in zip(found, wanted, strict=True):
        assert value.shape == reference.shape
        scale = 1 + float(reference.abs().max())
        assert float((value - reference).detach().abs().max()) <= 2e-5 * scale


def assert_program(flow, part, run):
    for rows in ROWS:
        context = None
        if flow.transform.context_dim:
            context = torch.randn(rows, flow.transform.context_dim)
        inputs, wanted = expected(flow, part, rows, context, seed=3)
        assert_answers(run(inputs), wanted)


@pytest.mark.parametrize("part", ["log_prob", "sampler"])
@pytest.mark.parametrize("name", ["realnvp", "context", "mixture", "dequantized"])
def test_programs_are_the_flow(name, part):
    flow = FLOWS[name]()
    module = export_flow(flow, part).module()
    assert_program(flow, part, lambda inputs: module(*inputs.values()).values())


def test_saved_program_needs_no_bayou(tmp_path):
    flow = realnvp_flow()
    torch.export.save(export_flow(flow), tmp_path / "density.pt2")
    program = torch.export.load(tmp_path / "density.pt2")
    y = flow.sample(9, seed=0)
    assert_answers(program.module()(y).values(), (flow.log_prob(y).detach(),))
    assert "bayou" not in str(program.graph_module.code)


def test_inputs_are_named_by_their_distribution():
    assert list(flow_inputs(mixture_flow(), 3)) == ["normal0", "uniform1"]
    assert list(flow_inputs(dequantized_flow(), 3, "log_prob")) == ["y", "uniform0"]
    context = torch.ones(3, 2)
    inputs = flow_inputs(conditional_flow(), 3, context=context)
    assert list(inputs) == ["context", "normal0"]
    assert inputs["context"] is context
    assert inputs["normal0"].shape == (3, DIM)
    with pytest.raises(ValueError, match="5 rows need a context of as many rows, got 3"):
        flow_inputs(conditional_flow(), 5, context=context)


def test_draws_by_index_are_the_same_in_parts():
    flow = realnvp_flow()
    whole = flow_inputs(flow, 6, seed=1)["normal0"]
    assert torch.equal(flow_inputs(flow, 4, seed=1, start=2)["normal0"], whole[2:])


def test_what_depends_on_parameters_alone_is_a_constant():
    flow = trained(
        Flow(StandardNormal(DIM), registry()["sylvester_orthogonal"].build(DIM, layers=2))
    )
    program = export_flow(flow, "sampler")
    assert not any("linalg" in str(node.target) for node in program.graph.nodes)
    module = program.module()
    assert_program(flow, "sampler", lambda inputs: module(*inputs.values()).values())


def adaptive_flow():
    return Flow(StandardNormal(2), Continuous(2, TimeMLP(2, hidden=[8]), solver="dopri5"))


@pytest.mark.parametrize(
    ("flow", "part", "message"),
    [
        (lambda: Flow(StandardNormal(2), planar(2)), "log_prob", "found by iteration.*its sampler"),
        (adaptive_flow, "sampler", "depends on the values; use flow itself"),
        (realnvp_flow, "samples", "parts log_prob, sampler, got 'samples'"),
        (lambda: Flow(Drawn(2), realnvp(2)), "sampler", "Drawn is not a function of noise"),
    ],
)
def test_flows_without_a_program_raise(flow, part, message):
    with pytest.raises(ValueError, match=message):
        export_flow(flow(), part)


def test_missing_onnx_raises_with_the_command_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"needs onnxscript, .* pip install 'bayou\[onnx\]'"):
        export_flow_onnx(realnvp_flow(), tmp_path / "a.onnx")


def onnx_runner(flow, part, path):
    """Return a function that runs the file of a flow on inputs by name."""
    from onnxruntime import InferenceSession

    session = InferenceSession(export_flow_onnx(flow, path, part))
    names = ["log_prob"] if part == "log_prob" else ["y", "log_prob"]
    assert [output.name for output in session.get_outputs()] == names

    def run(inputs):
        feed = {name: value.numpy() for name, value in inputs.items()}
        return [torch.from_numpy(value) for value in session.run(names, feed)]

    return run


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about itself
@pytest.mark.parametrize("part", ["log_prob", "sampler"])
@pytest.mark.parametrize("name", ["realnvp", "context", "mixture", "ode", "dequantized"])
def test_onnx_files_are_the_flow(name, part, tmp_path):
    flow = FLOWS[name]()
    run = onnx_runner(flow, part, tmp_path / "flow.onnx")
    assert [file.name for file in tmp_path.iterdir()] == ["flow.onnx"]
    assert_program(flow, part, run)


LACKING = {("max", "log_prob")}  # a direction whose operations ONNX lacks
# Of the registry: every map takes an hour, since long autoregressive directions are unrolled.
SOME_MAPS = ("lu_linear", "maf", "spline_coupling", "residual", "autoencoder", "modulo", "max")


def registered(name):
    """Return a small flow of a map of the registry."""
    entry = registry()[name]
    options = SMALL.get(name, {})
    if not options and "layers" in inspect.signature(entry.build).parameters:
        options = {"layers": 1}
    transform = built(lambda: entry.build(2, **options))
    if None in transform.event_in:  # of images of any size
        return None
    base = entry.base(2) if entry.base else StandardNormal(transform.event_in)
    return Flow(base, transform).eval()


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("part", ["log_prob", "sampler"])
@pytest.mark.parametrize("name", SOME_MAPS)
def test_a_registered_map_is_exported_or_says_why_not(name, part, tmp_path):
    flow = registered(name)
    if flow is None:
        return
    transform = flow.transform
    kind = transform.inverse_kind if part == "log_prob" else transform.forward_kind
    message = None
    if (name, part) in LACKING:
        message = "ONNX cannot take"
    elif kind is Cost.iterative and name != "continuous":
        message = "found by iteration"
    if message is not None:
        with pytest.raises(ValueError, match=message):
            export_flow_onnx(flow, tmp_path / "flow.onnx", part)
        return
    run = onnx_runner(flow, part, tmp_path / "flow.onnx")
    assert_program(flow, part, run)

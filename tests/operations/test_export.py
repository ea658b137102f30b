"""The exported program says what the posterior says, for every batch size, from a file too."""

import sys
from functools import cache, partial

import pytest
import torch
from torch import nn

import bayou
from bayou.operations.export import export, export_onnx

START = bayou.MAP(steps=8, batch_size=16)
fit = partial(bayou.fit, progress=False)
METHODS = {
    "point": START,
    "ensemble": bayou.Ensemble(3, of=START),
    "mnf": bayou.VI(bayou.MNF(), steps=8),
    "ensemble of VI": bayou.Ensemble(2, of=bayou.VI(steps=8)),
    "gaussian": bayou.SWAG(start=START, steps=30, batch_size=16),
    "last layer": bayou.Laplace(start=START, where="last"),
    "dropout": bayou.MCDropout(start=START),
}
NETS = {
    "mlp": lambda out: nn.Sequential(
        nn.Linear(16, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, out)
    ),
    "conv": lambda out: nn.Sequential(
        *(
            nn.Unflatten(1, (1, 4, 4)),
            nn.Conv2d(1, 3, 3, padding=1),
            nn.BatchNorm2d(3),
            nn.ReLU(),
            nn.Dropout2d(0.3),
        ),
        *(nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, out)),
    ),
}


X = torch.randn(48, 16, generator=torch.Generator().manual_seed(0))
Y = torch.arange(48) % 3
PAIR = (X, X.flip(1))


@cache
def fitted(net, method):
    torch.manual_seed(0)
    return fit(NETS[net](3), (X, Y), METHODS[method])


def compare(program, p, x, tolerance=1e-5):
    found = program.module()(x)
    for name, value in found.items():
        want = p.outputs if name == "outputs" else getattr(p, name)
        scale = 1 + float(want.abs().max())
        assert value.shape == want.shape, name
        assert float((value - want).abs().max()) <= tolerance * scale, name


CASES = [
    ("mlp", "mnf"),
    ("mlp", "last layer"),
    ("mlp", "dropout"),
    ("conv", "gaussian"),
    pytest.param("mlp", "ensemble of VI", marks=pytest.mark.slow),
    pytest.param("conv", "dropout", marks=pytest.mark.slow),
    pytest.param("conv", "ensemble", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("net", "method"), CASES)
def test_programs_predict_as_posteriors(net, method):
    posterior = fitted(net, method)
    samples = min(5, posterior.draws or 5)
    program = export(posterior, X[:3], samples=5, seed=7)
    compare(program, posterior.predict(X, samples, seed=7), X)
    compare(program, posterior.predict(X[:1], samples, seed=7), X[:1])  # any number of rows
    other = posterior.predict(X, samples, seed=8).outputs
    if (posterior.draws or 9) > samples:
        assert not torch.allclose(program.module()(X)["outputs"], other)


@pytest.mark.filterwarnings(
    "ignore:The given buffer is not writable:UserWarning"
)  # of torch up to 2.11
def test_saved_program_needs_no_bayou(tmp_path):
    posterior = fitted("mlp", "mnf")
    torch.export.save(export(posterior, X[:1], samples=4), tmp_path / "a.pt2")  # one row is enough
    program = torch.export.load(tmp_path / "a.pt2")
    compare(program, posterior.predict(X, 4, seed=0), X)
    assert "bayou" not in str(program.graph_module.code)


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(16, 3), nn.Linear(16, 3)

    def forward(self, x, z):
        return self.left(x) + self.right(z)


def regression():
    """Return an ensemble whose members have their own noise, with a temperature."""
    posterior = fit(
        NETS["mlp"](1),
        (X, X[:, :1]),
        METHODS["ensemble"],
        likelihood=bayou.Gaussian(0.3, learn=True),
    )
    posterior.temperature = 1.3
    return posterior


def two_inputs():
    return fit(Two(), (PAIR, Y), bayou.VI(steps=5))


def test_programs_of_regressions():
    posterior = regression()
    program = export(posterior, X[:2])
    compare(program, posterior.predict(X, 3, seed=0), X)
    assert set(program.module()(X)) == {"outputs", "mean", "std"}


@pytest.mark.skipif(
    torch.__version__ < "2.10", reason="torch 2.9 exports guards that it cannot run"
)
def test_programs_of_several_inputs():
    posterior = two_inputs()
    program = export(posterior, tuple(item[:2] for item in PAIR), samples=3)
    expected = posterior.predict(PAIR, 3, seed=0).mean
    assert torch.allclose(program.module()(*PAIR)["mean"], expected, atol=1e-6)


class Branch(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 3)

    def forward(self, x):
        return self.fc(x) if float(x.sum()) > 0 else self.fc(-x)


def linearized(predictive="linearized"):
    return fit(NETS["mlp"](3), (X, Y), bayou.Laplace(start=START, predictive=predictive))


@pytest.mark.parametrize(
    ("posterior", "options", "message"),
    [
        (linearized, {}, r"using\('sampled'\)"),
        (lambda: linearized("probit"), {}, "probit"),
        (regression, {"samples": 0}, "samples must be a whole number of at least 1"),
        (
            regression,
            {"answers": ("mean", "quantiles")},
            "supports outputs, mean, .*not quantiles; for others",
        ),
        (lambda: fit(Branch(), (X, Y), START), {}, "Branch as one graph"),
    ],
)
def test_posteriors_without_a_program_raise(posterior, options, message):
    with pytest.raises(ValueError, match=message):
        export(posterior(), X, **options)


def test_programs_of_linearized_posteriors_are_sampled():
    posterior = linearized()
    program = export(posterior.using("sampled"), X, 3)
    compare(program, posterior.predict(X, 3, seed=0, predictive="sampled"), X)


ONNX_CASES = {
    "vi": lambda: fitted("mlp", "mnf"),
    "dropout": lambda: fitted("mlp", "dropout"),
    "conv": lambda: fitted("conv", "gaussian"),
    "regression": regression,
    "two inputs": two_inputs,
}


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore::FutureWarning")  # of torch about itself
@pytest.mark.parametrize("case", ONNX_CASES)
def test_onnx_files_predict_as_posteriors(case, tmp_path):
    from onnxruntime import InferenceSession

    posterior = ONNX_CASES[case]()
    inputs = {"x": X}
    if case == "two inputs":
        inputs = dict(zip(("x0", "x1"), PAIR, strict=True))
    example = tuple(item[:2] for item in inputs.values())
    path = export_onnx(posterior, tmp_path / "a.onnx", example, 5, seed=7)
    assert [file.name for file in tmp_path.iterdir()] == ["a.onnx"]
    session = InferenceSession(path)
    names = ["mean", "std", "epistemic_std", "entropy", "mutual_information"]
    assert [output.name for output in session.get_outputs()] == names
    for rows in (48, 1):
        feed = {name: item[:rows].numpy() for name, item in inputs.items()}
        batch = tuple(item[:rows] for item in inputs.values())
        p = posterior.predict(batch, min(5, posterior.draws or 5), seed=7)
        for name, value in zip(names, session.run(names, feed), strict=True):
            expected = getattr(p, name)
            torch.testing.assert_close(torch.from_numpy(value), expected, rtol=1e-5, atol=1e-5)


def test_missing_onnx_raises_with_the_command_to_install_it(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"needs onnxscript, .* pip install 'bayou\[onnx\]'"):
        export_onnx(fitted("mlp", "point"), tmp_path / "a.onnx", X)


def numbers(method, net=None):
    """A posterior of a regression with 16 inputs."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 1)) if net is None else net
    y = X[:, :1] + 0.1 * X[:, 1:2]
    return fit(net, (X, y), method, likelihood=bayou.Gaussian(0.1), seed=0)


KINDS = {
    "infinite width": lambda: numbers(bayou.methods.Wide()),
    "variational last layer": lambda: numbers(bayou.methods.VBLL(steps=5)),
    "exact last layer": lambda: numbers(
        bayou.Laplace("full", where="last", start=START, predictive="exact")
    ),
    "joint flow": lambda: numbers(bayou.VI(bayou.JointFlow(), steps=3)),
    "mixture": lambda: bayou.Mixture([numbers(START), numbers(bayou.VI(steps=3))]),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param(kind, marks=pytest.mark.slow if kind == "infinite width" else ())
        for kind in KINDS
    ],
)
def test_kinds_of_posteriors_of_numbers(kind):
    """A closed form becomes an average over draws, that of ``predict`` with ``samples``."""
    posterior = KINDS[kind]()
    program = export(posterior, X[:3], samples=4, seed=7)
    compare(program, posterior.predict(X[:7], 4, seed=7), X[:7])


def test_what_cannot_be_exported_says_what_to_do():
    linearized = numbers(bayou.Laplace(start=START))
    two_nets = bayou.Mixture([numbers(START), numbers(START, net=nn.Linear(16, 1))])
    probit = fitted("mlp", "last layer").using("probit")
    for posterior, advice in (
        (linearized, r"export posterior.using\('sampled'\)"),
        (two_nets, "export its components one by one"),
        (probit, r"export posterior.using\('linearized'\)"),
    ):
        with pytest.raises(ValueError, match=advice):
            export(posterior, X[:3], samples=4)

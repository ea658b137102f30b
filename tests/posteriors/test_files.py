"""Files: round trips, and everything that can be wrong with one."""

import errno
import io
import json
import os
import pickle
import random
import re
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
import safetensors.torch
import torch
from torch import nn

import bayou
from bayou import flows
from bayou.core import files
from bayou.core.files import join, pack, read_file, split, write_file
from bayou.core.specs import from_json, to_json
from bayou.guides.guide import GuideSpec
from bayou.priors import DensityPrior, Prior

X = torch.linspace(-1, 1, 12).unsqueeze(-1)
Y = X**2


def net(hidden=3):
    return nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))


def fitted(guide=None, network=None, **options):
    torch.manual_seed(0)
    options = {"likelihood": bayou.Gaussian(0.2)} | options
    method = bayou.VI(guide or bayou.MeanField(), steps=4, lr=0.01)
    return bayou.fit(network or net(), (X, Y), method=method, progress=False, **options)


@pytest.fixture(scope="module")
def posterior():
    return fitted()


@pytest.fixture
def file(posterior, tmp_path):
    posterior.save(tmp_path / "model.bayou")
    return tmp_path / "model.bayou"


def crooked(dim):
    return flows.realnvp(dim, layers=1)


# --- round trips -----------------------------------------------------------------------------------------------------


class Adapter(nn.Module):
    """A frozen layer in bfloat16 and a trained one in float32."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(1, 3, dtype=torch.bfloat16).requires_grad_(False)
        self.aside = nn.Linear(1, 3)

    def forward(self, x):
        return self.base(x).float().sum(-1, keepdim=True) + self.aside(x.float()).sum(
            -1, keepdim=True
        )


@pytest.mark.parametrize(
    "method", [bayou.VI(steps=2), bayou.MAP(steps=2), bayou.Laplace("diagonal", start=None)]
)
def test_every_tensor_comes_back_in_its_own_dtype(method, tmp_path):
    torch.manual_seed(0)
    data = X.bfloat16(), Y.float()
    made = bayou.fit(Adapter(), data, method=method, likelihood=bayou.Gaussian(0.2), progress=False)
    made.save(tmp_path / "a.bayou")
    torch.manual_seed(0)
    back = bayou.load(tmp_path / "a.bayou", Adapter())
    before, after = made.sample(3, seed=1), back.sample(3, seed=1)
    assert after["aside.weight"].dtype == torch.float32
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert torch.equal(
        made.predict(data[0], 3, seed=1).outputs, back.predict(data[0], 3, seed=1).outputs
    )
    draw = {name: value[0] for name, value in after.items()}
    plain = dict(back.to_module(draw).named_parameters())
    assert plain["base.weight"].dtype == torch.bfloat16
    for name, value in draw.items():
        assert plain[name].dtype == value.dtype
        assert torch.equal(plain[name], value)


@pytest.mark.parametrize("guide", [bayou.MeanField(), bayou.MNF(), bayou.LowRank(2)])
def test_a_file_decides_the_dtype_and_not_the_network_it_is_loaded_into(guide, tmp_path):
    torch.manual_seed(0)
    made = bayou.fit(net().double(), (X.double(), Y.double()), method=bayou.VI(guide, steps=2), progress=False,
                     likelihood=bayou.Gaussian(0.2, learn=True))  # fmt: skip
    made.save(tmp_path / "a.bayou")
    back = bayou.load(tmp_path / "a.bayou", net())
    before, after = (posterior.predict(X.double(), 3, seed=0) for posterior in (made, back))
    assert after.outputs.dtype == torch.float64
    assert torch.equal(before.outputs, after.outputs)
    assert torch.equal(before.log_prob(Y.double()), after.log_prob(Y.double()))


@pytest.mark.parametrize(
    ("guide", "options"),
    [
        (bayou.MeanField(), {}),
        (bayou.MNF(options={"layers": 1}), {}),
        ({"0.*": bayou.LowRank(2), "*": bayou.Delta(penalty=True)}, {}),
        (bayou.JointFlow(), {"prior": bayou.priors.StudentT()}),
        (bayou.Inducing(4), {"prior": bayou.Normal(0.5)}),
        (bayou.Dropout(rate="concrete"), {"prior": bayou.Normal("fan_in", learn=True)}),
        (bayou.NodeFlow(), {"likelihood": bayou.Gaussian(0.2, learn=True)}),
        (bayou.SparseVD(), {"prior": {"0.*": bayou.Normal(0.5), "*": bayou.priors.ScaleMixture()}}),
    ],
)
def test_a_posterior_comes_back_as_it_was(guide, options, tmp_path):
    one = fitted(guide, **options)
    one.save(tmp_path / "a")
    two = bayou.load(tmp_path / "a", net())
    assert not two.bayesian.training
    assert two.history == one.history
    assert two.stopped == one.stopped == "finished"
    for name, draws in one.sample(5, seed=3).items():
        assert torch.equal(draws, two.sample(5, seed=3)[name])
    p, q = one.predict(X, 7, seed=1), two.predict(X, 7, seed=1)
    assert torch.equal(p.outputs, q.outputs)
    assert torch.equal(p.log_prob(Y), q.log_prob(Y))  # the learned noise too
    assert bayou.elbo(one, (X, Y), 4, seed=2) == bayou.elbo(two, (X, Y), 4, seed=2)
    assert two.bayesian.local_names == one.bayesian.local_names
    other, state = net(), torch.get_rng_state()
    bayou.load(tmp_path / "a", other)
    assert torch.equal(torch.get_rng_state(), state)


def test_saving_twice_gives_the_same_bytes(posterior, tmp_path):
    for name in "ab":
        posterior.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    bayou.load(tmp_path / "a", net()).save(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "a").read_bytes()


def test_float64_running_statistics_and_tied_weights_come_back(tmp_path):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.norm, self.b = nn.Linear(1, 1), nn.BatchNorm1d(1), nn.Linear(1, 1)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.norm(self.a(x)))

    torch.manual_seed(0)
    method = bayou.VI(steps=4, batch_size=5)
    one = bayou.fit(
        Tied().double(),
        (X.double(), Y.double()),
        method=method,
        likelihood=bayou.Gaussian(),
        progress=False,
    )
    one.save(tmp_path / "a")
    for network in (Tied(), Tied().double()):
        two = bayou.load(tmp_path / "a", network)
        assert two.predict(X.double(), 2, seed=0).outputs.dtype == torch.float64
        assert torch.equal(
            two.predict(X.double(), 2, seed=0).outputs, one.predict(X.double(), 2, seed=0).outputs
        )


@pytest.mark.parametrize("kind", ["guided", "empirical", "gaussian", "masked", "mixture"])
def test_a_file_that_was_written_before_is_still_read(kind):
    """``tests/reference/make_files.py`` wrote them."""
    folder = Path(__file__).parents[1] / "reference" / "files"
    posterior = bayou.load(folder / f"{kind}.bayou", dropping())
    assert posterior.kind == kind
    expected = torch.tensor(json.loads((folder / "files.json").read_text())[kind])
    torch.testing.assert_close(
        posterior.predict(X[:3], 2, seed=0).outputs.flatten(), expected, rtol=1e-5, atol=1e-6
    )


# --- what can be wrong with a file -----------------------------------------------------------------------------------


def test_a_file_that_is_cut_anywhere_is_noticed(file):
    content = file.read_bytes()
    lengths = {0, 1, 63, 64, 65, len(content) - 1, len(content) - 64, len(content) - 65}
    lengths |= {random.Random(0).randrange(len(content)) for _ in range(100)}
    for length in lengths:
        file.write_bytes(content[:length])
        with pytest.raises(bayou.posteriors.FileError, match="truncated"):
            bayou.load(file, net())


@pytest.mark.parametrize("tail", [b"\0", b"more", b"0" * 64])
def test_a_file_that_is_too_long_is_noticed(tail, file):
    file.write_bytes(file.read_bytes() + tail)
    with pytest.raises(bayou.posteriors.FileError, match="not a whole bayou file"):
        bayou.load(file, net())


def test_a_bit_that_flips_anywhere_is_noticed(file):
    content = bytearray(file.read_bytes())
    step = max(1, len(content) // 400)
    for place in [*range(0, len(content), step), *range(len(content) - 200, len(content))]:
        bit = 1 << (place % 8)
        content[place] ^= bit
        file.write_bytes(content)
        with pytest.raises(bayou.posteriors.FileError):
            read_file(file)
        content[place] ^= bit
    file.write_bytes(content)
    read_file(file)  # and the whole one is read


@pytest.mark.slow
def test_every_single_bit_is_guarded(tmp_path):
    file = tmp_path / "tiny"
    write_file(file, {"a": torch.arange(3.0)}, {"kind": "guided"})
    content = bytearray(file.read_bytes())
    for place in range(len(content)):
        for bit in range(8):
            content[place] ^= 1 << bit
            file.write_bytes(content)
            with pytest.raises(bayou.posteriors.FileError):
                read_file(file)
            content[place] ^= 1 << bit


def foreign(kind, path):
    if kind == "random":
        path.write_bytes(random.Random(1).randbytes(5000))
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "zip":
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("config.json", "{}")
    elif kind == "pickle":
        path.write_bytes(pickle.dumps({"a": 1}))
    elif kind == "torch":
        torch.save({"a": torch.zeros(3)}, path)
    elif kind == "safetensors":
        safetensors.torch.save_file({"a": torch.zeros(3)}, path)
    elif kind == "sealed":  # a right checksum over nonsense
        sealed = b"nonsense" * 20
        path.write_bytes(sealed + files.hashlib.sha256(sealed).hexdigest().encode())


@pytest.mark.parametrize(
    "kind", ["random", "empty", "zip", "pickle", "torch", "safetensors", "sealed"]
)
def test_a_foreign_file_is_refused(kind, tmp_path):
    foreign(kind, tmp_path / "file")
    with pytest.raises(bayou.posteriors.FileError, match="foreign"):
        bayou.load(tmp_path / "file", net())


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    with pytest.raises(bayou.posteriors.FileError, match="there is no file .*nothing.bayou"):
        bayou.load(tmp_path / "nothing.bayou", net())
    with pytest.raises(bayou.posteriors.FileError, match="cannot read .*: it is a folder"):
        bayou.load(tmp_path, net())


def test_a_file_of_a_later_format_says_so(file, monkeypatch, posterior):
    monkeypatch.setattr(files, "FORMAT", 2)
    posterior.save(file)
    monkeypatch.undo()
    with pytest.raises(
        bayou.posteriors.FileError,
        match="has format 2, this bayou reads 1; use the version that wrote it",
    ):
        bayou.load(file, net())


def test_a_checkpoint_is_no_posterior(tmp_path):
    write_file(tmp_path / "c", {}, {"kind": "checkpoint"})
    with pytest.raises(bayou.posteriors.FileError, match="holds a 'checkpoint', not a posterior"):
        bayou.load(tmp_path / "c", net())


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (net(4), r"'0.weight' is \[3, 1\] in the file and \[4, 1\] here"),
        (nn.Linear(1, 1), r"'0.weight' is \[3, 1\] in the file and not here"),
        (
            nn.Sequential(*net(), nn.Linear(1, 1)),
            r"'3.weight' is not in the file and \[1, 1\] here",
        ),
    ],
)
def test_the_wrong_network_is_named(network, message, file):
    with pytest.raises(bayou.posteriors.FileError, match=f"belongs to another network: {message}"):
        bayou.load(file, network)


def test_other_buffers_are_another_network_too(tmp_path):
    fitted(
        network=nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))
    ).save(tmp_path / "a")
    with pytest.raises(bayou.posteriors.FileError, match="does not fit this network"):
        bayou.load(tmp_path / "a", nn.Sequential(nn.Linear(1, 2), nn.Identity(), nn.Linear(2, 1)))


# --- sealed, but odd -------------------------------------------------------------------------------------------------

ODD = [
    ("n", -5, "n = -5, expected a positive whole number"),
    ("n", 0, "n = 0"),
    ("n", "a", "n = 'a'"),
    ("n", True, "n = True"),
    ("n", None, "n = None"),
    ("history", "a string", "history = 'a string', expected a list of records"),
    ("history", [1], "history"),
    ("stopped", 3, "stopped = 3, expected a word"),
    ("shared", 3, "shared = 3, expected the names of tensors"),
    ("shapes", [], "shapes"),
    ("shapes", {"0.weight": 3}, "shapes"),
    ("prior", 3, ""),
    ("prior", {"spec": "Normal"}, "prior"),
    ("prior", {"spec": "Normal", "fields": {"scale": "wide"}}, ""),
    ("likelihood", None, ""),
    ("likelihood", {"fields": {}}, "likelihood"),
    ("rules", 1, ""),
    ("rules", [], ""),
    ("rules", [["0.weight"]], ""),
    (
        "rules",
        [[["0.weight"], {"spec": "MeanField", "fields": {"std": -1}}]],
        "MeanField std must be positive and finite",
    ),
    ("local", 1, ""),
    ("chains", -1, ""),
    ("chains", 0, ""),
    ("chains", "two", ""),
    ("covariance", "none", ""),
    ("covariance", ["magic", {}], "'magic'"),
    ("covariance", ["diagonal", {"a": "b"}], ""),
    ("predictive", "guess", "guess"),
    ("p", "often", ""),
    ("components", 3, "components = 3, expected a list of posteriors"),
    ("components", [], ""),
]


@pytest.fixture(scope="module")
def sealed(tmp_path_factory):
    """One file of each kind, as tensors and config."""
    start = bayou.MAP(steps=2)
    methods = {
        "guided": bayou.VI(steps=2),
        "empirical": bayou.Ensemble(2, start),
        "gaussian": bayou.Laplace(start=start),
        "masked": bayou.MCDropout(start),
        "mixture": bayou.Ensemble(2, bayou.VI(steps=2)),
    }
    folder, found = tmp_path_factory.mktemp("sealed"), {}
    for kind, method in methods.items():
        torch.manual_seed(0)
        one = bayou.fit(
            dropping(), (X, Y), method=method, likelihood=bayou.Gaussian(0.2), progress=False
        )
        one.save(folder / kind)
        found[kind] = read_file(folder / kind)
        assert found[kind][1]["kind"] == kind
    return found


def dropping():
    return nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.2), nn.Tanh(), nn.Linear(3, 1))


@pytest.mark.parametrize(("key", "value", "words"), ODD)
def test_odd_values_are_refused_by_the_librarys_own_error(key, value, words, sealed, tmp_path):
    with_key = {kind: found for kind, found in sealed.items() if key in found[1]}
    assert with_key
    for tensors, config in with_key.values():
        write_file(tmp_path / "odd", tensors, config | {key: value})
        with pytest.raises(bayou.posteriors.FileError, match=rf"odd.*{re.escape(words)}"):
            bayou.load(tmp_path / "odd", dropping()).predict(X, 2)


def test_missing_keys_and_tensors_and_wrong_shapes_are_refused(sealed, tmp_path):
    for kind, (tensors, config) in sealed.items():
        for key in config.keys() - {"checks", "shared"}:  # not in files of earlier versions
            write_file(tmp_path / "odd", tensors, {k: v for k, v in config.items() if k != key})
            with pytest.raises(bayou.posteriors.FileError):
                bayou.load(tmp_path / "odd", dropping())
        for name in tensors:
            write_file(tmp_path / "odd", {k: v for k, v in tensors.items() if k != name}, config)
            with pytest.raises(bayou.posteriors.FileError):
                bayou.load(tmp_path / "odd", dropping())
            write_file(tmp_path / "odd", tensors | {name: torch.zeros(7, 5)}, config)
            with pytest.raises(bayou.posteriors.FileError):
                bayou.load(tmp_path / "odd", dropping())
        floating = next(name for name, value in tensors.items() if value.is_floating_point())
        write_file(
            tmp_path / "odd",
            tensors | {floating: torch.full_like(tensors[floating], torch.nan)},
            config,
        )
        with pytest.raises(
            bayou.posteriors.FileError, match=f"NaN in '{floating.removeprefix('0.')}'|NaN in"
        ):
            bayou.load(tmp_path / "odd", dropping())
        assert kind == config["kind"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda value: torch.full_like(value, torch.inf), "infinite numbers in"),
        (lambda value: torch.full_like(value, -torch.inf), "infinite numbers in"),
        (lambda value: value.round().long(), "torch.int64 in"),
        (lambda value: value > 0, "torch.bool in"),
    ],
)
def test_tensors_that_are_no_finite_numbers_with_fractions_are_refused(
    change, words, sealed, tmp_path
):
    for tensors, config in sealed.values():
        for name, value in tensors.items():
            if value.is_floating_point():
                write_file(tmp_path / "odd", tensors | {name: change(value)}, config)
                with pytest.raises(bayou.posteriors.FileError, match=f"odd has {words}"):
                    bayou.load(tmp_path / "odd", dropping())


def test_float8_is_refused_at_loading(sealed, tmp_path):
    for tensors, config in sealed.values():
        name, value = next((n, v) for n, v in tensors.items() if v.is_floating_point() and v.ndim)
        write_file(tmp_path / "odd", tensors | {name: value.to(torch.float8_e4m3fn)}, config)
        with pytest.raises(
            bayou.posteriors.FileError, match="odd has torch.float8_e4m3fn in .* does not write"
        ):
            bayou.load(tmp_path / "odd", dropping())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_mixed_dtypes_are_refused_at_loading(dtype, sealed, tmp_path):
    names = {"guided": "guides.1.center", "empirical": "stack.0.bias", "gaussian": "mean.0.bias",
             "masked": "weights.0.bias"}  # fmt: skip
    for kind, name in names.items():
        tensors, config = sealed[kind]
        write_file(tmp_path / "odd", tensors | {name: tensors[name].to(dtype)}, config)
        with pytest.raises(
            bayou.posteriors.FileError, match="odd has torch.float.* and torch.float.* in '"
        ):
            bayou.load(tmp_path / "odd", dropping())


def test_a_buffer_in_another_dtype_is_refused_at_loading(tmp_path):
    def norm():
        return nn.Sequential(nn.Linear(1, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))

    torch.manual_seed(0)
    one = bayou.fit(
        norm(), (X, Y), method=bayou.MAP(steps=2), likelihood=bayou.Gaussian(0.2), progress=False
    )
    one.save(tmp_path / "a")
    tensors, config = read_file(tmp_path / "a")
    name = "net.1.running_mean"
    write_file(tmp_path / "odd", tensors | {name: tensors[name].half()}, config)
    with pytest.raises(
        bayou.posteriors.FileError, match="odd has torch.float16 in '1.running_mean'"
    ):
        bayou.load(tmp_path / "odd", norm())


def test_points_missing_in_one_tensor_are_refused_at_loading(tmp_path):
    x = torch.randn(20, 2, generator=torch.Generator().manual_seed(0))
    path = tmp_path / "ensemble.bayou"
    method = bayou.Ensemble(2, bayou.MAP(steps=2))
    bayou.fit(
        nn.Linear(2, 1), (x, x[:, :1]), method=method, likelihood=bayou.Gaussian(), progress=False
    ).save(path)
    tensors, config = read_file(path)
    write_file(path, tensors | {"stack.weight": tensors["stack.weight"][:1].clone()}, config)
    with pytest.raises(bayou.core.files.FileError, match="has 1 of 2 points in 'weight'"):
        bayou.load(path, nn.Linear(2, 1))


def test_an_axis_too_many_is_refused_at_loading(sealed, tmp_path):
    names = {
        "empirical": "stack.0.weight",
        "gaussian": "mean.0.weight",
        "masked": "weights.0.weight",
    }
    for kind, name in names.items():
        tensors, config = sealed[kind]
        write_file(tmp_path / "odd", tensors | {name: tensors[name].unsqueeze(0)}, config)
        with pytest.raises(bayou.posteriors.FileError):
            bayou.load(tmp_path / "odd", dropping())


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (bayou.MAP(steps=4, checkpoint_every=2), lambda value: value.long()),
        (bayou.MAP(steps=4, checkpoint_every=2), lambda value: value.unsqueeze(0)),
        (bayou.HMC(draws=3, warmup=2), lambda value: value.long()),
    ],
)
def test_odd_tensors_of_a_checkpoint_are_a_sentence(method, change, tmp_path):
    def run():
        torch.manual_seed(0)
        setting = {
            "likelihood": bayou.Gaussian(0.2),
            "checkpoint": tmp_path / "c",
            "progress": False,
        }
        bayou.fit(net(), (X, Y), method=method, **setting)

    run()
    tensors, config = read_file(tmp_path / "c")
    axes = 2 if isinstance(method, bayou.HMC) else 1
    names = [
        name for name, value in tensors.items() if value.is_floating_point() and value.ndim >= axes
    ]
    assert len(names) >= 2
    for name in names:
        if change(tensors[name]).is_floating_point() and name.startswith("optimizer."):
            continue  # torch broadcasts nothing there: it is replaced by the next step
        write_file(tmp_path / "c", tensors | {name: change(tensors[name])}, config)
        with pytest.raises(
            bayou.posteriors.FileError, match="the checkpoint .*c has .* in .*, expected.*delete it"
        ):
            run()


@pytest.mark.parametrize("kind", [[], {}, None, 3, "guide"])
def test_a_kind_that_is_none_is_named(kind, sealed, tmp_path):
    write_file(tmp_path / "odd", *(sealed["guided"][0], sealed["guided"][1] | {"kind": kind}))
    with pytest.raises(bayou.posteriors.FileError, match="not a posterior; expected one of"):
        bayou.load(tmp_path / "odd", dropping())


@pytest.mark.parametrize(
    ("method", "keys"),
    [
        (bayou.MAP(steps=4, checkpoint_every=2), ("keys", "optimizer", "state")),
        (bayou.HMC(draws=3, warmup=2), ("keys", "sampling", "step")),
    ],
)
def test_a_checkpoint_that_lacks_something_is_a_sentence(method, keys, tmp_path):
    def run():
        torch.manual_seed(0)
        setting = {
            "likelihood": bayou.Gaussian(0.2),
            "checkpoint": tmp_path / "c",
            "progress": False,
        }
        bayou.fit(net(), (X, Y), method=method, **setting)

    run()
    tensors, config = read_file(tmp_path / "c")
    for key in keys:
        write_file(tmp_path / "c", tensors, {k: value for k, value in config.items() if k != key})
        with pytest.raises(
            bayou.posteriors.FileError,
            match="c .*(delete it|no run like this one can be made of it)",
        ):
            run()


def test_a_config_that_is_no_object_is_foreign(tmp_path):
    for config in ([1], "text", None):
        write_file(tmp_path / "odd", {}, config)
        with pytest.raises(
            bayou.posteriors.FileError, match="foreign file: ValueError: config.json is a"
        ):
            bayou.load(tmp_path / "odd", net())


def seal(path, members, compression):
    """A file with a right checksum, made by hand."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.comment = b"0" * files.SEAL
    content = bytearray(buffer.getvalue())
    content[-files.SEAL :] = files.hashlib.sha256(content[: -files.SEAL]).hexdigest().encode()
    path.write_bytes(content)
    return len(content)


def test_a_zip_bomb_is_refused_before_it_is_unpacked(posterior, tmp_path, monkeypatch):
    tensors, config = posterior.state()
    members = {
        files.MANIFEST: json.dumps({"format": files.FORMAT}),
        files.CONFIG: json.dumps(config),
        files.TENSORS: safetensors.torch.save(tensors) + bytes(2**24),
    }
    assert seal(tmp_path / "bomb", members, zipfile.ZIP_DEFLATED) < 2**20
    monkeypatch.setattr(zipfile.ZipFile, "read", lambda *args: pytest.fail("unpacked"))
    with pytest.raises(
        bayou.posteriors.FileError, match="bomb is a foreign file.*bayou packs nothing"
    ):
        bayou.load(tmp_path / "bomb", net())


def test_a_header_that_promises_more_than_there_is_is_refused(posterior, tmp_path):
    _, config = posterior.state()
    header = json.dumps(
        {"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}
    ).encode()
    members = {
        files.MANIFEST: json.dumps({"format": files.FORMAT}),
        files.CONFIG: json.dumps(config),
        files.TENSORS: len(header).to_bytes(8, "little") + header + bytes(100),
    }
    seal(tmp_path / "promise", members, zipfile.ZIP_STORED)
    with pytest.raises(bayou.posteriors.FileError, match="promise is a foreign file"):
        bayou.load(tmp_path / "promise", net())


# --- what killed processes leave behind ------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["save", "load"])
def test_the_next_save_or_load_removes_what_a_killed_save_left(how, posterior, tmp_path):
    posterior.save(tmp_path / "m[1].bayou")
    left = tmp_path / f".m[1].bayou.{'a' * 16}.part"
    left.write_bytes(b"half a file")
    others = [
        tmp_path / f".other.bayou.{'a' * 16}.part",
        tmp_path / ".m[1].bayou.part",
        tmp_path / "m[1].bayou.part",
    ]
    for other in others:
        other.write_bytes(b"not of this name")
    if how == "save":
        posterior.save(tmp_path / "m[1].bayou")
    else:
        bayou.load(tmp_path / "m[1].bayou", net())
    assert not left.exists()
    assert all(other.exists() for other in others)


@pytest.mark.skipif(files.fcntl is None, reason="locks of POSIX")
def test_a_file_that_is_being_written_is_left_alone(posterior, tmp_path):
    posterior.save(tmp_path / "a")
    busy = tmp_path / f".a.{'b' * 16}.part"
    with open(busy, "xb") as stream:
        bayou.load(tmp_path / "a", net())
        assert busy.exists()  # new and empty: its writer is about to lock it
        files._lock(stream, wait=True)
        stream.write(b"half")
        stream.flush()
        posterior.save(tmp_path / "a")
        assert busy.exists()
    posterior.save(tmp_path / "a")
    assert not busy.exists()
    busy.write_bytes(b"")
    os.utime(busy, (0, 0))
    posterior.save(tmp_path / "a")
    assert not busy.exists()


def test_saves_of_one_name_from_many_threads_all_succeed(posterior, tmp_path):
    def save(number):
        for _ in range(20):
            posterior.save(tmp_path / "a")
            bayou.load(tmp_path / "a", net())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    assert os.listdir(tmp_path) == ["a"]


# --- no code ---------------------------------------------------------------------------------------------------------


def test_a_file_with_a_callable_is_refused_with_the_way_out(tmp_path):
    network = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2))
    one = fitted(
        {"2.weight": bayou.MNF(flow=crooked), "*": bayou.Delta()},
        network,
        likelihood=bayou.HeteroscedasticGaussian(),
    )
    one.save(tmp_path / "a")
    with pytest.raises(
        bayou.posteriors.FileError, match=r"custom 'crooked'.*runs no code.*load\(..., rules=...\)"
    ):
        bayou.load(tmp_path / "a", network)
    rules = {"2.weight": bayou.MNF(flow=crooked), "*": bayou.Delta()}
    two = bayou.load(tmp_path / "a", network, rules=rules)
    assert torch.equal(two.predict(X, 3, seed=0).outputs, one.predict(X, 3, seed=0).outputs)
    with pytest.raises(
        bayou.posteriors.FileError, match="does not fit this network and these rules"
    ):
        bayou.load(tmp_path / "a", network, rules=bayou.MeanField())


def test_a_density_as_a_prior_is_said_again(tmp_path):
    prior = DensityPrior(lambda w: -w.abs().flatten(-2).sum(-1) if w.ndim > 2 else -w.abs().sum(-1))
    rules = {"*.weight": bayou.MeanField(local=False), "*": bayou.Delta()}
    priors = {"*.weight": prior, "*": bayou.Normal(1.0)}
    one = fitted(rules, prior=priors)
    one.save(tmp_path / "a")
    with pytest.raises(bayou.posteriors.FileError, match=r"load\(..., prior=...\)"):
        bayou.load(tmp_path / "a", net())
    two = bayou.load(tmp_path / "a", net(), prior=priors)
    assert torch.equal(two.predict(X, 3, seed=0).outputs, one.predict(X, 3, seed=0).outputs)


def test_loading_runs_nothing_that_a_file_names(posterior, tmp_path, monkeypatch):
    posterior.save(tmp_path / "a")
    tensors, config = read_file(tmp_path / "a")
    config["rules"][0][1] = {"spec": "system", "fields": {"command": "touch hacked"}}
    write_file(tmp_path / "a", tensors, config)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(bayou.posteriors.FileError, match="names 'system', which is unknown here"):
        bayou.load(tmp_path / "a", net())
    assert not (tmp_path / "hacked").exists()
    for source in (tmp_path / "a").read_bytes(), pack({}, {}):
        assert b"pickle" not in source


# --- writing ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["replace", "fsync", "write"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(
    fails, error, file, monkeypatch
):
    before = file.read_bytes()

    def fail(*args, **kwargs):
        raise error

    with monkeypatch.context() as patch:
        if fails == "write":
            plain = open

            def opened(path, mode):
                stream = plain(path, mode)
                stream.write(b"half a file")

                class Full:
                    write = staticmethod(fail)
                    fileno = staticmethod(stream.fileno)
                    __enter__ = staticmethod(lambda: Full)
                    __exit__ = staticmethod(lambda *a: stream.close())

                return Full()

            patch.setattr(files, "open", opened, raising=False)
        else:
            patch.setattr(os, fails, fail)
        with pytest.raises((bayou.posteriors.FileError, KeyboardInterrupt)) as caught:
            fitted().save(file)
    if isinstance(error, OSError):
        assert "cannot write" in str(caught.value)
        assert "No space left" in str(caught.value)
        assert "untouched" in str(caught.value)
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_a_folder_that_is_not_there_or_not_writable_is_named(posterior, tmp_path, monkeypatch):
    with pytest.raises(
        bayou.posteriors.FileError, match="the folder .*missing does not exist; create it first"
    ):
        posterior.save(tmp_path / "missing" / "a")
    with pytest.raises(bayou.posteriors.FileError, match="it is a folder"):
        posterior.save(tmp_path)

    def denied(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "open", denied, raising=False)
    with pytest.raises(bayou.posteriors.FileError, match="cannot write .*a: Permission denied"):
        posterior.save(tmp_path / "a")


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_a_folder_without_permission_is_named(posterior):
    nobody, user = 65534, os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        try:
            os.seteuid(nobody if user == 0 else user)  # root may write anywhere
            with pytest.raises(bayou.posteriors.FileError, match="Permission denied"):
                posterior.save(Path(folder, "a"))
        finally:
            os.seteuid(user)


@pytest.mark.skipif(os.name != "posix", reason="permissions and links")
def test_files_have_the_usual_permissions_and_links_stay_links(posterior, tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    posterior.save(tmp_path / "a")
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "plain").stat().st_mode
    (tmp_path / "link").symlink_to(tmp_path / "a")
    before = (tmp_path / "a").stat().st_ino
    posterior.save(tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "a").stat().st_ino != before


# --- specs and states ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Odd(GuideSpec):
    anything: object = None

    def build(self, tensors):
        raise NotImplementedError


@pytest.mark.parametrize(
    "value",
    [
        bayou.MeanField(0.3),
        bayou.MNF(options={"layers": 3, "hidden": (5, 6)}),
        Odd({"spec": 1, "callable": 2, "dict": [], "tuple": ()}),
        Odd({1: (1, [2.5, None]), (1, 2): float("inf")}),
        Odd(bayou.MeanField()),
    ],
)
def test_specs_come_back_equal_whatever_is_in_them(value):
    assert from_json(json.loads(json.dumps(to_json(value))), GuideSpec) == value


def test_a_spec_of_another_family_or_version_is_refused():
    with pytest.raises(ValueError, match="'MeanField', which is unknown here"):
        from_json(to_json(bayou.MeanField()), Prior)
    with pytest.raises(ValueError, match="MeanField does not fit this version"):
        from_json({"spec": "MeanField", "fields": {"width": 3}}, GuideSpec)


def test_nested_states_come_back_equal():
    state = {"a": [1, (2.5, None)], 3: {"b": torch.arange(3)}, "c": True, "d": "text"}
    tensors, tree = split(state, "s")
    back = join(tensors, json.loads(json.dumps(tree)))
    assert torch.equal(back[3].pop("b"), state[3].pop("b"))
    assert back == state
    with pytest.raises(ValueError, match="s.f is a function, which a file cannot hold"):
        split({"f": crooked}, "s")

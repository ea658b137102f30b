"""Files: round trips, and everything that can be wrong with one."""

import copy
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
from bayou.core.files import FileError, join, pack, read_file, split, write_file
from bayou.core.specs import from_json, to_json
from bayou.guides.guide import GuideSpec
from bayou.priors import DensityPrior, Prior

X = torch.linspace(-1, 1, 12).unsqueeze(-1)
Y = X**2


def net(hidden=3):
    return nn.Sequential(nn.Linear(1, hidden), nn.Tanh(), nn.Linear(hidden, 1))


def dropout_net():
    return nn.Sequential(nn.Linear(1, 3), nn.Dropout(0.2), nn.Tanh(), nn.Linear(3, 1))


def fit(network, method, data=(X, Y), **options):
    torch.manual_seed(0)
    options = {"likelihood": bayou.Gaussian(0.2)} | options
    return bayou.fit(network, data, method=method, progress=False, **options)


def fitted(guide=None, network=None, **options):
    method = bayou.VI(guide or bayou.MeanField(), steps=4, lr=0.01)
    return fit(network or net(), method, **options)


@pytest.fixture(scope="module")
def posterior():
    return fitted()


@pytest.fixture
def file(posterior, tmp_path):
    posterior.save(tmp_path / "model.bayou")
    return tmp_path / "model.bayou"


def crooked(dim):
    return flows.realnvp(dim, layers=1)


def assert_same_predictions(posterior, loaded, x, y=None):
    before = posterior.predict(x, 3, seed=1)
    after = loaded.predict(x, 3, seed=1)
    assert torch.equal(before.outputs, after.outputs)
    if y is not None:
        assert torch.equal(before.log_prob(y), after.log_prob(y))  # the learned noise too


def assert_refused(path, message, network=None, **options):
    with pytest.raises(FileError, match=message):
        bayou.load(path, network or net(), **options)


# --- round trips --------------------------------------------------------------------------------


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
    adapter = Adapter()
    x = X.bfloat16()
    posterior = fit(adapter, method, (x, Y))
    posterior.save(tmp_path / "a.bayou")
    loaded = bayou.load(tmp_path / "a.bayou", copy.deepcopy(adapter))
    before = posterior.sample(3, seed=1)
    after = loaded.sample(3, seed=1)
    assert after["aside.weight"].dtype == torch.float32
    for name, value in before.items():
        assert torch.equal(value, after[name]), name
    assert_same_predictions(posterior, loaded, x)
    draw = {name: value[0] for name, value in after.items()}
    plain = dict(loaded.to_module(draw).named_parameters())
    assert plain["base.weight"].dtype == torch.bfloat16
    for name, value in draw.items():
        assert plain[name].dtype == value.dtype
        assert torch.equal(plain[name], value)


@pytest.mark.parametrize("guide", [bayou.MeanField(), bayou.MNF(), bayou.LowRank(2)])
def test_a_file_decides_the_dtype_and_not_the_network_it_is_loaded_into(guide, tmp_path):
    x = X.double()
    y = Y.double()
    noise = bayou.Gaussian(0.2, learn=True)
    posterior = fit(net().double(), bayou.VI(guide, steps=2), (x, y), likelihood=noise)
    posterior.save(tmp_path / "a.bayou")
    loaded = bayou.load(tmp_path / "a.bayou", net())
    assert loaded.predict(x, 3, seed=0).outputs.dtype == torch.float64
    assert_same_predictions(posterior, loaded, x, y)


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
    posterior = fitted(guide, **options)
    posterior.save(tmp_path / "a")
    loaded = bayou.load(tmp_path / "a", net())
    assert not loaded.bayesian.training
    assert loaded.history == posterior.history
    assert loaded.stopped == posterior.stopped == "finished"
    assert loaded.bayesian.local_names == posterior.bayesian.local_names
    for name, draws in posterior.sample(5, seed=3).items():
        assert torch.equal(draws, loaded.sample(5, seed=3)[name])
    assert_same_predictions(posterior, loaded, X, Y)
    assert bayou.elbo(posterior, (X, Y), 4, seed=2) == bayou.elbo(loaded, (X, Y), 4, seed=2)
    network = net()
    state = torch.get_rng_state()
    bayou.load(tmp_path / "a", network)
    assert torch.equal(torch.get_rng_state(), state)


def test_saving_twice_gives_the_same_bytes(posterior, tmp_path):
    for name in "ab":
        posterior.save(tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    bayou.load(tmp_path / "a", net()).save(tmp_path / "c")
    assert (tmp_path / "c").read_bytes() == (tmp_path / "a").read_bytes()


class TiedNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(1, 1)
        self.norm = nn.BatchNorm1d(1)
        self.b = nn.Linear(1, 1)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.norm(self.a(x)))


def test_float64_running_statistics_and_tied_weights_come_back(tmp_path):
    x = X.double()
    posterior = fit(TiedNorm().double(), bayou.VI(steps=4, batch_size=5), (x, Y.double()))
    posterior.save(tmp_path / "a")
    for network in (TiedNorm(), TiedNorm().double()):
        assert_same_predictions(posterior, bayou.load(tmp_path / "a", network), x)


@pytest.mark.parametrize("kind", ["guided", "empirical", "gaussian", "masked", "mixture"])
def test_a_file_that_was_written_before_is_still_read(kind):
    """``tests/reference/make_files.py`` wrote them."""
    folder = Path(__file__).parents[1] / "reference" / "files"
    posterior = bayou.load(folder / f"{kind}.bayou", dropout_net())
    assert posterior.kind == kind
    expected = torch.tensor(json.loads((folder / "files.json").read_text())[kind])
    torch.testing.assert_close(
        posterior.predict(X[:3], 2, seed=0).outputs.flatten(), expected, rtol=1e-5, atol=1e-6
    )


# --- what can be wrong with a file --------------------------------------------------------------


def test_a_file_that_is_cut_anywhere_is_noticed(file):
    content = file.read_bytes()
    lengths = {0, 1, 63, 64, 65, len(content) - 1, len(content) - 64, len(content) - 65}
    lengths |= {random.Random(0).randrange(len(content)) for _ in range(20)}
    for length in lengths:
        file.write_bytes(content[:length])
        assert_refused(file, "truncated")


@pytest.mark.parametrize("tail", [b"\0", b"more", b"0" * 64])
def test_a_file_that_is_too_long_is_noticed(tail, file):
    file.write_bytes(file.read_bytes() + tail)
    assert_refused(file, "not a whole bayou file")


def test_a_bit_that_flips_anywhere_is_noticed(file):
    content = bytearray(file.read_bytes())
    step = max(1, len(content) // 100)
    for place in [*range(0, len(content), step), *range(len(content) - 70, len(content))]:
        bit = 1 << (place % 8)
        content[place] ^= bit
        file.write_bytes(content)
        with pytest.raises(FileError):
            read_file(file)
        content[place] ^= bit
    file.write_bytes(content)
    read_file(file)  # and the whole one is read


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
    assert_refused(tmp_path / "file", "foreign")


def test_a_missing_file_and_a_folder_are_named(tmp_path):
    assert_refused(tmp_path / "nothing.bayou", "there is no file .*nothing.bayou")
    assert_refused(tmp_path, "cannot read .*: it is a folder")


def test_a_file_of_a_later_format_says_so(file, monkeypatch, posterior):
    monkeypatch.setattr(files, "FORMAT", 2)
    posterior.save(file)
    monkeypatch.undo()
    assert_refused(file, "has format 2, this bayou reads 1; use the version that wrote it")


def test_an_unknown_option_of_load_is_named(file):
    with pytest.raises(ValueError, match="load has no option 'priors'; the options are prior, "):
        bayou.load(file, net(), priors=bayou.Normal())


def test_a_checkpoint_is_no_posterior(tmp_path):
    write_file(tmp_path / "c", {}, {"kind": "checkpoint"})
    assert_refused(tmp_path / "c", "holds a 'checkpoint', not a posterior")


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
    assert_refused(file, f"belongs to another network: {message}", network)


def test_other_buffers_are_another_network_too(tmp_path):
    fitted(
        network=nn.Sequential(nn.Linear(1, 2), nn.BatchNorm1d(2, affine=False), nn.Linear(2, 1))
    ).save(tmp_path / "a")
    assert_refused(
        tmp_path / "a",
        "does not fit this network",
        nn.Sequential(nn.Linear(1, 2), nn.Identity(), nn.Linear(2, 1)),
    )


# --- a right checksum over wrong contents -------------------------------------------------------


@pytest.fixture(scope="module")
def saved_states(tmp_path_factory):
    """The tensors and the config of one file of each class."""
    start = bayou.MAP(steps=2)
    methods = {
        "guided": bayou.VI(steps=2),
        "empirical": bayou.Ensemble(2, start),
        "gaussian": bayou.Laplace(start=start),
        "masked": bayou.MCDropout(start),
        "mixture": bayou.Ensemble(2, bayou.VI(steps=2)),
    }
    folder = tmp_path_factory.mktemp("states")
    states = {}
    for kind, method in methods.items():
        posterior = fit(dropout_net(), method)
        posterior.save(folder / kind)
        states[kind] = read_file(folder / kind)
        assert states[kind][1]["kind"] == kind
    return states


def assert_contents_refused(path, tensors, config, message="changed"):
    write_file(path, tensors, config)
    assert_refused(path, message, dropout_net())


@pytest.mark.parametrize("kind", ["guided", "empirical", "gaussian", "masked", "mixture"])
def test_missing_and_wrong_contents_are_file_errors(kind, saved_states, tmp_path):
    tensors, config = saved_states[kind]
    path = tmp_path / "changed"
    for key in ("history", "stopped", "components" if kind == "mixture" else "prior"):
        assert_contents_refused(path, tensors, {k: v for k, v in config.items() if k != key})
    name = next(name for name in tensors if name.endswith(("weight", "center")))
    assert_contents_refused(path, {k: v for k, v in tensors.items() if k != name}, config)
    assert_contents_refused(path, tensors | {name: torch.zeros(7, 5)}, config)
    assert_contents_refused(
        path, tensors | {name: tensors[name] * torch.nan}, config, "changed has NaN in"
    )
    assert_contents_refused(
        path, tensors | {name: tensors[name] * torch.inf}, config, "changed has .* in '"
    )
    float8 = tensors[name].to(torch.float8_e4m3fn)
    assert_contents_refused(
        path, tensors | {name: float8}, config, "float8_e4m3fn in .* does not write"
    )


@pytest.mark.parametrize(
    ("kind", "key", "value", "message"),
    [
        ("guided", "kind", "guide", "holds a 'guide', not a posterior; expected one of"),
        ("guided", "kind", {"a": 1}, "not a posterior"),
        ("guided", "n", 0, "n = 0, expected a positive whole number"),
        ("guided", "history", "none", "history = 'none', expected a list of records"),
        ("guided", "stopped", 3, "stopped = 3, expected a word"),
        ("guided", "shapes", [], "shapes"),
        ("empirical", "chains", -1, "chains"),
        ("empirical", "shared", 3, "shared = 3, expected the names of tensors"),
        ("masked", "p", "often", "expected a rate"),
        ("mixture", "components", 3, "components = 3, expected a list of posteriors"),
        ("guided", "prior", {"spec": "Normal"}, "pass the prior it was fitted with"),
        (
            "guided",
            "rules",
            [[["0.weight"], {"spec": "MeanField", "fields": {"std": -1}}]],
            "MeanField std must be positive and finite",
        ),
        ("gaussian", "covariance", ["magic", {}], "'magic'"),
        ("gaussian", "predictive", "guess", "guess"),
        ("mixture", "components", [], "at least one posterior"),
    ],
)
def test_wrong_entries_are_file_errors(kind, key, value, message, saved_states, tmp_path):
    tensors, config = saved_states[kind]
    assert_contents_refused(tmp_path / "changed", tensors, config | {key: value}, message)


NAMES = {
    "guided": "guides.1.center",
    "empirical": "stack.0.bias",
    "gaussian": "mean.0.bias",
    "masked": "weights.0.bias",
}


@pytest.mark.parametrize("kind", NAMES)
def test_tensors_of_other_types_and_shapes_are_file_errors(kind, saved_states, tmp_path):
    tensors, config = saved_states[kind]
    path = tmp_path / "changed"
    value = tensors[NAMES[kind]]
    for dtype in (torch.float16, torch.float64):
        message = "changed has torch.float.* and torch.float.* in '"
        assert_contents_refused(path, tensors | {NAMES[kind]: value.to(dtype)}, config, message)
    for dtype in (torch.int64, torch.bool):
        assert_contents_refused(
            path, tensors | {NAMES[kind]: value.to(dtype)}, config, f"{dtype} in"
        )
    assert_contents_refused(path, tensors | {NAMES[kind]: value.unsqueeze(-1)}, config)
    if kind == "empirical":
        assert_contents_refused(
            path, tensors | {NAMES[kind]: value[:1]}, config, "1 of . points in"
        )


@pytest.mark.parametrize(
    ("method", "missing"),
    [
        (bayou.MAP(steps=4, checkpoint_every=2), ("keys", "optimizer", "state")),
        (bayou.HMC(draws=2, warmup=1, leapfrogs=2), ("keys", "sampling", "step")),
    ],
)
def test_wrong_contents_of_a_checkpoint_are_file_errors(method, missing, tmp_path):
    def run():
        fit(net(), method, checkpoint=tmp_path / "c")

    run()
    tensors, config = read_file(tmp_path / "c")
    for key in missing:
        write_file(tmp_path / "c", tensors, {k: v for k, v in config.items() if k != key})
        with pytest.raises(FileError, match="c .*(delete it|no run like this one can be made)"):
            run()
    name = next(
        name
        for name, value in tensors.items()
        if value.is_floating_point() and value.ndim > 1 and not name.startswith("optimizer.")
    )
    changes = [torch.Tensor.long]
    if not isinstance(method, bayou.HMC):
        changes.append(lambda value: value.unsqueeze(0))
    for change in changes:
        write_file(tmp_path / "c", tensors | {name: change(tensors[name])}, config)
        with pytest.raises(FileError, match="the checkpoint .*c has .* expected.*delete it"):
            run()


def test_a_config_that_is_no_object_is_foreign(tmp_path):
    for config in ([1], "text", None):
        write_file(tmp_path / "odd", {}, config)
        assert_refused(tmp_path / "odd", "foreign file: ValueError: config.json is a")


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
    assert_refused(tmp_path / "bomb", "bomb is a foreign file.*bayou packs nothing")


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
    assert_refused(tmp_path / "promise", "promise is a foreign file")


# --- what killed processes leave behind ---------------------------------------------------------


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
        for _ in range(5):
            posterior.save(tmp_path / "a")
            bayou.load(tmp_path / "a", net())

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(save, range(4)))
    assert os.listdir(tmp_path) == ["a"]


# --- no code ------------------------------------------------------------------------------------


def test_a_file_with_a_callable_is_refused_with_the_way_out(tmp_path):
    network = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 2))
    one = fitted(
        {"2.weight": bayou.MNF(flow=crooked), "*": bayou.Delta()},
        network,
        likelihood=bayou.HeteroscedasticGaussian(),
    )
    one.save(tmp_path / "a")
    assert_refused(
        tmp_path / "a", r"custom 'crooked'.*runs no code.*load\(..., rules=...\)", network
    )
    rules = {"2.weight": bayou.MNF(flow=crooked), "*": bayou.Delta()}
    two = bayou.load(tmp_path / "a", network, rules=rules)
    assert torch.equal(two.predict(X, 3, seed=0).outputs, one.predict(X, 3, seed=0).outputs)
    assert_refused(
        tmp_path / "a",
        "does not fit this network and these rules",
        network,
        rules=bayou.MeanField(),
    )


def test_a_density_as_a_prior_is_said_again(tmp_path):
    prior = DensityPrior(lambda w: -w.abs().flatten(-2).sum(-1) if w.ndim > 2 else -w.abs().sum(-1))
    rules = {"*.weight": bayou.MeanField(local=False), "*": bayou.Delta()}
    priors = {"*.weight": prior, "*": bayou.Normal(1.0)}
    one = fitted(rules, prior=priors)
    one.save(tmp_path / "a")
    assert_refused(tmp_path / "a", r"load\(..., prior=...\)")
    two = bayou.load(tmp_path / "a", net(), prior=priors)
    assert torch.equal(two.predict(X, 3, seed=0).outputs, one.predict(X, 3, seed=0).outputs)


def test_loading_runs_nothing_that_a_file_names(posterior, tmp_path, monkeypatch):
    posterior.save(tmp_path / "a")
    tensors, config = read_file(tmp_path / "a")
    config["rules"][0][1] = {"spec": "system", "fields": {"command": "touch hacked"}}
    write_file(tmp_path / "a", tensors, config)
    monkeypatch.chdir(tmp_path)
    assert_refused(tmp_path / "a", "names 'system', which is unknown here")
    assert not (tmp_path / "hacked").exists()
    for source in (tmp_path / "a").read_bytes(), pack({}, {}):
        assert b"pickle" not in source


# --- writing ------------------------------------------------------------------------------------


@pytest.mark.parametrize("fails", ["replace", "fsync"])
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()]
)
def test_a_crash_while_writing_leaves_the_old_file_and_nothing_else(
    fails, error, file, posterior, monkeypatch
):
    before = file.read_bytes()

    def fail(*args):
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, fails, fail)
        with pytest.raises((FileError, KeyboardInterrupt)) as caught:
            posterior.save(file)
    if isinstance(error, OSError):
        assert re.search("cannot write .*No space left.*untouched", str(caught.value))
    assert file.read_bytes() == before
    assert os.listdir(file.parent) == [file.name]


def test_a_folder_that_is_not_there_or_not_writable_is_named(posterior, tmp_path, monkeypatch):
    with pytest.raises(FileError, match="the folder .*missing does not exist; create it first"):
        posterior.save(tmp_path / "missing" / "a")
    with pytest.raises(FileError, match="it is a folder"):
        posterior.save(tmp_path)

    def denied(*args):
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(files, "open", denied, raising=False)
    with pytest.raises(FileError, match="cannot write .*a: Permission denied"):
        posterior.save(tmp_path / "a")


@pytest.mark.skipif(os.name != "posix", reason="permissions")
def test_a_folder_without_permission_is_named(posterior):
    nobody, user = 65534, os.geteuid()
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)
        try:
            os.seteuid(nobody if user == 0 else user)  # root may write anywhere
            with pytest.raises(FileError, match="Permission denied"):
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


# --- specs and states ---------------------------------------------------------------------------


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

"""Data sets by name: the makers, the decoders on tiny files of the same formats, checksums,
downloads.

Tests of the published files themselves need ``BAYOU_DATA``.
"""

import functools
import gzip
import hashlib
import http.server
import io
import json
import os
import subprocess
import sys
import tarfile
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose

from bayou.data import (
    CATALOGUE,
    DataError,
    catalogue,
    download,
    files,
    images,
    load,
    toys,
    uci,
)
from bayou.data.catalogue import Entry, File
from tests.data.errors import refused

MADE = [name for name, entry in CATALOGUE.items() if entry.source == "made"]
REFERENCE = Path(__file__).parents[1] / "reference" / "cubic_hmc.json"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A folder of data sets, and no other."""
    monkeypatch.delenv("BAYOU_DATA", raising=False)
    return tmp_path


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return cache / "bayou"


def check(data):
    """What every data set promises."""
    for x, y in (data.train, data.test):
        assert x.dtype == torch.float32
        assert tuple(x.shape[1:]) == data.input_shape
        assert len(x) == len(y) > 0
        assert torch.isfinite(x).all()
        if data.task == "classification":
            assert y.dtype == torch.int64
            assert 0 <= int(y.min()) <= int(y.max()) < data.output_size == len(data.class_names)
        else:
            assert y.dtype == torch.float32
            assert y.shape == (len(x), 1)
            assert data.output_size == 1
    if data.ood is not None:
        assert data.ood.dtype == torch.float32
        assert tuple(data.ood.shape[1:]) == data.input_shape
        assert data.ood_name
    assert data.notes
    assert all(note.endswith(".") for note in data.notes)
    if data.feature_names:
        assert len(data.feature_names) == data.input_shape[0]


# --- made ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MADE)
def test_made_data_sets_keep_their_promises(name):
    data = load(name)
    check(data)
    assert data.ood is not None
    again = load(name)
    assert torch.equal(data.train[0], again.train[0])
    assert torch.equal(data.test[1], again.test[1])
    assert torch.equal(data.ood, again.ood)


def test_digits_are_split_by_class_and_standardized():
    data = load("digits")
    assert data.input_shape == (1, 8, 8)
    assert (data.n, len(data.test[1])) == (1438, 359)
    assert torch.bincount(data.test[1]).min() >= 35
    assert abs(float(data.train[0].mean())) < 1e-5
    assert float(data.train[0].std()) == pytest.approx(1.0, abs=1e-3)
    pixels = data.preprocessor.pixels(data.test[0])
    assert float(pixels.min()) == pytest.approx(0.0, abs=1e-5)
    assert float(pixels.max()) == pytest.approx(1.0, abs=1e-5)
    assert torch.equal(load("digits", seed=5).train[0], data.train[0])  # split 0 never changes
    assert not torch.equal(load("digits", split=1).test[0], data.test[0])
    from sklearn.datasets import load_digits

    raw = load_digits().images
    everything = torch.cat([data.train[0], data.test[0]])
    assert torch.equal(
        everything.flatten(1).sum(1).sort().values,
        data.preprocessor.transform(raw).flatten(1).sum(1).sort().values,
    )


def test_images_to_predict_come_in_many_forms(tmp_path):
    """The same two digits as NPZ and as arrays of several shapes."""
    data = load("digits")
    raw = (data.preprocessor.pixels(data.test[0][:2]) * 16).round().numpy().reshape(2, 64)
    classes = data.test[1][:2]
    np.savez(tmp_path / "a.npz", x=raw.reshape(2, 8, 8), y=classes.numpy())
    for source in (tmp_path / "a.npz", raw, raw.reshape(2, 1, 8, 8)):
        rows = data.preprocessor.rows(source)
        torch.testing.assert_close(rows.x, data.test[0][:2], atol=1e-5, rtol=0)
        if isinstance(source, Path):
            assert torch.equal(rows.y, classes)
    assert data.preprocessor.transform(raw[0].reshape(8, 8)).shape == (1, 1, 8, 8)
    assert "largest pixel is 255" in data.preprocessor.rows(np.full((1, 8, 8), 255)).notes[0]
    with refused(r"must be \(N, 1, 8, 8\)"):
        data.preprocessor.transform(np.zeros((2, 28, 28)))
    with refused("have no targets"):
        data.preprocessor.rows(raw, need_target=True)
    (tmp_path / "few.csv").write_text("1,2,3\n4,5,6\n")
    with refused("cannot read few.csv as NPZ"):
        data.preprocessor.rows(tmp_path / "few.csv")


def test_few_digits_and_five_digits():
    few = load("digits-few")
    assert (few.n, len(few.test[1]), few.ood_name) == (179, 1618, "letters")
    assert int(torch.bincount(few.train[1]).min()) >= 17  # some of every digit
    data = load("digits5")
    whole = load("digits")
    assert data.output_size == 5
    assert len(data.ood) == int((whole.test[1] >= 5).sum())
    assert len(data.test[1]) == int((whole.test[1] < 5).sum())
    assert load("digits5", ood="letters").ood_name == "letters"
    assert load("digits", ood="none").ood is None
    with refused("'letters' or 'none', got 'mnist'"):
        load("digits", ood="mnist")


def test_letters_look_like_digits_to_simple_statistics():
    """The same range, and ink within a quarter of that of the digits: it is shape that tells them
    apart.
    """
    letters = toys.letters(220)
    digits = load("digits").preprocessor.pixels(load("digits").train[0]) * 16
    assert letters.shape == (220, 1, 8, 8)
    assert letters.min() == 0
    assert letters.max() == 16
    assert np.array_equal(letters, np.round(letters))
    assert letters.mean() == pytest.approx(float(digits.mean()), rel=0.25)
    assert np.array_equal(toys.letters(30), letters[:30])
    assert not np.array_equal(toys.letters(30, seed=1), letters[:30])
    means = letters.reshape(-1, len(toys.LETTERS), 64).mean(0)
    gaps = np.linalg.norm(means[:, None] - means[None], axis=-1) + 100 * np.eye(len(means))
    assert gaps.min() > 8  # eleven letters, not eleven of one


def test_cubic_is_the_problem_that_hmc_solved():
    reference, data = json.loads(REFERENCE.read_text()), load("cubic")
    model = reference["model"]
    assert_allclose(data.train[0][:, 0] * model["x_scale"], reference["data"]["x"], atol=1e-6)
    assert_allclose(data.train[1][:, 0] * model["y_scale"], reference["data"]["y"], atol=1e-5)
    assert data.y_scale == model["y_scale"]
    assert float(data.ood.abs().min()) > 1.0  # |x| > 4
    x, y = 4 * data.test[0].double(), data.preprocessor.original(data.test[1]).double()
    assert float((y - x**3).std()) == pytest.approx(3.0, rel=4 / 400**0.5)
    assert not torch.equal(load("cubic", seed=1).test[0], data.test[0])
    assert torch.equal(load("cubic", seed=1).train[1], data.train[1])


def test_two_bumps_leave_a_gap_and_noise_can_grow():
    for name in ("two-bumps", "two-bumps-hetero"):
        data = load(name)
        column = data.preprocessor.columns[0]
        x = data.train[0] * column.scale + column.mean
        assert float(x.abs().min()) >= 0.5 - 1e-5
        assert float(x.abs().max()) <= 1.0 + 1e-5
        assert float((data.ood * column.scale + column.mean).abs().max()) < 0.451
        x = (data.test[0].double() * column.scale + column.mean).flatten()
        rest = data.preprocessor.original(data.test[1].double()).flatten() - torch.cos(4 * x + 0.8)
        left, right = float(rest[x < 0].std()), float(rest[x > 0].std())
        assert (right > 1.8 * left) == (name == "two-bumps-hetero")


def test_moons_are_far_from_their_ood():
    data = load("moons")
    assert data.ood is not None
    assert torch.bincount(data.train[1]).tolist() == [200, 200]
    assert float(torch.cdist(data.ood, data.train[0]).min()) > 0.5
    assert not torch.equal(load("moons", seed=1).train[0], data.train[0])


# --- the door -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: load("minst"), "did you mean 'mnist'"),
        (lambda: load("nothing-like-it"), "the names are digits"),
        (lambda: load("digits", target="y"), "--target is for a file"),
        (lambda: load("digits", task="regression"), "for classification, not regression"),
        (lambda: load("cubic", split=1), "one split"),
        (lambda: load("mnist", split=1), "one published split"),
        (lambda: load("moons", ood="letters"), "cannot be chosen"),
        (lambda: load("kmnist"), "`bayou train mnist --ood kmnist`"),
        (lambda: load("digits", split=-1), "split counts from 0"),
        (lambda: download("digits"), "needs no files"),
        (
            lambda: download("boston"),
            "no public URL.*UCI_Datasets of https.*put it below.*mnist, fashion",
        ),
    ],
)
def test_the_door_helps(call, message):
    with refused(message):
        call()


def test_a_missing_file_says_which_where_and_how(tmp_path, monkeypatch, own_cache):
    monkeypatch.setenv("BAYOU_DATA", str(tmp_path))
    with pytest.raises(DataError) as caught:
        load("mnist")
    message = str(caught.value)
    for part in (
        "mnist/train-images-idx3-ubyte.gz",
        str(tmp_path),
        str(own_cache),
        "bayou download mnist",
        "BAYOU_DATA",
    ):
        assert part in message
    with pytest.raises(DataError, match="uci_gal_splits") as caught:
        load("yacht")
    assert "download" not in str(caught.value)


def test_cache_folders(monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert files.cache_dir() == Path("/elsewhere/bayou")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(sys, "platform", "linux")
    assert files.cache_dir() == Path.home() / ".cache" / "bayou"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert files.cache_dir() == Path.home() / "Library" / "Caches" / "bayou"
    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setenv("LOCALAPPDATA", "/local")
    assert files.cache_dir() == Path("/local/bayou/cache")


def test_the_names_need_only_the_standard_library():
    """The catalogue and the names of networks, imported without the package's own __init__."""
    code = """
import importlib.util, sys, types, pathlib
root = pathlib.Path(sys.argv[1])
folders = {"bayou": root, "bayou.data": root / "data", "bayou.app.runs": root / "app" / "runs"}
for name, path in folders.items():
    module = types.ModuleType(name); module.__path__ = [str(path)]; sys.modules[name] = module
import bayou.data.catalogue, bayou.data.files, bayou.data.dataset, bayou.app.runs.nets
spec = importlib.util.spec_from_file_location("bayou.data", root / "data" / "__init__.py")
spec.loader.exec_module(importlib.util.module_from_spec(spec))
print(sorted({"numpy", "torch", "sklearn", "PIL", "torchmetrics", "pandas"} & set(sys.modules)))
"""
    root = Path(catalogue.__file__).parents[1]
    answer = subprocess.run(
        [sys.executable, "-c", code, str(root)], capture_output=True, text=True, check=True
    )
    assert answer.stdout.strip() == "[]"


# --- tiny files of the published formats --------------------------------------------------------


def as_file(path, content, *urls):
    return File(path, len(content), hashlib.sha256(content).hexdigest(), urls)


def put(folder, path, content):
    (folder / path).parent.mkdir(parents=True, exist_ok=True)
    (folder / path).write_bytes(content)
    return as_file(path, content)


def idx(array):
    head = bytes([0, 0, 8, array.ndim]) + b"".join(n.to_bytes(4, "big") for n in array.shape)
    return gzip.compress(head + array.tobytes())


def tiny_mnist(folder, monkeypatch, name="mnist"):
    """A data set of 30 + 10 images of 6×5 pixels under the name of a larger one."""
    random = np.random.default_rng(len(name))
    arrays = {
        catalogue.TRAIN_IMAGES: random.integers(0, 256, (30, 6, 5), dtype=np.uint8),
        catalogue.TRAIN_LABELS: random.integers(0, 10, 30, dtype=np.uint8),
        catalogue.TEST_IMAGES: random.integers(0, 256, (10, 6, 5), dtype=np.uint8),
        catalogue.TEST_LABELS: random.integers(0, 10, 10, dtype=np.uint8),
    }
    made = tuple(
        put(folder, f"{name}/{stem}-ubyte.gz", idx(array)) for stem, array in arrays.items()
    )
    monkeypatch.setitem(CATALOGUE, name, replace(CATALOGUE[name], files=made))
    return arrays


def test_idx_files_are_decoded(folder, monkeypatch):
    arrays = tiny_mnist(folder, monkeypatch)
    data = load("mnist", root=folder)
    check(data)
    assert data.ood is None
    assert any("No out-of-distribution data" in note for note in data.notes)
    pixels = data.preprocessor.pixels(data.train[0]) * 255
    assert_allclose(pixels[:, 0], arrays[catalogue.TRAIN_IMAGES], atol=1e-3)
    assert data.test[1].tolist() == arrays[catalogue.TEST_LABELS].tolist()
    expected = arrays[catalogue.TRAIN_IMAGES].astype(np.float64) / 255
    assert data.preprocessor.mean[0] == pytest.approx(expected.mean(), rel=1e-9)
    assert data.preprocessor.scale[0] == pytest.approx(expected.std(), rel=1e-9)


def test_images_from_elsewhere_see_the_same_preprocessing(tmp_path, monkeypatch):
    monkeypatch.setenv("BAYOU_DATA", str(tmp_path))
    tiny_mnist(tmp_path, monkeypatch)
    other = tiny_mnist(tmp_path, monkeypatch, "fashion")
    data = load("mnist")
    assert data.ood_name == "fashion"
    assert torch.equal(data.ood, data.preprocessor.transform(other[catalogue.TEST_IMAGES]))
    assert load("mnist", ood="none").ood is None
    with refused("another set of images"):
        load("mnist", ood="digits")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "x.gz"),
        (b"\x1f\x8b123", "x.gz"),
        (gzip.compress(b"\0\0\x08\x03", mtime=0), "x.gz is not an idx file"),
        (gzip.compress(b"plain text", mtime=0), "x.gz is not an idx file"),
        (
            gzip.compress(b"\0\0\x08\x01\0\0\0\x0c" + bytes(11), mtime=0),
            r"should hold \(12,\) bytes, but has 11",
        ),
    ],
    ids=["empty", "not gzip", "no shape", "text", "truncated"],
)
def test_damaged_idx_files(tmp_path, content, message):
    (tmp_path / "x.gz").write_bytes(content)
    with refused(message):
        images.read_idx(tmp_path / "x.gz")


def cifar_arrays(each=4):
    random = np.random.default_rng(0)
    labels = np.arange(6 * each, dtype=np.uint8) % 10
    return random.integers(0, 256, (6 * each, 3, 32, 32), dtype=np.uint8), labels


def binary_archive(x, y, each=4):
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for i, name in enumerate(
            [*(f"data_batch_{k}.bin" for k in range(1, 6)), "test_batch.bin", "readme.html"]
        ):
            part = slice(i * each, (i + 1) * each)
            content = b"".join(
                bytes([label]) + image.tobytes()
                for image, label in zip(x[part], y[part], strict=True)
            )
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return stream.getvalue()


def sheets(folder, x, y, each=4):
    image = pytest.importorskip("PIL.Image")
    stream = io.BytesIO()
    np.savez(stream, train=y[: 5 * each], test=y[5 * each :])
    made = [put(folder, "cifar10/labels.npz", stream.getvalue())]
    for i, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]):
        part = x[i * each : (i + 1) * each].transpose(0, 2, 3, 1)  # 4 images as a grid of 2×2
        grid = part.reshape(2, 2, 32, 32, 3).swapaxes(1, 2).reshape(64, 64, 3)
        stream = io.BytesIO()
        image.fromarray(grid).save(stream, "WEBP", lossless=True)
        made.append(put(folder, f"cifar10/{name}.webp", stream.getvalue()))
    return tuple(made)


def test_cifar_from_the_archive_and_from_sheets_is_the_same(folder, monkeypatch):
    x, y = cifar_arrays()
    archive = put(folder / "a", "cifar10/cifar-10-binary.tar.gz", binary_archive(x, y))
    made = sheets(folder / "b", x, y)
    for name in ("cifar10", "cifar5"):
        monkeypatch.setitem(
            CATALOGUE, name, replace(CATALOGUE[name], files=(archive,), instead=(made,))
        )
    one, two = load("cifar10", root=folder / "a"), load("cifar10", root=folder / "b")
    check(one)
    assert torch.equal(one.train[0], two.train[0])
    assert torch.equal(one.test[1], two.test[1])
    pixels = one.preprocessor.pixels(one.train[0]) * 255
    assert_allclose(pixels, x[:20], atol=1e-3)
    assert one.test[1].tolist() == y[20:].tolist()

    five = load("cifar5", root=folder / "a")
    check(five)
    assert five.output_size == 5
    assert five.n == int((y[:20] < 5).sum())
    assert len(five.ood) == int((y[20:] >= 5).sum())


def test_damaged_archives(tmp_path):
    path = tmp_path / "c.tar.gz"
    path.write_bytes(b"not an archive")
    with refused("cannot read"):
        images.read_cifar_binary(path)
    path.write_bytes(binary_archive(*cifar_arrays())[:-2000])
    with refused("cannot read|lacks"):
        images.read_cifar_binary(path)
    with refused("cannot read"):
        uci.read_split(path, "yacht", 0)


def uci_archive(folder, data, train, test, target):
    features = [i for i in range(data.shape[1]) if i != target]
    texts = {
        "data": "\n".join(" ".join(f"{v:.6f}" for v in row) for row in data),
        "index_features": "\n".join(f"{i:.18e}" for i in features),
        "index_target": f"{target:.18e}",
        "index_train_0": "\n".join(map(str, train)),
        "index_test_0": "\n".join(map(str, test)),
    }
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:xz") as archive:
        for name, text in texts.items():
            member = tarfile.TarInfo(f"UCI_Datasets/{folder}/data/{name}.txt")
            member.size = len(text.encode())
            archive.addfile(member, io.BytesIO(text.encode()))
    return stream.getvalue()


def test_uci_splits_are_decoded_and_standardized(folder, monkeypatch):
    data = np.random.default_rng(0).normal(3, 2, (20, 4)).round(4)
    data[:, 1] = 0.1  # constant, and not a sum of powers of 2
    train, test = [5, 3, 11, 0, 1, 2, 4, 19, 18], [6, 7, 8]
    content = uci_archive("yacht", data, train, test, target=2)
    file = put(folder, catalogue.UCI_ARCHIVE.path, content)
    monkeypatch.setitem(CATALOGUE, "yacht", replace(CATALOGUE["yacht"], files=(file,)))
    got = load("yacht", root=folder)
    check(got)
    x = data[:, [0, 1, 3]]
    mean, scale = x[train].mean(0), np.where(np.arange(3) == 1, 1.0, x[train].std(0))
    expected = (x - mean) / scale
    assert_allclose(got.train[0], expected[train], atol=1e-5)  # in the published order
    assert_allclose(got.test[0], expected[test], atol=1e-5)
    assert (got.train[0][:, 1] == 0).all()
    assert any("x2" in note for note in got.notes)
    y = got.preprocessor.original(got.test[1].double()).flatten()
    assert_allclose(y, data[test, 2], atol=1e-5)
    with refused("splits 0 to 19, got 20"):
        load("yacht", split=20, root=folder)
    with refused("does not contain .*index_train_1"):
        load("yacht", split=1, root=folder)


# --- checksums and downloads --------------------------------------------------------------------


def test_a_file_that_is_not_the_published_one(folder, monkeypatch):
    tiny_mnist(folder, monkeypatch)
    path = folder / "mnist" / "t10k-labels-idx1-ubyte.gz"
    content = bytearray(path.read_bytes())
    load("mnist", root=folder)
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    with refused("SHA-256"):
        load("mnist", root=folder)
    path.write_bytes(bytes(content) + b"!")
    with refused("bytes, not "):
        load("mnist", root=folder)


@pytest.fixture
def server(tmp_path):
    """A web server on this machine, for a folder."""
    folder = tmp_path / "public"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *arguments): ...

    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Quiet, directory=str(folder))
    ) as running:
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{running.server_address[1]}", folder
        running.shutdown()
        thread.join()


def served(monkeypatch, *made):
    entry = Entry("thing", "classification", "images", "a thing", tuple(made))
    monkeypatch.setitem(CATALOGUE, "thing", entry)


def test_download(server, monkeypatch, own_cache):
    address, folder = server
    content = os.urandom(3_000_000)
    (folder / "a.gz").write_bytes(content)
    addresses = (f"{address}/absent.gz", f"{address}/a.gz")  # the second one is tried
    served(monkeypatch, as_file("thing/a.gz", content, *addresses))
    (path,) = download("thing")
    assert path == own_cache / "thing" / "a.gz"
    assert path.read_bytes() == content
    (folder / "a.gz").unlink()
    assert download("thing") == [path]  # there already
    assert files.available(CATALOGUE["thing"])


def test_a_download_that_is_wrong_leaves_nothing_behind(server, monkeypatch, tmp_path):
    address, folder = server
    (folder / "short.gz").write_bytes(b"x" * 10)
    (folder / "long.gz").write_bytes(b"x" * 10_000)
    for name, problem in (
        ("short.gz", "got 10 bytes"),
        ("long.gz", "than the published 100"),
        ("absent.gz", "404"),
    ):
        served(monkeypatch, as_file(f"thing/{name}", b"y" * 100, f"{address}/{name}"))
        with refused(problem):
            download("thing", root=tmp_path / "out")
        assert not (tmp_path / "out").exists()


# --- the published files ------------------------------------------------------------------------

published = pytest.mark.skipif(not os.environ.get("BAYOU_DATA"), reason="needs BAYOU_DATA")


def load_published(name):
    if not files.available(CATALOGUE[name]):
        pytest.skip("the files are not in BAYOU_DATA")
    data = load(name)
    check(data)
    return data


@published
@pytest.mark.parametrize("name", [n for n, e in CATALOGUE.items() if e.source == "uci"])
def test_published_uci_sets(name):
    data = load_published(name)
    assert abs(float(data.train[0].mean())) < 1e-4
    assert float(data.train[1].std(correction=0)) == pytest.approx(1.0, abs=1e-4)


@published
@pytest.mark.parametrize(
    ("name", "rows", "mean", "scale"),
    [
        ("mnist", 60_000, (0.1307,), (0.3081,)),
        ("fashion", 60_000, (0.2860,), (0.3530,)),
        pytest.param(
            *("cifar10", 50_000, (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_published_images(name, rows, mean, scale):
    data = load_published(name)
    assert (data.n, len(data.test[1])) == (rows, 10_000)
    preprocessor = data.preprocessor
    assert preprocessor.mean == pytest.approx(mean, abs=5e-5)
    assert preprocessor.scale == pytest.approx(scale, abs=5e-5)
    if name == "cifar10":
        assert data.train[1][:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]  # canonical order

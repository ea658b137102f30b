"""The board: known distances, the place among committed rows, and rows in a wrong order."""

import hashlib
import io
import json
import tarfile

import numpy as np
import pytest
import torch

from bayou import truth
from bayou.data import DataError
from bayou.data.files import folders
from bayou.truth import PredictionError, references

NEEDS_HMC = pytest.mark.skipif(
    not any((folder / "cifar10/hmc_resnet20_frn_swish.npz").is_file() for folder in folders()),
    reason="needs the data",
)


@pytest.fixture
def digits():
    return truth.reference("hmc-digits")


def write(path, log_probs, **more):
    truth.write_predictions(path, log_probs.exp(), **more)
    return path


def test_the_reference_has_the_distance_zero_and_is_no_method(digits, tmp_path):
    board = truth.score(write(tmp_path / "same.npz", digits.log_probs), "hmc-digits")
    (hmc,) = (row for row in board.others if row.total_variation == 0)
    assert board.row.total_variation == 0
    assert board.row.agreement == 1
    for name in ("nll", "ece", "accuracy"):
        assert getattr(board.row, name) == pytest.approx(getattr(hmc, name), abs=1e-5)
    assert board.rank == 1
    assert board.methods == len(board.others)  # without HMC, with the scored one


def test_a_mixture_with_the_uniform_distribution_has_its_known_distance(digits, tmp_path):
    p = digits.log_probs.exp()
    mixture = 0.5 * p + 0.05
    board = truth.score(write(tmp_path / "wide.npz", mixture.log(), epochs=2), "hmc-digits")
    expected = 0.25 * float((p - 0.1).abs().sum(1).mean())
    assert board.row.total_variation == pytest.approx(expected, abs=1e-5)
    assert board.row.agreement == 1
    assert (board.row.label, board.row.epochs, board.row.minutes) == ("wide", 2.0, None)
    distances = [row.total_variation for row in board.rows]
    assert distances == sorted(distances)
    assert board.rank == board.methods  # it is the last


def test_several_files_are_repetitions_of_one_method(digits, tmp_path):
    p = digits.log_probs.exp()
    paths = [
        write(tmp_path / f"{k}.npz", ((1 - k / 10) * p + k / 100).log(), minutes=k, seeds=(k,))
        for k in (1, 2, 3)
    ]
    board = truth.score(paths, "hmc-digits")
    each = [truth.score(path, "hmc-digits").row.total_variation for path in paths]
    assert board.row.total_variation == pytest.approx(np.mean(each), abs=1e-5)
    assert board.row.total_variation_error == pytest.approx(np.std(each, ddof=1) / 3**0.5, abs=1e-5)
    assert (board.row.seeds, board.row.minutes) == (3, 2.0)
    entry = json.loads(json.dumps(board.entry()))
    assert entry["files"][2]["seeds"] == [3]
    assert entry["files"][0]["sha256"] == hashlib.sha256(paths[0].read_bytes()).hexdigest()
    assert truth.Row(**entry["row"]) == board.row


def test_rows_in_another_order_are_an_error(digits, tmp_path):
    shuffled = digits.log_probs[torch.randperm(359, generator=torch.Generator().manual_seed(0))]
    path = write(tmp_path / "shuffled.npz", shuffled)
    with pytest.raises(PredictionError, match=r"which is that of chance: expected are rows in the"):
        truth.score(path, "hmc-digits")


def test_a_known_other_order_is_named(digits, tmp_path, monkeypatch):
    order = references.tfds_order(359)
    known = truth.Reference("d", digits.log_probs, digits.y, "order", {references.TFDS: order})
    monkeypatch.setitem(truth.REFERENCES, "hmc-digits", truth.Source("", lambda root: known))
    path = write(tmp_path / "tfds.npz", digits.log_probs[order])
    with pytest.raises(PredictionError, match=r"order of tensorflow_datasets: .*from_tfds_order"):
        truth.score(path, "hmc-digits")
    restored = references.from_tfds_order(digits.log_probs[order].numpy())
    assert np.array_equal(restored, digits.log_probs.numpy())


def test_an_impossible_class_and_a_wrong_shape_are_errors(digits, tmp_path):
    p = digits.log_probs.exp()
    p[7, digits.y[7]] = 0.0
    path = write(tmp_path / "zero.npz", (p / p.sum(1, keepdim=True)).log())
    with pytest.raises(PredictionError, match=r"probability 0 in 1 rows, the first is row 7"):
        truth.score(path, "hmc-digits")
    path = write(tmp_path / "few.npz", digits.log_probs[:10])
    with pytest.raises(PredictionError, match=r"\(10, 10\), .* has \(359, 10\): 359 test rows"):
        truth.score(path, "hmc-digits")
    with pytest.raises(DataError, match=r"no reference 'hmc-digit' \(did you mean 'hmc-digits'\?"):
        truth.score(path, "hmc-digit")
    with pytest.raises(PredictionError, match="no files"):
        truth.score([], "hmc-digits")


def test_a_missing_reference_says_where_it_is_from(tmp_path, monkeypatch):
    monkeypatch.delenv("BAYOU_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(DataError, match=r"probs\.csv of https.*set BAYOU_DATA to the folder"):
        truth.reference("hmc-cifar10")


def test_another_file_in_the_place_of_the_reference_is_refused(tmp_path, monkeypatch):
    monkeypatch.delenv("BAYOU_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    path = tmp_path / references.HMC_FILE.path
    path.parent.mkdir()
    np.savez(path, probs=np.full((10, 10), 0.1, np.float32))
    with pytest.raises(DataError, match="does not have the published predictions of HMC"):
        truth.reference("hmc-cifar10", root=tmp_path)
    path.unlink()
    (tmp_path / references.PUBLISHED_FILE).write_text("0.5,x")
    with pytest.raises(DataError, match="as probabilities"):
        truth.reference("hmc-cifar10", root=tmp_path)


def test_the_published_file_is_put_in_canonical_order_and_sums_to_one(tmp_path):
    probs = np.random.default_rng(0).dirichlet(np.ones(3), size=20).astype(np.float32)
    published = 1.0000001 * probs[references.tfds_order(20)].astype(float)
    for delimiter in (",", " "):
        np.savetxt(tmp_path / "probs.csv", published, delimiter=delimiter)
        read = references.read_published(tmp_path / "probs.csv")
        np.testing.assert_allclose(read, probs, rtol=1e-6)
        np.testing.assert_allclose(read.sum(1), 1, rtol=1e-6)


def test_the_order_of_tensorflow_datasets_begins_as_published():
    """Row 0 of the published predictions of HMC is test image 9,933, an automatic check."""
    assert references.tfds_order(10_000)[:4].tolist() == [9933, 5669, 163, 6686]


@pytest.fixture
def published(tmp_path, monkeypatch):
    """A folder with the reference as published and the archive of CIFAR-10, without images."""
    reference = truth.reference("hmc-cifar10")
    folder = tmp_path / "cifar10"
    folder.mkdir()
    probs = reference.log_probs.exp().numpy()[references.tfds_order(10_000)]
    np.savetxt(folder / "probs.csv", probs, delimiter=",")
    records = np.zeros((10_000, 3073), np.uint8)
    records[:, 0] = reference.y
    with tarfile.open(folder / "cifar-10-binary.tar.gz", "w:gz", compresslevel=1) as tar:
        member = tarfile.TarInfo("cifar-10-batches-bin/test_batch.bin")
        member.size = records.nbytes
        tar.addfile(member, io.BytesIO(records.tobytes()))
    monkeypatch.delenv("BAYOU_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "empty"))
    monkeypatch.setattr("bayou.data.files._check_file", lambda file, path: path)
    return tmp_path, reference


@NEEDS_HMC
def test_the_published_file_and_the_canonical_one_are_the_same_reference(published, monkeypatch):
    folder, reference = published
    probs = references.read_published(folder / "cifar10" / "probs.csv")
    monkeypatch.setattr(references, "HMC_SHA256", hashlib.sha256(probs.tobytes()).hexdigest())
    again = truth.reference("hmc-cifar10", root=folder)
    # The rows of the canonical file are normalized already, up to rounding.
    assert torch.allclose(again.log_probs, reference.log_probs, atol=1e-6)
    assert torch.equal(again.y, reference.y)


PUBLISHED_ROW = """
6.847509145736694336e-01,8.538737893104553223e-02,6.429336033761501312e-03,4.651241004467010498e-03,
5.788006819784641266e-04,1.183859538286924362e-03,4.257444234099239111e-04,2.863919548690319061e-02,
5.701006948947906494e-02,1.309436857700347900e-01
"""  # the second of probs.csv, test image 5,669


@NEEDS_HMC
def test_a_published_row_has_the_bits_of_the_canonical_file(tmp_path):
    (tmp_path / "probs.csv").write_text(PUBLISHED_ROW.replace("\n", "") + "\n")
    (row,) = references.read_published(tmp_path / "probs.csv")
    expected = truth.reference("hmc-cifar10").log_probs[5669]
    assert torch.equal(torch.from_numpy(row).double().log(), expected)


@pytest.mark.parametrize("name", list(truth.REFERENCES))
def test_committed_rows_are_a_few_kilobytes_with_one_reference(name):
    rows = truth.committed_rows(name)
    assert sum(row.total_variation == 0 for row in rows) == 1
    assert all(0 <= row.total_variation < 1 and 0 < row.accuracy <= 1 for row in rows)
    assert (references.HERE / f"{name}.json").stat().st_size < 20_000

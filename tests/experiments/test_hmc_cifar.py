"""A residual network beside HMC: its weights and padding, every row, files that are made once, and
known scores.
"""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from bayou.data.files import folders
from experiments.hmc_cifar import images, rows
from experiments.hmc_cifar.images import Sizes
from experiments.hmc_cifar.network import Block, FilterResponseNorm, resnet
from experiments.hmc_cifar.scores import scores, spearman
from experiments.hmc_cifar.table import HMCCifar


def test_the_network_has_the_weights_and_the_padding_of_the_reference():
    torch.manual_seed(0)
    net = resnet()
    assert sum(parameter.numel() for parameter in net.parameters()) == 274_042
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    pad, conv, *_ = next(m for m in net.modules() if isinstance(m, Block) and len(m.shortcut)).body
    x = torch.randn(1, 16, 32, 32)
    out = conv(pad(x))
    corner = (conv.weight * x[:, :, :3, :3]).sum((1, 2, 3)) + conv.bias  # JAX pads only at the end
    assert out.shape == (1, 32, 16, 16)
    assert_close(out[0, :, 0, 0], corner)


def test_the_norm_is_its_formula():
    norm = FilterResponseNorm(3).double()
    torch.nn.init.normal_(norm.affine)
    gamma, beta, tau = norm.affine.split(3)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for b in range(2):
        for c in range(3):
            z = x[b, c] / (x[b, c].pow(2).mean() + 1e-6).sqrt()
            expected = (gamma[c] * z + beta[c]).clamp_min(tau[c].item())
            assert_close(norm(x)[b, c], expected)


def test_corruptions_are_deterministic_and_grow():
    pixels = np.random.default_rng(0).integers(0, 256, (40, 3, 32, 32), dtype=np.uint8)
    pixels[0] = 128
    for kind in images.CORRUPTIONS:
        made = [images.corrupted(pixels, kind, k).astype(float) for k in range(images.STRENGTHS)]
        change = [float(np.abs(one - pixels).mean()) for one in made]
        assert all(a < b for a, b in pairwise([0.0, *change])), kind
        assert np.array_equal(made[1], images.corrupted(pixels, kind, 1))
        if kind != "noise":
            assert (
                made[-1][0] == 128
            ).all()  # an image of one color has neither edges nor contrast
    noise = (
        images.corrupted(np.full((40, 3, 32, 32), 128, np.uint8), "noise", 4).astype(float) - 128
    )
    assert noise.std() == pytest.approx(
        25.5, rel=0.02
    )  # 122,880 numbers: four standard errors are 0.8 %
    assert noise.mean() == pytest.approx(0, abs=0.3)


def test_ranks_of_equal_values_are_shared():
    a, b = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert spearman(a, b) == pytest.approx(0.9486832980505138)  # scipy.stats.spearmanr
    assert spearman(a, -a) == pytest.approx(-1)


NEEDS_DATA = pytest.mark.skipif(
    not any((folder / "cifar10/hmc_resnet20_frn_swish.npz").is_file() for folder in folders()),
    reason="needs the data",
)


@NEEDS_DATA
@pytest.mark.slow
def test_students_are_made_of_saved_predictions_and_certified(monkeypatch, tmp_path):
    monkeypatch.setattr(rows, "TEACHER", "MC dropout, 2 runs")
    sizes = Sizes(width=4, blocks=1, train=60, test=40, away=20, batch=30, epochs=1, samples=2)
    study = HMCCifar(sizes=sizes)
    found = []
    for label in rows.STUDENTS:
        (fit,) = study.fits([], [label], 1, 1)
        row = study.measure(replace(fit, folder=str(tmp_path)), "cpu", 2, False)
        assert set(row["certificate"]) == {"test", "corrupted", *images.AWAY}
        assert row["certificate"]["test"]["farther"] is not None
        assert row["certificate"]["corrupted"]["farther"] is None
        found.append({"label": label, "length": 1, **row})
    lines = study.certificates({"rows": found})
    assert len(lines) == 5 + 2 * 4
    made = {file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("*.lesson")}
    assert len(made) == 2
    again = study.measure(replace(fit, folder=str(tmp_path)), "cpu", 2, False)
    assert again["certificate"] == row["certificate"]
    assert made == {file.name: file.stat().st_mtime_ns for file in tmp_path.rglob("*.lesson")}


@NEEDS_DATA
def test_the_reference_has_its_published_scores():
    task = images.read(Sizes(train=10), torch.device("cpu"))
    found = scores({"test": task.hmc.log()}, task)
    for name, value in {"accuracy": 91.44, "nll": 0.2773, "ece": 0.0522, "entropy": 0.4022}.items():
        assert found[name] == pytest.approx(value, abs=1e-4), name
    assert task.train[0].shape == (10, 3, 32, 32)
    strengths = task.inputs["corrupted"].unflatten(0, (images.STRENGTHS, -1))
    assert strengths.shape == (5, 1500, 3, 32, 32)
    distance = (strengths - task.inputs["test"][:1500]).square().mean((1, 2, 3, 4)).tolist()
    assert all(a < b for a, b in pairwise([0.0, *distance]))


def test_a_fit_in_a_mixture_counts_by_its_epochs(tmp_path):
    """One fit of 100 epochs and two of 50: weights 1/2, 1/4, 1/4."""
    probabilities = {("MC dropout", 50, 0): 0.9, ("MC dropout", 50, 1): 0.5, ("IVON", 100, 0): 0.1}
    for (label, epochs, seed), first in probabilities.items():
        fits = rows.Fits(Sizes(epochs=epochs), tmp_path, torch.device("cpu"), False)
        saved = {"epochs": epochs, "minutes": epochs / 10, "epoch_seconds": 2.0, "said": ""}
        saved["test"] = np.log([[first, 1 - first]])
        saved["test information"] = np.zeros(1)
        rows.write(fits.file(label, seed), saved)
    fits = rows.Fits(Sizes(), tmp_path, torch.device("cpu"), False)
    found = fits.mixed((rows.Part("MC dropout", 50, 2), rows.Part("IVON", 100, 1)))
    assert found["epochs"] == 200
    assert found["minutes"] == pytest.approx(20)
    first = float(torch.as_tensor(found["test"]).softmax(-1)[0, 0])
    assert first == pytest.approx((0.9 + 0.5) / 4 + 0.1 / 2)


def test_rows_of_one_length_have_files_of_their_own(tmp_path):
    fits = rows.Fits(Sizes(), tmp_path, torch.device("cpu"), False)
    files = [fits.file(label, 0) for label in rows.methods(Sizes())]
    assert len(set(files)) == len(files)

"""A residual network beside HMC: its weights and padding, every row, files that are made once, and
known scores.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from bayou.data.files import folders
from experiments import study
from experiments.hmc_cifar import HMCCifar, images, rows as cifar_rows
from experiments.hmc_cifar.images import Sizes, Task
from experiments.hmc_cifar.network import Block, FilterResponseNorm, resnet
from experiments.hmc_cifar.rows import Fits
from experiments.hmc_cifar.scores import scores, spearman

TINY = Sizes(width=2, blocks=1, train=20, test=20, batch=2, epochs=2, samples=4)


def made_task(sizes: Sizes, place: torch.device) -> Task:
    """Images whose brightness is their class; HMC and people are nearly sure of it."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(sizes.train + sizes.test) % 10
    x = 0.3 * torch.randn(len(y), 3, 32, 32, generator=draw) + (y / 5 - 1).view(-1, 1, 1, 1)
    away = {name: torch.randn(10, 3, 32, 32, generator=draw) for name in images.AWAY}
    sure = 0.8 * F.one_hot(y, 10).double() + 0.02 * (1 + torch.rand(len(y), 1, generator=draw))
    sure /= sure.sum(-1, keepdim=True)
    train, test = slice(sizes.train), slice(sizes.train, None)
    inputs = {"test": x[test], **away, "corrupted": x[test][:6].repeat(images.STRENGTHS, 1, 1, 1)}
    return Task((x[train], y[train]), inputs, y[test], sure[test], sure[test])


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> HMCCifar:
    """The study of a small network and made images."""
    monkeypatch.setattr(cifar_rows, "read", made_task)
    return HMCCifar(sizes=TINY)


def run(made: HMCCifar, folder: Path, *labels: str) -> tuple[dict[str, dict[str, float]], str]:
    def work(fit: study.Fit, *args: object, **_: object) -> dict[str, object]:
        key = {"data": fit.data, "label": fit.label, "seed": fit.seed, "length": fit.length}
        return key | made.measure(fit, "cpu", None, False)

    page, numbers, *_ = study.run(
        made, folder, made.fits([], labels, 1, None), work, tell=lambda text: None
    )
    return {row["label"]: row for row in json.loads(numbers.read_text())["rows"]}, page.read_text()


def test_the_network_has_the_weights_and_the_padding_of_the_reference() -> None:
    torch.manual_seed(0)
    net = resnet()
    assert sum(parameter.numel() for parameter in net.parameters()) == 274_042
    assert net(torch.randn(2, 3, 32, 32)).shape == (2, 10)
    pad, conv, *_ = next(m for m in net.modules() if isinstance(m, Block) and len(m.shortcut)).body
    x = torch.randn(1, 16, 32, 32)
    out = conv(pad(x))
    corner = (conv.weight * x[:, :, :3, :3]).sum((1, 2, 3)) + conv.bias  # JAX pads only at the end
    assert out.shape == (1, 32, 16, 16)
    torch.testing.assert_close(out[0, :, 0, 0], corner)


def test_the_norm_is_its_formula() -> None:
    norm = FilterResponseNorm(3).double()
    torch.nn.init.normal_(norm.affine)
    gamma, beta, tau = norm.affine.split(3)
    x = torch.randn(2, 3, 4, 5, dtype=torch.float64)
    for b in range(2):
        for c in range(3):
            z = x[b, c] / (x[b, c].pow(2).mean() + 1e-6).sqrt()
            expected = (gamma[c] * z + beta[c]).clamp_min(tau[c].item())
            torch.testing.assert_close(norm(x)[b, c], expected)


def test_an_ensemble_is_the_mean_of_files_that_are_made_once(
    made: HMCCifar, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, page = run(made, tmp_path, "HMC", "point", "ensemble of 2")
    assert rows["ensemble of 2"]["epochs"] == 2 * rows["point"]["epochs"] == 4
    assert rows["HMC"]["total_variation"] == 0
    assert rows["HMC"]["agreement"] == 1
    assert rows["HMC"]["people"] == pytest.approx(1)
    assert "fashion_information" not in rows["point"]
    assert "corrupted_information" not in rows["point"]
    assert (
        len(set(rows["ensemble of 2"]["corrupted_nll"])) == 1
    )  # the images of all strengths are the same here
    assert page.count("| point |") == 2
    assert "| 1 |\n| HMC |" not in page.partition("Corrupted images")[2]
    assert (
        page.index("| HMC |") < page.index("| point | 2 | ") < page.index("| ensemble of 2 | 4 | ")
    )
    assert "hmc-cifar10.png" in page
    assert (tmp_path / "hmc-cifar10.png").exists()
    folder = tmp_path / "hmc-cifar10"
    assert not list(folder.glob("*.run*"))
    fits = Fits(made.sizes, folder, torch.device("cpu"), False)
    monkeypatch.setattr("bayou.fit", None)
    parts = [torch.from_numpy(fits.saved("point", seed)["test"]).double().exp() for seed in (0, 1)]
    truth = fits.task.hmc
    expected = 0.5 * ((parts[0] + parts[1]) / 2 - truth).abs().sum(-1).mean()
    assert rows["ensemble of 2"]["total_variation"] == pytest.approx(
        float(expected), abs=1e-3
    )  # float16


def test_corruptions_are_deterministic_and_grow() -> None:
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


def test_ranks_of_equal_values_are_shared() -> None:
    a, b = torch.tensor([1.0, 2.0, 2.0, 3.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    assert spearman(a, b) == pytest.approx(0.9486832980505138)  # scipy.stats.spearmanr
    assert spearman(a, -a) == pytest.approx(-1)


@pytest.mark.skipif(
    not any((folder / "cifar10/hmc_resnet20_frn_swish.npz").is_file() for folder in folders()),
    reason="needs the data",
)
def test_the_reference_has_its_published_scores() -> None:
    task = images.read(Sizes(train=10), torch.device("cpu"))
    found = scores({"test": task.hmc.log()}, task)
    for name, value in {"accuracy": 91.44, "nll": 0.2773, "ece": 0.0522, "entropy": 0.4022}.items():
        assert found[name] == pytest.approx(value, abs=1e-4), name
    assert task.train[0].shape == (10, 3, 32, 32)
    strengths = task.inputs["corrupted"].unflatten(0, (images.STRENGTHS, -1))
    assert strengths.shape == (5, 1500, 3, 32, 32)
    distance = (strengths - task.inputs["test"][:1500]).square().mean((1, 2, 3, 4)).tolist()
    assert all(a < b for a, b in pairwise([0.0, *distance]))

"""Adapters: the base is kept, only adapters are fitted, every row can be made, and the page has
them.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import bayou
from experiments import adapters, study
from experiments.adapters import Adapters, Sizes, Transformer, adapted

TINY = Sizes(
    width=16, layers=1, heads=2, rank=2, length=12, train=20, held=20, test=20, batch=10, base_steps=100, base_batch=16,
    steps=6, samples=4,
)  # fmt: skip


def made_text(name: str) -> Tensor:
    """A repeated word with some errors; "python" has another."""
    draw = torch.Generator().manual_seed(len(name))
    word = torch.arange(1, 8) + (7 if name == "python" else 0)
    return torch.where(torch.rand(1400, generator=draw) < 0.1, 0, word.repeat(200))


def made_images(name: str) -> tuple[Tensor, Tensor]:
    """Images whose brightness is their class."""
    draw, y = torch.Generator().manual_seed(len(name)), torch.arange(100) % 10
    return torch.randn(100, 3, 32, 32, generator=draw) + y.view(-1, 1, 1, 1) - 5.0, y


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Adapters:
    """The study of small networks and made data, with a cache of its own."""
    monkeypatch.setattr(adapters, "read_text", made_text)
    monkeypatch.setattr(adapters, "read_images", made_images)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return Adapters(sizes=TINY)


def run(
    made: Adapters, folder: Path, data: str, *labels: str
) -> tuple[dict[str, dict[str, float]], str]:
    fits = made.fits([data], labels, 1, None)

    def work(fit: study.Fit, *args: object, **_: object) -> dict[str, object]:
        key = {"data": fit.data, "label": fit.label, "seed": fit.seed, "length": fit.length}
        return key | made.measure(fit, "cpu", None, False)

    page, numbers = study.run(made, folder, fits, work, tell=lambda text: None)
    return {row["label"]: row for row in json.loads(numbers.read_text())["rows"]}, page.read_text()


def test_rows_of_the_point_share_it_and_the_base_is_trained_once(
    made: Adapters, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, page = run(made, tmp_path, "text", "point", "TFB")
    assert rows["point"]["cost"] == 1
    assert rows["TFB"]["cost"] > 1
    assert rows["point"]["auroc_mutual_information"] == 0.5
    assert rows["TFB"]["nll"] == pytest.approx(rows["point"]["nll"], rel=0.1)
    assert rows["point"]["nll"] < 2.5  # log 27 = 3.3 without any training
    assert "| text | TFB | " in page
    monkeypatch.setattr(adapters, "train_base", None)
    adapters.base(True, TINY, torch.device("cpu"))


@pytest.mark.parametrize("text", [True, False])
def test_an_adapter_begins_at_the_base_and_a_character_sees_no_later_one(text: bool) -> None:
    torch.manual_seed(0)
    net = Transformer(TINY, text)
    x = torch.randint(27, (3, 12)) if text else torch.randn(3, 3, 32, 32)
    before = net(x)
    adapted(net, 2)
    free = {name for name, parameter in net.named_parameters() if parameter.requires_grad}
    assert {name.split(".")[-2] for name in free} == {
        "lora_A",
        "lora_B",
        *(() if text else ("head",)),
    }
    assert (before == net(x)).all() == text  # images have a new head
    if text:
        changed = x.clone()
        changed[:, 6] = (x[:, 6] + 1) % 27
        assert torch.equal(net(changed)[:, :6], before[:, :6])
        assert not torch.equal(net(changed)[:, 6:], before[:, 6:])


def test_characters_are_rows_of_their_own() -> None:
    y = torch.randint(27, (2, 5), generator=torch.Generator().manual_seed(0))
    outputs = torch.randn(3, 2, 5, 27, generator=torch.Generator().manual_seed(1))
    whole = bayou.likelihoods.predictive.Predictive(bayou.Categorical(shift=1).bind(), outputs)
    p, labels = adapters.by_token(whole, y)
    assert p.outputs.shape == (3, 8, 27)
    assert bayou.metrics.accuracy(p, labels) == bayou.metrics.accuracy(whole, y)

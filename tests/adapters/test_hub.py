"""Folders in the layout of the Hugging Face Hub, and the calls of its client."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import bayou

X = torch.linspace(-1, 1, 40).unsqueeze(1)
ROWS = (X, 3 * X + 10)
START = bayou.MAP(steps=20, lr=0.05)
METHODS = {
    "variational": bayou.VI(bayou.MNF(), steps=10),
    "laplace": bayou.Laplace("full", where="last", start=START),
    "ensemble": bayou.Ensemble(2, of=START),
    "mixture": bayou.Ensemble(2, of=bayou.VI(steps=5)),
    "name": "map",
}


def build_network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(1, 6), nn.Tanh(), nn.Linear(6, 1))


def fitted(method: str) -> bayou.Posterior:
    torch.manual_seed(0)
    options = {"likelihood": bayou.Gaussian(0.5), "progress": False, "seed": 0}
    if method == "name":
        plan = bayou.select.by_name("map", steps=20)
        return bayou.fit(build_network(), ROWS, plan, **options)
    return bayou.fit(build_network(), ROWS, METHODS[method], **options)


@final
class FakeHub:
    """The calls of ``HfApi`` that are needed, on a folder instead of a server."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.calls: list[tuple[str, dict[str, Any]]] = []

    def create_repo(self, *, repo_id: str, private: bool | None, exist_ok: bool) -> None:
        self.calls.append(("create_repo", {"private": private, "exist_ok": exist_ok}))
        (self.root / repo_id).mkdir(parents=True, exist_ok=exist_ok)

    def upload_folder(
        self,
        *,
        repo_id: str,
        folder_path: str,
        commit_message: str,
        revision: str | None,
        allow_patterns: list[str],
    ) -> SimpleNamespace:
        self.calls.append(("upload_folder", {"message": commit_message, "revision": revision}))
        for file in Path(folder_path).iterdir():
            assert file.name in allow_patterns
            (self.root / repo_id / file.name).write_bytes(file.read_bytes())
        return SimpleNamespace(commit_url=f"https://hub.test/{repo_id}/commit/1")

    def snapshot_download(
        self, *, repo_id: str, revision: str | None, allow_patterns: list[str]
    ) -> str:
        self.calls.append(("snapshot_download", {"revision": revision}))
        assert allow_patterns == ["posterior.safetensors", "posterior.json"]
        return str(self.root / repo_id)


@pytest.mark.parametrize("method", METHODS)
def test_a_folder_predicts_as_the_posterior(method: str, tmp_path: Path) -> None:
    posterior = fitted(method)
    folder = bayou.hub.save_folder(posterior, tmp_path / "houses")
    names = {file.name for file in folder.iterdir()}
    assert names == {"posterior.safetensors", "posterior.json", "README.md"}
    again = bayou.from_pretrained(folder, build_network())
    assert torch.equal(posterior.predict(X, 2).outputs, again.predict(X, 2).outputs)
    assert again.checks.to_json() == posterior.checks.to_json()
    assert type(again) is type(posterior)


def test_the_hub_is_asked_for_a_repository_and_three_files(tmp_path: Path) -> None:
    posterior = fitted("laplace")
    hub = FakeHub(tmp_path)
    url = bayou.hub.push(posterior, "me/houses", private=True, revision="v1", api=hub)
    assert url == "https://hub.test/me/houses/commit/1"
    again = bayou.from_pretrained("me/houses", build_network(), revision="v1", api=hub)
    assert torch.equal(posterior.predict(X, 3).outputs, again.predict(X, 3).outputs)
    assert hub.calls == [
        ("create_repo", {"private": True, "exist_ok": True}),
        ("upload_folder", {"message": "Add a posterior", "revision": "v1"}),
        ("snapshot_download", {"revision": "v1"}),
    ]


def test_the_client_of_huggingface_hub_is_called_with_its_own_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``api`` a client is made; the name of its module is all that is imported."""
    hub = FakeHub(tmp_path)
    module = SimpleNamespace(HfApi=lambda library_name: hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub", module)
    bayou.hub.push(fitted("ensemble"), "me/houses")
    assert [name for name, _ in hub.calls] == ["create_repo", "upload_folder"]
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ImportError, match=r"The Hugging Face Hub needs .*bayou\[hub\]"):
        bayou.from_pretrained("me/houses", build_network())


@pytest.mark.peers
def test_the_fake_client_has_the_parameters_of_the_real_one() -> None:
    import inspect

    from huggingface_hub import HfApi

    for name in ("create_repo", "upload_folder", "snapshot_download"):
        fake = set(inspect.signature(getattr(FakeHub, name)).parameters)
        assert fake <= set(inspect.signature(getattr(HfApi, name)).parameters)


def test_the_card_has_fit_checks_scores_and_code(tmp_path: Path) -> None:
    posterior = fitted("laplace")
    posterior.plan = "noise 0.5 | chosen\non held-out rows"
    folder = bayou.hub.save_folder(
        posterior,
        tmp_path / "card",
        repo_id="me/houses",
        scores={"test NLL": 0.3125},
        metadata={"license": "mit", "tags": ["houses"]},
    )
    card = (folder / "README.md").read_text()
    front, _, text = card.removeprefix("---\n").partition("\n---\n")
    assert 'library_name: "bayou"\ntags: ["houses"]\nlicense: "mit"' in front
    assert "# houses" in text
    assert "| rows of the fit | 40 |" in text
    assert r"noise 0.5 \| chosen on held-out rows" in text
    assert "| test NLL | 0.3125 | of the author |" in text
    assert 'bayou.from_pretrained("me/houses", build_network())' in text
    for check in posterior.checks:
        assert f"| {check.name} | {check.status} |" in text


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    folder = bayou.hub.save_folder(fitted("laplace"), tmp_path / "damaged")
    tensors = load_file(folder / "posterior.safetensors")
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 1}, folder / "posterior.safetensors")
    with pytest.raises(bayou.posteriors.FileError, match="its SHA-256 differs"):
        bayou.from_pretrained(folder, build_network())
    settings = json.loads((folder / "posterior.json").read_text())
    (folder / "posterior.json").write_text(json.dumps(settings | {"format": 99}))
    with pytest.raises(bayou.posteriors.FileError, match="has format 99"):
        bayou.from_pretrained(folder, build_network())
    (folder / "posterior.json").write_text("[]")
    with pytest.raises(bayou.posteriors.FileError, match="was not written by bayou.hub"):
        bayou.from_pretrained(folder, build_network())
    (folder / "posterior.json").unlink()
    with pytest.raises(bayou.posteriors.FileError, match="there is no file"):
        bayou.from_pretrained(folder, build_network())


def test_invalid_arguments(tmp_path: Path) -> None:
    posterior = fitted("laplace")
    with pytest.raises(ValueError, match="repo_id must be 'owner/name', got 'houses'"):
        bayou.hub.push(posterior, "houses", api=FakeHub(tmp_path))
    with pytest.raises(ValueError, match="expected a posterior of bayou.fit, got Sequential"):
        bayou.hub.push(build_network(), "me/houses", api=FakeHub(tmp_path))
    with pytest.raises(ValueError, match="scores must be numbers by name, got 'NLL'"):
        bayou.hub.save_folder(posterior, tmp_path / "a", scores={"NLL": torch.tensor(1.0)})
    with pytest.raises(bayou.posteriors.FileError, match="there is no folder ./nothing"):
        bayou.from_pretrained("./nothing", build_network())
    with pytest.raises(ValueError, match="load needs the name of a file and the network"):
        bayou.from_pretrained("me/houses", None)
    folder = bayou.hub.save_folder(posterior, tmp_path / "folder")
    with pytest.raises(ValueError, match="which has no revision 'v1'"):
        bayou.from_pretrained(folder, build_network(), revision="v1")
    with pytest.raises(bayou.posteriors.FileError):
        bayou.from_pretrained(folder, nn.Linear(1, 1))

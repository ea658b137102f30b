"""Posteriors on the Hugging Face Hub: safetensors, JSON and a model card, no pickle.

bayou.hub.push(posterior, "me/houses", scores={"test NLL": 0.31})
posterior = bayou.from_pretrained("me/houses", build_network())
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load as load_tensors, save as save_tensors
from torch import nn

from bayou.adapters.model_card import model_card
from bayou.core.extras import extra
from bayou.core.files import DTYPES, FORMAT, FileError, StrPath, read_bytes, writing
from bayou.posteriors import Posterior
from bayou.posteriors.loading import check_load, restore_contents
from bayou.posteriors.state import SavedState

TENSORS = "posterior.safetensors"
CONFIG = "posterior.json"
CARD = "README.md"
FILES = (TENSORS, CONFIG, CARD)


def save_folder(
    posterior: Posterior,
    folder: StrPath,
    *,
    repo_id: str | None = None,
    scores: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> Path:
    """Write a posterior as a folder in the layout of the Hugging Face Hub.

    It has three files: ``posterior.safetensors`` with the tensors, ``posterior.json`` with the
    settings and the SHA-256 of the tensors, and ``README.md``, the model card. Files with these
    names are replaced, the tensors first.

    Args:
        posterior: to write.
        folder: is made if it does not exist.
        repo_id: of the repository, for the example of the card; None (the default): the name of the
            folder.
        scores: numbers for the card by name, such as ``{"test NLL": 0.31}``; None (the default)
            for none.
        metadata: further entries of the front matter of the card, such as ``{"license": "mit",
            "datasets": ["me/houses"]}``; None (the default) for none.

    Returns:
        The folder.

    Raises:
        FileError: if a file cannot be written.
        ValueError: for something else than a posterior, or scores that are not numbers.
    """
    _check_posterior(posterior)
    folder = Path(folder)
    card = model_card(
        posterior, repo_id or folder.resolve().name, scores=scores or {}, metadata=metadata or {}
    )
    tensors, config = posterior.contents()
    content = save_tensors({name: value.contiguous().cpu() for name, value in tensors.items()})
    settings = {
        "format": FORMAT,
        "sha256": hashlib.sha256(content).hexdigest(),
        "posterior": config,
    }
    text = json.dumps(settings, indent=1, allow_nan=True)
    for name, value in ((TENSORS, content), (CONFIG, text.encode()), (CARD, card.encode())):
        with writing(folder / name, folders=True) as stream:
            stream.write(value)
    return folder


def push(
    posterior: Posterior,
    repo_id: str,
    *,
    scores: Mapping[str, float] | None = None,
    metadata: Mapping[str, Any] | None = None,
    private: bool | None = None,
    revision: str | None = None,
    message: str = "Add a posterior",
    api: Any = None,
) -> str:
    """Upload a posterior to a repository of the Hugging Face Hub, which is made if it is missing.

    Args:
        posterior: to upload.
        repo_id: "owner/name".
        scores: as of ``save_folder``.
        metadata: as of ``save_folder``.
        private: whether a new repository is private; None (the default) for the setting of the
            owner.
        revision: an existing branch; None (the default) for "main".
        message: of the commit. Default: "Add a posterior".
        api: a ``huggingface_hub.HfApi``; None (the default) for one with the token of
            ``hf auth login``.

    Returns:
        The address of the commit.

    Raises:
        ImportError: if huggingface_hub is not installed.
        ValueError: for something else than a posterior, or a name that is no "owner/name".

    Example:
        >>> bayou.hub.push(posterior, "me/houses", scores={"test NLL": 0.31})
    """
    _check_posterior(posterior)
    if repo_id.count("/") != 1 or not all(repo_id.split("/")):
        raise ValueError(
            f"repo_id must be 'owner/name', got {repo_id!r}; for a folder use "
            "bayou.hub.save_folder(posterior, folder)"
        )
    api = _hub_api(api)
    with tempfile.TemporaryDirectory() as folder:
        save_folder(posterior, folder, repo_id=repo_id, scores=scores, metadata=metadata)
        api.create_repo(repo_id=repo_id, private=private, exist_ok=True)
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=message,
            revision=revision,
            allow_patterns=list(FILES),
        )
    return str(commit.commit_url)


def from_pretrained(
    source: StrPath,
    net: nn.Module | Sequence[nn.Module],
    *,
    revision: str | None = None,
    api: Any = None,
    **options: Any,
) -> Posterior:
    """Load a posterior from a repository of the Hugging Face Hub, or from a folder.

    Nothing in the files is executed: they hold tensors and JSON. The network has to be built first,
    as for ``bayou.load``.

    Args:
        source: a folder that ``save_folder`` wrote, or "owner/name" of a repository.
        net: the network that the posterior was fitted to; of a mixture over different networks a
            list of them.
        revision: a branch, tag or commit of the repository; None (the default) for "main".
        api: a ``huggingface_hub.HfApi``; None (the default) for one with the token of
            ``hf auth login``.
        **options: ``prior``, ``likelihood``, ``rules`` or ``output`` of the fit, as for
            ``bayou.load``.

    Returns:
        The posterior, which predicts as the one that was written.

    Raises:
        FileError: for files that are missing, damaged or of another network.
        ImportError: if huggingface_hub is needed and not installed.
        ValueError: without a network.

    Example:
        >>> posterior = bayou.from_pretrained("me/houses", build_network(), revision="v1")
    """
    check_load(source, net, options)
    folder = Path(source)
    if not folder.is_dir():
        folder = _download(str(source), revision, api)
    elif revision is not None:
        raise ValueError(f"{source} is a folder, which has no revision {revision!r}; leave it out")
    path = folder / CONFIG
    saved = _read_folder(folder)
    return restore_contents(SavedState(*saved, path, options), net)


def _check_posterior(posterior: object) -> None:
    """Raise a ValueError for anything but a posterior."""
    if not isinstance(posterior, Posterior):
        raise ValueError(
            f"expected a posterior of bayou.fit, got {type(posterior).__name__}; an estimator of "
            "scikit-learn is one file: estimator.save(path) and HfApi().upload_file"
        )


def _hub_api(api: Any) -> Any:
    """Return the client of the Hub that was passed, or a new one."""
    if api is not None:
        return api
    with extra("hub", "The Hugging Face Hub"):
        from huggingface_hub import HfApi
    return HfApi(library_name="bayou")


def _download(repo_id: str, revision: str | None, api: Any) -> Path:
    """Download the files of a posterior, and return their folder."""
    if repo_id.count("/") != 1 or repo_id.startswith((".", "/", "~")):
        raise FileError(
            f"there is no folder {repo_id}; give a folder of bayou.hub.save_folder, or the "
            "'owner/name' of a repository"
        )
    folder = _hub_api(api).snapshot_download(
        repo_id=repo_id, revision=revision, allow_patterns=[TENSORS, CONFIG]
    )
    return Path(folder)


def _read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the tensors and the settings of a folder, whose SHA-256 is checked."""
    path = folder / CONFIG
    try:
        settings = json.loads(read_bytes(path))
        version, digest, config = (settings[key] for key in ("format", "sha256", "posterior"))
    except (ValueError, KeyError, TypeError) as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{path} was not written by bayou.hub: {error!r:.80}") from None
    if version != FORMAT or not isinstance(config, dict):
        raise FileError(
            f"{path} has format {version!r:.20}, this bayou reads {FORMAT}; use the version that "
            "wrote it"
        )
    content = read_bytes(folder / TENSORS)
    if hashlib.sha256(content).hexdigest() != digest:
        raise FileError(
            f"{folder / TENSORS} does not belong to {CONFIG}: its SHA-256 differs, so that one of "
            "them is damaged or of another posterior; download both again"
        )
    try:
        tensors = load_tensors(content)
    except Exception as error:  # safetensors raises several classes
        raise FileError(f"{folder / TENSORS} holds no tensors: {error}") from None
    foreign = [name for name, value in tensors.items() if value.dtype not in DTYPES]
    if foreign:
        raise FileError(f"{folder / TENSORS} has {tensors[foreign[0]].dtype} in {foreign[0]!r}")
    return tensors, config

"""The Hugging Face hub: which files of a model are in the local cache, what a download would fetch, and the download.

Nothing large is fetched for a model that could not run: its configuration is read first, and the size of the rest is
compared with the free disk space. Torch-free; huggingface_hub is imported on first use.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from nvcli.core.system.hub_access import HUB_TIMEOUT, DownloadSize, hub_problem, missing_size, no_progress
from nvcli.errors import ConfigError, LoadError, reworded
from nvcli.models.config import CONFIG_FILE, load_model_config
from nvcli.models.config_overrides import NO_OVERRIDES
from nvcli.models.generation_config import GENERATION_CONFIG_FILE
from nvcli.models.gguf.architectures import check_supported
from nvcli.models.gguf.files import check_parts, choose_model, models_among
from nvcli.models.gguf.folder import model_folder
from nvcli.models.other_checkpoints import ADAPTER_CONFIG, ADAPTER_WEIGHTS, check_kind
from nvcli.models.quantisation.modelopt import QUANTISATION_FILE

_Kind = Literal["model", "adapter"]

_DENSE = "_Dense"
"""The end of the names of folders with weights of their own: those of sentence-transformers' linear layers."""
_OTHER_FOLDERS = [f"*[!{letter}]{_DENSE[place:]}/*.safetensors" for place, letter in enumerate(_DENSE, 1)]
"""Patterns that match the weights in all folders but those: each has another letter somewhere."""
_FILES: dict[str, Any] = {
    "allow_patterns": [
        *("*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "additional_chat_templates/*"),
        f"*{_DENSE}/pytorch_model.bin",
    ],
    "ignore_patterns": [*_OTHER_FOLDERS, "consolidated*"],  # second copies of the weights, in other layouts
}
_SMALL_FILES: dict[str, Any] = {
    "allow_patterns": [name for name in _FILES["allow_patterns"] if not name.endswith((".safetensors", ".bin"))],
    "ignore_patterns": ["*.safetensors.index.json", "*.bin.index.json", *_FILES["ignore_patterns"]],
}
"""Everything but the weights: enough to build the rows' prompts."""
_TORCH_FILES = {**_FILES, "allow_patterns": ["pytorch_model*.bin", *_FILES["allow_patterns"][1:]]}
"""Files of a repository without safetensors."""
_CONFIGS = [CONFIG_FILE, GENERATION_CONFIG_FILE, QUANTISATION_FILE, ADAPTER_CONFIG]
_OF_ADAPTER = [ADAPTER_CONFIG, ADAPTER_WEIGHTS]


def cached_snapshot(name: str, *, weights: bool = True, revision: str | None = None) -> Path | None:
    """Return the folder of a model in the local cache, which may be incomplete; None if there is none.

    `weights` false: a folder that was downloaded without weights counts too. `revision` is a branch, a tag or a commit;
    None: the main branch.
    """
    return _cached(name, revision, **(_FILES if weights else _SMALL_FILES))


def cached_revisions(name: str) -> list[str]:
    """Return the commits of a model of which the local cache has files."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE, f"models--{name.replace('/', '--')}", "snapshots")
    return sorted(os.listdir(folder)) if folder.is_dir() else []


def download(name: str, revision: str | None = None, *, overrides: Mapping[str, Any] = NO_OVERRIDES) -> Path:
    """Download the model `name`, and return its folder. `revision`: as in `cached_snapshot`, `overrides`: as in
    `load_model_config`.

    Raises LoadError if the hub does not provide it and, before any weights are fetched, LoadError or ConfigError if its
    config.json describes a model that cannot run, it has no weights in files that are read, or the disk has no room.
    """
    if gguf := check_reachable(name, revision):
        return _download_gguf(name, revision, gguf)
    folder = _download_some(name, revision, allow_patterns=_CONFIGS)
    try:
        load_model_config(folder, overrides=overrides)
    except (ConfigError, LoadError) as error:
        raise reworded(error, f"model {name} was not downloaded, as its configuration is refused: {error}") from None
    patterns, files = _wanted(name, revision)
    missing_size(files).check_room(f"model {name}", LoadError)
    return Path(_snapshot(name, revision, **patterns))


def download_small_files(name: str, revision: str | None = None) -> Path:
    """Download the configuration and the tokenizer of the model `name`, and return their folder in the cache. Of a
    model in GGUF, which has these beside its weights, all is downloaded.

    Raises LoadError if the hub does not provide them.
    """
    if gguf := check_reachable(name, revision):
        return _download_gguf(name, revision, gguf)
    return _download_some(name, revision, **_SMALL_FILES)


def _download_some(name: str, revision: str | None, **files: Any) -> Path:
    """Download small files of a model that is reachable, and return their folder. Raises LoadError, also for what is
    no model."""
    folder = Path(_snapshot(name, revision, tqdm_class=no_progress(), **files))
    if not (folder / CONFIG_FILE).is_file():
        check_kind(folder, name)
    return folder


def download_size(name: str, revision: str | None = None) -> DownloadSize:
    """Ask the hub for the size of those files of the model `name` that are not in the cache.

    Raises LoadError if the hub does not provide them, or there are no weights among them.
    """
    if gguf := check_reachable(name, revision):
        return missing_size(_dry_run(split_quantisation(name)[0], revision, allow_patterns=gguf))
    return missing_size(_wanted(name, revision)[1])


def split_quantisation(name: str) -> tuple[str, str | None]:
    """Return the id of a repository, and the quantisation behind a colon; None: there is none."""
    hub_id, colon, quantisation = name.partition(":")
    return hub_id, quantisation if colon else None


def cached_gguf(folder: Path, name: str) -> list[Path]:
    """Return the GGUF files of the model `name` in the folder of its repository in the local cache. Raises LoadError
    that says what is there if they are not."""
    files = [str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()]
    found = choose_model(name, files, split_quantisation(name)[1])
    check_parts(found)
    return [folder / file for file in found]


def _download_gguf(name: str, revision: str | None, files: list[str]) -> Path:
    """Download a model in GGUF, and return the folder that is made of it. Raises LoadError."""
    hub_id = split_quantisation(name)[0]
    missing_size(_dry_run(hub_id, revision, allow_patterns=files)).check_room(f"model {name}", LoadError)
    folder = Path(_snapshot(hub_id, revision, allow_patterns=files))
    return model_folder([folder / file for file in files])


def _dry_run(name: str, revision: str | None, **patterns: Any) -> Any:
    return _snapshot(name, revision, tqdm_class=no_progress(), dry_run=True, **patterns)


def _wanted(name: str, revision: str | None) -> tuple[dict[str, Any], Any]:
    """Return the patterns of a model's files, and what the hub has of them: torch's own where there are no
    safetensors. Raises LoadError."""
    for patterns, suffix in ((_FILES, ".safetensors"), (_TORCH_FILES, ".bin")):
        files = _dry_run(name, revision, **patterns)
        if any(file.filename.endswith(suffix) and "/" not in file.filename for file in files):
            return patterns, files
    raise LoadError(
        f"model {name}: its repository has no *.safetensors files and no pytorch_model.bin; choose one that has them"
    )


def check_reachable(name: str, revision: str | None = None) -> list[str]:
    """Return the GGUF files that are the model `name` on the hub, if it names their quantisation or the repository has
    no other weights; otherwise none.

    Raises LoadError if the hub does not have the model or denies access to it, if it is none of those that are read
    from GGUF, and if its quantisation is not there, or is not named where there are several; the message says which.
    """
    from huggingface_hub import HfApi

    hub_id, quantisation = split_quantisation(name)
    with _hub_errors(hub_id):
        found = HfApi().model_info(hub_id, revision=revision, timeout=HUB_TIMEOUT)
    files = [file.rfilename for file in found.siblings or ()]
    has_others = any(file.endswith(".safetensors") or file.startswith("pytorch_model") for file in files)
    if quantisation is None and (has_others or not models_among(files)):
        return []
    chosen = choose_model(name, files, quantisation)
    if isinstance(described := getattr(found, "gguf", None), dict) and "architecture" in described:
        check_supported(name, described["architecture"])
    return chosen


def cached_adapter(name: str, revision: str | None = None) -> Path | None:
    """Return the folder of an adapter in the local cache; None unless it is complete there."""
    folder = _cached(name, revision, allow_patterns=_OF_ADAPTER)
    return folder if folder is not None and all((folder / file).exists() for file in _OF_ADAPTER) else None


def adapter_files(name: str, revision: str | None = None) -> Path:
    """Download the configuration of the adapter `name`, and return its folder in the cache.

    Raises LoadError if the hub does not provide it, it lacks one of an adapter's files, or the disk has no room for
    them.
    """
    files = _snapshot(name, revision, "adapter", tqdm_class=no_progress(), dry_run=True, allow_patterns=_OF_ADAPTER)
    for file in _OF_ADAPTER:
        if file not in {one.filename for one in files}:
            raise LoadError(f"adapter {name}: its repository has no {file}; choose a LoRA adapter that peft saved")
    missing_size(files).check_room(f"adapter {name}", LoadError)
    return Path(_snapshot(name, revision, "adapter", tqdm_class=no_progress(), allow_patterns=_OF_ADAPTER[:1]))


def download_adapter(name: str, revision: str | None = None) -> Path:
    """Download the adapter `name`, and return its folder in the cache. Raises LoadError."""
    return Path(_snapshot(name, revision, "adapter", allow_patterns=_OF_ADAPTER))


def _snapshot(name: str, revision: str | None, kind: _Kind = "model", **options: Any) -> Any:
    """Return what the hub's `snapshot_download` does with these options. Raises LoadError that says what to do."""
    from huggingface_hub import snapshot_download

    with _hub_errors(name, kind):
        return snapshot_download(name, revision=revision, **options)


def _cached(name: str, revision: str | None, **files: Any) -> Path | None:
    """Return the folder that has some files in the local cache, which may lack others; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True, **files))
    except (HFValidationError, OSError):
        return None


@contextlib.contextmanager
def _hub_errors(name: str, kind: _Kind = "model") -> Iterator[None]:
    """Turn hub failures in the body of the `with` into a LoadError that says what to do."""
    try:
        yield
    except Exception as error:  # the hub's HTTP library differs by version, and with it its exceptions
        raise LoadError(f"{kind} {name}: {hub_problem(error, name, kind)}") from None

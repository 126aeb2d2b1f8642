"""The Hugging Face hub: what of a model is in the local cache, what a download would bring, and the download.

Nothing large is fetched for a model that could not run: its configuration is read first, and the size of the rest is
held against the free disk space. Torch-free; huggingface_hub is imported when something is asked of it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from nvcli.errors import ConfigError, LoadError, reworded
from nvcli.hub_access import HUB_TIMEOUT, DownloadSize, hub_problem, missing_bytes, no_progress
from nvcli.models.config import CONFIG_FILE, GENERATION_CONFIG_FILE, load_model_config

_FILES = {
    "allow_patterns": ["*.safetensors", "*.json", "*.jinja", "*.txt", "tokenizer.model", "additional_chat_templates/*"],
    "ignore_patterns": ["*/*.safetensors", "consolidated*"],  # second copies of the weights, in other layouts
}
_SMALL_FILES = {
    "allow_patterns": [pattern for pattern in _FILES["allow_patterns"] if not pattern.endswith(".safetensors")],
    "ignore_patterns": ["*.safetensors.index.json", *_FILES["ignore_patterns"]],
}
"""Everything but the weights: what is needed to know what a row's prompt is."""


def check_room(name: str, size: DownloadSize) -> None:
    """Raise LoadError where the disk has no room for the files of the model `name`."""
    if size.problem is not None:
        raise LoadError(
            f"model {name}: {size.problem}; free some space, or set HF_HUB_CACHE to a folder on a larger disk"
        )


def cached_snapshot(name: str, *, weights: bool = True) -> Path | None:
    """Return the folder of a model in the local cache, which may be incomplete; None where there is none.

    `weights` false: a folder that was downloaded without weights is one too.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError

    try:
        return Path(snapshot_download(name, local_files_only=True, **(_FILES if weights else _SMALL_FILES)))
    except (HFValidationError, OSError):
        return None


def download(name: str) -> Path:
    """Download the model `name`, and return its folder in the cache.

    Raises LoadError where the hub does not give it, and, before any weights are fetched, LoadError or ConfigError where
    its config.json describes a model that cannot run, it has no safetensors files, or the disk has no room for it.
    """
    from huggingface_hub import snapshot_download

    check_reachable(name)  # answers at once whether the download can work
    configs = [CONFIG_FILE, GENERATION_CONFIG_FILE]
    with _hub_errors(name):
        folder = Path(snapshot_download(name, allow_patterns=configs, tqdm_class=no_progress()))
    try:
        load_model_config(folder)
    except (ConfigError, LoadError) as error:
        raise reworded(error, f"model {name} was not downloaded, as its configuration is refused: {error}") from None
    check_room(name, download_size(name))
    with _hub_errors(name):
        return Path(snapshot_download(name, **_FILES))


def download_small_files(name: str) -> Path:
    """Download the configuration and the tokenizer of the model `name`, and return their folder in the cache.

    Raises LoadError where the hub does not give them.
    """
    from huggingface_hub import snapshot_download

    check_reachable(name)
    with _hub_errors(name):
        return Path(snapshot_download(name, tqdm_class=no_progress(), **_SMALL_FILES))


def download_size(name: str) -> DownloadSize:
    """Ask the hub how large the files of the model `name` are that are not in the cache.

    Raises LoadError where the hub does not give them, or there are no safetensors files among them.
    """
    from huggingface_hub import constants, snapshot_download

    with _hub_errors(name):
        files = snapshot_download(name, dry_run=True, tqdm_class=no_progress(), **_FILES)
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise LoadError(f"model {name}: its repository has no *.safetensors files; choose one that has them")
    return DownloadSize.of(missing_bytes(files), Path(constants.HF_HUB_CACHE))


def check_reachable(name: str) -> None:
    """Raise LoadError where the hub does not have the model `name`, or not for us; it says why."""
    from huggingface_hub import HfApi

    with _hub_errors(name):
        HfApi().model_info(name, timeout=HUB_TIMEOUT)


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn what goes wrong with the hub in the body of the `with` into a LoadError that says a way out."""
    try:
        yield
    except Exception as error:  # the hub's HTTP library differs by version, and with it its exceptions
        raise LoadError(f"model {name}: {hub_problem(error, name, 'model')}") from None

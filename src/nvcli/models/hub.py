"""The Hugging Face hub: what of a model is in the local cache, what a download would bring, and the download.

Nothing large is fetched for a model that could not run: its configuration is read first, and the size of the rest is
held against the free disk space. Torch-free; huggingface_hub is imported when something is asked of it.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvcli.errors import LoadError, reworded
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
_TIMEOUT = 5.0
"""How many seconds the hub has to answer before it counts as out of reach."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSize:
    """What a download would bring, and the disk that it would go to."""

    num_bytes: int
    """Bytes of the files that are not in the cache yet."""
    free_bytes: int
    """Bytes that are free on the disk of the cache."""
    folder: Path
    """The folder of the cache."""

    def check_room(self, name: str) -> None:
        """Raise LoadError where the disk has no room for the files of the model `name`."""
        if self.num_bytes > self.free_bytes:
            raise LoadError(
                f"model {name}: {self.num_bytes / 2**30:,.1f} GiB are still to be downloaded, and the disk of "
                f"{self.folder} has {self.free_bytes / 2**30:,.1f} GiB free; free some space, or set HF_HUB_CACHE to a "
                "folder on a larger disk"
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

    Raises LoadError where the hub does not give it, and, before any weights are fetched, where its config.json
    describes a model that cannot run, it has no safetensors files, or the disk has no room for it.
    """
    from huggingface_hub import snapshot_download

    check_reachable(name)  # answers at once whether the download can work
    configs = [CONFIG_FILE, GENERATION_CONFIG_FILE]
    with _hub_errors(name):
        folder = Path(snapshot_download(name, allow_patterns=configs, tqdm_class=_no_progress()))
    try:
        load_model_config(folder)
    except LoadError as error:
        raise reworded(error, f"model {name} was not downloaded, as its configuration is refused: {error}") from None
    download_size(name).check_room(name)
    with _hub_errors(name):
        return Path(snapshot_download(name, **_FILES))


def download_small_files(name: str) -> Path:
    """Download the configuration and the tokenizer of the model `name`, and return their folder in the cache.

    Raises LoadError where the hub does not give them.
    """
    from huggingface_hub import snapshot_download

    check_reachable(name)
    with _hub_errors(name):
        return Path(snapshot_download(name, tqdm_class=_no_progress(), **_SMALL_FILES))


def download_size(name: str) -> DownloadSize:
    """Ask the hub how large the files of the model `name` are that are not in the cache.

    Raises LoadError where the hub does not give them, or there are no safetensors files among them.
    """
    from huggingface_hub import constants, snapshot_download

    with _hub_errors(name):
        files = snapshot_download(name, dry_run=True, tqdm_class=_no_progress(), **_FILES)
    if not any(file.filename.endswith(".safetensors") for file in files):
        raise LoadError(f"model {name}: its repository has no *.safetensors files; choose one that has them")
    cache = Path(constants.HF_HUB_CACHE)
    existing = next(folder for folder in (cache, *cache.absolute().parents) if os.path.exists(folder))
    return DownloadSize(
        num_bytes=sum(file.file_size or 0 for file in files if file.will_download),
        free_bytes=shutil.disk_usage(existing).free,
        folder=cache,
    )


def check_reachable(name: str) -> None:
    """Raise LoadError where the hub does not have the model `name`, or not for us; it says why."""
    from huggingface_hub import HfApi

    with _hub_errors(name):
        HfApi().model_info(name, timeout=_TIMEOUT)


def _no_progress() -> Any:
    """Return a progress bar's class that shows nothing, for what takes no time."""
    from huggingface_hub.utils import tqdm

    class NoProgress(tqdm):  # type: ignore[misc]  # huggingface_hub is untyped for mypy
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return NoProgress


@contextlib.contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn what goes wrong with the hub in the body of the `with` into a LoadError that says a way out."""
    from huggingface_hub import errors as hub

    try:
        yield
        return
    except hub.HFValidationError:
        problem = "neither a folder nor a valid Hugging Face id (`owner/name`)"
    except hub.OfflineModeIsEnabled:
        problem = (
            "not in the local Hugging Face cache, and HF_HUB_OFFLINE forbids to download it; unset it, or give a folder"
        )
    except hub.GatedRepoError:
        problem = (
            f"a gated model; ask for access at https://huggingface.co/{name}, then run `hf auth login` or set HF_TOKEN"
        )
    except hub.RepositoryNotFoundError:
        problem = (
            "no such folder, and no such model on the Hugging Face hub (or a private one: `hf auth login` or HF_TOKEN)"
        )
    except Exception as error:  # the hub's HTTP library differs by version, and with it its exceptions
        if isinstance(error, OSError) and not isinstance(error, hub.HfHubHTTPError) and error.strerror:
            problem = f"cannot be stored in the Hugging Face cache: {error.strerror}"
        else:
            first_line = (str(error).splitlines() or [""])[0]
            problem = (
                "no such folder, not in the local Hugging Face cache, and the hub cannot be reached "
                f"({type(error).__name__}: {first_line}); give a local folder, or connect to the network"
            )
    raise LoadError(f"model {name}: {problem}")

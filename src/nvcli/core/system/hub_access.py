"""The Hugging Face hub: explains its errors, and computes the room that a download needs.

Shared by models and data sets. huggingface_hub is imported only when needed.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from nvcli.errors import NvcliError, first_line

HUB_TIMEOUT = 5.0
"""Seconds without an answer after which the hub counts as unreachable."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DownloadSize:
    """Size of a download, and free space on its disk."""

    num_bytes: int
    """Bytes of the files still to be downloaded."""
    free_bytes: int
    """Free bytes on the folder's disk."""
    folder: Path

    @classmethod
    def of(cls, num_bytes: int, folder: Path) -> DownloadSize:
        """Return the size of a download into a folder, which need not exist yet."""
        existing = next(each for each in (folder, *folder.absolute().parents) if os.path.exists(each))
        return cls(num_bytes=num_bytes, free_bytes=shutil.disk_usage(existing).free, folder=folder)

    def check_room(self, name: str, error: type[NvcliError], *, variable: str = "HF_HUB_CACHE") -> None:
        """Raise the error if the disk has no room for `name`; `variable` of the environment says which folder it is."""
        if self.num_bytes > self.free_bytes:
            raise error(
                f"{name}: {self.num_bytes / 2**30:,.1f} GiB are still to be downloaded, and the disk of {self.folder} "
                f"has {self.free_bytes / 2**30:,.1f} GiB free; free some space, or set {variable} to a folder on a "
                "larger disk"
            )


def missing_size(files: list[Any]) -> DownloadSize:
    """Return the size of the files that are not in the hub's cache, from a dry run of `snapshot_download`."""
    from huggingface_hub import constants

    num_bytes = sum(file.file_size or 0 for file in files if file.will_download)
    return DownloadSize.of(num_bytes, Path(constants.HF_HUB_CACHE))


def no_progress() -> Any:
    """Return a class of progress bars that show nothing, for quick downloads."""
    from huggingface_hub.utils import tqdm

    class NoProgress(tqdm):  # type: ignore[misc]  # huggingface_hub is untyped for mypy
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return NoProgress


def hub_problem(error: Exception, name: str, kind: Literal["model", "adapter", "dataset"]) -> str:
    """Explain an exception of huggingface_hub about `name`, and what to do."""
    from huggingface_hub import errors as hub

    if isinstance(error, hub.DryRunError) and isinstance(error.__cause__, Exception):
        return hub_problem(error.__cause__, name, kind)
    if isinstance(error, hub.HFValidationError):
        return "neither a folder nor a valid Hugging Face id (`owner/name`)"
    if isinstance(error, hub.OfflineModeIsEnabled):
        return (
            "not in the local Hugging Face cache, and HF_HUB_OFFLINE forbids downloading it; unset it, or give a folder"
        )
    if isinstance(error, hub.GatedRepoError):
        page = f"datasets/{name}" if kind == "dataset" else name
        return (
            f"a gated {kind}; ask for access at https://huggingface.co/{page}, then run `hf auth login` or set HF_TOKEN"
        )
    if isinstance(error, hub.RepositoryNotFoundError):
        way_in = "`hf auth login` or HF_TOKEN"
        return f"no such folder, and no such {kind} on the Hugging Face hub (or a private one: {way_in})"
    if isinstance(error, hub.RevisionNotFoundError):
        return f"the Hugging Face hub has no such revision (branch, tag or commit) of this {kind}"
    if isinstance(error, OSError) and not isinstance(error, hub.HfHubHTTPError) and error.strerror:
        place = f" ({error.filename})" if error.filename else ""
        return (
            f"cannot be stored in the Hugging Face cache: {error.strerror}{place}; set HF_HUB_CACHE to a folder that "
            "can be written to"
        )
    return (
        "no such folder, not in the local Hugging Face cache, and the hub cannot be reached "
        f"({first_line(error)}); give a local folder, or connect to the network"
    )

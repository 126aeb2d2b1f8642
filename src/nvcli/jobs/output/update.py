"""Brings an output up to a changed input: rows that are as they were keep their answers, under the index they have now.

It is all or nothing, whenever the run is killed or the power fails:

    1. the lines that are kept and the new digests are written beside the old ones, and synced
    2. the manifest names the new inputs, and says that the files beside are to take their places
    3. they do
    4. the manifest says so

Before the second step nothing has changed, and from there on any run does the rest (`settle_update`).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from nvcli.errors import ConfigError
from nvcli.jobs.output.locked_file import LockedFile
from nvcli.jobs.output.manifest import Manifest, load_manifest, save_manifest, sync_folder
from nvcli.jobs.own_files import digests_path, rewrite_path
from nvcli.jobs.rows.row_digest import InputRows
from nvcli.regular_file import create_anew


def update_output(
    output: Path, file: LockedFile, manifest: Manifest, chunks: Iterable[bytes] | None, rows: InputRows
) -> Manifest:
    """Make an output one of other inputs, and return its manifest. Raises OSError.

    `file` holds the rows of the output, and `chunks` is what it holds from now on; None: what it has. `manifest` names
    the new inputs, whose rows are `rows`.
    """
    draft = rewrite_path(digests_path(output))
    with create_anew(draft) as new:
        new.write(rows.digests)
        new.flush()
        os.fsync(new.fileno())
    if chunks is not None:
        file.write_draft(chunks)
    _sync_folders(output, file)
    save_manifest(output, msgspec.structs.replace(manifest, is_updating=True))
    return _finish_update(output, file, manifest)


def settle_update(output: Path, file: LockedFile) -> None:
    """Finish an update that a run which was killed has begun. Raises OSError.

    A manifest that cannot be read is left to those who need it.
    """
    try:
        manifest = load_manifest(output)
    except ConfigError:
        return
    if manifest is not None and manifest.is_updating:
        _finish_update(output, file, msgspec.structs.replace(manifest, is_updating=False))


def _finish_update(output: Path, file: LockedFile, manifest: Manifest) -> Manifest:
    file.adopt_draft()
    digests = digests_path(output)
    draft = rewrite_path(digests)
    if draft.exists():
        draft.replace(digests)
    _sync_folders(output, file)
    save_manifest(output, manifest)
    return manifest


def _sync_folders(output: Path, file: LockedFile) -> None:
    for folder in {output.parent, file.path.parent}:
        sync_folder(folder)

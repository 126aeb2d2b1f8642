"""Updates an output to inputs that have changed: unchanged rows keep their answers, under their new index.

The update is all or nothing, even if the run is killed or the power fails:

    1. the lines to keep and the new digests are written to files beside the old ones, and synced
    2. the manifest names the new inputs, and records that the new files are to replace the old ones
    3. the new files replace the old ones
    4. the manifest records that they have

Before the second step nothing has changed; after it, any run completes the rest (`settle_update`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nvcli.core.system.regular_file import read_regular
from nvcli.errors import ConfigError
from nvcli.job.job import RETRYABLE_ERRORS
from nvcli.job.output.locked_file import LockedFile, in_chunks
from nvcli.job.output.manifest import Manifest, new_file, readable_manifest, save_manifest, sync_folder
from nvcli.job.output.output_scan import OutputScan, scan_output, valid_rows
from nvcli.job.own_files import digests_path, is_csv, is_table, rewrite_path
from nvcli.job.rows.output_row import WrittenRow, moved_row, read_output_row
from nvcli.job.rows.row_digest import DIGEST_BYTES, InputRows
from nvcli.job.shard import WHOLE, Shard

if TYPE_CHECKING:
    from nvcli.job.output.row_changes import RowChanges


class ChangedInput:
    """An output, the inputs that it was made from, and the present ones."""

    def __init__(
        self, output: Path, file: LockedFile, old: Manifest, new: Manifest, rows: InputRows, *, shard: Shard = WHOLE
    ) -> None:
        """Compare the inputs. Raises ConfigError if nothing shows which rows have changed, and OSError.

        `file` holds the rows of the output, which are those of the `shard`. `old` and `new` may differ in their
        inputs, and `rows` are all rows of the new ones.
        """
        self._output = output
        self._file = file
        self._old = old
        self._new = new
        self._rows = rows
        self._shard = shard
        path = digests_path(output)
        digests = read_regular(path) if path.exists() else b""
        if not digests:
            raise self._refusal(f"nothing tells which rows have changed: there is no {path.name}, or it is empty")
        from nvcli.job.output.row_changes import compare_rows  # which needs numpy

        self._num_known = len(digests) // DIGEST_BYTES
        self._changes = compare_rows(digests, rows.digests, old_is_all=old.num_input_rows == self._num_known)

    @property
    def is_none(self) -> bool:
        """Whether the rows are the same, as far as they were read."""
        changes = self._changes
        return changes.is_none or (changes.keeps_all and not changes.num_new and not self._differences)

    @property
    def note(self) -> str:
        """A line for the user on what has changed."""
        if self.is_none:
            return "the input has other bytes, and the same rows"
        return f"the input has changed: {self._changes.describe()}"

    def update(self, pack: Callable[[bytes], bytes], *, update: bool, retry_errors: bool) -> Manifest:
        """Update the output to the new inputs and return its manifest. Raises OSError.

        `pack` compresses a part of the output. `update` and `retry_errors` say what was asked for; raises ConfigError
        where that is not enough.
        """
        changes = self._changes
        if self.is_none:
            manifest = msgspec.structs.replace(self._old, inputs=self._new.inputs)
            save_manifest(self._output, manifest)
            return manifest
        if is_csv(self._output) and not self._file.size:
            raise self._refusal("a complete CSV table cannot be updated (JSONL and Parquet can)")
        scan = scan_output(self._file.path, self._shard)
        if not update and not (retry_errors and self._has_only_edited_failures(changes, scan)):
            also = "--retry-errors alone is enough if only failed rows were edited; " if retry_errors else ""
            raise ConfigError(
                f"the output {self._output} was made from another input: {changes.describe()}{self._differences}\n"
                f"{also}--update answers what has changed and keeps the other answers; or start over with "
                "--overwrite, or name another with -o"
            )
        answered = scan.answered.all
        has_unknown_rows = answered.next_present(self._num_known) in answered
        keeps_all = self._file.size > 0 and changes.keeps_all and not has_unknown_rows
        kept = _kept_lines(self._lines(), changes, self._rows, self._shard)
        return update_output(
            self._output,
            self._file,
            msgspec.structs.replace(self._old, inputs=self._new.inputs, num_input_rows=self._rows.count, finished=None),
            None if keeps_all else map(pack, in_chunks(kept)),
            self._rows,
        )

    def _refusal(self, why: str) -> ConfigError:
        return ConfigError(
            f"the output {self._output} was made from another input, and {why}{self._differences}\nput the input "
            "back, start over with --overwrite, or name another output with -o"
        )

    @property
    def _differences(self) -> str:
        return "".join(f"\n  {line}" for line in self._old.input_differences(self._new))

    def _has_only_edited_failures(self, changes: RowChanges, scan: OutputScan) -> bool:
        """Tell whether the only change is in rows without an answer."""
        answered = scan.answered
        return (
            self._file.size > 0
            and changes.only_edits
            and all(index in answered.failed or index not in answered.all for index in changes.edited.tolist())
        )

    def _lines(self) -> Iterator[tuple[WrittenRow, bytes]]:
        """Yield the valid lines of the output, also those of a complete table."""
        if self._file.size or not is_table(self._output):
            yield from valid_rows(self._file.path)
        elif self._old.finished is not None and self._output.stat().st_size == self._old.finished.output_bytes:
            from nvcli.job.output.parquet_output import read_parquet

            for line in read_parquet(self._output):
                row = read_output_row(line)
                assert row is not None, "a row of a table that was written is no row"
                yield row, line


def _kept_lines(
    lines: Iterable[tuple[WrittenRow, bytes]], changes: RowChanges, rows: InputRows, shard: Shard
) -> Iterator[bytes]:
    """Yield the lines to keep, renumbered where the row's index or name has changed.

    Dropped are lines of rows that have changed, that belong to another shard, or whose id an earlier row now has, and
    of failed rows that must be checked again: rows that were themselves at fault, because other rows may decide that,
    and rows that have moved, because the message names their line.
    """
    for row, line in lines:
        index = changes.index_of(row.index)
        if index is None or index not in shard or index in rows.repeated:
            continue
        if row.error_type is not None and (row.error_type not in RETRYABLE_ERRORS or index != row.index):
            continue
        name = rows.name_of(index)
        is_same = index == row.index and (name is None or name == row.id)
        yield line if is_same else moved_row(line, index, name)


def update_output(
    output: Path, file: LockedFile, manifest: Manifest, chunks: Iterable[bytes] | None, rows: InputRows
) -> Manifest:
    """Commit an output to new inputs, and return its manifest. Raises OSError.

    `file` holds the rows of the output, and `chunks` replaces them; None: they stay. `manifest` names the new inputs,
    whose rows are `rows`.
    """
    with new_file(rewrite_path(digests_path(output))) as new:
        new.write(rows.digests)
    if chunks is not None:
        file.write_draft(chunks)
    _sync_folders(output, file)
    save_manifest(output, msgspec.structs.replace(manifest, is_updating=True))
    return _finish_update(output, file, manifest)


def settle_update(output: Path, file: LockedFile) -> None:
    """Finish an update that a killed run left behind. Raises OSError.

    A manifest that cannot be read is reported when it is needed.
    """
    manifest = readable_manifest(output)
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

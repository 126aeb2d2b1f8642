"""The output of a job: a file that may be continued, or a stream.

A file is new or continued, with the manifest that says which job it is of:

    new          an empty file; the first write puts the manifest beside it
    continued    the manifest names the same model, configuration and inputs; rows that are there are kept
    updated      as continued, with inputs that have changed: rows that have not changed are kept
    finished     the manifest says so, and the file is as it was then: there is nothing to do

Where the rows come from standard input or a pipe, no other run can continue the file, and it has no manifest.
"""

from __future__ import annotations

import os
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from nvcli.core.byte_sizes import counted
from nvcli.core.config_types import Order
from nvcli.core.system.file_limits import explain_failed_write
from nvcli.errors import ConfigError, OutputError
from nvcli.job.compression import compression_of, make_packer
from nvcli.job.files import STREAM, STREAM_FOLDERS
from nvcli.job.output.changed_input import ChangedInput, settle_update
from nvcli.job.output.digest_file import DigestFile
from nvcli.job.output.locked_file import LockedFile, in_chunks
from nvcli.job.output.manifest import Finished, Manifest, load_manifest, readable_manifest, save_manifest, sync_folder
from nvcli.job.output.output_scan import scan_output, valid_rows
from nvcli.job.output.reorder import ReorderBuffer
from nvcli.job.output.sink import OutputGuard, Sink, check_place
from nvcli.job.output.table import write_table
from nvcli.job.own_files import digests_path, is_csv, is_table, manifest_path, rows_path, temporary_files
from nvcli.job.row_set import AnsweredRows
from nvcli.job.rows.output_row import CSV_TEXT_FIELD, OutputForm
from nvcli.job.rows.row_digest import InputRows
from nvcli.job.shard import WHOLE, Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The settings of an output beside its name."""

    order: Order = "completion"
    """The order of its rows."""
    can_continue: bool = True
    """Whether the inputs can be read again, so that another run may continue the output."""
    overwrite: bool = False
    """Whether to start an existing output anew."""
    retry_errors: bool = False
    """Whether to drop failed rows of an existing output, to answer them again."""
    update: bool = False
    """Whether to update an existing output to changed inputs."""
    identify_rows: Callable[[], InputRows] | None = None
    """Reads the inputs and returns their rows, to be compared with the answered ones; None: not possible."""
    sampled_at: float | None = None
    """When the inputs whose digests may miss edits were written last, in seconds since 1970; None: there are none."""
    limit: int | None = None
    """Number of rows of the inputs to answer; None: all."""
    shard: Shard | None = None
    """The shard of the job in this output; None: the whole job."""
    reorder_bytes: int = 1 << 28
    """Memory for rows that wait for their turn, when the output is put in order."""
    text_field: str | None = None
    """Extra key for the text of the first choice; None: none, but `generated_text` in CSV."""
    on_begin: Callable[[], None] = lambda: None
    """Called when a new output is begun, after any old rows and manifest are gone."""


class JobOutput:
    """An output that cannot be continued: standard output, a pipe or a device."""

    sink: Sink
    folder: Path | None = None
    """The folder for large temporary files; None: the system's default."""

    def __init__(self, form: OutputForm, sink: Sink | None = None) -> None:
        """`sink` takes the bytes; None: the caller sets it."""
        if sink is not None:
            self.sink = sink
        self.form = form
        self.answered = AnsweredRows()
        """Rows that the output held when it was opened."""
        self.finished: Finished | None = None
        """How the job ended, if it is finished and there is nothing to do."""
        self.notes: list[str] = []
        """Lines for the user on what was found and done."""
        self.digests: DigestFile | None = None
        """Takes the digests of the rows read; None if no other run can continue the output."""

    def finish(self, *, rows: int, errors: Mapping[str, int], rows_read: int, all_read: bool) -> None:
        """Finish the output once every row that was read is answered and the sink is closed. Raises OutputError.

        `rows` and `errors` count the whole output, which may hold later rows too. `rows_read` and `all_read` say how
        far the inputs were read. Rows that inputs which were read to their end do not have are dropped, from `answered`
        too.
        """

    def close(self) -> None:
        """Release the output for other runs. Idempotent."""
        self.sink.close()


def open_output(name: str, job: Manifest, options: OutputOptions) -> JobOutput:
    """Open the output `name` (`-`: standard output) for a job. Raises ConfigError and OutputError."""
    form = _output_form(Path(name), job, options)
    if name == STREAM:
        if sys.__stdout__ is None:
            raise ConfigError("standard output is closed; name an output file with -o")
        return JobOutput(form, Sink(os.dup(sys.__stdout__.fileno()), "standard output"))
    path = Path(name)
    if path.exists() and (path.parent in STREAM_FOLDERS or not stat.S_ISREG(path.stat().st_mode)):
        try:
            fd = _open_stream(path)
        except OSError as error:
            raise ConfigError(f"the output {path} cannot be written: {error.strerror}") from None
        return JobOutput(form, Sink(fd, name, pack=make_packer(compression_of(name))))
    return FileOutput(path, job, options)


def _open_stream(path: Path) -> int:
    """Open a device, or what the shell has opened for the command, such as /dev/stdout. Raises OSError.

    The shell's is shared: opened by its name, a file would get rows where the shell's other commands write too.
    """
    name = {"stdout": "1", "stderr": "2"}.get(path.name, path.name)
    if path.parent in STREAM_FOLDERS and name.isdecimal():
        return os.dup(int(name))
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)


def _output_form(path: Path, job: Manifest, options: OutputOptions) -> OutputForm:
    """Return the form of an output's rows."""
    text_field = options.text_field or (CSV_TEXT_FIELD if is_csv(path) else None)
    return OutputForm(created=job.created, model=job.model, text_field=text_field)


class FileOutput(JobOutput):
    """An output that is a regular file and may be continued."""

    def __init__(self, path: Path, job: Manifest, options: OutputOptions) -> None:
        """Open the file and scan it. Raises ConfigError if another job made it, and OutputError.

        `job` describes the present job.
        """
        self._path = path
        self.folder = path.parent
        self._job = job
        self._options = options
        self._pack = make_packer(compression_of(rows_path(path).name))
        self._needs_sorting = False
        self._is_closed = False
        self._has_spare_rows = False
        super().__init__(_output_form(path, job, options))
        if options.can_continue:
            self.digests = DigestFile(path)
        self._file = LockedFile(rows_path(path), path)
        try:
            settle_update(path, self._file)
            for leftover in temporary_files(path):
                leftover.unlink(missing_ok=True)
            self._take_mode_of_table()
            is_new = options.overwrite or not (self._file.size or (is_table(path) and _size(path)))
            is_new = is_new or self._holds_no_answer()
            if not is_new:
                self._job = self._check_job()
                self.form = _output_form(path, self._job, options)
                self._continue()
            self._guard = OutputGuard(rows_path(path), self._file.fd)
            if not is_new:
                self._guard.begin()
        except BaseException as error:
            self._release(is_unused=True)
            if isinstance(error, OSError):
                why = explain_failed_write(error, path)
                raise OutputError(f"the output {path} cannot be written: {why}") from None
            raise
        self.sink = Sink(
            os.dup(self._file.fd),
            str(path),
            pack=self._pack,
            before_first_write=self._begin if is_new else None,
            guard=self._guard,
            digests=self.digests,
        )

    def finish(self, *, rows: int, errors: Mapping[str, int], rows_read: int, all_read: bool) -> None:
        try:
            self._check_rows(rows)
            if all_read:
                dropped = self._drop_rows_from(rows_read)
                rows, errors = rows - dropped.all.count, Counter(errors) - dropped.errors
            if self._needs_sorting:
                self._replace(_in_order(self._file.path, self._options.reorder_bytes))
            check_place(rows_path(self._path), self._file.fd)
            if is_table(self._path):
                write_table(self._path, self._file.path, rows)
            if self._options.can_continue:
                finished = Finished(
                    rows=rows,
                    errors=dict(errors),
                    rows_read=rows_read,
                    all_read=all_read,
                    output_bytes=self._path.stat().st_size,
                )
                num_input_rows = rows_read if all_read else self._job.num_input_rows
                job = msgspec.structs.replace(self._job, num_input_rows=num_input_rows, finished=finished)
                save_manifest(self._path, job)
            if is_table(self._path) and not self._keeps_rows(errors=bool(errors), all_read=all_read):
                self._file.path.unlink()  # nothing will be continued
        except OSError as error:
            why = explain_failed_write(error, self._path)
            raise OutputError(f"the output {self._path} cannot be finished: {why}") from None

    def close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        try:
            super().close()
        finally:
            self._release(is_unused=not self.sink.is_started or self.finished is not None)

    def _release(self, *, is_unused: bool) -> None:
        """Release the file and its lock. Remove it if nothing was written to it or it is not needed any more."""
        if is_unused and (self._file.is_new or self._has_spare_rows):
            self._file.path.unlink(missing_ok=True)
        if self.digests is not None:
            self.digests.close()
        self._file.close()

    def _begin(self) -> None:
        """Prepare a new output for its first write.

        Old rows go before the new manifest comes: they must never be together.
        """
        self._file.truncate(0)
        if is_table(self._path) and self._path.exists():
            with self._path.open("wb") as table:  # emptied, not removed: it keeps its mode and its link
                os.fsync(table.fileno())
        if self.digests is not None:
            self.digests.begin()
            save_manifest(self._path, self._job)
        else:
            manifest_path(self._path).unlink(missing_ok=True)
            digests_path(self._path).unlink(missing_ok=True)
            sync_folder(self._path.parent)
        self._guard.begin()
        self._options.on_begin()

    def _holds_no_answer(self) -> bool:
        """Tell whether the output holds only failed rows of a job with other settings. Starting it anew loses no
        answer."""
        manifest = readable_manifest(self._path)
        if manifest is None or not self._options.can_continue or manifest.input_differences(self._job):
            return False
        settings = manifest.setting_differences(self._job)
        if not settings or not self._file.size:  # a table without the rows beside it has answers
            return False
        answered = scan_output(self._file.path).answered
        if answered.all.count > answered.failed.count:
            return False
        lines = "".join(f"\n  {line}" for line in settings)
        self.notes.append(
            f"{self._path} has no answers, but {counted(answered.failed.count, 'failed row')} of a job with other "
            f"settings; it is started over:{lines}"
        )
        return True

    def _check_job(self) -> Manifest:
        """Return the manifest of the existing output. Raises ConfigError if it belongs to another job."""
        way_out = "start over with --overwrite, or name another with -o"
        manifest = load_manifest(self._path)
        if manifest is None:
            name = manifest_path(self._path).name
            raise ConfigError(f"the output {self._path} exists and cannot be continued: there is no {name}; {way_out}")
        if not self._options.can_continue:
            raise ConfigError(
                f"the output {self._path} exists, and rows from standard input or a pipe cannot be compared with it; "
                f"{way_out}"
            )
        settings, inputs = manifest.setting_differences(self._job), manifest.input_differences(self._job)
        identify_rows = self._options.identify_rows
        if settings or (inputs and identify_rows is None):
            lines = "\n".join(f"  {line}" for line in [*settings, *inputs])
            raise ConfigError(
                f"the output {self._path} was made by another job:\n{lines}\nchange these back, {way_out}"
            )
        if identify_rows is None or not (inputs or self._may_hide_edits(manifest)):
            return manifest
        changed = ChangedInput(
            self._path, self._file, manifest, self._job, identify_rows(), shard=self._options.shard or WHOLE
        )
        manifest = changed.update(self._pack, update=self._options.update, retry_errors=self._options.retry_errors)
        if inputs or not changed.is_none:
            self.notes.append(changed.note)
        return manifest

    def _may_hide_edits(self, manifest: Manifest) -> bool:
        """Tell whether inputs that seem to be the same must be compared row by row."""
        written, digests = self._options.sampled_at, digests_path(self._path)
        if written is None or not (digests.exists() and digests.stat().st_size):
            return False
        return self._options.update or written > manifest.created

    def _continue(self) -> None:
        """Find out which rows the output holds, and drop lines that are damaged or to be answered again."""
        finished = self._job.finished
        if finished is not None and self._is_enough(finished):
            self.finished = finished
            # A run that is killed after its last write leaves the rows of a complete table.
            self._has_spare_rows = is_table(self._path) and not self._keeps_rows(
                errors=bool(finished.errors), all_read=finished.all_read
            )
            return
        if self.digests is not None:
            self.digests.resume()
        if finished is not None:
            self._job = msgspec.structs.replace(self._job, finished=None)
            save_manifest(self._path, self._job)
        scan = scan_output(self._file.path, self._options.shard or WHOLE)
        self.answered = scan.answered
        if scan.sound_bytes < self._file.size:
            lost = self._file.size - scan.sound_bytes
            self.notes.append(f"{self._path}: {lost:,} bytes at its end are not whole rows and were cut off")
            self._file.truncate(scan.sound_bytes)
        drop_failed = self._options.retry_errors and scan.answered.failed.count > 0
        if scan.num_damaged or drop_failed:
            if scan.num_damaged:
                self.notes.append(f"{self._path}: {scan.num_damaged:,} damaged lines were dropped")
            rows = valid_rows(self._file.path)
            self._replace(line for row, line in rows if not (drop_failed and row.error_type is not None))
        self._needs_sorting = self._options.order == "input" and not scan.is_in_order
        retried = ""
        if drop_failed:
            num_failed = scan.answered.failed.count
            retried = f", {counted(num_failed, 'failed row')} {'is' if num_failed == 1 else 'are'} tried again"
            self._needs_sorting = self._options.order == "input"
            self.answered = scan.answered.without_failed()
        num_rows = self.answered.all.count
        are = "is" if num_rows == 1 else "are"
        self.notes.append(f"continuing {self._path}: {counted(num_rows, 'row')} {are} answered already{retried}")

    def _keeps_rows(self, *, errors: bool, all_read: bool) -> bool:
        """Tell whether to keep the rows of a complete table beside it, to be continued or joined with other shards.

        `errors` says whether there are failed rows, and `all_read` whether the inputs were read to their end.
        """
        return self._options.can_continue and (errors or not all_read or self._options.shard is not None)

    def _is_enough(self, finished: Finished) -> bool:
        """Tell whether the finished output is unchanged, and nothing more is asked for."""
        if not self._path.exists() or self._path.stat().st_size != finished.output_bytes:
            return False
        limit = self._options.limit
        has_all = finished.all_read or (limit is not None and limit <= finished.rows_read)
        return has_all and not (self._options.retry_errors and finished.errors)

    def _check_rows(self, num_rows: int) -> None:
        """Raise OutputError unless the file holds the rows found and written, `num_rows` in all."""
        self._guard.check_written()
        if self._guard.was_touched:
            found = scan_output(self._file.path).answered.all
            if found.count != num_rows or not self.answered.all.is_within(found):
                raise OutputError(
                    f"the output {self._path} was changed by another program during the run, and does not hold all "
                    f"{num_rows:,} rows any more; those that it lost will be computed again"
                )

    def _drop_rows_from(self, num_rows: int) -> AnsweredRows:
        """Drop and return the rows from this number on, which the inputs do not have."""
        dropped = AnsweredRows()
        if self.answered.all.next_present(num_rows) in self.answered.all:
            for row, _ in valid_rows(self._file.path):
                if row.index >= num_rows:
                    dropped.add(row.index, row.error_type)
                    self.answered.discard(row.index, row.error_type)
            self._replace(line for row, line in valid_rows(self._file.path) if row.index < num_rows)
            self.notes.append(f"{self._path}: dropped {dropped.all.count:,} lines of rows that the input does not have")
        return dropped

    def _replace(self, lines: Iterable[bytes]) -> None:
        """Replace the rows of the output by these lines, given without newlines."""
        self._file.replace(map(self._pack, in_chunks(lines)))

    def _take_mode_of_table(self) -> None:
        """Give a new working file the mode of the existing table, so that the same users may read it."""
        if is_table(self._path) and self._file.is_new and self._path.exists():
            os.fchmod(self._file.fd, self._path.stat().st_mode & 0o777)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _in_order(path: Path, max_bytes: int) -> Iterator[bytes]:
    """Yield the valid lines of an output in the order of their rows, with about `max_bytes` of memory at most."""
    rows = scan_output(path).answered.all  # with `--limit` there may be gaps: rows that are still to come
    waiting = ReorderBuffer(rows.next_present, max_bytes=max_bytes, folder=path.parent)
    try:
        for row, line in valid_rows(path):
            waiting.add(row.index, line)
            yield from waiting.take()
    finally:
        waiting.close()

"""The outputs of a job's shards before they are joined: checks that they belong together, and their rows.

Nothing here writes. The outputs are locked while they are looked at, so that no run changes them meanwhile.
"""

from __future__ import annotations

import fcntl
import glob
import os
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import msgspec

from nvcli.core.byte_sizes import counted
from nvcli.errors import ConfigError, RowsMissing
from nvcli.job.files import is_folder
from nvcli.job.output.manifest import Manifest, load_manifest
from nvcli.job.output.output_scan import valid_rows
from nvcli.job.own_files import digests_path, is_sidecar, manifest_path, rows_path, whole_name
from nvcli.job.row_set import AnsweredRows
from nvcli.job.rows.output_row import WrittenRow
from nvcli.job.shard import SHARD_FACT, Shard, read_shard

_MOST_SHOWN = 5
"""Maximum number of shards that a message names."""


@dataclass(frozen=True, slots=True)
class ShardOutput:
    """The output of one shard."""

    path: Path
    shard: Shard
    manifest: Manifest

    @property
    def rows(self) -> Path:
        """The file with its rows as lines: the output itself, or that beside a table."""
        return rows_path(self.path)


def expand_outputs(names: Sequence[str]) -> list[Path]:
    """Replace patterns by the files that they match, without the files that jobs keep beside their outputs.

    A shell that expands `x.shard-*` names those too. Raises ConfigError for a name without a file.
    """
    paths: list[Path] = []
    for name in names:
        found = [name] if os.path.exists(name) else sorted(glob.glob(os.path.expanduser(name)))
        if not found and not os.path.exists(rows_path(Path(name))):
            raise ConfigError(f"there is no file {name} to join")
        paths += [Path(each) for each in found or [name] if not is_sidecar(each)]
    if not paths:
        raise ConfigError("none of the files is the output of a shard; name those that `nvcli generate --shard` made")
    return paths


def split_shards(names: Sequence[str], output: str) -> list[tuple[list[str], str]]:
    """Return the shards of each job with the joined output: one job, or several by their names if `output` is a
    folder.

    Raises ConfigError for a name that does not tell the shard.
    """
    if not is_folder(output):
        return [(list(names), output)]
    shards_of: dict[str, list[str]] = {}
    for path in expand_outputs(names):
        whole = whole_name(path.name)
        if whole is None:
            raise ConfigError(
                f"the name of {path} is not that of a shard, such as x.shard-0-of-4.out.jsonl, so its job is unknown; "
                f"join the shards of one job with -o {Path(output) / 'FILE'}"
            )
        shards_of.setdefault(str(Path(output) / whole), []).append(str(path))
    return [(shards, joined) for joined, shards in shards_of.items()]


def open_shards(paths: Sequence[Path], stack: ExitStack) -> list[ShardOutput]:
    """Lock the outputs of shards until `stack` ends, and return them in the order of their numbers.

    Raises ConfigError where one is no output of a shard, is being written, or belongs to another job than the others.
    """
    outputs = []
    for path in paths:
        stack.enter_context(_open_unwritten(path))
        outputs.append(_read_output(path))
    outputs.sort(key=lambda output: output.shard.number)
    first = outputs[0]
    for output in outputs[1:]:
        if output.shard.count != first.shard.count:
            raise ConfigError(
                f"{first.path} is shard {first.shard} and {output.path} is shard {output.shard}: they belong to "
                "different divisions of a job"
            )
        if differences := whole_job([first]).differences(whole_job([output])):
            lines = "\n".join(f"  {line}" for line in differences)
            raise ConfigError(
                f"{first.path} and {output.path} were made by different jobs:\n{lines}\n"
                "join shards of one job; shards of an input that has changed are brought up to date by their commands "
                "with --update"
            )
    for output, other in zip(outputs[1:], outputs, strict=False):
        if output.shard == other.shard:
            raise ConfigError(f"{other.path} and {output.path} are both shard {output.shard}; name each shard once")
    return outputs


def whole_job(outputs: Sequence[ShardOutput]) -> Manifest:
    """Return the manifest of the whole job that shards belong to, as an unfinished one."""
    manifest = outputs[0].manifest
    return msgspec.structs.replace(
        manifest,
        created=min(output.manifest.created for output in outputs),
        facts={name: value for name, value in manifest.facts.items() if name != SHARD_FACT},
        finished=None,
    )


class ShardRows:
    """The rows that the outputs of shards hold, found by reading them once."""

    def __init__(self, outputs: Sequence[ShardOutput]) -> None:
        """Read the outputs. Raises ConfigError for one that holds a row of another shard, and OSError."""
        self._outputs = outputs
        self.answered = AnsweredRows()
        self._counts: Counter[int] = Counter()
        """Number of rows of each shard, within the job's rows."""
        finished = [each.manifest.finished for each in outputs if each.manifest.finished is not None]
        self.total = max((each.rows_read for each in finished), default=None)
        """Number of rows of the job; None: unknown, because no shard has finished."""
        self.all_read = any(each.all_read for each in finished)
        """Whether the job's inputs were read to their end, and not just to a limit."""
        for output in outputs:
            self._read(output)

    def _read(self, output: ShardOutput) -> None:
        for row, _ in valid_rows(output.rows, self.answered):
            if row.index not in output.shard:
                raise ConfigError(
                    f"{output.path} holds row {row.index}, which is not of shard {output.shard}: another program "
                    "changed it; start that shard over with --overwrite"
                )
            if self.total is None or row.index < self.total:
                self._counts[output.shard.number] += 1

    @property
    def is_complete(self) -> bool:
        return self.total is not None and sum(self._counts.values()) == self.total

    def missing(self) -> RowsMissing:
        """Return the error that lists the missing rows and how to compute them."""
        count = self._outputs[0].shard.count
        known = {output.shard.number: output for output in self._outputs}
        lines = []
        for shard in (Shard(number, count) for number in range(count)):
            wanted = None if self.total is None else shard.num_rows(self.total)
            if wanted == self._counts[shard.number]:
                continue
            lines.append(f"  shard {shard}: {self._what_is_missing(shard, wanted, known.get(shard.number))}")
            lines.append(f"    {_command(self._outputs[0], shard, known.get(shard.number))}")
        num_others = len(lines) // 2 - _MOST_SHOWN
        if num_others > 0:
            lines = [*lines[: 2 * _MOST_SHOWN], f"  and {num_others} other shards"]
        return RowsMissing(
            "\n".join(
                ["rows of the job are missing; these commands compute them, with the job's other options:", *lines]
            )
        )

    def _what_is_missing(self, shard: Shard, wanted: int | None, output: ShardOutput | None) -> str:
        if output is None:
            rows = "its rows" if wanted is None else "its only row" if wanted == 1 else f"all of its {wanted:,} rows"
            return f"{rows}, no output of it was named"
        if wanted is None:
            return f"{output.path} has {counted(self._counts[shard.number], 'row')} and is not finished"
        return f"{wanted - self._counts[shard.number]:,} of its {wanted:,} rows, in {output.path}"


def _command(like: ShardOutput, shard: Shard, output: ShardOutput | None) -> str:
    """Return the command that answers the rows of a shard, as far as a manifest tells."""
    mark, other = f"shard-{like.shard.number}-of-{shard.count}", f"shard-{shard.number}-of-{shard.count}"
    path = output.path if output is not None else like.path.with_name(like.path.name.replace(mark, other))
    to = [] if output is None and path == like.path else ["-o", str(path)]
    return job_command(like.manifest, ["--shard", str(shard), *to])


def known_digests(outputs: Sequence[ShardOutput]) -> bytes:
    """Return the digests of the job's rows, from the shard that has read most. Raises OSError."""
    paths = [path for output in outputs if (path := digests_path(output.path)).is_file()]
    return max(paths, key=lambda path: path.stat().st_size).read_bytes() if paths else b""


def job_command(manifest: Manifest, options: Sequence[str]) -> str:
    """Return the command of a job, as far as its manifest tells: its name, inputs and model, without other settings."""
    name = str(manifest.facts.get("task", "generate"))
    inputs = [name for name, _ in manifest.inputs]
    return shlex.join(["nvcli", name, *inputs, "--model", manifest.model, *options])


def _open_unwritten(path: Path) -> IO[bytes]:
    """Open an output for reading, locked against writers. Raises ConfigError."""
    rows = rows_path(path)
    if not rows.is_file():
        why = "it is not a file"
        if path.is_file():
            why = f"{rows.name}, which holds its rows, is not beside it; copy it there, or start that shard over"
        raise ConfigError(f"{path} cannot be joined: {why}")
    try:
        file = rows.open("rb")
    except OSError as error:
        raise ConfigError(f"{rows} cannot be read: {error.strerror}") from None
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise ConfigError(f"another run is writing to {path}; wait for its end") from None
    except OSError:
        pass  # a file system without locks
    return file


def _read_output(path: Path) -> ShardOutput:
    manifest = load_manifest(path)
    if manifest is None:
        raise ConfigError(
            f"{path} cannot be joined: there is no {manifest_path(path).name} beside it, which says what it was made "
            "from; a shard whose input is standard input has none"
        )
    if manifest.is_updating:
        raise ConfigError(f"{path} cannot be joined: an update of it was interrupted; run its command again")
    shard = read_shard(str(manifest.facts.get(SHARD_FACT)))
    if shard is None:
        raise ConfigError(f"{path} is the output of a whole job, not of a shard (`nvcli generate --shard I/N`)")
    return ShardOutput(path, shard, manifest)


def lines_by_shard(outputs: Sequence[ShardOutput]) -> dict[int, Iterator[tuple[WrittenRow, bytes]]]:
    """Return the valid lines of each output, by the number of its shard."""
    seen = AnsweredRows()
    return {output.shard.number: valid_rows(output.rows, seen) for output in outputs}

"""The files that a job reads and writes, checked before anything expensive starts. Raises ConfigError only."""

from __future__ import annotations

import contextlib
import glob
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from nvcli.core.system.file_limits import why_not_writable
from nvcli.core.system.regular_file import LINK, check_regular, is_too_long
from nvcli.core.validation import is_text
from nvcli.errors import ConfigError
from nvcli.job.file_formats import (
    check_input_format,
    check_output_format,
    check_pyarrow,
    folder_files,
    input_format,
    is_pdf,
    plain_name,
    pyarrow_format,
)
from nvcli.job.own_files import is_parquet, is_shard_output, is_sidecar, is_table, manifest_path, own_files
from nvcli.job.shard import Shard

STREAM = "-"
"""The name that stands for standard input or output."""

HUB_SCHEME = "hf://"
"""The beginning of an address of a dataset on the Hugging Face hub."""
_REMOTE = re.compile(r"[a-z][a-z0-9+.-]*://", re.IGNORECASE)

STREAM_FOLDERS = (Path("/dev"), Path("/dev/fd"), Path("/proc/self/fd"))
"""Files in these folders stand for something else, such as /dev/stdout for a file that the shell has opened."""


def is_remote(name: str) -> bool:
    """Tell whether an input is an address, such as `s3://bucket/x.jsonl`, and has to be fetched to this machine."""
    return _REMOTE.match(name) is not None and not os.path.exists(name)


def expand_inputs(inputs: Sequence[str], output: str | None = None) -> list[str]:
    """Replace patterns (`data/*.jsonl`) and folders by the files that they match or hold, sorted. Raises ConfigError.

    The output is left out, and so are the files that a job keeps beside an output, the outputs of shards, and those
    that would be the output of a file that matches. A name that exists is no pattern, whatever characters it has; in
    others ~ is the home folder.
    """
    names: list[str] = []
    for given in inputs:
        name = given if os.path.exists(given) else os.path.expanduser(given)
        if name != STREAM and is_text(name) and os.path.isdir(name):
            names += _expand_folder(name, output)
        elif name == STREAM or is_remote(name) or not any(mark in name for mark in "*?[") or os.path.exists(name):
            names.append(name)
        else:
            names += _expand_pattern(name, output)
    return names


def _expand_pattern(name: str, output: str | None) -> list[str]:
    found = sorted(glob.glob(name, recursive=True))
    files = _without_outputs([file for file in found if Path(file).is_file()], output)
    if not files:
        raise ConfigError(f"the input {name} matches no file")
    return files


def _expand_folder(name: str, output: str | None) -> list[str]:
    """Return the data files of a folder; the folder if it has none.

    The output and what lies beside it are left out, and so are files that would be the output of another file.
    """
    try:
        found = folder_files(Path(name), lambda files: _without_outputs(files, output))
    except OSError as error:
        raise ConfigError(f"the input {name} cannot be read: {error.strerror}") from None
    if found and output is None:
        raise ConfigError(f"name the output with -o FILE: it cannot follow from the folder {name}")
    return found or [name]


def _without_outputs(files: Sequence[str], output: str | None) -> list[str]:
    """Return the files without those that a job writes which reads one of them, the outputs of shards, and the sidecars
    of any output.

    `output` is the output that was named.
    """
    outputs = [str(_output_of(Path(file))) for file in files]
    if output is not None:
        outputs += [choose_output([file], output) for file in files] if is_folder(output) else [output]
    own = {os.path.realpath(path) for name in outputs if name != STREAM for path in own_files(Path(name))}
    return [
        file
        for file in files
        if not (
            is_sidecar(file)
            or is_shard_output(file)
            or os.path.realpath(file) in own
            or (output is not None and _is_same(file, output))
        )
    ]


def check_inputs(inputs: Sequence[str]) -> None:
    """Check that each input exists, can be read, and is given once. Raises ConfigError."""
    for name in inputs:
        if name == STREAM and sys.__stdin__ is None:
            raise ConfigError("standard input is closed; name a file of rows, or send rows through a pipe")
        if name == STREAM or is_remote(name):
            continue
        _check_name(name, f"the input {name} cannot be read")
        path = Path(name)
        if path.is_dir():
            raise ConfigError(
                f"the input {name} is a folder and holds no data files; name the files, such as {path / '*.jsonl'}, or "
                f"those of its subfolders, such as '{path / '**' / '*.parquet'}'"
            )
        if not os.path.exists(name):  # `Path` would drop a slash behind a file's name
            raise ConfigError(f"there is no input file {name}")
        if not os.access(path, os.R_OK):
            raise ConfigError(f"the input {name} cannot be read: no permission")
        if table := pyarrow_format(name):
            check_pyarrow(f"the input {name} is {table}")
        if is_pdf(name) and find_spec("pypdfium2") is None:
            raise ConfigError(f"the input {name} is a PDF file, which needs pypdfium2: pip install 'nvcli[pdf]'")
        if (table or is_pdf(name)) and not path.is_file():
            raise ConfigError(f"the input {name} is not a regular file, which {table or 'a PDF file'} must be")
        if path.is_file():
            check_input_format(path)
    seen: dict[str, str] = {}
    for name in inputs:
        key = name if name == STREAM else str(Path(name).resolve())
        if key in seen:
            same = f": {seen[key]} is the same file" if seen[key] != name else ""
            raise ConfigError(f"the input {name} is given twice{same}")
        seen[key] = name
    for name in inputs:
        if name == STREAM or is_remote(name):
            continue
        output = _output_of(Path(name))
        if (found := seen.get(str(output.resolve()))) is not None and manifest_path(output).exists():
            raise ConfigError(
                f"the input {found} is the output of the input {name}; leave it out, or put quotes around a pattern of "
                "names: nvcli knows which of the files are outputs"
            )


def is_folder(output: str) -> bool:
    """Tell whether an output is a folder, for one output of each input: it is there, or its name ends with a slash."""
    return output != STREAM and is_text(output) and (output.endswith("/") or os.path.isdir(output))


def split_outputs(
    inputs: Sequence[str], output: str | None, shard: Shard | None = None
) -> list[tuple[list[str], str | None]]:
    """Return the inputs of each job with its output: one job, or one for each input where `output` is a folder.

    Raises ConfigError where two inputs of a folder would have the same output, or an input cannot be read.
    """
    if output is None or not is_folder(output):
        return [(list(inputs), output)]
    names = expand_inputs(inputs, output)
    check_inputs(names)
    input_of: dict[str, str] = {}
    for name in names:
        chosen = choose_output([name], output, shard)
        if chosen in input_of:
            raise ConfigError(
                f"{input_of[chosen]} and {name} would both have the output {chosen}; rename one, or answer them into "
                "different folders"
            )
        input_of[chosen] = name
    return [([name], chosen) for chosen, name in input_of.items()]


@contextlib.contextmanager
def folder_made(output: str | None) -> Iterator[None]:
    """Create an output folder that does not exist yet. If an error comes while it is empty, it is removed again.

    Raises ConfigError where it cannot be made.
    """
    if output is None or not is_folder(output) or os.path.isdir(output):
        yield
        return
    try:
        os.makedirs(output)
    except OSError as error:
        raise ConfigError(f"the folder {output} cannot be made: {error.strerror}; name another with -o") from None
    try:
        yield
    except BaseException:
        with contextlib.suppress(OSError):
            os.rmdir(output)  # where it is empty
        raise


def choose_output(inputs: Sequence[str], output: str | None, shard: Shard | None = None) -> str:
    """Return the output that was named, or the one that follows from a single input. Raises ConfigError.

    From `input.jsonl` follows `input.out.jsonl` beside it or in the folder that was named, or
    `input.shard-0-of-4.out.jsonl` for a shard; from a table (Parquet, Arrow, CSV, TSV) follows another one, and from
    standard input standard output.
    """
    folder = output if output is not None and is_folder(output) else None
    if output is not None and folder is None:
        return output
    if list(inputs) == [STREAM] and folder is None:
        return STREAM
    is_opened = len(inputs) == 1 and Path(inputs[0]).parent in STREAM_FOLDERS
    if len(inputs) != 1 or inputs[0] == STREAM or is_opened or is_remote(inputs[0]):
        which = "several inputs" if len(inputs) != 1 else "standard input" if inputs[0] == STREAM else inputs[0]
        named = "-o FILE, or -o - for standard output" if folder is None else f"-o {Path(folder) / 'FILE'}"
        raise ConfigError(f"name the output with {named}: it cannot follow from {which}")
    path = Path(inputs[0]) if folder is None else Path(folder) / Path(inputs[0]).name
    return str(_output_of(path, "" if shard is None else f".shard-{shard.number}-of-{shard.count}"))


def _output_of(path: Path, part: str = "") -> Path:
    """Return the file beside an input that holds its answers. `part` names the shard in it."""
    name = plain_name(path.name)
    format = input_format(name)
    if pyarrow_format(name):
        return path.with_suffix(f"{part}.out.parquet")
    if format == "csv":
        return path.with_name(f"{Path(name).stem}{part}.out{Path(name).suffix.lower()}")
    has_suffix = format in ("text", "pdf") or Path(name).suffix.lower() in (".jsonl", ".json")
    return path.with_name(f"{Path(name).stem if has_suffix else name}{part}.out.jsonl")


def check_output(inputs: Sequence[str], output: str) -> None:
    """Check that the output can be written and is none of the inputs. Raises ConfigError."""
    if output == STREAM:
        return
    _check_name(output, f"the output {output} cannot be written")
    path = Path(output)
    if path.is_dir():
        raise ConfigError(f"the output {output} is a folder; name a file in it")
    if path.parent not in STREAM_FOLDERS and (path.is_file() or not path.exists()):
        check_output_format(path)
    if not path.parent.is_dir():
        if file := next((folder for folder in path.parents if folder.is_file()), None):
            raise ConfigError(f"the output {output} cannot be written: {file} is a file, not a folder; name another")
        raise ConfigError(f"the folder of the output {output} does not exist; create it with: mkdir -p {path.parent}")
    own_names = own_files(path)
    if too_long := next(filter(is_too_long, own_names), None):
        raise ConfigError(
            f"the output {output} cannot be written: a file beside it is called {too_long}, and that is longer than "
            "the file system takes; choose a shorter name with -o"
        )
    for name in inputs:
        if name != STREAM and _is_same(name, output):
            raise ConfigError(f"the output {output} is also an input; name another with -o")
        if name != STREAM and any(_is_same(name, str(own)) for own in own_names):
            raise ConfigError(
                f"the input {name} has the name of a file that the job itself writes beside its output {output}; "
                "name another output with -o, or rename the input"
            )
    if not path.exists():
        _check_writable(path.parent, f"the output {output} cannot be made in {path.parent}")
    else:
        _check_writable(path, f"the output {output} cannot be written")
        if path.is_file() and path.parent != Path("/dev"):
            trouble = f"nothing can be written in {path.parent}, where the output's manifest belongs"
            _check_writable(path.parent, trouble, way_out="name another output with -o")
    if is_table(path):
        if is_parquet(path):
            check_pyarrow(f"the output {output} is Parquet")
        if path.exists() and not path.is_file():
            raise ConfigError(f"the output {output} is not a regular file, which a table must be")
        folder = Path(os.path.realpath(path)).parent  # behind a link
        _check_writable(folder, f"the output {output} leads to {folder}, which cannot be written to")
    _check_kinds(path)


def _check_writable(path: Path, trouble: str, *, way_out: str = "name another with -o") -> None:
    """Raise ConfigError where a file or folder cannot be written to. `trouble` is how the message begins."""
    if not os.access(path, os.W_OK):
        raise ConfigError(f"{trouble}: {why_not_writable(path)}; {way_out}")


def _check_kinds(path: Path) -> None:
    """Raise ConfigError where the output, or a file that belongs beside it, is of a kind that may wait forever.

    Devices, and pipes that the shell has opened (/dev/fd/63), may be outputs, and an output may be a link to a file.
    Files beside it may not be links: their names follow from the output's, so that anybody could have set them up.
    """
    for file in own_files(path):
        if file != path and file.is_symlink():
            raise ConfigError(
                f"the output {path} cannot be written: {file}: {LINK}, as a file of the job belongs there; remove it, "
                "or name another output with -o"
            )
        try:
            if file.parent not in STREAM_FOLDERS and not file.is_char_device():
                check_regular(file)
        except FileNotFoundError:
            continue
        except OSError as error:
            raise ConfigError(
                f"the output {path} cannot be written: {file}: {error.strerror}; name another with -o, or write to "
                "standard output with -o -"
            ) from None


def is_terminal(output: str | None, inputs: Sequence[str]) -> bool:
    """Tell whether a job writes its answers to a terminal. `output` and `inputs` are the names that were given."""
    name = STREAM if output is None and list(inputs) == [STREAM] else output
    if name is None:
        return False
    if name == STREAM:
        return sys.__stdout__ is not None and os.isatty(sys.__stdout__.fileno())
    try:
        if not is_text(name) or not Path(name).is_char_device():
            return False
        fd = os.open(name, os.O_WRONLY | os.O_NOCTTY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        return os.isatty(fd)
    finally:
        os.close(fd)


def job_files(inputs: Sequence[str], output: str | None, shard: Shard | None = None) -> list[str]:
    """Return all files that a job reads and writes, by the names that were given. Raises ConfigError."""
    files: list[str] = []
    for some, one in split_outputs(inputs, output, shard):
        names = expand_inputs(some, one)
        chosen = choose_output(names, one, shard)
        files += [name for name in names if name != STREAM]
        files += map(str, own_files(Path(chosen)) if chosen != STREAM else ())
    return files


def _check_name(name: str, trouble: str) -> None:
    """Raise ConfigError for a name that is not text or that the system cannot look up.

    `trouble` is how the message begins.
    """
    if not name:
        raise ConfigError(f"{' '.join(trouble.split())}: its name is empty")
    if not is_text(name):
        raise ConfigError(f"{trouble}: its name is not UTF-8 text; rename it")
    try:
        os.stat(name)
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise ConfigError(f"{trouble}: {error.strerror}") from None


def _is_same(name: str, other: str) -> bool:
    """Tell whether two names lead to one file, through links too; it need not be there."""
    if os.path.realpath(name) == os.path.realpath(other):
        return True
    return os.path.exists(name) and os.path.exists(other) and os.path.samefile(name, other)

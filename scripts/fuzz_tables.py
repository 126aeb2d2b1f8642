"""Reads mutated Arrow and Parquet files as a job reads its inputs.

    python scripts/fuzz_tables.py --cases 2000 --seed 7

Makes small files of many types, in all forms of both formats, changes their bytes, and reads each in a process of its
own: whatever a file holds, rows come of it, or one error that names the file. A process that dies, another exception,
rows that no job can take, or more memory than a bound count as failures; the file is then kept. Exit code 1 if there
was one.
"""

from __future__ import annotations

import collections
import datetime
import decimal
import os
import random
import resource
import struct
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pyarrow.feather
import pyarrow.ipc
import pyarrow.parquet

from fuzzing import make_parser, print_counts
from nvcli.errors import ConfigError
from nvcli.job.input.reader import RowReader
from nvcli.job.rows.parser import RowParser

NUM_ROWS = 40
MOST_BYTES = 2 << 30
"""The most memory that reading a file of a few KiB may take."""
MOST_ROWS = 100_000
"""So many rows of a file are read; a damaged one may say that it has more than anybody could read."""
MOST_SECONDS = 20
EXTREMES = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1)


def columns(rng: random.Random) -> dict[str, pyarrow.Array]:
    """Return columns of many types, each of `NUM_ROWS` values, some of them null."""
    texts = [rng.choice((None, "", "p", "a longer text that no view holds inline", "ü€")) for _ in range(NUM_ROWS)]
    numbers = [rng.choice((None, 0, 1, -5, 100)) for _ in range(NUM_ROWS)]
    lists = [rng.choice((None, [], [1], [1, None, 3])) for _ in range(NUM_ROWS)]
    structs = [rng.choice((None, {"x": 1, "y": ["a"]}, {"x": None, "y": []})) for _ in range(NUM_ROWS)]
    day = datetime.datetime(2026, 11, 24, 12, 30)
    ends = pyarrow.array([NUM_ROWS // 2, NUM_ROWS], pyarrow.int32())
    kinds = pyarrow.array([number % 2 for number in range(NUM_ROWS)], pyarrow.int8())
    places = pyarrow.array([number // 2 for number in range(NUM_ROWS)], pyarrow.int32())
    half = [pyarrow.array(texts[: NUM_ROWS // 2]), pyarrow.array(numbers[: NUM_ROWS // 2])]
    return {
        "prompt": pyarrow.array([text or "q" for text in texts]),
        "text": pyarrow.array(texts),
        "large": pyarrow.array(texts, pyarrow.large_string()),
        "view": pyarrow.array(texts, pyarrow.string_view()),
        "binary": pyarrow.array([text and text.encode() for text in texts]),
        "fixed": pyarrow.array([b"abcd"] * NUM_ROWS, pyarrow.binary(4)),
        "words": pyarrow.array(texts).dictionary_encode(),
        "ints": pyarrow.array(numbers, pyarrow.int64()),
        "small": pyarrow.array(numbers, pyarrow.int8()),
        "floats": pyarrow.array(numbers, pyarrow.float32()),
        "halves": pyarrow.array([1.5] * NUM_ROWS, pyarrow.float16()),
        "bools": pyarrow.array([None if text is None else len(text) > 1 for text in texts]),
        "lists": pyarrow.array(lists, pyarrow.list_(pyarrow.int32())),
        "large_lists": pyarrow.array(lists, pyarrow.large_list(pyarrow.int8())),
        "list_views": pyarrow.array(lists, pyarrow.list_view(pyarrow.int16())),
        "fixed_lists": pyarrow.array([[1, 2]] * NUM_ROWS, pyarrow.list_(pyarrow.int64(), 2)),
        "structs": pyarrow.array(structs),
        "maps": pyarrow.array([[("k", 1)], []] * (NUM_ROWS // 2), pyarrow.map_(pyarrow.string(), pyarrow.int32())),
        "nested": pyarrow.array([[[{"a": "b"}]], None] * (NUM_ROWS // 2)),
        "nulls": pyarrow.nulls(NUM_ROWS),
        "runs": pyarrow.RunEndEncodedArray.from_arrays(ends, pyarrow.array(["a", "b"])),
        "sparse": pyarrow.UnionArray.from_sparse(kinds, [pyarrow.array(texts), pyarrow.array(numbers)]),
        "dense": pyarrow.UnionArray.from_dense(kinds, places, half),
        "decimals": pyarrow.array([decimal.Decimal("1.50")] * NUM_ROWS),
        "times": pyarrow.array([day] * NUM_ROWS, pyarrow.timestamp("ns", "Europe/Berlin")),
        "dates": pyarrow.array([day.date()] * NUM_ROWS),
        "clocks": pyarrow.array([day.time()] * NUM_ROWS, pyarrow.time64("us")),
        "spans": pyarrow.array([datetime.timedelta(1)] * NUM_ROWS),
        "months": pyarrow.array([(1, 2, 3)] * NUM_ROWS, pyarrow.month_day_nano_interval()),
    }


NOT_IN_PARQUET = {"runs", "sparse", "dense", "months"}


def make_file(rng: random.Random, kind: str) -> bytes:
    """Return a sound file of a few columns."""
    every = columns(rng)
    if kind == "parquet":
        every = {name: column for name, column in every.items() if name not in NOT_IN_PARQUET}
    names = ["prompt", *rng.sample(sorted(every.keys() - {"prompt"}), rng.randint(1, 5))]
    table = pyarrow.table({name: every[name] for name in names})
    sink = pyarrow.BufferOutputStream()
    if kind == "parquet":
        pyarrow.parquet.write_table(
            table,
            sink,
            compression=rng.choice(["none", "snappy", "gzip", "zstd", "lz4"]),
            use_dictionary=rng.random() < 0.5,
            data_page_version=rng.choice(["1.0", "2.0"]),
            row_group_size=rng.choice([7, 1000]),
        )
        return bytes(sink.getvalue())
    options = pyarrow.ipc.IpcWriteOptions(
        compression=rng.choice([None, "lz4", "zstd"]), unify_dictionaries=kind == "file"
    )
    make = pyarrow.ipc.new_file if kind == "file" else pyarrow.ipc.new_stream
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=rng.choice([7, 1000]))
    return bytes(sink.getvalue())


def mutate(data: bytes, rng: random.Random) -> bytes:
    """Return the file with one to eight changes."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 8))):
        at = rng.randrange(len(changed))
        match rng.randrange(7):
            case 0:
                changed[at] ^= 1 << rng.randrange(8)
            case 1:
                changed[at] = rng.randrange(256)
            case 2 | 3 | 4:  # an offset, a length or a count
                size = rng.choice((1, 2, 4, 8))
                at -= at % size
                value = rng.choice(EXTREMES) if rng.random() < 0.7 else rng.randrange(1 << 8 * size)
                changed[at : at + size] = struct.pack("<Q", value)[:size]
            case 5:
                end = at + rng.randrange(64)
                place = rng.randrange(len(changed))
                changed[place : place + end - at] = changed[at:end]
            case 6:
                if rng.random() < 0.3:
                    del changed[at : at + rng.randrange(32)]
                else:
                    changed[at:at] = bytes(rng.randrange(32))
        if not changed:
            changed = bytearray(b"\0")
    return bytes(changed)


def read(path: Path) -> str:
    """Read a file as a job does, and return what came of it: `rows` or `error`."""
    reader = RowReader([str(path)], RowParser({}), limit=MOST_ROWS)
    try:
        for _ in reader.batches():
            pass
    except ConfigError as error:
        if str(path) not in str(error) or "\n" in str(error).rstrip():
            raise AssertionError(f"the error does not say what it should: {error}") from None
        return "error"
    return "rows"


def run_cases(cases: list[tuple[int, Path]], results: int) -> None:
    """Read files in this process, and write what came of each to a pipe; before it, which one is read."""
    for number, path in cases:
        os.write(results, f"{number} begins\n".encode())
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        started = time.monotonic()
        try:
            outcome = read(path)
        except BaseException:
            traceback.print_exc()
            outcome = "exception"
        if resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before > MOST_BYTES >> 10:
            outcome = "memory"
        if time.monotonic() - started > MOST_SECONDS:
            outcome = "time"
        os.write(results, f"{number} {outcome}\n".encode())


def fork_cases(cases: list[tuple[int, Path]]) -> Iterator[tuple[int, str]]:
    """Read files in processes, and yield what came of each; one that a process died of is passed over by the next."""
    while cases:
        receiver, sender = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(receiver)
            run_cases(cases, sender)
            os._exit(0)
        os.close(sender)
        with open(receiver) as results:
            lines = results.read().split("\n")[:-1]
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        begun = None
        for line in lines:
            number, outcome = line.split(" ")
            if outcome == "begins":
                begun = int(number)
            else:
                begun = None
                yield int(number), outcome
        if begun is not None:
            yield begun, f"died ({status})"
        done = {int(line.split(" ")[0]) for line in lines}
        cases = [case for case in cases if case[0] not in done]


def main() -> int:
    parser = make_parser(__doc__, "--cases", 2000)
    parser.add_argument("--kinds", nargs="+", default=["file", "stream", "parquet"], help="[default: all]")
    parser.add_argument(
        "--keep", type=Path, default=Path("fuzz-tables"), help="folder of failures [default: %(default)s]"
    )
    options = parser.parse_args()
    rng = random.Random(options.seed)
    started, outcomes = time.monotonic(), collections.Counter[str]()
    num_failed = 0
    batch_size = 200
    with tempfile.TemporaryDirectory() as folder:
        for first in range(0, options.cases, batch_size):
            cases = []
            for number in range(first, min(first + batch_size, options.cases)):
                kind = options.kinds[number % len(options.kinds)]
                path = Path(folder, f"{number}.{'parquet' if kind == 'parquet' else 'arrow'}")
                sound = make_file(rng, kind)
                path.write_bytes(sound if number % 50 == 0 else mutate(sound, rng))
                cases.append((number, path))
            for number, outcome in fork_cases(list(cases)):
                kind = options.kinds[number % len(options.kinds)]
                outcomes[f"{kind}: {outcome}"] += 1
                if outcome not in ("rows", "error"):
                    num_failed += 1
                    path = dict(cases)[number]
                    options.keep.mkdir(exist_ok=True)
                    (options.keep / f"{options.seed}-{path.name}").write_bytes(path.read_bytes())
                    print(f"{path.name} of seed {options.seed} ({kind}): {outcome}", file=sys.stderr)
            for _, path in cases:
                path.unlink()
    print_counts(outcomes, started)
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())

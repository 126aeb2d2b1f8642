"""`Shard`: the rows of a job that one of several runs answers, and its notation on the command line.

Shard I of N has the rows I, I + N, I + 2N and so on: long and short rows are spread evenly however the input is sorted,
and which rows a shard has does not depend on how many rows there are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from nvcli.errors import ConfigError

SHARD_FACT = "shard"
"""Name of the shard among the facts of a manifest."""
_TEXT = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_AUTO = "auto"


@dataclass(frozen=True, slots=True)
class Shard:
    """One of `count` shards of a job; `str` is its form on the command line and in a manifest."""

    number: int
    """Number of the shard, from 0."""
    count: int

    def __str__(self) -> str:
        return f"{self.number}/{self.count}"

    def __contains__(self, index: int) -> bool:
        return index % self.count == self.number

    def row(self, position: int) -> int:
        """Return the index in the whole job of this shard's row number `position` (from 0)."""
        return self.number + position * self.count

    def next_row(self, index: int) -> int:
        """Return the first row of this shard from `index` on."""
        return index + (self.number - index) % self.count

    def num_rows(self, total: int) -> int:
        """Return how many of the first `total` rows of the job belong to this shard."""
        return len(range(self.number, total, self.count))


WHOLE = Shard(0, 1)
"""All rows of a job."""


def read_shard(text: str) -> Shard | None:
    """Return the shard that a text such as `0/4` names; None where it names none."""
    match = _TEXT.fullmatch(text)
    if match is None:
        return None
    shard = Shard(int(match[1]), int(match[2]))
    return shard if shard.number < shard.count else None


def choose_shard(text: str, environ: Mapping[str, str]) -> Shard:
    """Return the shard that `--shard TEXT` names; `auto` is this task of a Slurm job step. Raises ConfigError.

    `environ` is the environment, which Slurm tells the task in.
    """
    if text == _AUTO:
        return _slurm_task(environ)
    if (shard := read_shard(text)) is not None:
        return shard
    if (match := _TEXT.fullmatch(text)) is not None and (count := int(match[2])):
        raise ConfigError(f"--shard {text}: shards are counted from 0; allowed: 0/{count} to {count - 1}/{count}")
    raise ConfigError(
        f"--shard {text}: allowed: I/N, such as 0/4 for the first of four shards, or auto in a task that srun started"
    )


def _slurm_task(environ: Mapping[str, str]) -> Shard:
    """Return the shard of a task that srun started.

    Tasks of an array are not counted: when some of them are run again, Slurm's count is that of those alone, and the
    same task would get other rows. Neither is the script of a batch job, which Slurm calls task 0 too.
    """
    array = environ.get("SLURM_ARRAY_TASK_ID")
    if array is not None:
        last = environ.get("SLURM_ARRAY_TASK_MAX", "")
        count = str(int(last) + 1) if last.isdigit() else "N"
        raise ConfigError(
            f"--shard auto: this is task {array} of a Slurm array, and its number of tasks is another one when some of "
            f"them are run again; give the number of shards: --shard $SLURM_ARRAY_TASK_ID/{count}"
        )
    found = f"{environ.get('SLURM_PROCID')}/{environ.get('SLURM_STEP_NUM_TASKS')}"
    shard = read_shard(found)
    if shard is None:
        raise ConfigError(
            "--shard auto: this is not a task that srun started (SLURM_PROCID and SLURM_STEP_NUM_TASKS are not set); "
            "give the shard as I/N, such as 0/4 for the first of four"
        )
    return shard

"""`Job`: what one process has to run and `Outcome`: what came of it; both travel as JSON files.

Plain Python, no nvcli: an engine may live in another environment than nvcli's.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

Rows = list[tuple[list[int], int]]
"""(prompt, tokens to generate) of each request."""


class LeftOut(Exception):
    """The engine cannot do this job; the message says why."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One engine's work in one process."""

    engine: str
    """A key of `engines.ENGINES`."""
    model: str
    """A folder in Hugging Face layout, with a tokenizer."""
    device: str
    """cpu or cuda."""
    dtype: str
    """float32, bfloat16 or float16."""
    tensor_parallel_size: int
    max_model_len: int
    max_num_seqs: int | None
    """None: the engine's own default."""
    batch_size: int
    """The batch size of engines that take fixed batches."""
    temperature: float
    warm_up: Rows
    rows: Rows

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Job:
        fields = json.loads(path.read_text(encoding="utf-8"))
        for name in ("warm_up", "rows"):
            fields[name] = [(prompt, length) for prompt, length in fields[name]]
        return Job(**fields)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Exactly one of `seconds` and `left_out` is set."""

    seconds: float | None = None
    """Seconds from the first request's sending to the last answer's arrival."""
    version: str = ""
    """The version of the engine's package."""
    left_out: str | None = None

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")

    @staticmethod
    def read(path: Path) -> Outcome:
        return Outcome(**json.loads(path.read_text(encoding="utf-8")))

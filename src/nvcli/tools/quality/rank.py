"""A rank that compares two models: it holds its share of both, and reads the same passages with either.

It runs as `nvcli.tools.quality.rank:main` in a process of its own. Both models' logits of a position are there at the
same time, so that the divergence is exact and nothing is kept of it but sums; logits of `_LOGITS_ROWS` positions are
held at a time.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import torch

from nvcli.errors import LoadError, NvcliError, first_line
from nvcli.tools.quality.logits import compare_logits
from nvcli.tools.quality.passage_reader import CHUNK_TOKENS, PassageReader
from nvcli.tools.quality.rank_messages import CompareFailed, CompareReady, CompareTask, PassageSums, PassageTask
from nvcli.tools.quality.statistics import TokenSums
from nvcli.worker.distributed.rendezvous import store_path
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.memory import oom_as_limits_error

_LOGITS_ROWS = 64
"""Positions whose logits are held at a time: of 152,000 tokens in float64 they take 78 MB for each model."""


def main(task: CompareTask, control: Connection) -> None:
    """Load both models, then answer every `PassageTask` with its `PassageSums`, until the command ends the process."""
    try:
        with torch.inference_mode():
            _run(task, control)
    except NvcliError as error:
        control.send(CompareFailed(type(error).__name__, str(error)))
    except Exception as error:
        control.send(CompareFailed("WorkerError", first_line(error), traceback.format_exc()))


def _run(task: CompareTask, control: Connection) -> None:
    notes: list[str] = []
    with oom_as_limits_error("the comparison, which holds both models at a time"):
        context = RankContext(rank=task.rank, report_phase=lambda phase: None, store_path=store_path(task.store_fd))
        a = PassageReader(task.configs[0], context, max_tokens=task.max_tokens, say=notes.append)
        context = replace(context, world=a.world)
        b = PassageReader(task.configs[1], context, max_tokens=task.max_tokens, say=notes.append)
        control.send(CompareReady(tuple(dict.fromkeys(notes))))
        while True:
            control.send(_compare(a, b, control.recv()))


def _compare(a: PassageReader, b: PassageReader, passage: PassageTask) -> PassageSums:
    """Read one passage with both models. Raises LoadError where one of them gives no numbers."""
    ids = torch.from_numpy(np.frombuffer(passage.token_ids, dtype=np.int32).copy()).to(a.device)
    parts = [TokenSums(), TokenSums()]
    for start in range(0, len(ids), CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, len(ids))
        hidden_a, hidden_b = (reader.read_chunk(ids[start:end], start) for reader in (a, b))
        for first, last in _row_spans(start, end, passage.answer_start):
            rows = slice(first - start, last - start)
            found = compare_logits(
                a.group,
                a.model.compute_logits(hidden_a[rows]),
                b.model.compute_logits(hidden_b[rows]),
                ids[first + 1 : last + 1].long(),
                vocab_size=a.model_config.vocab_size,
            )
            if found is None:
                raise LoadError(
                    f"the logits behind tokens {first} to {last - 1} of a passage are not all numbers, for A or for B: "
                    "its weights are broken, or too large for its type; try --dtype float32"
                )
            parts[first >= passage.answer_start] += found
    return PassageSums(*parts)


def _row_spans(start: int, end: int, answer_start: int) -> Iterator[tuple[int, int]]:
    """Cut positions [start, end) into spans of at most `_LOGITS_ROWS`, and where the answer starts."""
    while start < end:
        last = min(start + _LOGITS_ROWS, end, answer_start if start < answer_start else end)
        yield start, last
        start = last

"""A rank that compares two models: it holds its share of both, and reads the same passages with each.

It runs as `nvcli.tools.quality.rank:main` in its own process. Because it has both models' logits of a position at the
same time, the divergence is exact and only sums are kept. It holds the logits of `_LOGITS_ROWS` positions at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection

import numpy as np
import torch

from nvcli.errors import LoadError
from nvcli.tools.quality.logits import compare_logits
from nvcli.tools.quality.passage_reader import CHUNK_TOKENS, PassageReader
from nvcli.tools.quality.ranks import CompareTask, PassageSums, PassageTask
from nvcli.tools.quality.statistics import TokenSums
from nvcli.worker.distributed.rendezvous import store_path
from nvcli.worker.executor.rank_messages import RankFailed
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.memory import oom_as_limits_error

_LOGITS_ROWS = 64
"""Positions whose logits are held at a time. For 152,000 tokens in float64 they take 78 MB per model."""


def main(task: CompareTask, control: Connection) -> None:
    """Load both models and send notes for the user; then reply to every `PassageTask` with its `PassageSums`, until the
    command ends the process."""
    try:
        with torch.inference_mode():
            _run(task, control)
    except Exception as error:
        control.send(RankFailed.of(error))


def _run(task: CompareTask, control: Connection) -> None:
    notes: list[str] = []
    with oom_as_limits_error("the comparison, which holds both models at once"):
        context = RankContext(rank=task.rank, report_phase=lambda phase: None, store_path=store_path(task.store_fd))
        a = PassageReader(task.configs[0], context, max_tokens=task.max_tokens, say=notes.append)
        context = replace(context, world=a.world)
        b = PassageReader(task.configs[1], context, max_tokens=task.max_tokens, say=notes.append)
        control.send(tuple(dict.fromkeys(notes)))
        while True:
            control.send(_compare(a, b, control.recv()))


def _compare(a: PassageReader, b: PassageReader, passage: PassageTask) -> PassageSums:
    """Read one passage with both models. Raises LoadError if one of them gives NaN."""
    ids = torch.from_numpy(np.frombuffer(passage.token_ids, dtype=np.int32).copy()).to(a.device)
    parts = [TokenSums(), TokenSums()]
    # No run predicts what follows an answer: few models have learned it, and they may differ there as nowhere else.
    num_read = len(ids) - (passage.answer_start < len(ids))
    for start in range(0, num_read, CHUNK_TOKENS):
        end = min(start + CHUNK_TOKENS, num_read)
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
                    f"some logits after tokens {first} to {last - 1} of a passage are NaN, in A or in B: its weights "
                    "are damaged, or too large for its dtype; try --dtype float32"
                )
            parts[first >= passage.answer_start] += found
    prompt, answer = parts
    return prompt, answer


def _row_spans(start: int, end: int, answer_start: int) -> Iterator[tuple[int, int]]:
    """Split positions [start, end) at the start of the answer and into spans of at most `_LOGITS_ROWS`."""
    while start < end:
        last = min(start + _LOGITS_ROWS, end, answer_start if start < answer_start else end)
        yield start, last
        start = last

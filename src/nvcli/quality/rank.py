"""A rank that compares two models: it holds its share of both, and reads the same passages with either.

It runs as `nvcli.quality.rank:main` in a process of its own. Both models' logits of a position are there at the same
time, so that the divergence is exact and nothing is kept of it but sums; logits of `_LOGITS_ROWS` positions are held
at a time.
"""

from __future__ import annotations

import traceback
from multiprocessing.connection import Connection

import numpy as np
import torch

from nvcli.distributed.process_group import join_process_group
from nvcli.distributed.rendezvous import store_path
from nvcli.errors import LoadError, NvcliError, first_line
from nvcli.quality.logits import compare_logits
from nvcli.quality.passage_reader import CHUNK_TOKENS, PassageReader
from nvcli.quality.rank_messages import CompareFailed, CompareReady, CompareTask
from nvcli.quality.statistics import TokenSums
from nvcli.runner.device import open_device
from nvcli.runner.interface import RankContext
from nvcli.runner.memory import oom_as_limits_error

_LOGITS_ROWS = 64
"""Positions whose logits are held at a time: of 152,000 tokens in float64 they take 78 MB for each model."""


def main(task: CompareTask, control: Connection) -> None:
    """Load both models, then answer every passage (packed int32 ids) with its `TokenSums`, until None comes."""
    try:
        with torch.inference_mode():
            _run(task, control)
    except NvcliError as error:
        control.send(CompareFailed(type(error).__name__, str(error)))
    except Exception as error:
        control.send(CompareFailed("WorkerError", first_line(error), traceback.format_exc()))


def _run(task: CompareTask, control: Connection) -> None:
    config = task.configs[0]
    notes: list[str] = []
    with oom_as_limits_error("the comparison, which holds both models at a time"):
        device = open_device(config, task.rank)
        context = RankContext(rank=task.rank, report_phase=lambda phase: None, store_path=store_path(task.store_fd))
        world = join_process_group(
            context, device, size=config.tensor_parallel_size, timeout_seconds=config.step_timeout
        )
        a, b = (PassageReader(one, world.group, max_tokens=task.max_tokens, say=notes.append) for one in task.configs)
        control.send(CompareReady(tuple(dict.fromkeys(notes))))
        while (packed := control.recv()) is not None:
            ids = torch.from_numpy(np.frombuffer(packed, dtype=np.int32).copy()).to(device)
            control.send(_compare(a, b, ids))


def _compare(a: PassageReader, b: PassageReader, ids: torch.Tensor) -> TokenSums:
    """Read one passage [n] int32 with both models. Raises LoadError where one of them gives no numbers."""
    sums = TokenSums()
    for start in range(0, len(ids), CHUNK_TOKENS):
        chunk = ids[start : start + CHUNK_TOKENS]
        hidden_a, hidden_b = (reader.read_chunk(chunk, start) for reader in (a, b))
        for first in range(0, len(chunk), _LOGITS_ROWS):
            rows = slice(first, first + _LOGITS_ROWS)
            found = compare_logits(
                a.model.group,
                a.model.compute_logits(hidden_a[rows]),
                b.model.compute_logits(hidden_b[rows]),
                ids[start + first + 1 : start + min(rows.stop, len(chunk)) + 1].long(),
                vocab_size=a.config.vocab_size,
            )
            if found is None:
                raise LoadError(
                    f"the logits behind token {start + first} of a passage, or of one of the {_LOGITS_ROWS - 1} behind "
                    "it, are NaN for A or for B: the weights are broken, or their numbers exceed the type; try "
                    "--dtype float32"
                )
            sums += found
    return sums

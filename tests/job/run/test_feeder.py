"""The feeder's doorbell: whoever sleeps on it is woken by each batch, and by the end, and by nothing else."""

from __future__ import annotations

import queue
import select
from collections.abc import Iterator
from pathlib import Path

from nvcli.core.sampling_params import SamplingParams
from nvcli.job.job import Job, JobResult, RowContext
from nvcli.job.run.feeder import Feeder
from nvcli.job.text.chat_renderer import ChatRenderer
from nvcli.job.text.model_limits import ModelLimits
from nvcli.job.text.tokenizer import Tokenizer

LIMITS = ModelLimits(max_model_len=64, vocab_size=300, eos_token_ids=(1,))


class Given:
    """A source of rows whose batches are given one by one; None ends it."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[list[Job | JobResult] | None] = queue.SimpleQueue()

    def batches(self) -> Iterator[list[Job | JobResult]]:
        while (batch := self.queue.get()) is not None:
            yield batch


def rings(feeder: Feeder, seconds: float = 0.0) -> bool:
    return bool(select.select([feeder], [], [], seconds)[0])


def test_the_doorbell(model_folder: Path, tokenizer: Tokenizer) -> None:
    source = Given()
    feeder = Feeder(source, lambda: tokenizer, LIMITS, ChatRenderer(model_folder))
    row = Job(context=RowContext(id=0, index=0, line="line 1"), prompt="x", sampling=SamplingParams())
    feeder.start()
    assert not rings(feeder, 0.05)
    for _ in range(2):
        source.queue.put([row])
        assert rings(feeder, 20)
        assert feeder.take() is not None
        assert not rings(feeder)
    source.queue.put([row])
    source.queue.put(None)
    assert rings(feeder, 20)
    assert feeder.take() is not None
    assert rings(feeder, 20)
    assert feeder.ended
    feeder.stop()
    feeder.stop()

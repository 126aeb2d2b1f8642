"""transformers' generate, in batches of rows whose prompts are of about one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from comparison.engines.transformers_model import load, sampling_options
from comparison.job import Job, Rows


@contextmanager
def opened(job: Job) -> Iterator[Callable[[Rows], None]]:
    model = load(job)

    def answer_batch(rows: Rows) -> None:
        longest = max(len(prompt) for prompt, _ in rows)
        padding = [longest - len(prompt) for prompt, _ in rows]
        ids = [[0] * left + prompt for left, (prompt, _) in zip(padding, rows, strict=True)]
        mask = [[0] * left + [1] * (longest - left) for left in padding]
        num_tokens = max(length for _, length in rows)
        out = model.generate(
            torch.tensor(ids, device=job.device),
            attention_mask=torch.tensor(mask, device=job.device),
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
            pad_token_id=0,
            **sampling_options(job),
        )
        assert out.shape[1] == longest + num_tokens

    def answer(rows: Rows) -> None:
        ordered = sorted(rows, key=lambda row: len(row[0]))
        for start in range(0, len(ordered), job.batch_size):
            answer_batch(ordered[start : start + job.batch_size])
        if job.device == "cuda":
            torch.cuda.synchronize()

    yield answer

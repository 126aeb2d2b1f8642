"""transformers' continuous batching: each row with its own length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from transformers import ContinuousBatchingConfig, GenerationConfig

from comparison.engines.transformers_model import load, sampling_options
from comparison.job import Job, Rows


@contextmanager
def opened(job: Job) -> Iterator[Callable[[Rows], None]]:
    model = load(job)
    generation = GenerationConfig(
        max_new_tokens=job.max_model_len, eos_token_id=-1, pad_token_id=0, **sampling_options(job)
    )
    # A GPU's cache is sized by what it has left; on a CPU the number of blocks (of 256 tokens) is to be said.
    num_tokens = sum(len(prompt) + length for prompt, length in job.rows)
    options = {"num_blocks": num_tokens // 256 + 2 * len(job.rows)} if job.device == "cpu" else {}
    batching = ContinuousBatchingConfig(max_batch_tokens=8192, **options)
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=batching
    ) as manager:

        def answer(rows: Rows) -> None:
            left = {}
            for prompt, length in rows:
                left[manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)] = length
            while left:
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    assert result.error is None, result.error
                    assert len(result.generated_tokens) == left.pop(result.request_id)
                assert manager.is_running(), "the batching thread ended; what it said is above"

        yield answer

"""The built-in model over an FP8 KV cache, through whole engines: its answers stay right."""

from __future__ import annotations

import random

from demo_tasks import TASKS, raw_prompt, sample
from nvcli import LLM


def test_held_out_questions(warm_engines: None) -> None:
    """With prompts in chunks, and once more with their prefixes from the cache. All of 800 questions were answered
    right with either cache; one of these may go wrong."""
    rng = random.Random(3)
    examples = [sample(rng, task=task, split="heldout") for task in TASKS if task != "count" for _ in range(3)]
    prompts = [raw_prompt(example) for example in examples]
    settings = {"max_model_len": 1024, "max_num_batched_tokens": 128, "max_num_seqs": 64, "block_size": 4}
    with LLM("demo", kv_cache_dtype="fp8", kv_cache_memory="16MiB", **settings) as llm:
        first, again = (list(llm.generate(prompts, order="input", sampling={"temperature": 0})) for _ in range(2))
    for answers in (first, again):
        right = [answer.text.strip() == example.answer for answer, example in zip(answers, examples, strict=True)]
        assert sum(right) >= len(right) - 1
    assert sum(answer["usage"]["cached_tokens"] for answer in again) > 8 * len(prompts)

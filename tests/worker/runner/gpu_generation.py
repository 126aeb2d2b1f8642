"""Whole engines on GPUs, for the tests of several ranks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from fake_runners import engine_config
from nvcli.core.messages import EngineReady, unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.demo import demo_path
from nvcli.engine.client import EngineClient
from nvcli.engine.request import EngineStats
from requests_factory import answers_of, make_request


def generate(
    prompts: list[list[int]], *, max_tokens: int = 200, stop_ids: tuple[int, ...] = (), **options: Any
) -> tuple[list[list[int]], EngineReady, EngineStats]:
    """Answers in the order of the prompts, by the built-in model unless `options`, of the engine, and `sampling`, say
    otherwise."""
    sampling = SamplingParams(**options.pop("sampling", {"temperature": 0.0}))
    values: dict[str, Any] = {
        "model_path": demo_path(),
        "device": "cuda",
        "dtype": "bfloat16",
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "block_size": 64,
        "kv_cache_memory": 4 << 30,  # not a share of what other tests leave of the GPU
    }
    client = EngineClient.start(engine_config(**{**values, **options}))
    try:
        ready = client.wait_ready()
        assert ready is not None
        requests = [
            make_request(i, prompt, max_tokens, sampling=sampling, stop_ids=list(stop_ids), seed=3)
            for i, prompt in enumerate(prompts)
        ]
        answers = answers_of(client, requests)
        return [unpack(answers[i].token_ids).tolist() for i in range(len(prompts))], ready, client.stats
    finally:
        client.close()


def share_of_right_answers(num_questions: int, **options: Any) -> tuple[float, EngineReady]:
    """Of the built-in model, to questions that come and go so that steps of all kinds take part."""
    from transformers import AutoTokenizer

    from demo_tasks import raw_prompt, sample

    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    rng = random.Random(5)
    tasks = ("add", "lookup", "reverse", "repeat")
    examples = [sample(rng, task, split="heldout") for task in tasks for _ in range(num_questions // len(tasks))]
    rng.shuffle(examples)
    asked = [tokenizer.encode(raw_prompt(example)) for example in examples]
    answers, ready, _ = generate(asked, stop_ids=(0,), **options)
    texts = [tokenizer.decode(ids[: ids.index(0)] if 0 in ids else ids).strip() for ids in answers]
    right = sum(text == example.answer for text, example in zip(texts, examples, strict=True))
    return right / len(examples), ready


def run_wide_model(folder: Path, num_ranks: int, **options: Any) -> EngineReady:
    """Full batches through random weights of 0.6B: every answer has its length, and the memory is as planned."""
    from nvcli.tools.bench.shapes import write_shape

    rng = random.Random(1)
    prompts = [[rng.randrange(5, 150_000) for _ in range(rng.randrange(1, 300))] for _ in range(400)]
    answers, ready, _ = generate(
        prompts,
        max_tokens=20,
        model_path=write_shape("qwen3-0.6b", folder, quantization=options.get("quantization", "none")),
        load_format="dummy",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        measure_memory=True,
        sampling={"temperature": 0.6},
        **options,
    )
    assert all(len(answer) == 20 for answer in answers)
    assert len(ready.memory) == num_ranks
    for use in ready.memory:
        difference = abs(sum(use.measured.values()) - sum(use.planned.values()))
        assert difference < 0.02 * use.total, (use.planned, use.measured)
    return ready

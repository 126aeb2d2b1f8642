"""A model in stages over several GPUs, whole engine and real processes: right answers, in graphs and eagerly."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from fake_runners import engine_config
from nvcli.demo import demo_path
from nvcli.engine.client import EngineClient
from nvcli.engine.request import EngineStats
from nvcli.messages import EngineReady, unpack
from nvcli.sampling_params import SamplingParams
from requests_factory import make_request

pytestmark = [pytest.mark.gpu, pytest.mark.parametrize(("pp", "tp"), [(2, 1), (4, 1), (2, 2), (2, 4)])]


@pytest.fixture(autouse=True)
def enough_gpus(pp: int, tp: int) -> None:
    if torch.cuda.device_count() < pp * tp:
        pytest.skip(f"needs {pp * tp} GPUs")


def generate(
    prompts: list[list[int]], pp: int, tp: int, *, max_tokens: int = 200, stop_ids: tuple[int, ...] = (), **options: Any
) -> tuple[list[list[int]], EngineReady, EngineStats]:
    """`options`: of the engine, and `sampling`."""
    sampling = SamplingParams(**options.pop("sampling", {"temperature": 0.0}))
    values: dict[str, Any] = {
        "model_path": demo_path(),
        "device": "cuda",
        "dtype": "bfloat16",
        "pipeline_parallel_size": pp,
        "tensor_parallel_size": tp,
        "max_model_len": 1024,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "block_size": 64,
        "gpu_memory_utilization": 0.2,
    }
    client = EngineClient.start(engine_config(**{**values, **options}))
    try:
        ready = client.wait_ready()
        assert ready is not None
        client.add(
            [
                make_request(i, prompt, max_tokens, sampling=sampling, stop_ids=list(stop_ids), row=i, sample=0, seed=3)
                for i, prompt in enumerate(prompts)
            ]
        )
        answers: dict[int, list[int]] = {}
        while len(answers) < len(prompts):
            answers.update({o.request_id: unpack(o.token_ids).tolist() for o in client.poll(1.0)})
        return [answers[i] for i in range(len(prompts))], ready, client.stats
    finally:
        client.close()


@pytest.mark.parametrize(
    ("enforce_eager", "sampling"),
    [
        (False, {"temperature": 0.0}),
        (True, {"temperature": 0.0}),
        (False, {"temperature": 0.1, "top_k": 5}),
        (False, {"temperature": 0.1, "repetition_penalty": 1.0001}),
    ],
)
def test_built_in_model_answers_right(pp: int, tp: int, enforce_eager: bool, sampling: dict[str, Any]) -> None:
    """Requests that come and go, so that steps of all kinds take part, and decode rows fill mixed graphs."""
    from transformers import AutoTokenizer

    from demo_tasks import raw_prompt, sample

    tokenizer = AutoTokenizer.from_pretrained(demo_path())
    rng = random.Random(5)
    tasks = ("add", "lookup", "reverse", "repeat")
    examples = [sample(rng, task, split="heldout") for task in tasks for _ in range(60)]
    rng.shuffle(examples)
    asked = [tokenizer.encode(raw_prompt(example)) for example in examples]
    answers, _, _ = generate(asked, pp, tp, stop_ids=(0,), enforce_eager=enforce_eager, sampling=sampling)
    texts = [tokenizer.decode(ids[: ids.index(0)] if 0 in ids else ids).strip() for ids in answers]
    right = sum(text == example.answer for text, example in zip(texts, examples, strict=True))
    assert right >= 0.97 * len(examples)


def test_chunks_and_preemption(pp: int, tp: int) -> None:
    """A small cache and small steps: every request gets all its tokens."""
    prompts = [list(range(3 + i, 103 + i)) for i in range(24)]
    size = (16 << 20) // pp // min(tp, 2)  # about 64 blocks, and the requests want 96
    answers, _, stats = generate(
        prompts, pp, tp, max_tokens=100, kv_cache_memory=size, max_model_len=512, max_num_batched_tokens=64
    )
    assert [len(answer) for answer in answers] == [100] * 24
    assert stats.num_preemptions > 0


def test_a_wide_model_runs_in_its_memory(pp: int, tp: int, tmp_path: Path) -> None:
    """Random weights of 0.6B, full batches: the links' buffers and NCCL are in the plan, and the plan holds."""
    from nvcli.bench.shapes import write_shape

    rng = random.Random(1)
    prompts = [[rng.randrange(5, 150_000) for _ in range(rng.randrange(1, 300))] for _ in range(400)]
    answers, ready, _ = generate(
        prompts,
        pp,
        tp,
        max_tokens=20,
        model_path=write_shape("qwen3-0.6b", tmp_path),
        load_format="random",
        max_num_seqs=256,
        max_num_batched_tokens=8192,
        measure_memory=True,
        sampling={"temperature": 0.6},
    )
    assert all(len(answer) == 20 for answer in answers)
    assert len(ready.memory) == pp * tp
    for use in ready.memory:
        difference = abs(sum(use.measured.values()) - sum(use.planned.values()))
        assert difference < 0.02 * use.total, (use.planned, use.measured)

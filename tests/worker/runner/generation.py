"""Requests of all kinds for a tiny model, answered by an engine, and transformers' greedy answers to compare."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from checkpoints import greedy_answer, reference_logits_of
from fake_runners import engine_config
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.client import EngineClient
from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.models.config import load_model_config
from nvcli.models.kv_groups import block_bytes
from nvcli.worker.distributed.stage import Stage
from nvcli.worker.runner.interface import RankContext
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import make_core, run_core
from requests_factory import answers_of, make_request
from warm_process import engines_are_copies

EOS = 1
MAX_TOKENS = 14


def prompts() -> list[list[int]]:
    """Lengths of 1 to 300 tokens (up to 75 blocks), several with a common prefix, one wholly contained in another."""
    rng = random.Random(7)
    common = [rng.randrange(2, 97) for _ in range(50)]
    lengths = [1, 2, 3, 4, 5, 8, 17, 33, 64, 128, 300]
    unique = [[rng.randrange(2, 97) for _ in range(n)] for n in lengths]
    shared = [common + [rng.randrange(2, 97) for _ in range(n)] for n in (1, 2, 7, 30)]
    return [*unique, *shared, common, common[:48], list(common)]


SAMPLED = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.7, top_k=20, top_p=0.9, seed=5),
    SamplingParams(temperature=1.5, min_p=0.05, presence_penalty=0.5, frequency_penalty=0.2),
    SamplingParams(temperature=0.0, repetition_penalty=1.3, min_tokens=10, logit_bias={5: 2.0, 6: -3.0}),
]


def requests() -> list[Request]:
    greedy = [make_request(i, prompt, MAX_TOKENS, stop_ids=[EOS]) for i, prompt in enumerate(prompts())]
    sampled = [
        make_request(
            1000 + 10 * i + j,
            prompt,
            MAX_TOKENS,
            stop_ids=[EOS],
            sampling=params,
            seed=params.seed or 0,
            row=i,
            sample=j,
        )
        for i, prompt in enumerate(prompts()[::3])
        for j, params in enumerate(SAMPLED)
    ]
    return greedy + sampled


def fewer_requests() -> list[Request]:
    """Every greedy request, and two for each way to sample: for engines of several ranks, whose steps take long."""
    return requests()[: len(prompts()) + 2 * len(SAMPLED)]


@contextmanager
def running_engine(path: Path, **config: Any) -> Iterator[EngineClient]:
    """Start an engine with processes of its own. `config`: of the engine; see also `config_of`."""
    with engines_are_copies():
        client = EngineClient.start(config_of(path, **config))
    try:
        client.wait_ready()
        yield client
    finally:
        client.close()


def generate(path: Path, batch: list[Request], **config: Any) -> tuple[dict[int, RequestOutput], EngineStats]:
    """Answer requests by an engine with processes of its own."""
    with running_engine(path, **config) as client:
        return answers_of(client, batch), client.stats


def generate_here(path: Path, batch: list[Request], **config: Any) -> tuple[dict[int, RequestOutput], EngineStats]:
    """Answer requests by an engine of one rank in this process."""
    core = make_core(ModelRunner(config_of(path, **config), RankContext(rank=0, report_phase=lambda phase: None)))
    return run_core(core, batch), core.scheduler.stats


def config_of(path: Path, *, num_kv_tokens: int | None = None, **config: Any) -> EngineConfig:
    """`num_kv_tokens`: that a KV cache without tensor parallelism is to hold."""
    if num_kv_tokens is not None:
        first = Stage(0, config.get("pipeline_parallel_size", 1))
        size = block_bytes(load_model_config(path), "float32", block_size=4, stage=first) // 4
        config["kv_cache_memory"] = num_kv_tokens * size
    return engine_config(model_path=path, max_model_len=400, **config)


def greedy_answers(
    path: Path, prompts: list[list[int]], guesses: list[list[int]], max_tokens: int = MAX_TOKENS, eos: int | None = EOS
) -> list[list[int]]:
    """Return transformers' greedy answers; see `greedy_answer`."""
    logits = reference_logits_of(path, [prompt + guess for prompt, guess in zip(prompts, guesses, strict=True)])
    return [greedy_answer(own, len(prompt), max_tokens, eos) for own, prompt in zip(logits, prompts, strict=True)]


def assert_greedy(path: Path, answers: dict[int, list[int]]) -> None:
    """Check that the answers to `prompts()`, among those to `requests()`, are transformers' own."""
    found = [answers[number] for number in range(len(prompts()))]
    assert found == greedy_answers(path, prompts(), found)


def tokens_of(done: dict[int, RequestOutput]) -> dict[int, list[int]]:
    return {number: unpack(output.token_ids).tolist() for number, output in done.items()}

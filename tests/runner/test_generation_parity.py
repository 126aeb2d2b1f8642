"""Whole engine, real processes, random Qwen3 checkpoints: the tokens are transformers' own, however they are computed.

Each circumstance (chunked prefill, prefix hits, preemption, tensor parallelism) answers the same requests, and must
give the same greedy continuations as transformers, and the same sampled ones as every other circumstance.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from checkpoints import write_tiny_qwen3
from fake_runners import engine_config
from nvcli.engine.client import EngineClient
from nvcli.engine.request import EngineStats, Request, RequestOutput
from nvcli.messages import unpack
from nvcli.sampling_params import SamplingParams
from requests_factory import make_request

EOS = 1
MAX_TOKENS = 24

CHECKPOINTS: dict[str, dict[str, Any]] = {
    "tied-gqa2": {"tie_word_embeddings": True},
    "untied-mha": {"num_key_value_heads": 4, "max_shard_size": "30KB"},
    "untied-gqa4": {"num_key_value_heads": 1, "head_dim": 32, "seed": 3},
}
CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "plain": {"max_num_batched_tokens": 4096, "max_num_seqs": 64, "enable_prefix_caching": False},
    "chunked": {"max_num_batched_tokens": 9, "max_num_seqs": 8},
    "prefix-hits": {"max_num_seqs": 3, "max_num_batched_tokens": 512},
    "tp2": {"tensor_parallel_size": 2, "max_num_seqs": 16, "max_num_batched_tokens": 64},
    "preempted": {"max_num_seqs": 16, "max_num_batched_tokens": 64, "num_kv_tokens": 420},
}


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


def generate(path: Path, batch: list[Request], **config: Any) -> tuple[dict[int, RequestOutput], EngineStats]:
    num_kv_tokens = config.pop("num_kv_tokens", None)
    if num_kv_tokens is not None:  # 2 layers, float32
        shape = {"tied-gqa2": 2 * 16, "untied-mha": 4 * 16, "untied-gqa4": 1 * 32}[path.name]
        config["kv_cache_memory"] = num_kv_tokens * 2 * 2 * shape * 4
    client = EngineClient.start(engine_config(model_path=path, max_model_len=400, **config))
    try:
        client.wait_ready()
        client.add(batch)
        done: dict[int, RequestOutput] = {}
        while len(done) < len(batch):
            done.update({o.request_id: o for o in client.poll(1.0)})
        while client.stats.num_running:
            client.poll(0.3)
        return done, client.stats
    finally:
        client.close()


@pytest.fixture(scope="module", params=CHECKPOINTS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / request.param, **CHECKPOINTS[request.param])


@pytest.fixture(scope="module")
def greedy_reference(checkpoint: Path) -> list[list[int]]:
    import torch
    from transformers import Qwen3ForCausalLM

    model = Qwen3ForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()
    answers = []
    for prompt in prompts():
        ids = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=MAX_TOKENS,
            do_sample=False,
            eos_token_id=EOS,
            pad_token_id=0,
        )
        answers.append(ids[0, len(prompt) :].tolist())
    return answers


@pytest.fixture(scope="module")
def plain_answers(checkpoint: Path) -> dict[int, list[int]]:
    done, stats = generate(checkpoint, requests(), **CIRCUMSTANCES["plain"])
    assert stats.cached_tokens == 0
    return {i: unpack(output.token_ids).tolist() for i, output in done.items()}


def test_plain(plain_answers: dict[int, list[int]], greedy_reference: list[list[int]]) -> None:
    for i, expected in enumerate(greedy_reference):
        assert plain_answers[i] == expected
    answers = [tuple(tokens) for i, tokens in plain_answers.items() if i >= 1000]
    assert len(set(answers)) > len(answers) // 2  # sampled answers do differ


@pytest.mark.parametrize("circumstance", [name for name in CIRCUMSTANCES if name != "plain"])
def test_circumstances_do_not_change_the_answers(
    checkpoint: Path,
    plain_answers: dict[int, list[int]],
    greedy_reference: list[list[int]],
    circumstance: str,
) -> None:
    batch = requests()
    random.Random(circumstance).shuffle(batch)
    done, stats = generate(checkpoint, batch, **CIRCUMSTANCES[circumstance])
    if circumstance == "preempted":
        assert stats.num_preemptions > 0
    else:
        assert stats.cached_tokens > 100
    answers = {i: unpack(output.token_ids).tolist() for i, output in done.items()}
    for i, expected in enumerate(greedy_reference):
        assert answers[i] == expected, f"prompt {i}"
    assert answers == plain_answers

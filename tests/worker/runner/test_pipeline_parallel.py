"""Whole engine, real processes, a model in stages: the tokens and log-probabilities are those of one rank, and
transformers' own, however the steps are cut."""

from __future__ import annotations

import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from generation import assert_greedy, fewer_requests, generate, generate_here, requests, tokens_of

from checkpoints import write_tiny_model, write_tiny_qwen3
from fake_runners import engine_config
from nvcli.core.messages import unpack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.client import EngineClient
from nvcli.engine.request import RequestOutput
from nvcli.errors import WorkerError
from requests_factory import make_request

pytestmark = pytest.mark.usefixtures("warm_engines")
CIRCUMSTANCES: dict[str, tuple[str, dict[str, Any]]] = {
    "three stages of five layers": (
        "untied",
        {"pipeline_parallel_size": 3, "max_num_batched_tokens": 24, "num_kv_tokens": 420},
    ),
    "two stages of two ranks": (
        "tied",
        {"pipeline_parallel_size": 2, "tensor_parallel_size": 2, "max_num_batched_tokens": 32},
    ),
    "no overlap": ("untied", {"pipeline_parallel_size": 2, "overlap_steps": False, "max_num_batched_tokens": 512}),
}
"""Whether embedding and LM head are tied, and the engine's configuration."""


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    return {
        # What a stage of Gemma sends is summed up already, behind the norm of the result.
        "tied": write_tiny_model(
            folder / "tied", "Gemma3Text", num_hidden_layers=5, rope_parameters=None, tie_word_embeddings=True
        ),
        "untied": write_tiny_qwen3(folder / "untied", num_hidden_layers=5),
    }


@pytest.fixture(scope="module")
def answers(checkpoints: dict[str, Path]) -> dict[str, dict[int, list[int]]]:
    """Of one rank, which are transformers' where they are greedy."""
    found = {}
    for name, path in checkpoints.items():
        done, _ = generate_here(path, requests(), max_num_batched_tokens=4096, max_num_seqs=64)
        found[name] = tokens_of(done)
        assert_greedy(path, found[name])
    return found


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_stages_do_not_change_the_answers(
    checkpoints: dict[str, Path], answers: dict[str, dict[int, list[int]]], circumstance: str
) -> None:
    name, changes = CIRCUMSTANCES[circumstance]
    batch = fewer_requests()
    random.Random(circumstance).shuffle(batch)
    config = {"max_num_seqs": 16, "max_num_batched_tokens": 64, **changes}
    done, stats = generate(checkpoints[name], batch, **config)
    assert tokens_of(done) == {number: answers[name][number] for number in done}
    if "num_kv_tokens" in changes:
        assert stats.num_preemptions > 0
    else:
        assert stats.cached_tokens > 100


def test_log_probabilities_and_streams(checkpoints: dict[str, Path]) -> None:
    sampling = SamplingParams(temperature=0.8, logprobs=3, repetition_penalty=1.1, stop=["x"])
    batch = [make_request(i, [5, 6, 7 + i], 12, sampling=sampling, stream=i % 2 == 0) for i in range(6)]
    results = []
    for config in ({}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}):
        outputs = collect(checkpoints["tied"], batch, **config)
        tokens = {i: [t for o in pieces for t in unpack(o.token_ids)] for i, pieces in outputs.items()}
        assert all(len(pieces) == (12 if i % 2 == 0 else 1) for i, pieces in outputs.items())
        logprobs = {i: [one for o in pieces for one in o.logprobs] for i, pieces in outputs.items()}
        results.append((tokens, logprobs))
    (tokens, logprobs), (other_tokens, other_logprobs) = results
    assert other_tokens == tokens
    for number, expected in logprobs.items():
        for one, other in zip(expected, other_logprobs[number], strict=True):
            assert other.top_ids == one.top_ids
            assert [other.logprob, *other.top_logprobs] == pytest.approx([one.logprob, *one.top_logprobs], abs=1e-4)


def collect(path: Path, batch: list[Any], **config: Any) -> dict[int, list[RequestOutput]]:
    client = EngineClient.start(engine_config(model_path=path, **config))
    try:
        client.wait_ready()
        client.add(batch)
        pieces: dict[int, list[RequestOutput]] = {request.request_id: [] for request in batch}
        while not all(outputs and outputs[-1].finish_reason for outputs in pieces.values()):
            for output in client.poll(1.0):
                pieces[output.request_id].append(output)
        return pieces
    finally:
        client.close()


def poll_until_error(client: EngineClient) -> None:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        client.poll(1.0)


def test_killed_rank_of_a_later_stage_is_named(tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path / "model")
    client = EngineClient.start(engine_config(model_path=path, pipeline_parallel_size=2, max_model_len=500))
    try:
        client.wait_ready()
        client.add([make_request(i, [5, 6, 7], 400) for i in range(8)])
        client.poll(0.2)
        children = [task.read_text() for task in Path(f"/proc/{client.pid}/task").glob("*/children")]
        ranks = sorted(int(pid) for text in children for pid in text.split())
        os.kill(ranks[1], signal.SIGKILL)
        with pytest.raises(WorkerError, match=rf"rank 1 of stage 1 \(pid {ranks[1]}\) was killed by SIGKILL"):
            poll_until_error(client)
    finally:
        client.close()


def test_memory_and_blocks_are_those_of_the_fullest_stage(tmp_path: Path) -> None:
    path = write_tiny_qwen3(tmp_path / "model", num_hidden_layers=3)
    config = {"model_path": path, "pipeline_parallel_size": 2, "kv_cache_memory": 100 * 2 * 2 * 2 * 16 * 4 * 4}
    client = EngineClient.start(engine_config(**config, measure_memory=True))
    try:
        ready = client.wait_ready()
    finally:
        client.close()
    assert ready is not None
    assert ready.num_blocks == 99, "of the two layers of stage 0; stage 1 has room for twice as many"
    first, last = ready.memory
    assert first.weights.keys() == {"embeddings", "attention", "MLP", "norms"}
    assert last.weights.keys() == {"attention", "MLP", "norms", "LM head"}
    assert first.weights["MLP"] == 2 * last.weights["MLP"]

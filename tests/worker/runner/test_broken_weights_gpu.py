"""NaN in a model's weights on a GPU: rows that meet it fail, in graphs and eagerly; the others keep their answers."""

from __future__ import annotations

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import set_weights, write_tiny_qwen3
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import Request, RequestOutput
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import make_runner, run_to_outputs
from requests_factory import make_request

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("memory_is_given_back")]

POISON = 96
"""The token whose embedding is NaN."""
NUM_REQUESTS = 60
MAX_TOKENS = 12
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature": {"temperature": 0.8},
    "small top-k": {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    "top-p": {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    "whole logits": {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2},
}


@pytest.fixture(autouse=True)
def full_float32() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_qwen3(tmp_path_factory.mktemp("models") / "poisoned", head_dim=64)
    set_weights(path, "model.embed_tokens.weight", float("nan"), POISON)
    return path


def small_runner(path: Path, **options: Any) -> ModelRunner:
    """One whose few blocks are given from request to request."""
    values: dict[str, Any] = {"block_size": 256, "max_num_seqs": 8, "kv_cache_memory": 12 << 20}
    runner = make_runner(path, **{**values, **options})
    assert runner.ready.num_blocks < NUM_REQUESTS
    return runner


def requests(sampling: dict[str, Any], *, poisoned: bool) -> list[Request]:
    """Of every third the last token of the prompt may be the poison; no answer has it."""
    rng = random.Random(1)
    found = []
    for i in range(NUM_REQUESTS):
        prompt = [rng.randrange(2, 90) for _ in range(rng.randrange(1, 300))]
        if poisoned and i % 3 == 1:
            prompt[-1] = POISON
        found.append(make_request(i, prompt, MAX_TOKENS, sampling=SamplingParams(**sampling)))
    return found


def failed(outputs: dict[int, RequestOutput]) -> list[int]:
    return sorted(i for i, output in outputs.items() if output.error_type == "non_finite_logits")


@pytest.mark.parametrize("enforce_eager", [False, True])
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_rows_beside_broken_ones_keep_their_answers(checkpoint: Path, sampling: str, enforce_eager: bool) -> None:
    """In float32, where the size of a batch changes hardly anything."""
    runner = small_runner(checkpoint, dtype="float32", attention_backend="triton", enforce_eager=enforce_eager)
    assert (runner.steps.graphs is None) == enforce_eager
    sound, mixed = (run_to_outputs(runner, requests(SAMPLINGS[sampling], poisoned=p)) for p in (False, True))
    broken = {i for i in range(NUM_REQUESTS) if i % 3 == 1}
    met_by_chance = set(failed(sound))  # an answer had the poison itself
    assert len(met_by_chance) < NUM_REQUESTS // 4
    assert broken <= set(failed(mixed))
    others = set(range(NUM_REQUESTS)) - broken
    assert sum(mixed[i].token_ids != sound[i].token_ids for i in others) <= 1, "rounding may tip one"


@pytest.mark.parametrize(
    ("backend", "package"),
    [("triton", "triton"), ("torch", "torch"), ("flash-attn", "flash_attn"), ("flashinfer", "flashinfer")],
)
@pytest.mark.parametrize("enforce_eager", [False, True])
def test_no_backend_reads_what_broken_rows_left_behind(
    checkpoint: Path, backend: str, package: str, enforce_eager: bool
) -> None:
    """Keys that are NaN lie in blocks which other requests get, behind their last keys."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    runner = small_runner(checkpoint, attention_backend=backend, enforce_eager=enforce_eager)
    sampling = {"temperature": 0.0, "logit_bias": {POISON: -100.0}}  # no answer has the poison
    outputs = run_to_outputs(runner, requests(sampling, poisoned=True))
    assert failed(outputs) == [i for i in range(NUM_REQUESTS) if i % 3 == 1]

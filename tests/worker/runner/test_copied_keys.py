"""Choices that copy keys of their context get the scores that transformers gives them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from generation import generate

from checkpoints import reference_logits_of, write_tiny_model
from expert_shapes import EXPERT_SHAPES
from family_shapes import SHAPES
from nvcli.core.messages import StepInput, unpack
from nvcli.engine import key_copies
from nvcli.engine.request import PromptScoring, Request, RequestOutput
from one_rank import make_runner, run_to_outputs
from requests_factory import make_request

LENGTHS = [(3, 5), (20, 5), (45, 1), (60, 20), (61, 3)]
"""Tokens of the contexts and of their choices."""


def rows(vocab_size: int = 97) -> list[tuple[list[int], list[list[int]]]]:
    """Contexts that begin alike, each with three choices."""
    rng = random.Random(5)

    def tokens(number: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(number)]

    lead = tokens(2)
    return [(lead + tokens(length - 2), [tokens(size) for _ in range(3)]) for length, size in LENGTHS]


def requests() -> list[Request]:
    texts = [(context, choice) for context, choices in rows() for choice in choices]
    return [
        make_request(number, context + choice[:-1], 1, read=PromptScoring(first=len(context), next_id=choice[-1]))
        for number, (context, choice) in enumerate(texts)
    ]


def logprobs_of(outputs: dict[int, RequestOutput]) -> list[np.ndarray]:
    results = [b"".join(result.logprobs for result in outputs[number].query_results) for number in range(len(outputs))]
    return [np.frombuffer(logprobs, np.float32) for logprobs in results]


def expected_logprobs(path: Path) -> list[np.ndarray]:
    texts = [(context, choice) for context, choices in rows() for choice in choices]
    all_logits = reference_logits_of(path, [context + choice for context, choice in texts])
    found = []
    for (context, choice), logits in zip(texts, all_logits, strict=True):
        at_choice = logits.log_softmax(-1)[len(context) - 1 : -1]
        found.append(at_choice[range(len(choice)), choice].numpy())
    return found


def run(path: Path, device: str = "cpu", **settings: Any) -> tuple[list[np.ndarray], list[StepInput]]:
    """Score the rows on one rank; return the log-probabilities of each choice, and the steps."""
    values = {"max_model_len": 128, "max_num_seqs": 16, "max_num_batched_tokens": 100, "block_size": 16, **settings}
    runner = make_runner(path, device, kv_cache_memory=1 << 22, **values)
    steps: list[StepInput] = []
    launch = runner.launch

    def noted(step: StepInput) -> Any:
        steps.append(step)
        return launch(step)

    runner.launch = noted  # type: ignore[method-assign]
    return logprobs_of(run_to_outputs(runner, requests())), steps


def check(found: list[np.ndarray], expected: list[np.ndarray], atol: float = 1e-4) -> None:
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=atol)


@pytest.mark.parametrize(
    "name", ["qwen 3", "gemma 2", "gpt-oss", "glm 5.3 flash with vision", "qwen 4-exp with vision"]
)
def test_scores_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """With windows, soft caps, sinks and pools of keys; in steps that hold a part of a row."""
    family, settings = {"qwen 3": ("Qwen3", {}), **SHAPES, **EXPERT_SHAPES}[name]
    if name.startswith(("glm", "qwen 4")):  # without recurrent states, which are not copied
        settings = {**settings, "num_hidden_layers": 2, "layer_types": ["indexed_attention"] * 2}
        own = {"indexer_types": ["full"] * 2, "mlp_layer_types": ["dense"] * 2}
        settings |= own if name.startswith("glm") else {"ple_layer_ids": None}
    path = write_tiny_model(tmp_path / "model", family, **settings)
    found, steps = run(path)
    check(found, expected_logprobs(path))
    assert sum(bool(step.key_copies) for step in steps) > 2
    num_computed = sum(step.total_tokens for step in steps)
    assert num_computed <= sum(context + 3 * size for context, size in LENGTHS)


def test_scores_over_an_fp8_cache_are_those_without_copies(tmp_path: Path) -> None:
    """Numbers and scales are copied as they are."""
    path = write_tiny_model(tmp_path / "model", "Qwen3")
    found, steps = run(path, kv_cache_dtype="fp8")
    assert any(step.key_copies for step in steps)
    expected, steps = run(path, kv_cache_dtype="fp8", enable_prefix_caching=False)
    assert not any(step.key_copies for step in steps)
    check(found, expected)


@pytest.mark.parametrize("circumstance", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_several_ranks_copy_their_own_keys(circumstance: str, tmp_path: Path) -> None:
    path = write_tiny_model(tmp_path / "model", "Qwen3")
    done, _ = generate(path, requests(), max_num_batched_tokens=100, block_size=16, **{circumstance: 2})
    check(logprobs_of(done), expected_logprobs(path))


def answers(path: Path, device: str = "cpu", **settings: Any) -> tuple[list[list[int]], list[StepInput]]:
    """Answer prompts that begin with 28 tokens in common, three at a time, greedily; return the answers and the steps
    that copied keys."""
    rng = random.Random(6)
    lead = [rng.randrange(3, 97) for _ in range(28)]
    prompts = [lead + [rng.randrange(3, 97) for _ in range(rng.randint(1, 30))] for _ in range(12)]
    values = {"max_model_len": 128, "max_num_seqs": 3, "max_num_batched_tokens": 100, "block_size": 16, **settings}
    runner = make_runner(path, device, kv_cache_memory=1 << 22, **values)
    steps: list[StepInput] = []
    launch = runner.launch

    def noted(step: StepInput) -> Any:
        steps.extend([step] if step.key_copies else [])
        return launch(step)

    runner.launch = noted  # type: ignore[method-assign]
    requests = [make_request(number, prompt, 3 + number % 4) for number, prompt in enumerate(prompts)]
    monkey = pytest.MonkeyPatch()
    monkey.setattr(key_copies, "_LEAST_TOKENS", 8)
    try:
        tokens = run_to_outputs(runner, requests)
    finally:
        monkey.undo()
    return [unpack(tokens[number].token_ids).tolist() for number in range(len(prompts))], steps


@pytest.mark.parametrize("name", ["qwen 3", "gemma 2"])
def test_answers_behind_a_common_beginning_do_not_change(name: str, tmp_path: Path) -> None:
    """Its last tokens, which fill no block, are copied before the steps in which requests enter."""
    family, settings = {"qwen 3": ("Qwen3", {}), **SHAPES}[name]
    path = write_tiny_model(tmp_path / "model", family, **settings)
    found, steps = answers(path)
    assert len(steps) > 3
    assert not any(step.copies_new_keys for step in steps)
    expected, steps = answers(path, enable_prefix_caching=False)
    assert not steps
    assert found == expected


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["qwen 3", "gemma 2"])
def test_answers_on_a_gpu_do_not_change(name: str, tmp_path: Path) -> None:
    """In steps that run as graphs."""
    family, settings = {"qwen 3": ("Qwen3", {}), **SHAPES}[name]
    path = write_tiny_model(tmp_path / "model", family, **settings)
    found, steps = answers(path, "cuda", dtype="float32")
    assert len(steps) > 3
    assert found == answers(path, "cuda", dtype="float32", enable_prefix_caching=False)[0]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", ["qwen 3", "gemma 2"])
def test_scores_on_a_gpu(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    """They are those that are computed without the prefix cache."""
    family, settings = {"qwen 3": ("Qwen3", {}), **SHAPES}[name]
    path = write_tiny_model(tmp_path / "model", family, **settings)
    common: dict[str, Any] = {"dtype": "float32", "kv_cache_dtype": kv_cache_dtype, "enforce_eager": True}
    if kv_cache_dtype == "fp8":
        common["dtype"] = "bfloat16"
    found, steps = run(path, "cuda", **common)
    assert any(step.key_copies for step in steps)
    expected, _ = run(path, "cuda", enable_prefix_caching=False, **common)
    # The last bit of a number in bfloat16 moves the scale of its head, and so the codes of all its numbers.
    check(found, expected, atol=1e-3 if kv_cache_dtype == "auto" else 0.2)

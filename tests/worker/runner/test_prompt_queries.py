"""What is read of prompts is what transformers computes: log-probabilities of their tokens, and hidden states.

The engine's circumstances (chunks, prefix hits, samples, several ranks and stages) do not change it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from generation import generate, prompts

from checkpoints import reference_model, write_tiny_model, write_tiny_qwen3
from family_shapes import SHAPES
from nvcli.core.messages import PromptQueryResult
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import Pooling, PromptScoring, Request, RequestOutput
from one_rank import make_runner, run_to_outputs
from requests_factory import make_request

NUM_TOP = 3
CLASSES = {0: "a", 1: "b", 2: "c"}
HIDDEN_SIZE = 32


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its embedding is its LM head, so that one engine reads both: engines for embeddings have no other head."""
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "qwen3", tie_word_embeddings=True)


def requests(max_tokens: int = 24) -> list[Request]:
    """For each prompt: all of it scored, its end scored with the token behind it, and three sums of hidden states.

    An answer behind the first has `max_tokens`."""
    made = []
    for number, prompt in enumerate(prompts()):
        reads: list[PromptScoring | Pooling] = [
            PromptScoring(first=1, num_top=NUM_TOP),
            PromptScoring(first=max(1, len(prompt) - 5), next_id=9),
            Pooling(position="all"),
            Pooling(position="last"),
            Pooling(position="first"),
        ]
        for kind, read in enumerate(reads):
            sampling = SamplingParams(temperature=0, repetition_penalty=1.2 if number % 2 else 1.0)
            length = max_tokens if kind == 0 else 1
            made.append(make_request(100 * number + 10 * kind, prompt, length, read=read, sampling=sampling, n=2))
    return made


@pytest.fixture(scope="module")
def expected(checkpoint: Path) -> list[tuple[Any, Any]]:
    """For each prompt, with token 9 behind it: the log-probabilities of all tokens at all positions, and the hidden
    states."""
    model = reference_model(checkpoint)
    with torch.inference_mode():
        outputs = [model(torch.tensor([[*prompt, 9]]), output_hidden_states=True) for prompt in prompts()]
    return [(o.logits[0].log_softmax(-1).numpy(), o.hidden_states[-1][0].numpy()) for o in outputs]


def check(done: dict[int, RequestOutput], expected: list[tuple[Any, Any]], atol: float = 1e-4) -> None:
    for number, (prompt, (logprobs, hidden)) in enumerate(zip(prompts(), expected, strict=True)):
        targets = np.array([*prompt[1:], 9])
        at_targets = logprobs[np.arange(len(prompt)), targets]
        outputs = [done[100 * number + 10 * kind] for kind in range(5)]
        scored = joined(outputs[0].query_results)
        np.testing.assert_allclose(scored["logprobs"], at_targets[:-1], atol=atol)
        best = np.argsort(-logprobs[:-2], axis=1)[:, :NUM_TOP].reshape(-1)
        assert scored["top_ids"].tolist() == best.tolist()
        assert scored["best_ids"].tolist() == best[::NUM_TOP].tolist()
        at_best = logprobs[np.arange(len(prompt) - 1).repeat(NUM_TOP), best]
        np.testing.assert_allclose(scored["top_logprobs"], at_best, atol=atol)
        first = max(1, len(prompt) - 5)
        np.testing.assert_allclose(joined(outputs[1].query_results)["logprobs"], at_targets[first - 1 :], atol=atol)
        sums = [sum(np.frombuffer(r.hidden_sum, np.float32) for r in output.query_results) for output in outputs[2:]]
        for found, states in zip(sums, (hidden[:-1], hidden[-2:-1], hidden[:1]), strict=True):
            np.testing.assert_allclose(found, states.sum(axis=0), atol=atol * len(states))
    assert not any(output.query_results for number, output in done.items() if number % 10)  # the first sample has them


def joined(query_results: list[PromptQueryResult]) -> dict[str, Any]:
    types = {"logprobs": np.float32, "best_ids": np.int32, "top_ids": np.int32, "top_logprobs": np.float32}
    return {
        name: np.frombuffer(b"".join(getattr(r, name) for r in query_results), dtype) for name, dtype in types.items()
    }


@pytest.mark.parametrize("tokens", [4096, 9])
def test_readings_are_those_of_transformers(checkpoint: Path, expected: list[tuple[Any, Any]], tokens: int) -> None:
    runner = make_runner(
        checkpoint,
        "cpu",
        max_model_len=400,
        max_num_seqs=16,
        max_num_batched_tokens=tokens,
        block_size=4,
        embedding_size=HIDDEN_SIZE,
    )
    done = run_to_outputs(runner, requests())
    check(done, expected)
    cached = sum(output.num_cached_tokens for output in done.values())
    assert cached > 1000  # what need not be read comes from the prefix cache


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [False, True])
def test_readings_on_a_gpu(checkpoint: Path, expected: list[tuple[Any, Any]], eager: bool) -> None:
    """Steps that read run eagerly, between steps that run as graphs. The scores go through the Triton kernel."""
    runner = make_runner(
        checkpoint,
        "cuda",
        dtype="float32",
        max_model_len=400,
        max_num_seqs=16,
        max_num_batched_tokens=128,
        block_size=16,
        enforce_eager=eager,
        embedding_size=HIDDEN_SIZE,
    )
    check(run_to_outputs(runner, requests()), expected, atol=1e-3)


CIRCUMSTANCES: dict[str, dict[str, Any]] = {
    "ranks": {"tensor_parallel_size": 2},
    "attention by rows": {"tensor_parallel_size": 2, "enable_attention_dp": True},
    "stages": {"pipeline_parallel_size": 2},
}


@pytest.mark.parametrize("circumstance", CIRCUMSTANCES)
def test_several_ranks_read_the_same(checkpoint: Path, expected: list[tuple[Any, Any]], circumstance: str) -> None:
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 48, "embedding_size": HIDDEN_SIZE}
    batch = [sample for request in requests(6) for sample in request.samples()]
    done, _ = generate(checkpoint, batch, **settings, **CIRCUMSTANCES[circumstance])
    check(done, expected)


@pytest.mark.parametrize("name", ["gemma 3 with vision", "minicpm 3"])
def test_hidden_states_are_not_scaled_for_an_lm_head(name: str, tmp_path: Path) -> None:
    """Those of files that hold more than text, and of a family that scales them before its LM head."""
    family, shape = SHAPES[name]
    path, prompt = write_tiny_model(tmp_path / "model", family, **shape), prompts()[8]
    runner = make_runner(path, "cpu", max_model_len=400, block_size=4, embedding_size=HIDDEN_SIZE)
    done = run_to_outputs(runner, [make_request(0, prompt, 1, read=Pooling(position="last"))])
    with torch.inference_mode():
        states = reference_model(path)(torch.tensor([prompt]), output_hidden_states=True).hidden_states
    found = np.frombuffer(done[0].query_results[0].hidden_sum, np.float32)
    np.testing.assert_allclose(found, states[-1][0, -1], atol=1e-4)


@pytest.mark.parametrize("name", ["llama, dynamic rope", "gemma 3 with vision", "gpt 2", "minicpm 3", "mixtral"])
def test_a_classifier_gives_the_logits_of_transformers(name: str, tmp_path: Path) -> None:
    """Of families whose files name, turn, scale and cut the decoder in their own ways; in chunks, behind prefix hits,
    and by ranks and stages."""
    family, shape = SHAPES[name]
    path = write_tiny_model(tmp_path / "model", family, id2label=CLASSES, **shape)
    settings = {"max_num_seqs": 8, "max_num_batched_tokens": 9, "embedding_size": len(CLASSES)}
    batch = [make_request(number, prompt, 1, read=Pooling(position="last")) for number, prompt in enumerate(prompts())]
    runner = make_runner(path, "cpu", max_model_len=400, block_size=4, **settings)
    runs = [run_to_outputs(runner, batch)]
    assert sum(output.num_cached_tokens for output in runs[0].values()) > 100
    if name == "mixtral":
        runs += [generate(path, batch, **settings, **CIRCUMSTANCES[each])[0] for each in ("ranks", "stages")]
    model = reference_model(path)
    for number, prompt in enumerate(prompts()):
        with torch.inference_mode():
            expected = model(torch.tensor([prompt])).logits[0]
        for done in runs:
            (found,) = done[number].query_results
            np.testing.assert_allclose(np.frombuffer(found.hidden_sum, np.float32), expected, atol=1e-4)

"""With `batch_invariant` an answer's tokens and log-probabilities have the same bits, however it was computed: alone,
among others, in another order, in chunks, from the prefix cache, after preemptions, and by whole engines."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from generation import running_engine

from checkpoints import write_tiny_model, write_tiny_qwen3
from family_shapes import SHAPES
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import PromptScoring, Request, RequestOutput
from nvcli.worker.runner.model_runner import ModelRunner
from one_rank import make_runner, make_scheduler, run_to_outputs
from requests_factory import answers_of, make_request

MAX_TOKENS = 24
NUM_BLOCKS = 25
"""Of a cache that is too small for all requests at once."""


@dataclass
class Answers:
    """What requests were answered, bit for bit, by request id."""

    tokens: dict[int, bytes] = field(default_factory=dict)
    logprobs: dict[int, list[tuple[float, list[int], list[float]]]] = field(default_factory=dict)
    prompts: dict[int, list[tuple[bytes, ...]]] = field(default_factory=dict)
    """Log-probabilities of the tokens of prompts, one entry for each."""

    @staticmethod
    def of(outputs: dict[int, RequestOutput]) -> Answers:
        answers = Answers()
        for number, output in outputs.items():
            answers.tokens[number] = output.token_ids
            answers.logprobs[number] = [(one.logprob, one.top_ids, one.top_logprobs) for one in output.logprobs]
            parts = [(result.logprobs, result.top_ids, result.top_logprobs) for result in output.query_results]
            answers.prompts[number] = [tuple(b"".join(column) for column in zip(*parts, strict=True))]
        return answers


def prompts() -> list[list[int]]:
    """Lengths from 1 to 120 tokens; some begin alike."""
    rng = random.Random(3)
    common = [rng.randrange(2, 97) for _ in range(40)]
    lone = [[rng.randrange(2, 97) for _ in range(length)] for length in (1, 2, 7, 33, 64, 120)]
    return [*lone, *(common + [rng.randrange(2, 97) for _ in range(n)] for n in (1, 5, 30)), common]


def requests(max_tokens: int = MAX_TOKENS) -> list[Request]:
    """Greedy and sampled ones, some of whose prompts are scored."""
    return [
        make_request(
            number,
            prompt,
            max_tokens,
            sampling=SamplingParams(temperature=0.0 if number % 2 else 0.9, logprobs=4),
            row=number,
            read=PromptScoring(first=1, num_top=number % 3) if len(prompt) > 1 and number % 3 else None,
        )
        for number, prompt in enumerate(prompts())
    ]


def make(path: Path, **overrides: object) -> ModelRunner:
    values: dict[str, object] = {
        "block_size": 8,
        "max_num_seqs": 16,
        "batch_invariant": True,
        "kv_cache_memory": 1 << 22,
    }
    return make_runner(path, "cpu", **{**values, **overrides})


def one_by_one(runner: ModelRunner, max_tokens: int = MAX_TOKENS) -> Answers:
    """Each request in a scheduler of its own, so that nothing is cached."""
    answers: dict[int, RequestOutput] = {}
    for request in requests(max_tokens):
        answers.update(run_to_outputs(runner, [request]))
    return Answers.of(answers)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("models") / "qwen3")


def test_no_bit_depends_on_how_a_request_was_computed(checkpoint: Path) -> None:
    runner = make(checkpoint)
    alone = one_by_one(runner)
    shuffled = requests()
    random.Random(1).shuffle(shuffled)
    scheduler = make_scheduler(runner)
    assert Answers.of(run_to_outputs(runner, shuffled, scheduler)) == alone
    # Prompts that were computed before are found in the prefix cache, as far as none of their tokens is scored.
    again = run_to_outputs(runner, requests(), scheduler)
    assert sum(output.num_cached_tokens for output in again.values()) > 100
    assert Answers.of(again) == alone
    chunked = make(checkpoint, max_num_batched_tokens=16, max_num_seqs=8)
    scheduler = make_scheduler(chunked, NUM_BLOCKS)
    assert Answers.of(run_to_outputs(chunked, requests(), scheduler)) == alone
    assert scheduler.stats.num_preemptions > 0


def test_without_it_bits_depend_on_the_batch(checkpoint: Path) -> None:
    """Else this file would test nothing."""
    runner = make(checkpoint, batch_invariant=False)
    assert Answers.of(run_to_outputs(runner, requests(10))) != one_by_one(runner, 10)


@pytest.mark.parametrize("name", ["qwen2 moe", "longcat-flash"])
def test_experts_are_computed_alike_for_any_number_of_tokens(name: str, tmp_path: Path) -> None:
    """The experts of LongCat-Flash come with latent attention, and some return their input."""
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 16,
        "shared_expert_intermediate_size": 24,
    }
    family, shape = SHAPES.get(name, ("Qwen2Moe", experts))
    runner = make(write_tiny_model(tmp_path / "model", family, **shape))
    assert Answers.of(run_to_outputs(runner, requests(10))) == one_by_one(runner, 10)


def test_ranks_and_stages_add_up_in_one_order(tmp_path: Path) -> None:
    """A whole engine of two stages with two ranks each: one request at a time, and some at a time in chunks."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    path = write_tiny_model(tmp_path / "model", "Qwen3Moe", num_hidden_layers=2, **experts)
    layout = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2, "batch_invariant": True}
    limits = {"max_num_seqs": 8, "max_num_batched_tokens": 24, "num_kv_tokens": 140, "enable_prefix_caching": False}
    with running_engine(path, **limits, **layout) as client:
        alone = [answers_of(client, [request]) for request in requests(12)]
        assert client.stats.num_preemptions == 0
        together = answers_of(client, requests(12))
        assert client.stats.num_preemptions > 0
    assert Answers.of(together) == Answers.of({number: output for one in alone for number, output in one.items()})

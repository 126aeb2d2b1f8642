"""A model with NaN in its weights: rows that meet it fail, rows that do not keep their answers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from checkpoints import set_weights, write_tiny_qwen3
from nvcli.core.messages import NewSlot, SlotSampling, StepInput, pack
from nvcli.core.sampling_params import SamplingParams
from nvcli.engine.request import Request
from nvcli.errors import ModelError
from nvcli.worker.runner.model_runner import ModelRunner
from nvcli.worker.runner.step_runner import partly_filled_blocks
from one_rank import make_runner, run_to_outputs
from requests_factory import make_request

POISON = 96
"""The token whose embedding is NaN."""
SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.8, "top_k": 20, "top_p": 0.9},
    {"temperature": 0.8, "top_p": 0.9, "min_p": 0.02},
    {"temperature": 0.8, "repetition_penalty": 1.2, "logprobs": 2},
    {"temperature": 0.0, "min_tokens": 4, "logprobs": 0},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_tiny_qwen3(tmp_path_factory.mktemp("models") / "poisoned")
    set_weights(path, "model.embed_tokens.weight", float("nan"), POISON)
    return path


def small_runner(path: Path, **options: Any) -> ModelRunner:
    """One whose few blocks are given from request to request."""
    values: dict[str, Any] = {"block_size": 16, "max_num_seqs": 4, "max_model_len": 128, "max_num_batched_tokens": 64}
    return make_runner(path, "cpu", **{**values, "kv_cache_memory": 32 * 16 * 1024, **options})


def requests(*, poisoned: bool) -> list[Request]:
    """Of every third the last token of the prompt may be the poison."""
    rng = random.Random(1)
    found = []
    for i in range(60):
        prompt = [rng.randrange(2, 90) for _ in range(rng.randrange(1, 40))]
        if poisoned and i % 3 == 1:
            prompt[-1] = POISON
        params = SamplingParams(**SAMPLINGS[i % len(SAMPLINGS)], logit_bias={POISON: -100.0} if i % 2 else {})
        found.append(make_request(i, prompt, 12, sampling=params))
    return found


def test_rows_beside_broken_ones_keep_their_answers(checkpoint: Path) -> None:
    """However they are sampled, and in blocks that broken rows have left behind, whose keys are NaN."""
    runner = small_runner(checkpoint)
    assert runner.ready.num_blocks == 32
    sound, mixed = (run_to_outputs(runner, requests(poisoned=poisoned)) for poisoned in (False, True))
    for i, output in mixed.items():
        if i % 3 == 1:
            assert (output.error_type, output.token_ids) == ("non_finite_logits", b"")
        else:
            assert (output.finish_reason, output.token_ids) == (sound[i].finish_reason, sound[i].token_ids)
    assert sum(output.finish_reason == "length" for output in mixed.values()) >= 35, "the others sampled the poison"


def test_a_model_of_nothing_but_nan_ends_the_run(checkpoint: Path) -> None:
    with pytest.raises(ModelError, match="weights or the dtype are at fault"):
        run_to_outputs(small_runner(checkpoint), [make_request(i, [5, i, POISON], 4) for i in range(30)])


def test_blocks_that_are_read_before_they_are_full() -> None:
    """Slot 3 gets two runs of blocks in one step, slot 5 one in each of two KV groups. Slot 6 enters with keys in its
    first blocks, which are not those of a prefix: they were there before, or some are copied into the last one."""
    step = StepInput(
        step_id=0,
        block_groups=pack([0, 0, 0, 0, 0, 1]),
        block_slots=pack([3, 3, 3, 3, 5, 5]),
        block_columns=pack([0, 1, 4, 5, 6, 7]),
        block_ids=pack([10, 11, 12, 13, 14, 15]),
    )
    assert partly_filled_blocks(step, 4).tolist() == [11, 13, 14, 15]
    enters = StepInput(
        step_id=0,
        new_slots=[NewSlot(slot=6, num_cached_tokens=6, sampling=SlotSampling(seed=0, prompt_len=7))],
        block_groups=pack([0, 0]),
        block_slots=pack([6, 6]),
        block_columns=pack([0, 1]),
        block_ids=pack([20, 21]),
    )
    assert partly_filled_blocks(enters, 4).tolist() == []
    copies = msgspec.structs.replace(enters, key_copies=pack([0, 9, 21, 0, 2]))
    assert partly_filled_blocks(copies, 4).tolist() == [21]

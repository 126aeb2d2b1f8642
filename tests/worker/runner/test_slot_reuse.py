"""A slot that changes hands takes nothing of its last request along."""

from __future__ import annotations

from pathlib import Path

from generation import generate

from checkpoints import write_tiny_qwen3
from nvcli.core.messages import unpack
from nvcli.core.sampling_params import SamplingParams
from requests_factory import make_request


def test_parameters_of_a_chunked_prompt_hold_in_a_slot_used_before(tmp_path: Path) -> None:
    """The step that fills the slot samples nothing; the one that samples fills no slot."""
    biased = SamplingParams(temperature=0, logit_bias={7: 100.0}, logprobs=0)
    requests = [make_request(0, [5], 3), make_request(1, range(2, 22), 3, sampling=biased)]
    done, _ = generate(write_tiny_qwen3(tmp_path / "model"), requests, max_num_seqs=1, max_num_batched_tokens=4)
    assert unpack(done[1].token_ids).tolist() == [7, 7, 7]
    assert len(done[1].logprobs) == 3
    assert done[0].logprobs == []

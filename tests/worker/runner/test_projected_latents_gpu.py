"""A rank on a Hopper GPU that projects latents for its chunks answers as it does where it absorbs all queries."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

from checkpoints import write_tiny_model
from family_shapes import SHAPES
from nvcli.attention.projected_latents import ProjectedLatents
from nvcli.core.messages import unpack
from nvcli.core.sampling_params import SamplingParams
from one_rank import make_runner, run_to_outputs
from requests_factory import make_request

PROMPTS = [random.Random(length).choices(range(2, 97), k=length) for length in (1, 70, 300, 450, 130, 900)]
SIZES: dict[str, dict[str, Any]] = {
    "deepseek v2, queries without latents": {"qk_nope_head_dim": 128, "v_head_dim": 128},
    "glm 4.7 flash": {
        "qk_nope_head_dim": 192,
        "head_dim": 64,  # rotated numbers, in that family's configuration
        "v_head_dim": 256,
        "mlp_layer_types": ["dense"] * 3,
    },
    "deepseek v3.2": {"qk_nope_head_dim": 128, "v_head_dim": 128, "index_topk": 400, "index_head_dim": 128},
    "glm 5, shared choices": {
        "qk_nope_head_dim": 192,
        "head_dim": 64,
        "v_head_dim": 256,
        "index_topk": 400,
        "index_head_dim": 128,
    },
}


def answers(path: Path, *, projects: bool, **settings: Any) -> tuple[list[list[int]], list[list[float]]]:
    """Return the tokens of all answers, and their log-probabilities."""
    runner = make_runner(path, max_model_len=1024, max_num_batched_tokens=384, **settings)
    used = []

    def choose(backend: ProjectedLatents, num_tokens: np.ndarray, seq_lens: np.ndarray) -> bool:
        used.append(True)
        return projects and seq_lens.max() <= (backend._spec.top_k or 1024)

    sampling = SamplingParams(temperature=0, logprobs=0)
    requests = [make_request(i, prompt, 8, sampling=sampling) for i, prompt in enumerate(PROMPTS)]
    with patch.object(ProjectedLatents, "pays", choose):
        outputs = run_to_outputs(runner, requests)
    assert used, "the rank was asked for no projected chunks"
    found = [outputs[i] for i in range(len(PROMPTS))]
    return [unpack(row.token_ids).tolist() for row in found], [[one.logprob for one in row.logprobs] for row in found]


@pytest.mark.gpu
@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
@pytest.mark.parametrize("name", SIZES)
def test_projected_chunks(name: str, kv_cache_dtype: str, tmp_path: Path) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    if "index_topk" in SIZES[name] and kv_cache_dtype == "fp8":
        pytest.skip("chosen keys are kept in the model's type")
    family, overrides = SHAPES[name]
    sizes = {**SIZES[name], "kv_lora_rank": 512, "qk_rope_head_dim": 64, "max_position_embeddings": 1024}
    path = write_tiny_model(tmp_path / "model", family, **{**overrides, **sizes, "first_k_dense_replace": 3})
    settings = {"kv_cache_dtype": kv_cache_dtype}
    expected, expected_logprobs = answers(path, projects=False, enforce_eager=True, **settings)
    for enforce_eager in (True, False):
        found, logprobs = answers(path, projects=True, enforce_eager=enforce_eager, **settings)
        for own, other, own_values, values in zip(found, expected, logprobs, expected_logprobs, strict=True):
            same = next((i for i, pair in enumerate(zip(own, other, strict=True)) if pair[0] != pair[1]), len(own))
            # Up to two tokens that are as likely. Where numbers differ in their last bits, FP8 keys are others.
            most = 0.1 if kv_cache_dtype == "fp8" else 0.03
            assert own_values[: same + 1] == pytest.approx(values[: same + 1], abs=most)

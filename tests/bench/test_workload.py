"""What a benchmark asks: the published workload by default, and what each option changes of it."""

from __future__ import annotations

import pytest

from nvcli.bench.shapes import SHAPES, write_shape
from nvcli.bench.workload import Workload
from nvcli.messages import unpack
from nvcli.models.config import load_model_config


def test_default_workload_is_nano_vllms() -> None:
    requests = Workload().requests(151936)
    assert len(requests) == 256
    assert sum(len(unpack(request.prompt_ids)) for request in requests) == 142_827
    assert sum(request.max_tokens for request in requests) == 133_966


def test_prompts_stay_in_a_small_vocabulary() -> None:
    ids = {token for prompt, _ in Workload(num_requests=20).rows(640) for token in prompt}
    assert (min(ids), max(ids)) == (2, 639)


def test_a_shared_prefix_comes_before_the_same_prompts() -> None:
    plain = Workload(num_requests=3, input_len=(4, 9), output_len=(1, 5))
    shared = Workload(num_requests=3, input_len=(4, 9), output_len=(1, 5), shared_prefix=7)
    rows = shared.rows(640)
    assert len({tuple(prompt[:7]) for prompt, _ in rows}) == 1
    assert [(prompt[7:], length) for prompt, length in rows] == plain.rows(640)
    assert shared.max_model_len == 7 + 9 + 5


def test_the_seed_changes_lengths_and_tokens() -> None:
    assert Workload(num_requests=3).rows(640) != Workload(num_requests=3, seed=1).rows(640)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_models_that_can_be_built(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = load_model_config(write_shape(name, tmp_path_factory.mktemp(name)))
    config.check_tensor_parallel(2)
    assert config.dtype == "bfloat16"

"""What a benchmark asks: the published workload by default, and what each option changes of it."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

import pytest

from nvcli.core.messages import unpack
from nvcli.models.config import load_model_config
from nvcli.tools.bench.shapes import SHAPES, write_shape
from nvcli.tools.bench.workload import PrefixLevel, Workload


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
    shared = Workload(num_requests=3, input_len=(4, 9), output_len=(1, 5), shared_prefix=(PrefixLevel(num_tokens=7),))
    rows = shared.rows(640)
    assert len({tuple(prompt[:7]) for prompt, _ in rows}) == 1
    assert [(prompt[7:], length) for prompt, length in rows] == plain.rows(640)
    assert shared.max_model_len == 7 + 9 + 5


def test_groups_and_levels_of_prefixes_come_in_random_order() -> None:
    levels = (PrefixLevel(num_tokens=3, num_groups=2), PrefixLevel(num_tokens=4, num_groups=3))
    workload = Workload(num_requests=20, input_len=(2, 2), output_len=(1, 1), shared_prefix=levels)
    prompts = [tuple(prompt) for prompt, _ in workload.rows(151936)]
    assert {len(prompt) for prompt in prompts} == {3 + 4 + 2}
    assert len({prompt[:3] for prompt in prompts}) == 2
    groups = Counter(prompt[:7] for prompt in prompts)
    assert sorted(groups.values()) == [3, 3, 3, 3, 4, 4]
    runs = [group for group, _ in groupby(prompt[:7] for prompt in prompts)]
    assert len(runs) > 12, "the groups are mixed"


def test_samples_are_asked_for_with_each_prompt() -> None:
    requests = Workload(num_requests=2, input_len=(4, 4), output_len=(5, 5), samples=3).requests(640)
    assert [(request.request_id, request.n, request.sampling.n) for request in requests] == [(0, 3, 3), (3, 3, 3)]


def test_the_seed_changes_lengths_and_tokens() -> None:
    assert Workload(num_requests=3).rows(640) != Workload(num_requests=3, seed=1).rows(640)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_models_that_can_be_built(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    config = load_model_config(write_shape(name, tmp_path_factory.mktemp(name)))
    config.check_tensor_parallel(2)
    assert config.dtype == ("float16" if name == "bloomz-7b1" else "bfloat16")

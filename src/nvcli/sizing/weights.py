"""The bytes of a rank's weights, added up from the model's tensors before anything is loaded.

tests/sizing/test_weights.py compares them with models as built.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import get_args

from nvcli.core.engine_config import EngineConfig
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import model_tensors
from nvcli.models.tensor_spec import Part, StoredDtype
from nvcli.worker.distributed.stage import WHOLE, Stage


@lru_cache(maxsize=512)  # a layout is chosen from the same few sizes, asked for many times
def weight_bytes(
    model: ModelConfig, dtype: StoredDtype, *, tensor_parallel_size: int = 1, stage: Stage = WHOLE
) -> Mapping[str, int]:
    """Return the bytes of one rank's weights, by kind. All ranks of a stage have equally many."""
    parts: dict[str, int] = dict.fromkeys(get_args(Part), 0)
    for tensor in model_tensors(model, dtype, stage):
        parts[tensor.part] += tensor.kept_bytes(tensor_parallel_size)
    return MappingProxyType({part: size for part, size in parts.items() if size})


def rank_weights(config: EngineConfig, model: ModelConfig, stage: Stage | None = None) -> Mapping[str, int]:
    """Return the bytes of the weights of one rank of a stage, by kind; `stage` None: of the stage with the most."""
    stage = stage or largest_stage(model, config.pipeline_parallel_size)
    return weight_bytes(model, config.dtype, tensor_parallel_size=config.tensor_parallel_size, stage=stage)


def largest_stage(model: ModelConfig, num_stages: int) -> Stage:
    """Return the pipeline stage with the most weights."""
    stages = [Stage(index, num_stages) for index in range(num_stages)]
    return max(stages, key=lambda stage: sum(weight_bytes(model, model.dtype, stage=stage).values()))

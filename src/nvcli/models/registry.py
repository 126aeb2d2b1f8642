"""Architecture names of config.json, and the classes that build them. Nothing is imported until a model is built."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from nvcli.distributed.stage import WHOLE, Stage

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from nvcli.distributed.tensor_parallel import TensorParallelGroup
    from nvcli.models.causal_lm import CausalLM
    from nvcli.models.config import ModelConfig
    from nvcli.models.parallel import BuildContext, LinearMethod

ARCHITECTURES = {"Qwen3ForCausalLM": "nvcli.models.qwen3:Qwen3ForCausalLM"}


def build_model(
    config: ModelConfig,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    *,
    max_positions: int | None = None,
    linear_method: LinearMethod | None = None,
    stage: Stage = WHOLE,
) -> CausalLM:
    """This rank's part of the model, on the meta device; `loader.load_weights` gives it memory and weights.

    `max_positions`: longest sequence that will run; None: what the config says. `stage`: of a pipeline. Raises
    ConfigError where the shapes do not divide by the group's size, or the layers are too few.
    """
    import torch

    from nvcli.models.parallel import BuildContext, PlainLinearMethod

    config.check_tensor_parallel(group.size)
    config.check_pipeline_parallel(stage.count)
    module_name, _, class_name = ARCHITECTURES[config.architecture].partition(":")
    model_class: Callable[[ModelConfig, BuildContext], CausalLM] = getattr(import_module(module_name), class_name)
    build = BuildContext(
        group=group,
        dtype=dtype,
        linear_method=linear_method or PlainLinearMethod(),
        max_positions=max_positions or config.max_position_embeddings,
        stage=stage,
    )
    with torch.device("meta"):
        return model_class(config, build)

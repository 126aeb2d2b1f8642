"""Building a model's modules from its config. Nothing heavy is imported until a model is built."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, get_args

from nvcli.models.geometry import model_tensors
from nvcli.models.tensor_spec import StoredDtype
from nvcli.worker.distributed.stage import WHOLE, Stage

if TYPE_CHECKING:
    import torch

    from nvcli.core.config_types import FP8Accumulation
    from nvcli.models.causal_lm import CausalLM
    from nvcli.models.config import ModelConfig
    from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


def build_model(
    config: ModelConfig,
    group: TensorParallelGroup,
    dtype: torch.dtype,
    *,
    max_positions: int | None = None,
    stage: Stage = WHOLE,
    has_fp8_units: bool = True,
    fp8_accumulation: FP8Accumulation = "exact",
    batch_invariant: bool = False,
    has_adapters: bool = False,
) -> CausalLM:
    """Build this rank's part of the model on the meta device; `RankWeights` gives it memory and weights.

    `max_positions` is the length of the longest sequence that will run (None: what the config says), `stage` is the
    pipeline stage, `has_fp8_units` says whether FP8 weights are multiplied with activations in FP8 or with plain ones,
    and `fp8_accumulation` how such products are accumulated (`RunConfig`). `batch_invariant`: a token's results are
    bitwise identical in every batch (see `ModelConfig.check_batch_invariant`). `has_adapters`: rows may have LoRA
    adapters, which the layers are given later (`adapter_bank.py`). Raises ConfigError if the shapes are not divisible
    by the group's size, or there are too few layers.
    """
    import torch

    from nvcli.models.causal_lm import CausalLM
    from nvcli.models.linear_methods import linear_method
    from nvcli.models.parallel import BuildContext

    config.check_tensor_parallel(group.size)
    config.check_pipeline_parallel(stage.count)
    plain_dtype = stored_dtype(dtype)
    build = BuildContext(
        group=group,
        tensors={tensor.name: tensor for tensor in model_tensors(config, plain_dtype, stage)},
        linear_method=partial(
            linear_method,
            rounds_inputs=config.rounds_inputs,
            batch_invariant=batch_invariant,
            has_fp8_units=has_fp8_units,
            fp8_accumulation=fp8_accumulation,
        ),
        max_positions=max_positions or config.max_position_embeddings,
        hidden_size=config.hidden_size,
        stage=stage,
        dtype=plain_dtype,
        has_fp8_units=has_fp8_units,
        batch_invariant=batch_invariant,
        has_adapters=has_adapters,
        attention_dp=config.attention_dp,
    )
    with torch.device("meta"):
        return CausalLM(config, build)


def stored_dtype(dtype: torch.dtype) -> StoredDtype:
    """Return the name of a torch type, as spelled in the geometry."""
    return next(name for name in get_args(StoredDtype) if str(dtype) == f"torch.{name}")

"""The check of an adapter that only some rows use, while other rows use other adapters or none. Torch-free."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from nvcli.core.lora_config import MAX_ROW_RANK, AdapterSizes
from nvcli.core.validation import show
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import model_tensors
from nvcli.models.tensor_info import BiasChange, LowRankChange, RowsChange, WeightChange
from nvcli.models.tensor_spec import Sharding, TensorSpec
from nvcli.worker.distributed.stage import WHOLE, Stage

_NOT_IN_BATCH = "is not supported in a batch with other rows"
_WAY_OUT = "with lora.mode: auto or merged, or alone as --lora PATH, it is merged into the weights"


def check_row_adapter(adapter: Adapter, model: ModelConfig) -> None:
    """Raise LoadError, naming the key or the tensor, if an adapter changes more than products of linear layers, which
    is all that is supported for single rows."""
    linear = {tensor.name for tensor in linear_tensors(model)}
    file = adapter.config.file
    if adapter.replaced:
        key = "bias" if adapter.config.saves_biases else "modules_to_save"
        raise file.error(
            key,
            f"{next(iter(adapter.replaced))} is replaced, which {_NOT_IN_BATCH}; {_WAY_OUT}",
        )
    for name, changes in adapter.changes.items():
        for change in changes:
            if (problem := _problem(change)) is not None:
                key, what = problem
                raise file.error(key, f"{what} {_NOT_IN_BATCH}; {_WAY_OUT}")
        if name not in linear:
            raise file.error(
                "target_modules",
                f"{show(name)[1:-1]} is changed, but only linear layers of attention or MLP can differ between rows of "
                f"a batch; {_WAY_OUT}",
            )


def linear_tensors(model: ModelConfig, stage: Stage = WHOLE) -> list[TensorSpec]:
    """Return the weights of a stage that may differ by row: those of linear layers in attention, MLPs and shared
    experts."""
    return [tensor for tensor in model_tensors(model, model.dtype, stage) if _is_linear(tensor)]


def sizes_of(adapters: Sequence[Adapter], *, merged_only: Collection[int] = ()) -> AdapterSizes:
    """Return the sizes of adapters, which passed `check_row_adapter` except those with numbers in `merged_only`."""
    batched = (adapter for number, adapter in enumerate(adapters, 1) if number not in merged_only)
    names = {name.split(".")[-2] for adapter in batched for name in adapter.changes}
    return AdapterSizes(ranks=tuple(adapter.max_rank for adapter in adapters), projections=tuple(sorted(names)))


def _is_linear(tensor: TensorSpec) -> bool:
    is_shared = tensor.sharding in (Sharding.ROWS, Sharding.COLUMNS)
    if not tensor.in_linear_layer or tensor.factor != 1.0:  # what an adapter adds to a product would lack the factor
        return False
    return len(tensor.shape) == 2 and is_shared and not tensor.is_of_experts


def _problem(change: WeightChange) -> tuple[str, str] | None:
    """Return the key of a change that a batch with other rows does not support, and what it is; None if it does."""
    if isinstance(change, BiasChange):
        return "lora_bias", "a bias"
    if isinstance(change, RowsChange):
        return "trainable_token_indices", "a token's own row"
    assert isinstance(change, LowRankChange)
    if change.magnitude is not None:
        return "use_dora", "DoRA"
    rank = change.down.shape[0]
    return None if rank <= MAX_ROW_RANK else ("r", f"a rank of {rank:,} (at most {MAX_ROW_RANK})")

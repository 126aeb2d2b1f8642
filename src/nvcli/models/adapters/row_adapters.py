"""The check of an adapter for single rows, while other rows have other adapters or none. Torch-free."""

from __future__ import annotations

from nvcli.core.validation import show
from nvcli.models.adapters.adapter import Adapter
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import model_tensors
from nvcli.models.tensor_info import BiasChange, LowRankChange, RowsChange, WeightChange
from nvcli.models.tensor_spec import Sharding, TensorSpec

MAX_ROW_RANK = 256
"""The largest rank of an adapter of single rows."""
_WAY_OUT = "give it alone as --lora PATH, for all rows: it is then merged into the weights"


def check_row_adapter(adapter: Adapter, model: ModelConfig) -> None:
    """Raise LoadError that names the key or the tensor where an adapter changes more than products of linear layers,
    which is what single rows may have of their own."""
    linear = {tensor.name for tensor in model_tensors(model, model.dtype) if _is_linear(tensor)}
    file = adapter.config.file
    if adapter.replaced:
        key = "bias" if adapter.config.saves_biases else "modules_to_save"
        raise file.error(key, f"{next(iter(adapter.replaced))} is replaced, which single rows cannot have; {_WAY_OUT}")
    for name, changes in adapter.changes.items():
        for change in changes:
            if (problem := _problem(change)) is not None:
                key, what = problem
                raise file.error(key, f"{what} is nothing that single rows can have; {_WAY_OUT}")
        if name not in linear:
            raise file.error(
                "target_modules",
                f"{show(name)[1:-1]} is changed, which is of no linear layer of attention or MLP, and single rows can "
                f"have nothing else; {_WAY_OUT}",
            )


def _is_linear(tensor: TensorSpec) -> bool:
    is_shared = tensor.sharding in (Sharding.ROWS, Sharding.COLUMNS)
    return len(tensor.shape) == 2 and is_shared and not tensor.is_of_experts


def _problem(change: WeightChange) -> tuple[str, str] | None:
    """Return the key of what single rows cannot have, and what it is; None: they can have the change."""
    if isinstance(change, BiasChange):
        return "lora_bias", "a bias"
    if isinstance(change, RowsChange):
        return "trainable_token_indices", "a token's own row"
    assert isinstance(change, LowRankChange)
    if change.magnitude is not None:
        return "use_dora", "DoRA"
    rank = change.down.shape[0]
    return None if rank <= MAX_ROW_RANK else ("r", f"a rank of {rank:,} (the most are {MAX_ROW_RANK})")

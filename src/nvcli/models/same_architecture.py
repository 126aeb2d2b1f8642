"""The check that a checkpoint has the architecture of a loaded model, whose weights it can then replace. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from nvcli.core.validation import show
from nvcli.errors import LoadError
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import model_tensors
from nvcli.models.tensor_spec import StoredDtype, TensorSpec
from nvcli.worker.distributed.stage import Stage

_WAY_OUT = "weights are replaced by those of the same architecture; make a new LLM for this checkpoint"
_COMPARED = (
    *("vocab_size", "hidden_size", "num_layers", "tie_word_embeddings", "has_head", "classifier", "decoder", "vision"),
)
"""The fields of ModelConfig that say what is computed. How files hold the weights may differ."""


def check_same_architecture(
    loaded: ModelConfig,
    other: ModelConfig,
    path: Path,
    *,
    tensors: Mapping[str, TensorSpec],
    dtype: StoredDtype,
    stage: Stage,
) -> None:
    """Raise LoadError unless `other`, read from the folder `path`, computes what the `loaded` model does, and ranks
    would keep its weights in the same way. `tensors`: those of the loaded model's stage, whose plain weights are kept
    in `dtype`."""
    difference = next(
        (found for name in _COMPARED for found in _differences(name, getattr(loaded, name), getattr(other, name))), None
    )
    if difference is not None:
        name, ours, theirs = difference
        raise LoadError(f"{path}: `{name}` is {theirs}, and {ours} in the loaded model; {_WAY_OUT}")
    other = replace(other, stores_wide_routers=loaded.stores_wide_routers)  # the other's are converted
    for tensor in model_tensors(other, dtype, stage):
        found = tensors.get(tensor.name)
        if found is None or list(_differences("", found, tensor)):
            raise LoadError(
                f"{path}: {tensor.name} would be kept in another form than in the loaded model, because the two "
                f"checkpoints are quantised differently; {_WAY_OUT}"
            )


def _differences(name: str, ours: Any, theirs: Any) -> Iterator[tuple[str, str, str]]:
    """Yield where two values differ: the field's path, and both values as text."""
    if ours == theirs:
        return
    if type(ours) is type(theirs) and is_dataclass(ours):
        for field in fields(ours):
            if field.name != "layout":
                path = f"{name}.{field.name}" if name else field.name
                yield from _differences(path, getattr(ours, field.name), getattr(theirs, field.name))
    elif isinstance(ours, tuple) and isinstance(theirs, tuple) and len(ours) == len(theirs):
        for index, (one, other) in enumerate(zip(ours, theirs, strict=True)):
            yield from _differences(f"{name}[{index}]", one, other)
    else:
        yield name, _shown(ours), _shown(theirs)


def _shown(value: Any) -> str:
    """Write a value as text: a tuple as its length, a part of the config as its kind."""
    if isinstance(value, tuple):
        return f"of {len(value):,} entries"
    return type(value).__name__ if is_dataclass(value) else show(value)

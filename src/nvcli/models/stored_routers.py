"""Whether a checkpoint stores the weights of its routers in float32, in which they are then kept. Torch-free.

transformers computes the routers of some families in float32 (`ExpertsConfig.has_wide_router`), but most of their
checkpoints store them in the type of the other weights, in which they take half the memory and time.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nvcli.errors import LoadError
from nvcli.models.checkpoint import read_index, weight_files
from nvcli.models.config import ModelConfig
from nvcli.models.mixers.experts import ExpertsConfig
from nvcli.models.safetensors_header import read_header
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.tensor_spec import EXPERTS


def with_stored_routers(model: ModelConfig, path: Path) -> ModelConfig:
    """Return the model with its routers kept as the checkpoint folder `path` stores them. Files that are missing or
    broken change nothing here: loading them says what is wrong."""
    routers = {
        f"model.layers.{number}.{name}.gate.weight"
        for number, layer in enumerate(model.layers)
        for name, block in layer.named_blocks
        if isinstance(block, ExpertsConfig) and block.has_wide_router
    }
    if routers:
        with suppress(LoadError):
            found = _first_router(model, routers, path)
            return replace(model, stores_wide_routers=found is not None and found.dtype == "F32")
    return model


def _first_router(model: ModelConfig, routers: set[str], path: Path) -> TensorInfo | None:
    """Return one of the routers' weights; None: no file has one. Only the header of its file is read, if there is an
    index. Raises LoadError."""

    def find(names: Iterable[str]) -> str | None:
        some = (name for name in names if f".{EXPERTS}." not in name)  # of which there are thousands
        return next((name for name in some if model.decoder.layout.decoder_name(name) in routers), None)

    index = read_index(path)
    if index:
        name = find(index)
        return None if name is None else read_header(path / index[name]).get(name)
    headers = (read_header(file) for file in weight_files(path))
    return next((header[name] for header in headers if (name := find(header)) is not None), None)

"""Notices what only a checkpoint's files say of its tensors: how they have routers, and whether the LM head is
quantised. Torch-free.

transformers computes the routers of some families in float32 (`ExpertsConfig.has_wide_router`), but most of their
checkpoints store them in the type of the other weights, in which they take half the memory and time. And some leave out
the corrections of the scores (`ExpertsConfig.may_lack_correction`). Quantised checkpoints seldom hold a quantised LM
head, and few formats say in config.json whether they do.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from nvcli.errors import LoadError
from nvcli.models.checkpoint import read_file, read_index, weight_files
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import HEAD
from nvcli.models.layer_config import LayerConfig
from nvcli.models.mixers.experts import CORRECTION, ExpertsConfig
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.tensor_spec import EXPERTS


def with_stored_tensors(model: ModelConfig, path: Path) -> ModelConfig:
    """Return the model with its routers and its LM head as the checkpoint folder `path` stores them. Files that are
    missing or broken change nothing here: loading them says what is wrong."""
    blocks = {
        f"model.layers.{number}.{name}.gate": block
        for number, layer in enumerate(model.layers)
        for name, block in layer.named_blocks
        if isinstance(block, ExpertsConfig)
    }
    routers = {f"{gate}.weight" for gate, block in blocks.items() if block.has_wide_router}
    corrections = {f"{gate}.{CORRECTION}" for gate, block in blocks.items() if block.may_lack_correction}
    with suppress(LoadError):
        if routers:
            found = _first_of(model, routers, path)
            model = replace(model, stores_wide_routers=found is not None and found.dtype == "F32")
        if corrections and _first_of(model, corrections, path) is None:
            kinds = tuple(_without_correction(layer) for layer in model.decoder.layer_kinds)
            model = replace(model, decoder=replace(model.decoder, layer_kinds=kinds))
        if (quantisation := model.quantisation) is not None and quantisation.kept_as == "w4a16":
            codes = {f"{HEAD}.{parts.codes}": parts for parts in quantisation.parts if parts.has_four_bits}
            found = _first_of(model, set(codes), path) if codes and not model.tie_word_embeddings else None
            if found is not None and found.dtype in codes[f"{HEAD}.{found.name.rpartition('.')[2]}"].stored_as:
                model = replace(model, quantisation=replace(quantisation, has_head=True))
    return model


def _without_correction(layer: LayerConfig) -> LayerConfig:
    mlp = layer.mlp
    return replace(layer, mlp=replace(mlp, has_correction=False)) if isinstance(mlp, ExpertsConfig) else layer


def _first_of(model: ModelConfig, wanted: set[str], path: Path) -> TensorInfo | None:
    """Return one of the tensors; None: no file has one. Only the header of its file is read, if there is an index.
    Raises LoadError."""

    def find(names: Iterable[str]) -> str | None:
        some = (name for name in names if f".{EXPERTS}." not in name)  # of which there are thousands
        return next((name for name in some if model.decoder.layout.decoder_name(name) in wanted), None)

    index = read_index(path)
    if index:
        name = find(index)
        return None if name is None else read_file(path / index[name]).get(name)
    headers = (read_file(file) for file in weight_files(path))
    return next((header[name] for header in headers if (name := find(header)) is not None), None)

"""Adapter: what a LoRA adapter changes in a decoder's tensors. Torch-free; reads headers only.

PEFT names tensors after the modules of the model in transformers. Here they are mapped to the decoder's names, even if
only one side fuses projections, and checked against its shapes. The loader attaches the changes to the checkpoint's
tensors (`Adapter.over`), and whatever part of a tensor a rank reads includes its changes (`merge.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from nvcli.core.validation import show
from nvcli.errors import ConfigError, LoadError
from nvcli.models.adapters.adapter_config import MERGE_IT, AdapterConfig, read_adapter_config
from nvcli.models.adapters.adapter_files import AdapterTensors, read_adapter_tensors, tensor_error
from nvcli.models.adapters.changes import AdapterReader, Changes
from nvcli.models.adapters.decoder_names import DecoderNames
from nvcli.models.checkpoint_check import TIED_HEAD, TIED_TO
from nvcli.models.checkpoint_layout import locate_tensors
from nvcli.models.config import ModelConfig
from nvcli.models.geometry import model_tensors
from nvcli.models.tensor_info import LowRankChange, RowsChange, TensorInfo
from nvcli.models.tensor_spec import TensorSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapter:
    """An adapter's changes by the decoder's tensor names, with each expert's tensors listed separately."""

    config: AdapterConfig
    changes: Changes
    replaced: Mapping[str, TensorInfo]
    """Tensors of the adapter that replace the checkpoint's."""
    unties_head: bool
    """Whether an LM head that is tied to the embedding needs a weight of its own."""
    keeps_tie: bool
    """Whether the LM head stays tied to the embedding."""
    left: tuple[str, ...]
    """Names of the adapter's tensors for parts other than the text model."""

    @property
    def note(self) -> str | None:
        """Return the note for the user about tensors that have no effect; None if there are none."""
        if not self.left:
            return None
        return f"the adapter's {len(self.left):,} tensors for other parts of the model ({self.left[0]}, …) are left out"

    @property
    def products(self) -> Iterator[LowRankChange]:
        """The low-rank changes of all tensors."""
        changes = (change for of_name in self.changes.values() for change in of_name)
        return (change for change in changes if isinstance(change, LowRankChange))

    @property
    def max_rank(self) -> int:
        """The largest rank of its products; 0: it has none."""
        return max((change.down.shape[0] for change in self.products), default=0)

    def adapt(self, model: ModelConfig) -> ModelConfig:
        """Return the model with the tensors that it has once the adapter is merged into it. An LM head that changes is
        not that of the checkpoint's bits."""
        of_head = {TIED_HEAD, TIED_TO} if model.tie_word_embeddings else {TIED_HEAD}
        if model.quantisation is not None and not of_head.isdisjoint((*self.changes, *self.replaced)):
            model = replace(model, quantisation=replace(model.quantisation, has_head=False))
        return replace(model, tie_word_embeddings=False) if self.unties_head else model

    def check_kept(self, model: ModelConfig) -> None:
        """Raise ConfigError if ranks are to keep a weight in the checkpoint's bits that the adapter changes."""
        for tensor in model_tensors(self.adapt(model), model.dtype):
            if tensor.w4 is None:
                continue
            changed = next((n for n in tensor.stored_names if n in self.changes or n in self.replaced), None)
            if changed is not None:
                raise ConfigError(
                    f"`quantization` is {model.quantization}, and the adapter (`lora`) changes {changed}, whose new "
                    "values the checkpoint's bits do not hold: use quantization: none, or fp8, which quantises the "
                    "new values"
                )

    def over(self, tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
        """Return a checkpoint's tensors, by the decoder's names, with the adapter's changes."""
        found = with_own_head(tensors) if self.unties_head else dict(tensors)
        if TIED_TO in self.replaced and self.keeps_tie:
            found.pop(TIED_HEAD, None)  # if tied, a copy of what is replaced
        found |= self.replaced  # also a classifier's head, which a generative model has not
        found |= {
            name: msgspec.structs.replace(found[name], changes=(*found[name].changes, *changes))
            for name, changes in self.changes.items()
            if name in found
        }
        return found


def with_own_head(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return a checkpoint's tensors with an LM head, which is the embedding if it has none."""
    found = dict(tensors)
    if TIED_TO in found:
        found.setdefault(TIED_HEAD, found[TIED_TO])
    return found


def read_adapter(folder: Path, model: ModelConfig) -> Adapter:
    """Read an adapter for a model.

    Raises LoadError, naming the file and the tensor or key, if the adapter is damaged, was made for another model, or
    needs something that is not supported, and ConfigError if the model's layers run several times.
    """
    if model.decoder.has_loops:
        raise ConfigError(
            f"`lora` is {folder}, and layers of this model ({model.architecture}) run several times, and have factors "
            "of their rows: adapters of it are not served; leave it out, or merge it with peft"
        )
    config, stored = read_adapter_config(folder), read_adapter_tensors(folder)
    is_headless = model.decoder.layout.is_headless
    wanted = model_tensors(model if is_headless else replace(model, tie_word_embeddings=False), model.dtype)
    shapes = {name: tensor.stored_shape for tensor in wanted for name in tensor.stored_names}
    names = DecoderNames(model.decoder.layout, shapes)
    reader = AdapterReader(config, names)
    for module in stored.modules:
        reader.add(module)
    if any(config.token_ids.values()) and not any("rows" in module.tensors for module in stored.modules):
        raise config.file.error("trainable_token_indices", f"no rows of its tokens are in {stored.file.name}")
    replaced = _replaced(config, stored, names, wanted, reader)
    changes = reader.changes
    if not changes and not replaced:
        raise LoadError(f"{stored.file}: changes nothing of the text model; it has tensors of other parts only")
    unties = not is_headless and model.tie_word_embeddings and _needs_own_head(config, changes, replaced)
    keeps_tie = model.tie_word_embeddings and not unties
    if keeps_tie:  # changes to the embedding apply to the head
        changes.pop(TIED_HEAD, None)
        replaced.pop(TIED_HEAD, None)
    return Adapter(
        config=config,
        changes=changes,
        replaced=replaced,
        unties_head=unties,
        keeps_tie=keeps_tie,
        left=tuple(reader.left),
    )


def _needs_own_head(config: AdapterConfig, changes: Changes, replaced: Mapping[str, TensorInfo]) -> bool:
    """Whether a tied LM head differs from the embedding once the adapter is merged."""
    of_embedding, of_head = changes.get(TIED_TO, ()), changes.get(TIED_HEAD, ())
    is_replaced = TIED_TO in replaced or TIED_HEAD in replaced
    if not (of_embedding or of_head or is_replaced):
        return False
    if config.ties_weights and (of_embedding or TIED_TO in replaced):
        return False
    has_rows_alone = all(isinstance(change, RowsChange) for change in (*of_embedding, *of_head))
    return is_replaced or not of_embedding or not has_rows_alone  # token rows apply to both, as in PEFT


def _replaced(
    config: AdapterConfig,
    stored: AdapterTensors,
    names: DecoderNames,
    wanted: tuple[TensorSpec, ...],
    reader: AdapterReader,
) -> dict[str, TensorInfo]:
    """Return the tensors that the adapter stores whole: modules to save, biases, and embeddings that were saved too."""
    found: dict[str, TensorInfo] = {}
    for name, info in stored.whole.items():
        if (known := names.find(name)) is not None:
            found[known] = info
        elif names.is_left(name):
            reader.left.append(info.name)
        else:
            raise reader.unknown(info)
    modules = {name.rpartition(".")[0] for name in names.shapes}
    for end in () if config.ties_weights else config.modules_to_save:
        is_there = any(f".{end}." in f".{name}" for name in stored.whole)
        if not is_there and any(f".{module}".endswith(f".{end}") for module in modules):
            raise config.file.error("modules_to_save", f"{show(end)} is not in {stored.file.name}")
    layout = replace(names.layout, starts=(), renamed=(), is_part=False, left=(), is_headless=False)
    located = dict(locate_tensors(layout, found, wanted).tensors)
    for name, info in located.items():
        wanted_shape = names.shapes[name]
        has_rows = name in (TIED_TO, TIED_HEAD) and info.shape[1:] == wanted_shape[1:]
        if has_rows and info.shape[0] != wanted_shape[0]:
            raise tensor_error(
                info,
                f"has {info.shape[0]:,} tokens, and the model {wanted_shape[0]:,}: training resized the vocabulary, "
                f"which is not served; {MERGE_IT}",
            )
        if info.shape != wanted_shape:
            raise reader.mismatch(info, name)
    return located

"""DraftModelConfig: a small model of its own that drafts for another with the same tokens. `draft_model.py`
computes it. Torch-free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import ClassVar

from nvcli.attention.spec import AttentionSpec
from nvcli.errors import ConfigError
from nvcli.models.checkpoint_check import check_tensors, read_model_tensors
from nvcli.models.config import ModelConfig, load_model_config
from nvcli.models.draft_head_config import DraftHeadConfig
from nvcli.models.geometry import model_tensors
from nvcli.models.mixers.mixer import Block, LayerContext, Mixer
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.tensor_spec import TensorSpec

PREFIX = "draft_model."
"""The beginning of all names, so that no tensor of the target has the same one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftModelConfig(DraftHeadConfig):
    """A model, and where its weights are."""

    module: ClassVar[str] = "nvcli.models.draft_model:DraftModel"
    reads_states: ClassVar[bool] = False
    model: ModelConfig
    tensor_infos: Mapping[str, TensorInfo] = field(default_factory=dict, hash=False)
    """The places of its tensors; empty if it has random weights."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return tuple(layer.mixer for layer in self.model.layers)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(block for layer in self.model.decoder.layer_kinds for block in layer.blocks)

    def state_size(self, hidden_size: int) -> int:
        return 0

    def stored_tensors(self) -> Mapping[str, TensorInfo]:
        return self.tensor_infos

    def tensors(self, context: LayerContext, vocab_size: int) -> Iterator[TensorSpec]:
        """Yield its tensors. They stay in the target's type, whatever ranks keep the target's weights in."""
        for tensor in model_tensors(self.model, context.dtype):
            yield replace(tensor, name=PREFIX + tensor.name, kept_with=())


def read_draft_model(folder: Path, target: ModelConfig, *, is_random: bool = False) -> DraftModelConfig:
    """Read the model in `folder`, which drafts for `target`. `is_random`: it gets random weights, and its files are not
    read.

    Raises LoadError naming the file, and ConfigError for a model that cannot draft.
    """
    model = replace(load_model_config(folder), expert_parallel=target.expert_parallel)
    problem = f"`speculation.method` (--speculate) is {folder}, "
    mixers = [mixer for layer in model.layers for mixer in layer.mixers]
    if any(mixer.kv_spec().is_state for mixer in mixers):
        raise ConfigError(
            f"{problem}a model with recurrent states, which cannot take back drafts: use one with attention only"
        )
    specs = (mixer.kv_spec() for mixer in mixers)
    is_beside = any(isinstance(spec, AttentionSpec) and spec.is_beside_backends for spec in specs)
    reads_others = is_beside or any(mixer.reads_kv_of is not None for mixer in mixers)
    if reads_others or model.decoder.layer_inputs is not None:
        raise ConfigError(f"{problem}and models of its family ({model.architecture}) cannot draft: use another")
    if model.decoder.learned_positions is not None and model.max_position_embeddings < target.max_position_embeddings:
        raise ConfigError(
            f"{problem}a model that knows {model.max_position_embeddings:,} positions, and the model's sequences may "
            f"have {target.max_position_embeddings:,} tokens: use one that knows as many"
        )
    if model.vocab_size != target.vocab_size:
        raise ConfigError(
            f"{problem}a model with {model.vocab_size:,} tokens, and the model's are {target.vocab_size:,}: use a "
            "small model of the same family, whose tokens are the same"
        )
    if is_random:
        return DraftModelConfig(model=model)
    tensors = read_model_tensors(model, folder).tensors
    check_tensors(model, tensors, folder)
    names = {name for tensor in model_tensors(model, model.dtype) for name in tensor.stored_names}
    return DraftModelConfig(model=model, tensor_infos={PREFIX + name: tensors[name] for name in names})

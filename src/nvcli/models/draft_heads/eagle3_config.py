"""Eagle3Config: an EAGLE-3 head (Li et al., https://arxiv.org/abs/2503.01840). `eagle3.py` computes it, and
`eagle3_files.py` reads it. Torch-free.

A head is one layer, whose attention reads the embedding of a token beside a state. The states of the target's tokens
are made of its residual stream before several layers. The names of the tensors are those of SafeAILab's files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from nvcli.models.draft_head_config import DraftHeadConfig
from nvcli.models.mixers.attention import AttentionConfig
from nvcli.models.mixers.mixer import Block, LayerContext, Mixer, NormConfig
from nvcli.models.mixers.mlp import MLPConfig
from nvcli.models.tensor_info import TensorInfo
from nvcli.models.tensor_spec import Sharding, TensorSpec, matrix

PREFIX = "draft."
"""The beginning of all names, so that no tensor of the target has the same one."""
LAYER, EMBEDDING, HEAD = f"{PREFIX}midlayer", f"{PREFIX}embed_tokens", f"{PREFIX}lm_head"
FC, NORM = f"{PREFIX}fc", f"{PREFIX}norm"
NORM_OF_STATES, NORMS_OF_STATES = f"{PREFIX}input_norm", f"{PREFIX}fc_norm"
INPUT_NORM, HIDDEN_NORM, MLP_NORM = (
    f"{LAYER}.{name}" for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
)
_OF_INPUT = tuple(f".{name}.weight" for name in ("q_proj", "k_proj", "v_proj"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(DraftHeadConfig):
    """The sizes and the form of a head."""

    module: ClassVar[str] = "nvcli.models.draft_heads.eagle3:Eagle3Head"
    hidden_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    attention: AttentionConfig
    mlp: MLPConfig
    norm: NormConfig
    norms_residual: bool = False
    """Whether the layer's residual stream begins with the normed state rather than with the state itself."""
    norms_states: bool = False
    """Whether the target's states are normed, all together, before they are combined."""
    norms_each_state: bool = False
    """Whether each of them is normed by itself before that."""
    feeds_normed: bool = False
    """Whether the next pass takes the state after the final norm rather than before it."""
    has_embedding: bool = False
    """Whether it has an embedding of its own; otherwise it uses the target's."""
    is_tied: bool = False
    """Whether that embedding is its LM head too."""
    has_lm_head: bool = False
    """Whether it has an LM head of its own; otherwise it uses the target's, unless it `is_tied`."""
    draft_ids: tuple[int, ...] | None = field(default=None, hash=False)
    """The tokens of its own LM head, ascending; None: all of the target's."""
    tensor_infos: Mapping[str, TensorInfo] = field(default_factory=dict, hash=False)
    """The places of its tensors in files; empty if it has random weights."""

    @property
    def mixers(self) -> tuple[Mixer, ...]:
        return (self.attention,)

    @property
    def blocks(self) -> tuple[Block, ...]:
        return self.attention, self.mlp

    def state_size(self, hidden_size: int) -> int:
        return self.hidden_size

    def stored_tensors(self) -> Mapping[str, TensorInfo]:
        return self.tensor_infos

    def tensors(self, context: LayerContext, vocab_size: int) -> Iterator[TensorSpec]:
        """Yield its tensors. They stay in the model's type, whatever ranks keep the target's weights in."""
        dtype, hidden, count = context.dtype, self.hidden_size, len(self.aux_layers)
        context = LayerContext(hidden_size=hidden, norm=self.norm, dtype=dtype)
        width = count * self.target_hidden_size
        if self.has_embedding:
            yield matrix(EMBEDDING, (vocab_size, hidden), Sharding.REPLICATED, dtype, "embeddings")
        if self.norms_states:
            yield context.norm_weight(NORM_OF_STATES, width)
        for number in range(count) if self.norms_each_state else ():
            yield context.norm_weight(f"{NORMS_OF_STATES}.{number}", self.target_hidden_size)
        yield matrix(FC, (hidden, width), Sharding.REPLICATED, dtype, "MLP")
        for tensor in self.attention.tensors(f"{LAYER}.{self.attention.name}", context):
            shape = (tensor.shape[0], 2 * hidden) if tensor.name.endswith(_OF_INPUT) else tensor.shape
            yield replace(tensor, shape=shape, kept_with=())
        for tensor in self.mlp.tensors(f"{LAYER}.{self.mlp.name}", context):
            yield replace(tensor, kept_with=())
        for name in (INPUT_NORM, HIDDEN_NORM, MLP_NORM, NORM):
            yield context.norm_weight(name, hidden)
        if self.has_lm_head:
            num_tokens = vocab_size if self.draft_ids is None else len(self.draft_ids)
            yield matrix(HEAD, (num_tokens, hidden), Sharding.REPLICATED, dtype, "LM head")

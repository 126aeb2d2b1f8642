"""RankAttention: the attention backend of a rank, and what follows from it and the model: the shape of the KV cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from nvcli.attention.backend import AttentionBackend, AttentionCase
from nvcli.attention.kv_cache import KVCacheSpec, torch_kv_dtype
from nvcli.attention.selection import select_backend
from nvcli.core.engine_config import EngineConfig
from nvcli.core.messages import KVGroup
from nvcli.models.causal_lm import CausalLM
from nvcli.models.kv_groups import kv_groups
from nvcli.worker.distributed.tensor_parallel import TensorParallelGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAttention:
    """The attention of a rank's stage."""

    backend: AttentionBackend
    """Serves every kind of attention in the model."""
    notes: list[str]
    """Notes for the log about the choice."""
    max_shared_rows: int
    """The most decode rows of a step that read shared segments once; 0: one of the stages cannot do that."""
    projects_latents: bool
    """Whether chunks of one of the stages may attend to projected latents."""
    chooses_keys: bool
    """Whether tokens of one of the stages see chosen or compressed keys."""
    prefix_tile_tokens: int
    """The tokens of a tile in which chunks attend together to their prefix; 0: one of the stages cannot do that."""
    kv_groups: tuple[KVGroup, ...]
    kv_spec: KVCacheSpec
    why_no_drafts: str
    """Why steps cannot check drafts, or cannot make them; empty: they can."""
    draft_widths: tuple[int, ...]
    """The numbers of tokens of decode rows with drafts; empty: there are none."""

    @classmethod
    def of(
        cls, config: EngineConfig, model: CausalLM, device: torch.device, dtype: torch.dtype, world: TensorParallelGroup
    ) -> RankAttention:
        """Select the backend, alike on all ranks of `world`. `config`: the engine's, of one home
        (`EngineConfig.of_home`)."""
        kv_dtype = torch_kv_dtype(config.kv_dtype)
        groups = kv_groups(model.config, model.stage)
        kv_spec = KVCacheSpec.of_layers(
            model.cache_layers,
            tuple(group.layers for group in groups),
            block_size=config.block_size,
            dtype=dtype,
            kv_dtype=kv_dtype,
        )
        case = AttentionCase(
            device=device,
            dtype=dtype,
            specs=model.attention_kinds,
            block_size=config.block_size,
            kv_dtype=kv_dtype,
            max_num_seqs=config.max_padded_rows,
            max_num_batched_tokens=config.max_padded_tokens,
            max_decode_width=1 + config.max_draft_tokens,
            max_draft_step_tokens=config.max_draft_step_tokens,
            max_model_len=config.max_row_tokens,
            batch_invariant=config.batch_invariant,
            has_states=any(layer.is_state for layer in model.cache_layers),
            block_bytes=kv_spec.block_bytes,
            max_shared_rows=config.max_shared_rows,
        )
        backend, notes = select_backend(config.attention_backend, case)
        why_no_drafts = _why_no_drafts(config, backend, groups)
        mixers = (mixer for of_layer in model.config.mixers for mixer in of_layer)
        notes += dict.fromkeys(mixer.note for mixer in mixers if mixer.note is not None)
        # Stages run the same steps, padded to one shape: what one of them cannot share, none does. One whose layers all
        # have windows cannot plan steps with prefixes, and one with chosen keys reads no segments.
        tile_tokens = backend.prefix_tile_tokens if config.max_shared_rows else 0
        max_shared_rows = config.max_shared_rows if backend.reads_segments else 0
        return cls(
            backend=backend,
            notes=notes,
            max_shared_rows=world.min(max_shared_rows),
            projects_latents=not world.min(backend.projected is None),
            chooses_keys=not world.min(backend.chosen_keys is None),
            prefix_tile_tokens=world.min(tile_tokens),
            kv_groups=groups,
            kv_spec=kv_spec,
            why_no_drafts=why_no_drafts,
            draft_widths=() if why_no_drafts else config.draft_widths,
        )

    @property
    def has_states(self) -> bool:
        """Whether some layers keep recurrent states."""
        return any(group.is_state for group in self.kv_groups)

    @property
    def may_draft(self) -> bool:
        """Whether decode rows may have drafts."""
        return bool(self.draft_widths)

    @property
    def shares_prefixes(self) -> bool:
        """Whether prefill chunks may be attended together to the prefix that they share."""
        return self.prefix_tile_tokens > 0


def _why_no_drafts(config: EngineConfig, backend: AttentionBackend, groups: Sequence[KVGroup]) -> str:
    if backend.needs_exact_lens:
        return f"the attention backend {backend.name} needs the exact length of each request"
    if config.draft_head is not None and not backend.plans_on_device:
        return f"the attention backend {backend.name} cannot run a head several times in a step; use triton"
    if config.pipeline_parallel_size > 1 and any(group.is_state for group in groups):
        return "with pipeline stages (--pp) recurrent states do not learn in time which drafts are right"
    return ""

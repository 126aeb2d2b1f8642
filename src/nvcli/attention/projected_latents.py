"""Prefill chunks of latent attention over keys and values that are projected from latents: which steps gain from that,
and how they are computed. The kernels are in `kernels/triton/attention/projected_prefill.py`, with measurements."""

from __future__ import annotations

from typing import Self

import numpy as np
from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.kv_layout import SCRATCH_UNIT, projected_scratch_tokens
from nvcli.attention.spec import AttentionSpec, HeadSizes, projected_kind
from nvcli.attention.triton_inputs import attention_shape, layer_inputs
from nvcli.kernels.triton.attention import prefill_choice
from nvcli.kernels.triton.attention.prefill_scratch import ScratchTiles
from nvcli.kernels.triton.attention.prefill_tiles import Chunks
from nvcli.kernels.triton.attention.projected_prefill import ProjectedHeads, ProjectedPrefill

_ABSORBED_RATE, _PROJECTED_RATE, _PROJECTING_RATE = 310.0, 550.0, 400.0
"""Tera-operations per second of an H200: of prefill attention with absorbed queries (measured), with projected keys and
values, and of their projection."""
PROJECTED_NOTE = "prefill attention: the kernel for Hopper GPUs, over keys and values projected from latents"
"""The note in the log where chunks may attend to projected latents."""


class ProjectedLatents:
    """Attends chunks to projected latents, for the one kind of attention of a run."""

    @classmethod
    def make(cls, case: AttentionCase) -> Self | None:
        """Return the attention of a run; None if there are no kernels for its sizes."""
        spec = projected_kind(case.specs + case.chosen)
        if case.batch_invariant or case.has_states or spec is None:
            return None
        sizes = spec.projected
        assert sizes is not None
        row_bytes = spec.projected_size() * case.dtype.itemsize
        tokens = projected_scratch_tokens(case.max_model_len, case.max_num_batched_tokens, row_bytes, spec.top_k)
        kernels = prefill_choice.projected_prefill(
            attention_shape(case, spec.geometry),
            ProjectedHeads(spec.num_heads, sizes.key_dim, sizes.value_dim),
            scratch_tokens=tokens,
        )
        return None if kernels is None else cls(case, spec, sizes, kernels)

    def __init__(self, case: AttentionCase, spec: AttentionSpec, sizes: HeadSizes, kernels: ProjectedPrefill) -> None:
        self._spec, self._sizes, self._kernels = spec, sizes, kernels
        self._tiles = ScratchTiles(
            kernels.tile_key,
            max_tokens=case.max_num_batched_tokens,
            max_chunks=case.max_num_seqs,
            device=case.device,
        )

    def pays(self, num_tokens: np.ndarray, seq_lens: np.ndarray) -> bool:
        """Whether chunks with these numbers of tokens and keys, [chunks] each, take less time with projected
        latents, find room for them, and attend to all of their keys."""
        spec, sizes = self._spec, self._sizes
        num_units = int((-(-seq_lens // SCRATCH_UNIT)).sum())
        if num_units > self._kernels.num_units or (spec.top_k is not None and seq_lens.max() > spec.top_k):
            return False
        of_latent = spec.result_dim * sizes.projected_dim
        pairs = float((num_tokens * (seq_lens - (num_tokens - 1) / 2)).sum())
        absorbed = pairs * (spec.head_dim + spec.result_dim) / _ABSORBED_RATE
        absorbed += float(num_tokens.sum()) * of_latent / _PROJECTING_RATE
        projected = pairs * (sizes.key_dim + sizes.value_dim) / _PROJECTED_RATE
        return projected + num_units * SCRATCH_UNIT * of_latent / _PROJECTING_RATE < absorbed

    def plan(self, chunks: Chunks) -> None:
        """List a step's work, on the device."""
        self._tiles.plan(chunks)

    def forward(self, layer: AttentionLayer, q: Tensor, weight: Tensor, batch: ForwardBatch, out: Tensor) -> None:
        """Attend chunks as planned; see `ProjectedAttention.forward`."""
        self._kernels.run(layer_inputs(layer, q, batch), weight, self._tiles, out)

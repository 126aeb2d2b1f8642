"""The `triton` backend: our own kernels, with nothing to install, no compiler and no host plan for decode rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from nvcli.attention.backend import AttentionBackend, AttentionCase, AttentionSpec, new_or
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.requirements import import_failure, unmet_requirements

_MAX_ROWS = 64_000
"""A launch grid has at most 65,535 rows, and each sequence makes at least one."""


class TritonBackend(AttentionBackend):
    name = "triton"
    captures_decode = True
    captures_extend = True

    def __init__(self, case: AttentionCase) -> None:
        # Triton is imported only by runs that use it.
        from nvcli.kernels.triton.decode_attention import DecodeAttention
        from nvcli.kernels.triton.prefill_attention import PrefillAttention

        self._decode = DecodeAttention(
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            block_size=case.block_size,
            dtype=case.dtype,
            device=case.device,
            max_rows=case.max_num_seqs,
        )
        self._prefill = PrefillAttention(
            num_heads=case.num_heads,
            num_kv_heads=case.num_kv_heads,
            head_dim=case.head_dim,
            block_size=case.block_size,
            dtype=case.dtype,
            device=case.device,
        )

    @classmethod
    def unsupported(cls, case: AttentionCase) -> list[str]:
        reasons = unmet_requirements(
            case,
            capability=(8, 0),
            dtypes=(torch.bfloat16, torch.float16, torch.float32),
            head_dims=(16, 32, 64, 128, 256),
        )
        if case.max_num_seqs > _MAX_ROWS:
            reasons.append(f"max_num_seqs {case.max_num_seqs} is above {_MAX_ROWS}")
        if not reasons and (failure := import_failure("triton", "the triton that belongs to your torch")):
            reasons.append(failure)
        return reasons

    def plan_extend(self, batch: ForwardBatch) -> None:
        self._prefill.plan(batch.num_decodes, batch.extend_lens, batch.seq_lens_host[batch.num_decodes :])

    def plan_captured_extend(
        self, first_request: int, extend_lens: Sequence[int], seq_lens: np.ndarray, num_tokens: int, max_slices: int
    ) -> None:
        self._prefill.plan_captured(first_request, extend_lens, seq_lens, num_tokens, max_slices)

    def plan_decode_on_device(self, batch: ForwardBatch) -> None:
        self._decode.plan(batch.seq_lens[: batch.num_decodes])

    def decode(self, spec: AttentionSpec, layer: int, q: Tensor, batch: ForwardBatch, out: Tensor | None) -> Tensor:
        out = new_or(out, q)
        k_cache, v_cache = batch.kv_cache.layer(layer)
        self._decode.run(q, k_cache, v_cache, batch.block_tables, spec.scale, out)
        return out

    def extend(
        self, spec: AttentionSpec, layer: int, q: Tensor, k: Tensor, v: Tensor, batch: ForwardBatch, out: Tensor | None
    ) -> Tensor:
        out = new_or(out, q)
        k_cache, v_cache = batch.kv_cache.layer(layer)
        self._prefill.run(q, k_cache, v_cache, batch.block_tables, batch.seq_lens, spec.scale, out)
        return out

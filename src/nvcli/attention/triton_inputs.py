"""Inputs of the kernels of the `triton` backend, from those of a run and of a batch."""

from __future__ import annotations

from torch import Tensor

from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.spec import Geometry
from nvcli.kernels.triton.attention.attention_launch import AttentionShape, LayerInputs
from nvcli.kernels.triton.attention.decode_work_list import RowTokens


def attention_shape(case: AttentionCase, geometry: Geometry) -> AttentionShape:
    """Return the heads of a geometry and their cache."""
    num_heads, num_kv_heads, head_dim, value_dim, has_values = geometry
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=value_dim,
        tail_dim=head_dim - value_dim,
        has_values=has_values,
        has_bias=any(spec.bias_extent is not None for spec in case.specs),
        block_size=case.block_size,
        dtype=case.dtype,
        kv_dtype=case.cache_dtype,
        device=case.device,
    )


def layer_inputs(layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> LayerInputs:
    """Return the kernel's inputs for a layer; the arguments are those of `AttentionBackend.decode`."""
    spec, number, sinks, bias = layer
    k_cache, v_cache = batch.kv_cache.layer(number)
    tables = batch.block_tables[spec.kv_group]
    return LayerInputs(
        q, k_cache, v_cache, tables, spec.scale, spec.window, spec.soft_cap, sinks, bias, both_ways=spec.both_ways
    )


def row_tokens(batch: ForwardBatch) -> RowTokens | None:
    """Return the tokens of decode rows that may have several; None: they have one each."""
    if batch.shape.tokens_per_row == 1:
        return None
    return RowTokens(batch.query_start_loc[: batch.num_decoded_rows + 1], batch.shape.tokens_per_row)

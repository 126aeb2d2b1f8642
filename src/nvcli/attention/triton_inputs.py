"""What kernels of the `triton` backend are made for and what they attend to, in their own words."""

from __future__ import annotations

from torch import Tensor

from nvcli.attention.backend import AttentionCase, AttentionLayer
from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import Geometry
from nvcli.kernels.triton.attention_launch import AttentionShape, LayerInputs


def attention_shape(case: AttentionCase, geometry: Geometry) -> AttentionShape:
    """Return the heads of a geometry and their cache."""
    num_heads, num_kv_heads, head_dim = geometry
    return AttentionShape(
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=case.block_size,
        dtype=case.dtype,
        kv_dtype=case.cache_dtype,
        device=case.device,
    )


def layer_inputs(layer: AttentionLayer, q: Tensor, batch: ForwardBatch) -> LayerInputs:
    """Return what a layer attends to; the arguments are those of `AttentionBackend.decode`."""
    spec, number, sinks = layer
    k_cache, v_cache = batch.kv_cache.layer(number)
    tables = batch.block_tables[spec.kv_group]
    return LayerInputs(q, k_cache, v_cache, tables, spec.scale, spec.window, spec.soft_cap, sinks)

"""A rank on the CPU whose chunks attend to projected latents in plain torch, where the rule for GPUs says so."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from nvcli.attention import projected_latents, selection
from nvcli.attention.backend import AttentionCase
from nvcli.attention.forward_batch import AttentionLayer, ForwardBatch
from nvcli.attention.projected_latents import ProjectedLatents
from nvcli.attention.spec import HeadSizes, projected_kind
from nvcli.attention.torch_backend import TorchBackend, read_blocks
from nvcli.attention.triton_backend import TritonBackend
from nvcli.core.engine_config import EngineConfig
from nvcli.worker.runner.interface import RankContext, Runner
from nvcli.worker.runner.model_runner import ModelRunner


class WrittenOut(ProjectedLatents):
    """Projected latents of sizes that no kernel serves. `took` says of each step with chunks whether they were
    projected."""

    def __init__(self, case: AttentionCase) -> None:
        with patch.object(HeadSizes, "has_kernels", True):
            kind = projected_kind(case.specs + case.chosen)
        assert kind is not None
        assert kind.projected is not None
        self._spec, self._sizes, self._dtype = kind, kind.projected, case.dtype
        self._kernels: Any = SimpleNamespace(num_units=1 << 20)
        self.took: list[bool] = []

    def pays(self, num_tokens: np.ndarray, seq_lens: np.ndarray) -> bool:
        with patch.multiple(projected_latents, _PROJECTED_RATE=1e12, _PROJECTING_RATE=1e12):
            self.took.append(super().pays(num_tokens, seq_lens))
        return self.took[-1]

    def forward(self, layer: AttentionLayer, q: Tensor, weight: Tensor, batch: ForwardBatch, out: Tensor) -> None:
        spec, sinks, sizes, end = layer.spec, layer.sinks, self._sizes, 0
        plain_dim, block_size = sizes.key_dim - sizes.rope_dim, batch.kv_cache.spec.block_size
        for row in range(batch.num_decoded_rows, batch.shape.num_rows):
            start, end = end, end + int(batch.num_tokens_host[row])
            length = int(batch.seq_lens[row])
            blocks = batch.block_tables[spec.kv_group, batch.slots[row], : -(-length // block_size)].long()
            kept = read_blocks(batch.kv_cache, layer.number, blocks, self._dtype)[0][:length, 0, : self._spec.head_dim]
            latents, rotated = kept.split([spec.result_dim, sizes.rope_dim], dim=-1)
            of_heads = torch.einsum("ld,hcd->hlc", latents, weight.view(spec.num_heads, -1, spec.result_dim))
            keys = torch.cat((of_heads[..., :plain_dim], rotated.expand(spec.num_heads, -1, -1)), dim=-1)
            scores = torch.einsum("thc,hlc->htl", q[start:end], keys) * spec.scale
            hidden = torch.ones(end - start, length, dtype=torch.bool).triu_(length - (end - start) + 1)
            scores = scores.masked_fill(hidden, float("-inf"))
            if sinks is not None:
                scores = torch.cat((scores, sinks.view(-1, 1, 1).expand(-1, end - start, 1)), dim=-1)
            shares = scores.softmax(dim=-1)[..., :length]
            out[start:end] = torch.einsum("htl,hlv->thv", shares, of_heads[..., plain_dim:])
        out[end:] = 0


class ProjectingBackend(TorchBackend):
    """The `torch` backend, with projected chunks."""

    choose_shape: Any = TritonBackend.choose_shape

    def __init__(self, case: AttentionCase) -> None:
        super().__init__(case)
        self.projected = WrittenOut(case)
        self._prefill = SimpleNamespace(projected=self.projected)


def create(config: EngineConfig, context: RankContext) -> Runner:
    """Make the real runner, which finds this backend under the name `projecting`."""
    selection.BACKENDS["projecting"] = "projecting_runner:ProjectingBackend"
    return ModelRunner(config, context)

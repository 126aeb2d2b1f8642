"""AlibiAttention: attention whose keys hold their positions, and whose queries hold slopes (`mixers/alibi.py`). Plain
torch before any backend. Shapes: T tokens, D head_dim."""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.attention.forward_batch import ForwardBatch
from nvcli.attention.spec import AttentionCache
from nvcli.kernels.rotary import split_heads
from nvcli.models.layers import Attention
from nvcli.models.mixers.alibi import ALIBI_DIM, ALIBI_UNIT, AlibiConfig
from nvcli.models.mixers.mixer import NormConfig
from nvcli.models.parallel import BuildContext
from nvcli.models.weights import DerivedModule


class QuerySlopes(DerivedModule):
    """The numbers that queries of this rank's heads hold besides their own: [heads, ALIBI_DIM]."""

    table: Tensor

    def __init__(self, build: BuildContext, config: AlibiConfig, num_heads: int) -> None:
        super().__init__()
        first = build.group.rank * num_heads
        self.slopes = [slope / config.scale for slope in config.slopes[first : first + num_heads]]
        shape = num_heads, ALIBI_DIM
        self.register_buffer("table", torch.empty(shape, dtype=getattr(torch, build.dtype)), persistent=False)

    def derive(self, device: torch.device) -> None:
        """Compute the table: each slope is the sum of two numbers of the model's type, one for what that rounds."""
        dtype = self.table.dtype
        slopes = torch.tensor(self.slopes, dtype=torch.float32, device=device)
        rounded = slopes.to(dtype)
        rest = (slopes - rounded.float()).to(dtype)
        used = torch.stack((ALIBI_UNIT * rounded, rounded, ALIBI_UNIT * rest, rest), dim=1)
        self.table = torch.nn.functional.pad(used, (0, ALIBI_DIM - used.shape[1]))


class AlibiAttention(Attention):
    """Attention of queries and keys with `ALIBI_DIM` numbers more than values."""

    def __init__(
        self, build: BuildContext, path: str, config: AlibiConfig, norm: NormConfig, cache: AttentionCache
    ) -> None:
        super().__init__(build, path, config, norm, cache)
        self.slopes = QuerySlopes(build, config, cache.spec.num_heads)

    def _prepared(self, qkv: Tensor, batch: ForwardBatch) -> Tensor:
        """Append slopes to queries and positions to keys."""
        qkv = super()._prepared(qkv, batch)
        num_keys = self.spec.num_kv_heads
        q, k, v = split_heads(qkv, self.spec.num_heads, num_keys, self.spec.result_dim)
        positions = batch.positions
        places = torch.stack((positions // ALIBI_UNIT, positions % ALIBI_UNIT), dim=1).to(k.dtype)
        of_keys = torch.nn.functional.pad(torch.cat((places, places), dim=1), (0, ALIBI_DIM - 4))
        q = torch.cat((q, self.slopes.table.expand(len(q), -1, -1)), dim=2)
        k = torch.cat((k, of_keys.unsqueeze(1).expand(-1, num_keys, -1)), dim=2)
        return torch.cat((q.flatten(1), k.flatten(1), v.flatten(1)), dim=1)

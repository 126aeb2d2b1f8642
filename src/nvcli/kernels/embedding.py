"""The look-up of ids in one rank's part of an embedding. Plain torch is the reference; CUDA tensors take the Triton
kernel that is held to it."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel


@with_kernel("elementwise.embedding")
def embed_part(ids: Tensor, weight: Tensor, start: int, out: Tensor | None = None) -> Tensor:
    """Look up the rows of `ids` that this part of the embedding has, in `out` if that is given; other ids get zeros.

    ids: [T] int32; weight: [M, H], the rows of the tokens from `start` up to `start + M` → [T, H].
    """
    local = ids - start
    mine = (local >= 0) & (local < weight.shape[0])
    found = F.embedding(local.where(mine, 0), weight).masked_fill_(~mine.unsqueeze(-1), 0)
    return found if out is None else out.copy_(found)

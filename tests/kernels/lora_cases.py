"""Banks of random adapters for tests of low-rank products."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from nvcli.core.lora_config import PAGE_RANKS
from nvcli.kernels.lora_types import AdaptedLayer, AdapterBank, feature_blocks, page_columns


def make_layer(
    in_features: int, projections: Sequence[tuple[int, int]], device: torch.device, *, block_features: int = 128
) -> AdaptedLayer:
    """Make the only layer of a bank. projections: see `feature_blocks`."""
    num_projections = 1 + max(projection for _, projection in projections)
    blocks, align = feature_blocks(projections, block_features)
    return AdaptedLayer(
        in_features=in_features,
        out_features=sum(num_features for num_features, _ in projections),
        first_projection=0,
        num_projections=num_projections,
        down_offset=0,
        up_offset=num_projections * PAGE_RANKS * in_features,
        blocks=torch.tensor(blocks, dtype=torch.int32, device=device),
        block_features=block_features,
        feature_align=align,
    )


def make_bank(
    layer: AdaptedLayer, ranks: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> AdapterBank:
    """Make a bank whose adapters have these ranks, for each projection [J, L], and pages in a random order."""
    generator = torch.Generator(device).manual_seed(0)
    elements = PAGE_RANKS * (layer.num_projections * layer.in_features + layer.out_features)
    columns = page_columns(max(max(of_places) for of_places in ranks))
    of_adapters = [-(-max(of_projections) // PAGE_RANKS) for of_projections in zip(*ranks, strict=True)]
    free = torch.randperm(sum(of_adapters), generator=torch.Generator().manual_seed(1)).tolist()
    table = [[free.pop() for _ in range(num)] + [0] * (columns - num) for num in of_adapters]
    pages = torch.randn(sum(of_adapters), elements, generator=generator, device=device) * layer.in_features**-0.5
    return AdapterBank(
        pages=pages.to(dtype),
        page_table=torch.tensor(table, dtype=torch.int32, device=device),
        ranks=torch.tensor(ranks, dtype=torch.int32, device=device).t().contiguous(),
        scales=torch.rand(len(ranks[0]), len(ranks), generator=generator, device=device) + 0.5,
    )

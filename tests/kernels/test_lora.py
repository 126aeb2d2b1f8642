"""Low-rank products of many adapters: the reference against dense products, and the Triton kernels against it."""

from __future__ import annotations

import math
from typing import NamedTuple

import pytest
import torch
from lora_cases import make_bank, make_layer

from kernel_device import DEVICE, DTYPES, HAS_GPU, MARKS, captured
from nvcli.core.lora_config import PAGE_RANKS
from nvcli.kernels import lora as reference
from nvcli.kernels.activation import ACTIVATE_AND_MUL, Activation
from nvcli.kernels.lora_types import AdaptedLayer, AdapterBank, AdapterRows
from nvcli.kernels.triton.products import lora, lora_rows

pytestmark = MARKS
TOLERANCE = {torch.float32: 1e-4, torch.float16: 4e-3, torch.bfloat16: 3e-2}


class Shape(NamedTuple):
    in_features: int
    projections: list[tuple[int, int]]
    ranks: list[list[int]]
    """[J, L]."""


SHAPES = {
    "one": Shape(4096 if HAS_GPU else 96, [(4096 if HAS_GPU else 144, 0)], [[16, 8, 4]]),
    "queries, keys, values, gates": Shape(
        2048 if HAS_GPU else 40, [(512, 0), (128, 1), (80, 2), (512, 0)], [[16, 40, 8], [16, 0, 8], [3, 40, 8]]
    ),
    "large": Shape(1024 if HAS_GPU else 64, [(200, 0), (200, 1)], [[256, 64, 1], [200, 0, 1]]),
}


def rows_of(adapters: list[int], bank: AdapterBank, *, on_triton: bool) -> AdapterRows:
    tensor = torch.tensor(adapters, dtype=torch.int32, device=DEVICE)
    return (lora_rows if on_triton else reference).group_rows(tensor, bank)


def make(name: str, num_rows: int, dtype: torch.dtype) -> tuple[AdaptedLayer, AdapterBank, torch.Tensor, torch.Tensor]:
    shape = SHAPES[name]
    layer = make_layer(shape.in_features, shape.projections, DEVICE, block_features=128 if HAS_GPU else 64)
    bank = make_bank(layer, shape.ranks, dtype, DEVICE)
    generator = torch.Generator(DEVICE).manual_seed(2)
    x = torch.randn(num_rows, shape.in_features, generator=generator, device=DEVICE).to(dtype)
    out = torch.randn(num_rows, layer.out_features, generator=generator, device=DEVICE).to(dtype)
    return layer, bank, x, out


def dense(
    layer: AdaptedLayer, bank: AdapterBank, x: torch.Tensor, out: torch.Tensor, adapters: list[int]
) -> torch.Tensor:
    """Each adapter by itself, for all rows, in float32, with the low-rank values rounded as the kernels round them."""
    result, chosen = out.float().clone(), torch.tensor(adapters, device=x.device)
    for place in range(bank.num_places):
        for first, count, projection, _ in layer.blocks.tolist():
            ranks = range(int(bank.ranks[place, projection]))
            pages = [bank.pages[bank.page_table[place, rank // PAGE_RANKS]].float() for rank in ranks]
            if not pages:
                continue
            rows = [projection * PAGE_RANKS + rank % PAGE_RANKS for rank in ranks]
            size = layer.in_features
            down = torch.stack([page[row * size :][:size] for page, row in zip(pages, rows, strict=True)])
            starts = [layer.up_offset + rank % PAGE_RANKS * layer.out_features + first for rank in ranks]
            up = torch.stack([page[start:][:count] for page, start in zip(pages, starts, strict=True)])
            low = (x.float() @ down.t() * bank.scales[place, projection]).to(x.dtype).float()
            is_chosen = (chosen == place + 1)[:, None]
            result[:, first : first + count] += torch.where(is_chosen, low @ up, 0)
    return result


MIXES = {"all kinds": [2, 0, 1, 3, 3, 0, 1, 2, 2], "one": [1] * 20, "none": [0] * 5}
FEW = [3, 0, 1, 3, 2, 3]
"""So few rows that tiles are smaller."""


@pytest.mark.skipif(HAS_GPU, reason="the reference is plain torch on a CPU")
@pytest.mark.parametrize("name", SHAPES)
def test_reference_equals_dense_products(name: str) -> None:
    adapters = MIXES["all kinds"]
    layer, bank, x, out = make(name, len(adapters), torch.float32)
    expected = dense(layer, bank, x, out, adapters)
    reference.add_low_rank(out, x, rows_of(adapters, bank, on_triton=False), bank, layer)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mix", [*MIXES, "few"])
@pytest.mark.parametrize("name", SHAPES)
def test_kernels_equal_the_reference(name: str, mix: str, dtype: torch.dtype) -> None:
    adapters = FEW if mix == "few" else MIXES[mix] * (20 if HAS_GPU else 3)
    layer, bank, x, out = make(name, len(adapters), dtype)
    expected = dense(layer, bank, x, out, adapters)
    lora.add_low_rank(out, x, rows_of(adapters, bank, on_triton=True), bank, layer)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activation", ACTIVATE_AND_MUL)
def test_activation_is_fused(activation: Activation, dtype: torch.dtype) -> None:
    """Of rows without adapters too."""
    adapters = FEW if dtype == torch.float32 else MIXES["all kinds"] * 20
    layer, bank, x, gate_up = make("large", len(adapters), dtype)
    expected = ACTIVATE_AND_MUL[activation](dense(layer, bank, x, gate_up, adapters))
    rows = rows_of(adapters, bank, on_triton=True)
    out = lora.activate_with_low_rank(gate_up, x, rows, bank, layer, activation)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_rows_without_an_adapter_see_nothing_of_a_broken_one() -> None:
    """One that cannot be read has scales that are NaN."""
    layer = make_layer(64, [(200, 0), (200, 1)], DEVICE, block_features=64)
    bank = make_bank(layer, [[16, 8], [8, 16]], torch.float32, DEVICE)
    bank.scales[0] = math.nan
    x, gate_up = torch.randn(20, 64, device=DEVICE), torch.randn(20, 400, device=DEVICE)
    rows = rows_of([0, 1] * 10, bank, on_triton=True)
    out = lora.activate_with_low_rank(gate_up.clone(), x, rows, bank, layer, "silu")
    torch.testing.assert_close(out[::2], ACTIVATE_AND_MUL["silu"](gate_up)[::2], rtol=1e-4, atol=1e-4)
    assert not out[1::2].isfinite().any()


@pytest.mark.parametrize("name", SHAPES)
def test_programs_that_take_many_units_each(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A program goes from tile to tile, as on a GPU with many adapters in a step."""
    monkeypatch.setattr(lora, "num_multiprocessors", lambda device: 1)
    adapters = MIXES["all kinds"]
    layer, bank, x, out = make(name, len(adapters), torch.float32)
    rows = rows_of(adapters, bank, on_triton=True)
    expected = dense(layer, bank, x, out, adapters)
    if name == "large":
        found = lora.activate_with_low_rank(out.clone(), x, rows, bank, layer, "silu")
        torch.testing.assert_close(found, ACTIVATE_AND_MUL["silu"](expected), rtol=1e-4, atol=1e-4)
    lora.add_low_rank(out, x, rows, bank, layer)
    torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-4)


def test_tiles_are_of_one_adapter_each() -> None:
    """And hold what the products have to know of it."""
    adapters = ([3, 1, 0] * 40)[:110] + [3] * 30
    layer = make_layer(32, [(48, 0), (16, 1)], DEVICE)
    bank = make_bank(layer, [[16, 40, 8, 1, 2], [0, 3, 8, 1, 2]], torch.float32, DEVICE)
    rows = lora_rows.group_rows(torch.tensor(adapters, dtype=torch.int32, device=DEVICE), bank)
    tiles = rows.tiles
    assert tiles is not None
    num_with, num_all = tiles.num_tiles.tolist()
    covered: dict[int, list[int]] = {}
    for tile, count in enumerate(tiles.counts[:num_all].tolist()):
        assert 0 < count <= rows.row_tile
        mine = tiles.order[tile, :count].tolist()
        (adapter,) = {adapters[row] for row in mine}
        covered.setdefault(adapter, []).extend(mine)
        assert (adapter == 0) == (tile >= num_with)
        if adapter == 0:
            assert not tiles.ranks[tile].any()
            assert not tiles.scales[tile].any()
        else:
            assert torch.equal(tiles.pages[tile], bank.page_table[adapter - 1])
            assert torch.equal(tiles.ranks[tile], bank.ranks[adapter - 1])
            assert torch.equal(tiles.scales[tile], bank.scales[adapter - 1])
    assert [*covered] == [1, 3, 0]
    for adapter, found in covered.items():
        assert found == [row for row, of_row in enumerate(adapters) if of_row == adapter]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_many_rows_have_larger_tiles(dtype: torch.dtype) -> None:
    """Those of prompts."""
    adapters = [1] * 700 + [0] * 100 + [3] * 300 + [2]
    layer, bank, x, out = make("one", len(adapters), dtype)
    expected = dense(layer, bank, x, out, adapters)
    rows = rows_of(adapters, bank, on_triton=True)
    assert rows.row_tile == 64
    lora.add_low_rank(out, x, rows, bank, layer)
    torch.testing.assert_close(out.float(), expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_tokens_of_rows_get_the_adapters_of_slots() -> None:
    adapters = torch.tensor([3, 0, 1, 2], dtype=torch.int32, device=DEVICE)
    slots = torch.tensor([2, 0, 1, 3], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 1, 1, 4, 4], dtype=torch.int32, device=DEVICE)
    out = torch.full((6,), -1, dtype=torch.int32, device=DEVICE)
    lora_rows.spread_adapters(adapters, slots, starts, out)
    assert out.tolist() == [1, 0, 0, 0, -1, -1]
    if not HAS_GPU:
        out.fill_(-1)
        reference.spread_adapters(adapters, slots, starts, out)
        assert out.tolist() == [1, 0, 0, 0, -1, -1]


@pytest.mark.skipif(not HAS_GPU, reason="needs a GPU")
def test_one_graph_serves_every_mix() -> None:
    layer, bank, x, out = make("one", 1500, torch.bfloat16)
    adapters = torch.zeros(1500, dtype=torch.int32, device=DEVICE)
    result = torch.empty_like(out)

    def run() -> None:
        rows = lora_rows.group_rows(adapters, bank)
        result.copy_(out)
        lora.add_low_rank(result, x, rows, bank, layer)

    run()
    graph, _ = captured(run)
    for mix in MIXES.values():
        chosen = (mix * 1500)[:1500]
        adapters.copy_(torch.tensor(chosen, dtype=torch.int32))
        graph.replay()
        expected = dense(layer, bank, x, out, chosen)
        torch.testing.assert_close(result.float(), expected, rtol=3e-2, atol=3e-2)

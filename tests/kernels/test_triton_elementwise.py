"""The Triton kernels of a layer against their plain-torch references."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from expert_cases import CLAMPED_SILU

from kernel_device import DEVICE, DTYPES, MARKS, TOLERANCE
from nvcli.kernels import norm as norm_reference
from nvcli.kernels import rotary as rotary_reference
from nvcli.kernels.activation import (
    activate_and_mul,
    gelu_tanh_above_and_mul,
    gelu_tanh_and_mul,
    gelu_tanh_times,
    silu_and_mul,
    sums_of_gates,
)
from nvcli.kernels.bounds import clamp_parts, clamp_to_each, soft_cap
from nvcli.kernels.chosen_keys import split_rows
from nvcli.kernels.elementwise_settings import PlainActivation
from nvcli.kernels.embedding import embed_part
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.gates import gate_rows, gate_values
from nvcli.kernels.patch_attention import rotate_patches
from nvcli.kernels.patch_types import HeadNorms
from nvcli.kernels.plain_activation import activate as activate_plain
from nvcli.kernels.residual_gate_settings import ResidualGates
from nvcli.kernels.residual_gates import add_through_gate
from nvcli.kernels.triton.elementwise import (
    activation,
    bounds,
    embedding,
    gates,
    norm,
    plain_activation,
    residual_gates,
    rotary,
)
from nvcli.kernels.xielu import XIELU

pytestmark = [*MARKS, pytest.mark.parametrize("dtype", DTYPES)]


def rand(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """On the CPU, where the reference is computed."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    assert actual.dtype == expected.dtype
    torch.testing.assert_close(actual.cpu(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("size", [1, 48, 64, 1000, 1024, 5120])
def test_rms_norm(size: int, dtype: torch.dtype) -> None:
    x, weight = rand(3, size, dtype=dtype), rand(size, dtype=dtype, seed=1)
    out = norm.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-6)
    assert_close(out, norm_reference.rms_norm(x, weight, 1e-6))


@pytest.mark.parametrize("size", [1, 48, 1000])
def test_norms_of_rows_without_their_mean(size: int, dtype: torch.dtype) -> None:
    """LayerNorm, alone without a bias; its weight may be kept in float32."""
    x, delta, weight, bias = (
        rand(3, size, dtype=dtype) + 1,
        rand(3, size, dtype=dtype, seed=2),
        rand(size, dtype=torch.float32),
        rand(size, dtype=dtype, seed=3),
    )
    out = norm.rms_norm(x.to(DEVICE), weight.to(DEVICE), 1e-5, is_centered=True)
    assert_close(out, norm_reference.rms_norm(x, weight, 1e-5, is_centered=True))
    args = delta.to(DEVICE), x.to(DEVICE, copy=True), weight.to(DEVICE)
    out = norm.add_rms_norm(*args, 1e-5, is_centered=True, bias=bias.to(DEVICE))
    assert_close(out, norm_reference.add_rms_norm(delta, x, weight, 1e-5, is_centered=True, bias=bias))


def test_norms_of_parts_that_ranks_share(dtype: torch.dtype) -> None:
    wide, sizes, widths = rand(5, 300, dtype=dtype), (130, 40), (260, 50)
    weights = tuple(rand(size, dtype=dtype, seed=size) for size in sizes)
    results = []
    for module, device in ((norm_reference, torch.device("cpu")), (norm, DEVICE)):
        x = wide.to(device, copy=True)[:, 7 : 7 + sum(sizes)]
        squares = module.squares_of_parts(x, sizes)
        module.norm_shared_parts(x, squares, tuple(weight.to(device) for weight in weights), 0.1, widths)
        results.append((squares, x))
    for wanted, found in zip(*results, strict=True):
        assert_close(found, wanted)


@pytest.mark.parametrize("norms", [None, "queries and keys", "values, too"])
def test_rotation_of_patches(norms: str | None, dtype: torch.dtype) -> None:
    qkv, cos_sin, *weights = (
        rand(5, 3, 3, 72, dtype=dtype), rand(5, 72, dtype=torch.float32, seed=1),
        *(rand(72, dtype=dtype, seed=seed) for seed in (2, 3)),
    )  # fmt: skip
    expected, found = qkv.clone(), qkv.to(DEVICE, copy=True)
    for of, angles in ((expected, cos_sin), (found, cos_sin.to(DEVICE))):
        queries, keys = (weight.to(of.device) for weight in weights)
        own = None if norms is None else HeadNorms(queries, keys, 1e-6, of_values=norms == "values, too")
        rotate_patches(of, angles, own) if of is expected else rotary.rotate_patches(of, angles, own)
    assert_close(found, expected)
    assert torch.equal(expected[:, 2], qkv[:, 2]) == (norms != "values, too")


def test_bounds(dtype: torch.dtype) -> None:
    x, low, high = rand(5, 3 * 1025, dtype=dtype), rand(3, dtype=dtype) - 1, rand(3, dtype=dtype, seed=1).abs()
    x[1, 1] = float("nan")
    found = bounds.clamp_to_each(x.to(DEVICE), low.to(DEVICE), high.to(DEVICE))
    torch.testing.assert_close(found.cpu(), clamp_to_each(x, low, high), rtol=0, atol=0, equal_nan=True)
    in_place = x.to(DEVICE, copy=True)
    bounds.clamp_parts(in_place, low.to(DEVICE), high.to(DEVICE))
    clamp_parts(x, low, high)
    torch.testing.assert_close(in_place.cpu(), x, rtol=0, atol=0, equal_nan=True)


def test_soft_cap(dtype: torch.dtype) -> None:
    x = 40 * rand(3, 3000, dtype=dtype)
    x[0, :4] = torch.tensor([torch.nan, torch.inf, -torch.inf, 1e-3])
    found = bounds.soft_cap(x.to(DEVICE, copy=True), 30.0)
    torch.testing.assert_close(found.cpu(), soft_cap(x, 30.0), atol=1e-5, rtol=TOLERANCE[dtype], equal_nan=True)


@pytest.mark.parametrize("num_parts", [1, 3])
def test_norm_of_a_sum_of_parts(num_parts: int, dtype: torch.dtype) -> None:
    parts, weight = rand(num_parts, 4, 100, dtype=torch.float32), rand(100, dtype=dtype, seed=1)
    out = norm.sum_rms_norm(parts.to(DEVICE), weight.to(DEVICE), 1e-6, dtype)
    assert_close(out, norm_reference.sum_rms_norm(parts, weight, 1e-6, dtype))


def test_rms_norm_of_rows_that_lie_apart(dtype: torch.dtype) -> None:
    wide, weight = rand(2, 3, 96, dtype=dtype), rand(40, dtype=dtype, seed=1)
    out = norm.rms_norm(wide.to(DEVICE)[..., 8:48], weight.to(DEVICE), 1e-6)
    assert_close(out, norm_reference.rms_norm(wide[..., 8:48], weight, 1e-6))


@pytest.mark.parametrize("size", [1, 100, 2048])
def test_add_rms_norm_updates_the_residual(size: int, dtype: torch.dtype) -> None:
    delta, residual, weight = rand(4, size, dtype=dtype), rand(4, size, dtype=dtype, seed=1), rand(size, dtype=dtype)
    residual_here = residual.to(DEVICE, copy=True)
    out = norm.add_rms_norm(delta.to(DEVICE), residual_here, weight.to(DEVICE), 1e-5)
    expected = norm_reference.add_rms_norm(delta, residual, weight, 1e-5)
    assert torch.equal(residual_here.cpu(), residual)  # rounded as torch rounds
    assert_close(out, expected)


@pytest.mark.parametrize("num_parts", [None, 1, 3])
@pytest.mark.parametrize("scaled", [True, False])
def test_norms_added_to_the_residual(num_parts: int | None, scaled: bool, dtype: torch.dtype) -> None:
    """The norm of one row, or of a sum of float32 parts; the sum with the residual may be multiplied."""
    x = rand(4, 100, dtype=dtype) if num_parts is None else rand(num_parts, 4, 100, dtype=torch.float32)
    residual, weight = rand(4, 100, dtype=dtype, seed=1), rand(100, dtype=dtype, seed=2)
    scalar = torch.tensor([0.6], dtype=dtype) if scaled else None
    found = residual.to(DEVICE, copy=True)
    moved = x.to(DEVICE), found, weight.to(DEVICE)
    norm.add_normed(*moved, 1e-6, None if scalar is None else scalar.to(DEVICE))
    norm_reference.add_normed(x, residual, weight, 1e-6, scalar)
    assert_close(found, residual)


@pytest.mark.parametrize("num_parts", [None, 2])
@pytest.mark.parametrize("scaled", [True, False])
def test_results_through_gates(num_parts: int | None, scaled: bool, dtype: torch.dtype) -> None:
    """The last channel's gate is so open that nearly nothing of the stream is kept."""
    x = rand(4, 100, dtype=dtype) if num_parts is None else rand(num_parts, 4, 100, dtype=torch.float32)
    residual, gate = rand(4, 100, dtype=dtype, seed=1), rand(100, dtype=torch.float32, seed=2)
    gate[-1] = 9.0
    scale = rand(100, dtype=torch.float32, seed=3) if scaled else None
    settings = ResidualGates(temperature=0.3, norm_eps=1e-6)
    found = residual.to(DEVICE, copy=True)
    residual_gates.add_through_gate(
        x.to(DEVICE), found, gate.to(DEVICE), None if scale is None else scale.to(DEVICE), settings
    )
    add_through_gate(x, residual, gate, scale, settings)
    assert_close(found, residual)


@pytest.mark.parametrize("size", [1, 20, 1024, 1500])
def test_silu_and_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = rand(3, 2 * size, dtype=dtype)
    assert_close(activation.silu_and_mul(gate_up.to(DEVICE)), silu_and_mul(gate_up))
    plain = ExpertActivation(kind="gelu"), ExpertActivation(kind="gated_relu2")
    for kind in (CLAMPED_SILU, ExpertActivation(kind="clamped_swiglu", limit=0.5), *plain):
        assert_close(activation.activate_and_mul(gate_up.to(DEVICE), kind), activate_and_mul(gate_up, kind))


@pytest.mark.parametrize("size", [1, 1500])
def test_gelu_tanh_and_mul(size: int, dtype: torch.dtype) -> None:
    gate_up = rand(3, 2 * size, dtype=dtype)
    assert_close(activation.gelu_tanh_and_mul(gate_up.to(DEVICE)), gelu_tanh_and_mul(gate_up))
    sums = sums_of_gates(gate_up)
    assert_close(activation.sums_of_gates(gate_up.to(DEVICE)), sums)
    of_both_ranks = 2 * sums, 2 * size, 0.7
    found = activation.gelu_tanh_above_and_mul(gate_up.to(DEVICE), of_both_ranks[0].to(DEVICE), *of_both_ranks[1:])
    assert_close(found, gelu_tanh_above_and_mul(gate_up, *of_both_ranks))


def test_gelu_times_rows_that_lie_apart(dtype: torch.dtype) -> None:
    gate, wide = rand(3, 1500, dtype=dtype), rand(3, 2, 1500, dtype=dtype, seed=1)
    found = activation.gelu_tanh_times(gate.to(DEVICE), wide.to(DEVICE)[:, 1])
    assert_close(found, gelu_tanh_times(gate, wide[:, 1]))


@pytest.mark.parametrize("size", [1, 48, 3000])
def test_gates(size: int, dtype: torch.dtype) -> None:
    """One gate for each number, from rows that lie apart, and one for each row."""
    values, wide, x = (rand(5, n, dtype=dtype, seed=n) for n in (size, 2 * size, 100))
    weight = rand(1, 100, dtype=dtype) / 8
    found = gates.gate_values(values.to(DEVICE, copy=True), wide.to(DEVICE)[:, size:], "sigmoid")
    assert_close(found, gate_values(values.clone(), wide[:, size:]))
    found = gates.gate_rows(values.to(DEVICE, copy=True), x.to(DEVICE), weight.to(DEVICE))
    assert_close(found, gate_rows(values.clone(), x, weight))


def test_gates_of_heads(dtype: torch.dtype) -> None:
    """A gate for 12 neighbours each, by softplus, also where that is its argument."""
    values, heads = rand(5, 4 * 12, dtype=dtype), 10 * rand(5, 4, dtype=dtype, seed=1)
    found = gates.gate_values(values.to(DEVICE, copy=True), heads.to(DEVICE), "softplus")
    expected = gate_values(values.clone(), heads, "softplus")
    assert_close(found, expected)
    factors = torch.nn.functional.softplus(heads.double()).repeat_interleave(12, 1)
    torch.testing.assert_close(expected.double(), values.double() * factors, atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("kind", get_args(PlainActivation))
def test_activations_without_a_gate(kind: PlainActivation, dtype: torch.dtype) -> None:
    """Small and large numbers of both signs; relu² of what is no number is none either."""
    x = torch.cat((rand(3, 700, dtype=dtype), 2 * rand(3, 9, dtype=dtype), 1e-3 * rand(3, 9, dtype=dtype)), dim=1)
    x[0, :3] = torch.tensor([torch.nan, 0.0, -0.0])
    numbers = XIELU(*torch.tensor([[0.3], [0.9], [0.5], [-1e-6]]))
    moved = XIELU(*(number.to(DEVICE) for number in numbers))
    found = plain_activation.activate(x.to(DEVICE, copy=True), kind, moved)
    expected = activate_plain(x.clone(), kind, numbers)
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance, equal_nan=True)


@pytest.mark.parametrize("size", [8, 100, 2048])
def test_parts_of_an_embedding_add_up_to_it(size: int, dtype: torch.dtype) -> None:
    weight, ids = rand(30, size, dtype=dtype), torch.tensor([0, 29, 15, 14, 3, 14], dtype=torch.int32)
    for start, end in ((0, 15), (15, 30), (30, 30)):
        part = weight[start:end] if end > start else torch.zeros(2, size, dtype=dtype)  # only padding
        out = torch.full((6, size), 7.0, dtype=dtype, device=DEVICE)
        found = embedding.embed_part(ids.to(DEVICE), part.to(DEVICE), start, out)
        assert found is out
        expected = torch.where(((ids >= start) & (ids < end))[:, None], weight[ids], 0)
        assert torch.equal(found.cpu(), expected)
        assert torch.equal(embedding.embed_part(ids.to(DEVICE), part.to(DEVICE), start, None), found)
        assert torch.equal(embed_part(ids, part, start), expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("keep_keys", [True, False])
@pytest.mark.parametrize("norms", ["first", "last", "values, too", "none"])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim"),
    [(2, 1, 8), (4, 4, 64), (14, 2, 64), (40, 20, 16), (5, 5, 80), (6, 3, 96), (16, 8, 128), (8, 1, 128), (2, 1, 256)],
)
def test_qk_norm_rope_store(
    num_heads: int, num_kv_heads: int, head_dim: int, norms: str, keep_keys: bool, dtype: torch.dtype
) -> None:
    num_tokens, num_blocks, block_size = 5, 4, 16
    value_dim = 64 if head_dim == 96 and norms != "values, too" else head_dim
    qkv = rand(num_tokens, (num_heads + num_kv_heads) * head_dim + num_kv_heads * value_dim, dtype=dtype)
    angles = torch.rand(num_tokens, head_dim // 2, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    caches = rand(2, num_blocks, block_size, num_kv_heads, head_dim, dtype=dtype, seed=2)
    slots = torch.tensor([3 * 16 + 15, 2 * 16, 0, 16 + 7, 5])
    weights = rand(2, head_dim, dtype=dtype, seed=3)

    def call(function, device):  # type: ignore[no-untyped-def]
        moved = caches.to(device, copy=True)
        q_weight, k_weight = (None, None) if norms == "none" else weights.to(device)
        q, k, v = function(
            qkv.to(device, copy=True),
            cos_sin.to(device),
            moved[0],
            moved[1][..., :value_dim],
            slots.to(device),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            q_weight=q_weight,
            k_weight=k_weight,
            eps=1e-6,
            keep_keys=keep_keys,
            norms_last=norms == "last",
            norms_values=norms == "values, too",
            value_factor=1.0 if value_dim == head_dim else 0.7,
        )
        return q, k, v, moved

    q, k, v, stored = call(rotary.qk_norm_rope_store, DEVICE)
    expected_q, expected_k, expected_v, expected_stored = call(rotary_reference.qk_norm_rope_store, "cpu")
    assert q.is_contiguous()
    assert_close(q, expected_q)
    assert (k is not None) == (expected_k is not None) == keep_keys
    if k is not None:
        assert_close(k, expected_k)
        # What attention reads later is what it is given now.
        assert torch.equal(stored[0].flatten(0, 1)[slots.to(DEVICE)], k)
        assert torch.equal(stored[1].flatten(0, 1)[slots.to(DEVICE)][..., :value_dim], v)
        assert_close(v, expected_v)
    assert_close(stored, expected_stored)
    if norms != "values, too" and value_dim == head_dim:
        assert torch.equal(v.cpu(), expected_v)
        assert torch.equal(stored.cpu()[1], expected_stored[1])
    # No other slot was touched.
    others = torch.ones(num_blocks * block_size, dtype=torch.bool)
    others[slots] = False
    assert torch.equal(stored.cpu().flatten(1, 2)[:, others], caches.flatten(1, 2)[:, others])


@pytest.mark.parametrize("norms", ["first", "last", "none"])
@pytest.mark.parametrize("rotates", [True, False])
def test_queries_alone(norms: str, rotates: bool, dtype: torch.dtype) -> None:
    """Of a layer that reads another's keys, from rows that lie apart."""
    wide, weight = rand(5, 20 * 32 + 8, dtype=dtype), None if norms == "none" else rand(32, dtype=dtype, seed=1)
    angles = torch.rand(5, 16, generator=torch.Generator().manual_seed(1)) * 6
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1) if rotates else None

    def call(function, device):  # type: ignore[no-untyped-def]
        queries = wide.to(device)[:, : 20 * 32].view(5, 20, 32)
        there = (None if tensor is None else tensor.to(device) for tensor in (cos_sin, weight))
        return function(queries, *there, 1e-6, norms_last=norms == "last")

    assert_close(call(rotary.norm_rope, DEVICE), call(rotary_reference.norm_rope, "cpu"))


@pytest.mark.parametrize("normed", [True, False])
def test_heads_that_do_not_rotate_in_blocks_that_lie_apart(normed: bool, dtype: torch.dtype) -> None:
    """Layers without rotary positions, and a cache whose blocks hold other layers too; where heads are normed, each
    token's keys and values stand side by side between other numbers."""
    qkv, weight = rand(5, (4 + 2 * 2) * 32, dtype=dtype), rand(32, dtype=torch.float32, seed=3) if normed else None
    slots = torch.tensor([3 * 16 + 15, 2 * 16, 0, 16 + 7, 5])

    def call(function, device):  # type: ignore[no-untyped-def]
        pool = torch.zeros(4, 5 * 16 * 2 * 32, dtype=dtype, device=device)
        k_cache, v_cache = (part.view(4, 16, 2, 32) for part in pool[:, 1024:3072].chunk(2, dim=1))
        if normed:
            k_cache, v_cache = split_rows(pool.view(4, 16, 320)[..., 32:160], 2)
        here = None if weight is None else weight.to(device)
        q, _, v = function(
            qkv.to(device, copy=True),
            None,
            k_cache,
            v_cache,
            slots.to(device),
            num_heads=4,
            num_kv_heads=2,
            q_weight=here,
            k_weight=here,
            eps=1e-6,
            keep_keys=False,
        )
        return q, v, pool

    for found, expected in zip(
        call(rotary.qk_norm_rope_store, DEVICE), call(rotary_reference.qk_norm_rope_store, "cpu"), strict=True
    ):
        assert_close(found, expected)


def test_no_rows_are_no_work(dtype: torch.dtype) -> None:
    nothing, weight = torch.empty(0, 64, dtype=dtype, device=DEVICE), torch.ones(64, dtype=dtype, device=DEVICE)
    assert norm.add_rms_norm(nothing, nothing.clone(), weight, 1e-6).shape == (0, 64)
    assert activation.silu_and_mul(nothing).shape == (0, 32)

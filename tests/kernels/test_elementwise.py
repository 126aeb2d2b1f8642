"""The plain-torch references of the elementwise kernels against formulas written out in float64."""

from __future__ import annotations

import pytest
import torch

from nvcli.kernels.activation import gelu_tanh_and_mul, silu_and_mul
from nvcli.kernels.norm import add_rms_norm, rms_norm
from nvcli.kernels.rotary import apply_rope, qk_norm_rope_store

DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])


@DTYPES
def test_rms_norm(dtype: torch.dtype, tolerance: float) -> None:
    x, weight = torch.randn(5, 48).to(dtype), torch.randn(48).to(dtype)
    x64 = x.double()
    expected = x64 / (x64.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), expected, atol=tolerance, rtol=tolerance)


def test_layer_norm_is_the_norm_of_rows_without_their_mean() -> None:
    x, weight = torch.randn(5, 48) + 2, torch.randn(48)
    expected = torch.nn.functional.layer_norm(x, (48,), weight, eps=1e-5)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, is_centered=True), expected)
    torch.testing.assert_close(rms_norm(x, weight, 1e-5, is_centered=True, bias=weight), expected + weight)


def test_add_rms_norm_updates_the_residual() -> None:
    delta, residual, weight = torch.randn(5, 48), torch.randn(5, 48), torch.randn(48)
    total = delta + residual
    out = add_rms_norm(delta, residual, weight, 1e-5)
    torch.testing.assert_close(residual, total)
    torch.testing.assert_close(out, rms_norm(total, weight, 1e-5))


@DTYPES
def test_silu_and_mul(dtype: torch.dtype, tolerance: float) -> None:
    gate_up = torch.randn(7, 20).to(dtype)
    gate, up = gate_up.double().chunk(2, dim=-1)
    out = silu_and_mul(gate_up)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), gate / (1 + (-gate).exp()) * up, atol=tolerance, rtol=tolerance)


def test_gelu_tanh_and_mul() -> None:
    gate_up = torch.randn(7, 20)
    gate, up = gate_up.double().chunk(2, dim=-1)
    expected = gate / 2 * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3))) * up
    torch.testing.assert_close(gelu_tanh_and_mul(gate_up).double(), expected, atol=1e-5, rtol=1e-5)


def test_rope_turns_pairs_by_their_angle() -> None:
    """Dimensions i and i + D/2 are a point in the plane; it keeps its length and turns by the angle."""
    x, angles = torch.randn(3, 2, 8), torch.rand(3, 4) * 6
    out = apply_rope(x, torch.cat((angles.cos(), angles.sin()), dim=-1))
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(3, 1, 4), angles.unsqueeze(1))
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), dim=-1))


@pytest.mark.parametrize("normed", [True, False])
def test_qk_norm_rope_store_cuts_norms_rotates_and_stores(normed: bool) -> None:
    qkv, angles = torch.randn(3, (4 + 2 + 2) * 8), torch.rand(3, 4)
    cos_sin = torch.cat((angles.cos(), angles.sin()), dim=-1)
    q_weight, k_weight = (torch.randn(8), torch.randn(8)) if normed else (None, None)
    k_cache, v_cache = torch.zeros(2, 4, 5, 2, 8)  # 4 blocks of 5 tokens
    q, k, v = qk_norm_rope_store(
        qkv.clone(),
        cos_sin,
        k_cache,
        v_cache,
        torch.tensor([13, 4, 5]),
        num_heads=4,
        num_kv_heads=2,
        q_weight=q_weight,
        k_weight=k_weight,
        eps=1e-6,
        keep_keys=True,
    )
    assert k is not None
    heads = qkv.view(3, 8, 8)
    raw_q, raw_k = heads[:, :4], heads[:, 4:6]
    if q_weight is not None and k_weight is not None:
        raw_q, raw_k = rms_norm(raw_q, q_weight, 1e-6), rms_norm(raw_k, k_weight, 1e-6)
    torch.testing.assert_close(q, apply_rope(raw_q, cos_sin))
    torch.testing.assert_close(k, apply_rope(raw_k, cos_sin))
    torch.testing.assert_close(v, heads[:, 6:])
    for cache, new in ((k_cache, k), (v_cache, v)):
        expected = torch.zeros(4, 5, 2, 8)
        expected[2, 3], expected[0, 4], expected[1, 0] = new
        assert torch.equal(cache, expected)

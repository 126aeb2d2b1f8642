"""The gates of recurrent layers in Triton, as `kernels/recurrent_types.py` defines them."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def read_gates(
    gates, token, head, is_token, beta_stride, step_stride, RULE: tl.constexpr, BETA_SCALE: tl.constexpr = 1.0
):
    """Return the factors of what tokens write, and the logarithms of their decays: -exp(log_rate) × Δ. The step size Δ
    is softplus(step + step_bias); the factor is sigmoid(beta) × BETA_SCALE in the delta rule, and Δ in the selective
    scan."""
    step = tl.load(gates.step + token * step_stride + head, mask=is_token, other=0.0).to(tl.float32)
    log_rate = tl.load(gates.log_rate + head).to(tl.float32)
    x = step + tl.load(gates.step_bias + head).to(tl.float32)
    e = tl.exp(tl.minimum(x, 20.0))
    # Three terms of the series of log(1 + e), where the sum would lose most of a small e.
    softplus = tl.where(e < 0.01, e * (1.0 - e * (0.5 - e / 3.0)), tl.log(1.0 + e))
    softplus = tl.where(x > 20.0, x, softplus)
    if RULE == "delta":
        factor = tl.sigmoid(tl.load(gates.beta + token * beta_stride + head, mask=is_token, other=0.0).to(tl.float32))
        if BETA_SCALE != 1.0:
            factor *= BETA_SCALE
    else:
        factor = softplus
    return factor, -tl.exp(log_rate) * softplus

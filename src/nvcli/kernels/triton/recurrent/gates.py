"""The gates of recurrent layers in Triton, as `kernels/recurrent_types.py` defines them."""

from __future__ import annotations

import triton
import triton.language as tl

from nvcli.kernels.triton.elementwise.activation import softplus

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def read_rates(gates, i, j, inside, KEY_DIM: tl.constexpr):
    """Return the logarithms of the decays of a state's numbers in a step of size 1, in a scan by channels, for `i` of
    its key and `j` of its values, which broadcast; outside `inside` -1."""
    log_rates = tl.load(gates.log_rate + j * KEY_DIM + i, mask=inside, other=0.0)
    return -tl.exp(log_rates.to(tl.float32))


@triton.jit
def read_beta(gates, token, head, is_token, beta_stride, BETA_SCALE: tl.constexpr):
    """Return the factors of what tokens write by the delta rule: sigmoid(beta) × BETA_SCALE."""
    factor = tl.sigmoid(tl.load(gates.beta + token * beta_stride + head, mask=is_token, other=0.0).to(tl.float32))
    if BETA_SCALE != 1.0:
        factor *= BETA_SCALE
    return factor


@triton.jit
def read_decays(gates, token, head, channel, mask, step_stride, HEADS: tl.constexpr):
    """Return the logarithms of the decays of rows `channel` of a head's state, where each row has its own; 0 outside
    `mask`. `token` and `channel` have the shape of the result."""
    at = head * HEADS.key_dim + channel
    step = tl.load(gates.step + token * step_stride + at, mask=mask, other=0.0).to(tl.float32)
    bias = tl.load(gates.step_bias + at, mask=mask, other=0.0).to(tl.float32)
    rate = tl.exp(tl.load(gates.log_rate + head).to(tl.float32))
    if HEADS.lowest_decay is not None:
        return tl.where(mask, HEADS.lowest_decay * tl.sigmoid(rate * (step + bias)), 0.0)
    return tl.where(mask, -rate * softplus(step + bias), 0.0)


@triton.jit
def read_step_sizes(step_ptr, j, mask, bias):
    """Return the step sizes of channels `j` of a token whose numbers begin at `step_ptr`; 0 outside `mask`."""
    step = tl.load(step_ptr + j, mask=mask, other=0.0).to(tl.float32)
    return tl.where(mask, softplus(step + bias), 0.0)


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
    size = softplus(x)
    factor = read_beta(gates, token, head, is_token, beta_stride, BETA_SCALE) if RULE == "delta" else size
    return factor, -tl.exp(log_rate) * size

"""The experts of a layer: each token's MLPs, which its router chose. Plain torch is the reference; CUDA tensors
take the Triton kernels that are held to it, which wait for nothing on the host.

Weights are numbers like x, or in FP8 (`kernels/fp8.py`) or 4 bits (`kernels/w4.py`), with scales. Where they are in
FP8, what tokens bring and what experts make in between are quantised as they come, or multiplied as they are.

A *pair* is a token with one of its experts; pair p is choice p % k of token p // k. Shapes: T tokens, H hidden, E
experts, k experts per token, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels import w4
from nvcli.kernels.activation import activate_and_mul
from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.expert_settings import ExpertActivation
from nvcli.kernels.expert_types import ExpertMatrix, ExpertScales, ExpertWeights, Routes, W4Scales, matrices
from nvcli.kernels.fp8 import fp8_linear, fp8_weight_linear, quantise, values_of_rows
from nvcli.kernels.invariant_linear import invariant_linear, row_by_row
from nvcli.kernels.norm import sum_in_order


class ExpertGroups(NamedTuple):
    """Pairs sorted by expert."""

    order: Tensor
    """[T × k] int32: the pairs, those of expert 0 first, in ascending order for each expert."""
    counts: Tensor
    """[E] int64: how many pairs each expert has."""


def group_by_expert(experts: Tensor, num_experts: int) -> ExpertGroups:
    """Sort the pairs by expert. experts: [T, k] int32."""
    flat = experts.flatten()
    return ExpertGroups(flat.argsort(stable=True).int(), flat.bincount(minlength=num_experts))


def apply_experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    activation: ExpertActivation,
    out: Tensor | None = None,
    *,
    scales: ExpertScales | W4Scales | None = None,
    quantises: bool = True,
    batch_invariant: bool = False,
) -> Tensor:
    """Compute each pair's result times its weight: [T, H] → [k, T, H], in `out` (contiguous) if that is given.

    What would be results of experts that other ranks hold is undefined. A token's sum over k is still to be taken of it
    (`sum_results`); `add_rms_norm` takes it as it is. `quantises`: activations are quantised for weights in FP8, which
    GPUs without FP8 units cannot multiply. `batch_invariant`: a pair's result has the same bits whatever other pairs
    there are; weights are plain.
    """
    num_tokens, experts_per_token = routes.experts.shape
    if out is None:
        out = torch.empty(experts_per_token, num_tokens, x.shape[1], dtype=x.dtype, device=x.device)
    if num_tokens == 0:
        return out
    quantises = quantises and (isinstance(scales, ExpertScales) or (scales is not None and scales.is_for_fp8))
    if x.is_cuda:
        from nvcli.kernels.triton.products import experts as kernels

        kernels.apply_experts(
            x, routes, weights, scales, activation, out, quantises=quantises, batch_invariant=batch_invariant
        )
        return out
    product = partial(_multiply, quantises=quantises, batch_invariant=batch_invariant)
    gate_up_matrix, down_matrix = matrices(weights, scales)
    for expert, token, choice in pairs_of_experts(routes, weights):
        gate_up = product(x[token], gate_up_matrix.of_expert(expert))
        activated = partial(activate, activation=activation)
        hidden = row_by_row(activated, gate_up) if batch_invariant else activated(gate_up)
        down = product(hidden, down_matrix.of_expert(expert))
        out[choice, token] = (down * routes.weights[token, choice, None]).to(x.dtype)
    return out


@with_kernel("elementwise.results")
def sum_results(
    parts: Tensor, experts: Tensor | None = None, held: tuple[int, int] = (0, 0), out: Tensor | None = None
) -> Tensor:
    """Add up parts [P, T, H], the first one first, in float32: [T, H] of their type, in `out` if that is given.

    With `experts` [T, k] int32 the first k parts are results of these, of which only those of the experts that are
    `held`, the first one and how many, count.
    """
    if experts is not None:
        first, count = held
        is_held = (experts >= first) & (experts < first + count)
        results, others = parts.tensor_split([experts.shape[1]])
        parts = torch.cat([results.where(is_held.T.unsqueeze(2), 0), others])
    total = sum_in_order(parts)
    return total if out is None else out.copy_(total)


def _multiply(x: Tensor, matrix: ExpertMatrix, *, quantises: bool, batch_invariant: bool) -> Tensor:
    """x Wᵀ + b for one expert's matrix: [T, in] → [T, out]."""
    weight, bias, scales = matrix.weight, matrix.bias, matrix.scales
    if scales is None:
        return invariant_linear(x, weight, bias) if batch_invariant else F.linear(x, weight, bias)
    if matrix.format is not None:
        values = w4.dequantise(weight, scales, x.shape[1], matrix.format)
        if quantises:
            x = values_of_rows(quantise(x, "channel")).to(x.dtype)
        return F.linear(x.float(), values, None if bias is None else bias.float()).to(x.dtype)
    if quantises:
        return fp8_linear(quantise(x, "channel" if scales.dim() == 1 else "block"), weight, scales, bias, None)
    return fp8_weight_linear(x, weight, scales, bias, None)


def pairs_of_experts(routes: Routes, weights: ExpertWeights) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yield each expert that is held and has pairs, with their tokens and choices, int64 both."""
    num_held, first, experts_per_token = len(weights.gate_up), weights.first_expert, routes.experts.shape[1]
    order, counts = group_by_expert(routes.experts, num_held + weights.num_others)
    groups = torch.split(order.long(), counts.tolist())
    for expert, pairs in enumerate(groups[first : first + num_held]):
        if len(pairs):
            yield expert, pairs // experts_per_token, pairs % experts_per_token


def activate(gate_up: Tensor, activation: ExpertActivation) -> Tensor:
    """Compute what an expert makes of its gate and up projections: [T, 2 I], or without a gate [T, I], → [T, I]."""
    if activation.kind == "relu2":
        return F.relu(gate_up).square()
    gate, up = gate_up.chunk(2, dim=-1)
    if activation.kind == "silu":
        return F.silu(gate) * up
    if activation.kind == "gelu_tanh":
        return F.gelu(gate, approximate="tanh") * up
    return activate_and_mul(gate_up, activation)

"""The experts of a layer with weights in FP8. Plain torch is the reference; CUDA tensors take the Triton kernels that
are held to it. What tokens bring and what experts make in between are quantised as they come (`kernels/fp8.py`), or
multiplied as they are.

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertScales, ExpertWeights, Routes
from nvcli.kernels.experts import activate, pairs_of_experts
from nvcli.kernels.fp8 import fp8_linear, fp8_weight_linear, quantise
from nvcli.kernels.fp8_types import Activations, QuantisedRows
from nvcli.kernels.weight_formats import FP8Scaling


def apply_fp8_experts(
    x: Tensor,
    routes: Routes,
    weights: ExpertWeights,
    scales: ExpertScales,
    activation: GatedActivation,
    out: Tensor,
    *,
    quantises: bool = True,
) -> None:
    """Do what `apply_experts` does, with weights e4m3 and without biases. x: [T, H]; out: [k, T, H], contiguous.

    Unless it `quantises`, activations are plain, which GPUs without FP8 units can multiply.
    """
    if len(x) == 0:
        return
    scaling: FP8Scaling = "channel" if scales.down.dim() == 2 else "block"
    rows = quantise(x, scaling) if quantises else x
    if x.is_cuda:
        from nvcli.kernels.triton import fp8_experts as kernels

        kernels.apply_fp8_experts(rows, routes, weights, scales, activation, out)
        return
    if weights.num_others:
        out.zero_()
    for expert, token, choice in pairs_of_experts(routes, weights):
        gate_up = _multiply(_rows_of(rows, token), weights.gate_up[expert], scales.gate_up[expert])
        hidden = activate(gate_up, activation)
        inner = quantise(hidden, scaling) if quantises else hidden
        down = _multiply(inner, weights.down[expert], scales.down[expert])
        out[choice, token] = (down * routes.weights[token, choice, None]).to(x.dtype)


def _rows_of(x: Activations, tokens: Tensor) -> Activations:
    if not isinstance(x, QuantisedRows):
        return x[tokens]
    codes = x.codes.view(torch.uint8)[tokens].view(x.codes.dtype)  # as bytes, which any device can index
    return QuantisedRows(codes, x.scales[tokens], x.dtype)


def _multiply(x: Activations, weight: Tensor, scales: Tensor) -> Tensor:
    if isinstance(x, QuantisedRows):
        return fp8_linear(x, weight, scales, None, None)
    return fp8_weight_linear(x, weight, scales, None, None)

"""The experts of a layer with weights in FP8. Plain torch is the reference; CUDA tensors take the Triton kernels that
are held to it. What tokens bring and what experts make in between are quantised as they come (`kernels/fp8.py`).

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertScales, ExpertWeights, Routes
from nvcli.kernels.experts import activate, pairs_of_experts
from nvcli.kernels.fp8 import fp8_linear, quantise
from nvcli.kernels.fp8_types import QuantisedRows


def apply_fp8_experts(
    x: Tensor, routes: Routes, weights: ExpertWeights, scales: ExpertScales, activation: GatedActivation, out: Tensor
) -> None:
    """Do what `apply_experts` does, with weights e4m3 and without biases. x: [T, H]; out: [k, T, H], contiguous."""
    if len(x) == 0:
        return
    rows = quantise(x, "channel" if scales.down.dim() == 2 else "block")
    if x.is_cuda:
        from nvcli.kernels.triton import fp8_experts as kernels

        kernels.apply_fp8_experts(rows, routes, weights, scales, activation, out)
        return
    if weights.num_others:
        out.zero_()
    for expert, token, choice in pairs_of_experts(routes, weights):
        # Codes are moved as bytes, which any device can index.
        codes = rows.codes.view(torch.uint8)[token].view(rows.codes.dtype)
        taken = QuantisedRows(codes, rows.scales[token], rows.dtype)
        gate_up = fp8_linear(taken, weights.gate_up[expert], scales.gate_up[expert], None, None)
        hidden = quantise(activate(gate_up, activation), rows.scaling)
        down = fp8_linear(hidden, weights.down[expert], scales.down[expert], None, None)
        out[choice, token] = (down * routes.weights[token, choice, None]).to(x.dtype)

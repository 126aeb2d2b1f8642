"""The experts of a layer with weights of 4 bits. Plain torch is the reference; CUDA tensors take the Triton kernels
that are held to it. How weights are kept is said in `kernels/w4.py`.

Shapes: T tokens, H hidden, E experts that are held, k experts per token, I intermediate size.
"""

from __future__ import annotations

from torch import Tensor

from nvcli.kernels.expert_settings import GatedActivation
from nvcli.kernels.expert_types import ExpertWeights, Routes, W4Scales
from nvcli.kernels.experts import activate, pairs_of_experts
from nvcli.kernels.w4 import dequantise


def apply_w4_experts(
    x: Tensor, routes: Routes, weights: ExpertWeights, scales: W4Scales, activation: GatedActivation, out: Tensor
) -> None:
    """Do what `apply_experts` does, with words for weights. x: [T, H]; out: [k, T, H], contiguous."""
    if len(x) == 0:
        return
    if x.is_cuda:
        from nvcli.kernels.triton import w4_choice

        w4_choice.apply_w4_experts(x, routes, weights, scales, activation, out)
        return
    if weights.num_others:
        out.zero_()
    hidden_size, size = x.shape[1], weights.gate_up.shape[1] // 2
    for expert, token, choice in pairs_of_experts(routes, weights):
        gate_up_weight = dequantise(weights.gate_up[expert], scales.gate_up[expert], hidden_size, scales.gate_up_format)
        gate_up = x[token].float() @ gate_up_weight.t()
        if weights.gate_up_bias is not None:
            gate_up += weights.gate_up_bias[expert]
        hidden = activate(gate_up.to(x.dtype), activation)
        down = hidden.float() @ dequantise(weights.down[expert], scales.down[expert], size, scales.down_format).t()
        if weights.down_bias is not None:
            down += weights.down_bias[expert]
        out[choice, token] = (down * routes.weights[token, choice, None]).to(x.dtype)

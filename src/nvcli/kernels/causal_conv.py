"""The short causal convolution of a recurrent layer, over each channel by itself, then SiLU or nothing. Plain torch is
the reference; CUDA tensors take the Triton kernels, which are tested against it.

Its state is the last D × (K - 1) inputs of a request. Shapes: T tokens, C channels, K taps, D tokens from one tap to
the next, R rows.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.kept_inputs import KeptInputs
from nvcli.kernels.state_rows import StateRows


@with_kernel("recurrent.causal_conv")
def causal_conv(
    x: Tensor,
    weight: Tensor,
    pool: Tensor,
    rows: StateRows,
    kept: KeptInputs | None = None,
    bias: Tensor | None = None,
    *,
    activates: bool = True,
    adds_input: bool = False,
    factor: Tensor | None = None,
    dilation: int = 1,
) -> Tensor:
    """Compute silu(Σ weight[:, i] × input D × (i - (K - 1)), plus the bias [C]) of each token, or the sum itself unless
    it `activates`, and store the last inputs of each row.

    x: [T, C], rows may be strided; weight: [C, K], the last tap is the token's own; pool: [num_blocks, D × (K - 1), C],
    the inputs of each block's last tokens, the latest last, written → [T, C]; dilation: D. Tokens that belong to no row
    get zeros. The states of rows with drafts are left unchanged; their inputs are written to `kept`, which only these
    rows need. Pool and kept inputs may be ranges of the channels of others. With `adds_input` a token's input is added
    to the sum, and `factor` [1] multiplies both.
    """
    num_single, history = rows.num_single_rows, pool.shape[1]
    activate = F.silu if activates else torch.clone
    taps, constant = weight.float().T, 0.0 if bias is None else bias.float()
    if adds_input:
        taps = torch.cat((taps[:-1], taps[-1:] + 1.0))
    if factor is not None:
        taps = taps * factor
    out = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    if num_single:
        sources, targets = rows.sources()[:num_single], rows.targets()
        before = torch.where((sources > 0)[:, None, None], pool[sources], 0)
        inputs = torch.cat((before.to(x.dtype), x[:num_single].unsqueeze(1)), dim=1)  # [R, D (K - 1) + 1, C]
        out[:num_single] = activate((inputs[:, ::dilation].float() * taps).sum(1) + constant)
        pool[targets] = inputs[:, 1:].to(pool.dtype)
    for start, end, source in rows.draft_spans():
        assert kept is not None
        before = torch.zeros_like(pool[0]) if source is None else pool[source]
        inputs = torch.cat((before.to(x.dtype), x[start:end]))  # [D (K - 1) + span, C]
        windows = inputs.unfold(0, history + 1, 1)[..., ::dilation].transpose(1, 2)  # [span, K, C]
        out[start:end] = activate((windows.float() * taps).sum(1) + constant)
        kept.inputs[start:end] = x[start:end]
    before = torch.zeros_like(pool[0])
    for start, end, begins_row, source, target in rows.spans():
        if begins_row:
            before = torch.zeros_like(pool[0]) if source is None else pool[source]
        inputs = torch.cat((before.to(x.dtype), x[start:end]))  # [D (K - 1) + span, C]
        convolved = F.conv1d(inputs.float().T, taps.T.unsqueeze(1), groups=len(weight), dilation=dilation)
        out[start:end] = activate(convolved.T + constant)
        before = inputs[len(inputs) - history :]
        if target:
            pool[target] = before.to(pool.dtype)
    return out

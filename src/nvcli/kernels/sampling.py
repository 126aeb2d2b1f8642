"""Choosing a token from logits, in plain torch. The definition that faster kernels are held to.

Shapes: N rows, V vocabulary. Rows are independent: nothing here depends on how rows are batched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.philox import token_uniforms


def greedy(logits: Tensor) -> Tensor:
    """[N, V] → [N] int64."""
    return logits.argmax(dim=-1)


def gumbel_max(
    logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor, rows: Tensor, samples: Tensor
) -> Tensor:
    """Sample from softmax(logits / temperature): the largest of logits / temperature + Gumbel noise. [N] int64.

    Where `temperature` is 0 the largest logit is taken. The noise of a token is a function of (seed, position, row,
    sample, token) alone, so that removing other tokens (top-k and the like) leaves it as it is.
    """
    noise = token_uniforms(seeds, positions, rows, samples, logits.shape[-1])
    noise = noise.log_().neg_().log_().neg_()
    is_greedy = (temperature == 0)[:, None]
    scaled = logits / torch.where(is_greedy, 1.0, temperature[:, None])
    return torch.where(is_greedy, scaled, scaled + noise).argmax(dim=-1)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what top-k, top-p and min-p leave out. `logits` are divided by the temperature already.

    top_k: [N], 0 is off. top_p: [N], the smallest set of most likely tokens (after top-k) whose probability reaches
    it. min_p: [N], tokens less likely than min_p × the likeliest. Each limit is a threshold on the logit: tokens of
    equal logit are kept or dropped together, so no order among them is needed.
    """
    vocab_size = logits.shape[-1]
    descending = logits.sort(dim=-1, descending=True).values
    last = torch.where(top_k > 0, top_k.clamp(max=vocab_size), vocab_size).long() - 1
    k_threshold = descending.gather(1, last[:, None])
    probabilities = torch.where(descending >= k_threshold, descending, -torch.inf).softmax(dim=-1)
    # Tokens whose more likely ones do not reach top_p yet; the first is always among them.
    mass_before = probabilities.cumsum(dim=-1) - probabilities
    num_kept = (mass_before < top_p[:, None]).sum(dim=-1).clamp(min=1)
    p_threshold = descending.gather(1, num_kept[:, None] - 1)
    p_threshold = torch.where((top_p >= 1)[:, None], -torch.inf, p_threshold)
    # log(0) is -inf: off.
    m_threshold = descending[:, :1] + min_p.log()[:, None]
    threshold = torch.maximum(torch.maximum(k_threshold, p_threshold), m_threshold)
    return logits.masked_fill(logits < threshold, -torch.inf)


def apply_penalties(
    logits: Tensor, token_ids: Tensor, lengths: Tensor, prompt_lens: Tensor, presence: Tensor, frequency: Tensor,
    repetition: Tensor
) -> Tensor:  # fmt: skip
    """Penalise tokens that a request has seen; returns new logits [N, V].

    token_ids: [N, L] each request's tokens, of which the first `lengths` count. Repetition (Keskar et al., 2019)
    covers prompt and output; presence and frequency cover the output, `prompt_lens` and on (OpenAI's definition).
    """
    column = torch.arange(token_ids.shape[1], device=logits.device)[None, :]
    seen = column < lengths[:, None]
    ids = token_ids.long()
    ones = torch.ones((), dtype=torch.float32, device=logits.device)
    counts = torch.zeros_like(logits, dtype=torch.float32)
    # Whole numbers in float32 add up exactly in any order, so the result is the same on every device.
    counts.scatter_add_(1, ids, torch.where(seen, ones, 0.0))
    anywhere = counts > 0
    counts.zero_().scatter_add_(1, ids, torch.where(seen & (column >= prompt_lens[:, None]), ones, 0.0))
    factor = repetition[:, None]
    logits = torch.where(anywhere, torch.where(logits > 0, logits / factor, logits * factor), logits)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)

"""Choosing a token from logits. `sample` and `likely_threshold` are what the sampler calls: CUDA tensors take the
Triton kernels, others the plain torch below, which is the definition that the kernels are held to.

Shapes: N rows, V vocabulary. Rows are independent: nothing here depends on how rows are batched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.kernels.philox import token_uniforms

_MAX_TOKEN = 0x7FFFFFFF
_WORST_SCORE = -0x80000000
"""Of a part of the vocabulary that has no token to offer."""


def sample(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor,
    samples: Tensor,
    *,
    slots: Tensor | None = None,
    threshold: Tensor | None = None,
) -> Tensor:
    """One token for each row: the likeliest where `temperature` is 0, else drawn from softmax(logits / temperature).

    logits: [N, V], rows may lie apart; positions: [N] int32 or int64, of the tokens to be sampled; temperature [N]
    float32; seeds, rows and samples: [N] int64. With `slots` [N] int64 these four are tables instead, and logits row i
    takes their row `slots[i]`. threshold: [N] float32 from `likely_threshold`; tokens whose logit / temperature is
    below it are left out. → [N] int32. Of equally good tokens the first is taken; on CUDA a NaN never wins.

    The kernels agree with `gumbel_max` bit for bit in the random numbers, and up to the last bits in their logarithms:
    another token may come out where two scores are equal to about 1e-6 of their size.
    """
    if logits.is_cuda:
        from nvcli.kernels.triton import sampling

        return sampling.sample(logits, temperature, seeds, positions, rows, samples, slots=slots, threshold=threshold)
    if slots is not None:
        temperature, seeds, rows, samples = temperature[slots], seeds[slots], rows[slots], samples[slots]
    logits = logits.float()
    if threshold is not None:
        scale = torch.where(temperature > 0, temperature, 1.0)
        logits = logits.masked_fill(logits / scale[:, None] < threshold[:, None], -torch.inf)
    if not (temperature > 0).any():
        return greedy(logits).int()
    return gumbel_max(logits, temperature, seeds, positions.long(), rows, samples).int()


def best_keys(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor,
    samples: Tensor,
    *,
    slots: Tensor | None = None,
    start: int = 0,
) -> Tensor:
    """What `sample` (without a threshold) would choose from a part of the vocabulary, as a number for each row that is
    larger for a better choice: the largest of all parts' keys holds the token that `sample` chooses from the whole.

    logits: [N, M] of the tokens `start` to `start + M`, M may be 0; the others as for `sample`. → [N] int64: the score
    in the upper half, as an integer of the same order; in the lower one 2^31 - 1 - token, so that of equal scores the
    first token's key is the largest.
    """
    if logits.is_cuda:
        from nvcli.kernels.triton import sampling

        return sampling.best_keys(logits, temperature, seeds, positions, rows, samples, slots=slots, start=start)
    if slots is not None:
        temperature, seeds, rows, samples = temperature[slots], seeds[slots], rows[slots], samples[slots]
    num_rows, num_tokens = logits.shape
    if num_tokens == 0:
        return torch.full((num_rows,), (_WORST_SCORE << 32) | _MAX_TOKEN)
    scores = logits.float()
    if (temperature > 0).any():
        scores = _noisy(scores, temperature, seeds, positions.long(), rows, samples, start)
    tokens = scores.argmax(dim=-1, keepdim=True)
    best = scores.gather(1, tokens)[:, 0]
    bits = torch.where(best == 0, 0.0, best).view(torch.int32)  # both zeros are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (_MAX_TOKEN - start - tokens[:, 0])


def tokens_of_keys(keys: Tensor) -> Tensor:
    """The tokens that keys of `best_keys` hold: [N] int64 → [N] int32."""
    low_words = keys.view(torch.int32).view(-1, 2)[:, 0]  # little-endian
    return _MAX_TOKEN - low_words


def likely_threshold(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    *,
    slots: Tensor | None = None,
) -> Tensor:
    """The smallest logit / temperature that top-k, top-p and min-p leave in (see `keep_likely`) for each row.

    logits: [N, V], rows may lie apart, not yet divided; the others: [N] float32 (top_k int32), or with `slots` [N]
    tables. → [N] float32, -inf where temperature is 0 or nothing limits. Rows without limits cost next to nothing.

    The kernel's thresholds are exact, but for top-p's, which is exact up to the order in which probabilities are added:
    a token may be in or out where the mass of the likelier ones equals top_p to about 1e-6.
    """
    if logits.is_cuda:
        from nvcli.kernels.triton import threshold

        return threshold.likely_threshold(logits, temperature, top_k, top_p, min_p, slots=slots)
    if slots is not None:
        temperature, top_k, top_p, min_p = temperature[slots], top_k[slots], top_p[slots], min_p[slots]
    out = torch.full_like(temperature, -torch.inf)
    limited = ((temperature > 0) & ((top_k > 0) | (top_p < 1) | (min_p > 0))).nonzero()[:, 0]
    if len(limited):
        scaled = logits[limited].float() / temperature[limited, None]
        out[limited] = _scaled_threshold(scaled, top_k[limited], top_p[limited], min_p[limited])
    return out


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
    return _noisy(logits, temperature, seeds, positions, rows, samples, 0).argmax(dim=-1)


def _noisy(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    rows: Tensor,
    samples: Tensor,
    start: int,
) -> Tensor:
    """Scores of the tokens from `start` on, of which the largest is sampled: [N, M] → [N, M]."""
    noise = token_uniforms(seeds, positions, rows, samples, logits.shape[-1], start=start)
    noise = noise.log_().neg_().log_().neg_()
    is_greedy = (temperature == 0)[:, None]
    scaled = logits / torch.where(is_greedy, 1.0, temperature[:, None])
    return torch.where(is_greedy, scaled, scaled + noise)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf what top-k, top-p and min-p leave out. `logits` are divided by the temperature already.

    top_k: [N], 0 is off. top_p: [N], the smallest set of most likely tokens (after top-k) whose probability reaches
    it. min_p: [N], tokens less likely than min_p × the likeliest. Each limit is a threshold on the logit: tokens of
    equal logit are kept or dropped together, so no order among them is needed.
    """
    threshold = _scaled_threshold(logits, top_k, top_p, min_p)
    return logits.masked_fill(logits < threshold[:, None], -torch.inf)


def _scaled_threshold(scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """[N, V] logits, divided by the temperature → [N]: what is smaller is left out."""
    vocab_size = scaled.shape[-1]
    descending = scaled.sort(dim=-1, descending=True).values
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
    return torch.maximum(torch.maximum(k_threshold, p_threshold), m_threshold)[:, 0]


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

"""The choice of a token from logits: greedy, by temperature, and with top-k, top-p and min-p.

CUDA tensors take the Triton kernels, others the plain torch below, which is the definition that the kernels are held
to. Shapes: N rows, V vocabulary, S slots. Rows are independent: nothing here depends on how rows are batched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nvcli.core.messages import NOT_FINITE
from nvcli.kernels.dispatch import with_kernel
from nvcli.kernels.philox import token_uniforms
from nvcli.kernels.sampling_columns import SamplingColumns

_MAX_TOKEN = 0x7FFFFFFF


@with_kernel("sampling.sampling")
def sample(
    logits: Tensor, columns: SamplingColumns, slots: Tensor, positions: Tensor, *, few_allowed: bool = False
) -> Tensor:
    """Choose one token for each row: the likeliest where the temperature is 0, else one drawn from
    softmax(logits / temperature) among the tokens that top-k, top-p and min-p keep (see `keep_likely`).

    logits: [N, V], rows may lie apart; slots: [N] int64, the row of `columns` that each row of logits takes;
    positions: [N] int32 or int64, of the tokens to be sampled. → [N] int32. Of equally good tokens the first is taken.
    A row that has a NaN or +inf among its logits, or nothing but -inf, gets `NOT_FINITE`; a single -inf is a forbidden
    token. `few_allowed`: whether most tokens of many rows are forbidden, which makes the choice faster then, and slower
    else, and changes no token. On CUDA nothing waits for the device, so that a graph can hold the call.

    The kernels agree with `gumbel_max` bit for bit in the random numbers, and up to the last bits in their logarithms:
    another token may come out where two scores are equal to about 1e-6 of their size.
    """
    columns, logits = columns.at(slots), logits.float()
    min_kept = min_kept_logit(logits, columns)
    if (min_kept > -torch.inf).any():
        scaled = logits / torch.where(columns.temperature > 0, columns.temperature, 1.0)[:, None]
        logits = logits.masked_fill(scaled < min_kept[:, None], -torch.inf)
    return gumbel_max(logits, columns, positions).int()


@with_kernel("sampling.sampling")
def packed_argmax(
    logits: Tensor, columns: SamplingColumns, slots: Tensor, positions: Tensor, *, start: int = 0
) -> Tensor:
    """Choose from a shard of the vocabulary by temperature alone, and pack score and token into one number for each
    row: the largest number of all shards holds the token that `sample` chooses from the whole vocabulary.

    logits: [N, M] of the tokens `start` to `start + M`, M may be 0; the others as for `sample`. → [N] int64: the score
    in the upper half, as an integer of the same order; in the lower one 2^31 - 1 - token, so that of equal scores the
    first token's number is the largest. A NaN or +inf among the shard's logits gives the score +inf and the token
    `NOT_FINITE`; where all of them are -inf, or there is none, the score is -inf and the token is `NOT_FINITE`. Rows
    with a small top-k get a number without meaning: `shard_candidates` of `nvcli.kernels.candidates` is for them. Other
    limits are not looked at.
    """
    num_rows, num_tokens = logits.shape
    if num_tokens == 0:
        return pack(torch.full((num_rows,), -torch.inf), torch.full((num_rows,), NOT_FINITE))
    best, tokens = noisy_scores(logits.float(), columns.at(slots), positions, start=start).max(dim=-1)
    tokens = torch.where(best.isfinite(), start + tokens, NOT_FINITE)
    return pack(best.nan_to_num(torch.inf, torch.inf, -torch.inf), tokens)


def pack(scores: Tensor, tokens: Tensor) -> Tensor:
    """Pack scores (float32) and tokens (int64) of any one shape as `packed_argmax` does: → int64."""
    bits = torch.where(scores == 0, 0.0, scores).view(torch.int32)  # both zeros are equal
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (ordered << 32) | (_MAX_TOKEN - tokens)


def unpack_argmax(packed: Tensor) -> Tensor:
    """Unpack the tokens from the numbers of `packed_argmax`: [N] int64 → [N] int32."""
    low_words = packed.view(torch.int32).view(-1, 2)[:, 0]  # little-endian
    return low_words ^ _MAX_TOKEN


def min_kept_logit(logits: Tensor, columns: SamplingColumns) -> Tensor:
    """Find the smallest logit / temperature that top-k, top-p and min-p keep in each row (see `keep_likely`).

    logits: [N, V], not yet divided; `columns` has N rows. → [N] float32, -inf where the temperature is 0 or nothing
    limits.
    """
    out = torch.full_like(columns.temperature, -torch.inf)
    at = columns.is_limited.nonzero()[:, 0]
    if len(at):
        scaled = logits[at].float() / columns.temperature[at, None]
        out[at] = min_kept_scaled(scaled, columns.top_k[at], columns.top_p[at], columns.min_p[at])
    return out


def gumbel_max(logits: Tensor, columns: SamplingColumns, positions: Tensor) -> Tensor:
    """Sample from softmax(logits / temperature): the largest of logits / temperature + Gumbel noise (the Gumbel-max
    trick; Maddison et al., 2014). → [N] int64, `NOT_FINITE` where the largest score is not finite.

    Where the temperature is 0 the largest logit is taken; limits are not looked at; `columns` has N rows. The noise of
    a token is a function of (seed, position, row, sample, token) alone, so that removing other tokens (top-k and the
    like) leaves it as it is.
    """
    best, tokens = noisy_scores(logits, columns, positions, start=0).max(dim=-1)  # a NaN is the largest
    return torch.where(best.isfinite(), tokens, NOT_FINITE)


def noisy_scores(logits: Tensor, columns: SamplingColumns, positions: Tensor, *, start: int) -> Tensor:
    """Compute the scores of the tokens from `start` on; the token with the largest is sampled. [N, M] → [N, M];
    `columns` has N rows."""
    is_greedy = (columns.temperature == 0)[:, None]
    if is_greedy.all():
        return logits
    words = (columns.seed, positions.long(), columns.row, columns.sample)
    noise = token_uniforms(*words, logits.shape[-1], start=start).log_().neg_().log_().neg_()
    scaled = logits / torch.where(is_greedy, 1.0, columns.temperature[:, None])
    return torch.where(is_greedy, scaled, scaled + noise)


def keep_likely(logits: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Set to -inf the tokens that top-k, top-p and min-p leave out. `logits` are divided by the temperature already.

    top_k: [N], 0 is off (Fan et al., 2018). top_p: [N], keep the smallest set of most likely tokens, after top-k, whose
    probability reaches it (Holtzman et al., 2019). min_p: [N], leave out tokens less likely than min_p × the likeliest
    (Nguyen et al., 2024). Each limit is a threshold on the logit: tokens of
    equal logit are kept or dropped together, so no order among them is needed.
    """
    threshold = min_kept_scaled(logits, top_k, top_p, min_p)
    return logits.masked_fill(logits < threshold[:, None], -torch.inf)


def min_kept_scaled(
    scaled: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, counts: Tensor | None = None
) -> Tensor:
    """Find the smallest logit that is kept in each row: [N, T] logits, divided by the temperature → [N].

    counts: [N, T] float32, the number of tokens of the vocabulary that have each of these logits; None: one each.
    """
    descending, order = scaled.sort(dim=-1, descending=True)
    counts = torch.ones_like(scaled) if counts is None else counts.gather(1, order)
    # The k-th of the tokens is the first with which there are k.
    last = (counts.cumsum(dim=-1) < top_k[:, None]).sum(dim=-1).clamp(max=scaled.shape[-1] - 1)
    k_threshold = descending.gather(1, last[:, None]).masked_fill((top_k == 0)[:, None], -torch.inf)
    weighted = descending + counts.log()
    probabilities = torch.where(descending >= k_threshold, weighted, -torch.inf).softmax(dim=-1)
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
    """Penalise the tokens that a request has seen, in new logits [N, V].

    token_ids: [N, L], each request's tokens, of which the first `lengths` count. Repetition (Keskar et al., 2019)
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

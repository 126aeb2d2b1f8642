"""Masks of allowed tokens: the plain torch says what they mean, and the Triton kernel does the same."""

from __future__ import annotations

import pytest
import torch

from kernel_device import DEVICE, DTYPES, MARKS
from nvcli.kernels.token_mask import apply_token_mask
from nvcli.kernels.triton.sampling import token_mask

pytestmark = MARKS

N, V = 7, 9_973  # divides by nothing
ROWS = [5, 0, 2, 6]
MASK_OF = [1, -1, 2, -1, -1, 0, 3]


def expected_logits(logits: torch.Tensor, rows: list[int], allowed: list[set[int]], start: int) -> torch.Tensor:
    expected = logits.clone()
    for row, tokens in zip(rows, allowed, strict=True):
        forbidden = [token - start for token in range(start, start + logits.shape[1]) if token not in tokens]
        expected[row, forbidden] = -torch.inf
    return expected


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("start", "size"), [(0, V), (4_987, 4_986), (4_999, 100), (V, 0), (0, 12_000)])
def test_forbidden_tokens_become_impossible(start: int, size: int, dtype: torch.dtype) -> None:
    """Over the whole vocabulary, over shards that begin anywhere, and with more logits than a mask has bits."""
    generator = torch.Generator().manual_seed(3)
    words = torch.randint(-(2**31), 2**31, (len(ROWS), -(-V // 32)), generator=generator).to(torch.int32)
    words[1] = -1
    words[2] = 0
    words[2, 4_990 // 32] = 1 << (4_990 % 32)
    allowed = [{t for t in range(32 * len(row)) if row[t // 32] >> (t % 32) & 1} for row in words.tolist()]
    assert allowed[2] == {4_990}
    logits = torch.randn(N, size, generator=generator).to(dtype)
    logits[5, : size // 2] = torch.nan  # what is forbidden is not looked at
    expected = expected_logits(logits, ROWS, allowed, start)

    plain = logits.clone()
    apply_token_mask(plain, words, torch.tensor(MASK_OF, dtype=torch.int32), start=start)
    assert torch.equal(plain.nan_to_num(7.0), expected.nan_to_num(7.0))

    # Rows that lie apart, as those of padded logits and of wider masks do.
    wide = torch.zeros(N, size + 5, dtype=dtype, device=DEVICE)
    wide[:, :size] = logits.to(DEVICE)
    wide_words = torch.zeros(len(ROWS), words.shape[1] + 3, dtype=torch.int32, device=DEVICE)
    wide_words[:, :-3] = words.to(DEVICE)
    mask_of = torch.tensor(MASK_OF, dtype=torch.int32, device=DEVICE)
    token_mask.apply_token_mask(wide[:, :size], wide_words[:, :-3], mask_of, start=start)
    assert torch.equal(wide[:, :size].cpu().nan_to_num(7.0), expected.nan_to_num(7.0))
    assert not wide[:, size:].any()

"""Rows whose logits are not finite get no token, however they are sampled, and the rows beside them keep theirs."""

from __future__ import annotations

import pytest
import torch
from sampling_rows import CPU, expected_sample, keys, make_columns, on, random_logits, sample, through_shards

from kernel_device import DEVICE, DTYPES, MARKS
from nvcli.core.messages import NOT_FINITE
from nvcli.kernels import sampling as reference
from nvcli.kernels.sampling_columns import SamplingColumns
from nvcli.kernels.triton.sampling import sampling

pytestmark = MARKS

VOCAB_SIZE = 2500
"""Two chunks of the kernels, and no round number."""
SAMPLINGS = {
    "greedy": (0.0, (0, 1.0, 0.0)),
    "temperature": (0.7, (0, 1.0, 0.0)),
    "small top-k": (0.7, (20, 0.9, 0.01)),
    "other limits": (0.7, (1000, 0.9, 0.01)),
}
NEGATIVE_NAN = torch.tensor([-0x400000], dtype=torch.int32).view(torch.float32)
BROKEN = [1, 2, 3, 4, 5, 6]


def broken_logits() -> torch.Tensor:
    """[9, VOCAB_SIZE]: the rows `BROKEN` are not finite; of the others one has forbidden tokens and one has a single
    token that is allowed."""
    rows = random_logits(9, VOCAB_SIZE)
    rows[1] = torch.nan
    rows[2, VOCAB_SIZE - 1] = torch.nan
    rows[3, 700] = torch.inf
    rows[4] = -torch.inf
    rows[5, 3] = NEGATIVE_NAN
    rows[6] = -torch.inf
    rows[6, 2100] = torch.nan
    rows[7, ::2] = -torch.inf
    rows[8] = -torch.inf
    rows[8, 2222] = -5.0
    return rows


def assert_broken_rows_alone_get_none(ids: torch.Tensor, logits: torch.Tensor, columns: SamplingColumns) -> None:
    """Against the tokens of the same rows with other logits in the place of the broken ones."""
    sound = logits.clone()
    sound[BROKEN] = 0.0
    expected = expected_sample(sound, columns)
    expected[BROKEN] = NOT_FINITE
    assert ids.tolist() == expected.tolist()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", SAMPLINGS)
def test_broken_rows_get_no_token(kind: str, dtype: torch.dtype) -> None:
    logits = broken_logits().to(dtype)
    temperature, limits = SAMPLINGS[kind]
    columns = make_columns(torch.full((len(logits),), temperature), [limits])
    assert_broken_rows_alone_get_none(expected_sample(logits, columns), logits, columns)
    assert_broken_rows_alone_get_none(sample(logits, columns), logits, columns)


@pytest.mark.parametrize("kernel", [False, True])
def test_a_broken_shard_is_known_to_all_ranks(kernel: bool) -> None:
    """Three ranks: a NaN or +inf in one shard counts for the row, and nothing but -inf in one shard does not."""
    logits = broken_logits()
    for kind in ("greedy", "temperature", "small top-k"):
        temperature, limits = SAMPLINGS[kind]
        columns = make_columns(torch.full((len(logits),), temperature), [limits])
        ids = through_shards(logits, 3, columns, kernel=kernel)
        assert_broken_rows_alone_get_none(ids, logits, columns)


@pytest.mark.parametrize("kernel", [False, True])
def test_packed_numbers_of_a_broken_shard_win(kernel: bool) -> None:
    """Also over a shard without tokens, as the last ranks have where the vocabulary is small."""
    module, device = (sampling, DEVICE) if kernel else (reference, CPU)
    logits = broken_logits()
    columns = on(device, make_columns(torch.tensor([0.0, 0.7, 1.0]).repeat(3)))
    slots, positions = torch.arange(9, device=device), keys(9)["positions"].to(device)
    packed = [
        module.packed_argmax(shard.to(device), columns, slots, positions, start=start)
        for start, shard in ((0, logits[:, :1300]), (1300, logits[:, 1300:]), (VOCAB_SIZE, logits[:, :0]))
    ]
    ids = reference.unpack_argmax(torch.stack(packed).amax(dim=0)).cpu()
    assert_broken_rows_alone_get_none(ids, logits, on(CPU, columns))

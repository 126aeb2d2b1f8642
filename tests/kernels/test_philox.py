"""The random numbers are Philox4x32-10's own, and depend on their counter alone."""

from __future__ import annotations

import pytest
import torch

from nvcli.kernels.philox import philox, token_uniforms, uniform


def words(key: int, counter: tuple[int, int, int, int]) -> tuple[int, ...]:
    as_tensors = [torch.tensor([c]) for c in counter]
    signed_key = key - (1 << 64) if key >= 1 << 63 else key
    return tuple(int(w) for w in philox(torch.tensor([signed_key]), tuple(as_tensors)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [  # known answers published with Random123
        (0, (0, 0, 0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((1 << 64) - 1, (0xFFFFFFFF,) * 4, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            0x299F31D0A4093822,
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_known_answers(key: int, counter: tuple[int, int, int, int], expected: tuple[int, ...]) -> None:
    assert words(key, counter) == expected


def test_uniforms_stay_inside_the_open_interval() -> None:
    """0 or 1 would make infinite noise."""
    ends = uniform(torch.tensor([0, 0xFFFFFFFF]))
    assert ends.tolist() == [2.0**-24, 1 - 2.0**-24]


def test_a_row_does_not_depend_on_its_batch() -> None:
    many = token_uniforms(*(torch.tensor(x) for x in ([5, 6, 7], [1, 2, 3], [0, 9, 1 << 20], [0, 0, 3])), 1001)
    for i, (seed, position, row, sample) in enumerate([(5, 1, 0, 0), (6, 2, 9, 0), (7, 3, 1 << 20, 3)]):
        alone = token_uniforms(*(torch.tensor([x]) for x in (seed, position, row, sample)), 1001)
        assert torch.equal(alone[0], many[i])
    assert len(many.unique()) > 2990


def test_every_part_of_the_counter_matters() -> None:
    base = [3, 4, 5, 6]
    reference = token_uniforms(*(torch.tensor([x]) for x in base), 64)
    for i in range(4):
        other = token_uniforms(*(torch.tensor([x + (j == i)]) for j, x in enumerate(base)), 64)
        assert not torch.equal(reference, other)

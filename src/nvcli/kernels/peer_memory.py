"""PeerMemory: one block of memory on each GPU of a group, which all of its ranks read and write, and sums through it.

A library's collective costs more than the bytes that it moves, the more so the fewer they are. Here a linear layer
writes its part of a sum where the other ranks can read it, and the kernel that needs the sum reads it there:
all-reduce, residual sum, RMSNorm and FP8 codes are one launch (`triton/sums/peer_memory.py`). What it has to equal is
the process group's all-reduce, then `norm.add_rms_norm`, then `fp8.quantise`. Everything is on the device, so the calls
work in CUDA graphs, eagerly, and in any mixture, with any number of rows each time; all ranks make the same calls in
the same order.

**Why nothing is overwritten too early** (`tests/kernels/test_peer_protocol.py` is a model of it). Call a sum, or an
exchange of keys, an *exchange*. All of a rank's work is in the order of one stream, and no exchange ends on a rank
before every rank has begun it: each row waits for a word of all ranks, or for a word of its owner, which has waited for
those. So:

1. When exchange i - 1 has ended here, it has begun everywhere, and exchange i - 2, with all that was queued before it,
   has ended everywhere. What others read in exchange i - 2 or earlier may then be overwritten.
2. *Parts* are written between exchange i - 1 and i, and read by others in exchange i. By 1 it is enough that no two
   sums that follow each other have the same buffer. There are three: one for the first sum of a forward pass (the
   embedding's; in a later pipeline stage that of the part that came from the stage before), and two that alternate from
   there on, starting anew with each pass. (The part that a stage sends to the next has a place and no sum.) Which
   buffer a sum has thus depends on its place in the pass alone; passes may be captured, replayed and mixed at will.
3. *Flags* of a row are written by one rank each, in order, and are waited for as "at least": a rank that runs ahead
   (by one exchange at most) cannot make a word unseen.
4. The *result* of a two-shot sum is written by a row's owner once all ranks have begun that sum, so that whatever read
   the result before has ended on all of them: one buffer is enough. It holds until the next sum.
5. *Keys* carry their epoch, and are waited for as exactly that. A step may exchange keys twice without a sum in
   between (its graph chooses tokens, then its rows turn out to want another choice), so a rank may send its next ones
   while another still reads the last. Two places alternate: by 1 nobody reads those before the last any more.

A pass that sums by the process group keeps all of this: its all-reduce does not end before all ranks have begun it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from nvcli.kernels.fp8_types import FP8, Activations, QuantisedRows
from nvcli.kernels.weight_formats import FP8_BLOCK, FP8Scaling
from nvcli.kernels.whole_numbers import ceil_div, round_up

SUPPORTED_RANKS = (2, 4, 8)

_TWO_SHOT_BYTES = {4: 512 << 10, 8: 96 << 10}
"""The size of a part (rows × hidden size × bytes) from which on two shots win, by the number of ranks. One shot makes
each of N ranks read (N - 1) parts; two shots read and write (N - 1) / N parts each, and cost one more trip over NVLink.
Measured on H200s by scripts/bench_collectives.py: 4 ranks are even between 256 and 512 KiB. Estimated for 8: a trip of
1.5 µs is worth 450 KB at 300 GB/s, and they are even at 86 KB. For 2 ranks the bytes are the same either way, and one
shot stays ahead at every size: 9.5 µs against 11.3 at 2 MiB, 205 against 214 at 64 MiB. With FP8 results two shots
win there from 2.5 MiB on, by 10 to 18 %; but all sums of as many rows go one way, also those that are not quantised."""

_ALIGN = 128
_PARTS = 3
_FIRST = 2
"""The buffer of the first sum of a pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLayout:
    """The layout of each rank's block of memory. Offsets and sizes are in bytes."""

    num_ranks: int
    max_rows: int
    """The most rows of a sum or of keys."""
    hidden_size: int
    dtype: torch.dtype

    @property
    def part_bytes(self) -> int:
        return _aligned(self.max_rows * self.hidden_size * self.dtype.itemsize)

    @property
    def out_offset(self) -> int:
        """The offset of the results of two-shot sums, [max_rows, hidden_size], or their FP8 codes, after the parts."""
        return _PARTS * self.part_bytes

    @property
    def scales_offset(self) -> int:
        """The offset of the scales of results in FP8: [max_rows, 1 or num_groups] float32."""
        return self.out_offset + _aligned(self.max_rows * self.hidden_size)

    @property
    def num_groups(self) -> int:
        return ceil_div(self.hidden_size, FP8_BLOCK)

    @property
    def flags_offset(self) -> int:
        """The offset of the flags, [max_rows, num_ranks] int32: the last epoch in which each rank's part of a row was
        there."""
        end_of_scales = self.scales_offset + _aligned(self.max_rows * self.num_groups * 4)
        return max(self.out_offset + self.part_bytes, end_of_scales)

    @property
    def done_offset(self) -> int:
        """The offset of [max_rows] int32: the last epoch in which each row's owner had written its result."""
        return self.flags_offset + _aligned(self.max_rows * self.num_ranks * 4)

    @property
    def words_offset(self) -> int:
        """The offset of the keys of all ranks, for odd and even epochs: [max_rows, 2, num_ranks, 2] int64."""
        return self.done_offset + _aligned(self.max_rows * 4)

    @property
    def num_bytes(self) -> int:
        return self.words_offset + _aligned(self.max_rows * self.num_ranks * 32)


class PeerMemory:
    """One rank's access to the blocks of all ranks. Its methods are collective: every rank calls them alike."""

    def __init__(self, layout: PeerLayout, blocks: Sequence[Tensor], rank: int, handle: object = None) -> None:
        """`blocks` are the blocks of all ranks, as this rank reaches them: [layout.num_bytes] uint8 each, filled with
        zeros before any rank goes on. `handle` is kept alive as long as they are used."""
        assert len(blocks) == layout.num_ranks
        self.layout = layout
        self.rank = rank
        self._handle = handle
        device = blocks[rank].device

        def matrices(offset: int, columns: int, dtype: torch.dtype) -> list[Tensor]:
            """View a matrix [max_rows, columns] in each rank's block."""
            end = offset + layout.max_rows * columns * dtype.itemsize
            return [block[offset:end].view(dtype).view(-1, columns) for block in blocks]

        def addresses(offset: int) -> Tensor:
            return torch.tensor([block.data_ptr() + offset for block in blocks], dtype=torch.int64, device=device)

        hidden_size = layout.hidden_size
        self._parts = [tuple(matrices(i * layout.part_bytes, hidden_size, layout.dtype)) for i in range(_PARTS)]
        codes = matrices(layout.out_offset, hidden_size, FP8)
        row_scales = [column[:, 0] for column in matrices(layout.scales_offset, 1, torch.float32)]
        group_scales = matrices(layout.scales_offset, layout.num_groups, torch.float32)
        self._outs: dict[FP8Scaling | None, Sequence[Activations]] = {
            None: matrices(layout.out_offset, hidden_size, layout.dtype),
            "channel": [QuantisedRows(*pair, layout.dtype) for pair in zip(codes, row_scales, strict=True)],
            "block": [QuantisedRows(*pair, layout.dtype) for pair in zip(codes, group_scales, strict=True)],
        }
        self._flags = addresses(layout.flags_offset)
        self._done = addresses(layout.done_offset)
        self._words = addresses(layout.words_offset)
        self._epochs = torch.zeros(layout.max_rows, dtype=torch.int32, device=device)
        self._key_epochs = torch.zeros_like(self._epochs)
        self._next = 0
        most_bytes = _TWO_SHOT_BYTES.get(layout.num_ranks)
        row_bytes = hidden_size * layout.dtype.itemsize
        self.two_shot_rows = layout.max_rows + 1 if most_bytes is None else max(1, most_bytes // row_bytes)
        """Sums of this many rows and more take two shots. The number is the same on all ranks."""

    @property
    def num_bytes(self) -> int:
        return self.layout.num_bytes

    def takes(self, shape: torch.Size | tuple[int, ...], dtype: torch.dtype) -> bool:
        """Whether sums of this shape and type go through here."""
        layout = self.layout
        is_ours = len(shape) == 2 and shape[1] == layout.hidden_size and dtype == layout.dtype
        return is_ours and 0 < shape[0] <= layout.max_rows

    def part(self, num_rows: int, *, first: bool = False) -> Tensor:
        """Return the memory for this rank's part of the next sum, [num_rows, hidden_size]. `first` marks the first sum
        of a pass."""
        if first:
            self._next = 0
            return self._parts[_FIRST][self.rank][:num_rows]
        part = self._parts[self._next][self.rank][:num_rows]
        self._next = 1 - self._next
        return part

    def sum(self, part: Tensor) -> Tensor:
        """Sum the ranks' parts into a new tensor. A part that lies outside the block is the first of a pass."""
        out = torch.empty_like(part)
        self._sum(self._parts_of(part, first=True), out)
        return out

    def own_rows(self, residual: Tensor, rows: Tensor) -> Tensor:
        """Write the rows of a residual stream that this rank owns, and zeros for those of others, as this rank's part
        of the next sum: [T, H], [N] int64 → [N, H]. The sum is the rows, without rounding.

        A row is owned as in a two-shot sum of T rows.
        """
        part = self.part(len(rows))
        is_own = rows % self.layout.num_ranks == self.rank
        return torch.where(is_own[:, None], residual[rows], torch.zeros_like(part), out=part)

    def add_rms_norm(
        self, part: Tensor, residual: Tensor, weight: Tensor, eps: float, scaling: FP8Scaling | None = None
    ) -> Activations:
        """Apply `norm.add_rms_norm` to the sum of the ranks' parts, and quantise the result as `scaling` says. The
        result holds until the next sum.

        A rank may update only those rows of `residual` that it will read again. With two shots they are the rows that
        it owns, which are the same ones for every sum of as many rows.
        """
        parts, num_rows = self._parts_of(part, first=False), len(part)
        outs = None
        if num_rows >= self.two_shot_rows:
            outs = self._outs[scaling]
            whole = outs[self.rank]
            out: Activations = whole[:num_rows] if isinstance(whole, Tensor) else whole.first_rows(num_rows)
        elif scaling is None:
            out = torch.empty_like(part)
        else:
            out = QuantisedRows.empty(num_rows, part.shape[1], scaling, part)
        self._sum(parts, out, residual, weight, eps, outs)
        return out

    def _sum(
        self,
        parts: tuple[Tensor, ...],
        out: Activations,
        residual: Tensor | None = None,
        weight: Tensor | None = None,
        eps: float = 0.0,
        outs: Sequence[Activations] | None = None,
    ) -> None:
        from nvcli.kernels.triton.sums import peer_memory

        peer_memory.add_rms_norm(
            parts, outs, self._flags, self._done, self._epochs, residual, weight, out, eps, self.rank
        )

    def max(self, keys: Tensor) -> Tensor:
        """Find the largest of all ranks' keys, row by row: [N] int64 → [N] int64, N at most layout.max_rows."""
        from nvcli.kernels.triton.sums import peer_memory

        assert len(keys) <= self.layout.max_rows
        return peer_memory.max_of_keys(keys, self._words, self._key_epochs, self.rank)

    def _parts_of(self, part: Tensor, *, first: bool) -> tuple[Tensor, ...]:
        """Return all ranks' parts of the sum that `part` belongs to. It is copied into the block if it lies
        elsewhere."""
        for parts in self._parts:
            if parts[self.rank].data_ptr() == part.data_ptr():
                return parts
        place = self.part(len(part), first=first)
        place.copy_(part)
        return self._parts_of(place, first=first)


def _aligned(num_bytes: int) -> int:
    return round_up(num_bytes, _ALIGN)

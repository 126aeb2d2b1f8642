"""StageLink: sends hidden states from one pipeline stage to the next, from each rank to its counterpart.

Both sides know how many rows a step has, so that a message is one tensor and nothing else. It is received into memory
with a fixed address, which the stage's CUDA graphs read; sending and receiving are not part of the graphs. While a
message is being sent the stage goes on with the next step, until that has a message of its own to send.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from nvcli.worker.distributed.process_group import RankGroups
from nvcli.worker.distributed.tensor_parallel import StageState


class StageLink:
    """One rank's links to the previous and the next stage. The first stage receives nothing, and the last sends
    nothing."""

    def __init__(
        self, groups: RankGroups, max_rows: int, hidden_size: int, dtype: torch.dtype, num_streams: int = 1
    ) -> None:
        self._previous, self._next = groups.previous, groups.next
        self._num_tensors = 1 if groups.tensor.size == 1 or num_streams > 1 else 2
        """The number of tensors in a `StageState`."""
        self._row_size = num_streams * hidden_size
        size = self._num_tensors * max_rows * self._row_size

        def memory(is_used: bool) -> Tensor:
            return torch.zeros(size if is_used else 0, dtype=dtype, device=groups.tensor.device)

        self._incoming, self._outgoing = memory(self._previous is not None), memory(self._next is not None)
        self._sending: dist.Work | None = None

    def receive(self, num_rows: int) -> None:
        """Receive the next step's rows, padding included; the first stage has none. On a GPU, work launched from
        here on waits for them; the host does not."""
        if self._previous is None:
            return
        work = dist.irecv(self._rows(self._incoming, num_rows), group=self._previous, group_src=0)
        assert work is not None
        work.wait()

    def received(self, num_rows: int) -> StageState | None:
        """Return views of the received state, or None in the first stage."""
        if self._previous is None:
            return None
        rows = self._rows(self._incoming, num_rows)
        return StageState(rows[0], rows[1] if self._num_tensors == 2 else None)

    def send(self, state: StageState) -> None:
        """Send a state to the next stage. It is copied, so that its memory is free for the next step."""
        assert self._next is not None
        if self._sending is not None:
            self._sending.wait()  # its memory is used again
        rows = self._rows(self._outgoing, len(state.residual))
        rows[0].copy_(state.residual)
        if state.delta is not None:
            rows[1].copy_(state.delta)
        elif self._num_tensors == 2:
            rows[1].zero_()
        self._sending = dist.isend(rows, group=self._next, group_dst=1)

    def _rows(self, memory: Tensor, num_rows: int) -> Tensor:
        """View the first rows of a buffer as [tensors, num_rows, size of a row], contiguous."""
        size = self._num_tensors * num_rows * self._row_size
        return memory[:size].view(self._num_tensors, num_rows, self._row_size)

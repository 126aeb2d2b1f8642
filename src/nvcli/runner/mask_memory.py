"""MaskMemory: the masks of a rank's constrained answers, on the host, where threads write them, and on the device.

Masks go to the device while it computes the forward pass of the step that they are for, as one copy on a stream of
their own. A row that a thread writes meanwhile arrives as anything; nobody uses it then.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor


class MaskMemory:
    """A row for each answer that may run, of as many words as the vocabulary has for its tokens."""

    def __init__(self, num_rows: int, num_words: int, device: torch.device) -> None:
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(num_rows, num_words, dtype=torch.int32, pin_memory=on_gpu)
        self._there = torch.zeros_like(self._host, device=device) if on_gpu else self._host
        self._stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self.words: np.ndarray = self._host.numpy().view(np.uint32)
        """[rows, W] uint32 on the host, a bit for each token."""
        self._free = list(range(num_rows - 1, -1, -1))

    def take_row(self) -> int | None:
        """Return a row that no answer has; None: there is none."""
        return self._free.pop() if self._free else None

    def give_back(self, row: int) -> None:
        """Take back a row that nobody writes any longer."""
        self._free.append(row)

    def on_device(self, rows: np.ndarray, num_words: int, upload: Callable[[np.ndarray], tuple[Tensor, ...]]) -> Tensor:
        """Return the first `num_words` words of rows [n]: [n, num_words] int32 on the device.

        The device must be done with what an earlier call returned.
        """
        if self._stream is None:
            return self._host[torch.from_numpy(rows), :num_words]
        first, end = int(rows.min()), int(rows.max()) + 1
        with torch.cuda.stream(self._stream):
            self._there[first:end].copy_(self._host[first:end], non_blocking=True)
        (at,) = upload(rows)
        torch.cuda.current_stream().wait_stream(self._stream)
        return self._there[:, :num_words].index_select(0, at)

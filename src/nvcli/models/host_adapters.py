"""HostAdapters: LoRA adapters in host memory, read from their files ahead of use.

Reading an adapter takes far longer than a step, so threads read the adapters while the weights load and the first steps
run, as many as host memory has room for. An adapter that is wanted before its turn is read at once. If the memory is
full, the least recently used one is dropped, and read again when it is wanted.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Generic, TypeVar

import torch

T = TypeVar("T")


class HostAdapters(Generic[T]):
    """Adapters by number. Any thread may call any method."""

    def __init__(
        self, read: Callable[[int], T], sizes: Mapping[int, int], *, max_bytes: int, gpu: torch.device | None = None
    ) -> None:
        """`read` reads an adapter, on threads of this object's alone, into memory that is pinned for `gpu` if that is
        given; `sizes` are the bytes of each, by its number. At most `max_bytes` are kept, or one adapter."""
        self._read, self._sizes, self._max_bytes, self._gpu = read, sizes, max_bytes, gpu
        self._changed = threading.Condition()
        self._kept: OrderedDict[int, T] = OrderedDict()
        """The least recently used adapter comes first."""
        self._num_bytes = 0
        """The size of the adapters that are kept or being read."""
        self._reading: set[int] = set()
        self._errors: dict[int, Exception] = {}
        self._ahead: deque[int] = deque()
        """Adapters to read ahead, in this order."""

    def read_ahead(self, num_threads: int) -> None:
        """Begin to read adapters on `num_threads` threads, in the order of their numbers, while there is room."""
        self._ahead.extend(sorted(self._sizes))
        for _ in range(min(num_threads, len(self._ahead))):
            threading.Thread(target=self._read_next, name="read-adapters", daemon=True).start()

    def get(self, number: int) -> T:
        """Return an adapter, reading it first if it is not there. Raises what `read` raises."""
        with self._changed:
            self._errors.pop(number, None)  # it is tried again
            while number not in self._kept:
                if number in self._errors:
                    raise self._errors.pop(number)
                if number not in self._reading:
                    self._begin(number)
                    threading.Thread(target=self._finish, args=(number,), name="read-adapter", daemon=True).start()
                self._changed.wait()
            self._kept.move_to_end(number)
            return self._kept[number]

    def _begin(self, number: int) -> None:
        """Reserve room for an adapter that will be read now. The lock is held."""
        self._reading.add(number)
        self._num_bytes += self._sizes[number]
        while self._kept and self._num_bytes > self._max_bytes:
            dropped, _ = self._kept.popitem(last=False)
            self._num_bytes -= self._sizes[dropped]

    def _finish(self, number: int) -> None:
        """Read an adapter, on a thread of this object's."""
        try:
            if self._gpu is not None:
                torch.cuda.set_device(self._gpu)  # whose context pins memory
                torch.set_num_threads(1)  # of this thread: many threads for each small matrix take seconds
            adapter: T | None = self._read(number)
        except Exception as error:  # raised by `get`, to whoever wants the adapter
            adapter, self._errors[number] = None, error
        with self._changed:
            self._reading.remove(number)
            if adapter is None:
                self._num_bytes -= self._sizes[number]
            else:
                self._kept[number] = adapter
            self._changed.notify_all()

    def _read_next(self) -> None:
        while (number := self._take_next()) is not None:
            self._finish(number)

    def _take_next(self) -> int | None:
        """Return the next adapter to read ahead, for which there is room; None: there is none."""
        with self._changed:
            while self._ahead:
                number = self._ahead.popleft()
                if number in self._kept or number in self._reading:
                    continue
                if self._num_bytes + self._sizes[number] > self._max_bytes:
                    return None
                self._begin(number)
                return number
            return None

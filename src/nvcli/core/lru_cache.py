"""LruCache: the values that were used last, within a bound of bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LruCache(Generic[K, V]):
    """Values by key. The least recently used ones are dropped first. Not thread-safe."""

    def __init__(self, max_bytes: int, num_bytes: Callable[[K, V], int]) -> None:
        """`max_bytes` bounds all entries together, and `num_bytes` returns the size of one."""
        self.max_bytes = max_bytes
        self._size = num_bytes
        self._kept: OrderedDict[K, V] = OrderedDict()
        """The least recently used entry comes first."""
        self._num_bytes = 0

    def get(self, key: K) -> V | None:
        """Return a value, which counts as use; None: it is not there."""
        value = self._kept.get(key)
        if value is not None:
            self._kept.move_to_end(key)
        return value

    def put(self, key: K, value: V) -> None:
        """Keep a value, in place of an earlier one of its key, and drop those that leave no room for it."""
        before = self._kept.pop(key, None)
        if before is not None:
            self._num_bytes -= self._size(key, before)
        self._kept[key] = value
        self._num_bytes += self._size(key, value)
        while self._num_bytes > self.max_bytes:
            self._num_bytes -= self._size(*self._kept.popitem(last=False))

    def clear(self) -> None:
        """Drop all entries."""
        self._kept.clear()
        self._num_bytes = 0

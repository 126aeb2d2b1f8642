"""Adapters in host memory: each is read once while there is room, ahead of use or when it is wanted."""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Callable

import pytest

from nvcli.errors import LoadError
from nvcli.models.host_adapters import HostAdapters


class Files:
    """Files of adapters, whose values are their numbers. Those in `broken` cannot be read."""

    def __init__(self, *broken: int) -> None:
        self.reads: Counter[int] = Counter()
        self._broken = broken
        self._lock = threading.Lock()

    def read(self, number: int) -> int:
        with self._lock:
            self.reads[number] += 1
        time.sleep(0.001)
        if number in self._broken:
            raise LoadError(f"adapter {number} is broken")
        return number


def until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_all_are_read_ahead_once_though_they_are_wanted_meanwhile() -> None:
    files = Files(3)
    adapters = HostAdapters(files.read, dict.fromkeys(range(1, 21), 1), max_bytes=100)
    adapters.read_ahead(3)
    assert [adapters.get(number) for number in (20, 19, 1)] == [20, 19, 1]
    until(lambda: len(files.reads) == 20)
    assert [adapters.get(number) for number in range(4, 21)] == list(range(4, 21))
    with pytest.raises(LoadError, match="adapter 3 is broken"):
        adapters.get(3)
    assert {number for number, count in files.reads.items() if count > 1} == {3}


def test_a_full_memory_reads_no_further_ahead_and_drops_what_was_used_last_long_ago() -> None:
    files = Files()
    adapters = HostAdapters(files.read, {1: 1, 2: 2, 3: 1, 4: 1, 5: 9}, max_bytes=4)
    adapters.read_ahead(1)
    until(lambda: len(files.reads) == 3)
    assert [adapters.get(number) for number in (1, 4, 1, 3)] == [1, 4, 1, 3]
    assert files.reads == {1: 1, 2: 1, 3: 1, 4: 1}, "2 was dropped for 4"
    assert [adapters.get(number) for number in (5, 5, 1)] == [5, 5, 1], "one is kept, however large it is"
    assert files.reads == {1: 2, 2: 1, 3: 1, 4: 1, 5: 1}


def test_threads_that_want_any_adapters_get_them() -> None:
    files = Files()
    adapters = HostAdapters(files.read, dict.fromkeys(range(1, 13), 1), max_bytes=5)
    adapters.read_ahead(2)
    found: list[bool] = []

    def want(seed: int) -> None:
        numbers = random.Random(seed).choices(range(1, 13), k=60)
        found.append([adapters.get(number) for number in numbers] == numbers)

    threads = [threading.Thread(target=want, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert found == [True] * 3

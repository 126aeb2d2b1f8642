"""The channel delivers every message whole, in order, to every reader, and says so when the other side is gone."""

from __future__ import annotations

import os
import random
import threading
from multiprocessing.connection import Connection

import pytest

from nvcli.worker.executor.channel import ChannelClosed, ChannelReader, ChannelSpec, ChannelWriter, close_fds
from nvcli.worker.executor.child_process import ChildProcess
from shared_memory import left_in_shared_memory, shared_memory


def test_random_messages_reach_all_readers() -> None:
    rng = random.Random(0)
    messages = [rng.randbytes(rng.choice([0, 1, 50, 4096])) for _ in range(2000)]
    spec = ChannelSpec.create(4096, num_readers=2, num_entries=3)
    writer, readers = ChannelWriter(spec), [ChannelReader(spec, r) for r in range(2)]
    received: list[list[bytes]] = [[], []]
    space = [threading.Semaphore(3) for _ in readers]

    def read(r: int) -> None:
        for _ in messages:
            received[r].append(readers[r].receive())
            space[r].release()

    threads = [threading.Thread(target=read, args=(r,)) for r in range(2)]
    for thread in threads:
        thread.start()
    for message in messages:
        for semaphore in space:
            assert semaphore.acquire(timeout=10)
        writer.send(message)
    for thread in threads:
        thread.join(timeout=10)
    assert received == [messages, messages]
    writer.close()
    for reader in readers:
        with pytest.raises(ChannelClosed):
            reader.receive()
        reader.close()
    os.close(spec.memory_fd)


def test_message_over_capacity_is_refused_not_cut() -> None:
    spec = ChannelSpec.create(10, num_readers=1)
    writer = ChannelWriter(spec)
    with pytest.raises(ValueError, match="11 bytes"):
        writer.send(b"x" * 11)
    writer.close()
    close_fds((*spec.read_fds, spec.memory_fd))


def test_unread_messages_are_never_overwritten() -> None:
    spec = ChannelSpec.create(10, num_readers=1, num_entries=2)
    writer = ChannelWriter(spec)
    writer.send(b"1")
    assert writer.has_room
    writer.send(b"2")
    assert not writer.has_room
    with pytest.raises(AssertionError, match="overwrite"):
        writer.send(b"3")
    writer.close()
    close_fds((*spec.read_fds, spec.memory_fd))


def test_writer_learns_that_the_reader_is_gone() -> None:
    spec = ChannelSpec.create(10, num_readers=1)
    writer, reader = ChannelWriter(spec), ChannelReader(spec, 0)
    reader.close()
    with pytest.raises(ChannelClosed):
        writer.send(b"1")
    writer.close()
    os.close(spec.memory_fd)


def test_channel_has_no_name() -> None:
    before = shared_memory()
    spec = ChannelSpec.create(1 << 20, num_readers=1)
    assert not left_in_shared_memory(before)
    close_fds((spec.memory_fd, *spec.read_fds, *spec.write_fds))


def read_all(argument: tuple[ChannelSpec, int], control: Connection) -> None:
    """A process that only reads, as fast as it can."""
    spec, count = argument
    reader = ChannelReader(spec, 0)
    for _ in range(count):
        reader.receive()
    control.send("done")


def test_a_fast_reader_never_looks_as_if_it_had_fallen_back() -> None:
    """The count of what was read is written in one piece: a writer that looks in between must not see another."""
    count = 60_000
    spec = ChannelSpec.create(8, num_readers=1)
    child = ChildProcess("test_channel:read_all", (spec, count), name="reader", pass_fds=spec.reader_fds(0))
    writer = ChannelWriter(spec)
    try:
        for _ in range(count):
            while not writer.has_room:
                assert child.is_alive
            # Once there is room there stays room, until something is sent.
            assert all(writer.has_room for _ in range(3))
            writer.send(b"message")
        assert child.control.poll(10)
    finally:
        child.close()
        writer.close()
        close_fds((spec.memory_fd, *spec.read_fds))

"""A message channel over shared memory: one writer, one or more readers, no names.

The memory is an anonymous file (memfd): it has no entry in /dev/shm, is not limited by that mount's size, and
disappears with the last process that maps it, however that process ends. Messages lie in a ring of entries; each entry
begins with the sequence number and length of its message. A byte in its pipe wakes a reader, which then checks the
number and writes it back, so that the writer never overwrites an unread message. A closed pipe means that the other
side is gone.

`ChannelSpec` travels to the processes that open the channel; its file descriptors must be passed to them.
"""

from __future__ import annotations

import mmap
import os
import select
import struct
from dataclasses import dataclass, replace

from nvcli.core.system.file_limits import resize_memory_file
from nvcli.kernels.whole_numbers import round_up

_HEADER = struct.Struct("@QQ")  # sequence number, length
_ALIGN = 64
"""Bytes of a cache line. No two processes write to the same one."""


class ChannelClosed(Exception):
    """The process at the other end is gone."""


@dataclass(frozen=True, slots=True)
class ChannelSpec:
    """Layout and descriptors of a channel."""

    capacity: int
    """Size of the largest message, in bytes."""
    num_entries: int
    """Entries of the ring, which is the number of messages that may be unread at a time."""
    memory_fd: int
    read_fds: tuple[int, ...]
    """A pipe's reading end for each reader."""
    write_fds: tuple[int, ...]

    @staticmethod
    def create(capacity: int, num_readers: int, *, num_entries: int = 4) -> ChannelSpec:
        """Make the memory and the pipes of a channel. Raises as `resize_memory_file` does."""
        pipes = [os.pipe() for _ in range(num_readers)]
        spec = ChannelSpec(
            capacity=capacity,
            num_entries=num_entries,
            memory_fd=os.memfd_create("nvcli-channel"),
            read_fds=tuple(read for read, _ in pipes),
            write_fds=tuple(write for _, write in pipes),
        )
        # Pages come into being when they are first written: capacity that is never used costs nothing.
        resize_memory_file(spec.memory_fd, spec.num_bytes)
        return spec

    def resized(self, capacity: int, *, num_entries: int) -> ChannelSpec:
        """Return the channel, not yet opened by anyone, with room for other messages. Raises as `resize_memory_file`
        does."""
        spec = replace(self, capacity=capacity, num_entries=num_entries)
        resize_memory_file(spec.memory_fd, spec.num_bytes)
        return spec

    @property
    def entry_bytes(self) -> int:
        return round_up(_HEADER.size + self.capacity, _ALIGN)

    @property
    def ack_bytes(self) -> int:
        return len(self.read_fds) * _ALIGN

    @property
    def num_bytes(self) -> int:
        return self.ack_bytes + self.num_entries * self.entry_bytes

    def entry_offset(self, sequence: int) -> int:
        """Return the offset of a message's entry in the memory, in bytes."""
        return self.ack_bytes + sequence % self.num_entries * self.entry_bytes

    def reader_fds(self, reader: int) -> tuple[int, ...]:
        """The descriptors to pass to this reader's process."""
        return (self.memory_fd, self.read_fds[reader])

    def writer_fds(self) -> tuple[int, ...]:
        """The descriptors to pass to the writer's process."""
        return (self.memory_fd, *self.write_fds)


def _acks(memory: mmap.mmap, spec: ChannelSpec) -> memoryview:
    """View the number of the last message that each reader has read: one number in every `_ALIGN` bytes.

    Reading or writing an element of a view is atomic. `struct` is not: it zeroes the bytes before it packs them, and a
    writer that looked in between would think the reader far behind.
    """
    return memoryview(memory)[: spec.ack_bytes].cast("Q")


class ChannelWriter:
    """The writing end, for use by one thread."""

    def __init__(self, spec: ChannelSpec) -> None:
        self._spec = spec
        self._memory = mmap.mmap(spec.memory_fd, spec.num_bytes)
        self._acks = _acks(self._memory, spec)[:: _ALIGN // 8]
        self._write_fds = spec.write_fds
        self._sequence = 0

    @property
    def has_room(self) -> bool:
        """Whether every reader has room for another message."""
        return self._sequence < min(self._acks) + self._spec.num_entries

    def send(self, message: bytes) -> None:
        """Send a message, for which there must be room. Raises ChannelClosed if a reader is gone."""
        spec = self._spec
        sequence = self._sequence + 1
        if len(message) > spec.capacity:
            raise ValueError(f"message of {len(message)} bytes is larger than the channel's {spec.capacity}")
        assert self.has_room, "it would overwrite a message that was not read"
        start = spec.entry_offset(sequence) + _HEADER.size
        self._memory[start : start + len(message)] = message
        _HEADER.pack_into(self._memory, start - _HEADER.size, sequence, len(message))
        self._sequence = sequence
        try:
            for fd in self._write_fds:
                os.write(fd, b"\0")
        except BrokenPipeError:
            raise ChannelClosed from None

    def close(self) -> None:
        """Close the writing end, which ends the readers' stream. Idempotent."""
        close_fds(self._write_fds)
        self._write_fds = ()
        self._acks.release()
        self._memory.close()


class ChannelReader:
    """One reading end, for use by one thread."""

    def __init__(self, spec: ChannelSpec, reader: int) -> None:
        self._spec = spec
        self._memory = mmap.mmap(spec.memory_fd, spec.num_bytes)
        self._fd = spec.read_fds[reader]
        self._poll = select.poll()
        self._poll.register(self._fd, select.POLLIN)
        self._acks = _acks(self._memory, spec)
        self._own_ack = reader * _ALIGN // 8
        self._sequence = 0

    def fileno(self) -> int:
        """A descriptor that becomes readable when a message arrives or the writer is gone."""
        return self._fd

    def receive(self) -> bytes:
        """Wait for the next message. Raises ChannelClosed if the writer is gone."""
        if not os.read(self._fd, 1):
            raise ChannelClosed
        spec = self._spec
        expected = self._sequence + 1
        offset = spec.entry_offset(expected)
        sequence, length = _HEADER.unpack_from(self._memory, offset)
        assert sequence == expected, f"expected message {expected}, got {sequence}"
        start = offset + _HEADER.size
        message = self._memory[start : start + length]
        self._sequence = expected
        self._acks[self._own_ack] = expected
        return message

    def poll(self, timeout: float) -> bool:
        """Wait up to `timeout` seconds; return whether `receive` would return at once."""
        return bool(self._poll.poll(timeout * 1000))

    def close(self) -> None:
        """Close this reading end. Idempotent."""
        if not self._memory.closed:
            os.close(self._fd)
            self._acks.release()
            self._memory.close()


def close_fds(fds: tuple[int, ...]) -> None:
    """Close these file descriptors."""
    for fd in fds:
        os.close(fd)

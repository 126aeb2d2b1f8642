"""The block manager never loses, doubles or mixes up a block, whatever is asked of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from nvcli.core.messages import pack
from nvcli.engine.block_manager import BlockManager, hash_blocks


def hashes_of(tokens: list[int], block_size: int = 4) -> list[bytes]:
    return hash_blocks(pack(tokens), block_size)


def match(manager: BlockManager, hashes: list[bytes]) -> list[int]:
    """The longest run of registered blocks for these chained hashes, each with one more reference."""
    blocks = manager.find_leading(hashes)
    assert blocks == [manager.find(block_hash) for block_hash in hashes[: len(blocks)]]
    assert len(blocks) == len(hashes) or manager.find(hashes[len(blocks)]) is None
    manager.hold(blocks)
    return blocks


def test_hashes_depend_on_everything_before() -> None:
    """Two blocks with equal tokens but different pasts must not be taken for one another."""
    a, b = hashes_of([1, 2, 3, 4, 9, 9, 9, 9]), hashes_of([5, 6, 7, 8, 9, 9, 9, 9])
    assert a[1] != b[1]
    assert len({*a, *b}) == 4


def test_partial_blocks_are_not_hashed() -> None:
    assert hashes_of([1, 2, 3]) == []
    assert len(hashes_of([1, 2, 3, 4, 5])) == 1


def test_chain_continues_from_a_parent() -> None:
    tokens = list(range(12))
    whole = hashes_of(tokens)
    assert hash_blocks(pack(tokens[4:]), 4, parent=whole[0]) == whole[1:]


def test_released_blocks_are_found_again_until_they_are_needed() -> None:
    manager = BlockManager(3)
    blocks = manager.allocate(2)
    assert blocks is not None
    manager.register(blocks, hashes_of(list(range(8))))
    manager.release(blocks)
    assert manager.num_free == 3
    assert match(manager, hashes_of(list(range(8)))) == blocks
    manager.release(blocks)
    # The unhashed block goes first, then the end of the prefix, so that its beginning stays useful.
    assert manager.allocate(2) is not None
    assert match(manager, hashes_of(list(range(8)))) == blocks[:1]


def test_forgotten_prefixes_are_not_found_and_no_block_is_lost() -> None:
    manager = BlockManager(4)
    held, released = manager.allocate(1), manager.allocate(1)
    assert held is not None
    assert released is not None
    hashes = hashes_of(list(range(8)))
    manager.register(held + released, hashes)
    manager.release(released)
    manager.forget_prefixes()
    assert match(manager, hashes) == []
    manager.check_integrity([held])
    manager.register(held, hashes[1:])  # a holder that goes on computes and registers as before
    manager.release(held)
    manager.check_integrity([])
    assert manager.num_free == 4
    assert match(manager, hashes[1:]) == held


def test_allocation_is_all_or_nothing_and_keeps_a_reserve() -> None:
    manager = BlockManager(4)
    assert manager.allocate(5) is None
    assert manager.allocate(3, reserve=2) is None
    assert manager.num_free == 4
    taken = manager.allocate(2, reserve=2)
    assert taken is not None
    assert manager.num_used == 2
    assert 0 not in taken


def test_caching_can_be_off() -> None:
    manager = BlockManager(2, enable_prefix_caching=False)
    blocks = manager.allocate(1)
    assert blocks is not None
    manager.register(blocks[:1], hashes_of([1, 2, 3, 4]))
    assert match(manager, hashes_of([1, 2, 3, 4])) == []


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_random_operations_keep_integrity(data: st.DataObject) -> None:
    """Sharing, eviction and release in any order: counts, lists and index agree after each, and a match is true."""
    block_size = 2
    manager = BlockManager(data.draw(st.integers(1, 12)))
    contents: dict[int, tuple[int, ...]] = {}
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(1, 40))):
        if tables and data.draw(st.booleans()):
            manager.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        else:
            tokens = data.draw(st.lists(st.integers(0, 1), max_size=10))
            hashes = hashes_of(tokens, block_size)
            table = match(manager, hashes)
            for i, block in enumerate(table):
                assert contents[block] == tuple(tokens[: (i + 1) * block_size])
            fresh = manager.allocate(len(hashes) - len(table))
            if fresh is None:
                assert len(hashes) - len(table) > manager.num_free
                manager.release(table)
            else:
                for i, block in enumerate(fresh, start=len(table)):
                    contents[block] = tuple(tokens[: (i + 1) * block_size])
                manager.register(fresh, hashes[len(table) :])
                tables.append(table + fresh)
        manager.check_integrity(tables)

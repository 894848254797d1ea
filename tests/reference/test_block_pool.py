"""Block pool: no block has two owners, and a found block is one that was registered."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tierkv.reference.block_pool import Block, BlockPool, chained_hash, root_hash
from tierkv.types.engine import NULL_BLOCK_ID


def ids(blocks: list[Block]) -> list[int]:
    """Their ids, in order."""
    return [block.block_id for block in blocks]


def test_the_null_block_is_never_handed_out() -> None:
    """Block 0 is the placeholder in every table; every request would read its data."""
    pool = BlockPool(4)
    assert pool.null_block.is_null
    assert pool.null_block.block_id == NULL_BLOCK_ID
    assert sorted(ids(pool.allocate(pool.num_free))) == [1, 2, 3]


def test_blocks_leave_in_the_order_in_which_they_were_released() -> None:
    """The free queue is the eviction order: the tail of a request, released first, must go first."""
    pool = BlockPool(5)
    first, second, third, fourth = pool.allocate(4)
    pool.release([third, second, first])
    pool.release([fourth])
    assert ids(pool.allocate(4)) == [3, 2, 1, 4]


def test_a_found_block_leaves_the_queue_and_keeps_its_content() -> None:
    """This is a prefix hit: a free block must be taken before the queue hands it out."""
    pool = BlockPool(4)
    block = pool.allocate(1)[0]
    pool.register(block, b"h", 0)
    pool.release([block])
    assert pool.find(b"h", 0) is block
    pool.hold([block])
    assert block.block_id not in ids(pool.allocate(2))
    assert pool.num_free == 0
    assert pool.find(b"h", 0) is block


def test_a_block_handed_out_anew_is_found_no_more() -> None:
    """Its bytes are about to be overwritten."""
    pool = BlockPool(2)
    block = pool.allocate(1)[0]
    pool.register(block, b"h", 0)
    pool.release([block])
    assert pool.allocate(1) == [block]
    assert block.block_hash is None
    assert pool.find(b"h", 0) is None


def test_groups_do_not_find_each_others_blocks() -> None:
    """The same tokens have other KV in another group's layers."""
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    pool.register(one, b"h", 0)
    assert pool.find(b"h", 1) is None
    pool.register(two, b"h", 1)
    assert pool.find(b"h", 0) is one
    assert pool.find(b"h", 1) is two


def test_two_blocks_of_one_content_outlive_each_other() -> None:
    """Two requests that compute the same prefix side by side: evicting one copy must not hide the other."""
    pool = BlockPool(3)
    one, two = pool.allocate(2)
    pool.register(one, b"h", 0)
    pool.register(two, b"h", 0)
    assert pool.find(b"h", 0) is one
    pool.release([one])
    pool.allocate(1)
    assert pool.find(b"h", 0) is two


def test_a_reset_is_refused_while_blocks_are_held() -> None:
    """Their holders rely on them, and would register them again under a cache that was meant to be empty."""
    pool = BlockPool(3)
    block, other = pool.allocate(2)
    pool.register(block, b"h", 0)
    pool.release([block])
    assert not pool.reset_prefix_cache()
    assert pool.find(b"h", 0) is block
    pool.release([other])
    assert pool.reset_prefix_cache()
    assert pool.find(b"h", 0) is None


def test_each_entry_into_the_free_queue_has_a_number_of_its_own() -> None:
    """A core that walks the queue over several steps must notice that a block left it and came back."""
    pool = BlockPool(4)
    first, second, third = list(pool.free_queue)
    assert pool.free_queue.head() is first
    assert pool.free_queue.after(first) is second
    assert pool.free_queue.after(third) is None
    before = pool.free_queue.entry(first)
    pool.release(pool.allocate(1))
    assert pool.free_queue.head() is second
    assert pool.free_queue.after(third) is first
    assert pool.free_queue.entry(first) not in {None, before}
    pool.hold([first])
    assert pool.free_queue.entry(first) is None


def test_misuse_is_refused() -> None:
    """Each of these would give one block two owners, or register bytes that were never computed."""
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="2 blocks were asked for and 1 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    block = pool.allocate(1)[0]
    pool.register(block, b"h", 0)
    pool.register(block, b"h", 0)
    with pytest.raises(ValueError, match="block 1 holds other content"):
        pool.register(block, b"i", 0)
    pool.release([block])
    with pytest.raises(ValueError, match="block 1 was released and no request holds it"):
        pool.release([block])
    with pytest.raises(ValueError, match="block 1 is not held"):
        pool.register(block, b"h", 0)
    with pytest.raises(ValueError, match="block 0 is not held"):
        pool.register(pool.null_block, b"h", 0)
    with pytest.raises(ValueError, match="num_blocks = 0"):
        BlockPool(0)


def test_hashes_name_the_whole_prefix() -> None:
    """A hash that forgot what came before, or the salt, would let one conversation read another's KV."""
    root = root_hash("")
    one = chained_hash(root, [1, 2])
    assert len(one) == 16
    assert one == chained_hash(root_hash(""), (1, 2))
    others = [
        chained_hash(root_hash("salt"), [1, 2]),
        chained_hash(root, [2, 1]),
        chained_hash(root, [1, 2, 0]),
        chained_hash(one, [1, 2]),
        chained_hash(root, [1]),
    ]
    assert len({one, *others}) == 6


class PoolMachine(RuleBasedStateMachine):
    """Any sequence of calls, against a model that is a dict of reference counts and a list in eviction order."""

    @initialize(num_blocks=st.integers(1, 8))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.held: dict[Block, int] = {}
        self.queue: list[Block] = list(self.pool.free_queue)
        self.content: dict[Block, tuple[bytes, int]] = {}

    @rule(count=st.integers(0, 4))
    def allocate(self, count: int) -> None:
        if count > len(self.queue):
            with pytest.raises(ValueError, match="were asked for"):
                self.pool.allocate(count)
            return
        blocks = self.pool.allocate(count)
        assert blocks == self.queue[:count]
        del self.queue[:count]
        for block in blocks:
            self.held[block] = 1
            self.content.pop(block, None)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = data.draw(st.lists(st.sampled_from(list(self.held)), unique=True))
        self.pool.release(blocks)
        for block in blocks:
            self.held[block] -= 1
            if not self.held[block]:
                del self.held[block]
                self.queue.append(block)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), key=st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 1)))
    def register(self, data: st.DataObject, key: tuple[bytes, int]) -> None:
        block = data.draw(st.sampled_from(list(self.held)))
        if self.content.setdefault(block, key) == key:
            self.pool.register(block, *key)
        else:
            with pytest.raises(ValueError, match="other content"):
                self.pool.register(block, *key)

    @rule(key=st.tuples(st.sampled_from([b"a", b"b", b"c"]), st.integers(0, 1)))
    def find_and_hold(self, key: tuple[bytes, int]) -> None:
        block = self.pool.find(*key)
        assert (block is None) == (key not in self.content.values())
        if block is None:
            return
        assert self.content[block] == key
        self.pool.hold([block])
        if block in self.held:
            self.held[block] += 1
        else:
            self.queue.remove(block)
            self.held[block] = 1

    @rule()
    def reset(self) -> None:
        assert self.pool.reset_prefix_cache() == (not self.held)
        if not self.held:
            self.content.clear()

    @invariant()
    def agrees_with_the_model(self) -> None:
        assert list(self.pool.free_queue) == self.queue
        assert self.pool.num_free == len(self.queue)
        assert self.pool.free_queue.head() is (self.queue[0] if self.queue else None)
        entries = [self.pool.free_queue.entry(block) for block in self.queue]
        assert None not in entries
        assert len(set(entries)) == len(entries)
        assert not any(self.pool.free_queue.entry(block) for block in self.held)
        assert self.pool.num_held == len(self.held)
        assert not set(self.queue) & set(self.held)
        for block in self.pool._blocks[1:]:
            assert block.ref_cnt == self.held.get(block, 0)
            assert block.block_hash == self.content.get(block, (None, 0))[0]
        assert self.pool.null_block.ref_cnt == 0
        assert self.pool.null_block.block_hash is None


class TestPool(PoolMachine.TestCase):
    """Run the machine above."""

    settings = settings(max_examples=60, stateful_step_count=40)

"""Rows that follow one another are used, written and stored as a run: the result is that of one row after the other."""

from __future__ import annotations

import random

import pytest
from at_rest import content_of
from calls import calls_of

from tierkv.manager.lower.residency import Residency
from tierkv.manager.lower.row_table import STORED, WRITING, RowTable
from tierkv.policies.lru import LruPolicy
from tierkv.types.keys import Key, make_key

CHUNKS = 64
KEYS = [make_key(b"%016d" % number, 0) for number in range(CHUNKS)]


def written(keys: list[Key]) -> Residency:
    """Account of a tier after two writes of these chunks, one after the other, and a read."""
    tier = Residency("t", LruPolicy(CHUNKS), None, 1.0)
    tier.begin_write(KEYS, 8192 * CHUNKS)
    tier.add(content_of([(key, 4096 + number) for number, key in enumerate(keys)]))
    tier.end_write(keys, 8192 * CHUNKS)
    tier.validate(None)
    tier.begin_read(keys)
    tier.validate(None)
    assert tier.listed.evictable == 0, "all are being read"
    tier.end_read(keys)
    tier.validate(None)
    return tier


@pytest.mark.parametrize("shuffled", [False, True])
def test_a_run_of_rows_is_accounted_as_any_others(shuffled: bool) -> None:
    """Sizes belong to their chunks, and all chunks can be evicted in the end."""
    keys = random.Random(1).sample(KEYS, CHUNKS) if shuffled else KEYS[::-1]
    tier = written(keys)
    sizes = {key: size for key, size, _ in tier.rows.listed()}
    assert sizes == {key: 4096 + number for number, key in enumerate(keys)}
    assert tier.used_bytes == sum(sizes.values())
    assert (tier.listed.evictable, tier.reserved_bytes, tier.num_writing) == (CHUNKS, 0, 0)
    assert sorted(tier.evict(CHUNKS)) == sorted(keys)


@pytest.mark.parametrize(("change", "shifted"), [("none", True), ("flag", False), ("use", False), ("gap", False)])
def test_a_run_that_is_not_alike_is_left_alone(change: str, shifted: bool) -> None:
    """One row with another flag, or in use, or out of order: nothing changes."""
    table = RowTable()
    rows = table.add(KEYS)
    table.flags[rows[5]] = WRITING if change == "flag" else 0
    table.uses[rows[6]] = change == "use"
    some = rows[:20] + rows[21:] if change == "gap" else rows
    before = bytes(table.flags), table.uses.tolist()
    assert table.shift(some, (0, 1), (0, STORED)) is shifted
    assert ((bytes(table.flags), table.uses.tolist()) == before) is not shifted


def test_written_chunks_cost_few_calls() -> None:
    """Every chunk passes here on the engine's thread, several times on its way to a tier and back."""
    tier = written(KEYS)
    assert calls_of(tier.begin_read, KEYS) < CHUNKS // 2
    assert calls_of(tier.end_read, KEYS) < CHUNKS // 2


def test_an_index_without_any_usable_key_is_passed_over() -> None:
    """A damaged index may list foreign keys alone: the tier opens with what the other parts of it have."""
    tier = Residency("t", LruPolicy(CHUNKS), None, 1.0)
    tier.load_index(content_of([(Key(b"x"), 4096)]))
    tier.load_index(content_of([(key, 4096) for key in KEYS]))
    assert len(tier) == CHUNKS
    tier.validate(None)

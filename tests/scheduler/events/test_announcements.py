"""Announcements: what tiers have held since an earlier process is reported once, in order, a few chunks per step."""

from __future__ import annotations

import random
from array import array

from at_rest import content_of
from core_parts import Core, disk, make_core, objects

from tierkv.scheduler.events.announcements import ANNOUNCED_PER_STEP, CONNECT_WAIT_S, Announcements, parents_first
from tierkv.scheduler.events.snapshots import Snapshot
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.keys import Key, make_key

STORED = CacheEventKind.STORED


def chunks_of(core: Core, count: int, start: int = 0) -> dict[Key, Snapshot]:
    """Snapshots of the chunks of one prompt, as they come from a file."""
    group = core.geometry.groups[0]
    found = {}
    for number in range(start, start + count):
        end = number.to_bytes(4, "big") * 8
        parent = None if number == start else (number - 1).to_bytes(4, "big") * 8
        words = array("q", [number] * group.chunk_tokens)
        found[make_key(end, 0)] = Snapshot((end,), parent, words, None, None, group, is_kept=True, is_restored=True)
    return found


def opened(core: Core, snapshots: dict[Key, Snapshot]) -> Announcements:
    """Announcements of a stack that has just opened."""
    core.block_events.restore(snapshots)
    announcements = Announcements(core.block_events, core.manager.tiers, core.manager.step)
    announcements.begin(snapshots)
    assert announcements.next_events() == []
    core.begin(core.now + CONNECT_WAIT_S)
    return announcements


def announced(core: Core, announcements: Announcements) -> list[tuple[str, Key]]:
    """Tiers and keys of all steps until nothing is left, described as a queue would."""
    found: list[tuple[str, Key]] = []
    while True:
        was_pending = announcements.is_pending
        for event in announcements.next_events():
            core.block_events.describe([event])
            found += [(event.tier, key) for key in event.keys]
        if not was_pending:
            return found


def test_each_chunk_of_each_local_tier_is_announced_once() -> None:
    """A chunk on two disks is in both; one that no tier lists is not announced; a shared tier lists nothing."""
    core = make_core(tiers=[disk(name="fast"), disk(name="slow"), objects()])
    snapshots = chunks_of(core, 5)
    keys = list(snapshots)
    core.lower[0].load_index(content_of([(keys[0], 100), (keys[1], 100)]))
    core.lower[1].load_index(content_of([(keys[1], 100), (keys[3], 100)]))
    announcements = opened(core, snapshots)
    assert announced(core, announcements) == [
        ("fast", keys[0]), ("fast", keys[1]), ("slow", keys[1]), ("slow", keys[3])
    ]  # fmt: skip
    assert announced(core, announcements) == []


def test_a_step_announces_a_bounded_number() -> None:
    """A disk may list a million chunks; the engine's step must not describe all of them."""
    core = make_core(tiers=[disk(name="disk")])
    snapshots = chunks_of(core, 3 * ANNOUNCED_PER_STEP + 1)
    core.lower[0].load_index(content_of([(key, 100) for key in snapshots]))
    announcements = opened(core, snapshots)
    steps = []
    while announcements.is_pending:
        steps.append(sum(len(event.keys) for event in announcements.next_events()))
    assert steps == [ANNOUNCED_PER_STEP] * 3 + [1]


def test_subscribers_have_time_to_connect_again() -> None:
    """A publisher drops what it sends before they have; meanwhile an idle engine must keep stepping."""
    core = make_core(tiers=[disk(name="disk")])
    snapshots = chunks_of(core, 1)
    core.lower[0].load_index(content_of([(key, 100) for key in snapshots]))
    announcements = Announcements(core.block_events, core.manager.tiers, core.manager.step)
    announcements.begin(snapshots)
    core.begin(100.0)
    assert announcements.next_events() == []
    core.begin(100.0 + CONNECT_WAIT_S / 2)
    assert announcements.next_events() == []
    assert announcements.is_pending
    core.begin(100.0 + CONNECT_WAIT_S)
    assert len(announcements.next_events()) == 1
    assert not announcements.is_pending


def test_a_chunk_follows_its_parent(rng: random.Random) -> None:
    """A router finds the place of a chunk by its parent: without it, the chunk would count as the start of a prompt."""
    core = make_core(tiers=[disk(name="disk")])
    snapshots = chunks_of(core, 30) | chunks_of(core, 30, start=1000)
    shuffled = list(snapshots.items())
    rng.shuffle(shuffled)
    order = list(parents_first(dict(shuffled)))
    assert sorted(order) == sorted(snapshots)
    place = {snapshots[key].block_hashes[-1]: number for number, key in enumerate(order)}
    for snapshot in snapshots.values():
        if snapshot.parent_block_hash is not None:
            assert place[snapshot.parent_block_hash] < place[snapshot.block_hashes[-1]]


def test_chunks_that_are_parents_of_each_other_end() -> None:
    """Such rows can only be forged; the stack must open all the same."""
    core = make_core(tiers=[disk(name="disk")])
    snapshots = chunks_of(core, 3)
    first, *_, last = snapshots.values()
    first.parent_block_hash = last.block_hashes[-1]
    assert sorted(parents_first(snapshots)) == sorted(snapshots)


def test_a_chunk_that_was_removed_meanwhile_is_not_announced() -> None:
    """The consumer would believe in a chunk for ever: its removal was reported before."""
    core = make_core(tiers=[disk(name="disk")])
    snapshots = chunks_of(core, 3)
    keys = list(snapshots)
    core.lower[0].load_index(content_of([(key, 100) for key in keys]))
    announcements = opened(core, snapshots)
    core.lower[0].residency.schedule_delete(keys[1])
    assert announced(core, announcements) == [("disk", keys[0]), ("disk", keys[2])]


def test_a_chunk_that_was_reported_meanwhile_is_not_announced_again() -> None:
    """Written again in the first steps: the consumer knows it."""
    core = make_core(tiers=[disk(name="disk")])
    snapshots = chunks_of(core, 3)
    keys = list(snapshots)
    core.lower[0].load_index(content_of([(key, 100) for key in keys]))
    announcements = opened(core, snapshots)
    core.block_events.describe([CacheEvent(STORED, "disk", (keys[1],))])
    assert announced(core, announcements) == [("disk", keys[0]), ("disk", keys[2])]


def test_a_tier_that_joins_later_is_announced_then() -> None:
    """A disk that was not mounted at the start: what it holds attracts traffic as soon as it is there."""
    core = make_core(tiers=[disk(name="disk")])
    snapshots = chunks_of(core, 3)
    keys = list(snapshots)
    core.lower[0].load_index(content_of([(keys[0], 100)]))
    announcements = opened(core, snapshots)
    assert announced(core, announcements) == [("disk", keys[0])]
    other = make_core(tiers=[disk(name="absent"), disk(name="late")]).lower[1]
    other.load_index(content_of([(key, 100) for key in keys]))
    core.manager.attach(other)
    assert announced(core, announcements) == [("late", key) for key in keys]


def test_a_restored_snapshot_stays_until_its_tier_loses_the_chunk() -> None:
    """A host tier that loses a chunk first must not take the tokens with it."""
    core = make_core(tiers=[disk(name="disk")])
    snapshots = chunks_of(core, 1)
    (key,) = snapshots
    core.lower[0].load_index(content_of([(key, 100)]))
    announcements = opened(core, snapshots)
    removed = CacheEventKind.REMOVED
    core.block_events.describe([CacheEvent(STORED, "host", (key,)), CacheEvent(removed, "host", (key,))])
    assert announced(core, announcements) == [("disk", key)]
    core.block_events.describe([CacheEvent(STORED, "host", (key,)), CacheEvent(removed, "host", (key,))])
    assert len(core.block_events) == 1
    core.block_events.describe([CacheEvent(removed, "disk", (key,))])
    assert not len(core.block_events)

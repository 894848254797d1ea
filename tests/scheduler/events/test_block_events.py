"""Events that describe themselves (spec, section 14): snapshots, fan-out, and the time for which they are kept.

:class:`core_mirror.BlockMirror` checks after every move of tests/scheduler/test_machine.py that a replay of described
events gives exactly the chunks of each tier.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from calls import calls_of
from core_parts import Core, disk, make_core, objects
from core_truth import BedRequest, engine_spec, link

from tierkv.errors import EngineProtocolError
from tierkv.manager.step_budget import StepBudget
from tierkv.metrics.counters import CoreCounters
from tierkv.scheduler.events.block_events import FORGOTTEN_PER_KEY, BlockEvents, take_snapshot
from tierkv.scheduler.events.event_queue import EventQueue
from tierkv.scheduler.store.candidates import Candidate
from tierkv.types.block_events import AllBlocksCleared, BlockEvent, BlockRemoved, BlockStored
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.engine import GroupKind, GroupSpec
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key
from tierkv.types.tier_ops import OutcomeKind, Verb

STORED, REMOVED, CLEARED = CacheEventKind.STORED, CacheEventKind.REMOVED, CacheEventKind.CLEARED
GEOMETRY = Geometry.of(engine_spec((16,), 16), blocks=4)
"""One group: chunks of 64 tokens, four hashes each."""


@dataclass
class Bench:
    """Block events alone, with their warnings."""

    geometry: Geometry = GEOMETRY
    active: bool = True
    snapshots_max: int = 100
    warnings: list[str] = field(default_factory=list)
    counters: CoreCounters = field(default_factory=CoreCounters)

    def __post_init__(self) -> None:
        self.events = BlockEvents(
            self.geometry, self.counters, self.warnings.append, active=self.active, snapshots_max=self.snapshots_max
        )

    def key(self, request: BedRequest, index: int, group: int = 0) -> Key:
        per_chunk = self.geometry.groups[group].hashes_per_chunk
        return make_key(request.block_hashes[(index + 1) * per_chunk - 1], group)

    def grant(self, request: BedRequest, *indices: int, group: int = 0) -> list[Key]:
        """Begin a store of these chunks."""
        keys = [self.key(request, i, group) for i in indices]
        size = self.geometry.groups[group].chunk_tokens
        self.events.on_store_granted(
            request, [Candidate(key, group, i, (i + 1) * size) for key, i in zip(keys, indices, strict=True)]
        )
        return keys

    def drain(self, *events: tuple[CacheEventKind, str, Sequence[Key]]) -> list[BlockEvent]:
        described = self.events.describe(CacheEvent(kind, tier, tuple(keys)) for kind, tier, keys in events)
        self.events.finish_ended_stores()
        self.events.forget_some(StepBudget().share())
        return described


def request_of(tokens: int = 256, hash_block_tokens: int = 16) -> BedRequest:
    """A request with tokens 0, 1, 2, ..."""
    return BedRequest("a", range(tokens), hash_block_tokens)


def chain(tokens: Sequence[int]) -> list[bytes]:
    """The hash after each token, by hand."""
    hashes: list[bytes] = []
    for token in tokens:
        hashes.append(link(hashes[-1] if hashes else b"", token))
    return hashes


def test_s96_disabled_keeps_nothing_and_gives_placeholders() -> None:
    """Without payloads nothing is kept, events are placeholders, and nothing is logged."""
    bench = Bench(active=False)
    (key,) = bench.grant(request_of(), 0)
    bench.events.on_store_ended([key])
    stored, removed = bench.drain((STORED, "host", [key]), (REMOVED, "host", [key]))
    assert stored == BlockStored((key[:-4],), None, (), 0, None, None, None, 0, None, None, "CPU", "host")
    assert removed == BlockRemoved((key[:-4],), 0, "CPU", "host")
    assert not len(bench.events)
    assert not bench.events._ended
    assert not bench.warnings
    assert not bench.counters.events_undescribed


@pytest.mark.parametrize(("index", "parent"), [(0, None), (2, 127)])
def test_s97_a_stored_chunk_is_described_whole(index: int, parent: int | None) -> None:
    """A router rebuilds the prefix tree from this: hashes in order, tokens, block size, and parent."""
    bench = Bench()
    request = request_of()
    request.lora_id, request.lora_name = 7, "french"
    keys = bench.grant(request, index)
    (event,) = bench.drain((STORED, "host", keys))
    hashes = chain(range(256))
    first = index * 64
    assert event == BlockStored(
        block_hashes=tuple(hashes[i] for i in range(first + 15, first + 64, 16)),
        parent_block_hash=None if parent is None else hashes[parent],
        token_ids=tuple(range(first, first + 64)),
        block_size=16,
        lora_id=7,
        lora_name="french",
        extra_keys=None,
        group_idx=0,
        kind="full_attention",
        window=None,
        medium="CPU",
        tier="host",
    )
    assert event.block_hashes[-1] == keys[0][:-4]


@pytest.mark.parametrize("has_keys", [True, False])
def test_what_hashes_have_beside_tokens_is_in_the_event(has_keys: bool) -> None:
    """The tokens in the place of two pictures are equal: a router that knows no more would take one for the other."""
    bench = Bench()
    request = request_of()
    request.extra_keys = lambda start, stop: (("picture", 70 - start),) if has_keys and start <= 70 < stop else None
    (event,) = bench.drain((STORED, "host", bench.grant(request, 1)))
    assert isinstance(event, BlockStored)
    assert event.extra_keys == ((("picture", 6),), None, None, None) if has_keys else event.extra_keys is None


def test_keys_that_cannot_be_told_cost_the_payload_alone() -> None:
    """A fault in the engine ends no step."""
    bench = Bench()
    request = request_of()
    request.extra_keys = lambda start, stop: request.pictures[start:stop]
    (event,) = bench.drain((STORED, "host", bench.grant(request, 0)))
    assert isinstance(event, BlockStored)
    assert event.block_size == 0


def test_s98_stored_twice_removed_once() -> None:
    """The payload is reused; the removal names all hashes once, and then the payload is forgotten."""
    bench = Bench()
    keys = bench.grant(request_of(), 0)
    first, second, removed = bench.drain((STORED, "host", keys), (STORED, "host", keys), (REMOVED, "host", keys))
    assert first == second
    assert isinstance(first, BlockStored)
    assert removed == BlockRemoved(first.block_hashes, 0, "CPU", "host")
    bench.events.on_store_ended(keys)
    assert bench.drain() == []
    assert bench.drain((REMOVED, "host", keys)) == [BlockRemoved((keys[0][:-4],), 0, "CPU", "host")]
    assert not len(bench.events)


def test_s99_a_removal_over_two_groups_is_two_events() -> None:
    """A consumer keeps groups apart; their order is that of the raw event."""
    bench = Bench(Geometry.of(engine_spec((16, 32), 16), blocks=2))
    request = request_of()
    one, two = bench.grant(request, 0, 1, group=1)
    (other,) = bench.grant(request, 0, group=0)
    (stored,) = bench.drain((STORED, "host", [one]))
    assert isinstance(stored, BlockStored)
    removed = bench.drain((REMOVED, "host", [two, other, one]))
    assert [(event.group_idx, len(event.block_hashes)) for event in removed if isinstance(event, BlockRemoved)] == [
        (1, 8),
        (0, 2),
    ]
    assert removed[0] == BlockRemoved(tuple(chain(range(128))[i] for i in (*range(79, 128, 16), *range(15, 64, 16))), 1,
                                      "CPU", "host")  # fmt: skip


def test_s100_a_windowed_group_has_placeholders() -> None:
    """The chunks of a window are no prefix, so a payload would describe absent chunks."""
    full = engine_spec((16,), 16).groups[0]
    window = GroupSpec(16, (64,), GroupKind.SLIDING_WINDOW, window_tokens=64)
    bench = Bench(Geometry.of(replace(engine_spec((16,), 16), groups=(full, window)), blocks=4))
    request = request_of()
    keys = bench.grant(request, 0, group=1) + bench.grant(request, 0)
    placeholder, whole = bench.drain((STORED, "host", keys))
    assert isinstance(placeholder, BlockStored)
    assert isinstance(whole, BlockStored)
    assert (placeholder.group_idx, placeholder.token_ids, len(placeholder.block_hashes)) == (1, (), 1)
    assert len(whole.token_ids) == 64
    assert list(bench.events.keys()) == [keys[1]]


def stored_in(core: Core, request: BedRequest, tokens: int) -> int:
    """Compute a request and hand its store to the worker. Returns the id of the job."""
    blocks = tokens // 4
    meta = core.schedule(request, computed=0, scheduled=tokens, ids=[range(1, blocks + 1)])
    return meta.stores[0].job_id


def test_s101_a_finished_request_keeps_its_payload() -> None:
    """The store ends after its request, and events are read later still: the tokens are described."""
    core = make_core()
    request = core.arrive(8)
    job = stored_in(core, request, 8)
    core.scheduler.request_finished(request, [[1, 2]])
    tokens = list(request.all_token_ids)
    request.all_token_ids.clear()
    core.report(job)
    assert not core.scheduler._records
    events = core.block_events.describe(core.manager.take_events())
    core.block_events.finish_ended_stores()
    payloads = {event.token_ids for event in events if isinstance(event, BlockStored)}
    assert payloads == {tuple(tokens[:4]), tuple(tokens[4:])}


class Hasty(BedRequest):
    """Request whose tokens or hashes lag behind the computed ones."""

    tokens_told = 0

    @property
    def num_tokens(self) -> int:
        return 64


def test_s102_too_few_tokens_or_hashes_is_an_error() -> None:
    """A truncated payload would make a router match an absent prefix."""
    group = GEOMETRY.groups[0]
    request = request_of(64)
    request.all_token_ids.pop()
    with pytest.raises(EngineProtocolError, match="63 of 64 tokens of chunk 0"):
        take_snapshot(request, group, 0)
    request = request_of(64)
    request.hashes_withheld = 1
    with pytest.raises(EngineProtocolError, match="3 of 4 hashes"):
        take_snapshot(request, group, 0)
    with pytest.raises(EngineProtocolError, match="all_token_ids"):
        take_snapshot(_Bare("a"), group, 0)  # type: ignore[arg-type]  # a request as the plain protocol has it


@dataclass
class _Bare:
    request_id: str


def test_s102_the_error_is_logged_once_and_costs_no_step() -> None:
    """Promise 3: an engine without tokens gets placeholders, one warning with a fix, and its stores."""
    core = make_core()
    request = core.arrive(8)
    request.all_token_ids.clear()
    job = stored_in(core, request, 8)
    core.report(job)
    (event, _) = core.block_events.describe(core.manager.take_events())
    assert isinstance(event, BlockStored)
    assert event.token_ids == ()
    bench = Bench()
    for _ in range(3):
        blank = request_of()
        blank.all_token_ids.clear()
        bench.grant(blank, 0, 1)
    assert len(bench.warnings) == 1
    assert "all_token_ids" in bench.warnings[0]


def test_s103_reset_empties() -> None:
    """With no tier below the host tier, a reset drops all payloads, also those of stores in flight."""
    core = make_core()
    request = core.arrive(16)
    job = stored_in(core, request, 16)
    core.report(job)
    core.block_events.describe(core.manager.take_events())
    core.block_events.finish_ended_stores()
    assert len(core.block_events) == 4
    core.schedule(request, computed=16, scheduled=0, ids=[()], whole=False)
    core.scheduler.reset_cache()
    assert core.block_events.describe(core.manager.take_events()) == [AllBlocksCleared("CPU", "host")]
    core.block_events.finish_ended_stores()
    core.block_events.forget_some(core.manager.budget.share())
    assert not len(core.block_events)


def test_s103_a_reset_of_the_host_tier_keeps_payloads_below() -> None:
    """Payloads of chunks on disk outlive a reset of the host tier, since these chunks will be promoted again."""
    bench = Bench()
    here, below = bench.grant(request_of(), 0, 1)
    bench.events.on_store_ended([here, below])
    bench.drain((STORED, "host", [here, below]), (STORED, "disk", [below]), (CLEARED, "host", ()))
    assert list(bench.events.keys()) == [below]
    (again,) = bench.drain((STORED, "host", [below]))
    assert isinstance(again, BlockStored)
    assert again.token_ids == tuple(range(64, 128))


def test_a_reset_is_described_at_one_cost_and_forgotten_in_steps() -> None:
    """Promise 5: a hundred thousand payloads are described as cleared in one event, and dropped some per step.

    Meanwhile a chunk that is stored again is described by its payload, shares blocks with present chunks only, and
    keeps its payload however late the others are dropped.
    """
    bench = Bench(snapshots_max=200)
    request = request_of(64 * 100)
    keys = bench.grant(request, *range(100))
    bench.events.on_store_ended(keys)
    bench.drain((STORED, "host", keys))
    budget = StepBudget(16)
    share = budget.share()
    assert bench.events.describe([CacheEvent(CLEARED, "host", ())]) == [AllBlocksCleared("CPU", "host")]
    assert len(bench.events) == 100, "nothing was forgotten in the call that describes the reset"
    bench.grant(request, 7)
    bench.events.on_store_ended([keys[7]])
    (again,) = bench.events.describe([CacheEvent(STORED, "host", (keys[7],))])
    bench.events.finish_ended_stores()
    assert isinstance(again, BlockStored)
    assert again.token_ids == tuple(range(448, 512))
    steps = 0
    while len(bench.events) > 1:
        budget.begin_step()
        before = len(bench.events)
        bench.events.forget_some(share)
        assert before - len(bench.events) <= 16
        steps += 1
    assert steps == 7
    assert list(bench.events.keys()) == [keys[7]]
    (removed,) = bench.drain((REMOVED, "host", [keys[7]]))
    assert isinstance(removed, BlockRemoved)
    assert len(removed.block_hashes) == 4, "previous chunks share no blocks with it"


def test_a_reset_of_many_chunks_is_described_as_fast_as_one_of_few() -> None:
    """Promise 5: the call that describes a reset looks at no chunk."""

    def calls(chunks: int) -> int:
        bench = Bench(snapshots_max=200)
        bench.drain((STORED, "host", bench.grant(request_of(64 * chunks), *range(chunks))))
        return calls_of(bench.events.describe, [CacheEvent(CLEARED, "host", ())])

    assert calls(200) == calls(2)


def test_what_cleared_chunks_shared_is_forgotten_in_steps() -> None:
    """Promise 5: there are many times as many counts of shared blocks as chunks; they are freed some per step, too."""
    bench = Bench(snapshots_max=200)
    keys = bench.grant(request_of(64 * 100), *range(100))
    bench.drain((STORED, "host", keys))
    (counts,) = bench.events._media["host"].sharing.values()
    bench.events.describe([CacheEvent(CLEARED, "host", ())])
    assert len(counts) == 300
    budget = StepBudget(16)
    share = budget.share()
    for _ in range(100):
        budget.begin_step()
        before = len(counts)
        bench.events.forget_some(share)
        assert before - len(counts) <= 16 * FORGOTTEN_PER_KEY
    assert not counts
    assert not bench.events._old_sharing


def test_s104_removed_and_stored_again_in_one_drain() -> None:
    """Events are read once per step; a chunk may be removed and stored again in between."""
    bench = Bench()
    request = request_of()
    keys = bench.grant(request, 0)
    bench.events.on_store_ended(keys)
    bench.drain((STORED, "host", keys))
    bench.grant(request, 0)  # evicted meanwhile, and granted anew
    bench.events.on_store_ended(keys)
    removed, stored = bench.drain((REMOVED, "host", keys), (STORED, "host", keys))
    assert isinstance(removed, BlockRemoved)
    assert isinstance(stored, BlockStored)
    assert removed.block_hashes == stored.block_hashes
    assert stored.token_ids == tuple(range(64))
    assert len(bench.events) == 1


def test_a_payload_serves_every_tier_until_the_last_one_lets_go() -> None:
    """The disk's copy outlives the host's: its removal must name the same hashes."""
    bench = Bench()
    keys = bench.grant(request_of(), 0)
    bench.events.on_store_ended(keys)
    bench.drain((STORED, "host", keys), (STORED, "disk", keys))
    (first,) = bench.drain((REMOVED, "host", keys))
    (last,) = bench.drain((REMOVED, "disk", keys))
    assert isinstance(first, BlockRemoved)
    assert last == replace(first, medium="DISK", tier="disk")
    assert len(first.block_hashes) == 4
    assert not len(bench.events)


def test_chunks_that_share_hash_blocks_share_their_removal() -> None:
    """Two prompts diverge inside a chunk: shared blocks are present until both chunks are removed.

    Otherwise a router with a plain set of blocks would forget a prefix that is still cached.
    """
    bench = Bench()
    (one,) = bench.grant(BedRequest("a", range(64), 16), 0)
    (two,) = bench.grant(BedRequest("b", [*range(32), *range(900, 932)], 16), 0)
    first, second = bench.drain((STORED, "host", [one, two]))
    assert isinstance(first, BlockStored)
    assert isinstance(second, BlockStored)
    assert first.block_hashes[:2] == second.block_hashes[:2]
    assert bench.drain((REMOVED, "host", [one])) == [BlockRemoved(first.block_hashes[2:], 0, "CPU", "host")]
    assert bench.drain((REMOVED, "host", [two])) == [BlockRemoved(second.block_hashes, 0, "CPU", "host")]
    assert not any(sharing for medium in bench.events._media.values() for sharing in medium.sharing.values())


def test_a_failed_store_leaves_no_payload() -> None:
    """A failed store has no event, so its payload is dropped when the store ends."""
    core = make_core()
    request = core.arrive(8)
    job = stored_in(core, request, 8)
    assert len(core.block_events) == 2
    core.report(job, failed={job: frozenset(core.record(request).groups[0].keys)})
    assert core.block_events.describe(core.manager.take_events()) == []
    core.block_events.finish_ended_stores()
    assert not len(core.block_events)


def test_payloads_are_bounded() -> None:
    """Promise 6: a shared tier reports no foreign deletions, so residency is no bound; the oldest are dropped."""
    bench = Bench(snapshots_max=3)
    keys = bench.grant(request_of(), 0, 1, 2, 3)
    assert list(bench.events.keys()) == keys[1:]
    assert bench.counters.payloads_forgotten == 1


def test_warnings_come_once_per_kind() -> None:
    """A cache of an earlier process can have thousands of chunks without a description."""
    bench = Bench()
    request = request_of()
    keys = [bench.key(request, i) for i in range(4)]
    for _ in range(3):
        bench.drain((STORED, "host", keys), (REMOVED, "host", keys))
    assert len(bench.warnings) == 2
    assert bench.counters.events_undescribed == 24


class TestQueue:
    """Events between the step that made them and the engine that takes them."""

    def test_taken_once_in_either_form(self) -> None:
        """Both calls take from one list: no event is taken twice, none is lost."""
        bench = Bench()
        queue = EventQueue(bench.events, bench.counters, StepBudget().share())
        (key,) = bench.grant(request_of(), 0)
        event = CacheEvent(STORED, "host", (key,))
        queue.put_events([event])
        assert queue.take_events() == [event]
        assert queue.take_described_events() == []
        queue.put_events([event])
        (described,) = queue.take_described_events()
        assert isinstance(described, BlockStored)
        assert described.token_ids
        assert queue.take_events() == []

    def test_an_engine_that_never_takes_them(self) -> None:
        """Promise 6: beyond the bound all are dropped and counted, and their tier is reported as cleared; snapshots do
        not depend on when events are taken.
        """
        bench = Bench()
        queue = EventQueue(bench.events, bench.counters, StepBudget().share(), keys_max=4)
        keys = bench.grant(request_of(), 0)
        bench.events.on_store_ended(keys)
        for _ in range(50):
            queue.put_events([CacheEvent(STORED, "host", (keys[0],)), CacheEvent(REMOVED, "host", (keys[0],))])
        first, *rest = queue.take_events()
        assert first == CacheEvent(CLEARED, "host", ())
        assert 2 <= len(rest) <= 6
        assert bench.counters.events_dropped >= 100 - len(rest)
        assert not len(bench.events)

    def test_events_after_dropped_ones_are_described(self) -> None:
        """The tier is not empty: a later removal names all hashes of its chunk, as a consumer may know them."""
        bench = Bench()
        queue = EventQueue(bench.events, bench.counters, StepBudget().share(), keys_max=1)
        keys = bench.grant(request_of(), 0)
        for _ in range(3):
            queue.put_events([CacheEvent(STORED, "host", (keys[0],))])
        queue.put_events([CacheEvent(REMOVED, "host", (keys[0],))])
        cleared, *_, removed = queue.take_described_events()
        assert cleared == AllBlocksCleared("CPU", "host")
        assert isinstance(removed, BlockRemoved)
        assert len(removed.block_hashes) == 4

    def test_disabled_events_are_not_kept(self) -> None:
        """An engine that wants no events pays for no list."""
        bench = Bench(active=False)
        queue = EventQueue(bench.events, bench.counters, StepBudget().share(), kept=False)
        assert queue.needs_every_step
        queue.put_events([CacheEvent(STORED, "host", (Key(b"12345"),))])
        assert queue.take_events() == []
        assert not bench.counters.events_dropped


def test_g16_the_disk_tier_reports_what_it_lost() -> None:
    """Without removals of evicted chunks, routers would keep ghosts: a full disk reports each with all hashes."""
    core = make_core(tiers=(disk(frames=8),), slots=16)
    removed: set[bytes] = set()
    stored: set[bytes] = set()
    for number in range(5):
        request = core.arrive(range(100 * number, 100 * number + 8), f"request {number}")
        meta = core.schedule(request, computed=0, scheduled=8, ids=[range(1, 3)])
        core.report(*(job.job_id for job in meta.stores))
        core.scheduler.request_finished(request, [[1, 2]])
        core.finish_all()
        for event in core.block_events.describe(core.manager.take_events()):
            if event.tier == "disk" and isinstance(event, BlockRemoved):
                removed |= set(event.block_hashes)
            elif event.tier == "disk" and isinstance(event, BlockStored):
                assert event.token_ids
                stored |= set(event.block_hashes)
        core.block_events.finish_ended_stores()
    assert removed
    assert {key[:-4] for key in core.lower[0].residency} == stored - removed


def test_g16_an_object_tier_reports_what_it_lost() -> None:
    """A shared tier, too: a frame that failed its check is deleted, and reported as removed with all hashes."""
    core = make_core(tiers=(objects(),))
    request = core.arrive(8)
    core.report(stored_in(core, request, 8))
    core.scheduler.request_finished(request, [[1, 2]])
    core.finish_all()
    core.scheduler.reset_cache()
    core.block_events.describe(core.manager.take_events())
    core.block_events.finish_ended_stores()
    again = core.arrive(8, "b")
    assert core.ask(again) is None
    while ops := core.manager.take_ops():
        for op in ops:
            core.finish(op, OutcomeKind.CORRUPT if op.verb is Verb.READ else OutcomeKind.OK)
    removed = [event for event in core.block_events.describe(core.manager.take_events())
               if isinstance(event, BlockRemoved) and event.tier == "objects"]  # fmt: skip
    assert {block_hash for event in removed for block_hash in event.block_hashes} == set(request.block_hashes)

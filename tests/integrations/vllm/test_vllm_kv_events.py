"""Events as vLLM publishes them: a router knows the contents of each tier."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
import zmq
from simulation.checks.probe import Probe
from stack_bed import ANSWER, CHUNK_TOKENS, ENGINE, opened, prompts_of, stack_config
from vllm.config import KVEventsConfig
from vllm.distributed.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    EventPublisherFactory,
    KVCacheEvent,
    KVEventBatch,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.events import (
    OffloadingEventGroupSpec,
    OffloadingEventsTracker,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec
from vllm.v1.kv_offload.base import Locality, Medium, OffloadingKVEventsConfig, make_offload_key

from tierkv.config.loading import parse_config
from tierkv.config.resolving import resolve
from tierkv.integrations.vllm.kv_events import Announced, KVEvents, OffloadingEvents, localities, with_events
from tierkv.plugins.loading import load_plugins
from tierkv.reference.engine import Engine
from tierkv.types import block_events as ours
from tierkv.types.cache_events import CacheEvent, CacheEventKind
from tierkv.types.keys import Key, make_key

LAYOUT: dict[str, Any] = {"num_kv_heads": 2, "head_size": 16, "dtype": torch.float32}
FULL, WINDOW = (
    SimpleNamespace(kv_cache_spec=FullAttentionSpec(block_size=8, **LAYOUT)),
    SimpleNamespace(kv_cache_spec=SlidingWindowSpec(block_size=8, sliding_window=24, **LAYOUT)),
)

Place = tuple[str, str | None]
"""Medium and owner."""


@pytest.fixture(autouse=True)
def _hashes_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes, not the 64-bit numbers that vLLM makes of them by default: those have a test of their own."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")


class Router:
    """A consumer that keeps the stored and not removed blocks per medium."""

    def __init__(self) -> None:
        self.blocks: dict[Place, set[Any]] = defaultdict(set)
        self.tokens: dict[Any, tuple[int, ...]] = {}

    def hear(self, events: Iterable[KVCacheEvent]) -> None:
        """Take events, after the way through vLLM's encoding."""
        payload = msgspec.msgpack.encode(KVEventBatch(ts=0.0, events=list(events)))
        for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
            match event:
                case BlockStored():
                    self.blocks[event.medium, event.ownership].update(event.block_hashes)
                    for i, block in enumerate(event.block_hashes):
                        start = i * event.block_size
                        self.tokens[block] = tuple(event.token_ids[start : start + event.block_size])
                case BlockRemoved():
                    self.blocks[event.medium, event.ownership].difference_update(event.block_hashes)
                case AllBlocksCleared():
                    self.blocks.clear()

    @property
    def held(self) -> dict[Place, set[Any]]:
        """Places that hold something."""
        return {place: blocks for place, blocks in self.blocks.items() if blocks}


def kv_events(groups: Iterable[Any] = (FULL,), scale: int = 1, **options: Any) -> KVEvents:
    """For groups of eight tokens a block."""
    groups = list(groups)
    geometry = SimpleNamespace(hash_block_tokens=8 // scale, groups=[SimpleNamespace(block_tokens=8) for _ in groups])
    return KVEvents(geometry, SimpleNamespace(kv_cache_groups=groups), **options)


def last_of(blocks: set[bytes], tokens: dict[bytes, tuple[int, ...]], prompts: list[list[int]]) -> set[bytes]:
    """Blocks that end a chunk, identified by their tokens alone, as in a router."""
    ends = {tuple(prompt[i + 8 : i + CHUNK_TOKENS]) for prompt in prompts for i in range(0, 112, CHUNK_TOKENS)}
    return {block for block in blocks if tokens[block] in ends}


def stored(*hashes: bytes, tier: str = "host", group: int = 0, block_size: int = 8) -> ours.BlockStored:
    """A described chunk."""
    tokens = tuple(range(len(hashes) * block_size))
    return ours.BlockStored(
        hashes,
        b"parent",
        tokens,
        block_size,
        3,
        "wise",
        None,
        group,
        "full_attention",
        None,
        "CPU" if tier == "host" else "DISK",
        tier,
    )


# -- seam B ------------------------------------------------------------------------------------------------------------


def test_a_router_knows_what_every_tier_holds(tmp_path: Path) -> None:
    """A real engine over a small host tier and a disk: after evictions and a reset, the router's contents are right."""
    prompts = prompts_of(5, 6)
    config = stack_config(tmp_path, host_slots=12, events={"self_describing": True})
    router, events = Router(), kv_events(localities={"disk": "LOCAL", "objects": "REMOTE"})
    with opened(config) as stack:
        stack.events.take = list  # type: ignore[method-assign]  # the reference engine takes them raw
        engine = Engine(ENGINE, connector=stack)
        for prompt in prompts:
            engine.add_request(prompt, ANSWER)
        while engine.has_work:
            engine.step()
            router.hear(events.translate(stack.events.take_block_events()))
        stack.flush()
        router.hear(events.translate(stack.events.take_block_events()))
        there = Probe(stack)
        host, disk = {key for key, _ in there.ready_slots()}, there.resident("disk")
        # The key of a chunk ends with the hash of its last block; each chunk has two blocks.
        assert {key[:-4] for key in host} == last_of(router.blocks["CPU", None], router.tokens, prompts)
        assert {key[:-4] for key in disk} == last_of(router.blocks["STORAGE", "disk"], router.tokens, prompts)
        assert len(host) < len(disk)  # it has evicted
        stack.reset_cache()
        router.hear(events.translate(stack.events.take_block_events()))
        assert set(router.held) == {("STORAGE", "disk"), ("STORAGE", "objects")}


def test_all_fields_of_a_stored_block() -> None:
    """A router reads them by name; a field at the wrong place would be believed."""
    events = kv_events([FULL, WINDOW], localities={"s3": "REMOTE"})
    host, far = events.translate([stored(b"a", b"b"), stored(b"c", tier="s3", group=1, block_size=0)])
    assert isinstance(host, BlockStored)
    assert isinstance(far, BlockStored)
    assert (host.block_hashes, host.parent_block_hash, host.block_size) == ([b"a", b"b"], b"parent", 8)
    assert (host.token_ids, host.lora_id, host.lora_name, host.group_idx) == (list(range(16)), 3, "wise", 0)
    assert (host.medium, host.ownership, host.locality) == ("CPU", None, None)
    assert (host.kv_cache_spec_kind, host.kv_cache_spec_sliding_window) == ("full_attention", None)
    assert (far.medium, far.ownership, far.locality, far.block_size) == ("STORAGE", "s3", "REMOTE", 0)
    assert (far.kv_cache_spec_kind, far.kv_cache_spec_sliding_window) == ("sliding_window", 24)


def test_blocks_of_several_hash_blocks_are_told_as_the_gpu_tells_them() -> None:
    """With hashes finer than blocks, vLLM's own events identify a block by its last hash: ours must match."""
    event = next(iter(kv_events(scale=2).translate([stored(b"a", b"b", b"c", b"d", block_size=4)])))
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.block_size, len(event.token_ids)) == ([b"b", b"d"], 8, 16)


def test_hashes_as_integers_as_vllm_has_them_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """VLLM's default are 64-bit numbers; removals must use the same words as stores, and the GPU's events."""
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1")
    come, gone = kv_events().translate(
        [stored(b"\0" * 24 + b"\1" * 8), ours.BlockRemoved((b"\1" * 32,), 0, "CPU", "host")]
    )
    assert isinstance(come, BlockStored)
    assert isinstance(gone, BlockRemoved)
    assert come.block_hashes == gone.block_hashes == [0x0101010101010101]


def test_a_cleared_tier_takes_nothing_else_along() -> None:
    """VLLM's AllBlocksCleared would make a router forget the GPU and the disk too."""
    router, events = Router(), kv_events()
    router.blocks["GPU", None].add(b"gpu")
    router.hear(events.translate([stored(b"a", b"b"), stored(b"a", tier="disk"), ours.AllBlocksCleared("CPU", "host")]))
    assert router.held == {("GPU", None): {b"gpu"}, ("STORAGE", "disk"): {b"a"}}


def test_beyond_the_bound_a_router_knows_too_little_never_too_much() -> None:
    """The memory is bounded; beyond the bound, the router gets an event that clears everything."""
    router, events = Router(), kv_events(announced_max=2)
    router.hear(events.translate([stored(b"a", b"b", b"c")]))
    router.blocks["GPU", None].add(b"gpu")
    router.hear(events.translate([ours.AllBlocksCleared("CPU", "host")]))
    assert router.held == {}
    router.hear(events.translate([stored(b"d"), stored(b"e", tier="disk"), ours.AllBlocksCleared("CPU", "host")]))
    assert router.held == {("STORAGE", "disk"): {b"e"}}  # there is room again, and the tier is known completely


def test_room_comes_back() -> None:
    """Revoked and repeated announcements must not use up the bound."""
    announced: Announced[int] = Announced(items_max=2)
    for number in range(10):
        announced.add("host", [number, number])
        announced.discard("host", [number])
    announced.add("host", [1])
    announced.add("disk", [1])
    assert announced.clear("host") == ({1}, True)
    announced.add("host", [2])
    announced.add("host", [3])
    assert announced.clear("host") == ({2}, False)
    assert announced.clear("disk") == ({1}, True)


def test_a_real_publisher_and_a_subscriber() -> None:
    """Through vLLM's own ZMQ publisher, over a socket, decoded as its clients do."""
    endpoint = "tcp://127.0.0.1:*"
    settings = KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint, topic="kv")
    publisher = EventPublisherFactory.create(settings)
    subscriber = zmq.Context.instance().socket(zmq.SUB)
    try:
        subscriber.setsockopt(zmq.RCVTIMEO, 30_000)
        subscriber.connect(publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT))
        subscriber.subscribe("kv")
        events = list(kv_events().translate([stored(b"a" * 32), ours.BlockRemoved((b"a" * 32,), 0, "DISK", "disk")]))
        give_up_s = time.monotonic() + 30
        while not subscriber.poll(50):  # a publisher drops what it sends before a subscriber has joined
            assert time.monotonic() < give_up_s
            publisher.publish(KVEventBatch(ts=1.0, events=events))
        topic, _, payload = subscriber.recv_multipart()
    finally:
        subscriber.close(linger=0)
        publisher.shutdown()
    batch = msgspec.msgpack.decode(payload, type=KVEventBatch)
    assert (topic, batch.data_parallel_rank) == (b"kv", 0)
    assert batch.events == events


# -- seam A ------------------------------------------------------------------------------------------------------------


class Tracked:
    """VLLM's tracker between our events and a router, and stores as vLLM's scheduler notes them."""

    def __init__(self, announced_max: int = 100) -> None:
        config = OffloadingKVEventsConfig(enable_kv_cache_events=True, self_describing_kv_events=True)
        self.tracker = OffloadingEventsTracker(config)
        self.events = OffloadingEvents({"disk": "LOCAL", "s3": "REMOTE"}, announced_max)
        self.router = Router()
        hashes = [bytes([i]) * 32 for i in range(1, 9)]
        self.request = SimpleNamespace(block_hashes=hashes, all_token_ids=list(range(64)), lora_request=None)
        self.group = SimpleNamespace(
            hashes_per_chunk=2, tokens_per_chunk=16, tokens_per_block=8, group_idx=0,
            sliding_window_size_in_chunks=None, kv_event_group_spec=OffloadingEventGroupSpec("full_attention", None),
        )  # fmt: skip

    def key(self, chunk: int) -> Key:
        """Of a chunk of two blocks."""
        return make_key(self.request.block_hashes[2 * chunk + 1], 0)

    def store(self, *chunks: int) -> None:
        """VLLM's scheduler notes what it is about to store; then the host tier has it."""
        for chunk in chunks:
            offload_key = make_offload_key(self.request.block_hashes[2 * chunk + 1], 0)
            self.tracker.record_store(self.request, self.group, chunk, offload_key)
        self.happens(CacheEventKind.STORED, "host", *chunks)

    def happens(self, kind: CacheEventKind, tier: str, *chunks: int) -> None:
        """Event in the stack, and in the router."""
        event = CacheEvent(kind, tier, tuple(self.key(chunk) for chunk in chunks))
        self.router.hear(self.tracker.take_events(self.events.translate([event])))

    @property
    def payloads(self) -> int:
        """Chunks whose tokens the tracker keeps."""
        return len(self.tracker._pending_event_metadata)


def test_a_chunk_that_only_a_lower_tier_has_is_still_known_by_all_its_blocks() -> None:
    """Its payload is kept until the last tier has lost it; then nothing is left behind in vLLM's tracker."""
    tracked = Tracked()
    tracked.store(0, 1)
    tracked.happens(CacheEventKind.STORED, "disk", 0, 1)
    tracked.happens(CacheEventKind.REMOVED, "host", 0, 1)
    hashes = tracked.request.block_hashes
    assert tracked.router.held == {("STORAGE", "disk"): set(hashes[:4])}
    assert tracked.router.tokens[hashes[1]] == tuple(range(8, 16))
    tracked.happens(CacheEventKind.REMOVED, "disk", 0)
    assert tracked.router.held == {("STORAGE", "disk"): set(hashes[2:4])}
    assert tracked.payloads == 1
    tracked.happens(CacheEventKind.CLEARED, "disk")
    assert (tracked.router.held, tracked.payloads) == ({}, 0)


def test_two_lower_tiers_are_told_apart() -> None:
    """The disk loses a chunk, the bucket has it still."""
    tracked = Tracked()
    tracked.store(0)
    tracked.happens(CacheEventKind.STORED, "disk", 0)
    tracked.happens(CacheEventKind.STORED, "s3", 0)
    tracked.happens(CacheEventKind.REMOVED, "host", 0)
    tracked.happens(CacheEventKind.REMOVED, "disk", 0)
    assert set(tracked.router.held) == {("STORAGE", "s3")}


def test_payloads_in_vllm_are_bounded() -> None:
    """A disk holds millions of chunks; vLLM would keep the tokens of each whose removal it was promised."""
    tracked = Tracked(announced_max=5)
    tracked.store(0, 1, 2)
    tracked.happens(CacheEventKind.STORED, "disk", 0, 1, 2)
    tracked.happens(CacheEventKind.REMOVED, "host", 0, 1, 2)
    assert tracked.payloads == 2
    held = tracked.router.held["STORAGE", "disk"]
    tracked.happens(CacheEventKind.REMOVED, "disk", 0, 1, 2)
    assert tracked.payloads == 0
    hashes = tracked.request.block_hashes
    assert held == {hashes[4]}  # of the third chunk, the block before its last: one too many, and bounded


def test_a_reset_host_tier_leaves_nothing_behind() -> None:
    """After vLLM's reset its tracker knows nothing any more; the router must not believe in the host's chunks."""
    tracked = Tracked()
    tracked.store(0, 1)
    tracked.happens(CacheEventKind.STORED, "disk", 0)
    tracked.happens(CacheEventKind.CLEARED, "host")
    hashes = tracked.request.block_hashes
    assert tracked.router.held == {("STORAGE", "disk"): set(hashes[:2])}
    assert tracked.payloads == 1


def test_what_the_tracker_is_told() -> None:
    """Media, owners and localities as vLLM's own tiers give them."""
    tracked = Tracked()
    keys = (tracked.key(0),)
    host, far = tracked.events.translate(
        [CacheEvent(CacheEventKind.STORED, "host", keys), CacheEvent(CacheEventKind.STORED, "s3", keys)]
    )
    assert (host.medium, host.ownership, host.locality, host.removal_expected) == (Medium.CPU, None, None, False)
    assert (far.medium, far.ownership, far.locality) == (Medium.STORAGE, "s3", Locality.REMOTE)
    assert far.removal_expected
    assert host.keys == far.keys == [make_offload_key(tracked.request.block_hashes[1], 0)]


# -- configuration -----------------------------------------------------------------------------------------------------


def test_no_events_are_kept_where_vllm_publishes_none() -> None:
    """Without a consumer, no events are kept; the stack's own setting can only disable more."""
    config = parse_config({"host": {"capacity": "1MiB"}}, source="test")
    assert with_events(config, enabled=True).events.enabled
    assert not with_events(config, enabled=False).events.enabled
    off = parse_config({"host": {"capacity": "1MiB"}, "events": {"enabled": False}}, source="test")
    assert not with_events(off, enabled=True).events.enabled


def test_localities_follow_what_backends_declare(tmp_path: Path) -> None:
    """Other processes may add chunks to an object store, but not to this machine's disk."""
    config = parse_config(stack_config(tmp_path), source="test")
    assert localities(resolve(config, load_plugins())) == {"disk": "LOCAL", "objects": "REMOTE"}

"""Consumer of described events: its set of present blocks, and the invariants of that set."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from core_truth import link

from tierkv.manager.step_budget import StepBudget
from tierkv.scheduler.events.block_events import BlockEvents
from tierkv.types.block_events import AllBlocksCleared, BlockRemoved, BlockStored
from tierkv.types.cache_events import CacheEvent
from tierkv.types.engine import GroupKind
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key, make_key

Block = tuple[int, bytes]
"""A hash block of a group."""


class BlockMirror:
    """Follows events; knows hashes, tokens and tiers from events only."""

    def __init__(self, geometry: Geometry, block_events: BlockEvents) -> None:
        self.held: dict[str, set[Block]] = {}
        self.payloads = 0
        self._geometry = geometry
        self._block_events = block_events
        self._chunks: dict[str, dict[Key, set[Block]]] = {}

    def take(self, events: Sequence[CacheEvent]) -> None:
        """Take the events of a step."""
        for event in self._block_events.describe(events):
            held = self.held.setdefault(event.tier, set())
            chunks = self._chunks.setdefault(event.tier, {})
            match event:
                case BlockStored():
                    blocks = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
                    key = make_key(event.block_hashes[-1], event.group_idx)
                    held |= blocks
                    chunks[key] = chunks.get(key, set()) | blocks
                    self._check_payload(event)
                case BlockRemoved():
                    blocks = {(event.group_idx, block_hash) for block_hash in event.block_hashes}
                    held -= blocks
                    for group, block_hash in blocks:
                        chunks.pop(make_key(block_hash, group), None)
                    assert not blocks & set().union(*chunks.values()), "removed a block that another chunk still has"
                case AllBlocksCleared():
                    held.clear()
                    chunks.clear()
        self._block_events.finish_ended_stores()
        self._block_events.forget_some(StepBudget().share())

    def _check_payload(self, event: BlockStored) -> None:
        """Check that the tokens, chained from the parent on, give exactly the hashes."""
        if not event.token_ids:
            assert (event.block_size, event.parent_block_hash, len(event.block_hashes)) == (0, None, 1)
            return
        self.payloads += 1
        group = self._geometry.groups[event.group_idx]
        assert group.kind is GroupKind.FULL_ATTENTION
        assert len(event.token_ids) == group.chunk_tokens
        assert len(event.block_hashes) == group.hashes_per_chunk
        chain = [event.parent_block_hash or b""]
        for token in event.token_ids:
            chain.append(link(chain[-1], token))
        assert event.block_hashes == tuple(chain[event.block_size :: event.block_size])

    def check(self, residents: Mapping[str, AbstractSet[Key]]) -> None:
        """Check that the set equals the resident chunks, whole where payloads were given, without ghosts."""
        for medium, held in self.held.items():
            chunks = self._chunks[medium]
            assert chunks.keys() <= residents[medium]
            assert held == set().union(*chunks.values()), f"{medium}: blocks of removed chunks, or missing blocks"
        snapshots = set(self._block_events.keys())
        anywhere = set().union(*residents.values())
        storing = {key for key in snapshots if self._block_events._snapshots[key].storing}
        assert snapshots <= anywhere | storing, "a payload outlives its chunk"

    def check_end(self, residents: Mapping[str, AbstractSet[Key]]) -> None:
        """Check that only resident chunks have payloads when nothing is in flight."""
        self.check(residents)
        assert set(self._block_events.keys()) <= set().union(*residents.values())

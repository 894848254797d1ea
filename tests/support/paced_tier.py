"""A core over a tier that keeps up, but not with every burst: nothing needs to be lost if the right chunks leave."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from core_parts import Core, TierSpec, disk, make_core

from tierkv.manager.contract import RequestContext
from tierkv.plugins.loading import load_plugins
from tierkv.types.keys import Key, make_key
from tierkv.types.tier_ops import TierOp, Verb

BURST_STEPS, QUIET_STEPS = 6, 7


class PacedRun:
    """Bursts of new chunks, a quarter of the host tier in a step; the tier writes half as many, an eighth at a time.

    So when a burst ends, three quarters of the host tier wait; when the next one comes, nothing does. Before each burst
    a document of three eighths is used, as far as the host tier has it.
    """

    def __init__(self, policy: str, slots: int) -> None:
        self._batch = slots // 8
        opened = load_plugins().require_policy(policy).plugin.open(slots)
        edge = disk(queue=2 * self._batch)
        spec = TierSpec(edge.name, replace(edge.capabilities, preferred_batch=self._batch), edge.limits)
        self.core: Core = make_core(slots=slots, tiers=[spec], host_policy=opened)
        self._writing: deque[TierOp] = deque()
        self._document = self._new(3 * self._batch)
        self._stored(self._document)
        self.core.finish_all()
        for _ in range(2):
            self._use(self._document)

    def _new(self, count: int) -> list[Key]:
        first = self.core.counters.chunks_stored
        return [make_key(b"chunk %d" % number, 0) for number in range(first, first + count)]

    def _stored(self, keys: Sequence[Key]) -> None:
        self.core.put(keys)
        self.core.manager.touch(keys[::-1])

    @property
    def lost(self) -> int:
        """Chunks that the tier did not get."""
        return self.core.counters.cascades_dropped["disk"]

    def play(self, bursts: int) -> None:
        """Play ``bursts`` bursts, with quiet steps after each."""
        for _ in range(bursts):
            self._use(self._document)
            for _ in range(BURST_STEPS):
                self._stored(self._new(2 * self._batch))
                self._step()
            for _ in range(QUIET_STEPS):
                self._step()

    def _step(self) -> None:
        core = self.core
        core.begin()
        for op in core.manager.take_ops():
            assert op.verb is Verb.WRITE
            self._writing.append(op)
        if self._writing:
            core.finish(self._writing.popleft())
        core.manager.validate()

    def _use(self, keys: Sequence[Key]) -> None:
        manager, ctx = self.core.manager, RequestContext("reader")
        count = manager.resident_prefix(keys, 0, len(keys))
        manager.touch(keys[:count][::-1])
        if count:
            manager.passages.reserve(ctx.request_id, tuple(keys[:count]), ctx.hints)
            manager.complete_load(manager.prepare_load(keys[:count], ctx).slots)

"""Page store: calls that wait, with a timeout, over a stack that never waits. Does not import SGLang.

The stack's host tier is staging memory. Each call repeats short turns: take the lock, ask or instruct the stack, end
its step, release the lock, wait. So a backup and a prefetch on two threads share one stack, and neither waits for the
tiers of the other.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from tierkv.errors import CorruptFrameError
from tierkv.frames.sealer import FrameSealer
from tierkv.integrations.sglang.pages import PageMemory
from tierkv.memory.shared import attach_arena
from tierkv.stack.staged import StagedStack
from tierkv.types.keys import Key, make_key
from tierkv.types.lookup import LookupResult
from tierkv.types.transfers import StagedTransfer

_TURN_S = 0.0005
"""Seconds between turns: a hundredth of what a batch of pages takes to read."""

_SEGMENT_PAGES = 16
"""Pages of a segment: much less than a batch, and enough for large reads."""
_SEGMENTS_AT_ONCE = 4
"""Segments that one load reads at once: one is copied, and the others keep the tiers busy."""

_UNKNOWN = frozenset({LookupResult.PENDING, LookupResult.RETRY})


@dataclass(slots=True)
class _Segment:
    """Consecutive pages of a load, which the stack knows as a request."""

    request_id: str
    keys: Sequence[Key]
    is_found: bool = False
    """Whether every tier has answered which of them it holds, so that they are being read."""


class PageStore:
    """Pages in the lower tiers of a stack. Any thread; every call waits up to its timeout.

    Args:
        stack: open stack of one process; closed by :meth:`close`.
        page_size: tokens per page.
        timeout_s: seconds that a load or a store may take.
        probe_timeout_s: seconds that a question for existence may take.
        queue_bytes_max: bytes that the tier with the shortest queue accepts for writing.
        clock: seconds, monotonic.
        sleep: waits between turns.
    """

    def __init__(  # noqa: PLR0913 - a stack, its sizes, its bounds, and two hooks for tests
        self,
        stack: StagedStack,
        page_size: int,
        *,
        timeout_s: float,
        probe_timeout_s: float,
        queue_bytes_max: int,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        setup = stack.worker_setup(0)
        self.stack = stack
        """The stack, for its metrics and events. Call nothing else of it."""
        self._page_size = page_size
        self._timeout_s = timeout_s
        self._probe_timeout_s = probe_timeout_s
        self._clock = clock
        self._sleep = sleep
        self._arena = attach_arena(setup.arena)
        self._sealer = FrameSealer(setup.namespace, verify=setup.verify_frames)
        self._page_bytes = tuple(group.payload_bytes for group in stack.geometry.groups)
        self._lower = frozenset(stack.tiers.names)
        slots = int(stack.describe()["host_slots"])
        queued = queue_bytes_max // int(stack.describe()["host_slot_bytes"])
        # Pending writes to one tier may pin its share of half of the slots; further ones are dropped.
        self._store_max = max(1, min(slots // (2 * max(1, len(self._lower))), queued))
        self._segment_pages = max(1, min(_SEGMENT_PAGES, slots // (2 * _SEGMENTS_AT_ONCE)))
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._users = 0
        self._is_closed = False

    # -- existence ---------------------------------------------------------------------------------------------------

    def count_prefix(self, hashes: Sequence[bytes]) -> int:
        """Number of leading pages of the first group that a tier holds. Unknown pages end the prefix."""
        present = self.find(hashes, prefix_only=True)
        return present.index(False) if False in present else len(present)

    def find(self, hashes: Sequence[bytes], group: int = 0, *, prefix_only: bool = False) -> list[bool]:
        """Whether a tier holds each page. False for a page that no tier answered for in time.

        prefix_only: ask about no page behind the first absent one; these are False.
        """
        keys = [make_key(page_hash, group) for page_hash in hashes]
        return self._find(keys, None, self._clock() + self._probe_timeout_s, prefix_only=prefix_only)

    def _find(
        self, keys: Sequence[Key], tiers: frozenset[str] | None, deadline_s: float, *, prefix_only: bool = False
    ) -> list[bool]:
        answers: list[LookupResult] = []
        request_id = self._begin(tiers)
        try:
            while request_id is not None:
                with self._lock:
                    answers = []
                    for key in keys:
                        answers.append(self.stack.locate(request_id, key))
                        if prefix_only and answers[-1] is LookupResult.MISS:
                            break
                    self.stack.end_step()
                if _UNKNOWN.isdisjoint(answers) or self._clock() >= deadline_s:
                    break
                self._sleep(_TURN_S)
        finally:
            self._end(request_id)
        found = [answer is LookupResult.HIT for answer in answers]
        return found + [False] * (len(keys) - len(found))

    # -- loads -------------------------------------------------------------------------------------------------------

    def load(self, hashes: Sequence[bytes], pages: Sequence[PageMemory], group: int = 0) -> list[bool]:
        """Copy stored pages into the pool. Pages behind the first one that cannot be loaded are False.

        Pages are copied in order, a segment at a time, while tiers read the segments behind it.
        """
        keys = [make_key(page_hash, group) for page_hash in hashes]
        deadline_s, done = self._clock() + self._timeout_s, 0
        waiting = self._segments(keys)
        reading: deque[_Segment] = deque()
        try:
            while done < len(keys) and self._read_ahead(waiting, reading):
                loaded, asked = self._load_front(reading, pages[done:], deadline_s)
                done += loaded
                if loaded < asked:  # there was no room for more, or the rest is in no tier
                    if not loaded or self._clock() >= deadline_s:
                        break
                    self._end_all(reading)
                    waiting = self._segments(keys[done:])
        finally:
            self._end_all(reading)
        return [True] * done + [False] * (len(keys) - done)

    def _segments(self, keys: Sequence[Key]) -> deque[Sequence[Key]]:
        size = self._segment_pages
        return deque(keys[start : start + size] for start in range(0, len(keys), size))

    def _read_ahead(self, waiting: deque[Sequence[Key]], reading: deque[_Segment]) -> bool:
        """Begin to read further segments. False: the store is closed."""
        while waiting and len(reading) < _SEGMENTS_AT_ONCE:
            request_id = self._begin(None)
            if request_id is None:
                return False
            reading.append(_Segment(request_id, waiting.popleft()))
        return True

    def _end_all(self, reading: deque[_Segment]) -> None:
        while reading:
            self._end(reading.popleft().request_id)

    def _load_front(self, reading: deque[_Segment], pages: Sequence[PageMemory], deadline_s: float) -> tuple[int, int]:
        """Load leading pages of the first segment, and end it. Returns their number, and that of its pages."""
        front, transfer = reading[0], self._gather(reading, deadline_s)
        try:
            loaded = 0 if transfer is None else self._copy_out(transfer, pages)
        finally:
            reading.popleft()
            if transfer is not None:
                with self._lock:
                    self.stack.complete_load(front.request_id, transfer.keys)
            self._end(front.request_id)
        return loaded, len(front.keys)

    def _gather(self, reading: Iterable[_Segment], deadline_s: float) -> StagedTransfer | None:
        """Look up leading pages of the first segment until they are staged. None: not even the first one is.

        The other segments are looked up until their pages are being read.
        """
        front, *others = reading
        while True:
            is_over = self._clock() >= deadline_s
            with self._lock:
                answers = self._lookup_prefix(front)
                hits = next((i for i, answer in enumerate(answers) if answer is not LookupResult.HIT), len(answers))
                if is_over or _UNKNOWN.isdisjoint(answers):
                    transfer = self.stack.prepare_load(front.request_id, front.keys[:hits]) if hits else None
                    self.stack.end_step()
                    return transfer
                for segment in others:
                    if not segment.is_found:
                        segment.is_found = LookupResult.RETRY not in self._lookup_prefix(segment)
                self.stack.end_step()
            self._sleep(_TURN_S)

    def _lookup_prefix(self, segment: _Segment) -> list[LookupResult]:
        """Answers for leading pages, up to the first miss. Called with the lock held."""
        answers: list[LookupResult] = []
        for index, key in enumerate(segment.keys):
            answer = self.stack.lookup(segment.request_id, key, (index + 1) * self._page_size)
            if answer is LookupResult.MISS:
                break
            answers.append(answer)
        return answers

    def _copy_out(self, transfer: StagedTransfer, pages: Sequence[PageMemory]) -> int:
        """Copy staged chunks into the pool. Returns the number of leading pages whose slots hold what they should."""
        for number, (key, group, ref) in enumerate(zip(transfer.keys, transfer.groups, transfer.slots, strict=True)):
            try:
                header = self._sealer.check_slot(self._arena.slot(ref.slot), key)
            except CorruptFrameError:
                return number
            if header.raw_bytes != self._page_bytes[group]:
                return number
            pages[number].copy_from(self._arena.payload(ref.slot))
        return len(transfer.keys)

    # -- stores ------------------------------------------------------------------------------------------------------

    def store(self, hashes: Sequence[bytes], pages: Sequence[PageMemory], group: int = 0) -> list[bool]:
        """Store pages. Returns, for each, whether a lower tier holds it: a tier acknowledged it, now or before."""
        keys = [make_key(page_hash, group) for page_hash in hashes]
        deadline_s = self._clock() + self._timeout_s
        present = self._find(keys, self._lower, min(deadline_s, self._clock() + self._probe_timeout_s))
        missing = {key: page for key, page, is_there in zip(keys, pages, present, strict=True) if not is_there}
        offered = list(missing)
        while offered and self._clock() < deadline_s:
            taken = self._store_front(offered[: self._store_max], missing)
            offered = offered[taken:]
            self._await_writes(deadline_s)  # a tier drops what exceeds its queue
            if not taken:
                self._sleep(_TURN_S)
        found = self._find(list(missing), self._lower, self._clock() + self._probe_timeout_s) if missing else []
        stored = dict(zip(missing, found, strict=True))
        return [is_there or stored[key] for key, is_there in zip(keys, present, strict=True)]

    def _store_front(self, keys: Sequence[Key], pages: dict[Key, PageMemory]) -> int:
        """Copy pages into staging slots. Returns the number of pages that are settled; 0: there is no room now."""
        request_id = self._begin(None)
        if request_id is None:
            return len(keys)
        try:
            with self._lock:
                chunks = [(key, (index + 1) * self._page_size) for index, key in enumerate(keys)]
                store = self.stack.prepare_store(request_id, chunks)
                if store is None or not store.transfer.keys:
                    self.stack.end_step()
                    return 0 if store is None else len(keys)
            transfer = store.transfer
            self._copy_in(transfer, pages)
            with self._lock:
                self.stack.complete_store(transfer.keys)
                self.stack.end_step()
            return len(keys)
        finally:
            self._end(request_id)

    def _copy_in(self, transfer: StagedTransfer, pages: dict[Key, PageMemory]) -> None:
        for key, group, ref in zip(transfer.keys, transfer.groups, transfer.slots, strict=True):
            pages[key].copy_to(self._arena.payload(ref.slot))
            self._sealer.seal(self._arena.slot(ref.slot), key, self._page_bytes[group])

    def _await_writes(self, deadline_s: float) -> None:
        """Step the stack until nothing is left to write, or time is up."""
        while True:
            with self._lock:
                if self._is_closed:
                    return
                self.stack.end_step()
                is_settled = not self.stack.tiers.has_pending_changes()
            if is_settled or self._clock() >= deadline_s:
                return
            self._sleep(_TURN_S)

    # -- the end -----------------------------------------------------------------------------------------------------

    def clear(self) -> None:
        """Delete the pages of every tier.

        Raises:
            EngineProtocolError: a tier is shared or read-only; nothing has changed.
        """
        with self._lock:
            if not self._is_closed:
                self.stack.reset_cache("all")
                self.stack.workers_flushed()

    def close(self, timeout_s: float = 30.0) -> bool:
        """Write what is pending, and close the stack. Calls that still run end first. Idempotent.

        Returns:
            Whether everything that was accepted reached its tiers.
        """
        with self._lock:
            self._is_closed = True
        deadline_s = self._clock() + self._timeout_s
        while self._users and self._clock() < deadline_s:
            self._sleep(_TURN_S)
        with self._lock:
            try:
                return self.stack.close(timeout_s)
            finally:
                self._arena.close()

    def _begin(self, tiers: frozenset[str] | None) -> str | None:
        """Register a request with the stack. None: the store is closed."""
        with self._lock:
            if self._is_closed:
                return None
            self._users += 1
            request_id = f"pages-{next(self._numbers)}"
            self.stack.on_new_request(request_id, load_tiers=tiers)
        return request_id

    def _end(self, request_id: str | None) -> None:
        if request_id is not None:
            with self._lock:
                self.stack.request_finished(request_id)
                self._users -= 1

"""Lower tier: a backend with frames, codecs, checked results and retries around it.

Operations are written once, as coroutines. A blocking backend is wrapped in async verbs that never suspend, so the
coroutines run to their end on the calling I/O thread (:func:`_run_now`). Those of an async backend run on the event
loop.

Promise 3 is kept here: every error, wrong result or omission of a backend or codec becomes an outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import math
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import repeat
from typing import Any, TypeVar, cast

from tierkv.abc.backend import (
    AsyncBackend,
    Backend,
    ProbeResult,
    ReadRequest,
    ReadResult,
    SupportsQuarantine,
    SupportsScan,
    WriteRequest,
    WriteResult,
)
from tierkv.abc.capabilities import Capabilities
from tierkv.abc.codec import Codec
from tierkv.abc.logs import lines_of_tier
from tierkv.errors import CorruptFrameError, EngineProtocolError, PluginError, UnreadableFrameError
from tierkv.frames.frame import HEADER_BYTES, NO_CODEC
from tierkv.frames.sealer import FrameSealer
from tierkv.logs.definitions import BUFFER_KEPT
from tierkv.logs.stack_log import StackLog
from tierkv.memory.arena import HostArena
from tierkv.tiers.framing import EXACT_AND_CLEAR, ClearFrameError, Framer, FrameRules
from tierkv.tiers.read_buffers import ReadBuffers
from tierkv.tiers.results import checked_content, checked_results, damaged_answer, failed_result
from tierkv.tiers.retry import KeyResult, OpResult, Retrier, RetryLimits, Timing
from tierkv.types.geometry import Geometry
from tierkv.types.keys import Key
from tierkv.types.tier_ops import ABSENT, OK, Outcome, OutcomeKind, TierContent, Verb
from tierkv.types.transfers import SlotRef

_SLOTTED = frozenset({Verb.READ, Verb.WRITE})
_CHANGING = frozenset({Verb.WRITE, Verb.DELETE})
_REFUSED = Outcome(OutcomeKind.REFUSED, error="the tier is read-only")
_T = TypeVar("_T")


class Tier:
    """Lower tier. All operations may be called on several I/O threads at once, never on the engine's thread.

    Args:
        name: configured name, for messages and threads.
        backend: stores the frames.
        capabilities: capabilities that the backend declares.
        codec_name: codec of written payloads.
        codecs: all codecs by name, to read frames that the tier holds already.
        sealer: seals and checks frames of this stack's namespace.
        arena: memory of the slots.
        rules: properties of the codec and of the tier.
        retry: tries per key.
        timing: clock and randomness.
        geometry: sizes that frames are checked against. None: not checked.
        own_buffers: whether reads go to buffers of their own (:mod:`tierkv.tiers.read_buffers`), not to slots.
        log: log of the stack; one of its own if left out.

    Raises:
        PluginError: the declared capabilities cannot be served, or the codec is unknown.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - a tier joins these collaborators
        self,
        name: str,
        backend: Backend | AsyncBackend,
        capabilities: Capabilities,
        codec_name: str,
        codecs: Mapping[str, Codec],
        sealer: FrameSealer,
        arena: HostArena,
        *,
        rules: FrameRules = EXACT_AND_CLEAR,
        retry: RetryLimits | None = None,
        timing: Timing | None = None,
        geometry: Geometry | None = None,
        own_buffers: bool = False,
        log: StackLog | None = None,
    ) -> None:
        _require_servable(name, capabilities)
        if codec_name != NO_CODEC and codec_name not in codecs:
            raise PluginError(f"tier {name!r} wants codec {codec_name!r}; known are {', '.join(sorted(codecs))}")
        timing = timing or Timing()
        self.name = name
        self.clock = timing.clock
        self.log = log or StackLog(timing.clock)
        self.capabilities = capabilities
        self._keys_per_call = {
            Verb.READ: capabilities.keys_per_read_call(arena.slot_bytes),
            Verb.WRITE: capabilities.keys_per_write(arena.slot_bytes),
        }
        self.backend = backend
        self.is_async = inspect.iscoroutinefunction(backend.read_into)
        self._verbs = cast("AsyncBackend", backend) if self.is_async else _BlockingVerbs(cast("Backend", backend))
        self.quarantined = 0
        """Damaged frames that the backend was asked to set aside."""
        self._quarantine_lock = threading.Lock()  # guards the number above
        self._arena = arena
        self._read_buffers = ReadBuffers(arena.slot_bytes) if own_buffers else None
        self._framer = Framer(codec_name, codecs, sealer, capabilities.alignment, arena.slot_bytes, rules, geometry)
        self._retrier = Retrier(
            retry or RetryLimits(), timing, asyncio.sleep if self.is_async else _blocking_sleep(timing.sleep)
        )

    def perform(  # noqa: PLR0913 - the fields of a TierOp
        self,
        verb: Verb,
        keys: Sequence[Key],
        slots: Sequence[SlotRef] = (),
        deadline_s: float = math.inf,
        outcomes: list[Outcome] | None = None,
        *,
        ranks: Sequence[int] = (),
    ) -> OpResult:
        """Perform one operation of a blocking backend. Blocks the calling thread.

        Args:
            verb: the operation.
            keys: its keys.
            slots: one per key for READ and WRITE, otherwise none. A READ without any drops what it has read.
            deadline_s: time on the tier's clock after which no try starts. Keys that were not tried are TIMED_OUT.
            outcomes: receives each outcome as soon as it is known; see :meth:`Retrier.run`.
            ranks: one per key for WRITE (:attr:`WriteRequest.rank`); empty: unknown.

        Returns:
            One outcome per key, in order. Every failure of the backend is an outcome.

        Raises:
            EngineProtocolError: the backend is async, or READ or WRITE came without one slot per key.
        """
        if self.is_async:
            raise EngineProtocolError("an async backend runs on an event loop: call perform_async", tier=self.name)
        return _run_now(self.perform_async(verb, keys, slots, deadline_s, outcomes, ranks=ranks))

    async def perform_async(  # noqa: PLR0913 - the fields of a TierOp
        self,
        verb: Verb,
        keys: Sequence[Key],
        slots: Sequence[SlotRef] = (),
        deadline_s: float = math.inf,
        outcomes: list[Outcome] | None = None,
        *,
        ranks: Sequence[int] = (),
    ) -> OpResult:
        """Perform one operation on an event loop, as :meth:`perform` does. The task may be cancelled.

        Raises:
            EngineProtocolError: READ or WRITE came without one slot per key.
        """
        is_trial = verb is Verb.READ and not slots
        if len(slots) != (len(keys) if verb in _SLOTTED and not is_trial else 0):
            raise EngineProtocolError(f"{verb.name} of {len(keys)} keys came with {len(slots)} slots", tier=self.name)
        if self.capabilities.read_only and verb in _CHANGING:
            return OpResult([_REFUSED] * len(keys))
        do = {Verb.READ: self._try_read if is_trial else self._read, Verb.PROBE: self._probe, Verb.DELETE: self._delete}

        async def attempt(indices: Sequence[int]) -> list[KeyResult]:
            some, refs = [keys[i] for i in indices], [slots[i] for i in indices] if slots else []
            if verb is Verb.WRITE:
                return await self._write(some, refs, [ranks[i] for i in indices] if ranks else repeat(0, len(some)))
            return await do[verb](some, refs)

        batch = self._keys_per_call.get(verb, self.capabilities.preferred_batch)
        with lines_of_tier(self.name, self.log.note):
            return await self._retrier.run(attempt, len(keys), batch, deadline_s, outcomes)

    def close(self) -> None:
        """Close a blocking backend.

        Raises:
            Exception: any error of the backend.
        """
        _run_now(self.close_async())

    async def close_async(self) -> None:
        """Close the backend.

        Raises:
            Exception: any error of the backend.
        """
        with lines_of_tier(self.name, self.log.note):
            await self._verbs.close()

    def scan_content(self) -> TierContent:
        """List the stored chunks.

        Only for a backend that declares ``scan``. Blocks.

        Raises:
            BackendError: an entry is invalid.
            Exception: any error of the backend.
        """
        with lines_of_tier(self.name, self.log.note):
            return checked_content(cast("SupportsScan", self.backend).scan(), self.name)

    async def _read(self, keys: Sequence[Key], slots: Sequence[SlotRef]) -> list[KeyResult]:
        if self._read_buffers is not None:
            return await self._read_apart(keys, slots, self._read_buffers)
        requests = [ReadRequest(key, self._arena.slot(ref.slot)) for key, ref in zip(keys, slots, strict=True)]
        results = await self._call_backend(self._verbs.read_into, requests, self._is_length)
        _release_views(request.buffer for request in requests)
        views = [self._arena.slot(ref.slot) for ref in slots]
        return [self._accept(key, view, result) for key, view, result in zip(keys, views, results, strict=True)]

    async def _read_apart(self, keys: Sequence[Key], slots: Sequence[SlotRef], pool: ReadBuffers) -> list[KeyResult]:
        """Read to buffers, then copy to the slots. A cancelled call may still write: its buffers are dropped."""
        buffers = [pool.take() for _ in keys]
        requests = [ReadRequest(key, buffer.view) for key, buffer in zip(keys, buffers, strict=True)]
        results = await self._call_backend(self._verbs.read_into, requests, self._is_length)
        views = [self._arena.slot(ref.slot) for ref in slots]
        for view, buffer, result in zip(views, buffers, results, strict=True):
            if isinstance(result, int):
                buffer.copy_to(view, result)
        key_results = [self._accept(key, view, result) for key, view, result in zip(keys, views, results, strict=True)]
        del requests, results  # the traceback of an error may hold views
        if sum(map(pool.release, buffers)) < len(buffers):
            self.log.report(BUFFER_KEPT, tier=self.name)
        return key_results

    async def _try_read(self, keys: Sequence[Key], _slots: Sequence[SlotRef]) -> list[KeyResult]:
        """Read to buffers that are dropped, and verify: an answer that is always cut is no answer."""
        pool = ReadBuffers(self._arena.slot_bytes)
        buffers = [pool.take() for _ in keys]  # each keeps its memory mapped while the backend has a view of it
        requests = [ReadRequest(key, buffer.view) for key, buffer in zip(keys, buffers, strict=True)]
        results = await self._call_backend(self._verbs.read_into, requests, self._is_length)
        return [self._accept(key, buffer.view, got) for key, buffer, got in zip(keys, buffers, results, strict=True)]

    def _accept(self, key: Key, view: memoryview, result: ReadResult | BaseException) -> KeyResult:
        if result is None:
            return KeyResult(ABSENT)
        if isinstance(result, BaseException):
            return failed_result(result)
        try:
            is_clear = self._framer.decode_frame(view, result, key)
        except (UnreadableFrameError, ClearFrameError) as error:  # no quarantine: the storage is not at fault
            return failed_result(error)
        except CorruptFrameError as error:
            # Engines share the frame: the answer may be damaged and the frame whole.
            answer = failed_result(error) if self.capabilities.authoritative_index else damaged_answer(error)
            is_aside = answer.outcome.kind is OutcomeKind.CORRUPT and self._quarantine(key, str(error))
            return answer._replace(retryable=False) if is_aside else answer
        except BaseException as error:  # noqa: BLE001  # a foreign codec may raise anything; the chunk is a miss
            return failed_result(error)
        return _done(result) if not is_clear else KeyResult(Outcome(OutcomeKind.OK, result, is_clear=True))

    def _quarantine(self, key: Key, reason: str) -> bool:
        """Let the backend set a frame aside. Returns whether it can."""
        # Not on an event loop, which the call could block.
        if self.is_async or not isinstance(self.backend, SupportsQuarantine):
            return False
        with contextlib.suppress(BaseException):  # optional: the chunk is a miss and will be deleted in any case
            self.backend.quarantine(key, reason)
            with self._quarantine_lock:
                self.quarantined += 1
        return True

    async def _write(self, keys: Sequence[Key], slots: Sequence[SlotRef], ranks: Iterable[int]) -> list[KeyResult]:
        key_results: dict[int, KeyResult] = {}
        requests: dict[int, WriteRequest] = {}
        staged: list[memoryview] = []
        try:
            for index, (key, ref, rank) in enumerate(zip(keys, slots, ranks, strict=True)):
                try:
                    frame, staging = self._framer.encode_frame(self._arena.slot(ref.slot), key)
                except BaseException as error:  # noqa: BLE001  # a foreign codec may raise anything; the chunk stays there
                    key_results[index] = failed_result(error)
                    continue
                requests[index] = WriteRequest(key, frame.toreadonly(), rank)
                key_results[index] = _done(len(frame))  # unless an error replaces it
                if staging is not None:
                    staged.append(staging)
            if requests:
                results = await self._call_backend(self._verbs.write, list(requests.values()), _is_none)
                for index, result in zip(requests, results, strict=True):
                    if result is not None:
                        key_results[index] = failed_result(result)
        finally:
            _release_views(request.frame for request in requests.values())
            for staging in staged:
                self._framer.release_staging(staging)
        return [key_results[index] for index in range(len(keys))]

    async def _probe(self, keys: Sequence[Key], _slots: Sequence[SlotRef]) -> list[KeyResult]:
        results = await self._call_backend(self._verbs.contains, keys, _is_bool)
        return [failed_result(r) if isinstance(r, BaseException) else KeyResult(OK if r else ABSENT) for r in results]

    async def _delete(self, keys: Sequence[Key], _slots: Sequence[SlotRef]) -> list[KeyResult]:
        results = await self._call_backend(self._verbs.delete, keys, _is_none)
        return [KeyResult(OK) if result is None else failed_result(result) for result in results]

    async def _call_backend(
        self,
        verb: Callable[[Any], Awaitable[Sequence[_T]]],
        items: Sequence[Any],
        is_allowed: Callable[[object], bool],
    ) -> Sequence[_T | BaseException]:
        """Call the backend. An error that it raises, or that the check raises, is the result of every key."""
        try:
            return checked_results(await verb(items), len(items), is_allowed, self.name)
        except (asyncio.CancelledError, GeneratorExit) as error:
            if self.is_async:
                raise
            return [error] * len(items)
        except BaseException as error:  # noqa: BLE001  # a plugin's SystemExit must not end an I/O thread silently
            return [error] * len(items)

    def _is_length(self, result: object) -> bool:
        return result is None or (type(result) is int and 0 <= result <= self._arena.slot_bytes)


class _BlockingVerbs:
    """Async verbs over a blocking backend; they never suspend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    async def contains(self, keys: Sequence[Key]) -> Sequence[ProbeResult]:
        return self._backend.contains(keys)

    async def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        return self._backend.read_into(requests)

    async def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        return self._backend.write(requests)

    async def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        return self._backend.delete(keys)

    async def close(self) -> None:
        self._backend.close()


def _blocking_sleep(sleep: Callable[[float], None]) -> Callable[[float], Awaitable[None]]:
    async def io_sleep(seconds: float) -> None:
        sleep(seconds)

    return io_sleep


def _run_now(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never suspends to its end, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking tier waited on an event loop")  # pragma: no cover - _BlockingVerbs never suspends


def _require_servable(name: str, declared: Capabilities) -> None:
    if declared.alignment < 1 or HEADER_BYTES % declared.alignment:
        raise PluginError(
            f"the backend of tier {name!r} declares alignment {declared.alignment}; "
            f"a power of two up to {HEADER_BYTES} can be served"
        )
    if declared.preferred_batch < 1 or declared.preferred_concurrency < 1:
        raise PluginError(f"the backend of tier {name!r} declares a preferred batch or concurrency below 1")


def _release_views(views: Iterable[memoryview]) -> None:
    """Release views that a backend may have kept. A view that the backend exported further cannot be released."""
    for view in views:
        try:  # noqa: SIM105 - a context manager per view costs as much as a fifth of a small frame's other work
            view.release()
        except BufferError:
            pass


@lru_cache(maxsize=256)
def _done(frame_bytes: int) -> KeyResult:
    """Return the result of a frame of this length. Frames of one length share it: most frames of a stack have one."""
    return KeyResult(Outcome(OutcomeKind.OK, frame_bytes))


def _is_none(result: object) -> bool:
    return result is None


def _is_bool(result: object) -> bool:
    return isinstance(result, bool)

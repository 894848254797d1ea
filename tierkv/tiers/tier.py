"""One lower tier: a backend, wrapped into everything that backends get for nothing.

The story is told once, in coroutines. A blocking backend is seen through verbs that never wait, so its coroutines run
to their end in one go on the calling I/O thread (:func:`_run_now`); an async backend's run on the event loop.

Promise 3 ends here: whatever a backend or codec raises, returns or leaves undone becomes an outcome.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

from tierkv.abc.backend import (
    AsyncBackend,
    Backend,
    ProbeResult,
    ReadRequest,
    ReadResult,
    SupportsQuarantine,
    WriteRequest,
    WriteResult,
)
from tierkv.abc.capabilities import Capabilities
from tierkv.abc.codec import Codec
from tierkv.errors import CorruptFrameError, EngineProtocolError, PluginError, UnreadableFrameError
from tierkv.frames.frame import HEADER_BYTES, NO_CODEC, FrameSealer
from tierkv.memory.arena import HostArena
from tierkv.tiers.framing import EXACT_AND_CLEAR, CodecTerms, Framer
from tierkv.tiers.results import checked, failure
from tierkv.tiers.retry import Answer, Performed, Retrier, RetryLimits, Timing
from tierkv.types.keys import Key
from tierkv.types.tier_ops import ABSENT, OK, Outcome, OutcomeKind, Verb
from tierkv.types.transfers import SlotRef

_log = logging.getLogger(__name__)

TOLD_MAX = 8
"""Reasons for which frames cannot be read that are logged; later ones are counted only."""

_SLOTTED = frozenset({Verb.READ, Verb.WRITE})
_CHANGING = frozenset({Verb.WRITE, Verb.DELETE})
_REFUSED = Outcome(OutcomeKind.REFUSED, error="the tier is read-only")
_T = TypeVar("_T")


class Tier:
    """A lower tier. All verbs may be called on several I/O threads at once, never on the engine's thread.

    Args:
        name: configured name, for messages and threads.
        backend: stores the frames.
        capabilities: what it declares.
        codec_name: how payloads are written.
        codecs: all codecs by name, to read what lies there already.
        sealer: seals and checks frames of this stack's namespace.
        arena: where the slots are.
        terms: what that codec does to payloads, and what the tier takes.
        retry: tries per key.
        timing: clock and chance.

    Raises:
        PluginError: the declaration cannot be served.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - a tier is where all of these meet; each is its own collaborator
        self,
        name: str,
        backend: Backend | AsyncBackend,
        capabilities: Capabilities,
        codec_name: str,
        codecs: Mapping[str, Codec],
        sealer: FrameSealer,
        arena: HostArena,
        *,
        terms: CodecTerms = EXACT_AND_CLEAR,
        retry: RetryLimits | None = None,
        timing: Timing | None = None,
    ) -> None:
        _require_servable(name, capabilities)
        if codec_name != NO_CODEC and codec_name not in codecs:
            raise PluginError(f"tier {name!r} wants codec {codec_name!r}; known are {', '.join(sorted(codecs))}")
        timing = timing or Timing()
        self.name = name
        self.clock = timing.clock
        self.capabilities = capabilities
        self._read_batch = min(
            capabilities.preferred_read_batch or capabilities.preferred_batch, capabilities.preferred_batch
        )
        self.backend = backend
        self.is_async = inspect.iscoroutinefunction(backend.read_into)
        self._told: set[str] = set()
        self._verbs = cast("AsyncBackend", backend) if self.is_async else _Unwaiting(cast("Backend", backend))
        self._arena = arena
        self._framer = Framer(codec_name, codecs, sealer, capabilities.alignment, arena.slot_bytes, terms)
        self._retrier = Retrier(
            retry or RetryLimits(), timing, asyncio.sleep if self.is_async else _unwaiting(timing.sleep)
        )

    def perform(
        self, verb: Verb, keys: Sequence[Key], slots: Sequence[SlotRef] = (), deadline_s: float = math.inf
    ) -> Performed:
        """Do one operation of a blocking backend: an outcome per key, in order. Blocks.

        Keys whose turn did not come before ``deadline_s`` are TIMED_OUT. Whatever the backend does is an outcome.

        Raises:
            EngineProtocolError: the backend is async, or READ or WRITE came without one slot per key.
        """
        if self.is_async:
            raise EngineProtocolError("an async backend belongs on an event loop: perform_async", tier=self.name)
        return _run_now(self.perform_async(verb, keys, slots, deadline_s))

    async def perform_async(
        self, verb: Verb, keys: Sequence[Key], slots: Sequence[SlotRef] = (), deadline_s: float = math.inf
    ) -> Performed:
        """The same on an event loop. May be cancelled."""
        if len(slots) != (len(keys) if verb in _SLOTTED else 0):
            raise EngineProtocolError(f"{verb.name} of {len(keys)} keys came with {len(slots)} slots", tier=self.name)
        if self.capabilities.read_only and verb in _CHANGING:
            return Performed([_REFUSED] * len(keys))
        do = {Verb.READ: self._read, Verb.WRITE: self._write, Verb.PROBE: self._probe, Verb.DELETE: self._delete}[verb]

        async def attempt(indices: Sequence[int]) -> list[Answer]:
            return await do([keys[i] for i in indices], [slots[i] for i in indices] if slots else [])

        batch = self._read_batch if verb is Verb.READ else self.capabilities.preferred_batch
        return await self._retrier.run(attempt, len(keys), batch, deadline_s)

    def read(self, keys: Sequence[Key], slots: Sequence[SlotRef]) -> list[Outcome]:
        """Fill each slot with the raw frame of its key. The slot of a key that is not OK holds nothing of use."""
        return self.perform(Verb.READ, keys, slots).outcomes

    def write(self, keys: Sequence[Key], slots: Sequence[SlotRef]) -> list[Outcome]:
        """Store the chunk in each slot. A slot that does not hold its key is CORRUPT, and is not written."""
        return self.perform(Verb.WRITE, keys, slots).outcomes

    def contains(self, keys: Sequence[Key]) -> list[Outcome]:
        """OK for keys that are stored, ABSENT for others."""
        return self.perform(Verb.PROBE, keys).outcomes

    def delete(self, keys: Sequence[Key]) -> list[Outcome]:
        """Forget keys; absent ones are OK."""
        return self.perform(Verb.DELETE, keys).outcomes

    def close(self) -> None:
        """Close a blocking backend. Raises what it raises."""
        _run_now(self.close_async())

    async def close_async(self) -> None:
        """Close the backend. Raises what it raises."""
        await self._verbs.close()

    async def _read(self, keys: Sequence[Key], slots: Sequence[SlotRef]) -> list[Answer]:
        requests = [ReadRequest(key, self._arena.slot(ref.slot)) for key, ref in zip(keys, slots, strict=True)]
        results = await self._ask(self._verbs.read_into, requests, self._is_length)
        _release(request.buffer for request in requests)
        return [self._accept(key, ref, result) for key, ref, result in zip(keys, slots, results, strict=True)]

    def _accept(self, key: Key, ref: SlotRef, result: ReadResult | BaseException) -> Answer:
        if result is None:
            return Answer(ABSENT)
        if isinstance(result, BaseException):
            return failure(result)
        try:
            self._framer.accept(self._arena.slot(ref.slot), result, key)
        except UnreadableFrameError as error:
            self._tell(str(error))
            return failure(error)
        except CorruptFrameError as error:
            self._distrust(key, str(error))
            return failure(error)
        except Exception as error:  # noqa: BLE001  # a foreign codec may raise anything; the chunk is a miss
            return failure(error)
        return Answer(Outcome(OutcomeKind.OK, result))

    def _distrust(self, key: Key, reason: str) -> None:
        # Not on an event loop, which it could block.
        if isinstance(self.backend, SupportsQuarantine) and not self.is_async:
            with contextlib.suppress(Exception):  # a help only: the chunk is a miss and will be deleted all the same
                self.backend.distrust(key, reason)

    def _tell(self, why: str) -> None:
        """Say it once: a key or codec that is missing makes every chunk a miss, and nobody would know why."""
        if why not in self._told and len(self._told) < TOLD_MAX:
            self._told.add(why)
            _log.warning("tier %s: %s", self.name, why)

    async def _write(self, keys: Sequence[Key], slots: Sequence[SlotRef]) -> list[Answer]:
        answers: dict[int, Answer] = {}
        requests: dict[int, WriteRequest] = {}
        staged: list[memoryview] = []
        try:
            for index, (key, ref) in enumerate(zip(keys, slots, strict=True)):
                try:
                    frame, staging = self._framer.frame_of(self._arena.slot(ref.slot), key)
                except Exception as error:  # noqa: BLE001  # a foreign codec may raise anything; the chunk stays above
                    answers[index] = failure(error)
                    continue
                requests[index] = WriteRequest(key, frame.toreadonly())
                answers[index] = Answer(Outcome(OutcomeKind.OK, len(frame)))  # unless the backend says otherwise
                if staging is not None:
                    staged.append(staging)
            if requests:
                results = await self._ask(self._verbs.write, list(requests.values()), _is_none)
                for index, result in zip(requests, results, strict=True):
                    if result is not None:
                        answers[index] = failure(result)
        finally:
            _release(request.frame for request in requests.values())
            for staging in staged:
                self._framer.give_back(staging)
        return [answers[index] for index in range(len(keys))]

    async def _probe(self, keys: Sequence[Key], _slots: Sequence[SlotRef]) -> list[Answer]:
        results = await self._ask(self._verbs.contains, keys, _is_bool)
        return [failure(r) if isinstance(r, BaseException) else Answer(OK if r else ABSENT) for r in results]

    async def _delete(self, keys: Sequence[Key], _slots: Sequence[SlotRef]) -> list[Answer]:
        results = await self._ask(self._verbs.delete, keys, _is_none)
        return [Answer(OK) if result is None else failure(result) for result in results]

    async def _ask(
        self,
        verb: Callable[[Any], Awaitable[Sequence[_T]]],
        items: Sequence[Any],
        is_allowed: Callable[[object], bool],
    ) -> Sequence[_T | BaseException]:
        """Call the backend. A raised error, or the error that stands for a lie, is the result of every key."""
        try:
            return checked(await verb(items), len(items), is_allowed, self.name)
        except (asyncio.CancelledError, GeneratorExit) as error:
            if self.is_async:
                raise
            return [error] * len(items)
        except BaseException as error:  # noqa: BLE001  # also a plugin's SystemExit must not end an I/O thread unheard
            return [error] * len(items)

    def _is_length(self, result: object) -> bool:
        return result is None or (type(result) is int and 0 <= result <= self._arena.slot_bytes)


class _Unwaiting:
    """A blocking backend behind async verbs that never wait."""

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


def _unwaiting(sleep: Callable[[float], None]) -> Callable[[float], Awaitable[None]]:
    async def nap(seconds: float) -> None:
        sleep(seconds)

    return nap


def _run_now(coroutine: Coroutine[Any, Any, _T]) -> _T:
    """Run a coroutine that never waits to its end, without an event loop."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        result: _T = stop.value
        return result
    coroutine.close()
    raise RuntimeError("a blocking tier waited on an event loop")  # pragma: no cover - _Unwaiting never waits


def _require_servable(name: str, declared: Capabilities) -> None:
    if declared.alignment < 1 or HEADER_BYTES % declared.alignment:
        raise PluginError(
            f"the backend of tier {name!r} declares alignment {declared.alignment}; "
            f"a power of two up to {HEADER_BYTES} can be served"
        )
    if declared.preferred_batch < 1 or declared.preferred_concurrency < 1:
        raise PluginError(f"the backend of tier {name!r} declares a preferred batch or concurrency below 1")


def _release(views: Iterable[memoryview]) -> None:
    """Make a view that a backend kept useless to it, unless it holds on to the memory itself."""
    for view in views:
        with contextlib.suppress(BufferError):
            view.release()


def _is_none(result: object) -> bool:
    return result is None


def _is_bool(result: object) -> bool:
    return isinstance(result, bool)

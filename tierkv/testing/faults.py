"""Fault injection: a real backend that fails by explicit rules.

::

    faulty = FaultyBackend(DiskBackend(...))             # AsyncFaultyBackend for an async one
    faulty.add("read_into", hang_until(event))          # until the rule is removed
    faulty.add("write", raise_error(OSError), times=3)   # the first three calls
    faulty.rules.clear()                                 # healthy again

A fault gets the batch and the call that would be the inner backend's, and returns what the caller sees. Rules of one
verb wrap each other, the first one outermost. Nothing here needs pytest; all of it may be used on any thread.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

from tierkv.abc.backend import (
    AsyncBackend,
    Backend,
    Entry,
    ReadRequest,
    ReadResult,
    SupportsRoomLimit,
    SupportsScan,
    WriteRequest,
    WriteResult,
)
from tierkv.types.keys import Key

VerbName = Literal["contains", "read_into", "write", "delete", "scan", "close"]
Inner = Callable[[Sequence[Any]], Any]
Fault = Callable[[Sequence[Any], Inner], Any]
"""(batch, the inner backend's verb) -> results. Batches of ``scan`` and ``close`` are empty."""


@dataclass(slots=True, eq=False)
class Rule:
    """Rule of one verb. ``times_left``: number of calls that it still applies to; None: all of them."""

    verb: VerbName
    fault: Fault
    times_left: int | None = None


class FaultRules:
    """Rules of one wrapped backend, and a note of every call. May be used on any thread."""

    def __init__(self) -> None:
        self.rules: list[Rule] = []
        """Faults in force; may be changed at any time."""
        self.calls: list[VerbName] = []
        """Names of the verbs that were called, in order."""
        self.running = 0
        """Number of calls that have begun and not returned."""
        self._lock = threading.Lock()

    def add(self, verb: VerbName, fault: Fault, times: int | None = None) -> Rule:
        """Apply a fault to the next ``times`` calls of a verb, or to all of them."""
        rule = Rule(verb, fault, times)
        self.rules.append(rule)
        return rule

    def begin_call(self, verb: VerbName) -> list[Rule]:
        """Note a call, and take the rules that apply to it, outermost first."""
        with self._lock:
            self.calls.append(verb)
            self.running += 1
            due = [rule for rule in self.rules if rule.verb == verb and rule.times_left != 0]
            for rule in due:
                if rule.times_left is not None:
                    rule.times_left -= 1
        return due

    def end_call(self) -> None:
        """Note that a call returned."""
        with self._lock:
            self.running -= 1

    @staticmethod
    def apply(due: Sequence[Rule], action: Inner, batch: Sequence[Any]) -> object:
        """Result of an action with the faults of ``due`` around it."""
        for rule in reversed(due):
            action = partial(_spoiled, rule.fault, action)
        return action(batch)


class FaultyBackend:
    """Blocking backend with rules; without rules, calls go straight to ``inner``."""

    room_bytes: int
    """Present only if the inner backend has it (:class:`tierkv.abc.SupportsRoomLimit`)."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self._faults = FaultRules()
        self.rules = self._faults.rules
        """Faults in force; may be changed at any time."""
        self.calls = self._faults.calls
        """Names of the verbs that were called, in order."""
        if isinstance(inner, SupportsRoomLimit):
            self.room_bytes = inner.room_bytes

    @property
    def running(self) -> int:
        """Number of calls that have begun and not returned."""
        return self._faults.running

    def add(self, verb: VerbName, fault: Fault, times: int | None = None) -> Rule:
        """Apply a fault to the next ``times`` calls of a verb, or to all of them."""
        return self._faults.add(verb, fault, times)

    def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Whether each key is present, by the inner backend and the rules."""
        return cast("Sequence[bool]", self._call("contains", keys, self.inner.contains))

    def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Read frames into buffers, by the inner backend and the rules."""
        return cast("Sequence[ReadResult]", self._call("read_into", requests, self.inner.read_into))

    def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Write frames, by the inner backend and the rules."""
        return cast("Sequence[WriteResult]", self._call("write", requests, self.inner.write))

    def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Delete keys, by the inner backend and the rules."""
        return cast("Sequence[WriteResult]", self._call("delete", keys, self.inner.delete))

    def scan(self) -> Iterable[Entry]:
        """Entries of the inner backend, by its scan and the rules."""
        inner = cast("SupportsScan", self.inner)
        return cast("Iterable[Entry]", self._call("scan", (), lambda _: inner.scan()))

    def close(self) -> None:
        """Close the inner backend, by the rules."""
        self._call("close", (), lambda _: self.inner.close())

    def _call(self, verb: VerbName, batch: Sequence[Any], action: Inner) -> object:
        try:
            return self._faults.apply(self._faults.begin_call(verb), action, batch)
        finally:
            self._faults.end_call()


class AsyncFaultyBackend:
    """Async backend with rules. Faults are plain functions, so a call with a fault runs on a thread of its own.

    A call without a rule stays on the loop.
    """

    room_bytes: int
    """Present only if the inner backend has it (:class:`tierkv.abc.SupportsRoomLimit`)."""

    def __init__(self, inner: AsyncBackend) -> None:
        self.inner = inner
        self._faults = FaultRules()
        self.rules = self._faults.rules
        """Faults in force; may be changed at any time."""
        self.calls = self._faults.calls
        """Names of the verbs that were called, in order."""
        self.loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the last call; None before the first."""
        if isinstance(inner, SupportsRoomLimit):
            self.room_bytes = inner.room_bytes

    @property
    def running(self) -> int:
        """Number of calls that have begun and not returned."""
        return self._faults.running

    def add(self, verb: VerbName, fault: Fault, times: int | None = None) -> Rule:
        """Apply a fault to the next ``times`` calls of a verb, or to all of them."""
        return self._faults.add(verb, fault, times)

    async def contains(self, keys: Sequence[Key]) -> Sequence[bool]:
        """Whether each key is present, by the inner backend and the rules."""
        return cast("Sequence[bool]", await self._call("contains", keys, self.inner.contains))

    async def read_into(self, requests: Sequence[ReadRequest]) -> Sequence[ReadResult]:
        """Read frames into buffers, by the inner backend and the rules."""
        return cast("Sequence[ReadResult]", await self._call("read_into", requests, self.inner.read_into))

    async def write(self, requests: Sequence[WriteRequest]) -> Sequence[WriteResult]:
        """Write frames, by the inner backend and the rules."""
        return cast("Sequence[WriteResult]", await self._call("write", requests, self.inner.write))

    async def delete(self, keys: Sequence[Key]) -> Sequence[WriteResult]:
        """Delete keys, by the inner backend and the rules."""
        return cast("Sequence[WriteResult]", await self._call("delete", keys, self.inner.delete))

    def scan(self) -> Iterable[Entry]:
        """Entries of the inner backend, by its scan and the rules. Called on a thread, also of an async backend."""
        inner = cast("SupportsScan", self.inner)
        try:
            return cast(
                "Iterable[Entry]", self._faults.apply(self._faults.begin_call("scan"), lambda _: inner.scan(), ())
            )
        finally:
            self._faults.end_call()

    async def close(self) -> None:
        """Close the inner backend, by the rules."""
        await self._call("close", (), lambda _: self.inner.close())

    async def _call(self, verb: VerbName, batch: Sequence[Any], action: Inner) -> object:
        loop = self.loop = asyncio.get_running_loop()
        due = self._faults.begin_call(verb)

        def on_the_loop(batch: Sequence[Any]) -> object:
            coroutine = action(batch)
            try:
                return asyncio.run_coroutine_threadsafe(coroutine, loop).result()
            except RuntimeError:  # the loop has ended while the call hung
                coroutine.close()
                raise

        try:
            return await (asyncio.to_thread(self._faults.apply, due, on_the_loop, batch) if due else action(batch))
        finally:
            self._faults.end_call()


def _spoiled(fault: Fault, action: Inner, batch: Sequence[Any]) -> object:
    return fault(batch, action)


def hang_until(event: threading.Event) -> Fault:
    """Block until the event is set, then do the work: a hung mount, a lost connection, a foreign lock."""

    def fault(batch: Sequence[Any], inner: Inner) -> object:
        event.wait()
        return inner(batch)

    return fault


def record(into: list[Sequence[Any]]) -> Fault:
    """Note each batch, and do the work: no fault."""

    def fault(batch: Sequence[Any], inner: Inner) -> object:
        into.append(tuple(batch))
        return inner(batch)

    return fault


def slow(delay_s: float, sleep: Callable[[float], None] = time.sleep) -> Fault:
    """Wait before the work."""

    def fault(batch: Sequence[Any], inner: Inner) -> object:
        sleep(delay_s)
        return inner(batch)

    return fault


def raise_error(make: Callable[[], BaseException]) -> Fault:
    """Raise the exception of ``make`` before any work."""

    def fault(_batch: Sequence[Any], _inner: Inner) -> object:
        raise make()

    return fault


def return_error(make: Callable[[], object], index: int = 0) -> Fault:
    """Do the work, then replace the result of one key by that of ``make``."""

    def fault(batch: Sequence[Any], inner: Inner) -> object:
        results = list(inner(batch))
        results[index] = make()
        return results

    return fault


def lie(change: Callable[[list[Any]], object]) -> Fault:
    """Do the work, then return ``change(results)``: too few, too many, None, a string, other types, other order."""

    def fault(batch: Sequence[Any], inner: Inner) -> object:
        return change(list(inner(batch)))

    return fault


LIES: dict[str, Fault] = {
    "too few": lie(lambda results: results[:-1]),
    "too many": lie(lambda results: [*results, results[-1]]),
    "nothing": lie(lambda _: None),
    "a number": lie(len),
    "a string": lie(lambda results: "x" * len(results)),
    "bytes": lie(lambda results: bytes(len(results))),
    "a generator": lie(lambda results: (result for result in results)),
    "other types": lie(lambda results: [object for _ in results]),
    "floats": lie(lambda results: [0.5 for _ in results]),
    "negative": lie(lambda results: [-1 for _ in results]),
    "too long": lie(lambda results: [2**40 for _ in results]),
}
"""Results that break the contract of every verb. Faults with plausible results follow below."""


def forget() -> Fault:
    """Report success and do nothing: an acknowledged write that is not stored."""

    def fault(batch: Sequence[Any], _inner: Inner) -> object:
        return [None] * len(batch)

    return fault


def claim_without_reading(length: int) -> Fault:
    """Of ``read_into``: report ``length`` bytes as read, and leave the buffer unchanged."""

    def fault(batch: Sequence[ReadRequest], _inner: Inner) -> object:
        return [length] * len(batch)

    return fault


def short_read(length: int, *, honest: bool = True) -> Fault:
    """Of ``read_into``: read only the first bytes, fill the rest of the buffer with rubbish, and report it or not."""

    def fault(batch: Sequence[ReadRequest], inner: Inner) -> object:
        results = list(inner(batch))
        for index, (request, result) in enumerate(zip(batch, results, strict=True)):
            if isinstance(result, int) and result > length:
                request.buffer[length:result] = b"\xdb" * (result - length)
                results[index] = length if honest else result
        return results

    return fault


def corrupt(offset: int, flip: int = 0x01) -> Fault:
    """Of ``read_into``: change one byte of every frame in the bits of ``flip``."""

    def fault(batch: Sequence[ReadRequest], inner: Inner) -> object:
        results = list(inner(batch))
        for request, result in zip(batch, results, strict=True):
            if isinstance(result, int) and result > offset:
                request.buffer[offset] ^= flip
        return results

    return fault


def swap() -> Fault:
    """Of ``read_into``: give each key the frame of the next key in its batch, undamaged."""

    def fault(batch: Sequence[ReadRequest], inner: Inner) -> object:
        return inner(
            [ReadRequest(batch[(index + 1) % len(batch)].key, request.buffer) for index, request in enumerate(batch)]
        )

    return fault


def write_half() -> Fault:
    """Of ``write``: store only the first half of every frame, and report success."""

    def fault(batch: Sequence[WriteRequest], inner: Inner) -> object:
        return inner([WriteRequest(request.key, request.frame[: len(request.frame) // 2]) for request in batch])

    return fault

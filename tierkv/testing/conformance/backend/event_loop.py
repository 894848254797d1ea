"""Kit: backends on an event loop, which all async tiers of a stack share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from functools import partial
from typing import Any, cast

from tierkv.abc import AsyncBackend, ReadRequest, WriteRequest
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import aligned_buffer, aligned_copy, make_frame, make_key
from tierkv.types.keys import Key

TURN_TRIES = 50
"""Calls of a verb of which one must let the loop turn. Since Python 3.14, a call whose thread was faster does not."""


class AsyncTests(KitBase):
    """Use of a shared event loop."""

    def test_async_verbs_let_the_loop_turn(self, session: Session) -> None:
        """Blocking I/O in a coroutine stops the loop, and with it every other async tier of the stack."""
        self.need("durable")
        self.need_async(session)
        backend = cast("AsyncBackend", session.backend)
        key, size = make_key(1), self.sizes[-1]
        write = [WriteRequest(key, aligned_copy(make_frame(key, 1, size)).toreadonly())]
        read = [ReadRequest(key, aligned_buffer(session.buffer_bytes))]

        async def turns_during(call: Coroutine[Any, Any, Any]) -> int:
            turns = 0
            task = asyncio.ensure_future(call)
            await asyncio.sleep(0)  # the task begins
            while not task.done():
                turns += 1
                await asyncio.sleep(0)
            await task
            return turns

        for verb, call in (("write", partial(backend.write, write)), ("read_into", partial(backend.read_into, read))):
            turned = any(session.on_loop(turns_during(call())) for _ in range(TURN_TRIES))
            assert turned, f"{verb} never let the event loop turn, in {TURN_TRIES} calls"

    def test_async_calls_at_once(self, session: Session) -> None:
        """Calls overlap on the loop: no call may see half of another's work at an await."""
        self.need_async(session)
        backend = cast("AsyncBackend", session.backend)
        count = max(2, min(self.capabilities.preferred_concurrency, 8))
        keys = [make_key(number) for number in range(count)]
        frames = {key: make_frame(key, 1, self.sizes[number % len(self.sizes)]) for number, key in enumerate(keys)}

        async def write_and_read(key: Key) -> bytes:
            frame = aligned_copy(frames[key]).toreadonly()
            assert list(await backend.write([WriteRequest(key, frame)])) == [None]
            assert list(await backend.contains([key])) == [True]
            buffer = aligned_buffer(session.buffer_bytes)
            (length,) = await backend.read_into([ReadRequest(key, buffer)])
            assert isinstance(length, int)
            return bytes(buffer[:length])

        async def all_at_once() -> list[bytes]:
            return list(await asyncio.gather(*(write_and_read(key) for key in keys)))

        assert session.on_loop(all_at_once()) == [frames[key] for key in keys]

    def test_cancelled_calls_do_no_harm(self, session: Session) -> None:
        """Probes and deletions are cancelled at their deadline: they release every lock, connection and result."""
        self.need_async(session)
        backend = cast("AsyncBackend", session.backend)
        key, size = make_key(1), self.small
        session.put({key: make_frame(key, 1, size)})

        async def cancel_after(turns: int, call: Coroutine[Any, Any, Any]) -> None:
            task = asyncio.ensure_future(call)
            for _ in range(turns):
                await asyncio.sleep(0)
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

        for turns in range(5):
            for _ in range(2 * self.capabilities.preferred_concurrency):
                session.on_loop(cancel_after(turns, backend.contains([key])))
                session.on_loop(cancel_after(turns, backend.delete([make_key(2)])))
        assert session.contains([key, make_key(2)][: self.capabilities.preferred_batch])[0] is True
        assert session.get(key) == make_frame(key, 1, size)
        session.forget([key])
        assert session.contains([key]) == [False]

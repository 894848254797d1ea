"""A backend whose verb hangs, or raises what ends a thread: the kit ends, and says what to change."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest
from plain_files import CAPABILITIES, AsyncPlainFiles, PlainFiles, PlainOptions

from tierkv.abc import BackendContext, BackendPlugin
from tierkv.testing.conformance import session as sessions
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_key
from tierkv.types.keys import Key
from tierkv.types.namespace import Namespace

KEY = make_key(1)
NAMESPACE = Namespace("tests", "r1", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 4, 16)


class Hangs(PlainFiles):
    """Waits for what never comes, until the test ends."""

    over = threading.Event()

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        self.over.wait()
        return [False] * len(keys)


class HangsOnTheLoop(AsyncPlainFiles):
    """Awaits an answer that never comes."""

    async def contains(self, keys: Sequence[Key]) -> list[bool]:
        await asyncio.Event().wait()
        return [False] * len(keys)


class Exits(PlainFiles):
    """Calls a program's main function, which exits."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        raise SystemExit(1)


class ExitsOnTheLoop(AsyncPlainFiles):
    """Does so as a coroutine."""

    async def contains(self, keys: Sequence[Key]) -> list[bool]:
        raise SystemExit(1)


class Interrupts(PlainFiles):
    """Raises what an author's Ctrl-C would."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        raise KeyboardInterrupt


class CancelsItself(AsyncPlainFiles):
    """Lets the cancellation of a request of its own out."""

    async def contains(self, keys: Sequence[Key]) -> list[bool]:
        raise asyncio.CancelledError


def opened(backend: type[PlainFiles | AsyncPlainFiles], place: Path) -> Session:
    """A session of the kit with it."""
    context = BackendContext("tier", NAMESPACE, 8192, None)
    return Session(BackendPlugin("x", "x", PlainOptions, CAPABILITIES, backend), context, PlainOptions(str(place)))


@pytest.mark.parametrize("backend", [Hangs, HangsOnTheLoop])
def test_a_call_that_hangs_fails_its_test(
    backend: type[PlainFiles | AsyncPlainFiles], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise the author sees a run that does not end, and not which verb it waits for."""
    with opened(backend, tmp_path / "place") as session:
        with monkeypatch.context() as patience:
            patience.setattr(sessions, "CALL_TIMEOUT_S", 0.1)
            with pytest.raises(AssertionError, match=r"contains has not returned after 0\.1 s: bound each wait"):
                session.contains([KEY])
        Hangs.over.set()


@pytest.mark.parametrize("backend", [Exits, ExitsOnTheLoop, Interrupts, CancelsItself])
def test_what_is_no_exception_is_explained(backend: type[PlainFiles | AsyncPlainFiles], tmp_path: Path) -> None:
    """It would end pytest, or the kit's loop, and with it all further tests."""
    with opened(backend, tmp_path / "place") as session:
        with pytest.raises(AssertionError, match=r"contains raised .*, which is no Exception: raise a BackendError"):
            session.contains([KEY])
        assert session.read([KEY]) == [None]  # the loop and the thread of the test go on

"""Kit: the server of a remote backend is killed or frozen, and returns."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tierkv.abc import ReadRequest, WriteRequest
from tierkv.errors import TierKVError
from tierkv.testing.conformance.kit import KitBase
from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import aligned_buffer, make_frame, make_key
from tierkv.testing.server_control import ServerControl
from tierkv.types.keys import Key

CALL_MAX_S = 30.0
"""Longest that a call may take while the server does not answer: the default deadline of a write. A hang is longer."""
HEALED_MAX_S = 60.0
ENDINGS = ("killed", "frozen")
KEYS = 24


def begin_outage(server: ServerControl, ending: str) -> None:
    """Kill or freeze a server."""
    (server.stop if ending == "killed" else server.suspend)()


def end_outage(server: ServerControl, ending: str) -> None:
    """Let a server return."""
    (server.start if ending == "killed" else server.resume)()


class OutageTests(KitBase):
    """Promise 3 with a real outage: errors within a bound, and service again without a reopen."""

    @pytest.mark.parametrize("ending", ENDINGS)
    def test_an_outage_is_an_error_within_a_bound(self, place: Path, ending: str) -> None:
        """A client's defaults wait for minutes, or retry for ever: each thread of the tier would hang with it."""
        server, frames = self.need_server(), self._frames()
        with self.open(place) as session:
            session.put(frames)
            begin_outage(server, ending)
            try:
                for verb in ("contains", "read_into", "write", "delete"):
                    _ends_with_errors(session, verb, frames)
            finally:
                end_outage(server, ending)
            _heals(session, frames)

    @pytest.mark.parametrize("ending", ENDINGS)
    def test_traffic_survives_an_outage(self, place: Path, ending: str) -> None:
        """Replies under way are lost: none may be taken for the reply of another key, then or later."""
        server, frames = self.need_server(), self._frames()
        stop = threading.Event()
        wrong: list[Key] = []

        def work() -> None:
            while not stop.is_set():
                _write_all(session, frames)
                for key, frame in zip(frames, _read_all(session, frames), strict=True):
                    if isinstance(frame, bytes) and frame != frames[key]:
                        wrong.append(key)

        with self.open(place) as session:
            threads = [threading.Thread(target=work, daemon=True) for _ in range(2)]
            for thread in threads:
                thread.start()
            try:
                time.sleep(0.1)
                begin_outage(server, ending)
                time.sleep(0.2)
            finally:
                end_outage(server, ending)
                stop.set()
            for thread in threads:
                thread.join(CALL_MAX_S * 2)
                assert not thread.is_alive(), f"a call hangs after the server was {ending}"
            assert not wrong, f"frames of other keys after the server was {ending}"
            _heals(session, frames)

    def test_no_server_is_an_error_at_open(self, place: Path) -> None:
        """An engine may start first: the framework tries again after a TierKVError, and after no other error."""
        server = self.need_server()
        server.stop()
        try:
            refused = self._refusal(place)
            what = "succeeded" if refused is None else f"raised {refused!r}"
            assert isinstance(refused, TierKVError), (
                f"open {what} without a server: contact it in open, which may block, and raise BackendUnavailableError "
                "where it does not answer"
            )
        finally:
            server.start()
        with self.open(place) as session:
            _heals(session, self._frames())

    def _refusal(self, place: Path) -> Exception | None:
        try:
            self.open(place).close()
        except Exception as error:  # noqa: BLE001  a backend may raise anything; the test says what it should
            return error
        return None

    def _frames(self) -> dict[Key, bytes]:
        return {make_key(number): make_frame(make_key(number), 1, self.sizes[-1]) for number in range(KEYS)}


def _ends_with_errors(session: Session, verb: str, frames: dict[Key, bytes]) -> None:
    """Call a verb on a thread; it must end, and every key must have an error."""
    found: list[object] = []

    def run() -> None:
        try:
            found.extend(session.backend_call(verb, _batch(session, verb, frames)))
        except BaseException as error:  # noqa: BLE001  whatever it is, it is judged below
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(CALL_MAX_S)
    assert not thread.is_alive(), (
        f"{verb} has not ended after {CALL_MAX_S:g} s without an answer: give the client timeouts below the tier's "
        "deadlines, and switch its retries off"
    )
    for result in found:
        assert isinstance(result, TierKVError), f"{verb} without a server: {result!r}, and not a TierKVError"


def _batch(session: Session, verb: str, frames: dict[Key, bytes]) -> list[object]:
    some = dict(list(frames.items())[: session.plugin.capabilities.preferred_batch])
    if verb == "read_into":
        return [ReadRequest(key, aligned_buffer(session.buffer_bytes)) for key in some]
    if verb == "write":
        return [WriteRequest(key, memoryview(frame)) for key, frame in some.items()]
    return list(some)


def _write_all(session: Session, frames: dict[Key, bytes]) -> bool:
    """Store all frames. Returns whether nothing failed."""
    try:
        return not any(session.write(frames))
    except TierKVError:
        return False


def _read_all(session: Session, frames: dict[Key, bytes]) -> list[bytes | TierKVError | None]:
    try:
        return session.read(list(frames))
    except TierKVError as error:
        return [error] * len(frames)


def _heals(session: Session, frames: dict[Key, bytes]) -> None:
    """Store and read until nothing fails, on the same open backend."""
    give_up_s = time.monotonic() + HEALED_MAX_S
    while not (_write_all(session, frames) and _read_all(session, frames) == list(frames.values())):
        assert time.monotonic() < give_up_s, (
            f"the server has returned, and the backend fails for {HEALED_MAX_S:g} s: {_read_all(session, frames)[:1]}"
        )
        time.sleep(0.05)

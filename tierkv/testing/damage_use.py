"""Use of a place whose files were damaged, through its backend, and the frames that are looked for in it.

:mod:`tierkv.testing.damage` plays it, once for each change of the files.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from tierkv.errors import CorruptFrameError, NamespaceMismatchError, TierKVError
from tierkv.frames.frame import HEADER_BYTES, frame_bytes
from tierkv.frames.sealer import FrameSealer
from tierkv.testing.conformance.session import Session
from tierkv.testing.damage import Outcome
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key

PAUSE_S = 0.002
"""Pause before a call that failed is repeated."""


class StoredFrames(Protocol):
    """Frames of numbered keys in several versions, and the judge of what is read."""

    def frames(self, numbers: Iterable[int], version: int) -> dict[Key, bytes]:
        """Frames of some keys."""

    def is_stored(self, number: int, found: object) -> bool:
        """Whether bytes are a frame that was stored under the key."""

    def is_wrong(self, number: int, found: bytes) -> bool:
        """Whether bytes pass the check of their reader, and are no frame that was ever stored under the key."""


class SealedFrames:
    """Frames of numbered keys in several versions, sealed as the framework does, and the judge of what is read.

    Args:
        fingerprint: of the namespace.
        raw_bytes: lengths of payloads; the keys have them in turn.
        versions: number of versions in which a key may have been stored.
    """

    def __init__(self, fingerprint: bytes, raw_bytes: Sequence[int], versions: int) -> None:
        self._sealer = FrameSealer(fingerprint)
        self._raw_bytes = raw_bytes
        self._versions = versions
        self._made: dict[tuple[int, int], bytes] = {}

    def frame(self, number: int, version: int) -> bytes:
        """Frame of a key in one of its versions, made once."""
        if (number, version) not in self._made:
            raw_bytes = self._raw_bytes[number % len(self._raw_bytes)]
            slot = bytearray(frame_bytes(raw_bytes))
            slot[HEADER_BYTES : HEADER_BYTES + raw_bytes] = make_frame(make_key(number), version, raw_bytes)
            self._sealer.seal(memoryview(slot), make_key(number), raw_bytes)
            self._made[number, version] = bytes(slot)
        return self._made[number, version]

    def frames(self, numbers: Iterable[int], version: int) -> dict[Key, bytes]:
        """Frames of some keys."""
        return {make_key(number): self.frame(number, version) for number in numbers}

    def is_stored(self, number: int, found: object) -> bool:
        """Whether bytes are a frame that was stored under the key."""
        return any(found == self.frame(number, version) for version in range(1, self._versions + 1))

    def is_wrong(self, number: int, found: bytes) -> bool:
        """Whether bytes pass the framework's check and are no frame that was ever stored under the key."""
        try:
            header = self._sealer.check_slot(memoryview(found), make_key(number))
        except CorruptFrameError:
            return False
        payload = slice(HEADER_BYTES, HEADER_BYTES + header.raw_bytes)
        return not any(
            found[payload] == self.frame(number, version)[payload] for version in range(1, self._versions + 1)
        )


@dataclass(frozen=True, slots=True)
class Use:
    """Use of a damaged place: open it, read, delete and rewrite everything, and read it again after a restart."""

    opened: Callable[[Path], Session]
    """Open the backend at a place."""
    stored: StoredFrames
    count: int
    """Number of keys that may have been stored; they are numbered from 0 on."""
    version: int = 1
    """Version of the frames that are written."""
    rounds: int = 1
    """Number of times that everything is deleted and rewritten."""
    heal_s: float = 0.0
    """Seconds for which a failed call is repeated, where a backend starts afresh in use."""
    deletes_damaged: bool = False
    """Whether each frame that fails its check is deleted, as the framework does. Otherwise half of all frames are, and
    the backend must overwrite what is damaged."""

    def play(self, place: Path) -> Outcome:
        """Use a place. One that is refused in words that name it, as of another namespace or format, broke nothing."""
        started_s = time.monotonic()
        try:
            session = self.opened(place)
        except NamespaceMismatchError as error:
            is_named = str(place) in str(error)
            return Outcome("" if is_named else f"refused without its path: {error}", note="refused")
        open_s = time.monotonic() - started_s
        with session:
            broken = self._read(session) or self._rewrite(session)
        return Outcome(broken or self._restart(place), open_s)

    def _read(self, session: Session) -> str:
        """Read everything, and delete half. Returns the promise that broke, or nothing."""
        keys = [*self.stored.frames(range(self.count), self.version)]
        found = session.read(keys)
        for number, frame in enumerate(found):
            if isinstance(frame, bytes) and self.stored.is_wrong(number, frame):
                return f"frame {number} is wrong"
        damaged = [not self.stored.is_stored(number, frame) for number, frame in enumerate(found)]
        return self._delete(
            session, [key for i, key in enumerate(keys) if i % 2 == 0 or (self.deletes_damaged and damaged[i])]
        )

    def _delete(self, session: Session, keys: Sequence[Key]) -> str:
        failed = self._healed(lambda: session.delete(keys))
        return f"not deletable: {next(filter(None, failed))}" if any(failed) else ""

    def _rewrite(self, session: Session) -> str:
        """Store everything, in each round, and read it. Returns the promise that broke, or nothing."""
        stored = self.stored.frames(range(self.count), self.version)
        for number in range(self.rounds):
            if number and (broken := self._delete(session, [*stored][::2])):
                return broken
            if any(failed := self._healed(lambda: session.write(stored))):
                return f"not storable: {next(filter(None, failed))}"
        return "" if session.read([*stored]) == [*stored.values()] else "another frame was read than was stored"

    def _restart(self, place: Path) -> str:
        stored = self.stored.frames(range(self.count), self.version)
        with self.opened(place) as session:
            is_listed = not session.plugin.capabilities.scan or stored.keys() <= session.scan().keys()
            is_whole = is_listed and session.read([*stored]) == [*stored.values()]
        return "" if is_whole else "a frame that was stored is lost by a restart"

    def _healed(self, call: Callable[[], Sequence[Any]]) -> Sequence[Any]:
        """Results of a call, repeated while the backend may be starting afresh."""
        give_up_s = time.monotonic() + self.heal_s
        while True:
            try:
                results = call()
            except TierKVError as error:
                results = [error]
            if not any(results) or time.monotonic() >= give_up_s:
                return results
            time.sleep(PAUSE_S)

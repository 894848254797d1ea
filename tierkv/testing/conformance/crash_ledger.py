"""Ledger of a crash test: changes begun, acknowledged and failed, and the states allowed after a crash."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.testing.conformance.session import Session
from tierkv.testing.frames import make_frame, make_key
from tierkv.types.keys import Key


@dataclass(frozen=True, slots=True)
class Operation:
    """Call of a writer.

    changes: number of a key -> length of its new frame, or None to delete. The frames' version is ``number``.
    """

    number: int
    changes: dict[int, int | None]

    @property
    def frames(self) -> dict[Key, bytes]:
        """Frames that the operation writes, by key."""
        sizes = {number: size for number, size in self.changes.items() if size is not None}
        return {make_key(number): make_frame(make_key(number), self.number, size) for number, size in sizes.items()}

    @property
    def deleted(self) -> list[Key]:
        """Keys that the operation deletes."""
        return [make_key(number) for number, size in self.changes.items() if size is None]

    def perform(self, session: Session) -> None:
        """Run the operation, and assert that there was no error."""
        session.put(self.frames)
        session.forget(self.deleted)


Version = tuple[int, int] | None
"""(version, length) of a frame; None: absent."""


class Ledger:
    """Allowed states of keys 0..keys-1. One operation is in flight at a time for each key."""

    def __init__(self, keys: int) -> None:
        self.acknowledged = 0
        self._possible: dict[int, list[Version]] = {number: [None] for number in range(keys)}

    def begin(self, operation: Operation) -> None:
        """Begin an operation: from now on, each of its changes may be visible or not."""
        for number, size in operation.changes.items():
            self._possible[number].append(None if size is None else (operation.number, size))

    def acknowledge(self, operation: Operation | None = None) -> None:
        """End an operation in flight: all of its changes are durable. None: the only one."""
        self.acknowledged += 1
        for number in self._possible if operation is None else operation.changes:
            del self._possible[number][:-1]

    def fail(self, operation: Operation) -> None:
        """End an operation in flight with an error: each of its keys may have an earlier or the new state, or none."""
        for number in operation.changes:
            if None not in self._possible[number]:
                self._possible[number].append(None)

    def forget_acknowledgements(self) -> None:
        """Allow every key to be absent, for storage that may lose acknowledged frames."""
        for states in self._possible.values():
            if None not in states:
                states.append(None)

    def verify(self, session: Session, *, settle: bool = True) -> None:
        """Check that every key is in an allowed state and intact, and that all verbs agree.

        settle: what is found becomes the only possible state, for a writer that goes on from here.
        """
        keys = [make_key(number) for number in self._possible]
        frames = session.read(keys)
        for number, (key, frame) in enumerate(zip(keys, frames, strict=True)):
            possible = self._possible[number]
            fitting = [state for state in possible if frame == _frame(key, state)]
            assert fitting, f"key {number}: found {_describe(frame)}; possible (version, bytes): {possible}"
            assert session.contains([key]) == [frame is not None], f"key {number}: contains and read_into disagree"
            if settle:
                self._possible[number] = fitting
        if session.plugin.capabilities.scan:
            assert session.scan() == {k: len(f) for k, f in zip(keys, frames, strict=True) if isinstance(f, bytes)}


def _frame(key: Key, state: Version) -> bytes | None:
    return None if state is None else make_frame(key, *state)


def _describe(frame: object) -> str:
    if isinstance(frame, bytes):
        return f"{len(frame)} bytes that start with {frame[:16].hex()}"
    return repr(frame)

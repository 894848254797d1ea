"""A writer in another process that is killed with SIGKILL in the middle of its work, and the judgement afterwards.

The child announces every operation before it starts it and again when the backend acknowledged it. Messages of less
than PIPE_BUF bytes are written to a pipe whole or not at all, so what the parent reads after the kill is exact.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

from tierkv.abc import BackendContext, BackendPlugin
from tierkv.testing.frames import make_frame, make_key
from tierkv.testing.session import Session
from tierkv.types.keys import Key

KEYS = 12
START_TIMEOUT_S = 120.0
OPERATIONS_PER_ROUND_MAX = 1_000_000


@dataclass(frozen=True, slots=True)
class Operation:
    """One call of the child: numbers of keys -> length of the new frame, or None to delete. The version of all frames
    is the operation's number."""

    number: int
    changes: dict[int, int | None]


Version = tuple[int, int] | None
"""(version, length) of a frame; None: absent."""


@dataclass
class CrashWriter:
    """Runs and kills writers on one place, and knows what may be found there.

    ``seed`` decides the operations; the instant of the kill is the machine's business.
    """

    plugin: BackendPlugin
    context: BackendContext
    options: object
    sizes: Sequence[int]
    seed: int = 20260611
    operations_acknowledged: int = 0
    _rounds: int = 0
    _possible: dict[int, list[Version]] = field(default_factory=dict)

    def write_until_killed(self, operations: int) -> None:
        """Let a child write; kill it a random moment after ``operations`` acknowledgements."""
        self._rounds += 1
        start = self._rounds * OPERATIONS_PER_ROUND_MAX
        rng = random.Random(f"{self.seed}/{self._rounds}")
        spawn = multiprocessing.get_context("spawn")
        receiver, sender = spawn.Pipe(duplex=False)
        arguments = (self.plugin, self.context, self.options, list(self.sizes), start, rng.randrange(2**32), sender)
        child = spawn.Process(target=_write_for_ever, args=arguments, daemon=True)
        child.start()
        sender.close()
        try:
            for _ in range(2 * operations):
                assert receiver.poll(START_TIMEOUT_S), "the writer process does nothing"
                self._note(receiver.recv())
            time.sleep(rng.random() * 0.02)
        except EOFError:
            raise AssertionError(f"the writer process died by itself, exit code {child.exitcode}") from None
        finally:
            child.kill()
            child.join()
        while True:
            try:
                self._note(receiver.recv())
            except EOFError:
                break
        receiver.close()

    def verify(self, session: Session) -> None:
        """Every key is in a state that it was acknowledged in, or that the operation in flight would have given it.

        What is found becomes the only possible state, so that the next round starts from it.
        """
        keys = {number: make_key(number) for number in range(KEYS)}
        frames = dict(zip(keys, session.read(list(keys.values())), strict=True))
        present = [answer for key in keys.values() for answer in session.contains([key])]
        for number, key in keys.items():
            possible = self._possible.get(number, [None])
            frame = frames[number]
            fitting = [state for state in possible if frame == _frame(key, state)]
            assert fitting, f"key {number}: found {_describe(frame)}; possible (version, bytes): {possible}"
            assert present[number] == (frame is not None), f"key {number}: contains and read_into disagree"
            self._possible[number] = fitting
        if session.plugin.capabilities.scan:
            assert session.scan() == {keys[n]: len(f) for n, f in frames.items() if isinstance(f, bytes)}

    def _note(self, message: Operation | int) -> None:
        if isinstance(message, Operation):
            for number, size in message.changes.items():
                new = None if size is None else (message.number, size)
                self._possible.setdefault(number, [None]).append(new)
            return
        self.operations_acknowledged += 1
        for states in self._possible.values():
            del states[:-1]


def _frame(key: Key, state: Version) -> bytes | None:
    return None if state is None else make_frame(key, *state)


def _describe(frame: object) -> str:
    if isinstance(frame, bytes):
        return f"{len(frame)} bytes that start with {frame[:16].hex()}"
    return repr(frame)


def _write_for_ever(
    plugin: BackendPlugin,
    context: BackendContext,
    options: object,
    sizes: Sequence[int],
    start: int,
    seed: int,
    sender: Connection,
) -> None:
    """The child: write, overwrite and delete at random until killed."""
    rng = random.Random(seed)
    session = Session(plugin, context, options)
    batch_max = min(plugin.capabilities.preferred_batch, 4)
    for number in itertools.count(start):
        chosen = rng.sample(range(KEYS), rng.randint(1, batch_max))
        delete = rng.random() < 0.25
        changes = {key: None if delete else rng.choice(sizes) for key in chosen}
        sender.send(Operation(number, changes))
        if delete:
            session.forget(make_key(key) for key in chosen)
        else:
            session.put({make_key(k): make_frame(make_key(k), number, n) for k, n in changes.items() if n is not None})
        sender.send(number)

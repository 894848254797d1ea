"""Crash test: a writer in another process that is killed with SIGKILL, and the check of its data afterwards.

The child announces every operation before it starts it and again when the backend acknowledged it. Messages of less
than PIPE_BUF bytes are written to a pipe whole or not at all, so what the parent reads after the kill is exact.
"""

from __future__ import annotations

import itertools
import multiprocessing
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from tierkv.abc import BackendContext, BackendPlugin
from tierkv.testing.conformance.crash_ledger import Ledger, Operation
from tierkv.testing.conformance.session import Session

KEYS = 12
SILENCE_MAX_S = 120.0
OPERATIONS_PER_ROUND_MAX = 1_000_000
KILL_WITHIN_S = 0.02


@dataclass(frozen=True, slots=True)
class Orders:
    """Instructions to a child process. Operations are numbered from ``start``; ``seed`` determines them."""

    plugin: BackendPlugin
    context: BackendContext
    options: object
    sizes: tuple[int, ...]
    start: int = 0
    seed: int = 0


def random_operations(
    sizes: tuple[int, ...], batch_max: int, start: int, rng: random.Random, keys: Sequence[int] = range(KEYS)
) -> Iterator[Operation]:
    """Endless writes, overwrites and deletes of 1 to ``batch_max`` of the keys, by number."""
    for number in itertools.count(start):
        chosen = rng.sample(keys, rng.randint(1, batch_max))
        delete = rng.random() < 0.25
        yield Operation(number, {key: None if delete else rng.choice(sizes) for key in chosen})


class CrashWriter:
    """Runs and kills writers at one place. The seed determines their operations; the instant of the kill is random."""

    def __init__(self, orders: Orders) -> None:
        self.ledger = Ledger(KEYS)
        self._orders = orders
        self._rounds = 0

    def write_until_killed(self, operations: int) -> None:
        """Start a writer, and kill it a random moment after ``operations`` acknowledgements."""
        self._rounds += 1
        rng = random.Random(f"{self._orders.seed}/{self._rounds}")
        orders = replace(self._orders, start=self._rounds * OPERATIONS_PER_ROUND_MAX, seed=rng.randrange(2**32))
        child, receiver = _start(_write_for_ever, orders)
        try:
            for _ in range(2 * operations):
                assert receiver.poll(SILENCE_MAX_S), "the writer process does nothing"
                self._note(receiver.recv())
            time.sleep(rng.random() * KILL_WITHIN_S)
        except EOFError:
            child.join()
            raise AssertionError(f"the writer process died by itself, exit code {child.exitcode}") from None
        finally:
            child.kill()
            child.join()
        try:
            while True:
                self._note(receiver.recv())
        except EOFError:
            receiver.close()

    def _note(self, message: Operation | None) -> None:
        if message is None:
            self.ledger.acknowledge()
        else:
            self.ledger.begin(message)


def kill_while_opening(orders: Orders, delay_s: float) -> None:
    """Open the place in another process, and kill it ``delay_s`` seconds later."""
    child, receiver = _start(_open_and_wait, orders)
    try:
        assert receiver.poll(SILENCE_MAX_S), "the process that opens does nothing"
        receiver.recv()
        time.sleep(delay_s)
    finally:
        child.kill()
        child.join()
        receiver.close()


def open_elsewhere(orders: Orders) -> str:
    """Open and close the place in another process. Returns its error as text, or an empty text."""
    child, receiver = _start(_open_and_tell, orders)
    try:
        assert receiver.poll(SILENCE_MAX_S), "the other process says nothing"
        return str(receiver.recv())
    finally:
        child.kill()
        child.join()
        receiver.close()


@contextmanager
def held_elsewhere(orders: Orders) -> Iterator[str]:
    """Keep the place open in another process for a while. Yields the error of its open as text, or an empty text."""
    child, receiver = _start(_open_tell_and_wait, orders)
    try:
        assert receiver.poll(SILENCE_MAX_S), "the other process says nothing"
        yield str(receiver.recv())
    finally:
        child.kill()
        child.join()
        receiver.close()


def _start(run: Callable[[Orders, Connection], None], orders: Orders) -> tuple[SpawnProcess, Connection]:
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe(duplex=False)
    child = spawn.Process(target=run, args=(orders, sender), daemon=True)
    child.start()
    sender.close()
    return child, receiver


def _open_and_wait(orders: Orders, sender: Connection) -> None:
    """Child: send None, open, then wait for the kill."""
    sender.send(None)
    session = Session(orders.plugin, orders.context, orders.options)
    time.sleep(SILENCE_MAX_S)
    session.close()


def _open_and_tell(orders: Orders, sender: Connection) -> None:
    """Child: send the error of the open."""
    try:
        Session(orders.plugin, orders.context, orders.options).close()
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent judges it
        sender.send(f"{type(error).__name__}: {error}")
    else:
        sender.send("")


def _open_tell_and_wait(orders: Orders, sender: Connection) -> None:
    """Child: open, send the error of that, then wait for the kill."""
    try:
        session = Session(orders.plugin, orders.context, orders.options)
    except Exception as error:  # noqa: BLE001  # whatever it is, the parent judges it
        sender.send(f"{type(error).__name__}: {error}")
        return
    sender.send("")
    time.sleep(SILENCE_MAX_S)
    session.close()


def _write_for_ever(orders: Orders, sender: Connection) -> None:
    """Child: for each operation, announce it, run it, and acknowledge it with None."""
    session = Session(orders.plugin, orders.context, orders.options)
    batch_max = min(orders.plugin.capabilities.preferred_batch, 4)
    for operation in random_operations(orders.sizes, batch_max, orders.start, random.Random(orders.seed)):
        sender.send(operation)
        operation.perform(session)
        sender.send(None)

"""Modes of ``nox -s crash``: what one seed does to one target, and what is checked afterwards."""

from __future__ import annotations

import errno
import pickle
import random
import shutil
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from harness.lanes import LANE_KEYS, Room, Send, Verdict, open_again, store_everything, verify, write_on
from harness.processes import Crew, Message, run_alone
from harness.replaying import Disk, Kind, read_journal
from harness.system_calls import ALL_CALLS, Action, Call, SystemCalls
from harness.targets import Target

WRITERS = 3
THREADS = 2
KILLS_PER_PLACE = 8
CALM_MAX_S = 0.06
"""Longest time in seconds between the last acknowledgement that was waited for and the kill."""
OPERATIONS = 24
CUTS_PER_JOURNAL = 10
STEP = 1_000_000
"""Distance of the numbers of operations between two lives of a writer."""
ERRORS = (errno.EIO, errno.EIO, errno.ENOSPC, errno.EROFS)


class Kills:
    """Mode ``kills``: all writers of a place are ended at a random instant, again and again."""

    def __init__(self, target: Target, place: Path) -> None:
        self._target = target
        self._place = place
        self._rooms: list[Room] = []

    def play(self, seed: int) -> Verdict:
        """Kill the writers once, and check every room."""
        rng = random.Random(seed)
        if not self._rooms or seed % KILLS_PER_PLACE == 0:
            self._start_afresh(variant=seed // KILLS_PER_PLACE)
        start = (1 + seed) * STEP
        with Crew() as crew:
            for writer in range(WRITERS):
                crew.start(partial(self._write, writer, rng.randrange(1 << 32), start))
            broken = self._kill_after(crew, rng)
        if broken:
            return self._ended(Verdict(broken))
        verdicts = [verify(room, start + STEP // 2) for room in self._rooms]
        worst = max(verdicts, key=lambda verdict: (verdict.broken != "", verdict.open_s))
        worst.count = WRITERS
        return self._ended(worst)

    def _ended(self, verdict: Verdict) -> Verdict:
        if verdict.broken:
            self._rooms = []
        return verdict

    def _start_afresh(self, variant: int) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(mode=0o700)
        count, lanes = (1, WRITERS * THREADS) if self._target.shares_room else (WRITERS, THREADS)
        self._rooms = [Room(self._target, self._place, number, lanes, variant) for number in range(count)]

    def _kill_after(self, crew: Crew, rng: random.Random) -> str:
        """Enter messages into the ledgers; kill after some of them. Returns a finding, or an empty text."""
        patience = rng.randrange(2, 60)
        for kind, content in crew.messages():
            if kind == "raised":
                return f"a writer ended by itself: {content}"
            room, message = content
            self._rooms[room].take((kind, message))
            patience -= 1
            if not patience:
                time.sleep(rng.random() * CALM_MAX_S)
                crew.kill()
        return ""

    def _write(self, writer: int, seed: int, start: int, send: Send) -> None:
        room, first = (0, writer * THREADS) if self._target.shares_room else (writer, 0)

        def send_for(message: Message) -> None:
            kind, operation = message
            send((kind, (room, operation)))

        session = self._target.open(self._place, room, self._rooms[0].variant)
        run_threads(
            [partial(write_on, session, lane, seed, start + lane, send_for) for lane in range(first, first + THREADS)]
        )


def run_threads(actions: list[Callable[[], None]]) -> None:
    """Run each action on a thread; raise the first exception of one."""
    failures: list[BaseException] = []

    def run(action: Callable[[], None]) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001  raised below
            failures.append(error)

    threads = [threading.Thread(target=run, args=(action,), daemon=True) for action in actions]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and not failures:
        time.sleep(0.005)
    if failures:
        raise failures[0]


class Calls:
    """Mode ``calls``: one system call fails, stores a part, or ends the process."""

    def __init__(self, target: Target, place: Path, calls: SystemCalls) -> None:
        self._target = target
        self._place = place
        self._calls = calls
        self._totals: dict[int, dict[Call, int]] = {}

    def play(self, seed: int) -> Verdict:
        """Strike one call, check that everything is storable, and compare the room with its ledger."""
        rng = random.Random(seed)
        variant = rng.randrange(4)
        action = rng.choice([Action.FAIL] * 5 + [Action.SHORTEN, Action.KILL_BEFORE, Action.KILL_AFTER, Action.TEAR])
        totals = self._totals_of(variant)
        named = rng.choice([ALL_CALLS, *totals])
        error = rng.choice((*ERRORS, errno.EMFILE) if named is Call.OPEN else ERRORS)
        number = rng.randrange(1, 1 + (sum(totals.values()) if named is ALL_CALLS else totals[named]))
        room = self._new_room(variant)
        plan = partial(self._calls.arm, number, action, error, named)
        messages, ends = run_alone(partial(self._use, room, seed, plan))
        calls = named.name or "all"
        error_name = errno.errorcode[error]
        what = f"{action.name.lower()} {error_name} at call {number} of {calls}, variant {variant}"
        heal_s, note = 0.0, "died"
        for kind, content in messages:
            if kind == "raised":
                return Verdict(f"{what}: {content}")
            if kind == "result":
                heal_s, has_fired = content
                note = action.name.lower() if has_fired else "not reached"
            room.take((kind, content))
        if ends and (ends != ["SIGKILL"] or action in (Action.FAIL, Action.SHORTEN)):
            return Verdict(f"{what}: {' '.join(ends)}")
        verdict = verify(room, 2 * STEP)
        verdict.broken = f"{what}: {verdict.broken}" if verdict.broken else ""
        verdict.heal_s, verdict.note = heal_s, note
        return verdict

    def _new_room(self, variant: int) -> Room:
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(mode=0o700)
        return Room(self._target, self._place, 0, 1, variant)

    def _totals_of(self, variant: int) -> dict[Call, int]:
        """Number of calls of each kind in a run without a fault."""
        if variant not in self._totals:
            room = self._new_room(variant)

            def count(send: Send) -> dict[Call, int]:
                self._use(room, 0, lambda: None, send)
                return {call: number for call in Call if (number := self._calls.count(call))}

            messages, ends = run_alone(count)
            kind, self._totals[variant] = messages[-1]
            assert kind == "result", f"a run without a fault fails: {messages[-1:]} {ends}"
        return self._totals[variant]

    def _use(self, room: Room, seed: int, plan: Callable[[], None], send: Send) -> tuple[float, bool]:
        """Open, write, and store everything while the plan is on. Returns the time of that, and whether it was hit."""
        self._calls.watch(room.place)
        plan()
        with open_again(room.target, room.place, room.number, room.variant) as session:
            write_on(session, 0, seed, STEP, send, OPERATIONS)
            return store_everything(session, range(LANE_KEYS), STEP + STEP // 2, send), self._calls.has_fired


class Cuts:
    """Mode ``cuts``: images of the disk after a power cut at any instant of a run."""

    def __init__(self, target: Target, place: Path, calls: SystemCalls, *, syncs_lie: bool = False) -> None:
        self._target = target
        self._place = place
        self._calls = calls
        self._syncs_lie = syncs_lie
        self._base = place.with_name(f"{place.name}-written")
        self._journal = place.with_name(f"{place.name}-journal")
        self._records = 0

    def play(self, seed: int) -> Verdict:
        """Cut the power once, and compare what is left with the ledger at that instant."""
        if not self._records or seed % CUTS_PER_JOURNAL == 0:
            broken = self._write(seed // CUTS_PER_JOURNAL)
            if broken:
                return Verdict(broken)
        rng = random.Random(seed)
        variant = seed // CUTS_PER_JOURNAL
        room = Room(self._target, self._place, 0, THREADS, variant)
        disk = Disk(self._base)
        instant = rng.randrange(self._records)
        for record in read_journal(self._journal):
            if instant == 0:
                break
            instant -= 1
            disk.play(record)
            if record.kind is Kind.NOTE:
                message = pickle.loads(record.data)
                if message[0] != "end" or self._target.forces_deletes or not message[1].deleted:
                    room.take(message)  # otherwise the delete stays in flight: it may be undone
        if not self._target.forces_frames:
            room.ledger.forget_acknowledgements()
        shutil.rmtree(self._place, ignore_errors=True)
        disk.image(self._place, rng)
        return verify(room, 9 * STEP)

    def _write(self, variant: int) -> str:
        """Write a journal of two lives of a writer. Returns a finding, or an empty text."""
        shutil.rmtree(self._base, ignore_errors=True)
        self._base.mkdir(mode=0o700)
        with self._journal.open("wb", buffering=0) as journal:
            messages, ends = run_alone(partial(self._use, variant, journal.fileno()))
        if ends or messages[-1][0] != "result":
            return f"a run without a fault fails: {messages[-1:]} {ends}"
        disk, self._records = Disk(self._base), 0
        for record in read_journal(self._journal):
            disk.play(record)
            self._records += 1
        gaps = disk.gaps()
        return f"the journal lacks calls that changed {', '.join(gaps)}" if gaps else ""

    def _use(self, variant: int, journal_fd: int, _send: Send) -> None:
        self._calls.watch(self._base, journal_fd)
        if self._syncs_lie:
            self._calls.let_syncs_lie()

        def send(message: Message) -> None:
            self._calls.note(pickle.dumps(message))

        for life in (1, 2):
            with self._target.open(self._base, 0, variant) as session:
                lanes = range(THREADS if variant % 2 else 1)
                seed = 2 * variant + life
                run_threads(
                    [partial(write_on, session, lane, seed, life * STEP + lane, send, OPERATIONS) for lane in lanes]
                )

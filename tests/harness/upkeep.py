"""Mode ``upkeep`` of ``nox -s crash``: an operator's command is ended between two changes, and then repeated."""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import mmap
import os
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from harness.lanes import Verdict
from harness.processes import Message, run_alone
from harness.system_calls import ALL_CALLS, Action, Call, SystemCalls
from tierkv.abc import StoredFrame, StoredNamespace, WriteRequest
from tierkv.cli.main import cli
from tierkv.errors import TierKVError
from tierkv.frames.frame import HEADER_BYTES, frame_bytes
from tierkv.frames.sealer import FrameSealer
from tierkv.plugins.loading import load_plugins
from tierkv.stores.folder import Exported, is_folder, note_export
from tierkv.stores.places import Place, find_places, folder_place
from tierkv.stores.store import Store
from tierkv.stores.verification import Verified, verify_store
from tierkv.types.keys import Key, make_key, make_scope
from tierkv.types.namespace import Namespace

CHUNKS = 300
"""Chunks of each model: more than one batch of a removal."""
DAMAGED = range(20, 30)
AGE_STEP_S = 120.0
CHANGES = ALL_CALLS & ~Call.OPEN
KILLS = (Action.KILL_BEFORE, Action.KILL_AFTER, Action.TEAR)
SALT = "customer"
NOTHING_LEFT = "no namespace matches"
"""Answer to the repetition of a removal that had ended but for its last files."""
NOTHING_STORED = "nothing was stored there yet"
"""Finding on a place that is absent or empty, such as one whose first command was ended at once."""
Content = dict[tuple[str, str], bytes]
"""Digest of each whole frame by model and key."""
SourceOf = Callable[[Path], Sequence[str]]


def _namespace(model: str) -> Namespace:
    return Namespace(model, "r1", "bfloat16", "page", ((16, (256,), "full_attention", None),), 4, 16)


OLD, KEPT = _namespace("old"), _namespace("kept")


def _key(number: int) -> Key:
    digest = hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest()
    return make_key(digest, 0, make_scope(SALT if number % 2 else None, None))


def _frame(namespace: Namespace, number: int) -> memoryview:
    size = namespace.payload_bytes_max
    slot = memoryview(mmap.mmap(-1, frame_bytes(size)))
    slot[HEADER_BYTES : HEADER_BYTES + size] = bytes([number % 251 + 1]) * size
    FrameSealer(namespace.fingerprint()).seal(slot, _key(number), size)
    return slot.toreadonly()


SIZE = frame_bytes(OLD.payload_bytes_max)


@dataclass(frozen=True, slots=True)
class Command:
    """A command, and what the place has before it."""

    words: tuple[str, ...]
    """Its words; ``STACK`` and ``FOLDER`` are replaced by paths."""
    filled: tuple[str, ...] = ("tier",)
    """Stores that are filled before: ``tier``, ``below`` (a bucket below it) and ``folder`` (an export)."""
    is_damaged: bool = False
    """Whether some chunks of the tier are damaged before."""
    first_change: int = 2
    """First of its changes at which it is ended."""


AFTER_PID = 3
"""First change behind those that note a process in the lock of a namespace. A kill at them leaves the namespace as the
one that was used last, and the repetition of a removal by age begins with another one."""
COMMANDS = {
    "gc": Command(("gc", "STACK", "--tier", "tier", "--to", str(150 * SIZE), "--yes"), first_change=AFTER_PID),
    "gc shrink": Command(
        ("gc", "STACK", "--tier", "tier", "--to", str(150 * SIZE), "--shrink", "--yes"), first_change=AFTER_PID
    ),
    "rm model": Command(("rm", "STACK", "--tier", "tier", "-n", "old", "--yes")),
    "rm tenant": Command(("rm", "STACK", "--tier", "tier", "-n", "old", "--tenant", SALT, "--yes")),
    "verify": Command(("verify", "STACK", "--tier", "tier", "--repair"), is_damaged=True),
    "copy out": Command(("copy", "STACK", "FOLDER", "--tier", "tier")),
    "copy in": Command(("copy", "FOLDER", "STACK", "--to-tier", "tier"), ("folder",)),
    "rm export": Command(("rm", "FOLDER", "-n", "old", "--tenant", SALT, "--yes"), ("folder",)),
    "rm export model": Command(("rm", "FOLDER", "-n", "old", "--yes"), ("folder",)),
    "gc export": Command(("gc", "FOLDER", "--to", str(150 * SIZE), "--yes"), ("folder",)),
    "warm": Command(("warm", "STACK", "--to", "tier"), ("below",)),
}
TIERS = {
    "disk": 'backend = "disk"\npath = "{place}/tier"\ncapacity = "8MiB"\nsegment_bytes = "1MiB"\nmin_free_bytes = 0',
    "fsspec": 'backend = "fsspec"\nurl = "file://{place}/tier"',
    "lmdb": 'backend = "lmdb"\npath = "{place}/tier"\ncapacity = "32MiB"',
}


@dataclass(slots=True)
class State:
    """Content of all stores of a place, and what is wrong with them."""

    content: dict[str, Content] = field(default_factory=dict)
    """Whole frames by store."""
    wrong: list[str] = field(default_factory=list)
    """Findings, apart from an export that is known to be incomplete."""


@dataclass(slots=True)
class Plan:
    """A command on a target: how often it changes files, and the state before and after a run without a fault."""

    changes: int
    before: State
    after: State
    exit_code: int


class Upkeep:
    """Mode ``upkeep``: a command on stores at rest is ended at one of its changes, and repeated.

    After the end, every chunk that the whole command leaves is there and whole, and nothing that is there is damaged.
    After the repetition, all is as if the command had never been ended.
    """

    def __init__(self, target: str, place: Path, calls: SystemCalls) -> None:
        self._target = target
        self._place = place
        self._template = place.with_name(f"{place.name}-before")
        self._calls = calls
        self._plans: dict[str, Plan] = {}
        load_plugins()

    def play(self, seed: int) -> Verdict:
        """End one command at one change, look, and repeat it."""
        rng = random.Random(seed)
        name = list(COMMANDS)[seed % len(COMMANDS)]
        command, plan = COMMANDS[name], self._plan_of(name)
        action, number = rng.choice(KILLS), rng.randint(command.first_change, max(command.first_change, plan.changes))
        what = f"{name}: {action.name.lower()} at change {number} of {plan.changes}"
        self._copy_template(name)
        ends = self._run(command, (number, action))[1]
        if ends != ["SIGKILL"]:
            return Verdict("" if not ends else f"{what}: {' '.join(ends)}", note="not reached")
        broken = _first_difference(self._state(), plan, is_whole=False)
        if not broken:
            code, ends, text = self._run(command)
            if ends or (code not in (0, plan.exit_code) and NOTHING_LEFT not in text):
                broken = f"the repetition ends with {code} {' '.join(ends)}: {text}"
            else:
                broken = _first_difference(self._state(), plan, is_whole=True)
        return Verdict(f"{what}: {broken}" if broken else "", note=name)

    def _plan_of(self, name: str) -> Plan:
        if name not in self._plans:
            self._build(COMMANDS[name], self._template / name)
            self._copy_template(name)
            before = self._state()
            code, ends, text, changes = self._run(COMMANDS[name], count=True)
            after = self._state()
            assert (code, ends) == (COMMANDS[name].is_damaged, []), f"{name} fails without a fault: {text} {ends}"
            assert not after.wrong, f"{name}: after a run without a fault, {after.wrong[0]}"
            self._plans[name] = Plan(changes, before, after, code)
        return self._plans[name]

    def _copy_template(self, name: str) -> None:
        shutil.rmtree(self._place, ignore_errors=True)
        shutil.copytree(self._template / name, self._place, symlinks=True)

    def _build(self, command: Command, folder: Path) -> None:
        """Fill a place below ``folder``, which is then copied for each play."""
        shutil.rmtree(self._place, ignore_errors=True)
        self._place.mkdir(mode=0o700)
        below = 'name = "below"\nbackend = "fsspec"\nurl = "file://{place}/below"'
        tiers = [f'name = "tier"\n{TIERS[self._target]}', below]
        tables = "".join(f"\n[[tiers]]\n{tier.format(place=self._place)}\n" for tier in tiers)
        (self._place / "stack.toml").write_text(f'[host]\ncapacity = "8MiB"\n{tables}')
        _alone(partial(_fill, self._place, command))
        folder.parent.mkdir(exist_ok=True)
        shutil.copytree(self._place, folder, symlinks=True)

    def _run(self, command: Command, kill: tuple[int, Action] | None = None, *, count: bool = False) -> Any:
        """Run a command in a process of its own. Returns exit code, signals and output; with ``count`` its changes."""
        paths = {"STACK": str(self._place / "stack.toml"), "FOLDER": str(self._place / "folder")}
        words = [paths.get(word, word) for word in command.words]

        def call(_send: Callable[[Message], None]) -> tuple[int, str, int]:
            self._calls.watch(self._place)
            if kill is not None:
                self._calls.arm(*kill, calls=CHANGES)
            code, text = _invoke(words)
            return code, text[:2000], self._calls.count(CHANGES)

        messages, ends = run_alone(call)
        last: Message = messages[-1] if messages else ("raised", "nothing")
        kind, content = last
        code, text, changes = content if kind == "result" else (-1, str(content), 0)
        return (code, ends, text, changes) if count else (code, ends, text)

    def _state(self) -> State:
        return _alone(partial(_look, self._place))  # type: ignore[no-any-return]


def _invoke(words: Sequence[str]) -> tuple[int, str]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        try:
            cli.main(list(words), prog_name="tierkv")
        except SystemExit as end:
            return int(end.code or 0), out.getvalue()


def _alone(run: Callable[[], object]) -> Any:
    messages, ends = run_alone(lambda _send: run())
    kind, content = messages[-1] if messages else ("raised", "nothing")
    assert kind == "result", f"{content} {ends}"
    return content


def _places(place: Path) -> dict[str, Place]:
    tiers = find_places(str(place / "stack.toml"), load_plugins())
    return {each.name: each for each in tiers} | {"folder": folder_place(str(place / "folder"))}


def _fill(place: Path, command: Command) -> None:
    """Fill the stores of a command. Objects have ages, the older ones first."""
    for name in command.filled:
        at = _places(place)[name]
        for namespace in (OLD, KEPT):
            with Store(at, namespace, writes=True) as store:
                requests = [WriteRequest(_key(number), _frame(namespace, number), number) for number in range(CHUNKS)]
                assert not any(store.write(requests))
            if name == "folder":
                note_export(place / name, Exported(namespace, CHUNKS, CHUNKS * SIZE))
    roots = [place / name for name in ("tier", "below", "folder")]
    objects = sorted(path for root in roots for path in root.rglob("*") if _is_aged(path))
    for number, path in enumerate(objects):
        os.utime(path, (1e9 + number * AGE_STEP_S,) * 2)
    if command.is_damaged:
        damaged = [bytes(_frame(OLD, number)) for number in DAMAGED]
        for path in (each for each in (place / "tier").rglob("*") if each.is_file() and each.stat().st_size >= SIZE):
            data = bytearray(path.read_bytes())
            for frame in damaged:
                if (at_byte := data.find(frame)) >= 0:
                    data[at_byte + HEADER_BYTES + 100] ^= 1
            status = path.stat()
            path.write_bytes(data)
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _is_aged(path: Path) -> bool:
    return path.is_file() and path.suffix not in (".json", ".dat", ".mdb", ".log", ".lock")


def _look(place: Path) -> State:
    """Read every store as the commands do, and compare an export with its manifest."""
    state = State()
    for name, at in _places(place).items():
        content: Content = {}
        state.content[name] = content
        if name == "folder" and not is_folder(place / "folder"):
            continue
        try:
            found = list(at.list_namespaces())
        except TierKVError as error:
            if (place / name).exists() and NOTHING_STORED not in str(error):
                state.wrong.append(f"{name} cannot be listed: {error}")
            continue
        for each in found:
            if not isinstance(each, StoredNamespace):
                state.wrong.append(f"a namespace of {name} cannot be listed: {each}")
                continue
            try:
                with Store(at, each.namespace, writes=False) as store:
                    state.wrong += [f"in {name}, {finding}" for finding in verify_store(store, Verified())]
                    content |= _whole_frames(store, each.namespace.model)
            except TierKVError as error:
                state.wrong.append(f"{name} {each.namespace.model} cannot be read: {error}")
    return state


def _whole_frames(store: Store, model: str) -> Content:
    listed: Iterable[StoredFrame] = [each for each in store.list_frames() if isinstance(each, StoredFrame)]
    return {
        (model, (read.listed.key or b"").hex()): hashlib.blake2b(read.frame, digest_size=8).digest()
        for batch in store.read_all(listed)
        for read in batch
        if read.header is not None
    }


def _first_difference(state: State, plan: Plan, *, is_whole: bool) -> str:
    """Return the first broken promise; an empty text if all hold.

    Args:
        state: as found.
        plan: of the command.
        is_whole: whether the command has ended by itself.
    """
    known = {_subject(each) for each in plan.before.wrong}
    wrong = [each for each in state.wrong if _subject(each) not in known and (is_whole or not _is_begun(each))]
    if wrong or (is_whole and state.wrong):
        return (wrong or state.wrong)[0]
    for name, after in plan.after.content.items():
        before, now = plan.before.content[name], state.content[name]
        if lost := [key for key in after if key in before and now.get(key) != after[key]]:
            return f"{name} has lost {len(lost)} chunks that stay, {lost[0]} first"
        if strange := [key for key, digest in now.items() if digest not in (before.get(key), after.get(key))]:
            return f"{name} has {len(strange)} other chunks, {strange[0]} first"
        if is_whole and now.keys() != after.keys():
            return f"after the repetition, {name} has {len(now)} chunks, not {len(after)}"
    return ""


def _is_begun(finding: str) -> bool:
    """Whether a finding tells of work that was begun.

    An export says that it is incomplete. An LMDB file without a chunk, torn in its first write, looks like a cut one.
    """
    return "incomplete:" in finding or "the data is damaged (the file ends before" in finding


def _subject(finding: str) -> str:
    return json.dumps(finding.split(": ")[:2])

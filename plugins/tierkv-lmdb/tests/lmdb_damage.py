"""Mutations of an LMDB tier at rest, by field; each is opened, read and rewritten in a process of its own.

As a program: ``python lmdb_damage.py --count 1000 --seed 1 [--only 17]`` prints a summary as JSON.
"""

from __future__ import annotations

import collections
import functools
import random
import struct
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lmdb_support import KIB, MIB, context, directory, key, open_at

from tierkv.abc import ReadRequest, WriteRequest
from tierkv.errors import TierKVError
from tierkv.testing.damage import Damage, Outcome, change_bytes, change_length, change_pages, main

FRAMES = 130
CAPACITY_BYTES = 4 * MIB
PAGE = 4096
HEAL_S, PAUSE_S = 2.0, 0.002
BATCH = 26
LOCK_SHARE = 0.06
BRANCH, LEAF, OVERFLOW = 1, 2, 4
KINDS = ("meta", "meta", "branch", "leaf", "leaf", "overflow", "free", "free", "names", "page", "file")


KEYS = [key(number) for number in range(FRAMES)]


@functools.cache
def frame(number: int) -> bytes:
    """Frame of a key: a checksum, the key, and bytes that follow from it. Many are shorter than a page."""
    rng = random.Random(number)
    body = bytes(key(number)) + rng.randbytes(rng.choice((10, 900, 3 * KIB, 9 * KIB)))
    return struct.pack("<I", zlib.crc32(body)) + body


def is_wrong(number: int, found: bytes) -> bool:
    """Whether a frame passes the check of its reader, and is wrong all the same."""
    intact = zlib.crc32(found[4:]) == int.from_bytes(found[:4], "little") and found[4:40] == bytes(key(number))
    return intact and found != frame(number)


def build(place: Path) -> None:
    """Create a tier whose trees have branches, and whose list of free pages has several records."""
    tier_context = context(CAPACITY_BYTES)
    backend = open_at(place, tier_context, durability="none")
    for start in range(0, FRAMES, 10):
        store(backend, range(start, start + 10))
    for start in range(0, FRAMES, 13):
        backend.delete([key(start), key(start + 5)])
        store(backend, [start])
    backend.close()


def store(backend: Any, numbers: Sequence[int]) -> list[object]:
    """Write frames. Returns the results."""
    return list(backend.write([WriteRequest(KEYS[number], memoryview(frame(number))) for number in numbers]))


@functools.cache
def buffers() -> list[memoryview]:
    """Buffers of reads, one for each frame, made once in each process."""
    return [memoryview(bytearray(64 * KIB)) for _ in KEYS]


def read(backend: Any, numbers: Sequence[int]) -> Iterator[tuple[int, object, memoryview]]:
    """Read frames. Yields number, result and buffer of each; no buffer holds its frame of an earlier read."""
    used = [buffers()[number] for number in numbers]
    for number, buffer in zip(numbers, used, strict=True):
        buffer[: len(frame(number))] = bytes(len(frame(number)))
    results = backend.read_into([ReadRequest(KEYS[number], buffers()[number]) for number in numbers])
    yield from zip(numbers, results, used, strict=True)


@functools.lru_cache(maxsize=1)
def pages_by_kind(data: bytes) -> dict[str, list[int]]:
    """Pages of each kind of a sound file; the copies of a place have the same."""
    kinds: dict[str, list[int]] = collections.defaultdict(list)
    newest = max((0, 1), key=lambda page: struct.unpack_from("<Q", data, page * PAGE + 144)[0])
    free_root, main_root = (struct.unpack_from("<Q", data, newest * PAGE + place)[0] for place in (80, 128))
    for page in range(2, len(data) // PAGE):
        number, _, flags = struct.unpack_from("<QHH", data, page * PAGE)
        if number == page and flags in (BRANCH, LEAF, OVERFLOW):
            kinds[{BRANCH: "branch", LEAF: "leaf", OVERFLOW: "overflow"}[flags]].append(page)
    return kinds | {"meta": [0, 1], "names": [main_root], "free": [free_root]}


class Image:
    """Data file to be mutated, and the pages of each kind."""

    def __init__(self, data: bytes) -> None:
        self.data = bytearray(data)
        self.kinds = pages_by_kind(data)

    def mutate(self, rng: random.Random) -> str:
        """Change one field. Returns its description."""
        kind = rng.choice(KINDS)
        if kind == "file":
            return f"file {change_length(self.data, rng)}"
        if kind == "page":
            pages = {page for kind in ("meta", "branch", "leaf", "free", "names") for page in self.kinds[kind]}
            return f"page {change_pages(self.data, rng, sorted(pages))}"
        page = rng.choice(self.kinds[kind])
        start = page * PAGE + self._offset(kind, page, rng)
        return f"{kind} page {page} {change_bytes(self.data, rng, start, start + 1)}"

    def _offset(self, kind: str, page: int, rng: random.Random) -> int:
        if kind == "meta":
            return rng.randrange(152)
        if kind == "overflow":
            return rng.randrange(16)
        lower, upper = struct.unpack_from("<HH", self.data, page * PAGE + 12)
        if rng.random() < 0.4:
            return rng.randrange(max(17, min(lower, PAGE)))
        return rng.randrange(min(upper, PAGE - 8), PAGE)


def mutate_lock(place: Path, rng: random.Random) -> str:
    """Change the lock file, which no process has open."""
    lock = directory(place) / "lock.mdb"
    content = bytearray(lock.read_bytes())
    how = rng.choice(("random", "ones", "cut", "byte", "lengthen"))
    if how in ("random", "ones"):
        content[:] = rng.randbytes(len(content)) if how == "random" else b"\xff" * len(content)
    elif how == "cut":
        del content[rng.randrange(len(content)) :]
    elif how == "byte":
        content[rng.randrange(256)] ^= 1 << rng.randrange(8)
    else:
        content += bytes(PAGE)
    lock.write_bytes(content)
    return f"lock {how}"


def play(place: Path) -> Outcome:
    """Open a damaged tier, read, delete and rewrite everything."""
    started = time.monotonic()
    backend = open_at(place, context(CAPACITY_BYTES), durability="none")
    open_s = time.monotonic() - started
    losses = directory(place) / "damage.json"
    note = "emptied at its start" if losses.exists() else ""
    list(backend.scan())
    for number, size, buffer in read(backend, range(FRAMES)):
        if isinstance(size, int) and is_wrong(number, bytes(buffer[:size])):
            return Outcome(f"frame {number} is wrong", open_s)
    if broken := rewritten(backend):
        return Outcome(broken, open_s)
    keys = {entry.key for entry in backend.scan()}
    backend.close()
    if not keys.issuperset(KEYS):
        return Outcome("the index lacks a frame", open_s)
    size = (directory(place) / "data.mdb").stat().st_size
    if not note and losses.exists():
        note = "emptied in use"
    return Outcome(f"{size} bytes of data" if size > CAPACITY_BYTES else "", open_s, note)


def rewritten(backend: Any) -> str:
    """Delete and store everything twice, and read it back. Returns the promise that broke, or nothing."""
    batches = [range(start, start + BATCH) for start in range(0, FRAMES, BATCH)]
    for _ in range(2):
        healed(lambda: backend.delete(KEYS[::2]))
        for numbers in batches:
            results = healed(lambda numbers=numbers: store(backend, numbers))
            if any(results):
                return f"not storable: {next(filter(None, results))}"
    for numbers in batches:
        for number, size, buffer in read(backend, numbers):
            if not isinstance(size, int) or buffer[:size] != frame(number):
                return f"frame {number} was stored, and read as {size!r}"
    return ""


def healed(call: Callable[[], list[object]]) -> list[object]:
    """Results of a call, repeated while the environment is being replaced."""
    give_up_s = time.monotonic() + HEAL_S
    while True:
        try:
            results = call()
        except TierKVError as error:
            results = [error]
        if not any(results) or time.monotonic() > give_up_s:
            return results
        time.sleep(PAUSE_S)


def mutate(place: Path, rng: random.Random) -> str:
    """Change one field of the data file or the lock file. Returns its description."""
    if rng.random() < LOCK_SHARE:
        return mutate_lock(place, rng)
    image = Image((directory(place) / "data.mdb").read_bytes())
    what = image.mutate(rng)
    (directory(place) / "data.mdb").write_bytes(image.data)
    return what


DAMAGE = Damage(build, mutate, play)

if __name__ == "__main__":
    main(DAMAGE)

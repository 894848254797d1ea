"""Mutations of an LMDB tier at rest, by field; each is opened, read and rewritten in a process of its own.

As a program: ``python lmdb_damage.py --count 1000 --seed 1 [--only 17]`` prints a summary as JSON.
"""

from __future__ import annotations

import collections
import functools
import random
import struct
import zlib
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lmdb_support import KIB, MIB, context, directory, key

import tierkv_lmdb
from tierkv.testing.conformance.session import Session
from tierkv.testing.damage import Damage, Outcome, change_bytes, change_length, change_pages, main
from tierkv.testing.damage_use import Use
from tierkv.types.keys import Key
from tierkv_lmdb import LmdbOptions

FRAMES = 130
CAPACITY_BYTES = 4 * MIB
PAGE = 4096
HEAL_S = 2.0
LOCK_SHARE = 0.06
BRANCH, LEAF, OVERFLOW = 1, 2, 4
KINDS = ("meta", "meta", "branch", "leaf", "leaf", "overflow", "free", "free", "names", "page", "file")


class Frames:
    """Frames of numbered keys: a checksum, the key, and bytes that follow from it. Many are shorter than a page."""

    def frames(self, numbers: Iterable[int], _version: int) -> dict[Key, bytes]:
        """Frames of some keys, which have one version."""
        return {key(number): frame(number) for number in numbers}

    def is_stored(self, number: int, found: object) -> bool:
        """Whether bytes are the frame of a key."""
        return found == frame(number)

    def is_wrong(self, number: int, found: bytes) -> bool:
        """Whether a frame passes the check of its reader, and is wrong all the same."""
        intact = zlib.crc32(found[4:]) == int.from_bytes(found[:4], "little") and found[4:40] == bytes(key(number))
        return intact and found != frame(number)


@functools.cache
def frame(number: int) -> bytes:
    """Frame of a key."""
    rng = random.Random(number)
    body = bytes(key(number)) + rng.randbytes(rng.choice((10, 900, 3 * KIB, 9 * KIB)))
    return struct.pack("<I", zlib.crc32(body)) + body


def opened(place: Path) -> Session:
    """The tier."""
    options = LmdbOptions(path=str(place), durability="none")
    return Session(tierkv_lmdb.PLUGIN, context(CAPACITY_BYTES), options)


def build(place: Path) -> None:
    """Create a tier whose trees have branches, and whose list of free pages has several records."""
    stored = Frames()
    with opened(place) as tier:
        for start in range(0, FRAMES, 10):
            tier.put(stored.frames(range(start, start + 10), 1))
        for start in range(0, FRAMES, 13):
            tier.delete([key(start), key(start + 5)])
            tier.put(stored.frames([start], 1))


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


USE = Use(opened, Frames(), FRAMES, rounds=2, heal_s=HEAL_S)


def play(place: Path) -> Outcome:
    """Use a damaged tier, and look whether it was emptied, and how large its file is."""
    data, losses, at_start = directory(place) / "data.mdb", directory(place) / "damage.json", list[bool]()

    def noting(place: Path) -> Session:
        session = opened(place)
        at_start.append(losses.exists())
        return session

    outcome = replace(USE, opened=noting).play(place)
    if not outcome.broken and data.stat().st_size > CAPACITY_BYTES:
        outcome = replace(outcome, broken=f"{data.stat().st_size} bytes of data")
    return (
        replace(outcome, note="emptied at its start" if at_start[0] else "emptied in use")
        if losses.exists()
        else outcome
    )


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

"""Damage of a disk tier at rest, by field of each file; each damaged copy is used in a process of its own.

As a program: ``python disk_damage.py --count 1000 --seed 1 [--only 17]`` prints a summary as JSON.
"""

from __future__ import annotations

import random
import shutil
from functools import partial
from pathlib import Path

from disk_support import PAGE, make_namespace

import tierkv_disk
from tierkv.abc import BackendContext
from tierkv.frames.frame import frame_bytes
from tierkv.frames.recognition import recognise_frame
from tierkv.testing.conformance.session import Session
from tierkv.testing.damage import Damage, change_bytes, change_length, change_pages, main
from tierkv.testing.damage_use import SealedFrames, Use
from tierkv.testing.frames import make_key
from tierkv_disk import DiskOptions
from tierkv_disk.log.reading import used_bytes

FRAMES = 36
RAW_BYTES = (300, PAGE, 3 * PAGE)
FRAME_BYTES_MAX = frame_bytes(max(RAW_BYTES))
VERSIONS = 3
KINDS = ("log", "log", "log", "header", "header", "payload", "page", "file", "document", "document", "gone", "rollback")
LOG_RECORD_BYTES = 128
FIELDS_BYTES = 320
"""Bytes of a header that hold its fields; zeros follow."""
NAMES = ("index.log", "segment-00000.dat", "namespace.json", "quarantine.jsonl")
DOCUMENTS = (
    b"",
    b"\x80\xff\x00",
    b"{",
    b"null",
    b"[]",
    b'{"format": Infinity}',
    b"[" * 100_000,
    b'{"program": "tierkv-disk", "format": "2"}',
    b'{"program": "tierkv-disk", "format": 1e400, "namespace": {}}',
    b'"' + b"x" * 2_000_000 + b'"',
)
NAMESPACE = make_namespace()
FINGERPRINT = NAMESPACE.fingerprint()
STORED = SealedFrames(FINGERPRINT, RAW_BYTES, VERSIONS)


def opened(place: Path) -> Session:
    """The tier."""
    recognise = partial(recognise_frame, FINGERPRINT, PAGE)
    context = BackendContext("disk", NAMESPACE, FRAME_BYTES_MAX, 2 << 20, recognise)
    options = DiskOptions(str(place / "tier"), segment_bytes=1 << 20, min_free_bytes=0, durability="none")
    return Session(tierkv_disk.PLUGIN, context, options)


def directory(place: Path) -> Path:
    """Directory of the namespace."""
    return place / "tier" / FINGERPRINT.hex()


def build(place: Path) -> None:
    """Fill a tier, with deleted, rewritten and quarantined frames; ``old`` beside it is an earlier state."""
    with opened(place) as disk:
        disk.put(STORED.frames(range(FRAMES), 1))
    shutil.copytree(directory(place), place.with_name("old"))
    with opened(place) as disk:
        disk.forget(map(make_key, range(0, FRAMES, 4)))
        disk.put(STORED.frames(range(0, FRAMES, 3), 2))
    (directory(place) / "quarantine.jsonl").touch()
    STORED.frames(range(FRAMES), VERSIONS)  # made once, before the processes that play a copy are forked


def mutate(place: Path, rng: random.Random) -> str:
    """Change one file. Returns the change in words."""
    kind = rng.choice(KINDS)
    if kind == "document":
        return f"document {_change_document(place, rng)}"
    if kind in ("gone", "rollback"):
        name = rng.choice(NAMES)
        (directory(place) / name).unlink()
        old = place.with_name("old") / name
        if kind == "rollback" and old.exists():
            shutil.copy(old, directory(place) / name)
        return f"{kind} {name}"
    path = directory(place) / ("index.log" if kind == "log" or rng.random() < 0.3 else "segment-00000.dat")
    if kind in ("header", "payload"):
        path = directory(place) / "segment-00000.dat"
    data = bytearray(path.read_bytes())
    what = _change(data, rng, kind)
    path.write_bytes(data)
    return f"{kind} {path.name} {what}"


def _change(data: bytearray, rng: random.Random, kind: str) -> str:
    """Change the content of the log or of a segment."""
    used = used_bytes(data)
    if kind == "file":
        return change_length(data, rng)
    if kind == "page":
        return change_pages(data, rng, range(max(2, -(-used // PAGE))))
    if kind == "log":
        record = rng.randrange(-(-used // LOG_RECORD_BYTES)) * LOG_RECORD_BYTES
        return change_bytes(data, rng, record, record + LOG_RECORD_BYTES)
    if kind == "header":
        page = rng.randrange(used // PAGE) * PAGE
        return change_bytes(data, rng, page, page + FIELDS_BYTES)
    return change_bytes(data, rng, 0, used)


def _change_document(place: Path, rng: random.Random) -> str:
    """Change the marker, the manifest or the list of quarantined frames."""
    documents = (directory(place) / "namespace.json", directory(place) / "quarantine.jsonl")
    path = rng.choice((place / "tier" / "tierkv-disk.json", *documents))
    data = bytearray(path.read_bytes())
    if not data or rng.random() < 0.4:
        number = rng.randrange(len(DOCUMENTS))
        path.write_bytes(DOCUMENTS[number])
        return f"{path.name} is document {number}"
    what = change_bytes(data, rng, 0, len(data))
    path.write_bytes(data)
    return f"{path.name} {what}"


DAMAGE = Damage(build, mutate, Use(opened, STORED, FRAMES, VERSIONS).play)

if __name__ == "__main__":
    main(DAMAGE)

"""Damage of a directory of objects at rest, by field of each file; each damaged copy is used in a forked process.

As a program: ``python fsspec_damage.py --count 1000 --seed 1 [--only 17]`` prints a summary as JSON.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import tierkv_fsspec
from tierkv.abc import BackendContext
from tierkv.frames.frame import frame_bytes
from tierkv.testing.conformance.session import Session
from tierkv.testing.damage import Damage, change_bytes, change_length, main
from tierkv.testing.damage_use import SealedFrames, Use
from tierkv.types.namespace import Namespace
from tierkv_fsspec import FsspecOptions

PAGE = 4096
FRAMES = 36
RAW_BYTES = (300, PAGE, 3 * PAGE)
VERSIONS = 2
KINDS = ("header", "header", "payload", "file", "swap", "rollback", "gone", "odd", "manifest")
FIELDS_BYTES = 320
"""Bytes of a header that hold its fields; zeros follow."""
MANIFESTS = (b"", b"\x80\xff", b"{", b"null", b"[]", b'{"format": Infinity}', b"[" * 100_000, b'"' + b"x" * 2_000_000)
NAMESPACE = Namespace("tests", "r1", "bfloat16", "page", ((16, (4096,), "full_attention", None),), 4, 16)
STORED = SealedFrames(NAMESPACE.fingerprint(), RAW_BYTES, VERSIONS)


def opened(place: Path) -> Session:
    """The tier."""
    context = BackendContext("objects", NAMESPACE, frame_bytes(max(RAW_BYTES)), None)
    return Session(tierkv_fsspec.PLUGIN, context, FsspecOptions(url=f"file://{place}", concurrent_requests=2))


def build(place: Path) -> None:
    """Fill a directory; ``old`` beside it has the objects of other keys."""
    for directory, version in ((place.with_name("old"), 1), (place, 1), (place, VERSIONS)):
        with opened(directory) as objects:
            objects.put(STORED.frames(range(0, FRAMES, version), version))


def objects_of(place: Path) -> list[Path]:
    """Files of the frames."""
    return sorted((place / NAMESPACE.fingerprint().hex()).glob("??/*"))


def mutate(place: Path, rng: random.Random) -> str:
    """Change one file, or swap two. Returns the change in words."""
    kind = rng.choice(KINDS)
    path, other = rng.sample(objects_of(place), 2)
    if kind == "manifest":
        path = place / NAMESPACE.fingerprint().hex() / "namespace.json"
    what = _replace(path, other, kind, rng) if kind in ("swap", "rollback", "gone", "odd") else _edit(path, kind, rng)
    return f"{kind} {path.name[:12]} {what}"


def _replace(path: Path, other: Path, kind: str, rng: random.Random) -> str:
    content = path.read_bytes()
    path.unlink()
    if kind == "swap":
        path.write_bytes(other.read_bytes())
        other.write_bytes(content)
        return f"with {other.name[:12]}"
    if kind == "rollback":
        parts = path.parts[-3:]
        path.write_bytes(path.parents[2].with_name("old").joinpath(*parts).read_bytes())
    elif kind == "odd":
        how = rng.choice(("link", "loop", "pipe"))
        if how == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to(path if how == "loop" else other)
        return how
    return ""


def _edit(path: Path, kind: str, rng: random.Random) -> str:
    data = bytearray(path.read_bytes())
    if kind == "manifest" and rng.random() < 0.5:
        number = rng.randrange(len(MANIFESTS))
        path.write_bytes(MANIFESTS[number])
        return f"is text {number}"
    if kind == "file":
        what = change_length(data, rng)
    else:
        what = change_bytes(data, rng, 0, FIELDS_BYTES if kind == "header" else len(data))
    path.write_bytes(data)
    return what


DAMAGE = Damage(build, mutate, Use(opened, STORED, FRAMES, deletes_damaged=True).play)

if __name__ == "__main__":
    main(DAMAGE)

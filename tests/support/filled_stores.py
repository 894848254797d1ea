"""Stores with known chunks, written through real backends as a tier would write them."""

from __future__ import annotations

import hashlib
import mmap
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from tierkv.abc import WriteRequest
from tierkv.frames.frame import HEADER_BYTES, frame_bytes
from tierkv.frames.sealer import FrameSealer
from tierkv.plugins.loading import load_plugins
from tierkv.stores.places import Place, find_places
from tierkv.stores.store import Store
from tierkv.types.keys import Key, make_key, make_scope
from tierkv.types.namespace import Namespace

SALT = "customer"
SEGMENT = 'segment_bytes = "1MiB"\nmin_free_bytes = 0'


def model_namespace(model: str = "llama-3-8b", **fields: object) -> Namespace:
    """Namespace of small chunks: a frame takes two pages."""
    given = {"revision": "r1", "dtype": "bfloat16", "layout": "page", "blocks_per_chunk": 4, "hash_block_tokens": 16}
    groups = ((16, (1024,), "full_attention", None),)
    return Namespace(**{"model": model, "groups": groups, **given, **fields})  # type: ignore[arg-type]


FRAME_BYTES = frame_bytes(model_namespace().payload_bytes_max)


def chunk_key(number: int) -> Key:
    """Key of a chunk; every second chunk belongs to a tenant."""
    digest = hashlib.blake2b(number.to_bytes(8, "big"), digest_size=32).digest()
    return make_key(digest, 0, make_scope(SALT if number % 2 else None, None))


def sealed_frame(namespace: Namespace, number: int) -> memoryview:
    """Frame of a chunk, whose payload says its number."""
    size = namespace.payload_bytes_max
    slot = memoryview(mmap.mmap(-1, frame_bytes(size)))
    slot[HEADER_BYTES : HEADER_BYTES + size] = (number % 251 + 1).to_bytes(1, "big") * size
    FrameSealer(namespace.fingerprint()).seal(slot, chunk_key(number), size)
    return slot.toreadonly()


def place_at(target: str | Path, backend: str) -> Place:
    """Place of a path or URL, which may be empty yet."""
    place = find_places(str(target), load_plugins(), backend=backend)[0]
    if backend != "disk":
        return place
    # Without a capacity, a disk tier allocates files for the whole file system.
    options = replace(place.options, segment_bytes=1 << 20, min_free_bytes=0)
    return replace(place, options=options, capacity_bytes=64 << 20)


def fill(place: Place, namespace: Namespace, numbers: Iterable[int]) -> None:
    """Write chunks."""
    with Store(place, namespace, writes=True) as store:
        requests = [WriteRequest(chunk_key(number), sealed_frame(namespace, number), number) for number in numbers]
        assert store.write(requests) == [None] * len(requests)


def stack_file(folder: Path, *tiers: str) -> Path:
    """Write a stack file with these tiers, each the lines of a table."""
    file = folder / "stack.toml"
    file.write_text('[host]\ncapacity = "8MiB"\n\n' + "\n".join(f"[[tiers]]\n{tier}\n" for tier in tiers))
    return file


def disk_tier(path: Path, capacity: str = "64MiB", name: str = "disk") -> str:
    """Table of a disk tier."""
    return f'name = "{name}"\nbackend = "disk"\npath = "{path}"\ncapacity = "{capacity}"\n{SEGMENT}'


def object_tier(path: Path) -> str:
    """Table of an object tier in a directory."""
    return f'name = "objects"\nbackend = "fsspec"\nurl = "file://{path}"'


def flip_byte(file: Path, needle: bytes, offset: int) -> None:
    """Invert a byte at ``offset`` behind the first place of ``needle`` in a file."""
    data = file.read_bytes()
    at = data.index(needle) + offset
    with file.open("r+b") as stream:
        stream.seek(at)
        stream.write(bytes([data[at] ^ 0xFF]))

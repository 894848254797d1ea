"""Raw access for the conformance kit: objects accessed without the backend."""

from __future__ import annotations

from pathlib import Path

from fsspec_support import ObjectServer

from tierkv.types.keys import Key
from tierkv_fsspec.backend import object_name

NAME_CHARS = 32
"""Length of an object's name: other files of a namespace have other lengths."""


class ObjectFiles:
    """Objects as files."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def read(self, key: Key) -> bytes:
        return (self.root / object_name(key)).read_bytes()

    def write(self, key: Key, data: bytes) -> None:
        (self.root / object_name(key)).write_bytes(data)

    def remove(self, key: Key) -> None:
        (self.root / object_name(key)).unlink()

    def count(self) -> int:
        return len([path for path in self.root.glob("??/*") if len(path.name) == NAME_CHARS])


class ServerObjects:
    """Objects on a server, through a separate client."""

    def __init__(self, server: ObjectServer, place: str, namespace: str) -> None:
        self.server, self.place, self.namespace = server, place, namespace

    def read(self, key: Key) -> bytes:
        return self.server.get(self.place, self.name(key))

    def write(self, key: Key, data: bytes) -> None:
        self.server.put(self.place, self.name(key), data)

    def remove(self, key: Key) -> None:
        self.server.remove(self.place, self.name(key))

    def count(self) -> int:
        names = [name for name in self.server.names(self.place) if f"{self.namespace}/" in name]
        return len([name for name in names if len(name.rpartition("/")[2]) == NAME_CHARS])

    def name(self, key: Key) -> str:
        (name,) = (n for n in self.server.names(self.place) if n.endswith(f"{self.namespace}/{object_name(key)}"))
        return name

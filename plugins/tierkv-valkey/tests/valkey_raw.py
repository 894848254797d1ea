"""Raw access for the conformance kit: values changed through a client of the test's own."""

from __future__ import annotations

from typing import Any

from tierkv.types.keys import Key


class RawValues:
    """Values of one namespace."""

    def __init__(self, client: Any, prefix: str) -> None:
        self.client = client
        self.prefix = prefix

    def name(self, key: Key) -> str:
        return f"{self.prefix}{key.hex()}"

    def read(self, key: Key) -> bytes:
        value = self.client.get(self.name(key))
        if value is None:
            raise KeyError(key.hex())
        return value

    def write(self, key: Key, data: bytes) -> None:
        self.client.set(self.name(key), data)

    def remove(self, key: Key) -> None:
        self.client.delete(self.name(key))

    def count(self) -> int:
        return len(list(self.client.scan_iter(match=f"{self.prefix}*", count=1000)))

"""The kit accepts a correct backend, blocking or async, over real files."""

from __future__ import annotations

from pathlib import Path

import plain_files

from tierkv.testing import BackendConformance
from tierkv.types.keys import Key


class TestPlainFiles(BackendConformance):
    plugin = plain_files.PLUGIN

    def make_options(self, place: Path) -> plain_files.PlainOptions:
        return plain_files.PlainOptions(str(place))

    def damage(self, place: Path, key: Key) -> None:
        path = place / self.context().namespace.fingerprint().hex() / f"{key.hex()}.frame"
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

    def raw_remove(self, place: Path, key: Key) -> None:
        (place / self.context().namespace.fingerprint().hex() / f"{key.hex()}.frame").unlink()


class TestAsyncPlainFiles(TestPlainFiles):
    plugin = plain_files.ASYNC_PLUGIN


class TestSharedPlainFiles(TestPlainFiles):
    plugin = plain_files.SHARED_PLUGIN


class TestReadOnlyPlainFiles(TestPlainFiles):
    plugin = plain_files.READ_ONLY_PLUGIN

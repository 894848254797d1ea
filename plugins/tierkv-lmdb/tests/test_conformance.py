"""Conformance of the LMDB tier."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import lmdb

import tierkv_lmdb
from tierkv.abc import BackendContext
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_lmdb import LmdbOptions, LmdbReaderOptions


class LmdbValues:
    """Values through LMDB itself; changes of equal length past LMDB, as a failing disk makes them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @contextlib.contextmanager
    def transaction(self) -> Iterator[tuple[lmdb.Transaction, object]]:
        with lmdb.open(str(self.directory), max_dbs=2, map_size=256 << 20) as env:
            frames = env.open_db(b"frames", create=False)
            with env.begin(db=frames, write=True) as txn:
                yield txn, frames

    def read(self, key: Key) -> bytes:
        with self.transaction() as (txn, _):
            value = txn.get(key)
        if value is None:
            raise KeyError(key.hex())
        return value

    def write(self, key: Key, data: bytes) -> None:
        old = self.read(key)
        file = self.directory / "data.mdb"
        content = file.read_bytes()
        if len(data) != len(old) or content.count(old) != 1:
            with self.transaction() as (txn, _):
                txn.put(key, data)
            return
        with file.open("r+b") as opened:
            opened.seek(content.index(old))
            opened.write(data)

    def remove(self, key: Key) -> None:
        with self.transaction() as (txn, _):
            txn.delete(key)

    def count(self) -> int:
        with self.transaction() as (txn, frames):
            return txn.stat(frames)["entries"]


class LmdbConformance(BackendConformance):
    """Settings shared by all durabilities."""

    plugin = tierkv_lmdb.PLUGIN

    def raw(self, place: Path, context: BackendContext) -> LmdbValues:
        return LmdbValues(place / context.namespace.fingerprint().hex())


class TestLmdb(LmdbConformance):
    """Each write call is synced."""

    def make_options(self, place: Path) -> LmdbOptions:
        return LmdbOptions(path=str(place))


class TestLmdbUnsynced(LmdbConformance):
    """Syncing is up to the operating system: all guarantees hold while the machine stays up."""

    crash_rounds = 2

    def make_options(self, place: Path) -> LmdbOptions:
        return LmdbOptions(path=str(place), durability="none")


class TestLmdbAlways(LmdbConformance):
    """Every transaction is synced, data and meta page."""

    crash_rounds = 2
    model_examples = 5

    def make_options(self, place: Path) -> LmdbOptions:
        return LmdbOptions(path=str(place), durability="always")


class TestLmdbReader(BackendConformance):
    """The read-only sibling."""

    plugin = tierkv_lmdb.READ_ONLY_PLUGIN

    def make_options(self, place: Path) -> LmdbReaderOptions:
        return LmdbReaderOptions(path=str(place))

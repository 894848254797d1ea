"""The published contract, on LMDB."""

from __future__ import annotations

from pathlib import Path

import lmdb

import tierkv_lmdb
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_lmdb import LmdbOptions, LmdbReaderOptions


class LmdbConformance(BackendConformance):
    """What all durabilities share."""

    plugin = tierkv_lmdb.PLUGIN

    def damage(self, place: Path, key: Key) -> None:
        """Change a byte of the value in the data file, past LMDB: as a failing disk would."""
        (directory,) = (path.parent for path in place.glob("*/data.mdb"))
        with lmdb.open(str(directory), max_dbs=2, readonly=True) as env:
            frames = env.open_db(b"frames", create=False)
            with env.begin(db=frames) as txn:
                value = txn.get(key)
        data = directory / "data.mdb"
        content = data.read_bytes()
        position = content.index(value) + len(value) // 2
        with data.open("r+b") as file:
            file.seek(position)
            file.write(bytes([content[position] ^ 0xFF]))


class TestLmdb(LmdbConformance):
    """Each write call synced."""

    def make_options(self, place: Path) -> LmdbOptions:
        return LmdbOptions(path=str(place))


class TestLmdbUnsynced(LmdbConformance):
    """Syncing left to the operating system: the same promises while the machine stays up."""

    crash_rounds = 2

    def make_options(self, place: Path) -> LmdbOptions:
        return LmdbOptions(path=str(place), durability="none")


class TestLmdbAlways(LmdbConformance):
    """Every transaction synced, data and meta page."""

    crash_rounds = 2
    model_examples = 5

    def make_options(self, place: Path) -> LmdbOptions:
        return LmdbOptions(path=str(place), durability="always")


class TestLmdbReader(BackendConformance):
    """The plugin that only reads."""

    plugin = tierkv_lmdb.READER

    def make_options(self, place: Path) -> LmdbReaderOptions:
        return LmdbReaderOptions(path=str(place))

"""The published contract, on a directory, in memory, over SFTP, and over HTTP to read; test_servers.py has it on S3."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import tierkv_fsspec
from tierkv.testing import BackendConformance
from tierkv.types.keys import Key
from tierkv_fsspec import FsspecOptions
from tierkv_fsspec.backend import object_name


class TestDirectory(BackendConformance):
    plugin = tierkv_fsspec.PLUGIN

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"file://{place}")

    def damage(self, place: Path, key: Key) -> None:
        (file,) = place.glob(f"*/{object_name(key)}")
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 0xFF
        file.write_bytes(content)

    def raw_remove(self, place: Path, key: Key) -> None:
        (file,) = place.glob(f"*/{object_name(key)}")
        file.unlink()


class TestMemory(BackendConformance):
    """For trials: the same, but for outliving the process."""

    capabilities_of_memory = dataclasses.replace(tierkv_fsspec.PLUGIN.capabilities, durable=False)
    plugin = dataclasses.replace(tierkv_fsspec.PLUGIN, capabilities=capabilities_of_memory)
    local_place = False

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"memory:/{place}")

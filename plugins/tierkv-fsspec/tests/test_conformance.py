"""Conformance on a directory, in memory, over SFTP, and read-only over HTTP; test_servers.py covers S3."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from fsspec_raw import ObjectFiles

import tierkv_fsspec
from tierkv.abc import BackendContext
from tierkv.testing import BackendConformance
from tierkv_fsspec import FsspecOptions


class TestDirectory(BackendConformance):
    plugin = tierkv_fsspec.PLUGIN
    raw_live = True

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"file://{place}")

    def raw(self, place: Path, context: BackendContext) -> ObjectFiles:
        return ObjectFiles(place / context.namespace.fingerprint().hex())


class TestMemory(BackendConformance):
    """Memory URLs have all capabilities, and are not durable."""

    capabilities_of_memory = dataclasses.replace(tierkv_fsspec.PLUGIN.capabilities, durable=False)
    plugin = dataclasses.replace(tierkv_fsspec.PLUGIN, capabilities=capabilities_of_memory)
    local_place = False
    raw_access = "the bytes are in this process's memory, and nowhere else"

    def make_options(self, place: Path) -> FsspecOptions:
        return FsspecOptions(url=f"memory:/{place}")

"""Object stores and shared file systems as a tier of tierkv: ``backend = "fsspec"``, or ``"fsspec-read-only"``."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from tierkv.abc import BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv_fsspec.checking import check, check_reader
from tierkv_fsspec.opening import open_backend, open_reader
from tierkv_fsspec.options import FsspecOptions

__version__ = "0.1.0"
TIERKV_SPI = 1

PLUGIN = BackendPlugin(
    name="fsspec",
    summary="Any fsspec URL: a shared directory, S3, Google Cloud Storage, Azure; shared by all processes",
    options=FsspecOptions,
    capabilities=Capabilities(
        durable=True,
        shared=True,
        bounded=False,
        preferred_batch=8,
        preferred_concurrency=4,
    ),
    open=open_backend,
    check=check,
)

READ_ONLY_PLUGIN = dataclasses.replace(
    PLUGIN,
    name="fsspec-read-only",
    summary="The same places, and http URLs, for engines that only read what others store there",
    capabilities=dataclasses.replace(PLUGIN.capabilities, read_only=True),
    open=open_reader,
    check=check_reader,
)


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """The backends of this distribution: one that writes, and one that never does."""
    return [PLUGIN, READ_ONLY_PLUGIN]


__all__ = ["PLUGIN", "READ_ONLY_PLUGIN", "TIERKV_SPI", "FsspecOptions", "tierkv_backends"]

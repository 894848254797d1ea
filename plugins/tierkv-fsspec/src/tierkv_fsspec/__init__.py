"""Object stores and shared file systems as a tier of tierkv: ``backend = "fsspec"``."""

from __future__ import annotations

from collections.abc import Iterable

from tierkv.abc import BackendPlugin, Capabilities
from tierkv.hookspecs import hookimpl
from tierkv_fsspec.checking import check
from tierkv_fsspec.opening import open_backend
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


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """The one backend of this distribution."""
    return [PLUGIN]


__all__ = ["PLUGIN", "TIERKV_SPI", "FsspecOptions", "tierkv_backends"]

"""Choice of the implementation that serves a URL, and advice on what to install if none can."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import fsspec  # type: ignore[import-untyped]  # it ships no types

from tierkv.errors import BackendError
from tierkv_fsspec.credentials import aws_from_files, find_credentials
from tierkv_fsspec.options import FsspecOptions, Location
from tierkv_fsspec.stores.fsspec_store import FsspecStore
from tierkv_fsspec.stores.local_store import LocalStore
from tierkv_fsspec.stores.store import Store

OBSTORE_PROTOCOLS = ("s3", "gs", "az", "http", "https")
_TRANSLATED = {"anon"}
"""Keys of storage_options that obstore understands; any other key belongs to the fsspec file system."""
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "az": "adlfs"}


@dataclass(frozen=True, slots=True)
class StoreChoice:
    """Implementation that can serve the URL."""

    detail: str
    """Its name with its version, and the reason for the choice."""
    open: Callable[[Location], Store]


def choose_store(options: FsspecOptions) -> StoreChoice:
    """Choose the fastest implementation that is installed and understands the options.

    Raises:
        BackendError: there is none; names the package to install, or the option that prevents it.
    """
    location = options.location
    if location.protocol == "file":
        return StoreChoice("files of this machine, or of a mounted share", lambda at: LocalStore(Path(at.prefix)))
    why_not_obstore = _why_not_obstore(options, location.protocol)
    if options.implementation == "obstore" and why_not_obstore:
        raise BackendError(f'{location.url}: implementation = "obstore" cannot be used: {why_not_obstore}')
    if options.implementation == "obstore" or (options.implementation == "auto" and not why_not_obstore):
        return StoreChoice(
            f"obstore {version('obstore')}{_plain_reads(location, options)}", lambda at: _open_obstore(at, options)
        )
    if location.protocol == "az" and options.endpoint_url is not None:
        why = why_not_obstore or 'implementation = "fsspec" was asked for'
        raise BackendError(f"{location.url}: endpoint_url of az URLs needs obstore: {why}")
    try:
        package = fsspec.get_filesystem_class(_scheme(location)).__module__.partition(".")[0]
    except ImportError as error:
        raise BackendError(f"{location.url}: {_missing(location.protocol, error, why_not_obstore)}") from None
    why = f" ({why_not_obstore})" if options.implementation == "auto" and why_not_obstore else ""
    return StoreChoice(f"{package} {_version(package)}{why}", lambda at: FsspecStore(at, options))


def _why_not_obstore(options: FsspecOptions, protocol: str) -> str:
    if protocol not in OBSTORE_PROTOCOLS:
        return f"it serves {', '.join(OBSTORE_PROTOCOLS)} URLs"
    if importlib.util.find_spec("obstore") is None:
        return "not installed: pip install 'tierkv-fsspec[obstore]'"
    foreign = sorted(set(options.storage_options) - _TRANSLATED)
    if options.implementation == "auto" and foreign:
        return f"obstore is not used, storage_options has {', '.join(foreign)}"
    path = aws_from_files() if protocol == "s3" else None
    if path is not None and importlib.util.find_spec("boto3") is None:
        return f"obstore is not used, it reads {path} through boto3: pip install boto3"
    return ""


def _open_obstore(location: Location, options: FsspecOptions) -> Store:
    # Without credentials obstore requests the role of the machine, even if that is forbidden.
    credentials = find_credentials(location.protocol)
    if credentials is not None and not credentials.found and not options.storage_options.get("anon"):
        raise BackendError(
            f"{location.url}: no credentials: {credentials.detail}. "
            f"Set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE"
        )
    from tierkv_fsspec.stores.obstore_store import ObstoreStore  # noqa: PLC0415  an optional dependency

    return ObstoreStore(location, options)


def _plain_reads(location: Location, options: FsspecOptions) -> str:
    from tierkv_fsspec.stores.obstore_store import reads_plainly  # noqa: PLC0415  an optional dependency

    return ", objects of 512 KiB or more received over plain HTTP" if reads_plainly(location, options) else ""


def _scheme(location: Location) -> str:
    return location.url.partition("://")[0]


def _missing(protocol: str, error: ImportError, why_not_obstore: str) -> str:
    if protocol == "s3":
        hint = "pip install 'tierkv-fsspec[obstore]' or 'tierkv-fsspec[s3]'"
        return f"no package for s3 URLs ({why_not_obstore}): {hint}"
    if protocol in _PACKAGES:
        return f"no package for {protocol} URLs: pip install 'tierkv-fsspec[obstore]' or {_PACKAGES[protocol]}"
    return f"no package for {protocol} URLs. {error}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""

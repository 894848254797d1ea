"""Abilities of an fsspec tier at rest: the namespaces below its URL, reading without a listing at open, and removal."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from tierkv.abc import BackendContext, StoredNamespace
from tierkv.errors import BackendError, TierKVError
from tierkv.types.namespace import Namespace
from tierkv_fsspec.backend import FsspecBackend
from tierkv_fsspec.failures import Failure, clear_tracebacks
from tierkv_fsspec.manifest import FORMAT, MANIFEST
from tierkv_fsspec.opening import open_reader
from tierkv_fsspec.options import FsspecOptions
from tierkv_fsspec.presence_hints import ListedNames
from tierkv_fsspec.reader import FsspecReader
from tierkv_fsspec.stores.selection import choose_store
from tierkv_fsspec.stores.store import Store, TooLongError

SELF = "fsspec tier"
_NAME = re.compile(r"[0-9a-f]{32}")


def stored_namespaces(options: FsspecOptions) -> Iterator[StoredNamespace | TierKVError]:
    """Yield the namespaces below ``url`` by their manifests. No lock tells which process uses them.

    Raises:
        BackendError: the store cannot be listed; names the remedy.
    """
    url = options.location.url
    try:
        store = choose_store(options).open(options.location)
        try:
            names = sorted(name for name in store.list_children() if _NAME.fullmatch(name))
            for name in names:
                found = _stored(store, name, options)
                if found is not None:
                    yield found
        finally:
            store.close()
    except TierKVError:
        raise
    except FileNotFoundError as error:
        clear_tracebacks(error)
        raise BackendError(f"{url} is not there: nothing was stored yet, or the URL is wrong", tier=SELF) from None
    except Exception as error:  # noqa: BLE001  any storage library error; its text may hold credentials
        raise Failure.of(error).to_error(f"cannot list {url}", tier=SELF) from None


def _stored(store: Store, name: str, options: FsspecOptions) -> StoredNamespace | TierKVError | None:
    """Namespace of a directory; None if another program made it, or if it is empty."""
    where = f"{options.location.url}/{name}/{MANIFEST}"
    try:
        found = json.loads(store.read(f"{name}/{MANIFEST}"))
        if not isinstance(found, dict) or found.get("format") != FORMAT:
            return None
        namespace = Namespace.from_description(found.get("namespace"))
    except FileNotFoundError as error:
        clear_tracebacks(error)
        child = choose_store(options).open(options.location.child(name))
        try:
            if not any(child.list_objects()):
                return None
        finally:
            child.close()
        return BackendError(f"{where} is missing. An engine that opens this namespace writes it anew")
    except (TooLongError, ValueError, RecursionError) as error:
        return BackendError(f"{where} is damaged ({error}). An engine that opens this namespace writes it anew")
    if namespace.fingerprint().hex() != name:
        return BackendError(f"{where} describes another namespace than the directory's name")
    return StoredNamespace(namespace)


def open_beside(context: BackendContext, options: FsspecOptions) -> FsspecReader:
    """Open a namespace for reading; nothing is listed in the background."""
    return open_reader(context, replace(options, warm_up_keys_max=0))


def remove_stored(options: FsspecOptions, namespace: Namespace) -> None:
    """Delete all objects of a namespace. Engines that use it go on, and see misses.

    Raises:
        BackendError: an object cannot be deleted.
    """
    location = options.location.child(namespace.fingerprint().hex())
    store = choose_store(options).open(location)
    backend = FsspecBackend(
        store,
        url=location.url,
        tier=SELF,
        concurrent_requests=options.concurrent_requests,
        listed=ListedNames(0, 1.0),
    )
    try:
        backend.remove_all()
    finally:
        backend.close()
    if location.protocol == "file":
        _remove_directories(Path(location.prefix))


def _remove_directories(root: Path) -> None:
    """Remove empty directories. One that an engine fills meanwhile stays."""
    with contextlib.suppress(OSError):
        for path in root.iterdir():
            with contextlib.suppress(OSError):
                path.rmdir()
        root.rmdir()

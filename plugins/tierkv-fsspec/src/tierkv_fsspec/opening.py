"""Opening an fsspec tier: choose a store, claim or compare the manifest, start the listing."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from tierkv.abc import BackendContext
from tierkv.abc.places import check_private_directory, exists, make_private_directory
from tierkv.errors import BackendError, TierKVError
from tierkv_fsspec.backend import FsspecBackend
from tierkv_fsspec.failures import Failure
from tierkv_fsspec.manifest import claim_namespace, compare_manifest, manifest_of
from tierkv_fsspec.options import READ_ONLY_PROTOCOLS, FsspecOptions
from tierkv_fsspec.presence_hints import ListedNames
from tierkv_fsspec.reader import FsspecReader
from tierkv_fsspec.stores.renewed_store import RenewedStore
from tierkv_fsspec.stores.selection import choose_store
from tierkv_fsspec.stores.store import Store


def open_backend(context: BackendContext, options: FsspecOptions) -> FsspecBackend:
    """Connect, and write the manifest of the namespace or compare it with the existing one.

    Raises:
        NamespaceMismatchError: the objects belong to another namespace, program or version.
        BackendUnavailableError, DeadlineExceededError: the store does not answer.
        BackendError: the store refuses, other users may change the directory of a ``file`` URL, or no package for the
            URL is installed; names the remedy.
    """
    if options.location.protocol in READ_ONLY_PROTOCOLS:
        raise BackendError(
            f'{options.location.url}: http URLs are never written; use backend = "fsspec-read-only"',
            tier=context.tier,
        )
    return _open(context, options, read_only=False)


def open_reader(context: BackendContext, options: FsspecOptions) -> FsspecReader:
    """Connect for reading. Nothing is written, and the namespace may still be empty.

    Raises:
        NamespaceMismatchError, BackendUnavailableError, DeadlineExceededError, BackendError: as :func:`open_backend`.
    """
    return FsspecReader(_open(context, options, read_only=True), tier=context.tier)


def _open(context: BackendContext, options: FsspecOptions, *, read_only: bool) -> FsspecBackend:
    location = options.location.child(context.namespace.fingerprint().hex())
    try:
        if location.protocol == "file" and not read_only:
            make_private_directory(Path(options.location.prefix), "url")
            if exists(Path(location.prefix)):
                check_private_directory(Path(location.prefix), "url")
        choice = choose_store(options)
        is_local = location.protocol == "file"
        store: Store = choice.open(location) if is_local else RenewedStore(lambda: choice.open(location), location.url)
        if read_only:
            compare_manifest(store, context.namespace, location.url)
        else:
            claim_namespace(store, context.namespace, location.url, datetime.now(UTC))
    except TierKVError as error:
        error.tier = context.tier
        raise
    except Exception as error:  # noqa: BLE001  any storage library error; its text may hold credentials
        raise Failure.of(error).to_error(f"cannot open {location.url}", tier=context.tier) from None
    backend = FsspecBackend(
        store,
        url=location.url,
        tier=context.tier,
        concurrent_requests=options.concurrent_requests,
        listed=ListedNames(options.warm_up_keys_max, options.warm_up_s),
        recognise=context.recognise_frame,
        manifest=None if read_only else manifest_of(context.namespace, datetime.now(UTC)),
    )
    if options.warm_up_keys_max:
        backend.warm_up()
    return backend

"""From options to an open backend."""

from __future__ import annotations

from datetime import UTC, datetime

from tierkv.abc import BackendContext
from tierkv.errors import BackendError, TierKVError
from tierkv_fsspec.backend import FsspecBackend, FsspecReader
from tierkv_fsspec.choosing import choose
from tierkv_fsspec.knowledge import Listing
from tierkv_fsspec.manifest import claim, compare
from tierkv_fsspec.options import READ_ONLY_PROTOCOLS, FsspecOptions
from tierkv_fsspec.troubles import Trouble


def open_backend(context: BackendContext, options: FsspecOptions) -> FsspecBackend:
    """Connect, and claim the namespace or see that it is the same.

    Raises:
        NamespaceMismatchError: what lies there belongs to another namespace, program or version.
        BackendUnavailableError, DeadlineExceededError: the place does not answer.
        BackendError: it refuses, or nothing is installed for the URL; says what to do.
    """
    if options.location.protocol in READ_ONLY_PROTOCOLS:
        raise BackendError(
            f'{options.location.url}: http places are never written; use backend = "fsspec-read-only"',
            tier=context.tier,
        )
    return _open(context, options, read_only=False)


def open_reader(context: BackendContext, options: FsspecOptions) -> FsspecBackend:
    """The same for a place that others fill: nothing is claimed, and it may be empty as yet. Raises the same."""
    return _open(context, options, read_only=True)


def _open(context: BackendContext, options: FsspecOptions, *, read_only: bool) -> FsspecBackend:
    location = options.location.below(context.namespace.fingerprint().hex())
    try:
        store = choose(options).open(location)
        if read_only:
            compare(store, context.namespace, location.url)
        else:
            claim(store, context.namespace, location.url, datetime.now(UTC))
    except TierKVError as error:
        error.tier = context.tier
        raise
    except Exception as error:  # noqa: BLE001  whatever a storage library raises; its own text may hold credentials
        raise Trouble.of(error).to_error(f"cannot open {location.url}", tier=context.tier) from None
    backend = (FsspecReader if read_only else FsspecBackend)(
        store,
        url=location.url,
        tier=context.tier,
        concurrent_requests=options.concurrent_requests,
        listing=Listing(options.warm_up_keys_max, options.warm_up_s),
    )
    if options.warm_up_keys_max:
        backend.warm_up()
    return backend

"""From options to an open backend."""

from __future__ import annotations

import json

from tierkv.abc import BackendContext
from tierkv.errors import NamespaceMismatchError, TierKVError
from tierkv.types.namespace import Namespace
from tierkv_fsspec.backend import FsspecBackend
from tierkv_fsspec.choosing import choose
from tierkv_fsspec.options import FsspecOptions
from tierkv_fsspec.store import Store
from tierkv_fsspec.troubles import Trouble

FORMAT = {"format": "tierkv-fsspec", "version": 1}
MANIFEST = "namespace.json"


def open_backend(context: BackendContext, options: FsspecOptions) -> FsspecBackend:
    """Connect, and claim the namespace or see that it is the same.

    Raises:
        NamespaceMismatchError: what lies there belongs to another namespace, program or version.
        BackendUnavailableError, DeadlineExceededError: the place does not answer.
        BackendError: it refuses, or nothing is installed for the URL; says what to do.
    """
    location = options.location.below(context.namespace.fingerprint().hex())
    try:
        store = choose(options).open(location)
        claim(store, context.namespace, location.url)
    except TierKVError as error:
        error.tier = context.tier
        raise
    except Exception as error:  # noqa: BLE001  whatever a storage library raises; its own text may hold credentials
        raise Trouble.of(error).to_error(f"cannot open {location.url}", tier=context.tier) from None
    return FsspecBackend(store, url=location.url, tier=context.tier, concurrent_requests=options.concurrent_requests)


def claim(store: Store, namespace: Namespace, url: str) -> None:
    """Write the manifest, or compare with the one that is there.

    Raises:
        NamespaceMismatchError: it is another one, or cannot be read.
    """
    wanted = FORMAT | {"fingerprint": namespace.fingerprint().hex(), "namespace": namespace.describe()}
    text = json.dumps(wanted, indent=1, sort_keys=True).encode()
    try:
        found = store.read(MANIFEST)
    except FileNotFoundError:
        found = text if store.create(MANIFEST, text) else store.read(MANIFEST)
    if _parse(found) != json.loads(text):
        raise NamespaceMismatchError(
            f"{url}/{MANIFEST} does not describe this namespace ({namespace.model!r}) but {found[:200]!r}. "
            f"Give another url; or, if that data is not needed, remove everything below {url}"
        )


def _parse(data: bytes) -> object:
    try:
        return json.loads(data)
    except ValueError:
        return None

"""Manifest of a namespace: one object that describes, for users and programs, which chunks the namespace holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from tierkv.abc.logs import plugin_logger
from tierkv.abc.places import differs_in_one_byte
from tierkv.errors import NamespaceMismatchError
from tierkv.types.namespace import Namespace
from tierkv_fsspec.failures import clear_tracebacks
from tierkv_fsspec.stores.store import Store, TooLongError

MANIFEST = "namespace.json"
FORMAT = "tierkv-fsspec"
VERSION = 1
REPEAT_S = 60.0
"""Seconds after which a tier that writes chunks stores a manifest that was removed, as by a lifecycle rule or `rm`."""
_log = plugin_logger(__name__)


def claim_namespace(store: Store, namespace: Namespace, url: str, now: datetime) -> None:
    """Write the manifest, or compare with the existing one. Of concurrent writers, one writes it.

    A damaged manifest is replaced, and the chunks stay: each frame names its namespace, and is checked.

    Raises:
        NamespaceMismatchError: the manifest describes another namespace; names the differences.
    """
    if compare_manifest(store, namespace, url):
        return
    content = manifest_of(namespace, now)
    if not store.create(MANIFEST, content) and not compare_manifest(store, namespace, url):
        _log.warning("%s/%s is damaged, and written anew", url, MANIFEST)
        store.write(MANIFEST, memoryview(content))


def manifest_of(namespace: Namespace, now: datetime) -> bytes:
    """Content of the manifest of a namespace that begins now."""
    return _write(namespace, now.isoformat(timespec="seconds"))


def compare_manifest(store: Store, namespace: Namespace, url: str) -> bool:
    """Whether there is a manifest that is not damaged.

    Raises:
        NamespaceMismatchError: the manifest describes another namespace; names the differences.
    """
    try:
        text = store.read(MANIFEST)
    except FileNotFoundError as error:
        clear_tracebacks(error)
        return False
    except TooLongError as error:
        clear_tracebacks(error)
        return False
    found = _parse(text)
    if found is None:
        return False
    differences = list(_differences(found, namespace))
    if differences and not _has_bad_byte(text, found, namespace):
        raise NamespaceMismatchError(
            f"{url}/{MANIFEST} does not describe this namespace ({namespace.model!r}): {'; '.join(differences)}. "
            f"Give another url; or, if that data is not needed, remove everything below {url}"
        )
    return not differences and found.get("namespace") == _described(
        namespace
    )  # with anything else in it, no tool could read it


def _write(namespace: Namespace, created: object) -> bytes:
    content = {
        "format": FORMAT,
        "version": VERSION,
        "created": created,
        "fingerprint": namespace.fingerprint().hex(),
        "namespace": namespace.describe(),
    }
    return json.dumps(content, indent=1).encode()


def _has_bad_byte(text: bytes, found: dict[str, Any], namespace: Namespace) -> bool:
    """Whether it is what this version writes, but for one byte: damage, and no other program's file."""
    is_of_this_version = found.get("version", VERSION) == VERSION
    return is_of_this_version and differs_in_one_byte(bytes(text), _write(namespace, found.get("created")))


def _differences(found: dict[str, Any], namespace: Namespace) -> Iterator[str]:
    """Differences between the stored manifest and the namespace, in words. The creation time is not compared."""
    if found.get("format") != FORMAT:
        yield f"it is not a manifest of tierkv but {str(found)[:100]}"
        return
    if found.get("version") != VERSION:
        yield f"its version is {found.get('version')!r}, and this program reads {VERSION}"
        return
    if found.get("fingerprint") != namespace.fingerprint().hex():
        yield f"its fingerprint is {str(found.get('fingerprint'))[:40]}, not {namespace.fingerprint().hex()}"
    wanted = _described(namespace)
    said = found.get("namespace")
    there = said if isinstance(said, dict) else {}
    for name, value in wanted.items():
        if name not in there or there[name] != value:
            yield f"{name} is {str(there.get(name))[:40]!r} there and {str(value)[:40]!r} here"


def _described(namespace: Namespace) -> dict[str, Any]:
    described: dict[str, Any] = json.loads(json.dumps(namespace.describe()))
    return described


def _parse(text: bytes) -> dict[str, Any] | None:
    try:
        content = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) else None

"""Choice of namespaces and chunks: by model, fingerprint, tenant, age and key."""

from __future__ import annotations

import fnmatch
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tierkv.abc import StoredFrame, StoredNamespace
from tierkv.abc.places import read_short_file
from tierkv.errors import ConfigError, TierKVError
from tierkv.recording.entries import short_key
from tierkv.stores.places import Place
from tierkv.types.keys import NO_TENANT, Tenant, tenant_of, tenant_of_salt
from tierkv.types.namespace import Namespace

FINGERPRINT_DIGITS_MIN = 4
_FINGERPRINT = re.compile(rf"[0-9a-f]{{{FINGERPRINT_DIGITS_MIN},32}}")
_AGE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([smhdw])\s*")
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}
_KEY = re.compile(r"[0-9a-f]+(\.[0-9]+(@[0-9a-f]*(\+[0-9a-f]+)?)?)?")
TENANT_DIGEST = "id:"
"""Begin of a tenant that is given by its digest, as ``tierkv du --by tenant`` shows it."""

NO_SALT = "-"
"""Requests without a salt, as ``tierkv du --by tenant`` shows them. A tenant with this salt is given by its digest."""


def parse_age(text: str) -> float:
    """Return an age in seconds, written as ``30m``, ``12h``, ``7d`` or ``2w``.

    Raises:
        ValueError: it is no age.
    """
    found = _AGE.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is no age: write a number with s, m, h, d or w, such as 7d")
    return float(found[1]) * _UNITS_S[found[2]]


def parse_tenant(text: str) -> Tenant:
    """Return the tenant with this cache salt. ``id:HEX`` gives the digest itself, ``-`` requests without a salt.

    Raises:
        ValueError: it is empty, as a variable of a shell that is not set; or the digest is not one.
    """
    if not text:
        raise ValueError(f"{text!r} is no tenant: give a salt, or {NO_SALT} for requests without one")
    if text == NO_SALT:
        return NO_TENANT
    if not text.startswith(TENANT_DIGEST):
        return tenant_of_salt(text)
    try:
        digest = bytes.fromhex(text.removeprefix(TENANT_DIGEST))
    except ValueError:
        digest = b""
    if len(digest) != len(tenant_of_salt("")):
        raise ValueError(f"{text!r} is no digest of a tenant: take it from `tierkv du --by tenant`")
    return Tenant(digest)


def parse_key(text: str) -> str:
    """Return a key in the letters in which it is compared: a whole one in hex, or the short form of a record.

    Raises:
        ValueError: it is none of them.
    """
    key = text.strip().lower()
    if not _KEY.fullmatch(key):
        raise ValueError(f"{text!r:.80} is no key: take it from `tierkv ls --chunks`, from a log line or from a record")
    return key


def tenant_text(key: bytes) -> str:
    """Return the tenant of a key as ``id:HEX``; ``-`` for requests without a salt. The salt itself is never stored."""
    tenant = tenant_of(key)
    return f"{TENANT_DIGEST}{tenant.hex()}" if tenant else NO_SALT


@dataclass(frozen=True, slots=True)
class NamespaceFilter:
    """Choice of namespaces. Without any choice, all match."""

    names: tuple[str, ...] = ()
    """Names or patterns of models, or beginnings of fingerprints; one of them must match."""
    unused_since_s: float | None = None
    """A namespace matches that no process has used since this time, in seconds since 1970. None: any."""

    @property
    def is_open(self) -> bool:
        """Whether every namespace matches."""
        return not self.names and self.unused_since_s is None

    def matches(self, stored: StoredNamespace) -> bool:
        """Whether a namespace is chosen. One whose last use is unknown counts as used."""
        since, used = self.unused_since_s, stored.last_used_s
        if since is not None and (used is None or used >= since or stored.in_use_by is not None):
            return False
        fingerprint, model = stored.namespace.fingerprint().hex(), stored.namespace.model
        return not self.names or any(
            fnmatch.fnmatchcase(model, name) or (_FINGERPRINT.fullmatch(name) and fingerprint.startswith(name))
            for name in self.names
        )


@dataclass(frozen=True, slots=True)
class ChunkFilter:
    """Choice of chunks in a namespace. Without any choice, all match."""

    tenant: Tenant | None = None
    """Owner of the chunks."""
    stored_before_s: float | None = None
    """The last write of a chunk is before this time, in seconds since 1970."""
    keys: frozenset[str] | None = None
    """Keys in hex, or in the short form of a record."""

    @property
    def is_open(self) -> bool:
        """Whether every chunk matches."""
        return self.tenant is None and self.stored_before_s is None and self.keys is None

    def names_of(self, frame: StoredFrame) -> frozenset[str]:
        """Return those of ``keys`` that name a chunk."""
        key = frame.key or b""
        return frozenset() if self.keys is None else self.keys & {key.hex(), short_key(key)}

    def matches(self, frame: StoredFrame) -> bool | None:
        """Whether a chunk is chosen. None: all but its age is right, and its age is unknown."""
        key = frame.key or b""
        if self.tenant is not None and tenant_of(key) != self.tenant:
            return False
        if self.keys is not None and not self.names_of(frame):
            return False
        if self.stored_before_s is None:
            return True
        return None if frame.stored_at_s is None else frame.stored_at_s < self.stored_before_s


def read_namespace_file(path: Path) -> list[Namespace]:
    """Return the namespaces that a file describes: a manifest of any tier, or the output of ``tierkv ls --json``.

    Raises:
        ConfigError: it describes none.
    """
    try:
        return [Namespace.from_description(each) for each in _descriptions(json.loads(read_short_file(path)))]
    except (OSError, TypeError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(
            f"{path}: {reason}. Give a namespace.json of a tier, a tierkv-export.json, or the output of "
            "`tierkv ls --json`"
        ) from error


def _descriptions(found: Any) -> Iterator[Any]:  # noqa: ANN401 - read from a file
    if isinstance(found, dict) and "namespaces" in found:
        for each in found["namespaces"]:
            yield from _descriptions(each)
    elif isinstance(found, dict) and isinstance(found.get("namespace"), dict):
        yield found["namespace"]
    else:
        yield found


def stored_namespaces(
    places: Sequence[Place], chosen: NamespaceFilter, named: Iterable[Namespace] = ()
) -> Iterator[tuple[Place, StoredNamespace | TierKVError]]:
    """Yield the chosen namespaces of each place, and errors in place of those that cannot be listed.

    A shared place whose backend cannot list them gets those of the other places: the tiers of one stack share them.

    Args:
        places: the places, such as all tiers of a stack.
        chosen: which namespaces.
        named: further namespaces that the user named; used where the backend cannot list.
    """
    known = {namespace.fingerprint(): namespace for namespace in named}
    from_others: dict[bytes, Namespace] = {}
    unlisted: list[Place] = []
    for place in places:
        if place.backend.at_rest is None:
            unlisted.append(place)
            continue
        for found in _listed(place):
            if isinstance(found, StoredNamespace):
                from_others[found.namespace.fingerprint()] = found.namespace
            if not isinstance(found, StoredNamespace) or chosen.matches(found):
                yield place, found
    for place in unlisted:
        candidates = {**(from_others if place.backend.capabilities.shared else {}), **known}
        if not candidates:
            yield place, next(_listed(place))
        for namespace in candidates.values():
            if chosen.matches(StoredNamespace(namespace)):
                yield place, StoredNamespace(namespace)


def _listed(place: Place) -> Iterator[StoredNamespace | TierKVError]:
    """Yield what a place lists; an error that ends the listing as a value."""
    try:
        yield from place.list_namespaces()
    except TierKVError as error:
        yield error

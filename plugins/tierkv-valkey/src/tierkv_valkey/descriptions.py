"""Description of a namespace: a short value that tells tools which model's chunks have a prefix.

It is ``<prefix>:namespace:<fingerprint>``. A full server may evict it, so a writer stores it again from time to time.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from tierkv.errors import BackendError
from tierkv.types.namespace import Namespace

FORMAT = "tierkv-valkey"
FINGERPRINT = re.compile(rb"[0-9a-f]{32}")
REPEAT_S = 600.0
"""Time in seconds after which a tier that writes chunks stores its description again."""


@dataclass(frozen=True, slots=True)
class Description:
    """Description as stored."""

    name: bytes
    """Name of the value."""
    content: bytes
    """The value: JSON."""

    @classmethod
    def of(cls, prefix: str, namespace: Namespace) -> Description:
        """Describe a namespace."""
        content = {"format": FORMAT, "version": 1, "namespace": namespace.describe()}
        return cls(description_name(prefix, namespace.fingerprint().hex().encode()), json.dumps(content).encode())


def description_name(prefix: str, fingerprint: bytes) -> bytes:
    """Name of the description of a namespace, whose fingerprint is in hex."""
    return b"%s:namespace:%s" % (prefix.encode(), fingerprint)


def parse_description(name: bytes, fingerprint: bytes, content: bytes) -> Namespace:
    """Return the described namespace.

    Raises:
        BackendError: the description is damaged, or that of another namespace.
    """
    try:
        found = json.loads(content)
        namespace = Namespace.from_description(found["namespace"])
    except (KeyError, TypeError, ValueError, RecursionError) as error:
        raise BackendError(
            f"{name.decode()} is damaged ({error}). An engine that writes chunks stores it anew"
        ) from error
    if namespace.fingerprint().hex().encode() != fingerprint:
        raise BackendError(f"{name.decode()} describes another namespace than its name")
    return namespace

"""Classification of the client's exceptions and the server's error replies: a kind, a message, and no credentials."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from redis import exceptions

from tierkv.errors import (
    BackendError,
    BackendUnavailableError,
    DeadlineExceededError,
    OutOfSpaceError,
    PartUnavailableError,
    TierKVError,
)
from tierkv.types.keys import Key
from tierkv_valkey.options import CREDENTIALS

TEXT_CHARS_MAX = 200


class FailureKind(Enum):
    """Kind of a failure; the value is the text for messages."""

    DOWN = "no connection"
    LATE = "no answer in time"
    BUSY = "the server cannot serve it now"
    FULL = "the server is full and evicts nothing"
    NO_LOGIN = "the server wants a password, or refuses it"
    REFUSED = "access is refused"
    REPLICA = "the server is a replica, or changes its role"
    WRONG_MODE = "the server runs in another mode"
    TLS = "the encrypted connection failed"
    OTHER = "failed"


_ERRORS: dict[FailureKind, type[BackendError]] = {
    FailureKind.DOWN: BackendUnavailableError,
    FailureKind.BUSY: BackendUnavailableError,
    FailureKind.REPLICA: BackendUnavailableError,
    FailureKind.LATE: DeadlineExceededError,
    FailureKind.FULL: OutOfSpaceError,
}

FIXES = {
    FailureKind.DOWN: "check that the server runs and that the tier's url is right, valkeys:// for a port with TLS",
    FailureKind.LATE: (
        "check the server, the network, and that a port of valkeys:// has TLS; or raise timeout_s and connect_timeout_s"
    ),
    FailureKind.BUSY: (
        "wait until the server has loaded its data or ended its script, and until its disk, its replicas and all slots "
        "serve again; or raise maxclients, where the cause is the number of clients"
    ),
    FailureKind.FULL: 'set maxmemory-policy to "allkeys-lru" or "allkeys-lfu" on the server, or raise maxmemory',
    FailureKind.NO_LOGIN: CREDENTIALS,
    FailureKind.REFUSED: (
        "give this user the commands get, set, exists, unlink and ping on the keys of the prefix, and for tools "
        "scan and strlen"
    ),
    FailureKind.REPLICA: 'give the address of the primary, or use mode = "sentinel" or mode = "cluster"',
    FailureKind.WRONG_MODE: "set the tier's mode to that of the server",
    FailureKind.TLS: "check ca_file, check_hostname, the certificates and the port",
    FailureKind.OTHER: "act on the cause that the message names",
}

_TYPES: tuple[tuple[type[Exception], FailureKind], ...] = (
    (exceptions.AuthenticationError, FailureKind.NO_LOGIN),
    (exceptions.AuthorizationError, FailureKind.REFUSED),
    (exceptions.NoPermissionError, FailureKind.REFUSED),
    (exceptions.BusyLoadingError, FailureKind.BUSY),
    (exceptions.TimeoutError, FailureKind.LATE),
    (exceptions.OutOfMemoryError, FailureKind.FULL),
    (exceptions.ReadOnlyError, FailureKind.REPLICA),
    (exceptions.ClusterDownError, FailureKind.BUSY),
    (exceptions.MasterDownError, FailureKind.BUSY),
    (exceptions.TryAgainError, FailureKind.BUSY),
    (exceptions.AskError, FailureKind.WRONG_MODE),
    (exceptions.ConnectionError, FailureKind.DOWN),
    (TimeoutError, FailureKind.LATE),
    (OSError, FailureKind.DOWN),
)
"""Kinds by type; the first that fits. MovedError is an AskError."""

_WORDS = (
    ("cluster support disabled", FailureKind.WRONG_MODE),
    ("unknown command", FailureKind.WRONG_MODE),
    ("MISCONF", FailureKind.BUSY),
    ("MASTERDOWN", FailureKind.BUSY),
    ("NOREPLICAS", FailureKind.BUSY),
    ("max number of clients", FailureKind.BUSY),
    ("CERTIFICATE_VERIFY_FAILED", FailureKind.TLS),
    ("WRONG_VERSION_NUMBER", FailureKind.TLS),
    ("certificate", FailureKind.TLS),
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Classified exception."""

    kind: FailureKind
    detail: str
    """One line for messages and logs, without credentials."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Classify an exception of the client, or an error reply."""
        text = " ".join(str(error).split())
        kind = next((kind for word, kind in _WORDS if word in text), None)
        kind = kind or next((kind for cause, kind in _TYPES if isinstance(error, cause)), FailureKind.OTHER)
        detail = f"{type(error).__name__}: {text}"
        return cls(kind, detail if len(detail) <= TEXT_CHARS_MAX else f"{detail[:TEXT_CHARS_MAX]}...")

    def to_error(self, what: str, *, tier: str, key: Key | None = None, is_of_part: bool = False) -> TierKVError:
        """Build the tierkv error.

        Args:
            what: names the server and the attempted action.
            tier: name of the tier.
            key: chunk that it is about.
            is_of_part: whether the server does not serve, and others of the tier do.
        """
        fix = FIXES[self.kind]
        others = "; other nodes serve" if is_of_part else ""
        message = f"{what}: {self.kind.value}{others} ({self.detail}). {fix[:1].upper()}{fix[1:]}"
        kind = PartUnavailableError if is_of_part else _ERRORS.get(self.kind, BackendError)
        return kind(message, tier=tier, key=key)

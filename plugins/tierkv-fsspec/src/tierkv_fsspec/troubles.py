"""What a storage library's exception means: a kind, words for people, and no credentials."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tierkv.errors import (
    BackendError,
    BackendUnavailableError,
    DeadlineExceededError,
    OutOfSpaceError,
    TierKVError,
)
from tierkv.types.keys import Key

TEXT_CHARS_MAX = 200


class Kind(Enum):
    """Why it did not work."""

    ABSENT = "no such object"
    TAKEN = "there is one already"
    NOT_SERVED = "the server does not know this kind of request"
    NO_BUCKET = "no such bucket"
    REFUSED = "access is refused"
    NO_CREDENTIALS = "no credentials were found"
    DOWN = "no connection"
    BUSY = "the server cannot serve it now"
    LATE = "no answer in time"
    FULL = "no space left"
    OTHER_REGION = "the bucket is in another region"
    OTHER = "failed"


_ERRORS: dict[Kind, type[BackendError]] = {
    Kind.DOWN: BackendUnavailableError,
    Kind.BUSY: BackendUnavailableError,
    Kind.LATE: DeadlineExceededError,
    Kind.FULL: OutOfSpaceError,
}

FIXES = {
    Kind.NO_BUCKET: "create the bucket, or correct the tier's url",
    Kind.REFUSED: "give these credentials the right to read, write and delete there, or use others",
    Kind.NO_CREDENTIALS: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the environment",
    Kind.DOWN: "check that the server runs and that endpoint_url and the network to it are right",
    Kind.OTHER_REGION: "set region, or AWS_REGION in the environment, to that of the bucket",
    Kind.BUSY: "try again later",
    Kind.LATE: "check the server, or raise connect_timeout_s and read_timeout_s",
    Kind.FULL: "make room, or raise the quota",
    Kind.TAKEN: "see the message",
    Kind.NOT_SERVED: "see the message",
    Kind.OTHER: "see the message",
}

_CODES = {
    "NoSuchKey": Kind.ABSENT,
    "NoSuchBucket": Kind.NO_BUCKET,
    "NotImplemented": Kind.NOT_SERVED,
    "PreconditionFailed": Kind.TAKEN,
    "ConditionalRequestConflict": Kind.TAKEN,
    "ContainerNotFound": Kind.NO_BUCKET,
    "AccessDenied": Kind.REFUSED,
    "AuthenticationFailed": Kind.REFUSED,
    "AuthorizationFailure": Kind.REFUSED,
    "AuthorizationPermissionMismatch": Kind.REFUSED,
    "AllAccessDisabled": Kind.REFUSED,
    "InvalidAccessKeyId": Kind.REFUSED,
    "SignatureDoesNotMatch": Kind.REFUSED,
    "ExpiredToken": Kind.REFUSED,
    "PermanentRedirect": Kind.OTHER_REGION,
    "AuthorizationHeaderMalformed": Kind.OTHER_REGION,
    "QuotaExceeded": Kind.FULL,
    "EntityTooLarge": Kind.OTHER,
    "XMinioStorageFull": Kind.FULL,
    "SlowDown": Kind.BUSY,
    "ServiceUnavailable": Kind.BUSY,
    "InternalError": Kind.BUSY,
    "ServerBusy": Kind.BUSY,
    "RequestTimeout": Kind.LATE,
    "OperationTimedOut": Kind.LATE,
}
_STATUSES = {
    401: Kind.REFUSED,
    403: Kind.REFUSED,
    404: Kind.ABSENT,
    408: Kind.LATE,
    412: Kind.TAKEN,
    429: Kind.BUSY,
    501: Kind.NOT_SERVED,
    507: Kind.FULL,
}
_TYPE_NAMES = {
    "PermissionDeniedError": Kind.REFUSED,
    "UnauthenticatedError": Kind.REFUSED,
    "NoCredentialsError": Kind.NO_CREDENTIALS,
    "PartialCredentialsError": Kind.NO_CREDENTIALS,
    "CredentialRetrievalError": Kind.NO_CREDENTIALS,
    "ConnectTimeoutError": Kind.DOWN,
    "EndpointConnectionError": Kind.DOWN,
    "ConnectionClosedError": Kind.DOWN,
    "ProxyConnectionError": Kind.DOWN,
    "ReadTimeoutError": Kind.LATE,
    "FSTimeoutError": Kind.LATE,
    "ClientConnectorError": Kind.DOWN,
    "ServerDisconnectedError": Kind.DOWN,
    "HTTPClientError": Kind.DOWN,
    "FileNotFoundError": Kind.ABSENT,
    "AlreadyExistsError": Kind.TAKEN,
    "FileExistsError": Kind.TAKEN,
    "NotSupportedError": Kind.NOT_SERVED,
    "NotImplementedError": Kind.NOT_SERVED,
    "TimeoutError": Kind.LATE,
    "ConnectionError": Kind.DOWN,
    "PermissionError": Kind.REFUSED,
}
"""By name, so that no library has to be imported to understand its errors."""
_ERRNOS = {
    errno.ENOSPC: Kind.FULL,
    errno.EDQUOT: Kind.FULL,
    errno.EACCES: Kind.REFUSED,
    errno.EPERM: Kind.REFUSED,
    errno.EROFS: Kind.REFUSED,
    errno.ESTALE: Kind.DOWN,
    errno.EHOSTDOWN: Kind.DOWN,
}
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_HIDE = re.compile(
    r"(?is)(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|<(AWSAccessKeyId|StringToSign\w*|SignatureProvided|CanonicalRequest\w*)>.*?</\1>"
    r"|(?:signature|credential|access.?key(?:.?id)?|secret|token|password|authorization)\W{0,3}[=:]\s*\S+"
    r"|//[^/\s@]+@"
)


@dataclass(frozen=True, slots=True)
class Trouble:
    """An exception, understood. ``detail`` is fit for a log."""

    kind: Kind
    detail: str

    @classmethod
    def of(cls, error: BaseException) -> Trouble:
        """Look at the exception, and at what caused it."""
        chain = list(_chain(error))
        text = " ".join(str(link) for link in chain)
        status = next((_status(link) for link in chain if _status(link)), None)
        code = next((found for link in chain if (found := _code(link))), "")
        kind = _CODES.get(code) or _kind_of_chain(chain, text) or _kind_of_status(status) or Kind.OTHER
        return cls(kind, _detail(error, text, status, code))

    def to_error(self, what: str, *, tier: str, key: Key | None = None) -> TierKVError:
        """The error value or exception for it. ``what`` names the object and what was tried."""
        fix = FIXES.get(self.kind, "")
        message = f"{what}: {self.kind.value} ({self.detail}). {fix[:1].upper()}{fix[1:]}"
        return _ERRORS.get(self.kind, BackendError)(message, tier=tier, key=key)


def forget_frames(error: BaseException) -> None:
    """Cut an exception off from the frames that it passed.

    A library that keeps its exceptions in a cycle would otherwise keep our frames, and the caller's buffers in them,
    until the next garbage collection.
    """
    for link in _chain(error):
        link.__traceback__ = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _status(error: BaseException) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
    found = _STATUS.search(str(error))
    return int(found[1]) if found else None


def _code(error: BaseException) -> str:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    found = _CODE.search(str(error))
    return found[1] if found else ""


def _kind_of_chain(chain: list[BaseException], text: str) -> Kind | None:
    kinds = (_kind_of_type(error) for error in chain)
    kind = next((kind for kind in kinds if kind is not None), None)
    if kind is not None:
        return kind
    # obstore tells the kind of a failed request in its debug text only.
    if "kind: Timeout" in text:
        return Kind.LATE
    if "HTTP error: " in text or "kind: Connect" in text:
        return Kind.DOWN
    return None


def _kind_of_type(error: BaseException) -> Kind | None:
    for ancestor in type(error).__mro__:
        if ancestor.__name__ in _TYPE_NAMES:
            return _TYPE_NAMES[ancestor.__name__]
    return _ERRNOS.get(error.errno or 0) if isinstance(error, OSError) else None


def _kind_of_status(status: int | None) -> Kind | None:
    if status is None:
        return None
    return _STATUSES.get(status) or (Kind.BUSY if status >= 500 else None)  # noqa: PLR2004  HTTP: the server's fault


def _detail(error: BaseException, text: str, status: int | None, code: str) -> str:
    said = _MESSAGE.search(text)
    if status or code:
        message = said[1] if said else ("" if "<?xml" in str(error) or "\n" in str(error) else str(error))
        parts = [f"HTTP {status}" if status else "", code, hide_secrets(message)]
        return " ".join(part for part in parts if part)
    return f"{type(error).__name__}: {hide_secrets(str(error))}"


def hide_secrets(text: str) -> str:
    """One short line of ``text``, without what looks like a credential."""
    line = " ".join(_HIDE.sub("***", text.split("\n\nDebug source", maxsplit=1)[0]).split())
    return line if len(line) <= TEXT_CHARS_MAX else f"{line[:TEXT_CHARS_MAX]}..."

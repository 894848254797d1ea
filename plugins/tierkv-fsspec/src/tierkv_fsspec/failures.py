"""Classification of a storage library's exceptions: a kind, a message for the user, and no credentials."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from http import HTTPStatus
from itertools import starmap

from tierkv.errors import (
    BackendError,
    BackendUnavailableError,
    DeadlineExceededError,
    OutOfSpaceError,
    TierKVError,
)
from tierkv.types.keys import Key

TEXT_CHARS_MAX = 200
END_CHARS_MAX = 16 << 10
"""Characters that are read at each end of an exception's text. A library may put a whole error page into it, twice; a
search over all of that would keep every other thread waiting."""


class FailureKind(Enum):
    """Kind of a failure; the value is the text for messages."""

    ABSENT = "no such object"
    TAKEN = "the object exists already"
    NOT_SERVED = "the server does not support this kind of request"
    NO_BUCKET = "no such bucket"
    REFUSED = "access is refused"
    NO_CREDENTIALS = "no credentials were found"
    WRONG_CREDENTIALS = "the credentials are wrong"
    WRONG_CLOCK = "the clocks of this machine and of the server differ"
    DOWN = "no connection"
    UNTRUSTED = "the certificate of the server is refused"
    BUSY = "it cannot be served now"
    LATE = "no answer in time"
    DAMAGED = "the answer was damaged on its way"
    FULL = "no space left"
    NO_RANGE = "the object is shorter than the requested range"
    OTHER_REGION = "the bucket is in another region"
    NO_LENGTH = "the answer has no Content-Length"
    OTHER = "failed"


_ERRORS: dict[FailureKind, type[BackendError]] = {
    FailureKind.DOWN: BackendUnavailableError,
    FailureKind.UNTRUSTED: BackendUnavailableError,
    FailureKind.BUSY: BackendUnavailableError,
    FailureKind.LATE: DeadlineExceededError,
    FailureKind.DAMAGED: BackendUnavailableError,
    FailureKind.FULL: OutOfSpaceError,
}

FIXES = {
    FailureKind.ABSENT: "correct the path that the message names",
    FailureKind.NO_BUCKET: "create the bucket, or correct the tier's url",
    FailureKind.REFUSED: (
        "give these credentials the right to list, read, write and delete there, or use others; where no reason is "
        "given, they may also have expired, or the clock of this machine may be wrong"
    ),
    FailureKind.NO_CREDENTIALS: "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, in the environment",
    FailureKind.WRONG_CREDENTIALS: (
        "correct or renew them where they come from: the environment, a profile, or for sftp the key file that "
        "storage_options.key_filename names"
    ),
    FailureKind.WRONG_CLOCK: "set the clock of this machine, or of the server",
    FailureKind.DOWN: "check that the server runs and that endpoint_url and the network to it are right",
    FailureKind.UNTRUSTED: (
        "renew it, correct its names, or let this machine trust its issuer: SSL_CERT_FILE, and AWS_CA_BUNDLE for s3fs"
    ),
    FailureKind.OTHER_REGION: "set region, or AWS_REGION in the environment, to that of the bucket",
    FailureKind.NO_LENGTH: 'let the proxy before the server pass it on, or set implementation = "fsspec"',
    FailureKind.BUSY: "try again later",
    FailureKind.LATE: "check the server, or raise connect_timeout_s and read_timeout_s",
    FailureKind.DAMAGED: "check the network, and proxies between this machine and the server",
    FailureKind.FULL: "make room, or raise the quota",
    FailureKind.NO_RANGE: "act on the cause that the message names",
    FailureKind.TAKEN: "act on the cause that the message names",
    FailureKind.NOT_SERVED: "act on the cause that the message names",
    FailureKind.OTHER: "act on the cause that the message names",
}

_CODES = {
    "NoSuchKey": FailureKind.ABSENT,
    "NoSuchBucket": FailureKind.NO_BUCKET,
    "InvalidRange": FailureKind.NO_RANGE,
    "NotImplemented": FailureKind.NOT_SERVED,
    "PreconditionFailed": FailureKind.TAKEN,
    "ConditionalRequestConflict": FailureKind.TAKEN,
    "ContainerNotFound": FailureKind.NO_BUCKET,
    "AccessDenied": FailureKind.REFUSED,
    "AuthenticationFailed": FailureKind.WRONG_CREDENTIALS,
    "AuthorizationFailure": FailureKind.REFUSED,
    "AuthorizationPermissionMismatch": FailureKind.REFUSED,
    "AllAccessDisabled": FailureKind.REFUSED,
    "InvalidAccessKeyId": FailureKind.WRONG_CREDENTIALS,
    "SignatureDoesNotMatch": FailureKind.WRONG_CREDENTIALS,
    "ExpiredToken": FailureKind.WRONG_CREDENTIALS,
    "RequestTimeTooSkewed": FailureKind.WRONG_CLOCK,
    "RequestExpired": FailureKind.WRONG_CLOCK,
    "InvalidToken": FailureKind.WRONG_CREDENTIALS,
    "InvalidClientTokenId": FailureKind.WRONG_CREDENTIALS,
    "PermanentRedirect": FailureKind.OTHER_REGION,
    "AuthorizationHeaderMalformed": FailureKind.OTHER_REGION,
    "QuotaExceeded": FailureKind.FULL,
    "EntityTooLarge": FailureKind.OTHER,
    "XMinioStorageFull": FailureKind.FULL,
    "SlowDown": FailureKind.BUSY,
    "ServiceUnavailable": FailureKind.BUSY,
    "InternalError": FailureKind.BUSY,
    "ServerBusy": FailureKind.BUSY,
    "RequestTimeout": FailureKind.LATE,
    "OperationTimedOut": FailureKind.LATE,
}
_STATUSES = {
    301: FailureKind.OTHER_REGION,
    401: FailureKind.WRONG_CREDENTIALS,
    403: FailureKind.REFUSED,
    404: FailureKind.ABSENT,
    408: FailureKind.LATE,
    412: FailureKind.TAKEN,
    416: FailureKind.NO_RANGE,
    429: FailureKind.BUSY,
    501: FailureKind.NOT_SERVED,
    507: FailureKind.FULL,
}
_TYPE_NAMES = {
    "PermissionDeniedError": FailureKind.REFUSED,
    "UnauthenticatedError": FailureKind.WRONG_CREDENTIALS,
    "AuthenticationException": FailureKind.WRONG_CREDENTIALS,
    "PasswordRequiredException": FailureKind.WRONG_CREDENTIALS,
    "NoCredentialsError": FailureKind.NO_CREDENTIALS,
    "PartialCredentialsError": FailureKind.NO_CREDENTIALS,
    "CredentialRetrievalError": FailureKind.NO_CREDENTIALS,
    "ConnectTimeoutError": FailureKind.DOWN,
    "EndpointConnectionError": FailureKind.DOWN,
    "ConnectionClosedError": FailureKind.DOWN,
    "ProxyConnectionError": FailureKind.DOWN,
    "ReadTimeoutError": FailureKind.LATE,
    "FSTimeoutError": FailureKind.LATE,
    "ClientConnectorError": FailureKind.DOWN,
    "ServerDisconnectedError": FailureKind.DOWN,
    "ClientPayloadError": FailureKind.DOWN,
    "FlexibleChecksumError": FailureKind.DAMAGED,
    "HTTPClientError": FailureKind.DOWN,
    "FileNotFoundError": FailureKind.ABSENT,
    "AlreadyExistsError": FailureKind.TAKEN,
    "FileExistsError": FailureKind.TAKEN,
    "NotSupportedError": FailureKind.NOT_SERVED,
    "NotImplementedError": FailureKind.NOT_SERVED,
    "TimeoutError": FailureKind.LATE,
    "ConnectionError": FailureKind.DOWN,
    "PermissionError": FailureKind.REFUSED,
}
"""Kinds by the exception's type name, so that no library must be imported to classify its errors."""
_ERRNOS = {
    errno.ENOSPC: FailureKind.FULL,
    errno.EDQUOT: FailureKind.FULL,
    errno.EACCES: FailureKind.REFUSED,
    errno.EPERM: FailureKind.REFUSED,
    errno.EROFS: FailureKind.REFUSED,
    errno.ESTALE: FailureKind.DOWN,
    errno.EHOSTDOWN: FailureKind.DOWN,
    **dict.fromkeys(
        (errno.EAGAIN, errno.EINTR, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOLCK), FailureKind.BUSY
    ),
}
_TEXTS = (
    ("No authentication methods available", FailureKind.WRONG_CREDENTIALS),  # paramiko, without a key
    ("redirect without LOCATION", FailureKind.OTHER_REGION),
    ("Content-Length Header missing", FailureKind.NO_LENGTH),
    ("kind: Timeout", FailureKind.LATE),
    ("HTTP error: ", FailureKind.DOWN),
    ("kind: Connect", FailureKind.DOWN),
)
"""Kinds by words of the text: obstore reports the kind of a failed request in its debug text only."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>(\w{1,64})</Code>")
_MESSAGE = re.compile(r"<Message>([^<]{1,200})")
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)|certificate verify failed: ([^(\n]{1,100})")
_HIDE = re.compile(
    r"(?is)(?:AKIA|ASIA)[A-Z0-9]{12,}"
    r"|<(AWSAccessKeyId|StringToSign\w*|SignatureProvided|CanonicalRequest\w*)>.*?</\1>"
    r"|(?:signature|credential|access.?key(?:.?id)?|secret|token|password|authorization)\W{0,3}[=:]\s*\S+"
    r"|//[^/\s@]+@"
)


@dataclass(frozen=True, slots=True)
class Failure:
    """Classified exception."""

    kind: FailureKind
    detail: str
    """One line for messages and logs, without credentials."""

    @classmethod
    def of(cls, error: BaseException) -> Failure:
        """Classify an exception by itself and by its causes."""
        chain = list(_chain(error))
        texts = [_text(link) for link in chain]
        text = " ".join(texts)
        links = list(zip(chain, texts, strict=True))
        status = next(filter(None, starmap(_status, links)), None)
        code = next(filter(None, starmap(_code, links)), "")
        if refused := _CERTIFICATE.search(text):  # the libraries say it last in a long text
            return cls(FailureKind.UNTRUSTED, (refused[1] or refused[2]).removesuffix("Context").strip(" .,"))
        kind = _CODES.get(code) or _kind_of_chain(chain, text) or _kind_of_status(status, code) or FailureKind.OTHER
        if status or code:
            return cls(kind, _answer(texts[0], text, status, code))
        return cls(kind, f"{type(error).__name__}: {hide_secrets(texts[0])}")

    def to_error(self, what: str, *, tier: str, key: Key | None = None) -> TierKVError:
        """Build the tierkv error. ``what`` names the object and the attempted action."""
        fix = FIXES.get(self.kind, "")
        message = f"{what}: {self.kind.value} ({self.detail}). {fix[:1].upper()}{fix[1:]}"
        return _ERRORS.get(self.kind, BackendError)(message, tier=tier, key=key)


def clear_tracebacks(error: BaseException) -> None:
    """Remove the tracebacks of an exception and of its causes.

    A library that keeps its exceptions in a reference cycle would otherwise keep our stack frames, and the caller's
    buffers in them, until the next garbage collection.
    """
    for link in _chain(error):
        link.__traceback__ = None


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def _text(error: BaseException) -> str:
    text = str(error)
    return text if len(text) <= 2 * END_CHARS_MAX else f"{text[:END_CHARS_MAX]} ... {text[-END_CHARS_MAX:]}"


def _status(error: BaseException, text: str) -> int | None:
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)) or None
    found = _STATUS.search(text)
    return int(found[1]) if found else None


def _code(error: BaseException, text: str) -> str:
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        return str(response.get("Error", {}).get("Code", ""))
    found = _CODE.search(text)
    return found[1] if found else ""


def _kind_of_chain(chain: list[BaseException], text: str) -> FailureKind | None:
    kinds = (_kind_of_type(error) for error in chain)
    kind = next((kind for kind in kinds if kind is not None), None)
    return kind or next((kind for words, kind in _TEXTS if words in text), None)


def _kind_of_type(error: BaseException) -> FailureKind | None:
    for ancestor in type(error).__mro__:
        if ancestor.__name__ in _TYPE_NAMES:
            return _TYPE_NAMES[ancestor.__name__]
    return _ERRNOS.get(error.errno or 0) if isinstance(error, OSError) else None


def _kind_of_status(status: int | None, code: str) -> FailureKind | None:
    if status is None:
        return None
    if status == HTTPStatus.BAD_REQUEST and not code.strip("0123456789"):
        return FailureKind.REFUSED  # answers to HEAD have no code; S3 gives this status for expired credentials
    return _STATUSES.get(status) or (FailureKind.BUSY if status >= 500 else None)  # noqa: PLR2004  a server error


def _answer(own: str, text: str, status: int | None, code: str) -> str:
    """Describe an answer of a server. own: text of the exception itself; text: with those of its causes."""
    said = _MESSAGE.search(text)
    message = said[1] if said else ("" if "<?xml" in own or "\n" in own else own)
    parts = [f"HTTP {status}" if status else "", code, hide_secrets(message)]
    return " ".join(part for part in parts if part)


def hide_secrets(text: str) -> str:
    """Shorten ``text`` to one line and mask everything that looks like a credential."""
    line = " ".join(_HIDE.sub("***", text.split("\n\nDebug source", maxsplit=1)[0]).split())
    return line if len(line) <= TEXT_CHARS_MAX else f"{line[:TEXT_CHARS_MAX]}..."

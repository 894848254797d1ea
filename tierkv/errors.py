"""All errors that tierkv raises or records.

::

    TierKVError
    ├── ConfigError (ValueError)            the stack description is wrong; names file, key path, value, fix
    ├── PluginError (ImportError)           a plugin cannot be used
    │   └── SpiVersionError                 the plugin was built for another version of the plugin interface
    ├── EngineVersionError (ImportError)    the adapter does not support the installed engine
    ├── EngineProtocolError (RuntimeError)  the engine broke the calling contract
    ├── InvariantError (RuntimeError)       an invariant of tierkv does not hold: a bug in tierkv
    │   └── IllegalTransitionError          a state machine refused an event; carries its previous transitions
    ├── BackendError (OSError)              an operation of a tier failed
    │   ├── BackendUnavailableError (ConnectionError)  the tier cannot be reached; retryable
    │   │   └── PartUnavailableError    a part of the tier cannot be reached, and others serve
    │   ├── DeadlineExceededError (TimeoutError)       the tier did not answer in time; retryable
    │   ├── OutOfSpaceError             the tier is full
    │   ├── NoThreadError (RuntimeError)               the system starts no further thread for a tier
    │   └── NamespaceMismatchError      the storage belongs to another namespace or program
    └── CorruptFrameError (ValueError)      stored bytes failed their check: a miss
        └── UnreadableFrameError            the frame is whole, but cannot be read here: a miss

A *miss* is not an error. Errors of a tier never reach the engine's thread as exceptions. They are values in
completions, become misses, and are counted.
"""

from __future__ import annotations


class TierKVError(Exception):
    """Base class of all errors of tierkv."""

    retryable: bool = False
    """Whether the same operation may succeed when it is repeated."""
    tier: str | None
    """Name of the tier that the error belongs to, or None."""
    key: bytes | None
    """Key of the chunk that the error belongs to, or None."""

    def __init__(self, message: str, *, tier: str | None = None, key: bytes | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.key = key


class ConfigError(TierKVError, ValueError):
    """The description of a stack is wrong. The message names file, key path, value, allowed values and a fix."""


class PluginError(TierKVError, ImportError):
    """A plugin is missing, fails, or contradicts its declaration. The message names distribution and entry point."""


class SpiVersionError(PluginError):
    """A plugin was written for a version of the plugin interface that this tierkv does not support."""


class EngineVersionError(TierKVError, ImportError):
    """The engine is missing, or its version is not supported by the adapter. The message names supported versions."""


class EngineProtocolError(TierKVError, RuntimeError):
    """An engine broke the calling contract of the scheduler or the worker (docs/how-to/drive-tierkv.md)."""

    request_id: str | None
    """Request that the call was about, or None."""

    def __init__(
        self, message: str, *, request_id: str | None = None, tier: str | None = None, key: bytes | None = None
    ) -> None:
        super().__init__(message, tier=tier, key=key)
        self.request_id = request_id


def wrong_value(call: str, name: str, given: object, give: str) -> EngineProtocolError:
    """Error of a call that got a foreign value: ``call: name = given: give ...``.

    Args:
        call: name of the call.
        name: name of the argument.
        given: its value.
        give: the rule, beginning with "give".
    """
    return EngineProtocolError(f"{call}: {name} = {given!r:.80}: {give}")


class InvariantError(TierKVError, RuntimeError):
    """An invariant does not hold. This is always a bug in tierkv: please report it with its message."""


class IllegalTransitionError(InvariantError):
    """A state machine refused an event that its table does not allow. The message lists the previous transitions."""


def require(condition: object, message: str) -> None:
    """Check an invariant of tierkv.

    Raises:
        InvariantError: the condition is false.
    """
    if not condition:
        raise InvariantError(message)


class BackendError(TierKVError, OSError):
    """An operation of a tier failed."""


class BackendUnavailableError(BackendError, ConnectionError):
    """A tier cannot be reached at present."""

    retryable = True


class PartUnavailableError(BackendUnavailableError):
    """A part of a tier cannot be reached at present, such as one of several servers, while others of it serve.

    It takes no tier out of service, and does not end its writes: the chunks of that part are misses. The operation is
    not tried again: all requests would wait for that as long as the part is away.
    """

    retryable = False


class DeadlineExceededError(BackendError, TimeoutError):
    """A tier did not answer within its deadline."""

    retryable = True


class OutOfSpaceError(BackendError):
    """A tier has no room for the frame."""


class NoThreadError(BackendError, RuntimeError):
    """The system starts no further thread for a tier."""


class NamespaceMismatchError(BackendError):
    """The storage of a tier holds data of another namespace, format or program."""


class CorruptFrameError(TierKVError, ValueError):
    """Stored bytes failed a check of their frame (magic, version, key, namespace, length or checksum)."""


class UnreadableFrameError(CorruptFrameError):
    """A frame is whole, but cannot be read here: codec or key is missing, or the tier does not allow lossy codecs."""

"""Every error that tierkv raises or records.

::

    TierKVError
    ├── ConfigError (ValueError)            the stack description is wrong; names file, key path, value, fix
    ├── PluginError (ImportError)           a plugin cannot be used
    │   └── SpiVersionError                 it was built against another version of the plugin interface
    ├── EngineVersionError (ImportError)    the engine that is installed is not one that an adapter serves
    ├── EngineProtocolError (RuntimeError)  the engine called us in a way the contract does not allow
    ├── InvariantError (RuntimeError)       something that must always hold did not: a bug of ours
    │   └── IllegalTransitionError          a state machine refused an event; lists its latest transitions
    ├── BackendError (OSError)              a tier could not do what it was asked
    │   ├── BackendUnavailableError (ConnectionError)  it cannot be reached; retryable
    │   ├── DeadlineExceededError (TimeoutError)       it did not answer in time; retryable
    │   ├── OutOfSpaceError             it is full
    │   └── NamespaceMismatchError      what lies there belongs to another namespace or program
    └── CorruptFrameError (ValueError)      bytes at rest failed their check: a miss, never data
        └── UnreadableFrameError            a frame is whole, but cannot be read here: a miss, nothing is damaged

A *miss* is not an error. Errors of a tier never reach the engine's thread as exceptions: they travel as values in
completions, become misses, and are counted.
"""

from __future__ import annotations


class TierKVError(Exception):
    """Base of all errors of tierkv.

    Attributes:
        tier: name of the tier it happened in, or None.
        key: the chunk key it happened to, or None.
        retryable: whether doing the same thing again may succeed.
    """

    retryable: bool = False

    def __init__(self, message: str, *, tier: str | None = None, key: bytes | None = None) -> None:
        super().__init__(message)
        self.tier = tier
        self.key = key


class ConfigError(TierKVError, ValueError):
    """The description of a stack is wrong. The message names file, key path, value, what is allowed, and a fix."""


class PluginError(TierKVError, ImportError):
    """A plugin is missing, broken, or lies about itself. The message names the distribution and the entry point."""


class SpiVersionError(PluginError):
    """A plugin was written for a version of the plugin interface that this tierkv does not serve."""


class EngineVersionError(TierKVError, ImportError):
    """The engine that is installed, or missing, is not a version that tierkv's adapter serves. Names those it does."""


class EngineProtocolError(TierKVError, RuntimeError):
    """An engine broke the calling contract of the scheduler or the worker (docs/how-to/drive-tierkv.md)."""


class InvariantError(TierKVError, RuntimeError):
    """Something that must always hold did not. Always a bug of ours: please report it with its message."""


class IllegalTransitionError(InvariantError):
    """A state machine was given an event that its table does not allow in its state. Lists the latest transitions."""


def require(condition: object, message: str) -> None:
    """Check an invariant of our own.

    Raises:
        InvariantError: the condition does not hold.
    """
    if not condition:
        raise InvariantError(message)


class BackendError(TierKVError, OSError):
    """A tier could not do what it was asked."""


class BackendUnavailableError(BackendError, ConnectionError):
    """A tier cannot be reached at present."""

    retryable = True


class DeadlineExceededError(BackendError, TimeoutError):
    """A tier did not answer within its deadline."""

    retryable = True


class OutOfSpaceError(BackendError):
    """A tier has no room for what it was asked to store."""


class NamespaceMismatchError(BackendError):
    """The place a tier points at holds the data of another namespace, format or program."""


class CorruptFrameError(TierKVError, ValueError):
    """Bytes at rest failed a check of their frame (magic, version, key, namespace, length or checksum)."""


class UnreadableFrameError(CorruptFrameError):
    """A frame is whole, but not to be read here: no codec, no key, or an approximation in a tier that is not lossy."""

"""Reads shared by the writer and the readers: look frames up and copy them out."""

from __future__ import annotations

from collections.abc import Sequence

import lmdb

from tierkv.abc import ReadRequest, ReadResult
from tierkv.errors import BackendUnavailableError, TierKVError
from tierkv.types.keys import Key
from tierkv_lmdb.environments.environment import Environment
from tierkv_lmdb.failures import Failures


def contains(environment: Environment, failures: Failures, keys: Sequence[Key]) -> list[bool]:
    """Whether each key is in the index.

    Raises:
        BackendError: the index cannot be read.
    """
    try:
        with environment.reading() as txn:
            return [is_storable(environment, key) and txn.get(key) is not None for key in keys]
    except lmdb.Error as error:
        raise failures.from_cause("look up keys", error) from error


def read(environment: Environment, failures: Failures, request: ReadRequest) -> ReadResult:
    """Copy one frame to its caller's buffer, in a transaction of its own: it may take as long as the disk."""
    if not is_storable(environment, request.key):
        return None
    try:
        with environment.reading(frames=True) as txn:
            value = txn.get(request.key)
            if value is None:
                return None
            size = len(value)
            if size > len(request.buffer):
                return failures.backend_error(
                    f"frame of {size} bytes does not fit the buffer of {len(request.buffer)}", request.key
                )
            if size:
                environment.copy(value, request.buffer)
            return size
    except BackendUnavailableError as error:
        return failures.unavailable(str(error), request.key)
    except TierKVError:
        raise  # closed: this concerns every key
    except (lmdb.Error, OSError) as error:
        return failures.from_cause("read", error, request.key)


def is_storable(environment: Environment, key: Key) -> bool:
    """Whether LMDB accepts the length of ``key``."""
    return 0 < len(key) <= environment.key_bytes_max

"""From the operating system's errors to those of the plugin interface."""

from __future__ import annotations

import errno

from tierkv.errors import BackendError, OutOfSpaceError, TierKVError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The device, the user's quota, or the process's file size limit is exhausted."""


def as_tier_error(error: OSError, what: str, *, tier: str, key: bytes | None = None) -> TierKVError:
    """The value to put into a result, or to raise. ``what`` says what was tried, with the path."""
    if isinstance(error, TierKVError):
        return type(error)(f"{what}: {error}", tier=tier, key=key)
    message = f"{what}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    if error.errno in NO_SPACE:
        return OutOfSpaceError(message, tier=tier, key=key)
    return BackendError(message, tier=tier, key=key)

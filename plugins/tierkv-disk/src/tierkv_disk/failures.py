"""Translation of operating system errors into the errors of the plugin interface."""

from __future__ import annotations

import errno

from tierkv.errors import BackendError, OutOfSpaceError, TierKVError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The device, the user's quota, or the process's file size limit is exhausted."""

BAD_MEDIUM = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN, errno.EREMOTEIO})
"""The place itself failed; other errors, such as a file system turned read-only, say nothing about the place."""


def as_tier_error(error: OSError, what: str, *, tier: str, key: bytes | None = None) -> TierKVError:
    """Build the error to put into a result, or to raise. ``what`` names the attempted action and its path."""
    if isinstance(error, TierKVError):
        return type(error)(f"{what}: {error}", tier=tier, key=key)
    message = f"{what}: {error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
    if error.errno == errno.EFBIG:  # no eviction helps: the limit refuses the pages of the other frames, too
        return BackendError(f"{message}: raise this process's limit of file sizes (ulimit -f)", tier=tier, key=key)
    if error.errno in NO_SPACE:
        return OutOfSpaceError(message, tier=tier, key=key)
    return BackendError(message, tier=tier, key=key)

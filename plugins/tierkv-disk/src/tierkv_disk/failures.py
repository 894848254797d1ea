"""Translation of operating system errors into the errors of the plugin interface."""

from __future__ import annotations

import errno

from tierkv.errors import BackendError, OutOfSpaceError, TierKVError

NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
"""The device, the user's quota, or the process's file size limit is exhausted."""

NO_FILES = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOMEM})
"""This process, or the machine, can open no further file at present."""

BAD_MEDIUM = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EILSEQ, errno.EUCLEAN, errno.EREMOTEIO})
"""The place itself failed; other errors, such as a file system turned read-only, say nothing about the place."""


LIMITS = "free space, min_free_bytes, directory_bytes_max or a quota"
"""Causes that keep a tier smaller than its capacity, for messages."""


def growth_error(error: OSError) -> OSError:
    """Return the error of a tier that cannot grow. Without descriptors, evicting makes room in the open files."""
    return OutOfSpaceError(f"no file can be added: {error}") if error.errno in NO_FILES else error


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

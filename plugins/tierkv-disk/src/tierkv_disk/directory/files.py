"""Durable names: directories forced to the device, small documents published atomically."""

from __future__ import annotations

import errno
import json
import os
import re
import stat
import threading
from collections.abc import Mapping
from pathlib import Path

from tierkv.abc import places
from tierkv.abc.logs import plugin_logger

TEMPORARY_PREFIX = ".tierkv-disk."
TEMPORARY_SUFFIX = ".tmp"
NAMESPACE_DIGITS = 32
"""Length of the name of a namespace's directory."""
_TEMPORARY = re.compile(
    r"\.tierkv-disk\.(?:(?:tierkv-disk\.json|namespace\.json|quarantine\.jsonl|[0-9a-f]{32})\.\d+-\d+|[a-z0-9_]{8})\.tmp"
)
"""Names of :func:`temporary_name`, and of the file that a check of O_DIRECT creates for a moment."""
DOCUMENT_BYTES_MAX = 1 << 20
"""Longest small document that is read."""
logger = plugin_logger("tierkv_disk")


class NotOurFileError(OSError):
    """A path holds a link, a directory, a pipe, a device, or a file that has a second name elsewhere."""


def is_removed_namespace(name: str) -> bool:
    """Whether ``name`` is the :func:`temporary_name` of a namespace's directory."""
    return is_temporary(name) and len(name.split(".")[2]) == NAMESPACE_DIGITS


def open_file(path: Path, flags: int) -> int:
    """Open a regular file that has no other name, and is no link. Returns a descriptor.

    Raises:
        NotOurFileError: something else is there; it was not changed.
        OSError: as ``os.open``.
    """
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO) or _is_irregular(path):  # O_DIRECT of a pipe: EINVAL
            kind = "it is a link, not a regular file" if path.is_symlink() else "it is not a regular file"
            raise NotOurFileError(errno.EINVAL, kind, str(path)) from None
        raise
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode) or status.st_nlink > 1:
        os.close(fd)
        links = f", but with {status.st_nlink} (hard links)" if status.st_nlink > 1 else ""
        raise NotOurFileError(errno.EINVAL, f"it is not a regular file with one name{links}", str(path))
    return fd


def open_lock_file(path: Path) -> int:
    """Open the file of a lock; created if absent. Returns a descriptor.

    A directory or a pipe of that name holds no lock of ours: it is set aside. Otherwise it would keep the tier out for
    ever.

    Raises:
        NotOurFileError: a link is there, or a file that has a second name: it leads to a file outside the directory.
        OSError: it cannot be opened or created.
    """
    try:
        return open_file(path, os.O_RDWR | os.O_CREAT)
    except NotOurFileError as error:
        if not _is_irregular(path):
            raise
        set_aside(path, error.strerror)
    return open_file(path, os.O_RDWR | os.O_CREAT)


def _is_irregular(path: Path) -> bool:
    """Whether neither a file nor a link is at ``path``, but something else."""
    try:
        mode = path.lstat().st_mode
    except OSError:
        return False
    return not stat.S_ISREG(mode) and not stat.S_ISLNK(mode)


def create_file(path: Path) -> int:
    """Create a file in place of whatever has its name. Returns a descriptor.

    A link is removed, never followed. A directory is set aside.

    Raises:
        OSError: it cannot be created.
    """
    try:
        path.unlink(missing_ok=True)
    except IsADirectoryError as error:
        set_aside(path, error.strerror)
    return open_file(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)


def set_aside(path: Path, why: object) -> Path:
    """Rename what cannot be used as a file of the tier, and log it. Returns its new path.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = places.set_aside(path)
    logger.warning("%s; %s is kept as %s, and begun anew", why, path, aside.name)
    return aside


def sync_directory(directory: Path) -> None:
    """Make the names in ``directory`` durable."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def temporary_name(name: str) -> str:
    """Name that no other thread or process uses, and that the next open removes."""
    writer = f"{os.getpid()}-{threading.get_ident()}"  # two stacks of one process may claim one path at once
    return f"{TEMPORARY_PREFIX}{name}.{writer}{TEMPORARY_SUFFIX}"


def is_temporary(name: str) -> bool:
    """Whether ``name`` comes from :func:`temporary_name`, or from a check of O_DIRECT."""
    return _TEMPORARY.fullmatch(name) is not None


def read_bytes(path: Path, bytes_max: int = DOCUMENT_BYTES_MAX) -> bytes:
    """Read a small file.

    Raises:
        OSError: it cannot be read, is longer than ``bytes_max``, or is a link, a pipe or a device.
    """
    with os.fdopen(open_file(path, os.O_RDONLY), "rb") as file:
        data = file.read(bytes_max + 1)
    if len(data) > bytes_max:
        raise OSError(errno.EFBIG, f"it is longer than {bytes_max} bytes", str(path))
    return data


def read_text(path: Path, bytes_max: int = DOCUMENT_BYTES_MAX) -> str:
    """Read a small file; bytes that are no UTF-8 are replaced. Raises as :func:`read_bytes`."""
    return read_bytes(path, bytes_max).decode("utf-8", "replace")


def publish_text(path: Path, content: str) -> None:
    """Write a small text file atomically and durably: after a power cut it has the old or the new content."""
    temporary = path.parent / temporary_name(path.name)
    with os.fdopen(create_file(temporary), "w", encoding="utf-8") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def text_of(document: Mapping[str, object]) -> str:
    """Content of a small JSON file."""
    return json.dumps(document, indent=2) + "\n"


def publish_document(path: Path, document: Mapping[str, object]) -> None:
    """Write a small JSON file atomically and durably."""
    publish_text(path, text_of(document))

"""Private places: directories and files that only the user of this process can read and change.

Frames are protected by checksums, not by signatures: a user who can replace stored files decides what a tier serves. So
a backend that keeps frames in files creates them with these functions, and refuses a place that others can change.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import tempfile
from operator import ne
from pathlib import Path

from tierkv.errors import BackendError

SHORT_FILE_BYTES_MAX = 1 << 20
"""Longest manifest, marker or other short file that is read, in bytes."""

_ROOT_USER = 0


def absolute_path(path: str | os.PathLike[str], option: str = "path") -> str:
    """Return a path as the directory that it names now, with ``~`` as the home directory.

    Options call it when they are made, which is when the description of a stack is read. A process may change its
    working directory later, and a tier is opened again after a failure: with a relative path it would begin a second,
    empty store in the new directory. May be called on any thread.

    Args:
        path: as the description has it, or as a program gives it.
        option: name of the tier's option that gives the path, for the error.

    Raises:
        ValueError: it is empty, or cannot name a directory. The message names option, value and fix.
    """
    path = os.fspath(path)
    if not path or "\0" in path:
        raise ValueError(f'{option} = {path!r}: give the directory of this tier, such as "/var/cache/tierkv/NAME"')
    try:
        return str(Path(path).expanduser().absolute())
    except OSError as error:
        raise ValueError(f"{option} = {path!r}: {error}; give an absolute path") from None
    except RuntimeError:
        raise ValueError(
            f"{option} = {path!r}: give a path without ~; the home directory of its user is unknown"
        ) from None


def exists(path: Path) -> bool:
    """Whether something has this name. May be called on any thread.

    Since Python 3.14 ``Path.exists`` also says no where it cannot know: a store that cannot be read would look new.

    Raises:
        OSError: it cannot be known: a directory may not be searched, the name is too long, or the device fails.
    """
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError, ValueError):  # no name has a null byte
        return False
    except OSError as error:
        if error.errno == errno.ELOOP:
            return False
        raise
    return True


def make_private_directory(path: Path, option: str = "path") -> None:
    """Create a directory, and the parents that it lacks, with mode 0700; an existing one is checked and kept as it is.

    New names are durable: a power cut must not take a directory whose files are durable. May be called on any thread.

    Args:
        path: of the directory.
        option: name of the tier's option that gives the path, for the error.

    Raises:
        BackendError: as :func:`check_private_directory`.
        OSError: it cannot be created.
    """
    for missing in reversed([each for each in (path, *path.parents) if not exists(each)]):
        missing.mkdir(0o700, exist_ok=True)
        with contextlib.suppress(OSError):  # a parent that this user may not read, or that its file system cannot sync
            _sync_names(missing.parent)
    check_private_directory(path, option)


def _sync_names(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def set_aside(path: Path) -> Path:
    """Rename a file, link or directory that cannot be used: its name ends with ``.damaged`` then. Returns its new path.

    One name is used again and again, so that damage does not fill a disk. May be called on any thread.

    Raises:
        OSError: it cannot be renamed.
    """
    aside = path.with_name(f"{path.name}.damaged")
    number = 2
    while os.path.lexists(aside) and aside.is_dir():  # only a directory could not be replaced
        aside = path.with_name(f"{path.name}.damaged-{number}")
        number += 1
    if path.is_dir() and not path.is_symlink():
        aside.unlink(missing_ok=True)
    return path.rename(aside)


def check_private_directory(path: Path, option: str = "path") -> None:
    """Check that no other user can replace the files in an existing directory. Changes nothing. On any thread.

    Args:
        path: of the directory.
        option: name of the tier's option that gives the path, for the error.

    Raises:
        BackendError: another user owns it, or every user may write in it. The message names the fix.
        OSError: it does not exist, or cannot be read.
    """
    status = path.stat()
    if status.st_uid not in (os.geteuid(), _ROOT_USER):
        raise BackendError(
            f"{path} belongs to the user with number {status.st_uid}, who could change stored frames: "
            f"`chown` it to {os.geteuid()}, or choose another `{option}`"
        )
    if status.st_mode & stat.S_IWOTH:
        raise BackendError(
            f"every user may write in {path}, and could change stored frames: `chmod o-w {path}`, "
            f"or choose another `{option}`"
        )


def why_not_writable(directory: Path) -> str:
    """Return why no file can be created in a directory; empty: one can. May be called on any thread.

    Creates a file and removes it. Permissions alone do not answer this: root has them also in a place that takes no
    files, such as ``/proc``.
    """
    if not directory.is_dir():
        return f"{directory} is not a directory"
    try:
        with tempfile.TemporaryFile(dir=directory, prefix=".tierkv."):
            return ""
    except PermissionError:
        return f"no permission to write in {directory}"
    except OSError as error:
        return f"no file can be created in {directory}: {error.strerror or error}"


def mount_point_of(directory: Path) -> Path:
    """Return the directory in which the file system of an existing directory is mounted. May be called on any thread.

    Args:
        directory: of a tier.

    Raises:
        OSError: it cannot be looked at.
    """
    place = directory.resolve()
    while place.parent.stat().st_dev == place.stat().st_dev and place != place.parent:
        place = place.parent
    return place


def has_other_file_system(mount_point: Path, device: int) -> bool:
    """Whether another file system is mounted in a place now. May be called on any thread.

    A directory that is gone with its file system may be begun again there. Where none is mounted it must not: its
    chunks would fill the file system below.

    Args:
        mount_point: as :func:`mount_point_of` found it.
        device: number of the file system that was mounted then.
    """
    try:
        return mount_point.stat().st_dev not in (device, mount_point.parent.stat().st_dev)
    except OSError:
        return False


def open_private(path: str, flags: int) -> int:
    """Open a file, created with mode 0600: the ``opener`` of :func:`open`. May be called on any thread.

    Args:
        path: of the file.
        flags: as of :func:`os.open`.

    Returns:
        The file descriptor.

    Raises:
        OSError: it cannot be opened.
    """
    return os.open(path, flags | os.O_CLOEXEC, 0o600)


def read_short_file(path: Path, bytes_max: int = SHORT_FILE_BYTES_MAX) -> bytes:
    """Read a short regular file. A link is not followed, and a pipe is not waited for. May be called on any thread.

    Args:
        path: of the file.
        bytes_max: longest content in bytes; no more is read into memory.

    Returns:
        The content.

    Raises:
        FileNotFoundError: there is no such file.
        OSError: it cannot be read, is longer, or is a link, a directory, a pipe or a device.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.ENXIO):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path)) from None
        raise
    with os.fdopen(fd, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file", str(path))
        content = bytearray()
        while len(content) <= bytes_max and (part := file.read(bytes_max + 1 - len(content))):
            content += part
    if len(content) > bytes_max:
        raise OSError(errno.EFBIG, f"it is longer than {bytes_max} bytes", str(path))
    return bytes(content)


def differs_in_one_byte(content: bytes, expected: bytes) -> bool:
    """Whether a short file is one that this program writes, but for one byte: it is damaged, not of another program.

    May be called on any thread.

    Args:
        content: as it was read.
        expected: as this program writes it.
    """
    return len(content) == len(expected) and sum(map(ne, content, expected)) == 1

"""The directory of an LMDB tier: whose it is, who may write, and whether its data can be trusted.

::

    <path>/tierkv-lmdb.json                   marks the directory as ours, with the version of this layout
    <path>/<fingerprint hex>/namespace.json   what the fingerprint stands for
    <path>/<fingerprint hex>/owner.lock       flock of the one process that may open it; holds its pid
    <path>/<fingerprint hex>/unsynced         there while data is written without syncing; holds the boot id
    <path>/<fingerprint hex>/data.mdb, lock.mdb
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tierkv.errors import BackendError, BackendUnavailableError, NamespaceMismatchError
from tierkv.types.namespace import Namespace

FORMAT = {"format": "tierkv-lmdb", "version": 1}
MARKER = "tierkv-lmdb.json"
MANIFEST = "namespace.json"
LOCK = "owner.lock"
UNSYNCED = "unsynced"
DATA_FILES = ("data.mdb", "lock.mdb")
LOCK_TRIES_S = (0.05, 0.1, 0.2)
"""Pauses between tries for the lock: `tierkv check` holds it for an instant."""

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class OwnerLock:
    """The right to open one namespace, held from :meth:`take` to :meth:`release`."""

    fd: int

    @classmethod
    def take(cls, path: Path, sleep: Callable[[float], None] = time.sleep) -> OwnerLock:
        """Lock the file at ``path``, creating it.

        Raises:
            BackendUnavailableError: another process, or another backend of this one, holds it.
        """
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            for pause_s in (*LOCK_TRIES_S, None):
                try:
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    if pause_s is None:
                        raise BackendUnavailableError(_in_use(path)) from None
                    sleep(pause_s)
                else:
                    break
            os.ftruncate(fd, 0)
            os.pwrite(fd, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd)

    def release(self) -> None:
        """Let the next one in."""
        os.close(self.fd)


def _in_use(path: Path) -> str:
    pid = path.read_text(errors="replace").strip() or "unknown"
    where = "this process" if pid == str(os.getpid()) else f"process {pid}"
    return (
        f"{path.parent}: in use by {where}. One process at a time may open a namespace of an LMDB tier: stop that one, "
        f"or give each its own path"
    )


def lock_holder(path: Path) -> str | None:
    """The pid (as text, for messages) of who holds the lock file at ``path``, or None. Changes nothing."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 32, 0).decode(errors="replace") or "unknown"
    finally:
        os.close(fd)
    return None


def claim_root(root: Path) -> None:
    """Make ``root`` a directory of ours, or see that it is one.

    Raises:
        NamespaceMismatchError: it holds something else, or a layout that this version does not know.
        OSError: it cannot be created or written.
    """
    root.mkdir(parents=True, exist_ok=True)
    trouble = foreign_content(root)
    if trouble:
        raise NamespaceMismatchError(trouble)
    if not (root / MARKER).exists():
        write_durably(root / MARKER, json.dumps(FORMAT))
    elif not os.access(root, os.W_OK):
        raise PermissionError(f"no permission to write in {root}")


def require_root(root: Path) -> None:
    """See that ``root`` may be read: it is a directory of ours, or may become one. Changes nothing.

    Raises:
        NamespaceMismatchError: it holds something else, or a layout that this version does not know.
        OSError: it is no directory, or cannot be read.
    """
    if not root.exists():
        if not next(path for path in root.absolute().parents if path.exists()).is_dir():
            raise NotADirectoryError(f"a part of {root} is no directory")
        _log.warning("%s: not there yet; until somebody writes it, all of its chunks are misses", root)
        return
    trouble = foreign_content(root)
    if trouble:
        raise NamespaceMismatchError(trouble)


def foreign_content(root: Path) -> str | None:
    """Why an existing ``root`` is not a directory of ours, or None if it is one or may become one."""
    names = {path.name for path in root.iterdir()}
    if MARKER in names:
        found = _read_json(root / MARKER)
        if found == FORMAT:
            return None
        return f"{root / MARKER} says {found!r}, and this version of tierkv-lmdb serves {FORMAT!r}: give another path"
    foreign = sorted(name for name in names if not name.startswith(f"{MARKER}.") and name != "lost+found")
    if not foreign:
        return None
    return f"{root} is not a directory of tierkv-lmdb: it has no {MARKER} but {foreign[0]!r}. Give an empty or new path"


def claim_namespace(directory: Path, namespace: Namespace) -> None:
    """Write what the namespace is, or see that it is the same. The caller holds the lock.

    Raises:
        NamespaceMismatchError: it is another one, or cannot be read.
    """
    manifest = directory / MANIFEST
    if manifest.exists():
        require_manifest(directory, namespace)
    else:
        write_durably(manifest, json.dumps(_description(namespace), indent=1, sort_keys=True))


def require_manifest(directory: Path, namespace: Namespace) -> None:
    """See that a directory is that of a namespace.

    Raises:
        NamespaceMismatchError: it is another one, or cannot be read.
    """
    manifest, wanted = directory / MANIFEST, _description(namespace)
    found = _read_json(manifest)
    if found != wanted:
        raise NamespaceMismatchError(
            f"{manifest} does not describe this namespace ({namespace.model!r}, fingerprint {directory.name}) but "
            f"{str(found)[:200]}. If the directory is not needed, remove {directory}"
        )


def _description(namespace: Namespace) -> object:
    plain = FORMAT | {"fingerprint": namespace.fingerprint().hex(), "namespace": namespace.describe()}
    return json.loads(json.dumps(plain))


def drop_data_of_another_boot(directory: Path) -> None:
    """Remove data that was written without syncing when the machine went down: LMDB may not survive reading it."""
    marker = directory / UNSYNCED
    if not marker.exists() or marker.read_text(errors="replace") == boot_id():
        return
    _log.warning("%s: the machine went down while data was not synced (durability = none); starting empty", directory)
    for name in DATA_FILES:
        (directory / name).unlink(missing_ok=True)
    marker.unlink()


def boot_id() -> str:
    """What tells one run of the machine from the next; where it is unknown, a fresh value that equals none."""
    try:
        return _BOOT_ID.read_text().strip()
    except OSError:
        return uuid.uuid4().hex


def write_durably(path: Path, text: str) -> None:
    """Create or replace a file so that a reader, or a crash, sees all of it or nothing."""
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def backend_error(error: OSError, path: Path, root: Path, tier: str) -> BackendError:
    """An error of the operating system, in words that name the path."""
    what = f"{path}: {error.strerror or error}"
    if root not in (path, *path.parents):
        what = f"{root}: cannot be used ({what})"
    return BackendError(f"{what}. Give a directory that this user can create and write", tier=tier)


def _read_json(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"unreadable content ({error})"

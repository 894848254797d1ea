"""The directories of a disk tier: who may use them, and what they belong to.

::

    <path>/tierkv-disk.json                     marker: this directory is ours, format version
    <path>/<namespace fingerprint>/namespace.json   what the namespace is, and the slot size
    <path>/<namespace fingerprint>/lock             held with flock by the process that has it open; its pid
    <path>/<namespace fingerprint>/index.log        tierkv_disk.index_log
    <path>/<namespace fingerprint>/segment-00000.dat ...   tierkv_disk.segments
"""

from __future__ import annotations

import fcntl
import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path

from tierkv.errors import BackendUnavailableError, NamespaceMismatchError
from tierkv.types.namespace import Namespace
from tierkv_disk.index_log import TEMPORARY_NAME as LOG_TEMPORARY_NAME
from tierkv_disk.segments import sync_directory

PROGRAM = "tierkv-disk"
FORMAT = 1
MARKER_NAME = "tierkv-disk.json"
NAMESPACE_NAME = "namespace.json"
LOCK_NAME = "lock"
_TEMPORARY_PREFIX = ".tierkv-disk."
_TEMPORARY_SUFFIX = ".tmp"
_NOT_FOREIGN = frozenset({"lost+found"})


def check_ours(path: Path) -> None:
    """Look whether ``path`` is absent, empty, or marked as ours in a format that we read. Changes nothing.

    Raises:
        NamespaceMismatchError: it is a file, somebody else's directory, or of another format version.
        OSError: it cannot be looked at.
    """
    marker = path / MARKER_NAME
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise NamespaceMismatchError(
            f"{path} is, or lies below, a file; `path` must name a directory: choose another one"
        ) from None
    foreign = sorted(name for name in names - _NOT_FOREIGN if not _is_temporary(name))
    # The second look is for a process that created the marker while we listed.
    if foreign and MARKER_NAME not in names and not marker.exists():
        raise NamespaceMismatchError(
            f"{path} holds {foreign[0]!r}{f' and {len(foreign) - 1} more' if foreign[1:] else ''} "
            f"and no {MARKER_NAME}: not a {PROGRAM} directory, left untouched; give `path` an empty or new one"
        )
    if marker.exists():
        _check_document(marker, read_document(marker))


def claim(path: Path) -> None:
    """Create ``path`` if absent and mark it as ours.

    Raises:
        NamespaceMismatchError: see :func:`check_ours`; nothing was touched.
        OSError: it cannot be created or written.
    """
    check_ours(path)
    path.mkdir(parents=True, exist_ok=True)
    if not (path / MARKER_NAME).exists():
        try:
            publish_document(path / MARKER_NAME, {"program": PROGRAM, "format": FORMAT})
        except FileNotFoundError:
            # Another process that claims the same directory swept our temporary after publishing its own marker.
            check_ours(path)
    sweep(path)


def enter_namespace(path: Path, namespace: Namespace) -> Path:
    """Create the namespace's directory in a claimed ``path``, and return it.

    Raises:
        OSError: it cannot be created.
    """
    directory = path / namespace.fingerprint().hex()
    if not directory.is_dir():
        directory.mkdir(exist_ok=True)
        sync_directory(path)
    return directory


def settle_slot_bytes(directory: Path, namespace: Namespace, slot_bytes: int) -> int:
    """The slot size of a locked namespace directory: that of its namespace.json, which is written if it is new.

    Raises:
        NamespaceMismatchError: what lies there belongs to another namespace or format, or its slots are too small.
        OSError: it cannot be read or written.
    """
    manifest = directory / NAMESPACE_NAME
    if not manifest.exists():
        remains = sorted(
            entry.name for entry in directory.iterdir() if entry.name.startswith(("segment-", "index.log"))
        )
        if remains:
            raise NamespaceMismatchError(
                f"{directory} has {remains[0]} but no {NAMESPACE_NAME}: put that file back, or remove the directory"
            )
        described = {"program": PROGRAM, "format": FORMAT, "slot_bytes": slot_bytes, "namespace": namespace.describe()}
        publish_document(manifest, described)
        return slot_bytes
    document = read_document(manifest)
    _check_document(manifest, document)
    expected = json.loads(json.dumps(namespace.describe()))
    if document.get("namespace") != expected:
        raise NamespaceMismatchError(
            f"{manifest} describes another namespace than {directory.name}: remove {directory}"
        )
    stored = document.get("slot_bytes")
    if not isinstance(stored, int) or stored < slot_bytes:
        raise NamespaceMismatchError(
            f"{manifest} says slot_bytes = {stored!r}, but frames of this stack need {slot_bytes}: "
            f"remove {directory}, or set a new `epoch` in the namespace"
        )
    return stored


class NamespaceLock:
    """Sole use of a namespace directory, until :meth:`release` or the end of the process."""

    def __init__(self, directory: Path) -> None:
        """Take the lock.

        Raises:
            BackendUnavailableError: another opening has it; the message names its process.
            OSError: the lock file cannot be used.
        """
        path = directory / LOCK_NAME
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(self._fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(self._fd)
            raise BackendUnavailableError(
                f"{directory} is in use by process {owner}: stop it, or give this one another `path` "
                "(one process at a time owns a namespace of a disk tier)"
            ) from None
        except OSError:
            os.close(self._fd)
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let others in."""
        os.close(self._fd)


def lock_owner(directory: Path) -> str | None:
    """The pid in the lock file if the lock is held now, else None. Changes nothing."""
    try:
        fd = os.open(directory / LOCK_NAME, os.O_RDWR)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return os.pread(fd, 20, 0).decode("ascii", "replace").strip() or "unknown"
    else:
        return None
    finally:
        os.close(fd)


def sweep(directory: Path) -> None:
    """Remove temporary files that a killed process left."""
    for entry in directory.iterdir():
        if _is_temporary(entry.name) or entry.name == LOG_TEMPORARY_NAME:
            entry.unlink(missing_ok=True)


def publish_document(path: Path, document: Mapping[str, object]) -> None:
    """Write a small JSON file so that it is there whole or not at all, also after a power cut."""
    writer = f"{os.getpid()}-{threading.get_ident()}"  # two stacks of one process may claim one path at once
    temporary = path.parent / f"{_TEMPORARY_PREFIX}{path.name}.{writer}{_TEMPORARY_SUFFIX}"
    with temporary.open("w", encoding="utf-8") as file:
        json.dump(document, file, indent=2)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    sync_directory(path.parent)


def read_document(path: Path) -> dict[str, object]:
    """Read a small JSON file of ours.

    Raises:
        NamespaceMismatchError: it is not one.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise NamespaceMismatchError(f"{path} is damaged or not from {PROGRAM}: repair it, or remove {path.parent}")
    return document


def _check_document(path: Path, document: Mapping[str, object]) -> None:
    if document.get("program") != PROGRAM:
        raise NamespaceMismatchError(f"{path} belongs to another program: choose another `path`")
    if document.get("format") != FORMAT:
        raise NamespaceMismatchError(
            f"{path} has format {document.get('format')!r}, this {PROGRAM} reads {FORMAT}: "
            f"install the version that wrote it, or remove {path.parent}"
        )


def _is_temporary(name: str) -> bool:
    return name.startswith(_TEMPORARY_PREFIX) and name.endswith(_TEMPORARY_SUFFIX)

"""Names and manifests in the directory of a disk tier.

::

    <path>/tierkv-disk.json                     marker of this program, format version
    <path>/directory.lock                       tierkv_disk.directory.shared
    <path>/<namespace fingerprint>/namespace.json   description of the namespace, format version
    <path>/<namespace fingerprint>/lock             tierkv_disk.directory.locks
    <path>/<namespace fingerprint>/quarantine.jsonl tierkv_disk.space.quarantine
    <path>/<namespace fingerprint>/index.log        tierkv_disk.log.index_log
    <path>/<namespace fingerprint>/segment-00000.dat ...   tierkv_disk.segments.segment_files
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path

from tierkv.abc.logs import plugin_logger
from tierkv.abc.places import check_private_directory, differs_in_one_byte, exists, make_private_directory
from tierkv.errors import NamespaceMismatchError
from tierkv.types.namespace import Namespace
from tierkv_disk.directory.files import (
    NotOurFileError,
    is_removed_namespace,
    is_temporary,
    publish_document,
    read_bytes,
    read_text,
    set_aside,
    sync_directory,
    text_of,
)
from tierkv_disk.extents import PAGE_BYTES
from tierkv_disk.failures import BAD_MEDIUM, NO_FILES

logger = plugin_logger("tierkv_disk")
PROGRAM = "tierkv-disk"
MARKER_FORMAT = 1
NAMESPACE_FORMAT = 2
"""Version of a namespace's files together: log, segments, quarantine. Format 1, with slots of one size, is read and
upgraded."""
MARKER_NAME = "tierkv-disk.json"
NAMESPACE_NAME = "namespace.json"
_MARKER = {"program": PROGRAM, "format": MARKER_FORMAT}
LOG_NAME = "index.log"
LOG_TEMPORARY_NAME = "index.log.tmp"
_NOT_FOREIGN = frozenset({"lost+found"})
_OURS = re.compile(r"tierkv-disk\.json(\.damaged(-\d+)?)?|directory\.lock(\.damaged(-\d+)?)?|[0-9a-f]{32}")
"""Names beside which a damaged marker is certainly of this program. A lost one needs a manifest among them."""


class DamagedDocumentError(NamespaceMismatchError):
    """The file cannot be read or parsed, or has fields that this program never writes."""


class WrongNamespaceError(NamespaceMismatchError):
    """A manifest is whole and describes another namespace than its directory's name, or is missing beside its files."""


def check_directory(path: Path) -> None:
    """Check that ``path`` is absent, empty, or marked as a tierkv-disk directory of a known format. Changes nothing.

    A damaged or lost marker beside nothing but this program's own files is no error: :func:`claim_directory` writes it
    anew.

    Raises:
        NamespaceMismatchError: it is a file, the directory of another program, or of a newer format.
        BackendError: other users may change its files.
        OSError: it cannot be read.
    """
    marker = path / MARKER_NAME
    try:
        names = {entry.name for entry in path.iterdir()}
    except FileNotFoundError:
        return
    except NotADirectoryError:
        raise NamespaceMismatchError(
            f"{path} is a file or below a file; `path` must name a directory: choose another one"
        ) from None
    check_private_directory(path)
    foreign = sorted(name for name in names - _NOT_FOREIGN if not is_temporary(name))
    # The second look covers a process that created the marker during the listing.
    if foreign and MARKER_NAME not in names and not exists(marker) and not _lost_its_marker(path, foreign):
        raise NamespaceMismatchError(
            f"{path} holds {foreign[0]!r}{f' and {len(foreign) - 1} more' if foreign[1:] else ''} "
            f"and no {MARKER_NAME}: not a {PROGRAM} directory, left unchanged; give `path` an empty or new one"
        )
    if os.path.lexists(marker):
        try:
            _check_document(marker, read_document(marker), MARKER_FORMAT, _MARKER)
        except DamagedDocumentError:
            if any(_OURS.fullmatch(name) is None for name in foreign):
                raise


def _lost_its_marker(path: Path, names: Sequence[str]) -> bool:
    """Whether names in a directory without a marker are all this program's, and a manifest shows it, or none has data.

    A tool that removes old files leaves empty directories; and a process that had it open may create its lock again.
    """
    if not all(map(_OURS.fullmatch, names)):
        return False
    return any(_is_manifest(path / name / NAMESPACE_NAME) for name in names) or all(
        _is_empty(path / name) for name in names
    )


def _is_empty(path: Path) -> bool:
    status = path.lstat()
    if stat.S_ISDIR(status.st_mode):
        return not any(path.iterdir())
    return stat.S_ISREG(status.st_mode) and status.st_size == 0


def _is_manifest(path: Path) -> bool:
    try:
        return read_document(path).get("program") == PROGRAM
    except DamagedDocumentError:
        return False


def is_unclaimed(path: Path) -> bool:
    """Whether a directory is empty, but for what a killed :func:`claim_directory` left. Raises OSError."""
    return all(is_temporary(entry.name) for entry in path.iterdir())


def claim_directory(path: Path) -> None:
    """Create ``path`` if absent and mark it as a tierkv-disk directory.

    Raises:
        NamespaceMismatchError: as :func:`check_directory`; nothing was changed.
        OSError: it cannot be created or written.
    """
    check_directory(path)
    make_private_directory(path)
    _set_damaged_aside(path / MARKER_NAME)
    if not exists(path / MARKER_NAME):
        if any(_OURS.fullmatch(entry.name) for entry in path.iterdir() if entry.is_dir()):
            logger.warning("%s has no %s: it is written anew", path, MARKER_NAME)
        try:
            publish_document(path / MARKER_NAME, _MARKER)
        except FileNotFoundError:
            # Another process claimed the same directory, and removed our temporary file after publishing its marker.
            check_directory(path)
    remove_temporaries(path)


def _set_damaged_aside(marker: Path) -> None:
    """Set a damaged marker aside. Another process may do the same at once."""
    try:
        if os.path.lexists(marker):
            _check_document(marker, read_document(marker), MARKER_FORMAT, _MARKER)
    except DamagedDocumentError as error:
        with contextlib.suppress(FileNotFoundError):
            set_aside(marker, error)


def make_namespace_directory(path: Path, namespace: Namespace) -> Path:
    """Create the namespace's directory in a claimed ``path`` if absent. Returns its path.

    Raises:
        NamespaceMismatchError: a link or a file has its name.
        BackendError: other users may change its files.
        OSError: it cannot be created.
    """
    directory = path / namespace.fingerprint().hex()
    if os.path.lexists(directory) and not stat.S_ISDIR(directory.lstat().st_mode):
        raise NamespaceMismatchError(f"{directory} is a link or a file, not a directory of {PROGRAM}: remove it")
    if not directory.is_dir():
        directory.mkdir(0o700, exist_ok=True)
        sync_directory(path)
    check_private_directory(directory)
    return directory


def read_slot_bytes(directory: Path, namespace: Namespace) -> int:
    """Slot size in the namespace.json of a locked directory, for format 1; 0 for the current format.

    Writes the file if the namespace is new.

    Raises:
        NamespaceMismatchError: the directory belongs to another namespace or a newer format.
        OSError: it cannot be read or written.
    """
    manifest = directory / NAMESPACE_NAME
    if not exists(manifest):
        remains = sorted(
            entry.name for entry in directory.iterdir() if entry.name.startswith(("segment-", "index.log"))
        )
        if remains:
            raise WrongNamespaceError(
                f"{directory} has {remains[0]} but no {NAMESPACE_NAME}: put that file back, or remove the directory"
            )
        publish_manifest(directory, namespace)
        return 0
    document = read_document(manifest)
    _check_document(manifest, document, NAMESPACE_FORMAT, _manifest_of(namespace))
    expected = json.loads(json.dumps(namespace.describe()))
    if document.get("namespace") != expected:
        raise WrongNamespaceError(f"{manifest} describes another namespace than {directory.name}: remove {directory}")
    if document.get("format") == NAMESPACE_FORMAT:
        return 0
    slot_bytes = document.get("slot_bytes")
    if not isinstance(slot_bytes, int) or slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
        raise DamagedDocumentError(f"{manifest} says slot_bytes = {slot_bytes!r}: repair it, or remove {directory}")
    return slot_bytes


def publish_manifest(directory: Path, namespace: Namespace) -> None:
    """Write a namespace.json of the current format.

    Raises:
        OSError: it cannot be written.
    """
    publish_document(directory / NAMESPACE_NAME, _manifest_of(namespace))


def _manifest_of(namespace: Namespace) -> dict[str, object]:
    return {"program": PROGRAM, "format": NAMESPACE_FORMAT, "namespace": namespace.describe()}


def replace_damaged_manifest(directory: Path, namespace: Namespace, why: object) -> None:
    """Rename a damaged namespace.json, log it, and write a new one; one that is missing is only written.

    Raises:
        OSError: it cannot be renamed or written.
    """
    if os.path.lexists(directory / NAMESPACE_NAME):
        set_aside(directory / NAMESPACE_NAME, why)
    else:
        logger.warning("%s has no %s: it is written anew", directory, NAMESPACE_NAME)
    publish_manifest(directory, namespace)


def remove_temporaries(directory: Path, *names: str) -> None:
    """Remove temporary files and half-removed namespaces of killed processes. names: further temporary files."""
    for entry in directory.iterdir():
        if not is_temporary(entry.name) and entry.name not in names:
            continue
        if entry.is_symlink() or not entry.is_dir():
            entry.unlink(missing_ok=True)
        elif is_removed_namespace(entry.name):
            shutil.rmtree(entry, ignore_errors=True)


def read_document(path: Path) -> dict[str, object]:
    """Read a small JSON file of this program.

    Raises:
        DamagedDocumentError: it is damaged, absent or of another program, or the disk does not read it.
        OSError: this process has no descriptor or memory to read it. That says nothing about the file.
    """
    try:
        document = json.loads(read_text(path))
    except NotOurFileError as error:
        raise DamagedDocumentError(f"{path} is not used, because {error.strerror}: remove it") from error
    except OSError as error:
        if error.errno in NO_FILES:
            raise
        if error.errno in BAD_MEDIUM:
            raise DamagedDocumentError(f"{path} cannot be read ({error.strerror}): check the disk") from error
        document = None
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise DamagedDocumentError(f"{path} is damaged or not from {PROGRAM}: repair it, or remove {path.parent}")
    return document


def _check_document(path: Path, document: Mapping[str, object], newest: int, written: Mapping[str, object]) -> None:
    """Check program and format of a document. written: as this version writes it."""
    if document.get("program") != PROGRAM:
        if differs_in_one_byte(read_bytes(path), text_of(written).encode()):
            raise DamagedDocumentError(f"{path} has a damaged byte: repair it, or remove {path.parent}")
        raise NamespaceMismatchError(f"{path} belongs to another program: choose another `path`")
    found = document.get("format")
    if type(found) is not int or found < 1:
        raise DamagedDocumentError(f"{path} has format {found!r}, which no {PROGRAM} writes: remove {path.parent}")
    if found > newest:
        raise NamespaceMismatchError(
            f"{path} has format {found!r}, written by a newer {PROGRAM}; this one reads up to {newest}: "
            f"upgrade {PROGRAM}, or remove {path.parent}"
        )

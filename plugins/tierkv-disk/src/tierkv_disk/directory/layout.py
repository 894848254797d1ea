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

import json
import shutil
from collections.abc import Mapping
from pathlib import Path

from tierkv.errors import NamespaceMismatchError
from tierkv.types.namespace import Namespace
from tierkv_disk.directory.files import is_temporary, publish_document, sync_directory
from tierkv_disk.extents import PAGE_BYTES

PROGRAM = "tierkv-disk"
MARKER_FORMAT = 1
NAMESPACE_FORMAT = 2
"""Version of a namespace's files together: log, segments, quarantine. Format 1, with slots of one size, is read and
upgraded."""
MARKER_NAME = "tierkv-disk.json"
NAMESPACE_NAME = "namespace.json"
LOG_NAME = "index.log"
LOG_TEMPORARY_NAME = "index.log.tmp"
_NOT_FOREIGN = frozenset({"lost+found"})


def check_directory(path: Path) -> None:
    """Check that ``path`` is absent, empty, or marked as a tierkv-disk directory of a known format. Changes nothing.

    Raises:
        NamespaceMismatchError: it is a file, the directory of another program, or of a newer format.
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
    foreign = sorted(name for name in names - _NOT_FOREIGN if not is_temporary(name))
    # The second look covers a process that created the marker during the listing.
    if foreign and MARKER_NAME not in names and not marker.exists():
        raise NamespaceMismatchError(
            f"{path} holds {foreign[0]!r}{f' and {len(foreign) - 1} more' if foreign[1:] else ''} "
            f"and no {MARKER_NAME}: not a {PROGRAM} directory, left unchanged; give `path` an empty or new one"
        )
    if marker.exists():
        _check_document(marker, read_document(marker), MARKER_FORMAT)


def claim_directory(path: Path) -> None:
    """Create ``path`` if absent and mark it as a tierkv-disk directory.

    Raises:
        NamespaceMismatchError: as :func:`check_directory`; nothing was changed.
        OSError: it cannot be created or written.
    """
    check_directory(path)
    path.mkdir(parents=True, exist_ok=True)
    if not (path / MARKER_NAME).exists():
        try:
            publish_document(path / MARKER_NAME, {"program": PROGRAM, "format": MARKER_FORMAT})
        except FileNotFoundError:
            # Another process claimed the same directory, and removed our temporary file after publishing its marker.
            check_directory(path)
    remove_temporaries(path)


def make_namespace_directory(path: Path, namespace: Namespace) -> Path:
    """Create the namespace's directory in a claimed ``path`` if absent. Returns its path.

    Raises:
        OSError: it cannot be created.
    """
    directory = path / namespace.fingerprint().hex()
    if not directory.is_dir():
        directory.mkdir(exist_ok=True)
        sync_directory(path)
    return directory


def read_slot_bytes(directory: Path, namespace: Namespace) -> int:
    """Slot size in the namespace.json of a locked directory, for format 1; 0 for the current format.

    Writes the file if the namespace is new.

    Raises:
        NamespaceMismatchError: the directory belongs to another namespace or a newer format.
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
        publish_manifest(directory, namespace)
        return 0
    document = read_document(manifest)
    _check_document(manifest, document, NAMESPACE_FORMAT)
    expected = json.loads(json.dumps(namespace.describe()))
    if document.get("namespace") != expected:
        raise NamespaceMismatchError(
            f"{manifest} describes another namespace than {directory.name}: remove {directory}"
        )
    if document.get("format") == NAMESPACE_FORMAT:
        return 0
    slot_bytes = document.get("slot_bytes")
    if not isinstance(slot_bytes, int) or slot_bytes <= 0 or slot_bytes % PAGE_BYTES:
        raise NamespaceMismatchError(f"{manifest} says slot_bytes = {slot_bytes!r}: repair it, or remove {directory}")
    return slot_bytes


def publish_manifest(directory: Path, namespace: Namespace) -> None:
    """Write a namespace.json of the current format.

    Raises:
        OSError: it cannot be written.
    """
    described = {"program": PROGRAM, "format": NAMESPACE_FORMAT, "namespace": namespace.describe()}
    publish_document(directory / NAMESPACE_NAME, described)


def remove_temporaries(directory: Path) -> None:
    """Remove temporary files and half-removed namespaces of killed processes."""
    for entry in directory.iterdir():
        if not is_temporary(entry.name) and entry.name != LOG_TEMPORARY_NAME:
            continue
        if entry.is_dir() and not entry.is_symlink():
            shutil.rmtree(entry, ignore_errors=True)
        else:
            entry.unlink(missing_ok=True)


def read_document(path: Path) -> dict[str, object]:
    """Read a small JSON file of this program.

    Raises:
        NamespaceMismatchError: it is damaged or of another program.
    """
    try:
        document = json.loads(path.read_text("utf-8"))
    except ValueError:
        document = None
    if not isinstance(document, dict):
        raise NamespaceMismatchError(f"{path} is damaged or not from {PROGRAM}: repair it, or remove {path.parent}")
    return document


def _check_document(path: Path, document: Mapping[str, object], newest: int) -> None:
    if document.get("program") != PROGRAM:
        raise NamespaceMismatchError(f"{path} belongs to another program: choose another `path`")
    found = document.get("format")
    if not isinstance(found, int) or not 1 <= found <= newest:
        raise NamespaceMismatchError(
            f"{path} has format {found!r}, written by a newer {PROGRAM}; this one reads up to {newest}: "
            f"upgrade {PROGRAM}, or remove {path.parent}"
        )

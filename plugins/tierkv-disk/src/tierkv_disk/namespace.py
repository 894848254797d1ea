"""A namespace directory that this process has locked, and the settings it is used with."""

from __future__ import annotations

from dataclasses import dataclass

from tierkv.types.namespace import Namespace
from tierkv_disk.directory import layout
from tierkv_disk.directory.locks import NamespaceLock
from tierkv_disk.recovery.recovery import NamespaceFiles


@dataclass(frozen=True, slots=True)
class LockedNamespace:
    """Files, lock and settings of one namespace, as handed to the backend."""

    tier: str
    """Name of the tier, for messages."""
    namespace: Namespace
    files: NamespaceFiles
    lock: NamespaceLock
    frame_bytes_max: int
    """Length of the longest frame, rounded up to whole pages."""
    sync: bool
    """Whether writes are forced to the device before they are acknowledged."""
    sync_each: bool
    """Whether each frame of a batch is forced by itself."""
    quarantine_bytes_max: int

    def mark_upgraded(self) -> None:
        """Record in the manifest that the files have the newest format.

        Raises:
            OSError: the manifest cannot be written.
        """
        if self.files.slot_bytes:
            layout.publish_manifest(self.files.directory, self.namespace)

    def release(self) -> None:
        """Close the segment files, then unlock the directory."""
        try:
            self.files.segments.close()
        finally:  # a device may report an earlier failure at the close of a file
            self.lock.release()

"""The backend: frames in slots, keys in a table, the table's history in a log.

Order of a write, which is all of the crash safety: frame into a free slot; force it to the device; append the log
record and force that; only then tell the table, free the old slot and answer. A kill between any two leaves the old
state or the new.

Locks. ``_commit_lock`` serialises log appends (so that log and table change in the same order); ``_table_lock`` guards
the table and the slots, for a few instructions; ``_grow_lock`` lets one thread at a time allocate a segment. None is
held while frames move. They nest in the order commit, grow, table.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierkv.abc import BackendContext, Entry, ReadRequest, ReadResult, WriteRequest, WriteResult
from tierkv.errors import BackendError, ConfigError, CorruptFrameError, OutOfSpaceError, TierKVError
from tierkv.types.keys import Key
from tierkv_disk import layout
from tierkv_disk.directio import FileIO, round_up, supports_direct
from tierkv_disk.failures import as_tier_error
from tierkv_disk.index_log import KEY_BYTES_MAX, IndexLog, LogIdentity, Record, RecordKind
from tierkv_disk.options import DiskOptions
from tierkv_disk.recovery import Location, Recovery, mostly_dead, put_records, recover
from tierkv_disk.segments import Limits, SegmentFiles
from tierkv_disk.slots import Slot

FRAME_BYTES_MAX = 2**32 - 1
logger = logging.getLogger("tierkv_disk")

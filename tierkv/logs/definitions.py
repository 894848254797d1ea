"""Definitions of all log events: name, level, text, fields and advice. docs/reference/logs.md is made from them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from enum import Enum


class Rate(Enum):
    """Time between two lines about one event of one tier, while the event goes on."""

    GROWING = "growing"
    """The interval, then twice as long each time, up to an hour; the interval again after a quiet one."""
    STATE = "state"
    """As GROWING, after some lines at once. A state that has lasted for the interval is written then: the latest line
    is the present state."""
    ONCE = "once"
    """No second line in the life of a stack."""


@dataclass(frozen=True, slots=True)
class LogEvent:
    """One kind of log line."""

    name: str
    """Value of the field ``event``."""
    level: int
    """Level of the record, as a number of :mod:`logging`."""
    text: str
    """Beginning of the line."""
    fields: tuple[str, ...]
    """Names of its own fields, in the order of the line."""
    advice: str
    """Action that it calls for; empty if none."""
    rate: Rate = Rate.GROWING
    """Time to the next line."""


def _info(name: str, text: str, *fields: str, advice: str = "", rate: Rate = Rate.STATE) -> LogEvent:
    return LogEvent(name, logging.INFO, text, fields, advice, rate)


def _warning(name: str, text: str, *fields: str, advice: str) -> LogEvent:
    return LogEvent(name, logging.WARNING, text, fields, advice)


def _state(name: str, text: str, *fields: str, advice: str = "") -> LogEvent:
    return LogEvent(name, logging.WARNING, text, fields, advice, Rate.STATE)


# -- start and stop ----------------------------------------------------------------------------------------------------

STACK_OPENED = _info(
    "stack_opened", "stack opened", "version", "model", "namespace", "tiers", "host_bytes", "chunks", "seconds"
)
TIER_OPENED = _info("tier_opened", "tier opened", "tier", "backend", "chunks", "held_bytes", "capacity_bytes")
TIER_LEFT_OUT = LogEvent(
    "tier_left_out",
    logging.ERROR,
    "the stack opens without this tier for the present; required = true makes this an error",
    ("tier", "reason"),
    "Remove the cause. The tier is tried again until it opens, and joins then.",
)
TIER_JOINED = _state(
    "tier_joined",
    "tier that the stack had opened without is in service",
    *("tier", "attempts", "chunks", "held_bytes", "capacity_bytes"),
)
TIER_STAYS_OUT = _warning(
    "tier_stays_out",
    "tier that the stack had opened without is not tried again",
    *("tier", "reason"),
    advice="Remove the cause, then call `stack.tiers.attach` or restart.",
)
TIER_OPENED_LATE = _warning(
    "tier_opened_late",
    "backend was opened after its deadline, and is closed again",
    "tier",
    advice="Raise `open_deadline_s` if the backend only needs longer.",
)
TIER_ATTACHED = _info("tier_attached", "tier attached", "tier", "chunks", "held_bytes", "capacity_bytes")
TIER_DETACHED = _info("tier_detached", "tier detached", "tier")
TIER_NOT_CLOSED = _warning(
    "tier_not_closed",
    "backend was not closed cleanly",
    "tier",
    "reason",
    advice="See the reason; report it to the plugin.",
)
STACK_CLOSED = _info("stack_closed", "stack closed", "written", "dropped", "seconds")
STACK_CLOSED_WITH_LOSS = _warning(
    "stack_closed_with_loss",
    "stack closed before all chunks had reached their tiers",
    *("written", "dropped", "abandoned_calls", "seconds"),
    advice="The chunks are computed again. Give `close` more time, or see which tier was slow.",
)

# -- service of a tier -------------------------------------------------------------------------------------------------

TIER_OUT_OF_SERVICE = _state(
    "tier_out_of_service",
    "tier is out of service",
    *("tier", "reason"),
    advice="Its chunks are misses. Remove the cause; trials are sent, at least one every `breaker_cooldown_s`.",
)
TIER_IN_SERVICE = _state("tier_in_service", "tier is in service again", "tier", "reason", "seconds_out")
TIER_NOT_WRITABLE = _state(
    "tier_not_writable",
    "tier cannot be written, and is only read",
    *("tier", "reason"),
    advice="Check for a read-only or full file system, or a worn-out device. Writes go on by themselves.",
)
TIER_WRITABLE = _state("tier_writable", "tier can be written again", "tier", "seconds_out")
TIER_SLOW = _state(
    "tier_slow",
    "the tier takes longer than computing what it brings; its hits are shortened, and requests do not wait for answers "
    "of a shared one",
    *("tier", "times"),
    advice="Expected of a tier that is slower than the engine. Otherwise see `tierkv_tier_read_seconds`, and what else "
    'uses the storage. `lookup.recompute = "off"` loads every hit all the same.',
)
TIER_FAST = _state("tier_fast", "the tier takes less than computing again", "tier", "times")
TIER_FULL = _warning(
    "tier_full",
    "storage of the tier has no room below its capacity",
    *("tier", "chunks", "reason"),
    advice="Free space, or lower `capacity`. The tier keeps what fits, and asks for more room after a while.",
)
TIER_EVICTS = _info(
    "tier_evicts",
    "tier has reached its capacity, and evicts",
    "tier",
    "chunks",
    advice="None: a cache fills up.",
    rate=Rate.ONCE,
)

# -- failures ----------------------------------------------------------------------------------------------------------

FRAME_DAMAGED = _warning(
    "frame_damaged",
    "damaged frames were refused; their chunks are misses",
    *("tier", "chunks", "reason"),
    advice="A single one is deleted and written again. A growing number: check the device, and what else writes there.",
)
FRAME_IN_CLEAR = _warning(
    "frame_in_clear",
    "frames in the clear were found in an encrypted tier",
    *("tier", "chunks", "reason"),
    advice="Expected once, while a tier is moved to encryption (`accept_clear`). Otherwise find out who wrote them.",
)
FRAME_UNREADABLE = _warning(
    "frame_unreadable",
    "frames are whole, and cannot be read here",
    *("tier", "chunks", "reason"),
    advice="Install the missing codec or give the missing key, as the reason says.",
)
OPERATION_FAILED = _warning(
    "operation_failed",
    "operations of the backend failed; their chunks are misses",
    *("tier", "verb", "chunks", "reason"),
    advice="One fault costs its chunks. Failures in a row take the tier out of service.",
)
DEADLINE_MISSED = _warning(
    "deadline_missed",
    "operations missed their deadline",
    *("tier", "verb", "chunks", "deadline_s"),
    advice="A call took too long, or none ended meanwhile: the storage is slow or hangs. See "
    "`tierkv_tier_read_seconds`, and the deadlines of the tier.",
)
QUEUE_FULL = _warning(
    "queue_full",
    "operations were refused, because too many wait for the tier",
    *("tier", "verb", "chunks"),
    advice="The tier is slower than its load. Give it more `io_threads`, or write less (`write`).",
)
WRITES_DROPPED = _warning(
    "writes_dropped",
    "chunks were not written to the tier",
    *("tier", "chunks"),
    advice="Its writes are slower than the engine's stores. Raise `queue_bytes_max`, or write on reuse.",
)
HOST_FULL = _warning(
    "host_full",
    "the host tier had no room for stores",
    "batches",
    advice="Raise `host.capacity`, or lower `host.reserved_share`.",
)
LOOKUP_LATE = _warning(
    "lookup_late",
    "a tier delivered nothing for lookup.deadline_s; the lookup was answered with what was ready",
    *("request", "tiers"),
    advice="The chunks are computed. `tiers` are those at work at that moment, the one behind its deadlines first; see "
    "`tierkv_tier_read_seconds`.",
)
REQUESTS_WAIT = _warning(
    "requests_wait",
    "requests wait for chunks that a tier has, and the oldest has got none for some seconds",
    *("slots", "first_reads", "age_s"),
    advice="`slots`: other requests hold or copy all that `host.reserved_share` allows. `first_reads`: a tier that was "
    "just opened does not answer; see `tierkv_tier_late_ops`.",
)
READ_AHEAD_STOPPED = _warning(
    "read_ahead_stopped",
    "reading ahead has stopped: too many chunks were read for nothing; it continues after enough other reads",
    *("chunks", "one_in"),
    advice="Requests are aborted often, or wait for long. Nothing is lost but time.",
)
POLICY_FAILED = _warning(
    "policy_failed",
    "eviction policy failed, and is no longer called",
    *("tier", "failures"),
    advice="Report it to the plugin. The tier evicts in the order of use.",
)
OBSERVER_FAILED = _warning(
    "observer_failed",
    "an observer of cache events failed, or was too slow",
    *("batches", "reason"),
    advice="Report it to the plugin.",
)
EVENTS_DROPPED = _warning(
    "events_dropped",
    "cache events were dropped, because the engine did not take them",
    "chunks",
    advice="Set `events.enabled = false` if the engine needs none.",
)
EVENTS_UNDESCRIBED = _warning(
    "events_undescribed", "cache events have placeholders", "reason", advice="See the reason."
)
PLUGIN_NOTE = _state(
    "plugin_note",
    "any text, under the logger of a plugin's package",
    "tier",
    advice="The text says what only the plugin knows, such as a directory that was removed.",
)
HINT_IGNORED = _warning(
    "hint_ignored", "a hint of a request is ignored", "reason", advice="Correct the client; see the reference of hints."
)
CODEC_NOT_OPENED = _warning(
    "codec_not_opened",
    "codec cannot be used; frames that were written with it are misses",
    *("codec", "reason"),
    advice="None, unless tiers hold such frames.",
)
BUFFER_KEPT = _warning(
    "buffer_kept",
    "backend keeps a buffer after the end of its call; the buffer is not used again",
    "tier",
    advice="Report it to the plugin.",
)
RECORD_NOT_WRITTEN = _warning(
    "record_not_written",
    "the record cannot be written",
    *("path", "reason"),
    advice="`tierkv explain` lacks these entries. Free space, or check the permissions.",
)
TOKENS_NOT_KEPT = _warning(
    "tokens_not_kept",
    "tokens of stored chunks cannot be kept, or were lost",
    "reason",
    advice="After a restart events describe fewer chunks. Free space, or check what is at `events.tokens_path`.",
)
TOKENS_SET_ASIDE = _warning(
    "tokens_set_aside",
    "the file of kept tokens is damaged; a new one is begun",
    *("path", "reason"),
    advice="None: events describe fewer chunks for a while. Repeated ones: test the disk.",
)
CHUNK_REFUSED = _warning(
    "chunk_refused",
    "a damaged chunk was refused on its way to the GPU; its tokens are computed",
    *("key", "reason"),
    advice="Host memory was changed by another writer, or is faulty. Repeated ones: test the memory.",
)
CHUNK_NOT_COPIED = LogEvent(
    "chunk_not_copied",
    logging.ERROR,
    "a chunk could not be copied between host and GPU; its tokens are computed",
    ("key", "reason"),
    "See the reason: too little GPU memory (`host.gpu_staging`), a GPU that failed, or no thread (`ulimit -u`).",
)
LOADS_FAILED = _warning(
    "loads_failed",
    "loads to the GPU failed; vLLM computes the tokens of their requests",
    "requests",
    advice="See the lines about chunks in the same process for the reason.",
)

EVENTS: tuple[LogEvent, ...] = tuple(event for event in list(globals().values()) if isinstance(event, LogEvent))
"""All events, in the order of this module."""

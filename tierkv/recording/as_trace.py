"""Trace of the requests in a record, in the format that ``tierkv replay`` and ``tierkv plan`` read.

A request becomes a line with its first lookup. Times of a stack that was opened again continue on the wall clock.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from tierkv.recording.entries import Entry, opened_at_s


@dataclass(slots=True)
class RecordedTrace:
    """Requests of a record."""

    lines: list[dict[str, Any]] = field(default_factory=list)
    """One object per request, in the order of arrival."""
    chunk_tokens: set[int] = field(default_factory=set)
    """Tokens per chunk of the recorded stacks."""
    chunk_bytes: set[int] = field(default_factory=set)
    """Bytes per chunk of the recorded stacks, over all groups."""
    cut: int = 0
    """Requests of which a part of the prompt is not in the record; the known front is in the trace."""
    lost: int = 0
    """Entries that the record lacks, because they could not be written in time."""


class _Reader:
    """Entries to lines. Attributes: trace: the result."""

    def __init__(self) -> None:
        self.trace = RecordedTrace()
        self._process: object = None
        self._zero_s: float | None = None  # wall clock of the trace's zero
        self._opened_s = 0.0  # of this process, since the trace's zero
        self._open: dict[str, dict[str, Any]] = {}
        self._adapters: dict[str, str] = {}
        self._cut: set[str] = set()

    def read(self, entry: Entry) -> None:
        """Take in one entry."""
        match entry["is"]:
            case "record":
                self._began(entry)
            case "prompt":
                self._prompt(entry)
            case "finished":
                line = self._open.pop(entry["r"], None)
                if line is not None and "generated" in entry:
                    line["output_length"] = entry["generated"]
            case "lost":
                self.trace.lost += entry["entries"]

    def _began(self, entry: Entry) -> None:
        process = entry.get("pid"), entry.get("opened")
        if process == self._process:
            return  # the next file of the same process
        self._process, self._open = process, {}
        opened_s = opened_at_s(entry)
        if opened_s is None:
            opened_s = (self._zero_s or 0.0) + self._opened_s
        self._zero_s = opened_s if self._zero_s is None else self._zero_s
        self._opened_s = max(0.0, opened_s - self._zero_s)
        for name, values in (("chunk_tokens", self.trace.chunk_tokens), ("chunk_bytes", self.trace.chunk_bytes)):
            if name in entry:
                values.add(entry[name])

    def _prompt(self, entry: Entry) -> None:
        request_id = entry["r"]
        if not entry["at"]:
            line: dict[str, Any] = {"timestamp": round(1000 * (self._opened_s + entry["asked"]), 3)}
            line |= {"input_length": entry["tokens"], "hash_ids": []}
            hints = dict(entry.get("hints", {}))
            if "tenant" in entry:
                line["tenant"] = entry["tenant"]
            if "session" in hints:
                line["session"] = hints.pop("session")
            if hints:
                line["hints"] = hints
            self.trace.lines.append(line)
            self._open[request_id] = line
            self._adapters[request_id] = entry.get("adapter", "")
        open_line = self._open.get(request_id)
        if open_line is None:
            return  # its first entry is in a file that was removed
        if len(open_line["hash_ids"]) != entry["at"]:
            if request_id not in self._cut:
                self._cut.add(request_id)
                self.trace.cut += 1
            return
        adapter = self._adapters[request_id]
        open_line["hash_ids"] += [key.partition(".")[0] + adapter for key in entry["keys"]]


def trace_of(entries: Iterable[Entry]) -> RecordedTrace:
    """Trace of a record's requests. Their texts are not in it: an id is the beginning of a chunk's hash."""
    reader = _Reader()
    for entry in entries:
        reader.read(entry)
    reader.trace.lines.sort(key=lambda line: float(line["timestamp"]))
    return reader.trace

"""Entries of a recorder that observes a core without I/O."""

from __future__ import annotations

from collections.abc import Sequence

from core_parts import make_core

from tierkv.recording.entries import Entry
from tierkv.recording.recorder import Recorder


class Kept:
    """Sink that keeps the entries."""

    dropped = 0

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def put(self, entries: Sequence[Entry]) -> None:
        """Keep them."""
        self.entries += entries

    def close(self, timeout_s: float) -> None:
        """Nothing is pending."""


def test_a_repeated_answer_is_noted_once_also_when_its_missing_chunk_has_come() -> None:
    """The answer is that of the first question: the chunk was missing then, and no bound has ended the hit."""
    core, sink = make_core(), Kept()
    recorder = Recorder(sink, core.scheduler.view, core.counters, (), lambda: core.now)
    request = core.arrive(16)
    chunks = core.record(request).groups[0].keys
    core.put(chunks[:2])
    for _ in range(2):
        recorder.answered("a", 0, core.ask(request), expired=False)
        core.put(chunks[2:3])
    recorder.hand_over()
    (answer,) = [entry for entry in sink.entries if entry["is"] == "answer"]
    assert (answer["tokens"], answer["missing"]) == (8, chunks[2])

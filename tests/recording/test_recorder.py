"""Entries of a recorder that observes a core without I/O."""

from __future__ import annotations

from collections.abc import Sequence

from core_parts import make_core

from tierkv.recording.entries import Entry, short_key
from tierkv.recording.reading import KeyFilter
from tierkv.recording.recorder import Recorder
from tierkv.recording.rendering import entry_line, explain_losses


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


def test_chunks_that_the_host_tier_never_took_are_noted() -> None:
    """A chunk that no tier ever had is explained by its key, and by its request."""
    core, sink = make_core(slots=2), Kept()
    recorder = Recorder(sink, core.scheduler.view, core.counters, (), lambda: core.now)
    core.scheduler.view.watcher = recorder.request_changed
    stored, refused = core.arrive(8, "stored"), core.arrive(range(100, 200), "refused")
    for request, ids in ((stored, [1, 2]), (refused, [*range(11, 36)])):
        tokens = request.num_tokens
        core.schedule(request, computed=0, scheduled=tokens, ids=[ids])
        request.extend([0])
        core.scheduler.request_finished(request, [ids])
    recorder.hand_over()
    lines = [entry for entry in sink.entries if entry["is"] == "not stored"]
    chunks = core.truth.keys(refused)[:25]
    assert [(entry["r"], entry["keys"]) for entry in lines] == [("refused", chunks)]
    assert core.counters.chunks_not_stored == 25
    written = [entry | {"keys": [short_key(key) for key in entry["keys"]]} for entry in lines]
    last = written[0]["keys"][-1]
    assert [KeyFilter(last).includes(entry) for entry in written] == [True]
    assert entry_line(written[0], lambda key: key == last).endswith(f"took {last} and 24 more: NOT STORED")
    (loss, _) = explain_losses(written, lambda key: key == last)
    assert "when request refused ended, the host tier had not taken it" in loss

"""Figures of the benchmark of chunk sizes that need no clock: shared prefixes, and the hits that whole chunks leave."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

from benchmarks.workloads.chunk_sizes import SIZES, SharedPrefix, hit_percent, made_conversations, shared_in_trace
from tierkv.replay.trace_lines import read_lines


def test_a_hit_ends_at_the_last_whole_chunk() -> None:
    """The figure decides the advice on the default, so the rounding must be that of a lookup."""
    requests = [SharedPrefix(1_000, 600), SharedPrefix(1_000, 0)]
    assert [hit_percent(requests, size) for size in (1, 16, 256, 1024)] == [30.0, 29.6, 25.6, 0.0]


def test_the_last_token_of_a_prompt_is_always_computed() -> None:
    """An engine needs one token to compute; a prompt that is known as a whole hits one chunk less."""
    assert hit_percent([SharedPrefix(32, 32)], 16) == 50.0


def test_longer_chunks_never_hit_more() -> None:
    """Sizes are multiples of each other, so a whole long chunk consists of whole short ones."""
    requests = made_conversations(seed=3, count=300)
    hits = [hit_percent(requests, size) for size in SIZES]
    assert hits == sorted(hits, reverse=True)
    assert 0 < hits[-1] < hits[0] < 100


def test_a_trace_shares_the_end_of_a_prompt_within_a_block(tmp_path: Path) -> None:
    """A next turn begins with all of the last prompt and answer, also where these end within a block of the trace."""
    trace = tmp_path / "trace.jsonl.gz"
    lines = [
        {"timestamp": 0, "input_length": 1_100, "output_length": 200, "hash_ids": [1, 2, 3]},
        {"timestamp": 1, "input_length": 1_600, "output_length": 10, "hash_ids": [1, 2, 4, 5]},
        {"timestamp": 2, "input_length": 1_600, "output_length": 10, "hash_ids": [1, 7, 8, 9]},
    ]
    with gzip.open(trace, "wt") as file:
        file.write("\n".join(map(json.dumps, lines)))
    shared = [request.shared_tokens for request in shared_in_trace(read_lines(trace))]
    assert shared == [0, 1_300, 512]

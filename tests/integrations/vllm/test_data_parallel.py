"""Replicas of one server over one description: local tiers are separate, the bucket is shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from vllm_process import PlainTokens
from vllm_server import Server, ask, words
from vllm_setups import EngineSetup, Seam, objects_after, prompts

pytestmark = pytest.mark.long

CACHED = 192
CHUNKS = 3


@contextmanager
def serving(seam: Seam, tiers: list[Mapping[str, Any]], models: Path, log: Path) -> Iterator[Server]:
    """A server of two replicas."""
    stack = {"host": {"capacity": "16MiB"}, "tiers": tiers, "lookup": {"recompute": "off"}}
    server = Server(EngineSetup(seam, stack, blocks_per_chunk=2), models, log, replicas=2)
    try:
        server.wait_until_it_serves()
        yield server
        server.end()
    finally:
        server.kill()


def test_two_replicas_share_the_bucket_and_keep_their_own_disks(
    seam: Seam, models: Path, tmp_path: Path, plain_tokens: PlainTokens
) -> None:
    """`--data-parallel-size 2` works with one path in one description. Each replica finds the other's chunks in the
    bucket.

    After a restart without the bucket, each finds the chunks of its own disk."""
    disk = {"backend": "disk", "path": str(tmp_path / "disk"), "capacity": "64MiB"}
    bucket = {"name": "bucket", "backend": "fsspec", "url": f"file://{tmp_path}/bucket", "absence_ttl_s": 0}
    ours, theirs = prompts("data parallel", 2)
    expected = [words(tokens) for tokens in plain_tokens("llama", [ours, theirs], 16)]
    with serving(seam, [disk, bucket], models, tmp_path / "log") as server:
        assert ask(server, ours, replica=0) == (expected[0], 0)
        assert ask(server, theirs, replica=1) == (expected[1], 0)
        assert objects_after(tmp_path / "bucket", 2 * CHUNKS) == 2 * CHUNKS
        assert ask(server, theirs, replica=0) == (expected[1], CACHED)
    with serving(seam, [disk], models, tmp_path / "log") as server:
        assert ask(server, ours, replica=0) == (expected[0], CACHED)
        assert ask(server, theirs, replica=1) == (expected[1], CACHED)
        assert ask(server, ours, replica=1) == (expected[0], 0)

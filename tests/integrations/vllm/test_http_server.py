"""vLLM's server as users run it, asked by the client they have."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from vllm_process import PlainTokens
from vllm_server import Server, ask, words
from vllm_setups import EngineSetup, Seam, prompts

pytestmark = pytest.mark.long

CACHED = 192


@pytest.fixture(scope="module")
def server(seam: Seam, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One that serves; ended whatever happens."""
    tier = {"backend": "disk", "path": str(tmp_path_factory.mktemp("disk")), "capacity": "64MiB"}
    stack = {"host": {"capacity": "16MiB"}, "tiers": [tier], "lookup": {"recompute": "off"}}
    server = Server(EngineSetup(seam, stack, blocks_per_chunk=2), models, tmp_path_factory.mktemp("server") / "log")
    try:
        server.wait_until_it_serves()
        yield server
    finally:
        server.kill()


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_second_request_is_a_hit_and_says_so(server: Server, stream: bool, plain_tokens: PlainTokens) -> None:
    """Results for a user: the same text, at once and as a stream, and the hit in the usage."""
    (asked,) = prompts(f"http {stream}", 1)
    (expected,) = plain_tokens("llama", [asked], 16)
    assert ask(server, asked, stream=stream) == (words(expected), 0)
    for _ in range(20):  # the stores of the first one end by themselves
        server.get("/reset_prefix_cache", "POST")
        text, found = ask(server, asked, stream=stream)
        assert text == words(expected)
        if found == CACHED:
            break
    assert found == CACHED


def test_metrics_of_the_server_show_what_tierkv_did(server: Server) -> None:
    """Operators look at /metrics of vLLM and nowhere else: our series are there, and they count."""
    (asked,) = prompts("metrics", 1)
    before = {name: server.metric(name) for name in ("tierkv_chunks_stored_total", "tierkv_chunks_loaded_total")}
    ask(server, asked, stream=False)
    for _ in range(20):
        server.get("/reset_prefix_cache", "POST")
        if ask(server, asked, stream=False)[1] == CACHED:
            break
    ask(server, prompts("metrics later", 1)[0], stream=False)  # statistics travel with later steps
    for name, value in before.items():
        assert server.metric(name) > value, name

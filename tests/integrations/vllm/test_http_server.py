"""vLLM's server as users run it, asked by the client they have."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from vllm_process import LoggedProcess, PlainTokens
from vllm_setups import ARGUMENTS, EngineSetup, Seam, prompts

pytestmark = pytest.mark.long

CACHED = 192
START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0


class Server(LoggedProcess):
    """The server of vLLM on the loopback interface, and a client for it."""

    def __init__(self, setup: EngineSetup, models: Path, log: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(models / setup.model), "--served-model-name", setup.model]
        command += ["--enable-prompt-tokens-details", "--enforce-eager"]
        for name in ("dtype", "block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "max_model_len"):
            command += [f"--{name.replace('_', '-')}", str(ARGUMENTS[name])]
        command += ["--kv-transfer-config", json.dumps(setup.kv_transfer_config())]
        # The development mode has the call that empties the device's cache.
        super().__init__(command, log, {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"})
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S)

    def wait_until_it_serves(self) -> None:
        """Return when it says that it is healthy."""
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while True:
            try:
                self.get("/health")
            except OSError:
                if not self.is_alive() or time.monotonic() > deadline_s:
                    self.kill()
                    raise self.failure("the server did not come up") from None
                time.sleep(0.2)
            else:
                return

    def get(self, path: str, method: str = "GET") -> str:
        """What it answers at a path."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        samples = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics"), flags=re.MULTILINE)
        return sum(map(float, samples))


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


def words(tokens: list[int]) -> str:
    """The text of tokens."""
    return " ".join(f"w{token}" for token in tokens)


def ask(server: Server, prompt: list[int], *, stream: bool) -> tuple[str, int]:
    """Text of the answer, and how many tokens of the prompt were found."""
    every_token = {"ignore_eos": True, "skip_special_tokens": False}
    options: dict[str, Any] = {"model": "llama", "max_tokens": 16, "temperature": 0, "extra_body": every_token}
    if not stream:
        answer = server.client.completions.create(prompt=prompt, **options)
        return answer.choices[0].text.strip(), cached(answer.usage)
    text, usage = "", None
    for part in server.client.completions.create(
        prompt=prompt, stream=True, stream_options={"include_usage": True}, **options
    ):
        text += "".join(choice.text for choice in part.choices)
        usage = part.usage or usage
    return text.strip(), cached(usage)


def cached(usage: Any) -> int:
    """How many tokens of the prompt were found."""
    details = usage.prompt_tokens_details
    return int(details.cached_tokens or 0) if details else 0


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_the_second_request_is_a_hit_and_says_so(server: Server, stream: bool, plain_tokens: PlainTokens) -> None:
    """What a user sees: the same text, in one piece and as a stream, and the hit in the usage."""
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

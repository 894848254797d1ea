"""vLLM's server as users run it, and the client they have."""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import openai
from vllm_process import END_TIMEOUT_S, LoggedProcess, processes_of
from vllm_setups import ARGUMENTS, EngineSetup

START_TIMEOUT_S = 300.0
REQUEST_TIMEOUT_S = 120.0


def free_port() -> int:
    """A port that no program uses at present."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


class Server(LoggedProcess):
    """The server of vLLM on the loopback interface, and a client for it.

    Args:
        setup: of its engine.
        models: folder of the small models.
        log: a file for what vLLM writes.
        replicas: engines that share the requests (data parallel).
        port: of the server; None: a free one.
        more: further arguments of the server.
    """

    def __init__(
        self,
        setup: EngineSetup,
        models: Path,
        log: Path,
        replicas: int = 1,
        port: int | None = None,
        more: Sequence[str] = (),
    ) -> None:
        port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"]
        command += ["--port", str(port), "--model", str(models / setup.model), "--served-model-name", setup.model]
        command += ["--enable-prompt-tokens-details", "--enforce-eager"]
        for name in ("dtype", "block_size", "num_gpu_blocks_override", "kv_cache_memory_bytes", "max_model_len"):
            command += [f"--{name.replace('_', '-')}", str(ARGUMENTS[name])]
        command += ["--kv-transfer-config", json.dumps(setup.kv_transfer_config())]
        command += more
        if replicas > 1:
            command += ["--data-parallel-size", str(replicas)]
        self._start_timeout_s = START_TIMEOUT_S * replicas
        # The development mode has the call that empties the device's cache.
        environment = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_SERVER_DEV_MODE": "1"}
        # On a machine with one node of memory vLLM's own choice of cores has none for a second engine.
        super().__init__(command, log, environment | ({"VLLM_CPU_OMP_THREADS_BIND": "nobind"} if replicas > 1 else {}))
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", timeout=REQUEST_TIMEOUT_S)

    def wait_until_it_serves(self) -> None:
        """Return when it says that it is healthy."""
        deadline_s = time.monotonic() + self._start_timeout_s
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
        """Response at a path."""
        request = urllib.request.Request(f"{self.url}{path}", method=method)
        with urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S) as answer:
            return str(answer.read().decode())

    def end(self) -> None:
        """End it in order, and wait until nothing of it is left.

        Raises:
            EngineError: it did not end in time.
        """
        self.process.terminate()
        deadline_s = time.monotonic() + END_TIMEOUT_S
        while processes_of(self.pid):
            if time.monotonic() > deadline_s:
                self.show_stacks()
                self.kill()
                raise self.failure(f"the server did not end within {END_TIMEOUT_S:g} s")
            self.process.poll()
            time.sleep(0.05)
        self.kill()

    def metric(self, name: str) -> float:
        """Sum of a metric's samples."""
        samples = re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", self.get("/metrics"), flags=re.MULTILINE)
        return sum(map(float, samples))


def words(tokens: list[int]) -> str:
    """The text of tokens."""
    return " ".join(f"w{token}" for token in tokens)


def ask(server: Server, prompt: list[int], *, stream: bool = False, replica: int | None = None) -> tuple[str, int]:
    """Text of the answer, and number of prompt tokens that were found.

    replica: engine that answers; None: any.
    """
    every_token = {"ignore_eos": True, "skip_special_tokens": False}
    options: dict[str, Any] = {"model": "llama", "max_tokens": 16, "temperature": 0, "extra_body": every_token}
    if replica is not None:
        options["extra_headers"] = {"X-data-parallel-rank": str(replica)}
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
    """Number of prompt tokens that were found."""
    details = usage.prompt_tokens_details
    return int(details.cached_tokens or 0) if details else 0

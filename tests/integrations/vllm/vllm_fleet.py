"""Two servers of vLLM that publish events, the router of vLLM in front of them, and what a consumer knows of each."""

from __future__ import annotations

import json
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import zmq
from vllm_process import LoggedProcess
from vllm_server import REQUEST_TIMEOUT_S, Server, free_port
from vllm_setups import ARGUMENTS, BLOCK_TOKENS, EngineSetup

ROUTER_START_S = 60.0
KNOWN_WITHIN_S = 60.0
ROUTER_DELAY_S = 0.5
"""Seconds after which the router knows what the mirror of the test knows: both get the same messages."""


class Mirror:
    """Blocks of one server by medium, from its events alone, by the rules of the router.

    A general event that all is cleared does not reach blocks with an ``ownership``. A restart reaches all. A thread
    takes the messages in: a socket of ZeroMQ that is not used subscribes to no new process.
    """

    def __init__(self, endpoint: str) -> None:
        self.blocks: dict[tuple[str, str | None], dict[bytes, tuple[int, ...]]] = defaultdict(dict)
        self._endpoint = endpoint
        self._last = -1
        self._lock = threading.Lock()
        self._is_closed = False
        self._thread = threading.Thread(target=self._listen, name=f"mirror {endpoint}", daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with zmq.Context.instance().socket(zmq.SUB) as socket:
            socket.connect(self._endpoint)
            socket.subscribe("")
            while not self._is_closed:
                if socket.poll(100):
                    _, number, payload = socket.recv_multipart()
                    with self._lock:
                        self._take_all(int.from_bytes(number, "big"), msgspec.msgpack.decode(payload)[1])

    def close(self) -> None:
        """End the thread and the connection."""
        self._is_closed = True
        self._thread.join()

    def _take_all(self, sequence: int, events: list[dict[str, Any]]) -> None:
        if sequence < self._last:
            self.blocks.clear()
        self._last = sequence
        for event in events:
            self._take(event)

    def _take(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            for place in [place for place in self.blocks if place[1] is None]:
                del self.blocks[place]
            return
        held = self.blocks[event["medium"], event.get("ownership")]
        if event["type"] == "BlockRemoved":
            for block in event["block_hashes"]:
                held.pop(block, None)
            return
        for number, block in enumerate(event["block_hashes"]):
            start = number * event["block_size"]
            held[block] = tuple(event["token_ids"][start : start + event["block_size"]])

    def media_of(self, prompt: Sequence[int]) -> dict[str, int]:
        """Number of leading blocks of a prompt in each medium that has some."""
        with self._lock:
            known_by_place = {place: set(blocks.values()) for place, blocks in self.blocks.items()}
        wanted = [tuple(prompt[i : i + BLOCK_TOKENS]) for i in range(0, len(prompt) - BLOCK_TOKENS + 1, BLOCK_TOKENS)]
        found: dict[str, int] = {}
        for (medium, _), known in known_by_place.items():
            count = 0
            while count < len(wanted) and wanted[count] in known:
                count += 1
            if count:
                found[medium] = max(count, found.get(medium, 0))
        return found


class Fleet:
    """Two servers and what is in front of them.

    Args:
        models: folder of the small models.
        place: folder for tiers and logs.
    """

    def __init__(self, models: Path, place: Path) -> None:
        self._models = models
        self.place = place
        self.ports = [free_port() for _ in range(2)]
        self.endpoints = [f"tcp://127.0.0.1:{free_port()}" for _ in range(2)]
        self.mirrors = [Mirror(endpoint) for endpoint in self.endpoints]
        self.servers = [self._start(number) for number in range(2)]
        for server in self.servers:
            server.wait_until_it_serves()

    def _start(self, number: int) -> Server:
        home = self.place / f"server-{number}"
        home.mkdir(exist_ok=True, mode=0o700)
        tier = {"backend": "disk", "path": str(home / "disk"), "capacity": "8MiB", "min_free_bytes": 0}
        stack = {
            "host": {"capacity": "2MiB"},
            "tiers": [tier],
            "lookup": {"recompute": "off"},
            "events": {"self_describing": True, "tokens_path": str(self.tokens_of(number))},
        }
        # vLLM listens where the endpoint has "::", and connects otherwise. This is 127.0.0.1.
        endpoint = self.endpoints[number].replace("127.0.0.1", "[::ffff:127.0.0.1]")
        events = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": endpoint}
        return Server(
            EngineSetup("connector", stack, blocks_per_chunk=2, options={}),
            self._models,
            self.place / f"server-{number}.log",
            port=self.ports[number],
            more=["--kv-events-config", json.dumps(events)],
        )

    def tokens_of(self, number: int) -> Path:
        """The file with the tokens that a server keeps."""
        return self.place / f"server-{number}" / "tokens.db"

    def restart(self, number: int, between: Callable[[], object] = lambda: None) -> None:
        """End a server in order, and start it again at the same ports over the same disk."""
        self.servers[number].end()
        between()
        self.servers[number] = self._start(number)
        self.servers[number].wait_until_it_serves()

    def kill(self) -> None:
        """End everything."""
        for server in self.servers:
            server.kill()
        for mirror in self.mirrors:
            mirror.close()

    def serve(self, number: int, prompts: Sequence[Sequence[int]]) -> None:
        """Have one server answer prompts, without the router."""
        for prompt in prompts:
            complete(self.servers[number].url, prompt)

    def wait_for(
        self,
        number: int,
        prompts: Sequence[Sequence[int]],
        is_right: Callable[[dict[str, int]], bool],
        *,
        idle: bool = False,
    ) -> None:
        """Return when the events of a server say the right thing of every prompt, and the router knows it as well.

        idle: leave the server alone. vLLM publishes in its steps, so otherwise it gets some, by a prompt that is too
        short to be stored.
        """
        give_up_s = time.monotonic() + KNOWN_WITHIN_S
        while not all(is_right(media := self.mirrors[number].media_of(prompt)) for prompt in prompts):
            assert time.monotonic() < give_up_s, f"server {number} says {media}"
            if idle:
                time.sleep(0.1)
            else:
                self.serve(number, [[5] * 8])
        time.sleep(ROUTER_DELAY_S)

    def answered(self) -> list[int]:
        """Requests that each server has answered."""
        return [int(server.metric("vllm:request_success_total")) for server in self.servers]


class Router(LoggedProcess):
    """vllm-router with ``--policy kv_aware``.

    Args:
        fleet: servers behind it.
        endpoints: of their events.
        log: a file for what it writes.
    """

    def __init__(self, fleet: Fleet, endpoints: Sequence[str], log: Path) -> None:
        port, urls = free_port(), [f"http://127.0.0.1:{port}" for port in fleet.ports]
        self._fleet = fleet
        self.url = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "vllm_router.launch_router", "--host", "127.0.0.1", "--port", str(port)]
        command += ["--prometheus-port", str(free_port()), "--health-check-interval-secs", "1"]
        command += ["--policy", "kv_aware", "--kv-event-model", "llama", "--kv-event-block-size", str(BLOCK_TOKENS)]
        command += ["--worker-urls", *urls]
        for url, endpoint in zip(urls, endpoints, strict=True):
            command += ["--kv-event-source", f"{url}={endpoint}"]
        super().__init__(command, log)

    def wait_until_it_serves(self) -> None:
        """Return when it says that it is healthy."""
        give_up_s = time.monotonic() + ROUTER_START_S
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/health", timeout=5).close()
            except OSError:
                if not self.is_alive() or time.monotonic() > give_up_s:
                    raise self.failure("the router did not come up") from None
                time.sleep(0.1)
            else:
                return

    def wait_until_all_are_healthy(self) -> None:
        """Return when the router sends requests to each server: it looks at a restarted one now and then."""
        give_up_s = time.monotonic() + KNOWN_WITHIN_S
        while True:
            with urllib.request.urlopen(f"{self.url}/workers", timeout=5) as answer:
                workers = json.load(answer)["workers"]
            if all(worker["is_healthy"] for worker in workers):
                return
            assert time.monotonic() < give_up_s, workers
            time.sleep(0.1)

    def ask(self, prompt: Sequence[int]) -> int:
        """Have a prompt answered. Returns the number of the server that did it."""
        before = self._fleet.answered()
        complete(self.url, prompt)
        grown = [now - then for now, then in zip(self._fleet.answered(), before, strict=True)]
        assert sorted(grown) == [0, 1], grown
        return grown.index(1)

    def ask_at_once(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Have prompts answered side by side. Returns how many each server took."""
        before = self._fleet.answered()
        with ThreadPoolExecutor(len(prompts)) as pool:
            list(pool.map(lambda prompt: complete(self.url, prompt, tokens=64), prompts))
        return [now - then for now, then in zip(self._fleet.answered(), before, strict=True)]


@contextmanager
def routed(fleet: Fleet, endpoints: Sequence[str], log: Path) -> Iterator[Router]:
    """A router that serves; ended whatever happens."""
    router = Router(fleet, endpoints, log)
    try:
        router.wait_until_it_serves()
        yield router
    finally:
        router.kill()


def complete(url: str, prompt: Sequence[int], tokens: int = 1) -> None:
    """Have a server, or a router, complete a prompt."""
    body = {"model": "llama", "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(
        f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        urllib.request.urlopen(request, timeout=REQUEST_TIMEOUT_S).close()
    except urllib.error.HTTPError as error:
        raise AssertionError(f"{error}: {error.read().decode(errors='replace')}") from error


PROMPTS_IN_GPU = ARGUMENTS["num_gpu_blocks_override"] * BLOCK_TOKENS // 200
"""Prompts of 200 tokens that the device of a server has room for, at most."""
PROMPTS_IN_HOST = 2 * 1024**2 // (3 * 68 * 1024)
"""Those in its host tier: three chunks each."""
PROMPTS_ON_DISK = 8 * 1024**2 // (3 * 68 * 1024)
"""Those on its disk."""

"""Observations of an engine from outside, by name: each takes a ServedEngine and returns plain JSON."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import msgspec
import torch
import zmq
from prometheus_client import REGISTRY, generate_latest
from prometheus_client.parser import text_string_to_metric_families
from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEventBatch
from vllm_served import ServedEngine

LISTEN_TIMEOUT_S = 30.0


def step(served: ServedEngine) -> None:
    """Serve something short: statistics and events travel with steps."""
    served.serve([[3, 4, 5]], tokens=2)
    served.settle()


def reset(served: ServedEngine) -> None:
    """Reset all caches as an operator does, and go on until the tiers are empty."""
    served.settle()
    assert served.engine.reset_prefix_cache(reset_connector=True)
    served.settle()


def replace_weights_asleep(served: ServedEngine) -> None:
    """Replace the weights as a trainer does: all of the device's memory is given back meanwhile (sleep level 2).

    VLLM's worker on a CPU gives nothing back. Its core takes the same steps.
    """
    served.settle()
    assert served.core.sleep(2) is None
    assert served.core.is_sleeping()
    change_weights(served)
    assert served.core.wake_up()


def change_weights(served: ServedEngine) -> None:
    """Give the serving model other weights in place: each token gets the embedding of another one."""
    (layer,) = [
        module
        for module in served.core.model_executor.driver_worker.worker.model_runner.model.modules()
        if type(module).__name__ == "VocabParallelEmbedding"
    ]
    with torch.no_grad():
        layer.weight.copy_(torch.roll(layer.weight, 1, 0))


def serve_new_weights(served: ServedEngine, prompts: Sequence[Sequence[int]], after: int, tokens: int) -> bool:
    """Serve, change the weights after some steps in which all requests run, and reset the connector's cache then.

    Returns:
        Whether that happened.
    """
    ran = 0

    def on_step(step: int, names: list[str]) -> None:
        nonlocal ran
        requests = served.core.scheduler.requests.values()
        ran += all(request.num_computed_tokens > 0 for request in requests)
        if ran == after:
            ran += 1
            change_weights(served)
            assert served.core.scheduler.reset_connector_cache()

    served.serve(prompts, tokens, on_step=on_step)
    served.settle()
    return ran > after


def metrics(served: ServedEngine) -> dict[str, float]:
    """Samples of vLLM's registry: name, and our own labels, if any -> value; buckets left out."""
    found = {}
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        for sample in family.samples:
            labels = [f"{name}={value}" for name, value in sorted(sample.labels.items()) if name in OWN_LABELS]
            if "le" not in sample.labels:
                found[" ".join([sample.name, *labels])] = sample.value
    return found


OWN_LABELS = ("tier", "transfer_type")


def labels_of(served: ServedEngine, name: str) -> list[dict[str, str]]:
    """Labels of each series of that name, without vLLM's own two."""
    found = []
    for family in text_string_to_metric_families(generate_latest(REGISTRY).decode()):
        for sample in family.samples:
            if sample.name == name:
                labels = sample.labels.items()
                found.append({label: value for label, value in labels if label not in ("engine", "model_name")})
    return found


def count_expedited(served: ServedEngine) -> None:
    """Count from now on the loads that vLLM says it waits for."""
    from tierkv.integrations.vllm.spec.spec import TierKVWorker  # noqa: PLC0415  of one seam only

    served.expedited = 0  # type: ignore[attr-defined]
    submit = TierKVWorker.submit_load

    def counting(self: TierKVWorker, *arguments: Any, expedited: bool = False) -> bool:
        served.expedited += expedited  # type: ignore[attr-defined]
        return submit(self, *arguments, expedited=expedited)

    TierKVWorker.submit_load = counting


def expedited(served: ServedEngine) -> int:
    """Number of events."""
    return int(served.expedited)  # type: ignore[attr-defined]


class Listener:
    """A router: subscribes to the engine's publisher and keeps what is where."""

    def __init__(self, endpoint: str) -> None:
        self._socket = zmq.Context.instance().socket(zmq.SUB)
        self._socket.connect(endpoint)
        self._socket.subscribe("")
        self.blocks: dict[str, dict[Any, tuple[int, ...]]] = defaultdict(dict)
        self.extra_keys: dict[str, dict[Any, Any]] = defaultdict(dict)

    def drain(self) -> int:
        """Take in what has come; how many batches."""
        batches = 0
        while self._socket.poll(300):
            _, _, payload = self._socket.recv_multipart()
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                self._hear(event)
            batches += 1
        return batches

    def _hear(self, event: BlockStored | BlockRemoved | AllBlocksCleared) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
            return
        place = self.blocks[" ".join(filter(None, (event.medium, event.ownership, event.locality)))]
        if isinstance(event, BlockRemoved):
            for block in event.block_hashes:
                place.pop(block, None)
            return
        self.extra_keys[event.medium or ""].update(
            zip(event.block_hashes, event.extra_keys or [None] * len(event.block_hashes), strict=True)
        )
        for number, block in enumerate(event.block_hashes):
            start = number * event.block_size
            place[block] = tuple(event.token_ids[start : start + event.block_size])


def listen(served: ServedEngine) -> None:
    """Begin; a publisher drops what it says before a subscriber has joined."""
    publisher = served.core.scheduler.kv_event_publisher
    served.listener = listener = Listener(publisher._pub.getsockopt_string(zmq.LAST_ENDPOINT))  # type: ignore[attr-defined]
    give_up_s = time.monotonic() + LISTEN_TIMEOUT_S
    number = 0
    while not listener.drain():
        assert time.monotonic() < give_up_s, "the publisher says nothing"
        number += 1
        served.serve([[5 + number] * 64], tokens=1)
    served.settle()
    listener.drain()


def heard(served: ServedEngine, prompts: Sequence[Sequence[int]]) -> dict[str, list[int]]:
    """By place, how many blocks of each prompt a router knows to be there; places that have some."""
    listener: Listener = served.listener  # type: ignore[attr-defined]
    listener.drain()
    places = {}
    for place, blocks in listener.blocks.items():
        known = set(blocks.values())
        sizes = {len(tokens) for tokens in known if tokens}
        found = [
            sum(tuple(prompt[i : i + size]) in known for size in sizes for i in range(0, len(prompt), size))
            for prompt in prompts
        ]
        if any(found):
            places[place] = found
    return places


def extra_keys(served: ServedEngine) -> dict[str, dict[str, Any]]:
    """By medium and block, what a router received of its hash beside tokens."""
    listener: Listener = served.listener  # type: ignore[attr-defined]
    listener.drain()
    return {
        medium: {str(block): keys for block, keys in blocks.items()} for medium, blocks in listener.extra_keys.items()
    }

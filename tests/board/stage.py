"""A stack that serves while its tiers fail and heal, one fault per alert."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from stack_bed import SLOT_BYTES, Faults, opened, prompts_of, serve
from vllm_by_hand import ByHand, PlayedRequest

from tierkv.abc import PolicyPlugin
from tierkv.hookspecs import hookimpl
from tierkv.metrics.serving import serve_metrics
from tierkv.plugins.loading import load_plugins
from tierkv.stack.stack import Stack
from tierkv.testing.faults import FaultyBackend, corrupt, hang_until, raise_error, slow

Fault = Callable[["Stage"], AbstractContextManager[None]]


class Brittle:
    """LRU policy of a plugin that raises on demand."""

    is_broken = False

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def touch(self, handles: Sequence[int]) -> None:
        """Raise when it is time to."""
        if Brittle.is_broken:
            raise ZeroDivisionError("a mistake of the plugin")
        self.inner.touch(handles)

    def __len__(self) -> int:
        return len(self.inner)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def plugins(faults: Faults) -> Any:
    """Installed plugins, with a disk that can be made to fail, and a policy that can."""
    lru = load_plugins().policies["lru"].plugin
    disk = faults.registry().require_backend("faulty").plugin

    class Failing:
        TIERKV_SPI = 1

        @hookimpl
        def tierkv_backends(self) -> list[Any]:
            return [disk]

        @hookimpl
        def tierkv_policies(self) -> list[PolicyPlugin]:
            return [replace(lru, name="brittle", open=lambda *given: Brittle(lru.open(*given)))]  # type: ignore[arg-type]

    return load_plugins([Failing()])


def config_of(place: Path) -> dict[str, Any]:
    """A host tier, a disk that becomes full, and objects behind it."""
    disk = {
        "name": "disk", "backend": "faulty", "path": str(place / "disk"), "capacity": "2MiB", "min_free_bytes": 0,
        "policy": "brittle", "breaker_failures": 3, "breaker_cooldown_s": 0.5, "retries": 0, "io_threads": 2,
        "read_deadline_s": 1.0, "write_deadline_s": 5.0, "queue_bytes_max": 12 * SLOT_BYTES,
    }  # fmt: skip
    return {
        "chunk": {"tokens": 16},
        "host": {"capacity": 32 * SLOT_BYTES, "verify": True},
        "lookup": {"deadline_s": 0.3, "recompute": "off"},
        "tiers": [
            disk,
            {"name": "objects", "backend": "fsspec", "url": f"file://{place}/objects", "write": "on_reuse"},
        ],
    }


@dataclass
class Stage:
    """An engine with its stack; a second one as in vLLM, for errors of tierkv itself."""

    stack: Stack
    disk: FaultyBackend
    hand: ByHand
    ports: tuple[int, int]
    rng: random.Random
    turns: int = 0
    seeds: list[int] = field(default_factory=list)
    """Seeds of the prompts so far."""
    latest: list[list[int]] = field(default_factory=list)
    """The prompt that was served last."""
    hand_chunks: int = 4
    """Chunks of the next prompt of the second engine, whose host tier has room for 16."""
    waiting: PlayedRequest | None = None
    """Request of the second engine that asks again and again."""

    def turn(self) -> None:
        """Serve one prompt: an earlier one in most cases."""
        self.turns += 1
        if not self.seeds or self.rng.random() < 0.3:
            self.seeds.append(1000 + self.turns)
        self.latest = prompts_of(self.rng.choice(self.seeds[-16:]), 1, shared=16)
        serve(self.stack, self.latest)

    def step_hand(self) -> None:
        """Serve one prompt with the second engine."""
        self.turns += 1
        if self.waiting is not None:
            self.hand.ask(self.waiting)
        tokens = list(range(100 * self.turns, 100 * self.turns + 4 * self.hand_chunks))
        self.hand.compute(PlayedRequest(f"r{self.turns}", tokens), [list(range(1, 1 + self.hand_chunks))], mark=1)


@contextmanager
def staged(place: Path) -> Iterator[Stage]:
    """A stage that serves its metrics."""
    Brittle.is_broken = False
    faults = Faults()
    with ExitStack() as stack:
        whole = stack.enter_context(opened(config_of(place), plugins=plugins(faults)))
        hand = stack.enter_context(ByHand({"host": {"capacity": "128KiB"}}, contains=True))
        stage = Stage(whole, faults.last, hand, (0, 0), random.Random(4))
        servers = [stack.enter_context(serve_metrics(one)) for one in (whole, hand.scheduler.stack)]
        stage.ports = (servers[0].port, servers[1].port)
        yield stage


# -- faults: each holds until it is closed -----------------------------------------------------------------------------


@contextmanager
def rule(stage: Stage, fault: Any, *verbs: Any) -> Iterator[None]:
    """Apply a fault to some verbs of the disk."""
    rules = [stage.disk.add(verb, fault) for verb in verbs]
    yield
    for one in rules:
        stage.disk.rules.remove(one)


def gone(stage: Stage) -> AbstractContextManager[None]:
    """The disk is gone."""
    return rule(
        stage, raise_error(lambda: OSError(errno.EIO, os.strerror(errno.EIO))), "read_into", "write", "contains"
    )


def read_only(stage: Stage) -> AbstractContextManager[None]:
    """The file system of the disk is mounted read-only."""
    return rule(stage, raise_error(lambda: OSError(errno.EROFS, os.strerror(errno.EROFS))), "write")


def full(stage: Stage) -> AbstractContextManager[None]:
    """The file system of the disk is full."""
    return rule(stage, raise_error(lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))), "write")


def damaged(stage: Stage) -> AbstractContextManager[None]:
    """The disk returns frames with one wrong bit."""
    return rule(stage, corrupt(5000), "read_into")


def slow_writes(stage: Stage) -> AbstractContextManager[None]:
    """The disk writes much slower than the engine stores."""
    return rule(stage, slow(1.0), "write")


@contextmanager
def hanging(stage: Stage) -> Iterator[None]:
    """Calls to the disk do not return."""
    end = threading.Event()
    with rule(stage, hang_until(end), "read_into"):
        yield
        end.set()


@contextmanager
def crowded(stage: Stage) -> Iterator[None]:
    """A request of the second engine holds most of the host tier, and longer prompts than the rest of it come."""
    held = PlayedRequest("held", list(range(48)))
    stage.hand.compute(held, [list(range(1, 13))], mark=1)
    waiting = stage.waiting = PlayedRequest("waiting", [*range(48), 1])
    stage.hand.scheduler.on_new_request(waiting)
    stage.hand_chunks = 8
    yield
    stage.hand_chunks, stage.waiting = 4, None
    stage.hand.scheduler.request_finished(waiting, ((),))


@contextmanager
def faulty_memory(stage: Stage) -> Iterator[None]:
    """One bit of each chunk in the host tier is wrong when its prompt comes again."""
    arena = stage.stack._core.wiring.arena
    for slot in range(arena.num_slots):
        arena.payload(slot)[100] ^= 1
    serve(stage.stack, stage.latest)
    yield


@contextmanager
def broken_policy(stage: Stage) -> Iterator[None]:
    """The eviction policy of the disk raises."""
    Brittle.is_broken = True
    yield
    Brittle.is_broken = False


@contextmanager
def broken_call(stage: Stage) -> Iterator[None]:
    """A call of tierkv inside the second engine raises."""
    inner = stage.hand.scheduler.inner

    def broken(_request: object) -> None:
        raise ZeroDivisionError("a mistake of tierkv")

    inner.on_new_request = broken  # type: ignore[method-assign]
    yield
    del inner.on_new_request


FAULTS: dict[str, Fault] = {
    "TierkvTierOutOfService": gone,
    "TierkvTierReadOnly": read_only,
    "TierkvFramesDamaged": damaged,
    "TierkvLoadsFail": faulty_memory,
    "TierkvErrorsContained": broken_call,
    "TierkvLookupsLate": hanging,
    "TierkvCallsHang": hanging,
    "TierkvTierFull": full,
    "TierkvWritesDropped": slow_writes,
    "TierkvHostFull": crowded,
    "TierkvPolicyFailed": broken_policy,
}
"""The fault that each alert is about. The last one has no end before the stack is opened anew."""

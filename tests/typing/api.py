"""The public interface as its users type it. Never run: ``python -m nox -s types`` checks it.

An ``assert_type`` fails where an answer changes its type. A ``type: ignore`` marks a wrong use: since unused ones are
errors, it fails where such a use is no longer refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, assert_type

import tierkv
from tierkv import EngineSpec, GroupSpec, LoadReport, StepOutput, TierKVError
from tierkv.abc import (
    AsyncBackend,
    Backend,
    BackendContext,
    BackendPlugin,
    Capabilities,
    Codec,
    CodecContext,
    CodecFrame,
    CodecPlugin,
    ReadRequest,
    ReadResult,
    RequestAwarePolicy,
    WriteRequest,
    WriteResult,
)
from tierkv.errors import BackendUnavailableError
from tierkv.hookspecs import hookimpl
from tierkv.types.account import RequestAccount
from tierkv.types.block_events import BlockEvent
from tierkv.types.cache_events import CacheEvent
from tierkv.types.keys import Key, make_key, split_key
from tierkv.types.observation import RequestObservation
from tierkv.types.transfers import ConnectorMeta

# -- an engine ---------------------------------------------------------------------------------------------------------


@dataclass
class MyRequest:
    """Structurally a request; it inherits nothing."""

    request_id: str
    num_tokens: int
    num_prompt_tokens: int
    block_hashes: list[bytes]
    kv_transfer_params: dict[str, Any] | None = None


@dataclass
class MyBlock:
    """Structurally a block."""

    block_id: int
    block_hash: bytes | None
    is_null: bool


def an_engine_drives_a_stack(spec: EngineSpec, request: MyRequest, blocks: list[list[MyBlock]]) -> None:
    """The calls of docs/how-to/drive-tierkv.md."""
    stack = tierkv.open_stack(Path("stack.toml"), spec)
    assert_type(stack, tierkv.Stack)
    stack.on_new_request(request)
    tokens, asynchronous = stack.get_num_new_matched_tokens(request, 0)
    assert_type(tokens, int | None)
    assert_type(asynchronous, bool)
    stack.update_state_after_alloc(request, blocks, tokens or 0)
    assert_type(stack.build_connector_meta(StepOutput()), ConnectorMeta)
    assert_type(stack.update_connector_output(stack.worker.get_finished()), LoadReport)
    assert_type(stack.events.take(), list[CacheEvent])
    assert_type(stack.events.take_block_events(), list[BlockEvent])
    assert_type(stack.request_account("r"), RequestAccount | None)
    assert_type(stack.close(), bool)


def wrong_uses_are_refused(spec: EngineSpec, stack: tierkv.Stack, request: MyRequest) -> None:
    """Each of these lines is an error of the user, and the type checker reports it."""
    tierkv.open_stack(42, spec)  # type: ignore[arg-type]
    tierkv.open_stack({"host": {}})  # type: ignore[call-arg]
    GroupSpec(block_tokens="16", page_bytes=(1,))  # type: ignore[arg-type]
    spec.model = "another"  # type: ignore[misc]
    stack.on_new_request("a request")  # type: ignore[arg-type]
    tokens, _ = stack.get_num_new_matched_tokens(request, 0)
    tokens + 1  # type: ignore[operator]


def keys() -> None:
    """A key is bytes; not all bytes are a key."""
    key = make_key(b"hash", 0)
    assert_type(key, Key)
    assert_type(split_key(key), tuple[bytes, int])
    Capabilities(durable=1)  # type: ignore[arg-type]


# -- a plugin ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class MyOptions:
    """Options of a tier."""

    path: str


class MyBackend:
    """The four verbs, and no base class."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """A narrower answer than asked for is fine."""
        return [False for _ in keys]

    def read_into(self, requests: Sequence[ReadRequest]) -> list[ReadResult]:
        """A number, None, or an error as a value."""
        return [BackendUnavailableError("gone", key=request.key) for request in requests]

    def write(self, requests: Sequence[WriteRequest]) -> list[WriteResult]:
        """None, or an error as a value."""
        return [None for request in requests if request.frame]

    def delete(self, keys: Sequence[Key]) -> list[WriteResult]:
        """None, or an error as a value."""
        return [None for _ in keys]

    def close(self) -> None:
        """Nothing to release."""


class HalfABackend:
    """A backend that cannot read."""

    def contains(self, keys: Sequence[Key]) -> list[bool]:
        """The only verb."""
        return [False for _ in keys]


def open_mine(context: BackendContext, options: MyOptions) -> Backend:
    """As registered below."""
    assert_type(context.capacity_bytes, int | None)
    assert_type(context.namespace.fingerprint(), bytes)
    return MyBackend() if options.path else HalfABackend()  # type: ignore[return-value]


@hookimpl
def tierkv_backends() -> Iterable[BackendPlugin]:
    """A hook keeps its type under its mark."""
    return [BackendPlugin("mine", "A tier of mine", MyOptions, Capabilities(durable=True), open_mine)]


assert_type(list(tierkv_backends()), list[BackendPlugin])


@hookimpl
def tierkv_observe(events: Sequence[CacheEvent]) -> None:
    """Events are read-only."""
    for event in events:
        assert_type(event.keys, tuple[Key, ...])
        event.tier = "other"  # type: ignore[misc]


def errors_are_values(result: ReadResult, plugin: CodecPlugin, backend: Backend | AsyncBackend) -> int:
    """A result has three forms, and all must be looked at."""
    if isinstance(result, TierKVError):
        assert_type(result.retryable, bool)
        return 0
    assert_type(result, int | None)
    plugin.lossy = True  # type: ignore[misc]
    assert_type(backend, Backend | AsyncBackend)
    return result or 0


class MyListener:
    """Structurally a policy that listens; it inherits nothing."""

    def observe_request(self, observation: RequestObservation) -> None:
        """Look at who asks, and for what."""
        assert_type(observation.paths, tuple[tuple[Key, ...], ...])
        assert_type(observation.hints.continues, float | None)


listener: RequestAwarePolicy = MyListener()


class MyCodec:
    """Both ways, and no base class."""

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:
        """Nothing is gained."""
        assert_type(frame.identity, bytes)
        frame.notes[0] = 1
        return None if raw else len(out)

    def decode(self, stored: memoryview, out: memoryview, frame: CodecFrame) -> None:
        """Decode by copying."""
        out[:] = stored


class HalfACodec:
    """A codec that cannot decode."""

    def encode(self, raw: memoryview, out: memoryview, frame: CodecFrame) -> int | None:
        """The only way."""


def open_codec(context: CodecContext, options: MyOptions) -> Codec:
    """As registered with its options."""
    assert_type(context.namespace.dtype, str)
    return MyCodec() if options.path else HalfACodec()  # type: ignore[return-value]


codec_plugin = CodecPlugin("mine", "A codec of mine", open_codec, lossy=True, options=MyOptions)

"""Requests of a trace, with the keys of their chunks: one by one, or as a table that can be played several times.

:mod:`~tierkv.replay.trace_lines` describes the format.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np

from tierkv.errors import ConfigError
from tierkv.replay.trace_lines import MS, ChunkId, read_lines
from tierkv.types.hints import NO_HINTS, RequestHints
from tierkv.types.keys import Key, make_key, make_keys, make_scope

CHUNKS_MAX = 10_000_000
"""Chunks of a trace that are read, unless another number is given. They take up to 250 bytes each while being read."""

_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One request of a trace."""

    at_s: float
    """Arrival in seconds since the trace's zero."""
    keys: tuple[Key, ...]
    """Keys of its chunks, from the front of the prompt."""
    input_tokens: int | None = None
    """Tokens of the prompt; None: the trace does not give them."""
    output_tokens: int | None = None
    """Tokens of the answer; None: the trace does not give them."""
    tenant: str | None = None
    """Tenant; None: none."""
    hints: RequestHints = NO_HINTS
    """Hints, with the session."""


class KeysOfIds:
    """Keys by tenant and id of a trace. Each key is one shared object, because a trace repeats ids."""

    def __init__(self) -> None:
        self._keys: dict[tuple[str | None, ChunkId], Key] = {}

    def key(self, chunk_id: ChunkId, tenant: str | None = None) -> Key:
        """Return the same object for each repetition of an id."""
        key = self._keys.get((tenant, chunk_id))
        if key is None:
            raw = chunk_id.encode() if isinstance(chunk_id, str) else chunk_id.to_bytes(_ID_BYTES, "big")
            key = self._keys[tenant, chunk_id] = make_key(raw, 0, make_scope(tenant, None))
        return key


def read_trace(path: Path, units_per_s: float = MS) -> Iterator[TraceRequest]:
    """Yield the requests of a trace, in order. units_per_s: units of a timestamp per second.

    Raises:
        ConfigError: the file cannot be read, or a line is no request. The message names the line and the fault.
    """
    ids = KeysOfIds()
    for line in read_lines(path, units_per_s):
        keys = tuple(ids.key(chunk_id, line.tenant) for chunk_id in line.chunk_ids)
        yield TraceRequest(line.at_s, keys, line.input_tokens, line.output_tokens, line.tenant, line.hints)


class Trace:
    """Requests of a trace as columns: 4 bytes per chunk, some 40 bytes per request. Chunks are numbered from 0.

    Attributes:
        chunks: numbers of the chunks of all requests, one after the other.
        starts: index of each request's first chunk in ``chunks``; one more entry for the end.
        at_s: arrivals, in seconds.
        input_tokens: tokens of the prompts; -1: not given.
        output_tokens: tokens of the answers; -1: not given.
        tenants: number of the tenant of each request, in ``tenant_names``.
        tenant_names: None for requests without a tenant.
        hints: hints of each request, as its number in ``hints_known``.
        hints_known: different hints.
        num_chunks: different chunks.
        is_cut: whether the trace goes on behind the last request here, because of the bound on chunks.
    """

    def __init__(self) -> None:
        self.chunks = array("I")
        self.starts = array("Q", [0])
        self.at_s = array("d")
        self.input_tokens = array("i")
        self.output_tokens = array("i")
        self.tenants = array("I")
        self.tenant_names: list[str | None] = []
        self.hints = array("I")
        self.hints_known: list[RequestHints] = []
        self.num_chunks = 0
        self.is_cut = False

    def __len__(self) -> int:
        """Number of requests."""
        return len(self.at_s)

    @property
    def has_hints(self) -> bool:
        """Whether a hint of some request may change where its chunks are stored or loaded from, or how long."""
        return any(
            hints.load_tiers is not None
            or hints.store is not None
            or hints.max_load_tokens is not None
            or hints.max_offload_tokens is not None
            or hints.has_retention
            for hints in self.hints_known
        )

    def requests(self) -> Iterator[TraceRequest]:
        """Yield all requests. Keys are made anew, so that none is kept."""
        scopes = [make_scope(name, None) for name in self.tenant_names]
        for number, (start, end) in enumerate(pairwise(self.starts)):
            raw = [chunk.to_bytes(_ID_BYTES, "big") for chunk in self.chunks[start:end]]
            tenant = self.tenants[number]
            yield TraceRequest(
                self.at_s[number],
                tuple(make_keys(raw, 0, scopes[tenant])),
                _known(self.input_tokens[number]),
                _known(self.output_tokens[number]),
                self.tenant_names[tenant],
                self.hints_known[self.hints[number]],
            )


def load_trace(
    path: Path,
    chunks_max: int = CHUNKS_MAX,
    progress: Callable[[int], None] = lambda _: None,
    units_per_s: float = MS,
) -> Trace:
    """Read a trace into memory, up to the request with which it has more than ``chunks_max`` chunks.

    Args:
        path: the file.
        chunks_max: bound on chunks of all requests together.
        progress: called now and then with the number of requests so far.
        units_per_s: units of a timestamp per second.

    Raises:
        ConfigError: as :func:`read_trace`; or the first request alone has more chunks than ``chunks_max``.
    """
    trace = Trace()
    numbers: dict[tuple[int, ChunkId], int] = {}
    tenants: dict[str | None, int] = {}
    hints: dict[RequestHints, int] = {}
    for line in read_lines(path, units_per_s):
        if len(trace.chunks) + len(line.chunk_ids) > chunks_max:
            require_requests(path, len(trace), chunks_max)
            trace.is_cut = True
            break
        tenant = tenants.setdefault(line.tenant, len(tenants))
        trace.chunks.extend([numbers.setdefault((tenant, one), len(numbers)) for one in line.chunk_ids])
        trace.starts.append(len(trace.chunks))
        trace.at_s.append(line.at_s)
        trace.input_tokens.append(-1 if line.input_tokens is None else line.input_tokens)
        trace.output_tokens.append(-1 if line.output_tokens is None else line.output_tokens)
        trace.tenants.append(tenant)
        trace.hints.append(hints.setdefault(line.hints, len(hints)))
        if not len(trace) % 4096:
            progress(len(trace))
    trace.tenant_names, trace.hints_known, trace.num_chunks = list(tenants), list(hints), len(numbers)
    progress(len(trace))
    return trace


def count_misplaced(chunks: array[int], starts: array[int]) -> int:
    """Return the number of chunks that follow different chunks in different prompts.

    Their ids do not identify all chunks before them, so a replay finds them behind a prefix that they do not have.

    Args:
        chunks: numbers of the chunks of all prompts, one after the other.
        starts: index of each prompt's first chunk; one more entry for the end.
    """
    ids, begins = np.frombuffer(chunks, np.uint32), np.frombuffer(starts, np.uint64)
    before = np.empty(len(ids), np.int64)
    before[1:] = ids[:-1]
    before[begins[begins < len(ids)]] = -1
    first = np.empty(int(ids.max(initial=0)) + 1, np.int64)
    first[ids[::-1]] = before[::-1]  # of several values for one place, the last one stays: that of the first prompt
    return len(np.unique(ids[first[ids] != before]))


def require_requests(path: Path, requests: int, chunks_max: int) -> None:
    """Refuse a trace whose first request is beyond the bound on chunks.

    Raises:
        ConfigError: no request was read.
    """
    if not requests:
        raise ConfigError(f"trace {path}: its first request has more than {chunks_max:,} chunks; raise --chunks-max")


def _known(tokens: int) -> int | None:
    return None if tokens < 0 else tokens

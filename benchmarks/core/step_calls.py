"""Function calls on the engine's thread: per lookup, per store of a few chunks, per decode step of running requests.

A count does not depend on the machine or its load: repeated runs give the same figures, so two versions of the code can
be compared on a busy machine. ``sys.setprofile`` counts calls of Python functions (each resumption of a generator is
one) and of C functions on this one thread, from the engine's own calls down. I/O threads and copy threads are not
counted. The limit is the number of calls that the engine itself makes into the stack.

Causes of variation are removed: the paths are warm, Python's garbage collector is off, and the engine states its
prefill rate. While a tier or a copy thread has work in flight, the engine waits, not counted, before its next call. A
round with a late tier is repeated. Most decode steps are rests (:mod:`tierkv.stack.rests`), and so is the one whose
count a row has. ``TIERKV_VALIDATE`` must be unset, otherwise the checks count too; ``python -m
benchmarks`` unsets it. Counts depend on the version of Python.
"""

from __future__ import annotations

import gc
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import tierkv
from benchmarks.call_meters import Calls
from benchmarks.core.counted_calls import CHUNK_BYTES, CHUNK_TOKENS, ENGINE, SETTLE_S, CountedStack, Meter
from benchmarks.core.rig import BLOCK_TOKENS, BenchRequest
from benchmarks.measure import Settings
from benchmarks.rows import Row
from tierkv.types.engine import ScheduledRequest

CHUNKS = 4
"""Chunks of a prompt that is looked up or stored."""
RUNNING = 8
"""Requests of a decode step."""
STAGGER_TOKENS = 2
"""Tokens by which each request is ahead of the previous one: in every second step, one of them needs a block."""
WARM_UP_ROUNDS = 8
"""Rounds until the full host tier is full, the read speed of the disk is known and no path is new."""
TRIES = 5
"""Tries of a round until the tier was not late; each try waits longer."""
STORED = 1
"""Seed of the prompt that is stored."""


Round = dict[str, Calls]
"""Name of each part -> its calls."""


def lookup_in_host(counted: CountedStack, seed: int) -> Round:
    """Count the first question of a request whose chunks are all in the host tier."""
    arrival, question = Calls(), Calls()
    prompt = counted.new_prompt(CHUNKS, seed)
    arrival.of(counted.stack.on_new_request, prompt)
    tokens, _ = question.of(counted.stack.get_num_new_matched_tokens, prompt, 0)
    _require(tokens)
    counted.finish(prompt)
    return {"the question": question, "on_new_request before it": arrival}


def lookup_on_disk(counted: CountedStack, seed: int) -> Round | None:
    """Count from the first question of a request whose chunks are all on disk only, to its answer."""
    counted.stack.reset_cache()
    counted.step()
    first, second = Calls(), Calls()
    prompt = counted.new_prompt(CHUNKS, seed)
    counted.stack.on_new_request(prompt)
    tokens, _ = first.of(counted.stack.get_num_new_matched_tokens, prompt, 0)
    if tokens is not None:
        raise RuntimeError(f"the chunks are only on disk, and the first question was answered with {tokens} tokens")
    step = counted.step()
    counted.settle()
    tokens, _ = second.of(counted.stack.get_num_new_matched_tokens, prompt, 0)
    late = tokens is None
    while tokens is None:
        counted.step()
        tokens, _ = counted.stack.get_num_new_matched_tokens(prompt, 0)
    _require(tokens)
    counted.finish(prompt)
    return None if late else {"the first question": first, "the step": step, "the second question": second}


def store(counted: CountedStack, seed: int | None = None) -> Round | None:
    """Count from the step that computes a prompt to the one in which the stack takes in that its chunks are on disk."""
    prompt = counted.new_prompt(CHUNKS, seed)
    counted.stack.on_new_request(prompt)
    tokens, _ = counted.stack.get_num_new_matched_tokens(prompt, 0)
    if tokens != 0:
        raise RuntimeError(f"a prompt that was never stored was answered with {tokens} tokens")
    counted.allocate(prompt, len(prompt.block_hashes), 0)
    before = counted.keys_done()
    offers = counted.step([counted.begin(prompt)])
    copied = counted.step()
    counted.settle()
    written = counted.step()
    late = counted.keys_done() != before + CHUNKS
    counted.finish(prompt)
    parts = {
        "the step that offers them": offers,
        "the step after which the host tier has them": copied,
        "the step after which the disk has them": written,
    }
    return None if late else parts


class Decoding:
    """Requests that generate a token in every step.

    Args:
        counted: the stack.
        chunks: of each request when it ends; it begins with one.
    """

    def __init__(self, counted: CountedStack, chunks: int = 2) -> None:
        self._counted = counted
        self._chunks = chunks
        self._prompts: list[tuple[BenchRequest, list[bytes]]] = []
        begin = [self._begin(number) for number in range(RUNNING)]
        counted.step(begin)
        for _ in range(2):
            counted.step()
            counted.settle()

    def _begin(self, number: int) -> ScheduledRequest:
        counted, tokens = self._counted, CHUNK_TOKENS + STAGGER_TOKENS * number
        prompt = counted.new_prompt(self._chunks)
        hashes = prompt.block_hashes
        prompt.num_tokens = prompt.num_prompt_tokens = tokens
        prompt.block_hashes = hashes[: tokens // BLOCK_TOKENS]
        counted.stack.on_new_request(prompt)
        counted.stack.get_num_new_matched_tokens(prompt, 0)
        counted.allocate(prompt, -(-tokens // BLOCK_TOKENS), 0)
        self._prompts.append((prompt, hashes))
        return counted.begin(prompt)

    def step(self, meter: type[Meter]) -> tuple[int, int, Meter]:
        """Make a decode step. Returns the numbers of new blocks and of completed chunks, and the step's cost."""
        counted, scheduled, blocks, chunks = self._counted, [], 0, 0
        for prompt, _ in self._prompts:
            computed = prompt.num_tokens
            prompt.num_tokens += 1  # what was sampled is computed now
            new = (counted.grow(prompt),) if computed % BLOCK_TOKENS == 0 else ()
            blocks += len(new)
            chunks += prompt.num_tokens % CHUNK_TOKENS == 0
            scheduled.append(ScheduledRequest(prompt.request_id, computed, 1, (new,)))
        cost = counted.metered_step(scheduled, meter())
        for prompt, hashes in self._prompts:
            prompt.block_hashes += hashes[len(prompt.block_hashes) : prompt.num_tokens // BLOCK_TOKENS]
            if prompt.num_tokens > self._chunks * CHUNK_TOKENS:
                raise RuntimeError("a request is longer than its prompt was made: this is too long a run")
        return blocks, chunks, cost

    def finish(self) -> None:
        """End all requests."""
        for prompt, _ in self._prompts:
            self._counted.finish(prompt)


def run(settings: Settings) -> Iterator[Row]:
    """Measure lookups, stores and decode steps; a row has the most frequent count of its rounds."""
    if os.environ.get("TIERKV_VALIDATE") == "1":
        raise RuntimeError("TIERKV_VALIDATE is set: the checks would be counted, too")
    rounds = settings.pick(7, 1)
    gc.collect()
    gc.disable()
    try:
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            with open_stack(Path(folder) / "roomy", 1024) as stack:
                yield from _rows_with_room(CountedStack(stack), rounds)
            with open_stack(Path(folder) / "full", 4 * CHUNKS) as stack:
                counted = CountedStack(stack)
                yield _row(
                    f"a store of {CHUNKS} chunks into a full host tier",
                    _repeat(counted, lambda: store(counted), rounds),
                )
    finally:
        gc.enable()


def _rows_with_room(counted: CountedStack, rounds: int) -> Iterator[Row]:
    store(counted, STORED)
    in_host = _repeat(counted, lambda: lookup_in_host(counted, STORED), rounds)
    yield _row(f"a lookup of {CHUNKS} chunks, all in the host tier", in_host, "the question")
    on_disk = _repeat(counted, lambda: lookup_on_disk(counted, STORED), rounds)
    yield _row(f"a lookup of {CHUNKS} chunks, all on disk", on_disk)
    yield _row(f"a store of {CHUNKS} chunks", _repeat(counted, lambda: store(counted), rounds))
    yield from _decode_rows(counted, rounds)


def _decode_rows(counted: CountedStack, rounds: int) -> Iterator[Row]:
    decoding = Decoding(counted)
    for _ in range(BLOCK_TOKENS):  # until each has got its first new block
        decoding.step(Calls)
    by_blocks: dict[int, list[Round]] = {0: [], 1: []}
    for _ in range(2 * rounds):
        blocks, chunks, calls = decoding.step(Calls)
        if chunks:
            raise RuntimeError("a request completes a chunk: this is too long a run")
        by_blocks[blocks].append({"the step": calls})
    yield _row(f"a decode step of {RUNNING} requests, none of which gets a block", by_blocks[0])
    yield _row(f"a decode step of {RUNNING} requests, one of which gets a block", by_blocks[1])


def open_stack(path: Path, host_chunks: int) -> tierkv.Stack:
    """Open a stack on a disk tier."""
    disk = {"backend": "disk", "path": str(path), "capacity": 256 << 20, "min_free_bytes": 0, "segment_bytes": 32 << 20}
    host = {"capacity": host_chunks * CHUNK_BYTES * 17 // 16}  # with room for their headers
    return tierkv.open_stack({"chunk": {"tokens": CHUNK_TOKENS}, "host": host, "tiers": [disk]}, ENGINE)


def _repeat(counted: CountedStack, work: Callable[[], Round | None], rounds: int) -> list[Round]:
    """Make rounds in which the tier was not late, after some that warm up."""
    for _ in range(WARM_UP_ROUNDS):
        work()
    return [_in_time(counted, work) for _ in range(rounds)]


def _in_time(counted: CountedStack, work: Callable[[], Round | None]) -> Round:
    counted.settle_s = SETTLE_S
    for _ in range(TRIES):
        done = work()
        if done is not None:
            return done
        counted.settle_s *= 2
    raise RuntimeError(f"a tier needs more than {counted.settle_s / 2} s for {CHUNKS} chunks: nothing can be counted")


def _require(tokens: int | None) -> None:
    if tokens != CHUNKS * CHUNK_TOKENS:
        raise RuntimeError(f"{CHUNKS * CHUNK_TOKENS} tokens are stored, and the answer was {tokens}")


def _row(what: str, rounds: Sequence[Round], *counted: str) -> Row:
    """Row with the most frequent count of the named parts, or of all; each part's calls are in ``extra``."""
    names = counted or tuple(rounds[0])
    totals = [sum(done[name].total for name in names) for done in rounds]
    usual = statistics.mode(totals)
    one: Mapping[str, Calls] = rounds[totals.index(usual)]
    least = sum(one[name].engine for name in names)
    extra = {
        "Python functions": sum(one[name].python for name in names),
        "C functions": sum(one[name].c for name in names),
    }
    if len(one) > 1:
        extra |= {f"{name}, calls": part.total for name, part in one.items()}
    extra |= {"rounds with another count": sum(total != usual for total in totals)}
    return Row(what, "calls", usual, "calls that the engine itself makes", least, extra=extra)

"""Tokens per chunk, from 16 to 1,024: the hits that long chunks lose, and what short ones cost.

A hit ends at the last whole chunk that two prompts share, so long chunks lose tokens at each end. Every chunk costs the
engine's thread, the disk and a bucket a fixed time, so short chunks cost more per token. Rows for each size:

- the share of prompt tokens that hit, without bounds on room, beside chunks of one token; in made conversations, and in
  a trace with ``--trace FILE`` whose blocks have 512 tokens;
- the engine's thread, a disk and a bucket on this machine, per 1,000 tokens, beside chunks of 1,024 tokens.
"""

from __future__ import annotations

import math
import random
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from benchmarks.core.chunk_costs import LOAD, STORE, ChunkCosts, play_prompts, prompt_tokens
from benchmarks.measure import Cost, Settings, medians, progress, take_turns, timed
from benchmarks.rows import Row
from benchmarks.stress.clocked_core import without_collector
from benchmarks.tiers.object_store import REQUESTS, served_bucket
from benchmarks.tiers.rig import Frames, OpenTier, opened
from tierkv.replay.trace_lines import TraceLine, read_lines

SIZES = (16, 32, 64, 128, 256, 512, 1024)
COST_SIZES = (16, 64, 256, 1024)
"""Sizes whose cost is measured."""
MODELS = {"small model": 12 << 10, "large model": 128 << 10}
"""Bytes of a token: 24 layers with 2 heads of 64 values, and 32 layers with 8 heads of 128 values; 2 bytes a value."""
TRACE_BLOCK = 512
"""Tokens of a block of the trace."""
SYSTEM_TOKENS, ANSWER_TOKENS, QUESTION_TOKENS = 1_873, 280, 90
"""Length of the system prompt, and medians of the lengths of answers and questions."""
OptionsOf = Callable[[Frames], dict[str, object]]
"""Options of a tier for some frames."""
CONTINUED = 0.7
"""Share of the made requests that continue a conversation."""


class SharedPrefix(NamedTuple):
    """Request of a workload: its tokens, and how many of them an earlier request has had."""

    prompt_tokens: int
    shared_tokens: int


def hit_percent(requests: Iterable[SharedPrefix], chunk_tokens: int) -> float:
    """Share of all prompt tokens that are in whole chunks which an earlier request stored, in percent."""
    total = hits = 0
    for tokens, shared in requests:
        total += tokens
        hits += min(shared, tokens - 1) // chunk_tokens * chunk_tokens  # the last token is always computed
    return 100 * hits / max(1, total)


def made_conversations(seed: int, count: int) -> list[SharedPrefix]:
    """Conversations that share a system prompt; a request continues one of the latest, or begins one."""
    rng = random.Random(seed)

    def length(median: int) -> int:
        return 1 + int(rng.lognormvariate(math.log(median), 0.8))

    latest: list[int] = []  # tokens of each conversation, with the last answer
    requests: list[SharedPrefix] = []
    for number in range(count):
        known = SYSTEM_TOKENS if number else 0
        if latest and rng.random() < CONTINUED:
            known = latest.pop(rng.randrange(len(latest)))
        tokens = max(known, SYSTEM_TOKENS) + length(QUESTION_TOKENS)
        requests.append(SharedPrefix(tokens, known))
        latest.append(tokens + length(ANSWER_TOKENS))
        del latest[:-150]
    return requests


def shared_in_trace(lines: Iterable[TraceLine]) -> Iterator[SharedPrefix]:
    """Shared tokens of each request of a trace.

    Where a prompt ends within a block, another one that begins with it shares this end as well, although the id of its
    block differs. Where prompts part within a block otherwise, the trace does not tell where: the whole blocks count.
    """
    seen: set[object] = set()
    ends: dict[object, int] = {}  # by last whole block of a request: its tokens, with those of the answer
    for line in lines:
        ids = line.chunk_ids
        tokens = line.input_tokens or len(ids) * TRACE_BLOCK
        blocks = next((number for number, one in enumerate(ids) if one not in seen), len(ids))
        shared = blocks * TRACE_BLOCK
        if blocks:
            shared = max(shared, min(ends.get(ids[blocks - 1], 0), shared + TRACE_BLOCK - 1))
        yield SharedPrefix(tokens, min(shared, tokens))
        seen.update(ids)
        if whole := tokens // TRACE_BLOCK:
            last = ids[min(whole, len(ids)) - 1]
            ends[last] = max(ends.get(last, 0), tokens + (line.output_tokens or 0))


def run(settings: Settings) -> Iterator[Row]:
    """Measure hits for every size, then costs for some."""
    made = [made_conversations(seed, settings.pick(4_000, 50)) for seed in range(settings.pick(3, 1))]
    yield from _hit_rows("made conversations", [one for requests in made for one in requests])
    if settings.trace is not None:
        yield from _hit_rows(settings.trace.name.split(".")[0], list(shared_in_trace(read_lines(settings.trace))))
    yield from _engine_rows(settings)
    sizes = settings.pick(COST_SIZES, (16, 1024))
    for model, token_bytes in settings.pick(MODELS, {"small model": 1 << 10}).items():
        with tempfile.TemporaryDirectory(dir=settings.directory, prefix="tierkv-benchmark-") as folder:
            yield from _tier_rows(f"disk, {model}", partial(_disk, Path(folder)), sizes, token_bytes, settings)
        with served_bucket() as (url, endpoint):
            yield from _tier_rows(f"bucket, {model}", partial(_bucket, url, endpoint), sizes, token_bytes, settings)


def _hit_rows(workload: str, requests: Sequence[SharedPrefix]) -> Iterator[Row]:
    most = hit_percent(requests, 1)
    for size in SIZES:
        yield Row(
            f"{workload}, {size} tokens a chunk", "% hit", hit_percent(requests, size), "chunks of one token", most
        )


def _engine_rows(settings: Settings) -> Iterator[Row]:
    prompts = prompt_tokens(settings.pick(8, 2), settings.pick(32_768, 8_192))
    lengths = [tokens // SIZES[-1] * SIZES[-1] for tokens in prompts]  # whole chunks of every size
    sizes, totals = settings.pick(COST_SIZES, (16, 1024)), {}
    for size in sizes:
        with without_collector():
            costs = play_prompts(size, 1, lengths)
        stored, loaded = (sum(part.get(call, 0.0) for call in calls) for part, calls in _parts(costs))
        totals[size] = (stored + loaded + costs.lookup_us) * 1000 / size
        progress(f"chunk_sizes: engine, {size} tokens")
    for size in sizes:
        yield _cost_row("engine's thread", size, "us", totals[size], totals[sizes[-1]])


def _parts(costs: ChunkCosts) -> tuple[tuple[dict[str, float], Sequence[str]], ...]:
    return (costs.stored, STORE), (costs.loaded, LOAD)


def _cost_row(what: str, size: int, unit: str, measured: float, limit: float) -> Row:
    return Row(f"{what}, {size} tokens a chunk, per 1,000 tokens", unit, measured, "chunks of 1,024 tokens", limit)


def _tier_rows(
    what: str, options_of: OptionsOf, sizes: Sequence[int], token_bytes: int, settings: Settings
) -> Iterator[Row]:
    """Put and get the same bytes in chunks of each size."""
    total_tokens = settings.pick(max(2 * sizes[-1], (96 << 20) // token_bytes), 2 * sizes[-1])
    puts: list[float] = []
    gets: list[float] = []
    for size in sizes:
        frames = Frames(total_tokens // size, size * token_bytes)
        with opened(options_of(frames), frames) as tier:
            put, get = take_turns([partial(_put, tier, frames), partial(_get, tier, frames)], settings.pick(3, 1))
            frames.verify()
        tokens = size * len(frames.keys)
        puts.append(1e6 * medians(put).wall_s / tokens)
        gets.append(1e6 * medians(get).wall_s / tokens)
        progress(f"chunk_sizes: {what}, {size} tokens")
    for verb, costs in (("put", puts), ("get", gets)):
        for size, cost in zip(sizes, costs, strict=True):
            yield _cost_row(f"{verb}, {what}", size, "ms", cost, costs[-1])


def _put(tier: OpenTier, frames: Frames) -> Cost:
    tier.delete(frames)
    frames.fill()
    return timed(partial(tier.put, frames))


def _get(tier: OpenTier, frames: Frames) -> Cost:
    frames.wipe()
    return timed(partial(tier.get, frames))


def _disk(folder: Path, frames: Frames) -> dict[str, object]:
    space = len(frames.keys) * frames.frame_bytes
    path = folder / str(frames.payload_bytes)
    sizes = {"capacity": 2 * space, "segment_bytes": space, "min_free_bytes": 0}
    return {"backend": "disk", "path": str(path), **sizes}


def _bucket(url: str, endpoint: str, frames: Frames) -> dict[str, object]:
    place = f"{url}/{frames.payload_bytes}"
    return {
        "backend": "fsspec", "url": place, "endpoint_url": endpoint,
        "concurrent_requests": REQUESTS, "warm_up_keys_max": 0,
    }  # fmt: skip

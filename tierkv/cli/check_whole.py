"""Checks that concern several tiers, or the machine: they need no plugin, and change nothing."""

from __future__ import annotations

import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from tierkv.abc import CheckResult
from tierkv.abc.places import exists, why_not_writable
from tierkv.config import ChunkConfig, HostConfig, ResolvedTier, StackConfig, TierConfig
from tierkv.frames.frame import frame_bytes
from tierkv.memory.available import usable_bytes
from tierkv.types.cache_events import HOST
from tierkv.types.sizes import round_size

MEMORY_SHARE_MAX = 0.8
"""Share of the machine's memory above which a host tier gets a warning."""

BLOCK_TOKENS = 16
"""Tokens of a GPU block where the stack's description does not say: the usual number."""

CHUNK_TOKENS_MAX = 512
"""Tokens per chunk above which hits lose a tenth and more (``python -m benchmarks chunk_sizes``)."""

REMOTE_CHUNK_TOKENS_MIN = 64
"""Tokens per chunk below which a tier with a request per chunk spends most time on requests; likewise measured."""

_VARIABLE = re.compile(r"\$\{?\w+\}?|%\w+%")

_HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage")

FILES_MAX = 10_000
"""Files of one tier that are added up; of more, the tier counts as smaller than it is."""


def check_whole(
    host_capacity: int | None, tiers: Sequence[ResolvedTier], chunk: ChunkConfig | None = None
) -> Iterator[tuple[str, CheckResult]]:
    """Yield the name of a tier with each finding: memory of the host tier, chunks, shared places, capacities together.

    Args:
        host_capacity: of the host tier, in bytes; None: unknown.
        tiers: lower tiers.
        chunk: size of chunks; None: unknown.
    """
    if host_capacity is not None:
        yield HOST, check_memory(host_capacity, usable_bytes())
    yield HOST, check_huge_pages(_HUGE_PAGES)
    if chunk is not None:
        yield from check_chunk(chunk, tiers)
    places = [(tier, place) for tier in tiers if (place := place_of(tier)) is not None]
    yield from check_names(places)
    yield from check_places(places)
    yield from check_capacities(places)


def check_plan(config: StackConfig) -> Iterator[tuple[str, CheckResult]]:
    """Yield a finding where the store plan wants other chunks: an engine with such a stack would not start."""
    blocks, tokens = config.chunk.blocks, config.chunk.tokens
    if config.store.plan != "lazy" or blocks == 1:
        return
    size = f"chunk.blocks = {blocks}" if blocks else f"chunk.tokens = {tokens} is often more than one"
    detail = f'store.plan = "lazy" stores single blocks, and {size}'
    fix = 'set chunk.blocks = 1, or store.plan = "eager"'
    yield "stack", CheckResult("store.plan", ok=blocks is None, detail=detail, fix=fix, warns=blocks is None)


def check_files(config: StackConfig) -> Iterator[tuple[str, CheckResult]]:
    """Yield a finding for each file that the stack writes itself, and cannot open without its folder."""
    tokens = config.events.tokens_path if config.events.enabled else None
    for key, name in (("record.path", config.record.path), ("events.tokens_path", tokens)):
        if name is not None:
            folder = Path(name).resolve().parent
            other = f"or let {key} name a file in another folder"
            if not folder.is_dir():
                fix = f"mkdir {folder}, {other}"
                yield "stack", CheckResult(key, ok=False, detail=f"{folder} is no directory", fix=fix)
            elif why := why_not_writable(folder):
                fix = f"give this user the right to write in it, {other}"
                yield "stack", CheckResult(key, ok=False, detail=why, fix=fix)
            elif Path(name).is_dir():
                fix = f"let {key} name a file, such as {Path(name) / 'run.jsonl'}"
                yield "stack", CheckResult(key, ok=False, detail=f"{name} is a directory", fix=fix)
            else:
                yield "stack", CheckResult(key, ok=True, detail=f"{folder} can be written")


def check_spans(config: StackConfig) -> Iterator[tuple[str, CheckResult]]:
    """Yield a finding where spans are asked for: whether this Python has what makes them."""
    if config.record.spans is None:
        return
    try:
        import tierkv.recording.exporting  # noqa: F401, PLC0415 - an extra, only if it is asked for
    except ImportError as error:
        # A warning: the engine may run with another Python.
        fix = "where the engine runs: pip install opentelemetry-sdk opentelemetry-exporter-otlp-proto-http, "
        fix += "or leave the key out: no stack opens without them"
        yield "stack", CheckResult("record.spans", ok=True, detail=str(error), fix=fix, warns=True)
    else:
        yield "stack", CheckResult("record.spans", ok=True, detail="OpenTelemetry is installed")


def check_quotas(host: HostConfig | None, tiers: Sequence[ResolvedTier]) -> Iterator[tuple[str, CheckResult]]:
    """Yield a warning for each tier with quotas above its capacity: no tenant ever reaches one.

    Args:
        host: the host tier; None: unknown.
        tiers: lower tiers.
    """
    lower = [(tier.config.name, tier.config) for tier in tiers]
    known: list[tuple[str, HostConfig | TierConfig]] = [*([] if host is None else [(HOST, host)]), *lower]
    for name, config in known:
        capacity, quota, above = config.capacity, config.tenant_quota, list[str]()
        if capacity is None:
            continue
        if quota is not None and quota > capacity:
            above.append(f"tenant_quota = {round_size(quota)}")
        if named := [size for size in config.tenant_quotas.values() if size > capacity]:  # a salt may be a secret
            above.append(f"{len(named)} of tenant_quotas, up to {round_size(max(named))}")
        if above:
            detail = f"{'; '.join(above)}; capacity = {round_size(capacity)}: no tenant reaches such a quota"
            fix = "set it below the capacity, or leave it out"
            yield name, CheckResult("quotas", ok=True, detail=detail, fix=fix, warns=True)


def check_memory(capacity: int, memory: int) -> CheckResult:
    """Compare the host tier, which is allocated and pinned at start, with the memory of this machine, in bytes."""
    detail = f"{round_size(capacity)} of {round_size(memory)} on this machine"
    most = round_size(MEMORY_SHARE_MAX * memory)
    if capacity < frame_bytes(1):
        fix = f'a number without a unit is bytes: write host.capacity = "{capacity}GiB", or more than a chunk takes'
        return CheckResult("memory", ok=False, detail=f"{round_size(capacity)} hold no chunk of any model", fix=fix)
    if capacity > memory:
        return CheckResult("memory", ok=False, detail=detail, fix=f"lower host.capacity to {most} or less")
    if capacity > MEMORY_SHARE_MAX * memory:
        fix = f"the engine needs memory as well: lower host.capacity to {most} or less"
        return CheckResult("memory", ok=True, detail=detail, fix=fix, warns=True)
    return CheckResult("memory", ok=True, detail=detail)


def check_chunk(chunk: ChunkConfig, tiers: Sequence[ResolvedTier]) -> Iterator[tuple[str, CheckResult]]:
    """Warn of chunks so long that they cost hits, or so short that a tier with a request per chunk is slow."""
    tokens = chunk.tokens or (chunk.blocks or 1) * BLOCK_TOKENS
    size = f"{tokens} tokens" if chunk.tokens else f"{tokens} tokens with blocks of {BLOCK_TOKENS}"
    if tokens > CHUNK_TOKENS_MAX:
        detail = f"{size}: a hit ends at a whole chunk, and loses {tokens // 2} tokens on average"
        fix = f"set chunk.tokens to {CHUNK_TOKENS_MAX} or less"
        yield HOST, CheckResult("chunk", ok=True, detail=detail, fix=fix, warns=True)
    for tier in tiers:
        capabilities = tier.backend.capabilities
        call_bytes = capabilities.preferred_read_bytes or capabilities.preferred_write_bytes
        joins_chunks = not capabilities.shared or call_bytes is not None
        if tokens < REMOTE_CHUNK_TOKENS_MIN and not joins_chunks:
            detail = f"{size}: each chunk is a request of its own here, which is slow below about 2 MiB a chunk"
            fix = "set chunk.tokens to 256 if a token of the model has less than 32 KiB, to 64 below 128 KiB"
            yield tier.config.name, CheckResult("chunk", ok=True, detail=detail, fix=fix, warns=True)


def check_huge_pages(settings: Path) -> CheckResult:
    """Read the kernel's settings that give an arena huge pages: copies and direct reads are faster with them."""
    private, shared = (_chosen(settings / name) for name in ("enabled", "shmem_enabled"))
    detail = f"arena of one process: {private}; arena that worker processes share: {shared}"
    if private == "never":
        fix = f"copies are slower: echo madvise > {settings / 'enabled'}"
        return CheckResult("huge pages", ok=True, detail=detail, fix=fix, warns=True)
    if shared in {"never", "deny"}:
        # No warning: the description of a stack does not say whether its engine has worker processes.
        fix = f"if workers are processes (several GPUs): echo advise > {settings / 'shmem_enabled'}"
        return CheckResult("huge pages", ok=True, detail=detail, fix=fix)
    return CheckResult("huge pages", ok=True, detail=detail)


def _chosen(setting: Path) -> str:
    """Return the word in brackets, such as ``always [madvise] never``; unknown where there is none."""
    try:
        text = setting.read_text(encoding="ascii")
    except (OSError, ValueError):
        return "unknown"
    _, _, chosen = text.partition("[")
    return chosen.partition("]")[0] or "unknown"


def place_of(tier: ResolvedTier) -> Path | None:
    """Return the directory that a tier uses, from its option ``path`` or ``url``; None: it uses none, or says none."""
    path, url = getattr(tier.options, "path", None), getattr(tier.options, "url", None)
    if isinstance(url, str) and url.startswith("file://"):
        path = url.removeprefix("file://")
    return Path(path).expanduser().resolve() if isinstance(path, str | Path) else None


def check_names(places: list[tuple[ResolvedTier, Path]]) -> Iterator[tuple[str, CheckResult]]:
    """Yield a warning for each tier whose directory has the name of a variable, as a shell would replace it."""
    for tier, place in places:
        if variable := _VARIABLE.search(str(place)):
            detail = f"{place}: {variable[0]} is part of the name: no variable is replaced in a stack file"
            fix = "write the path in full, or begin it with ~"
            yield tier.config.name, CheckResult("place", ok=True, detail=detail, fix=fix, warns=True)


def check_places(places: list[tuple[ResolvedTier, Path]]) -> Iterator[tuple[str, CheckResult]]:
    """Yield a failure for each tier whose directory is, or is inside of, that of an earlier one or the reverse."""
    for number, (tier, place) in enumerate(places):
        for other, taken in places[:number]:
            if place == taken or place in taken.parents or taken in place.parents:
                how = "is" if place == taken else "overlaps with"
                detail = f"{place} {how} the place of tier {other.config.name!r}, {taken}"
                yield (
                    tier.config.name,
                    CheckResult("place", ok=False, detail=detail, fix="give each tier its own place"),
                )


def check_capacities(places: list[tuple[ResolvedTier, Path]]) -> Iterator[tuple[str, CheckResult]]:
    """Yield a failure for tiers that fit one by one, and not together, on their file system."""
    by_device: defaultdict[int, list[tuple[ResolvedTier, Path]]] = defaultdict(list)
    for tier, place in places:
        if tier.config.capacity is not None:
            by_device[_existing(place).stat().st_dev].append((tier, place))
    for tiers in by_device.values():
        if len(tiers) > 1:
            names = ", ".join(tier.config.name for tier, _ in tiers)
            free = shutil.disk_usage(_existing(tiers[0][1])).free
            held = sum(held_bytes(place) for place in {place for _, place in tiers})
            wanted = sum(tier.config.capacity or 0 for tier, _ in tiers)
            detail = f"{names} on one file system: {round_size(wanted)} together; {round_size(free)} free, "
            detail += f"{round_size(held)} held by them"
            missing = wanted - free - held
            fix = f"free {round_size(missing)}, or lower their capacities by as much" if missing > 0 else ""
            yield tiers[-1][0].config.name, CheckResult("space together", ok=missing <= 0, detail=detail, fix=fix)


def _existing(place: Path) -> Path:
    return next(path for path in (place, *place.parents) if exists(path))


def held_bytes(place: Path) -> int:
    """Return the bytes that files below a directory take, of at most ``FILES_MAX`` files."""
    total, seen, folders = 0, 0, [place]
    while folders and seen < FILES_MAX:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    seen += 1
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(Path(entry.path))
                    else:
                        total += entry.stat(follow_symlinks=False).st_blocks * 512
        except OSError:  # it is gone, or not to be read; the check of the tier itself has the reason
            continue
    return total

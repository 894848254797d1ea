"""Figures and changes as tables for a terminal, 80 columns wide or more."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tierkv.cli.output import BAD, DIM, DOUBTFUL, GOOD
from tierkv.cli.top.changes import Change
from tierkv.cli.top.figures import OUT, SERVES, StackFigures, TierFigures
from tierkv.types.sizes import round_size

NONE = "-"
WIDE = 100
"""Columns from which on the table has all columns."""
BAR = 5
"""Characters of a fill bar."""
_STYLES = {SERVES: GOOD, OUT: BAD}


def whole_screen(
    source: str, stacks: Sequence[StackFigures], changes: Sequence[Change], note: str, width: int
) -> RenderableType:
    """Render everything.

    Args:
        source: address or path.
        stacks: figures of each stack.
        changes: the latest first.
        note: trouble with the source; empty if there is none.
        width: columns of the terminal.
    """
    clock = time.strftime("%H:%M:%S", time.localtime(max((stack.at_s for stack in stacks), default=time.time())))
    head = Table.grid(expand=True)
    head.add_column(overflow="fold")
    head.add_column(justify="right")
    head.add_row(Text(f"tierkv top  {source}", "bold"), Text(clock, DIM))
    parts: list[RenderableType] = [head]
    if note:
        parts.append(Text(note, BAD))
    for stack in stacks:
        parts += [Text(), *_stack(stack, is_wide=width >= WIDE)]
    if changes:
        parts += [Text(), Text("What happened", "bold"), *(_change(change) for change in changes)]
    return Group(*parts)


def _stack(stack: StackFigures, *, is_wide: bool) -> Iterator[RenderableType]:
    if stack.labels:
        yield Text(stack.labels, "bold")
    hits = f"hits {_percent(stack.hit_rate)} now, {_percent(stack.hit_rate_since_start)} since start"
    tokens = (
        f"{_count(stack.tokens_asked_per_s)} tokens/s asked = {_count(stack.tokens_local_per_s)} in the engine"
        f" + {_count(stack.tokens_loaded_per_s)} loaded + {_count(stack.tokens_computed_per_s)} computed"
    )
    waits = "none deferred"
    if stack.wait_s is not None or stack.deferrals_per_s:
        waits = f"{_count(stack.deferrals_per_s)}/s deferred, mean wait {_seconds(stack.wait_s)}"
    yield Text(f"{hits}; {_count(stack.lookups_per_s)} lookups/s, {waits}")
    yield Text(tokens)
    speeds = f"GPU: {_speed(stack.to_gpu_bytes_per_s)} loaded, {_speed(stack.from_gpu_bytes_per_s)} stored"
    if stack.prefill_tokens_per_s is not None:
        speeds += f"; prefill {_count(stack.prefill_tokens_per_s)} tokens/s"
    yield Text(speeds)
    yield _tiers(stack.tiers, is_wide=is_wide)


def _tiers(tiers: Sequence[TierFigures], *, is_wide: bool) -> Table:
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("tier", "state", "fill", "of"):
        table.add_column(name, no_wrap=True, overflow="ellipsis")
    for name in (
        "hits",
        "read/s",
        "time",
        "write/s",
        "time",
        "queue",
        *(("calls", "age", "evicts/s") if is_wide else ()),
    ):
        table.add_column(name, justify="right", no_wrap=True)
    for tier in tiers:
        wide = (
            NONE if tier.running_ops is None else f"{tier.running_ops}",
            _seconds(tier.queue_age_s or None),
            _count(tier.evictions_per_s),
        )
        table.add_row(
            Text(tier.name),
            _state(tier),
            _fill(tier),
            _size(tier.capacity_bytes),
            _percent(tier.hit_rate if tier.hit_rate is not None else tier.hit_rate_since_start),
            _speed(tier.read_bytes_per_s),
            _seconds(tier.read_s),
            _speed(tier.written_bytes_per_s),
            _seconds(tier.write_s),
            _queue(tier),
            *(wide if is_wide else ()),
        )
    return table


def _state(tier: TierFigures) -> Text:
    if tier.late_ops:
        return Text(f"{tier.late_ops} hang{'s' if tier.late_ops == 1 else ''}", BAD)
    return Text(tier.state, _STYLES.get(tier.state, DOUBTFUL))


def _fill(tier: TierFigures) -> Text:
    if tier.held_bytes is None or not tier.capacity_bytes:
        return Text(NONE if tier.chunks is None else f"{_count(tier.chunks)} chunks")
    share = min(1.0, tier.held_bytes / tier.capacity_bytes)
    full = round(share * BAR)
    is_short = tier.room_bytes is not None and tier.room_bytes < tier.capacity_bytes
    bar = Text("█" * full, DOUBTFUL if is_short else GOOD) + Text("░" * (BAR - full), DIM)
    return bar + Text(f" {share:4.0%}{'!' if is_short else ''}")


def _queue(tier: TierFigures) -> Text:
    """Operations that wait for a call, and chunks that wait to be written."""
    if tier.queued_ops is None:
        return Text(NONE)
    return Text(f"{tier.queued_ops}" + (f"+{_count(tier.waiting_chunks)}" if tier.waiting_chunks else ""))


def _change(change: Change) -> Text:
    when = time.strftime("%H:%M:%S", time.localtime(change.last_s))
    since = "" if change.last_s - change.first_s < 1 else f" (within {change.last_s - change.first_s:.0f} s)"
    who = " ".join(part for part in (change.labels, change.tier) if part)
    style = GOOD if "again" in change.kind else BAD if "OUT" in change.kind else ""
    return Text(f"{when}  ", DIM) + Text(f"{who}: {change.text}{since}" if who else f"{change.text}{since}", style)


def _percent(share: float | None) -> str:
    return NONE if share is None else f"{share:.0%}"


def _size(size_bytes: int | None) -> str:
    return NONE if size_bytes is None else round_size(size_bytes)


def _speed(bytes_per_s: float | None) -> str:
    """Bytes per second with a decimal unit, as hardware states its speed."""
    if bytes_per_s is None:
        return NONE
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if bytes_per_s >= size:
            return f"{_digits(bytes_per_s / size)} {unit}"
    return "0" if bytes_per_s < 1 else f"{bytes_per_s:.0f} B"


def _count(value: float) -> str:
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if value >= size:
            return f"{_digits(value / size)}{unit}"
    return f"{value:.0f}" if value >= 10 or value == int(value) else f"{value:.1f}"  # noqa: PLR2004 - two digits


def _seconds(seconds: float | None) -> str:
    if seconds is None:
        return NONE
    for unit, size in (("h", 3600.0), ("min", 60.0), ("s", 1.0)):
        if seconds >= size:
            return f"{_digits(seconds / size)}{unit}"
    return f"{1000 * seconds:.2f}ms" if seconds < 0.01 else f"{1000 * seconds:.0f}ms"  # noqa: PLR2004 - three digits


def _digits(value: float) -> str:
    """Three digits, without an exponent."""
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else f"{value:.0f}"  # noqa: PLR2004 - where rounding adds one

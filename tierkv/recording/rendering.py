"""Rendering of entries as lines for readers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tierkv.recording.entries import Entry

_GONE = ("removed", "cleared")

Wanted = Callable[[str], bool]
"""Whether the reader asked about a key."""


def entry_line(entry: Entry, is_wanted: Wanted = lambda _: False) -> str:
    """Render one entry as a line."""
    return f"step {entry['step']:>6}  {entry['t']:>+12.6f} s  {_WORDS.get(entry['is'], _unknown)(entry, is_wanted)}"


def _record(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    tiers = ", ".join(entry["tiers"])
    older = "" if entry.get("version", 1) > 1 else "; an older record, which does not tell tenants apart"
    return f"a stack was opened at {entry['opened']} for {entry['model']!r}: {tiers} (process {entry['pid']}){older}"


def _request(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    return f"request {entry['r']}: {entry['before']} -> {entry['after']} ({entry['event']})"


def _prompt(entry: Entry, is_wanted: Wanted) -> str:
    tokens = f" has a prompt of {entry['tokens']} tokens:" if "tokens" in entry else ":"
    return f"request {entry['r']}{tokens} {_count(entry['keys'], is_wanted)} of it, from number {entry['at']} on"


def _answer(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    asked = f"request {entry['r']} asked beyond {entry['local']} tokens"
    if entry["tokens"] is None:
        of = f"; {entry['ready']} of {entry['chunks']} chunks are ready" if entry["chunks"] else ""
        return f"{asked}: ask again, {entry['why']}{of}"
    behind = f"; missing: {entry['missing']}" if "missing" in entry else ""
    why = "its DEADLINE has passed, and this is what was ready" if entry["expired"] else entry["why"]
    return f"{asked}: {entry['tokens']} tokens, {why}{behind}"


def _job(entry: Entry, is_wanted: Wanted) -> str:
    where = "from the GPU to the host tier" if entry["store"] else "from the host tier to the GPU"
    whose = f" for request {entry['r']}" if entry["r"] else ""
    return f"transfer {entry['job']}{whose}: {_count(entry['keys'], is_wanted)} {where}"


def _job_end(entry: Entry, is_wanted: Wanted) -> str:
    if entry["failed"]:
        return f"transfer {entry['job']} ended; FAILED for {_count(entry['failed'], is_wanted)}"
    return f"transfer {entry['job']} ended well"


def _op(entry: Entry, is_wanted: Wanted) -> str:
    return f"{entry['tier']}: {entry['verb']} {entry['op']} of {_count(entry['keys'], is_wanted)} begins"


def _op_end(entry: Entry, is_wanted: Wanted) -> str:
    head = f"{entry['tier']}: {entry['verb']} {entry['op']}"
    if entry["late"]:
        return f"{head} missed its DEADLINE; its result will be ignored"
    bad = entry["bad"]
    if not bad:
        return f"{head} ended well"
    shown_keys = {key: why for key, why in bad.items() if is_wanted(key)} or bad
    shown = "; ".join(f"{key} {why}" for key, why in list(shown_keys.items())[:3])
    more = "" if len(shown_keys) <= 3 else f" and {len(shown_keys) - 3} more"  # noqa: PLR2004 - as many as fit a line
    return f"{head} ended: {entry['ok']} ok, {shown}{more}"


def _not_stored(entry: Entry, is_wanted: Wanted) -> str:
    return f"request {entry['r']} ended before the host tier took {_count(entry['keys'], is_wanted)}: NOT STORED"


def _chunks(entry: Entry, is_wanted: Wanted) -> str:
    match entry["event"]:
        case "stored":
            return f"{entry['tier']}: has {_count(entry['keys'], is_wanted)}"
        case "removed":
            return f"{entry['tier']}: LOST {_count(entry['keys'], is_wanted)}"
    return f"{entry['tier']}: emptied"


def _health(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    return f"{entry['tier']}: {'used again' if entry['usable'] else 'OUT OF SERVICE'}: {entry['why']}"


def _finished(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    account = entry["account"]
    loaded = ", ".join(f"{tokens} tokens from {tier}" for tier, tokens in account.get("loaded_tokens", {}).items())
    parts = [loaded or "nothing was loaded", f"{account.get('stored_tokens', 0)} tokens stored"]
    if account.get("deferrals"):
        parts.append(f"deferred {account['deferrals']} times, {account['deferred_s']:.3f} s in all")
    return f"request {entry['r']} is over: {'; '.join(parts)}"


def _metrics(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    lookups = entry["counters"].get("tierkv_lookups", {}).get("", 0)
    return f"{lookups:.0f} lookups since the previous figures; `tierkv top` shows all of them"


def _reset(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    return "the cache was reset: the host tier is empty"


def _lost(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    return f"{entry['entries']} entries are missing here: the disk was too slow, or failed"


def _unknown(entry: Entry, is_wanted: Wanted) -> str:  # noqa: ARG001 - one signature for all kinds
    return f"{entry['is']} (written by a later version)"


_WORDS: dict[str, Callable[[Entry, Wanted], str]] = {
    "record": _record,
    "request": _request,
    "prompt": _prompt,
    "answer": _answer,
    "job": _job,
    "job end": _job_end,
    "not stored": _not_stored,
    "op": _op,
    "op end": _op_end,
    "chunks": _chunks,
    "health": _health,
    "finished": _finished,
    "metrics": _metrics,
    "reset": _reset,
    "lost": _lost,
}


def _count(keys: list[str], is_wanted: Wanted) -> str:
    """Name the keys that the reader asked about, and count the others."""
    named = [key for key in keys if is_wanted(key)]
    if named and len(named) == len(keys):
        return ", ".join(named)
    if named:
        return f"{', '.join(named)} and {len(keys) - len(named)} more"
    return keys[0] if len(keys) == 1 else f"{len(keys)} chunks"


def explain_losses(entries: Iterable[Entry], is_wanted: Wanted) -> Iterator[str]:
    """Yield a sentence for each time that a tier lost or refused the chunk, and one for the tiers that hold it last."""
    tiers: dict[str, bool] = {}
    blame: dict[str, str] = {}
    for entry in entries:
        kind = entry["is"]
        if kind == "record":
            tiers["host"] = False  # host memory ends with its process
        elif kind == "op end":
            for key, why in entry["bad"].items():
                if is_wanted(key) and entry["verb"] == "read":
                    blame[entry["tier"]] = f"a read found it {why}"
        elif kind == "job end" and any(is_wanted(key) for key in entry["failed"]):
            blame["host"] = "its bytes failed the check on their way to the GPU, or could not be copied"
        elif kind == "not stored" and any(map(is_wanted, entry["keys"])):
            when = f"step {entry['step']}: when request {entry['r']} ended, the host tier had not taken it"
            yield f"{when}: it had no room, or the request had too many chunks left."
        elif kind == "chunks" and entry["event"] == "stored" and any(map(is_wanted, entry["keys"])):
            tiers[entry["tier"]] = True
            blame.pop(entry["tier"], None)
        elif kind == "chunks" and entry["event"] in _GONE and tiers.get(entry["tier"]):
            tiers[entry["tier"]] = False
            because = "the cache was reset" if entry["event"] == "cleared" else "evicted, to make room"
            yield f"step {entry['step']}: {entry['tier']} lost it: {blame.pop(entry['tier'], because)}."
    here = [tier for tier, has in tiers.items() if has]
    yield f"At the end of the record it is in: {', '.join(here) or 'no tier of the record'}."

"""Entries of a record, in words."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from tierkv.recording.entries import Entry

_GONE = ("removed", "cleared")

Mine = Callable[[str], bool]
"""Tells which keys the reader asked about."""


def in_words(entry: Entry, mine: Mine = lambda _: False) -> str:
    """One entry as a line."""
    return f"step {entry['step']:>6}  {entry['t']:>+12.6f} s  {_WORDS.get(entry['is'], _unknown)(entry, mine)}"


def _record(entry: Entry, mine: Mine) -> str:  # noqa: ARG001 - one signature for all kinds
    tiers = ", ".join(entry["tiers"])
    return f"a stack was opened at {entry['opened']} for {entry['model']!r}: {tiers} (process {entry['pid']})"


def _request(entry: Entry, mine: Mine) -> str:  # noqa: ARG001 - one signature for all kinds
    return f"request {entry['r']}: {entry['before']} -> {entry['after']} ({entry['event']})"


def _answer(entry: Entry, mine: Mine) -> str:  # noqa: ARG001 - one signature for all kinds
    asked = f"request {entry['r']} asked beyond {entry['local']} tokens"
    if entry["tokens"] is None:
        of = f"; {entry['ready']} of {entry['chunks']} chunks are ready" if entry["chunks"] else ""
        return f"{asked}: ask again, {entry['why']}{of}"
    behind = f"; missing: {entry['missing']}" if "missing" in entry else ""
    why = "its DEADLINE has passed, and this is what was ready" if entry["expired"] else entry["why"]
    return f"{asked}: {entry['tokens']} tokens, {why}{behind}"


def _job(entry: Entry, mine: Mine) -> str:
    where = "from the GPU to the host tier" if entry["store"] else "from the host tier to the GPU"
    whose = f" for request {entry['r']}" if entry["r"] else ""
    return f"transfer {entry['job']}{whose}: {_count(entry['keys'], mine)} {where}"


def _job_end(entry: Entry, mine: Mine) -> str:
    if entry["failed"]:
        return f"transfer {entry['job']} ended; FAILED for {_count(entry['failed'], mine)}"
    return f"transfer {entry['job']} ended well"


def _op(entry: Entry, mine: Mine) -> str:
    return f"{entry['tier']}: {entry['verb']} {entry['op']} of {_count(entry['keys'], mine)} begins"


def _op_end(entry: Entry, mine: Mine) -> str:
    head = f"{entry['tier']}: {entry['verb']} {entry['op']}"
    if entry["late"]:
        return f"{head} missed its DEADLINE; nobody waits for it any more"
    bad = entry["bad"]
    if not bad:
        return f"{head} ended well"
    told = {key: why for key, why in bad.items() if mine(key)} or bad
    shown = "; ".join(f"{key} {why}" for key, why in list(told.items())[:3])
    more = "" if len(told) <= 3 else f" and {len(told) - 3} more"  # noqa: PLR2004 - as many as fit a line
    return f"{head} ended: {entry['ok']} ok, {shown}{more}"


def _chunks(entry: Entry, mine: Mine) -> str:
    match entry["event"]:
        case "stored":
            return f"{entry['tier']}: has {_count(entry['keys'], mine)}"
        case "removed":
            return f"{entry['tier']}: LOST {_count(entry['keys'], mine)}"
    return f"{entry['tier']}: emptied"


def _health(entry: Entry, mine: Mine) -> str:  # noqa: ARG001 - one signature for all kinds
    return f"{entry['tier']}: {'used again' if entry['usable'] else 'OUT OF SERVICE'}: {entry['why']}"


def _finished(entry: Entry, mine: Mine) -> str:  # noqa: ARG001 - one signature for all kinds
    account = entry["account"]
    loaded = ", ".join(f"{tokens} tokens from {tier}" for tier, tokens in account.get("loaded_tokens", {}).items())
    parts = [loaded or "nothing was loaded", f"{account.get('stored_tokens', 0)} tokens stored"]
    if account.get("deferrals"):
        parts.append(f"deferred {account['deferrals']} times, {account['deferred_s']:.3f} s in all")
    return f"request {entry['r']} is over: {'; '.join(parts)}"


def _reset(entry: Entry, mine: Mine) -> str:  # noqa: ARG001 - one signature for all kinds
    return "the cache was reset: the host tier is empty"


def _lost(entry: Entry, mine: Mine) -> str:  # noqa: ARG001 - one signature for all kinds
    return f"{entry['entries']} entries are missing here: the disk was too slow, or failed"


def _unknown(entry: Entry, mine: Mine) -> str:  # noqa: ARG001 - one signature for all kinds
    return f"{entry['is']} (written by a later version)"


_WORDS: dict[str, Callable[[Entry, Mine], str]] = {
    "record": _record,
    "request": _request,
    "answer": _answer,
    "job": _job,
    "job end": _job_end,
    "op": _op,
    "op end": _op_end,
    "chunks": _chunks,
    "health": _health,
    "finished": _finished,
    "reset": _reset,
    "lost": _lost,
}


def _count(keys: list[str], mine: Mine) -> str:
    """The keys asked about by name, others by number."""
    named = [key for key in keys if mine(key)]
    if named and len(named) == len(keys):
        return ", ".join(named)
    if named:
        return f"{', '.join(named)} and {len(keys) - len(named)} more"
    return keys[0] if len(keys) == 1 else f"{len(keys)} chunks"


def why_lost(entries: Iterable[Entry], mine: Mine) -> Iterator[str]:
    """Why a chunk is where it is: a sentence for each time a tier lost it, and where it is at the end."""
    tiers: dict[str, bool] = {}
    blame: dict[str, str] = {}
    for entry in entries:
        kind = entry["is"]
        if kind == "record":
            tiers["host"] = False  # memory does not outlive its process
        elif kind == "op end":
            for key, why in entry["bad"].items():
                if mine(key) and entry["verb"] == "read":
                    blame[entry["tier"]] = f"a read found it {why}"
        elif kind == "job end" and any(mine(key) for key in entry["failed"]):
            blame["host"] = "its bytes failed the check on their way to the GPU, or could not be copied"
        elif kind == "chunks" and entry["event"] == "stored" and any(map(mine, entry["keys"])):
            tiers[entry["tier"]] = True
            blame.pop(entry["tier"], None)
        elif kind == "chunks" and entry["event"] in _GONE and tiers.get(entry["tier"]):
            tiers[entry["tier"]] = False
            because = "the cache was reset" if entry["event"] == "cleared" else "evicted, to make room"
            yield f"step {entry['step']}: {entry['tier']} lost it: {blame.pop(entry['tier'], because)}."
    here = [tier for tier, has in tiers.items() if has]
    yield f"At the end of the record it is in: {', '.join(here) or 'no tier that the record tells of'}."

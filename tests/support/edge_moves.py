"""Moves on a core without I/O that tests of write policies repeat."""

from __future__ import annotations

from collections.abc import Sequence

from core_parts import Core

from tierkv.manager.contract import RequestContext
from tierkv.types.hints import RequestHints
from tierkv.types.keys import Key, make_key
from tierkv.types.tier_ops import Completion, Outcome, OutcomeKind, TierOp, Verb


def run(first: int, count: int) -> list[Key]:
    """Keys of a prefix."""
    return [make_key(b"chunk %d" % i, 0) for i in range(first, first + count)]


def put(core: Core, keys: Sequence[Key], **hints: object) -> None:
    """Store chunks for a request with these hints, or offer present ones again."""
    ctx = RequestContext("writer", hints=RequestHints(**hints))  # type: ignore[arg-type]  # checked at run time
    grant = core.manager.prepare_store([(key, 0) for key in keys], ctx)
    assert grant is not None
    core.manager.complete_store(grant.slots)


def load(core: Core, keys: Sequence[Key], **hints: object) -> None:
    """Load chunks for a request with these hints; chunks below are promoted first."""
    ctx = RequestContext("reader", hints=RequestHints(**hints))  # type: ignore[arg-type]  # checked at run time
    reservation = core.manager.passages.reserve(ctx.request_id, tuple(keys), ctx.hints)
    while not reservation.ready:
        reads = [op for op in core.manager.take_ops() if op.verb is Verb.READ]
        assert reads, "what is wanted does not come"
        for op in reads:
            core.finish(op)
    grant = core.manager.prepare_load(keys, ctx)
    core.manager.complete_load(grant.slots)


def late(core: Core, op: TierOp) -> None:
    """Let the deadline of an instruction pass."""
    outcomes = tuple(Outcome(OutcomeKind.TIMED_OUT) for _ in op.keys)
    core.manager.on_completion(Completion(op.op_id, outcomes, ended=False))


def writes(core: Core, tier: int = 0) -> list[Key]:
    """Chunks written to a tier in this step; everything ends well."""
    ops = core.manager.take_ops()
    for op in ops:
        core.finish(op)
    return [key for op in ops if op.verb is Verb.WRITE and op.tier == tier for key in op.keys]


def written(core: Core, tier: int = 0) -> list[Key]:
    """Chunks written to a tier until no work is pending; everything ends well."""
    done = core.finish_all()
    return [key for op in done if op.verb is Verb.WRITE and op.tier == tier for key in op.keys]

"""The reason for an answer names a chunk that no tier has, in whatever group it is, and no other one."""

from __future__ import annotations

from core_parts import Core, disk, make_core
from core_truth import BedRequest

from tierkv.scheduler.introspection import AnswerNote
from tierkv.scheduler.limits import SchedulerLimits
from tierkv.types.engine import GroupKind, GroupSpec
from tierkv.types.keys import Key

PAGE = (16,)
WINDOWED = (GroupSpec(4, PAGE), GroupSpec(4, PAGE, GroupKind.SLIDING_WINDOW, 8))


def keys(core: Core, request: BedRequest, group: int = 0) -> list[Key]:
    """Keys of a request's chunks in one group."""
    return core.record(request).groups[group].keys


def explained(core: Core, request: BedRequest, *, computed: int = 0) -> tuple[int | None, AnswerNote]:
    """Answer of a lookup, with its reason."""
    tokens = core.ask(request, computed)
    return tokens, core.scheduler.view.explain_answer(request.request_id, tokens)


def test_a_missing_chunk_of_a_window_is_named() -> None:
    """The chunks with full attention are all there; the window, whose front was never stored, allows no hit."""
    core = make_core(groups=WINDOWED, tiers=[disk()])
    request = core.arrive(16)
    core.put(keys(core, request)[:2])
    core.keep_below(keys(core, request)[2:])
    tokens, note = explained(core, request)
    assert (tokens, note.missing) == (0, keys(core, request, 1)[0])
    assert note.reason == "no tier has its first chunk of a window"


def test_the_missing_chunk_of_a_window_ends_a_hit() -> None:
    """A hit of two chunks: the next longer one lacks the third chunk of its window, and the full group has all."""
    core = make_core(groups=WINDOWED)
    request = core.arrive(17)
    core.put(keys(core, request) + keys(core, request, 1)[:2])
    tokens, note = explained(core, request)
    assert (tokens, note.missing) == (8, keys(core, request, 1)[2])
    assert note.reason == "the hit ends before the first missing chunk of a window"


def test_a_missing_chunk_with_full_attention_is_named_before_a_window() -> None:
    """Nothing is stored: the first chunk is named, as before."""
    core = make_core(groups=WINDOWED)
    request = core.arrive(16)
    tokens, note = explained(core, request)
    assert (tokens, note.missing) == (0, keys(core, request)[0])
    assert note.reason == "no tier has its first chunk"


def test_a_whole_hit_with_windows_lacks_nothing() -> None:
    """It ends one token before the prompt does, inside of the last chunk, which it has."""
    core = make_core(groups=WINDOWED)
    request = core.arrive(16)
    core.put(keys(core, request) + keys(core, request, 1))
    tokens, note = explained(core, request)
    assert (tokens, note.reason, note.missing) == (15, "all whole chunks of it", None)


def test_the_shortest_hit_may_lack_a_later_chunk() -> None:
    """A hit is no shorter than the largest chunk, so it needs two of the small ones, and the first is there."""
    core = make_core(block_tokens=(4, 8))
    request = core.arrive(16)
    core.put(keys(core, request)[:1] + keys(core, request, 1))
    tokens, note = explained(core, request)
    assert (tokens, note.missing) == (0, keys(core, request)[1])
    assert note.reason == "no tier has a chunk that the shortest hit needs"


def test_a_chunk_that_a_tier_has_is_not_called_missing() -> None:
    """A bound ends the hit, or hints exclude the tier that has the next chunk."""
    core = make_core(limits=SchedulerLimits(load_tokens_min=12))
    request = core.arrive(16)
    core.put(keys(core, request)[:2])
    tokens, note = explained(core, request)
    assert (tokens, note.missing) == (0, None)
    assert note.reason.startswith("more of it is in tiers: a limit")

    core = make_core(tiers=[disk()])
    request = core.arrive(16, tierkv={"load_tiers": ["host"]})
    core.keep_below(keys(core, request))
    tokens, note = explained(core, request)
    assert (tokens, note.missing) == (0, keys(core, request)[0])
    assert note.reason == "no tier that its hints allow has its first chunk"


def test_an_explanation_asks_no_tier_and_changes_no_answer() -> None:
    """The answer is repeated as it was, from whichever token the engine counts."""
    core = make_core(groups=WINDOWED, tiers=[disk()])
    request = core.arrive(32)
    core.keep_below(keys(core, request) + keys(core, request, 1)[:6])
    while explained(core, request, computed=6)[0] is None:
        core.finish_all()
    tokens, note = explained(core, request, computed=6)
    assert (tokens, note.missing) == (18, keys(core, request, 1)[6])
    assert explained(core, request, computed=6) == (tokens, note)
    assert not core.manager.take_ops()
    core.scheduler.validate()

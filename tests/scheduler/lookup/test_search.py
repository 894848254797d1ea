"""Length of a hit: the cases of the specification. test_search_oracle.py tests the rule itself."""

from __future__ import annotations

import pytest
from scripted_lookup import ScriptedLookup, full, keys_of, window

from tierkv.scheduler.lookup.search import NO_HIT, Hit, SearchGroup, find_hit, tokens_covered, wanted_keys

DEFERRED = Hit(0, deferred=True)


@pytest.mark.parametrize(
    ("letters", "answer", "calls"),
    [
        pytest.param("TTFT", Hit(2), 3, id="s23"),
        pytest.param("TNTF", DEFERRED, 4, id="s24"),
        pytest.param("FTTT", NO_HIT, 1, id="s25"),
        pytest.param("NF", DEFERRED, 2, id="s26"),
        pytest.param("", NO_HIT, 0, id="s27"),
        pytest.param("TPT", Hit(3), 3, id="pending-counts"),
    ],
)
def test_s23_s24_s25_s26_s27_prefix(letters: str, answer: Hit, calls: int) -> None:
    """S23 to S27: continue over unknown chunks, so that tiers are asked at once, and stop at the first miss."""
    lookup = ScriptedLookup(letters)
    assert find_hit([full(0, 1, len(letters))], 0, len(letters), lookup) == answer
    assert lookup.calls == keys_of(0, calls), "each once, from the front, and nothing behind a miss"


@pytest.mark.parametrize(
    ("letters", "chunks", "answer", "calls"),
    [
        pytest.param("TTFTTF", 2, Hit(5), [5, 4, 3], id="s28"),
        pytest.param("TFF", 2, Hit(1), [2, 1, 0], id="s29"),
        pytest.param("FTF", 2, NO_HIT, [2, 1, 0], id="s30"),
        pytest.param("TTN", 2, DEFERRED, [2, 1, 0], id="s31"),
        pytest.param("TTF", 2, Hit(2), [2, 1, 0], id="s31-missing"),
        pytest.param("TTT", 2, Hit(3), [2, 1], id="s31-there"),
        pytest.param("NFTT", 2, Hit(4), [3, 2], id="s32"),
        pytest.param("TTT", 5, Hit(3), [2, 1, 0], id="s33"),
        pytest.param("TTFP", 2, Hit(2), [3, 2, 1, 0], id="s34"),
        pytest.param("TPPF", 2, Hit(3), [3, 2, 1], id="pending-counts"),
        pytest.param("TTTNTT", 2, Hit(6), [5, 4], id="unknown-before-the-window"),
        pytest.param("TTFTNTF", 2, DEFERRED, [6, 5, 4, 3, 2, 1, 0], id="asks-on-to-a-sure-window"),
        pytest.param("TTTTNTF", 2, DEFERRED, [6, 5, 4, 3, 2], id="asks-no-further"),
    ],
)
def test_s28_s29_s30_s31_s32_s33_s34_window(letters: str, chunks: int, answer: Hit, calls: list[int]) -> None:
    """S28 to S34: from the end to the front until the window is full; a run that reaches the front is full, too.

    If that is unknown, tiers are asked about all chunks down to a window of known chunks at once.
    """
    lookup = ScriptedLookup(letters)
    keys = keys_of(0, len(letters))
    assert find_hit([window(0, 1, len(letters), chunks)], 0, len(letters), lookup) == answer
    assert lookup.calls == [keys[i] for i in calls]


def test_s35_the_hit_counts_from_the_middle_of_a_chunk() -> None:
    """S35: with C inside a chunk that chunk is looked up again, and H counts from C."""
    lookup = ScriptedLookup("FTTT")
    assert find_hit([full(0, 4, 4)], 6, 16, lookup) == Hit(10)
    assert lookup.calls[0] == keys_of(0, 2)[1]


@pytest.mark.parametrize("computed", [13, 14, 15, 16])
@pytest.mark.parametrize("group", [full(0, 4, 4), window(0, 4, 4, 2)], ids=["full", "window"])
def test_s36_less_than_a_chunk_remains(group: SearchGroup, computed: int) -> None:
    """S36: if no whole chunk can be gained, no tier is asked."""
    lookup = ScriptedLookup("TTTT")
    assert find_hit([group], computed, 16, lookup) == NO_HIT
    assert not lookup.calls


@pytest.mark.parametrize("computed", [0, 3, 8])
def test_s37_windowed_model_all_chunks_present(computed: int) -> None:
    """S37: num_tokens = k*T: the engine computes the last token, and all k chunks are wanted all the same."""
    groups = [full(0, 4, 5), window(1, 4, 5, 2, end_slack=1)]
    assert find_hit(groups, computed, 5 * 4 - 1, ScriptedLookup("TTTTT", "TTTTT")) == Hit(19 - computed)
    wanted = wanted_keys(groups, computed, 19 - computed)
    assert set(wanted) == {*keys_of(0, 5)[computed // 4 :], *keys_of(1, 5)[3:]}


def test_s38_a_window_shortens_the_hit() -> None:
    """S38: 4 chunks here, a window up to 3 there: 3 in all, and each chunk is looked up once."""
    lookup = ScriptedLookup("TTTT", "TTTF")
    assert find_hit([full(0, 4, 4), window(1, 4, 4, 2)], 0, 16, lookup) == Hit(12)
    assert len(lookup.calls) == len(set(lookup.calls)) == 4 + 3


def test_s39_two_windows_agree() -> None:
    """S39: the narrow window ends earlier, so the wide one is searched again before that end, and again."""
    lookup = ScriptedLookup("TTTTTTTT", "TTTTFTTT", "TTTTTTTF")
    groups = [full(0, 4, 8), window(1, 4, 8, 3), window(2, 4, 8, 1)]
    assert find_hit(groups, 0, 32, lookup) == Hit(16)
    wide, narrow = keys_of(1, 8), keys_of(2, 8)
    looked_at = [*keys_of(0, 8), *wide[:4:-1], *narrow[:5:-1], *wide[4:0:-1], narrow[3]]
    assert lookup.calls == looked_at, "each once, and none behind an end that is known"


def test_s40_a_later_group_cuts_the_unknown_off() -> None:
    """S40: the unknown chunk is behind the end that another group sets: the answer is known."""
    assert find_hit([full(0, 4, 6), full(1, 4, 6)], 0, 24, ScriptedLookup("TTTTTN", "TTTFTT")) == Hit(12)
    assert find_hit([full(0, 4, 6), window(1, 4, 6, 2)], 0, 24, ScriptedLookup("TTTTTN", "TTTFFF")) == Hit(12)
    assert find_hit([window(0, 4, 6, 2), window(1, 4, 6, 1)], 0, 24, ScriptedLookup("TTTTTN", "TTTFFF")) == Hit(12)


def test_s41_unknown_here_absent_there() -> None:
    """S41: one group without any chunk settles it, whatever is unknown elsewhere."""
    assert find_hit([full(0, 4, 2), full(1, 4, 2)], 0, 8, ScriptedLookup("NN", "FT")) == NO_HIT
    assert find_hit([full(0, 4, 2), window(1, 4, 2, 1)], 0, 8, ScriptedLookup("NN", "FF")) == NO_HIT


def test_s42_unknown_within_the_end() -> None:
    """S42: no group cuts the unknown chunk off, so the answer is deferred."""
    assert find_hit([full(0, 4, 2), full(1, 4, 2)], 0, 8, ScriptedLookup("TN", "TT")) == DEFERRED
    assert find_hit([full(0, 4, 2), window(1, 4, 2, 1)], 0, 8, ScriptedLookup("TT", "TN")) == DEFERRED
    before_the_window = ScriptedLookup("TT", "NT")
    assert find_hit([full(0, 4, 2), window(1, 4, 2, 1)], 0, 8, before_the_window) == Hit(8)


def test_s43_coarse_and_fine_chunks() -> None:
    """S43: every group can serve the answer, and less than the largest chunk is no hit."""
    for fine, coarse in [
        (full(0, 64, 4), full(1, 256, 1)),
        (window(0, 64, 4, 2), full(1, 256, 1)),
        (full(0, 64, 4), window(1, 256, 1, 1)),
    ]:
        assert find_hit([fine, coarse], 0, 300, ScriptedLookup("TTTT", "T")) == Hit(256)
        assert find_hit([fine, coarse], 0, 300, ScriptedLookup("TTTF", "T")) == NO_HIT
        assert find_hit([fine, coarse], 0, 300, ScriptedLookup("TTTT", "F")) == NO_HIT


def test_s43_a_window_ends_where_its_chunks_cover_it() -> None:
    """S43: chunks of 4 tokens with full attention, a window of 6 tokens with chunks of 6.

    A window that ends at token 20 begins at 15, before its chunk from 18 to 24. One chunk is not enough there, so the
    hit ends at 18.
    """
    fine = full(0, 4, 5)
    assert find_hit([fine, window(1, 6, 4, 1)], 0, 20, ScriptedLookup("TTTTT", "TTTT")) == Hit(20)
    assert find_hit([fine, window(1, 6, 4, 1, end_slack=1)], 0, 20, ScriptedLookup("TTTTT", "TTTT")) == Hit(18)
    assert find_hit([fine, window(1, 6, 4, 1, end_slack=1)], 0, 17, ScriptedLookup("TTTTT", "TTTT")) == Hit(17)
    assert find_hit([fine, window(1, 6, 4, 1, end_slack=0)], 0, 17, ScriptedLookup("TTTTT", "TTTT")) == Hit(12)


def test_s46_fewer_keys_than_tokens() -> None:
    """S46, S5: an error in the specification; normal with async scheduling, where it limits the hit."""
    assert find_hit([full(0, 4, 2)], 0, 40, ScriptedLookup("TT")) == Hit(8)
    assert find_hit([full(0, 4, 4), window(1, 4, 2, 1)], 0, 40, ScriptedLookup("TTTT", "TT")) == Hit(8)


def test_s47_asking_twice_changes_nothing() -> None:
    """S47: the search keeps no state."""
    groups = [full(0, 4, 3), full(1, 6, 2), window(2, 2, 6, 2)]
    lookup = ScriptedLookup("TTT", "TF", "TTTTTT")
    assert find_hit(groups, 0, 12, lookup) == find_hit(groups, 0, 12, lookup)


def test_a_long_prefix_with_a_window_needs_few_slots() -> None:
    """Ten slots hold a prefix of 9 chunks and a window of 1, or any length of a model with windows only."""
    both = [full(0, 4, 100), window(1, 4, 100, 1)]
    assert tokens_covered(both, 0, 400, 10) == 36
    assert tokens_covered([window(0, 4, 100, 4), window(1, 4, 100, 6)], 0, 399, 10) == 399
    assert tokens_covered([window(0, 4, 100, 4), window(1, 4, 100, 7)], 0, 399, 10) == 24


def test_a_hit_is_not_cut_where_it_fits() -> None:
    """Chunks of 2 and of 8 tokens, and slots for 9 of 11 chunks: the hit ends inside the second coarse chunk.

    Cut in whole coarse chunks it would end at token 8.
    """
    groups = [full(0, 2, 8), full(1, 8, 2)]
    assert tokens_covered(groups, 0, 16, 9) == 14
    assert tokens_covered([full(0, 8, 2), window(1, 2, 8, 3)], 0, 16, 4) == 8
    assert tokens_covered([full(0, 8, 9), window(1, 6, 12, 2)], 3, 72, 6) == 32
    assert tokens_covered(groups, 0, 16, 1) == 0


def test_what_ends_first_is_gathered_first() -> None:
    """Order of gathering: chunks useful for a shorter hit precede those for the longer one only."""
    groups = [full(0, 2, 6), window(1, 4, 3, 2)]
    fine, coarse = keys_of(0, 6), keys_of(1, 3)
    assert wanted_keys(groups, 0, 12) == (*fine[:4], coarse[1], *fine[4:], coarse[2])

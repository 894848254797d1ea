"""Number of tokens worth loading: the pure function against brute force, and the example of the documentation."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tierkv.scheduler.lookup.load_cost import PendingRead, ReadCost, best_load_tokens
from tierkv.types.keys import Key


def pending(start: int, tier: int, num_bytes: int) -> PendingRead:
    """Read of a chunk without a key."""
    return PendingRead(start, tier, num_bytes, Key(b""))


def cost_of(
    reads: list[PendingRead], computed: int, hit: int, tokens: int, rate: float, costs: dict[int, ReadCost]
) -> float:
    """Formula of the documentation, for a hit cut to ``tokens``."""
    read_bytes: dict[int, int] = {}
    for read in reads:
        if tokens and read.start < computed + tokens and read.tier in costs:
            read_bytes[read.tier] = read_bytes.get(read.tier, 0) + read.num_bytes
    reading = max(
        (costs[tier].start_s + size * costs[tier].s_per_byte for tier, size in read_bytes.items()), default=0.0
    )
    return reading + (hit - tokens) / rate


@given(
    tiers=st.lists(st.integers(0, 3), max_size=30), computed=st.integers(0, 10),
    costs=st.dictionaries(st.integers(0, 2), st.tuples(st.floats(0, 5), st.floats(0, 0.01)), max_size=3),
    rate=st.sampled_from([1.0, 30.0, 1000.0]), tail=st.integers(0, 7),
)  # fmt: skip
def test_no_other_cut_is_faster(
    tiers: list[int], computed: int, costs: dict[int, tuple[float, float]], rate: float, tail: int
) -> None:
    """Of all lengths, also those inside a chunk, none completes the prefix sooner. Tier 3 is the host tier."""
    by_tier = {tier: ReadCost(*cost) for tier, cost in costs.items()}
    first = computed // 4 * 4
    reads = [pending(first + 4 * i, tier, 100) for i, tier in enumerate(tiers) if tier < 3]
    hit = max(0, first + 4 * len(tiers) - computed) + tail
    kept = best_load_tokens(reads, computed, hit, rate, by_tier)
    assert 0 <= kept <= hit
    best = min(cost_of(reads, computed, hit, tokens, rate, by_tier) for tokens in range(hit + 1))
    assert cost_of(reads, computed, hit, kept, rate, by_tier) <= best * (1 + 1e-9) + 1e-12


def test_of_equal_lengths_the_longest() -> None:
    """Loading leaves the GPU to other requests: at equal cost, load."""
    assert best_load_tokens([pending(0, 0, 1)], 0, 8, 1.0, {0: ReadCost(8.0, 0.0)}) == 8
    assert best_load_tokens([pending(0, 0, 1)], 0, 8, 1.0, {0: ReadCost(8.1, 0.0)}) == 0


def test_tiers_are_read_side_by_side() -> None:
    """Two tiers of three seconds each take three together, and cost less than four seconds of prefill."""
    costs = {0: ReadCost(3.0, 0.0), 1: ReadCost(3.0, 0.0)}
    assert best_load_tokens([pending(0, 0, 1), pending(4, 1, 1)], 0, 8, 2.0, costs) == 8


def test_the_example_of_the_documentation() -> None:
    """The page load-or-recompute works through these numbers."""
    chunk_bytes, chunk_tokens = 8 << 20, 256
    reads = [pending(i * chunk_tokens, 0 if i < 32 else 1, chunk_bytes) for i in range(16, 64)]
    costs = {0: ReadCost(0.001, 1 / 2e9), 1: ReadCost(0.05, 1 / 100e6)}
    assert best_load_tokens(reads, 0, 64 * chunk_tokens, 8000.0, costs) == 32 * chunk_tokens
    assert best_load_tokens(reads, 0, 64 * chunk_tokens, 2000.0, costs) == 64 * chunk_tokens

"""``prepare_store`` and ``complete_store`` in churn: the host tier is full, so every new chunk evicts an old one.

The limit is what any LRU in Python has to do: one ``popitem`` and one insertion into an ordered dict.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from functools import partial

from benchmarks.core.pauses import Pauses
from benchmarks.core.rig import fill, keys_of, make_core, policy_names, random_hashes
from benchmarks.measure import Cost, Settings, cpu_ratios, medians, take_turns, timed
from benchmarks.rows import Row, Target
from tierkv.manager.contract import RequestContext
from tierkv.scheduler.wiring import WiredCore
from tierkv.types.keys import Key

BATCH = 128
BATCHES_PER_TURN = 100
_CTX = RequestContext("writer")


def run(settings: Settings) -> Iterator[Row]:
    """Measure every policy at both sizes."""
    for policy in policy_names():
        for resident in settings.pick((100_000, 1_000_000), (1_000,)):
            yield _row(policy, resident, settings)


def _row(policy: str, resident: int, settings: Settings) -> Row:
    core = make_core(resident, policy=policy)
    fill(core.host, keys_of(random_hashes(resident, seed=1)))
    plain = OrderedDict.fromkeys(keys_of(random_hashes(resident, seed=2)))
    seeds = itertools.count(3)
    pauses = Pauses()

    def new_batches() -> list[list[Key]]:
        """Make requests outside of the measured time, in new objects for each side."""
        keys = keys_of(random_hashes(BATCH * settings.pick(BATCHES_PER_TURN, 4), next(seeds)))
        return [keys[i : i + BATCH] for i in range(0, len(keys), BATCH)]

    def ours() -> Cost:
        batches = [[(key, 0) for key in batch] for batch in new_batches()]
        with pauses.watched():
            cost = timed(partial(_store, core, batches))
        core.manager.take_events()
        return cost

    def theirs() -> Cost:
        return timed(partial(_replace, plain, new_batches()))

    turns = take_turns([ours, theirs], settings.rounds)
    stored = BATCH * settings.pick(BATCHES_PER_TURN, 4)
    return Row(
        f"{policy}, {resident:,} resident",
        "us/key",
        1e6 * medians(turns[0]).cpu_s / stored,
        "popitem and insertion of an OrderedDict",
        1e6 * medians(turns[1]).cpu_s / stored,
        cpu_ratios(*turns),
        Target("measured", "<=", 1.5),
        {"longest garbage collection in it, ms": 1e3 * pauses.longest_s},
    )


def _store(core: WiredCore, batches: Sequence[Sequence[tuple[Key, int]]]) -> None:
    prepare, complete = core.manager.prepare_store, core.manager.complete_store
    for batch in batches:
        grant = prepare(batch, _CTX)
        if grant is None or len(grant.evicted) != len(batch):
            raise RuntimeError("a batch was refused, or the host tier was not full")
        complete(grant.slots)


def _replace(plain: OrderedDict[Key, None], batches: Sequence[Sequence[Key]]) -> None:
    for batch in batches:
        for key in batch:
            plain.popitem(last=False)
            plain[key] = None

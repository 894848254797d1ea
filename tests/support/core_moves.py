"""Moves on a bed, each with small numbers as arguments, for random drivers: a state machine or a seeded loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from core_bed import Bed, BedSpec
from core_parts import OBJECTS, TierSpec, disk, objects
from core_worker import REPORTS_MAX
from group_parts import full, local, ssm, window
from simulation.engine.engine import EngineBehaviour

from tierkv.abc import Capabilities
from tierkv.manager.lower.lower_tier import LowerTierLimits, WritePolicy
from tierkv.scheduler.limits import StorePolicy
from tierkv.types.tier_ops import OutcomeKind

FAULTS: tuple[OutcomeKind, ...] = (
    OutcomeKind.ABSENT,
    OutcomeKind.CORRUPT,
    OutcomeKind.FAILED,
    OutcomeKind.NO_SPACE,
    OutcomeKind.TIMED_OUT,
    OutcomeKind.REFUSED,
)

_FROZEN_OBJECTS = TierSpec(
    "frozen", Capabilities(shared=True, read_only=True, bounded=False), LowerTierLimits(None, WritePolicy.READ_ONLY, 1)
)

SPECS: tuple[BedSpec, ...] = (
    BedSpec(tiers=()),
    BedSpec(tiers=(disk(),)),
    BedSpec(tiers=(objects(probe_keys_max=3),), gpu_caching=False),
    BedSpec(tiers=(disk(frames=5), objects()), num_workers=2),
    BedSpec(
        block_tokens=(2, 4), factor=2, hash_block_tokens=2, slots=12, reserved=9, gpu_blocks=50,
        tiers=(disk(frames=9, queue=4), objects(probe_keys_max=8)), gpu_caching=False,
    ),
    BedSpec(
        block_tokens=(2, 3), hash_block_tokens=1, slots=16, reserved=12, gpu_blocks=60,
        tiers=(objects(), disk(frames=2)), num_workers=3,
    ),
    BedSpec(slots=16, reserved=16, tiers=(disk(frames=12), _FROZEN_OBJECTS), prompt_only=True, gpu_caching=False),
    BedSpec(groups=(full(4), window(6, 4)), slots=16, reserved=12, gpu_blocks=40, tiers=(disk(),)),
    BedSpec(
        groups=(window(7, 2), ssm(4), full(4)), factor=2, hash_block_tokens=2, slots=20, reserved=16, gpu_blocks=80,
        tiers=(objects(probe_keys_max=8), disk(frames=12)), gpu_caching=False, num_workers=2,
    ),
    BedSpec(
        groups=(window(9, 4), ssm(4), window(4, 4)), slots=16, reserved=12, gpu_blocks=60, tiers=(disk(frames=12),),
        gpu_caching=False,
    ),
    BedSpec(
        groups=(local(10, 4), full(2), window(6, 6)), hash_block_tokens=2, slots=24, reserved=20, gpu_blocks=80,
        tiers=(disk(), objects()),
    ),
    BedSpec(
        groups=(full(8), window(5, 2), ssm(4)), hash_block_tokens=2, slots=24, reserved=20, gpu_blocks=80,
        tiers=(disk(),), prompt_only=True, gpu_caching=False,
    ),
    BedSpec(
        groups=(full(4), window(6, 2), ssm(4)), factor=2, hash_block_tokens=2, slots=20, reserved=16, gpu_blocks=60,
        tiers=(disk(),), num_workers=2, store_plan="eager", store_policy=StorePolicy.REQUEST_LEVEL,
    ),
    BedSpec(slots=12, tiers=(disk(frames=9),), store_plan="eager", holds_finished=True),
    BedSpec(
        groups=(window(7, 4), full(4)), hash_block_tokens=2, slots=16, reserved=12, gpu_blocks=40, tiers=(disk(),),
        num_workers=2, store_plan="lazy",
    ),
    BedSpec(slots=12, reserved=10, tiers=(disk(write="back", queue=6),), gpu_caching=False),
    BedSpec(
        slots=16, reserved=12, gpu_blocks=40, gpu_caching=False,
        tiers=(disk(frames=6, write="back"), objects(write="on_reuse", probe_keys_max=4)),
    ),
    BedSpec(
        groups=(full(4), window(6, 4)), slots=24, reserved=16, gpu_blocks=60, gpu_caching=False, num_workers=2,
        tiers=(disk(frames=9, write="on_reuse"), objects(write="back"), disk(name="last", frames=20, write="back")),
    ),
    BedSpec(slots=6, reserved=3, gpu_blocks=48, tiers=(disk(), objects()), gpu_caching=False, num_workers=2),
    BedSpec(
        groups=(full(4), window(4, 4), full(2)), hash_block_tokens=2, slots=16, reserved=9, gpu_blocks=80,
        tiers=(disk(),), gpu_caching=False, holds_finished=True,
    ),
)  # fmt: skip
"""Beds that differ in:

- groups: one and several; equal, dividing and non-dividing chunk sizes; windows beside full attention and alone, local
  stretches and states; chunks that a window uses in part, chunks in which no hit ends;
- tiers: with an index before and behind shared ones, bounded, slow to make room, and read-only;
- write policies: each, and one of them twice in a stack;
- store plans: each, and an engine that holds the blocks of finished requests;
- host tiers: also smaller than most hits.
"""

PROMPTS = 4
"""Families of prompts; within one, requests share a prefix."""


HINTS: tuple[dict[str, object], ...] = (
    {}, {}, {},
    {"load_tiers": ["host"]}, {"load_tiers": ["disk"]}, {"load_tiers": ["objects", "host"], "store": ["objects"]},
    {"ttl_s": 0.7}, {"ttl_s": 30, "max_load_tokens": 8}, {"one_shot": True}, {"store": False, "priority": -1},
    {"store": ["disk"], "session": "s", "continues": "yes"}, {"one_shot": True, "ttl_s": 3, "closed": True},
    {"load_tiers": ["moon"], "retains": True},
)  # fmt: skip
"""Hints of requests; the last one is faulty."""


PACES = (0.0, 0.0001, 0.002, 0.01, 5.0)
"""Seconds that reads may take, beside a prefill of four tokens in 4 ms; 0: not measured."""


class Moves:
    """Single events on a bed. A pick without a target does nothing."""

    def __init__(self, spec: BedSpec) -> None:
        self.bed = Bed(spec)
        self._unique = 1000

    def arrive(self, family: int, shared: int, own: int, new: int, cap: int = -1, wish: int = 0) -> None:
        """Register a request: ``shared`` tokens of a family, then ``own`` tokens of its own."""
        self._unique += 1
        tokens = [family * 100 + i for i in range(shared)] + [self._unique * 100 + i for i in range(own)]
        if tokens and self._fits(len(tokens) + new):
            params = {"max_offload_tokens": cap if cap >= 0 else None, "tierkv": HINTS[wish]}
            self.bed.add(tokens, new, params)

    def _fits(self, tokens: int) -> bool:
        """Whether the engine has blocks for the request, beside those that an aborted load still fills."""
        geometry = self.bed.core.geometry
        need = sum(-(-tokens // group.block_tokens) for group in geometry.groups)
        return need <= self.bed.spec.gpu_blocks

    def preload(self, family: int, tokens: int, tier: int, gap: int) -> None:
        """Put a family's prefix into a tier, as from an earlier process, perhaps with one chunk missing."""
        stores = self.bed.tiers.stores
        if not stores:
            return
        tier %= len(stores)
        capacity = self.bed.spec.tiers[tier].limits.capacity_bytes
        if capacity is not None or self.bed.core.manager._tier_io.in_flight:
            return  # the content of a bounded tier is reported once, at the start
        request = self.bed.core.request([family * 100 + i for i in range(tokens)], "earlier")
        self.bed.fill_below(request, tier, [i for i in range(tokens) if i != gap])

    def step(
        self,
        ticks: int,
        *,
        budget: int = 16,
        asks: int = 100,
        accepts: int = 100,
        preempt: int = 0,
        rests: bool = False,
    ) -> None:
        """Run an engine step, ``ticks`` tenths of a second after the previous one."""
        self.bed.step(
            EngineBehaviour(budget=budget, asks=asks, accepts=accepts / 100, preempt=preempt),
            seconds=ticks / 10,
            rests=rests,
        )

    def report_one(self) -> None:
        """Deliver one worker's report of one job."""
        self.bed.worker.reports_max = 1
        self.bed.engine.take_reports()
        self.bed.worker.reports_max = REPORTS_MAX

    def abort(self, pick: int) -> None:
        """Abort a request."""
        sequences = self.bed.engine.sequences
        if sequences:
            self.bed.engine.abort(sequences[pick % len(sequences)])

    def transfer(self, pick: int, failing: Sequence[bool] = ()) -> None:
        """Run one transfer."""
        running = list(self.bed.worker.running)
        if running:
            self.bed.worker.run(running[pick % len(running)], failing)

    def io(self, pick: int, faults: Sequence[OutcomeKind | None] = ()) -> None:
        """End one instruction to a tier."""
        pending = list(self.bed.tiers.pending)
        if pending:
            self.bed.tiers.complete(pending[pick % len(pending)], faults)

    def late(self, pick: int) -> None:
        """Let an instruction miss its deadline and continue."""
        pending = [op_id for op_id in self.bed.tiers.pending if op_id not in self.bed.tiers.late]
        if pending:
            self.bed.tiers.announce_late(pending[pick % len(pending)])

    def all_io(self) -> None:
        """End everything in flight well."""
        self.bed.run_transfers()
        self.bed.run_io()

    def health(self, tier: int, usable: bool) -> None:
        """Open or close a tier's breaker."""
        if self.bed.spec.tiers:
            self.bed.set_health(tier % len(self.bed.spec.tiers), usable=usable)

    def pace(self, tier: int, elapsed_s: float) -> None:
        """Make a tier slower or faster."""
        if self.bed.spec.tiers:
            self.bed.tiers.elapsed_s[tier % len(self.bed.spec.tiers)] = elapsed_s

    def damage(self, pick: int, tier: int) -> None:
        """Corrupt bytes: in the host tier (tier -1) or below."""
        if tier < 0:
            self.bed.damage_slot(pick)
        elif self.bed.tiers.stores:
            self.bed.damage_frame(tier % len(self.bed.tiers.stores), pick)

    def reset(self) -> None:
        """Reset the cache between two steps."""
        self.bed.reset()

    def end(self) -> None:
        """Let everything end, and look for leaks."""
        self.bed.settle()
        self.bed.check_end()


def random_faults(rng: Random, rate: float) -> list[OutcomeKind | None]:
    """Faults per key: mostly none."""
    return [rng.choice(FAULTS) if rng.random() < rate else None for _ in range(4)]


def drive(moves: Moves, rng: Random, count: int) -> None:
    """Make ``count`` random moves on a bed, check everything after each, then end."""
    menu: list[tuple[int, Callable[[], None]]] = [
        (6, lambda: moves.arrive(rng.randrange(PROMPTS), rng.randrange(40), rng.choice([0, rng.randrange(12)]),
                                 rng.randrange(1, 12),
                                 rng.choice([-1, -1, -1, 0, 9]), rng.randrange(len(HINTS)))),
        (1, lambda: moves.preload(rng.randrange(PROMPTS), rng.randrange(8, 64), rng.randrange(2), rng.randrange(40))),
        (30, lambda: moves.step(rng.choice([0, 0, 1, 1, 10]), budget=rng.choice([4, 16, 16, 64]),
                                asks=rng.choice([0, 1, 100, 100]), accepts=rng.choice([50, 100, 100, 100]),
                                preempt=rng.choice([0, 0, 0, 0, 0, 1]), rests=rng.random() < 0.7)),
        (3, moves.report_one),
        (2, lambda: moves.abort(rng.randrange(20))),
        (12, lambda: moves.transfer(rng.randrange(20))),
        (2, lambda: moves.transfer(rng.randrange(20), [rng.random() < 0.5 for _ in range(4)])),
        (16, lambda: moves.io(rng.randrange(20))),
        (4, lambda: moves.io(rng.randrange(20), random_faults(rng, 0.6))),
        (2, lambda: moves.late(rng.randrange(20))),
        (3, moves.all_io),
        (1, lambda: moves.health(rng.randrange(2), rng.random() < 0.6)),
        (1, lambda: moves.damage(rng.randrange(50), rng.randrange(-1, 2))),
        (1, lambda: moves.pace(rng.randrange(2), rng.choice(PACES))),
        (1, moves.reset),
    ]  # fmt: skip
    weights, actions = [weight for weight, _ in menu], [action for _, action in menu]
    for action in rng.choices(actions, weights, k=count):
        if len(moves.bed.engine.sequences) < 12 or action is not actions[0]:
            action()
            moves.bed.check()
    moves.end()


def spec_of(rng: Random) -> BedSpec:
    """Spec of any bed."""
    return rng.choice(SPECS)


__all__ = ["FAULTS", "HINTS", "OBJECTS", "PACES", "PROMPTS", "SPECS", "Moves", "drive", "random_faults", "spec_of"]

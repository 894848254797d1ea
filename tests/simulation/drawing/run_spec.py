"""Spec of one run: an engine, a stack and the faults of its tiers, all drawn from one seed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from simulation.drawing.features import LOSSY, SLOT_BYTES, Features, draw_features, draw_tier_features
from simulation.drawing.scenarios import SCENARIOS, Scenario
from simulation.engine.expected_bytes import TOKEN_BYTES, User
from simulation.world.fault_schedule import Fault
from tierkv.abc import Capabilities
from tierkv.types.engine import EngineCapabilities, EngineSpec, GroupKind, GroupSpec


@dataclass(frozen=True, slots=True)
class TierSetup:
    """One lower tier: its table, and the properties of its storage and fault schedule."""

    name: str
    capabilities: Capabilities
    capacity_bytes: int | None
    options: Mapping[str, Any]
    """Its table in the stack's description."""
    menu: Sequence[Fault]
    """Faults that it may have."""
    healthy_s: float
    """Average duration of a spell of health."""
    faulty_s: float
    """Average duration of a spell of a fault."""
    usual_s: Sequence[float]
    """Durations of calls; each call takes one of them."""
    tail: float
    """Share of calls that take long without a fault."""
    probe_key_s: float
    """Seconds that a probe takes per key."""
    asynchronous: bool
    """Whether its backend runs on the event loop, where a reply may arrive some time after the effect."""


@dataclass(frozen=True, slots=True)
class RunSpec:
    """Everything that is fixed for a run. Equal seeds give equal specs."""

    seed: int
    scenario: Scenario
    engine: EngineSpec
    chunk_blocks: int
    gpu_blocks: int
    """Blocks of the engine's pool, the null block included."""
    token_budget: int
    """Tokens per engine step."""
    running_max: int
    """Requests in the engine at once."""
    frees_early: bool
    """Whether the engine reuses the blocks of an aborted load at once, and trusts fences alone."""
    caching: bool
    """Whether the engine finds computed blocks again."""
    host_slots: int
    prompt_tokens_max: int
    """Longest prompt."""
    deadline_s: float
    host: Mapping[str, Any]
    step: Mapping[str, Any]
    store: Mapping[str, Any]
    events: Mapping[str, Any]
    features: Features
    lossy: str = ""
    """Name of the lossy codec; empty: all codecs are exact."""
    tiers: tuple[TierSetup, ...] = field(default=())

    @property
    def users(self) -> tuple[User, ...]:
        """Users of the engine."""
        return self.features.users

    @property
    def scoped_hashes(self) -> bool:
        """Whether the engine's hashes differ by user; required where it finds its own blocks by them."""
        return self.caching or not self.features.blind

    def tier(self, name: str) -> TierSetup:
        """Setup of the tier of that name."""
        return next(tier for tier in self.tiers if tier.name == name)

    def config(self, epoch: str) -> dict[str, Any]:
        """Description of the stack."""
        return {
            "namespace": {"epoch": epoch},
            "chunk": {"blocks": self.chunk_blocks},
            "host": {"capacity": self.host_slots * SLOT_BYTES, **self.host},
            "lookup": {"deadline_s": self.deadline_s, "recompute": "off" if self.scenario.steady else "auto"},
            "step": self.step,
            "store": dict(self.store),
            "events": dict(self.events),
            "tenants": dict(self.features.tenants),
            "tiers": [dict(tier.options) for tier in self.tiers],
        }

    def describe(self) -> str:
        """Text of one line."""
        groups = ", ".join(
            f"{group.kind.value}/{group.block_tokens}"
            + (f" window {group.window_tokens}" if group.window_tokens else "")
            for group in self.engine.groups
        )
        tiers = ", ".join(
            f"{tier.name}[{'any' if tier.capacity_bytes is None else tier.capacity_bytes // SLOT_BYTES}, "
            f"{tier.options['write']}, {codec_name(tier)}, {tier.options.get('policy', 'lru')}]"
            for tier in self.tiers
        )
        return (
            f"scenario {self.scenario.name}; groups {groups}; chunks of {self.chunk_blocks} blocks; "
            f"{self.engine.num_workers} worker(s); {self.gpu_blocks} GPU blocks; {self.host_slots} host slots; "
            f"policy {self.host['policy']}; store plan {self.store['plan']}; tiers {tiers or 'none'}; "
            f"deadline {self.deadline_s:g} s; {self.features.describe()}"
            f"{'' if self.scoped_hashes else ', whom hashes do not tell apart'}"
        )


def codec_name(tier: TierSetup) -> str:
    """Name of the codec of a tier."""
    codec = tier.options["codec"]
    return str(codec if isinstance(codec, str) else codec["name"])


def draw_run_spec(seed: int, scenario: str | None = None) -> RunSpec:
    """Draw the spec of a seed, with the scenario that the seed chooses, or with the one named."""
    rng = Random(f"setup {seed}")
    plan = SCENARIOS[scenario or Random(f"scenario {seed}").choice(sorted(SCENARIOS))]
    engine = _draw_engine(rng, plan)
    lossy = _draw_lossy(Random(f"lossy {seed}"), plan, engine)
    if lossy:
        engine = replace(engine, dtype=Random(f"dtype {seed}").choice(("float16", "bfloat16")))
    lazy = engine.capabilities.shows_free_blocks
    chunk_blocks = 1 if lazy else rng.choice((1, 1, 2, 3))
    chunk_tokens = max(group.block_tokens for group in engine.groups) * chunk_blocks
    host_slots = rng.randint(*plan.host_slots)
    # A prompt may be longer than the host tier: what fits must be answered.
    chunks_per_token = sum(1 / (group.block_tokens * chunk_blocks) for group in engine.groups)
    prompt_tokens_max = max(3 * chunk_tokens, int(host_slots / chunks_per_token * rng.uniform(*plan.prompt_share)))
    blocks = sum(-(-(prompt_tokens_max + 16) // group.block_tokens) for group in engine.groups)
    tiers = rng.choice(plan.tiers)
    features = draw_features(Random(f"features {seed}"), plan, host_slots)
    return RunSpec(
        seed=seed,
        scenario=plan,
        engine=engine,
        chunk_blocks=chunk_blocks,
        gpu_blocks=2 + int(blocks * rng.uniform(*plan.gpu_share)),
        token_budget=rng.choice((8, 24, 64, 64)),
        running_max=rng.choice((2, 4, 8)),
        frees_early=rng.random() < 0.6 and not engine.capabilities.delays_free_blocks,
        caching=engine.capabilities.prefix_caching,
        host_slots=host_slots,
        prompt_tokens_max=prompt_tokens_max,
        deadline_s=rng.choice((0.5, 1.0) if plan.steady else (0.3, 1.0, 3.0)),
        host={
            "reserved_share": rng.choice((0.5, 0.8, 1.0)),
            "copy_threads": rng.choice((1, 2, 4)),
            **features.host,
        },
        step={"keys_max": rng.choice((64, 128, 1024, 1024))},
        store={
            "chunks_per_step_max": rng.choice((1, 4, 256, 256)),
            "prompt_only": rng.random() < 0.15,
            "plan": "lazy" if lazy else rng.choice(("immediate", "immediate", "eager")),
            "policy": rng.choice(("block_level", "block_level", "request_level")),
        },
        events={"self_describing": rng.random() < 0.3},
        features=features,
        lossy=lossy,
        tiers=tuple(
            _with_features(
                _draw_tier(rng, plan, f"{kind}{i}", kind, host_slots, Random(f"write {seed} {i}").choice(plan.writes)),
                Random(f"features {seed} {i}"),
                features,
                plan,
                lossy,
            )
            for i, kind in enumerate(tiers)
        ),
    )


_FULL, _WINDOW, _LOCAL, _STATE = (
    GroupKind.FULL_ATTENTION,
    GroupKind.SLIDING_WINDOW,
    GroupKind.CHUNKED_LOCAL,
    GroupKind.SSM,
)

_Model = tuple[tuple[GroupKind, int, int | None], ...]

MODELS: tuple[_Model, ...] = (
    ((_FULL, 4, None),),
    ((_FULL, 4, None),),
    ((_FULL, 2, None), (_FULL, 4, None)),
    ((_FULL, 2, None), (_FULL, 6, None)),
    ((_FULL, 4, None), (_WINDOW, 4, 10)),
    ((_FULL, 4, None), (_WINDOW, 2, 5), (_WINDOW, 4, 16)),
    ((_WINDOW, 4, 7),),
    ((_FULL, 4, None), (_LOCAL, 4, 8)),
    ((_FULL, 4, None), (_STATE, 8, None)),
    ((_FULL, 8, None), (_WINDOW, 2, 6)),
)
"""Models to draw from: kind, tokens per block and window of each group."""


WHOLE: tuple[_Model, ...] = tuple(model for model in MODELS if all(kind is _FULL for kind, _, _ in model))
"""Models of days on which tiers round."""

WINDOWED: tuple[_Model, ...] = (
    ((_FULL, 2, None), (_WINDOW, 6, 40)),
    ((_FULL, 2, None), (_WINDOW, 4, 40)),
    ((_FULL, 2, None), (_FULL, 4, None), (_WINDOW, 6, 40)),
)
"""Models of days of windows: the chunks of the window are the coarsest."""


def _draw_engine(rng: Random, plan: Scenario) -> EngineSpec:
    model = rng.choice(WINDOWED if plan.windows else WHOLE if plan.lossy == 1 else MODELS)
    tensors = [rng.choice((1, 2)) for _ in model]
    sizes = [size for _, size, _ in model]
    lazy = rng.random() < plan.lazy
    hash_block_tokens = rng.choice((2, min(sizes))) if all(size % 4 == 0 for size in sizes) else 2
    workers = rng.choice((1, 1, 2, 3))
    groups = tuple(
        GroupSpec(
            size, (size * TOKEN_BYTES,) * count, kind, window,
            copies=workers if (sum(tensors) + number) % 3 == 0 else 1,  # drawn above: equal pages in a third of groups
        )
        for number, ((kind, size, window), count) in enumerate(zip(model, tensors, strict=True))
    )  # fmt: skip
    return EngineSpec(
        model="simulated",
        dtype="bytes",
        groups=groups,
        hash_block_tokens=hash_block_tokens,
        num_workers=workers,
        capabilities=EngineCapabilities(
            # What has no content to be found by is never stored lazily.
            prefix_caching=lazy or rng.random() < plan.caching,
            delays_free_blocks=rng.random() < 0.2,
            shows_free_blocks=lazy,
            prefill_tokens_per_s=(None, 30.0, 300.0)[sum(sizes) % 3],  # by model: whether slow tiers are left out
        ),
    )


def _draw_lossy(rng: Random, plan: Scenario, engine: EngineSpec) -> str:
    """Draw a lossy codec. Chunks of a window may lack blocks, and are rounded otherwise then; states are refused."""
    whole = all(group.kind is _FULL for group in engine.groups)
    return rng.choice(LOSSY) if whole and not plan.stocked and rng.random() < plan.lossy else ""


def _with_features(tier: TierSetup, rng: Random, features: Features, plan: Scenario, lossy: str) -> TierSetup:
    drawn = draw_tier_features(rng, features, tier.capacity_bytes, lossy)
    if plan.stocked:
        drawn["codec"] = "none"  # of the frames that it is stocked with
    return replace(tier, options={**tier.options, **drawn})


STEADY: Mapping[str, Any] = {
    "read_deadline_s": 0.15, "write_deadline_s": 0.15, "queue_ops_max": 16, "queue_bytes_max": 1000 * SLOT_BYTES,
    "probe_deadline_s": 0.5, "presence_ttl_s": 3.0, "absence_ttl_s": 1.0, "presence_keys_max": 1_000_000,
    "probe_keys_max": 1024, "breaker_failures": 5,
}  # fmt: skip
"""Keys of the table of a tier that is never late: each call ends in time. The queue before it may take much longer."""


def _draw_tier(rng: Random, plan: Scenario, name: str, kind: str, host_slots: int, write: str) -> TierSetup:
    shared = kind == "objects"
    capabilities = Capabilities(
        durable=True,
        shared=shared,
        authoritative_index=not shared,
        scan=not shared,
        bounded=not shared,
        preferred_batch=rng.choice((1, 2, 8, 8)),
        preferred_concurrency=rng.choice((1, 2, 3)),
    )
    frames = max(2, int(host_slots * rng.choice(plan.disk_share)))
    capacity = None if shared else frames * SLOT_BYTES
    options: dict[str, Any] = {
        "name": name,
        "backend": f"sim-{name}",
        "write": "read_only" if shared and rng.random() < 0.15 else write,
        "probe_deadline_s": rng.choice((0.1, 0.5)),
        "read_deadline_s": rng.choice((0.3, 2.0)),
        "write_deadline_s": rng.choice((0.5, 3.0)),
        "queue_ops_max": rng.choice((2, 8, 4096, 4096)),
        "queue_bytes_max": rng.choice((2, 1000, 1000)) * SLOT_BYTES,
        "retries": rng.choice((0, 2)),
        "breaker_failures": rng.choice((1, 3, 5)),
        "breaker_cooldown_s": rng.choice((0.2, 1.0)),
        "probe_keys_max": rng.choice((3, 1024)),
        "presence_ttl_s": rng.choice((0.5, 5.0, 30.0)),
        "absence_ttl_s": rng.choice((0.0, 0.5, 1.0, 5.0)),
        "presence_keys_max": rng.choice((8, 100, 1_000_000, 1_000_000)),
    }
    if capacity is not None:
        options["capacity"] = capacity
    if plan.steady:
        options |= STEADY
    return TierSetup(
        name=name,
        capabilities=capabilities,
        capacity_bytes=capacity,
        options=options,
        menu=plan.menu,
        healthy_s=plan.healthy_s,
        faulty_s=plan.faulty_s,
        usual_s=rng.choice(plan.paces),
        tail=plan.tail,
        probe_key_s=plan.probe_key_s if shared else 0.0,
        asynchronous=shared or rng.random() < 0.5,
    )

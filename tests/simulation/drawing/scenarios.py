"""Scenarios: kinds of days, each stressing one aspect. A seed chooses one; ``--scenario`` names one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from simulation.world.fault_schedule import Fault

_T = Fault
_ALL = tuple(fault for fault in Fault if fault is not Fault.NONE)
_STACKS: tuple[tuple[str, ...], ...] = (
    (),
    ("disk",),
    ("objects",),
    ("disk", "objects"),
    ("disk", "objects"),
    ("objects", "disk"),
    ("disk", "disk", "objects"),
)


_QUICK = (0.0001, 0.0005, 0.002, 0.01)
_STEADY = (0.0002, 0.001, 0.005, 0.02, 0.1)
_UNHURRIED = (0.02,)


@dataclass(frozen=True, slots=True)
class Scenario:
    """Weights of a kind of day. Rates are probabilities per engine step; shares are of the runs or of the requests.

    - ``tiers``: kinds of lower tiers to choose from; ``menu``: their faults; ``writes``: write policies.
    - ``healthy_s``, ``faulty_s``: average durations of spells; ``paces``: usual durations of a call, one per tier;
      ``tail``: share of calls that take long without a fault.
    - ``host_slots``, ``prompt_share``, ``gpu_share``, ``disk_share``: ranges of sizes. Prompts are a share of the host
      tier, GPU blocks a share of the longest request's, disks a multiple of the host tier.
    - ``families``: number of unrelated prefixes; ``burst_max``: requests that arrive at once; ``back``: share that
      continues an earlier request; ``crowd``: share of bursts for one prefix; ``idle``: rate of seconds without events.
    - ``kill``, ``close``: rates of a death, or close, of the process; ``new_weights``: share with
      other weights then; ``changes``: rate of attached and detached tiers; ``reset_all``: share of resets of all tiers.
    - ``rot``, ``lose``, ``others``: rates of damaged slots or frames, of lost frames, and of other engines' writes.
    - ``steady``: no fault occurs and no tier is late, so that every hit must be loaded in full. ``stocked``: tiers have
      all prefixes before the first request. ``full``, ``silent``: rates of spells, longer than the deadline, in which
      the engine admits no request, or takes no step. ``head_only``: share of engines that ask about one waiting request
      per step. ``waiting_max``: requests in the engine at once. ``probe_key_s``: seconds per key of a probe. ``loops``:
      share of requests that are announced with repeated hashes first. ``windows``: models have a window of coarse
      chunks.
    - ``lossy``: share with a lossy codec, in models that have full attention only; 1.0: of no other model.
    - ``refuses_first``: rate of unused offers; ``lazy``, ``caching``: shares of runs with lazy stores, and with prefix
      caching; ``tenants``: share with several users and quotas; ``blind``: share with hashes that are equal for users.
    """

    name: str
    summary: str
    tiers: Sequence[tuple[str, ...]] = _STACKS
    menu: Sequence[Fault] = ()
    healthy_s: float = 3.0
    faulty_s: float = 1.5
    host_slots: tuple[int, int] = (24, 64)
    prompt_share: tuple[float, float] = (0.15, 0.5)
    gpu_share: tuple[float, float] = (1.0, 1.4)
    paces: Sequence[Sequence[float]] = (_QUICK, _QUICK, _STEADY)
    tail: float = 0.02
    disk_share: Sequence[float] = (0.2, 1.0, 2.0, 5.0)
    writes: Sequence[str] = ("through", "through", "through", "on_reuse", "back")
    families: Sequence[int] = (2, 2, 5)
    back: float = 0.5
    crowd: float = 0.4
    arrive: float = 0.25
    burst_max: int = 3
    abort: float = 0.02
    preempt: float = 0.03
    reset: float = 0.005
    kill: float = 0.004
    close: float = 0.002
    new_weights: float = 0.2
    rot: float = 0.01
    lose: float = 0.01
    others: float = 0.02
    idle: float = 0.02
    refuses_first: float = 0.1
    lazy: float = 0.1
    caching: float = 0.3
    tenants: float = 0.3
    blind: float = 0.7
    reset_all: float = 0.5
    changes: float = 0.01
    steady: bool = False
    stocked: bool = False
    full: float = 0.0
    silent: float = 0.0
    head_only: float = 0.0
    waiting_max: int = 10
    probe_key_s: float = 0.0
    loops: float = 0.0
    windows: bool = False
    lossy: float = 0.5


def _scenarios() -> list[Scenario]:
    rows = _STACKS[1:]
    return [
        Scenario("calm", "No faults, and no hurry.", kill=0.0, rot=0.0, lose=0.0),
        Scenario("mixed", "A bit of everything.", menu=_ALL),
        Scenario("storm", "Everything goes wrong all the time.", rows, _ALL, healthy_s=0.5, faulty_s=1.0),
        Scenario(
            "tiny-host", "Prefixes longer than the host tier; eight requests over a full one.", rows,
            host_slots=(4, 8), prompt_share=(1.1, 3.0), gpu_share=(1.0, 4.0), burst_max=8,
        ),
        Scenario(
            "returning", "Conversations come back long after their GPU blocks were given to others.",
            (("disk",), ("disk", "objects"), ("disk", "disk")), (_T.SLOW,), healthy_s=6.0, gpu_share=(1.0, 1.2),
            disk_share=(2.0, 5.0), back=0.8, kill=0.0, lazy=0.0, refuses_first=0.0,
        ),
        Scenario(
            "cramped", "Small disks that make room all the time, for what they have just deleted.",
            (("disk",), ("disk", "disk")), host_slots=(8, 24), prompt_share=(0.5, 1.5), disk_share=(0.3, 0.6, 1.0),
            kill=0.0, close=0.0, rot=0.0, lose=0.0,
        ),
        Scenario(
            "rotten", "Disks from which much is read again, and of which much is bad.",
            (("disk",),), host_slots=(8, 20), prompt_share=(0.3, 0.6), gpu_share=(1.0, 1.2),
            paces=(_QUICK,), tail=0.3, disk_share=(8.0,), families=(1, 2), caching=0.0, lazy=0.0,
            rot=1.0, lose=0.0, kill=0.0, close=0.0,
        ),
        Scenario(
            "hung", "Tiers stop answering, some for good.", rows, (_T.HUNG, _T.STUCK, _T.SLOW), faulty_s=3.0
        ),
        Scenario("flapping", "Tiers come and go.", rows, (_T.FLAPPING, _T.RAISING, _T.PARTIAL), healthy_s=1.0),
        Scenario(
            "liars", "Tiers return other bytes than they were given, or none.", rows,
            (_T.BAD_READS, _T.BAD_READS, _T.FALSE_PRESENCE, _T.FORGETFUL, _T.BABBLING), healthy_s=1.0, faulty_s=2.0,
            host_slots=(8, 24), gpu_share=(1.0, 1.2), caching=0.1, rot=0.05, lose=0.05,
        ),
        Scenario("full", "Tiers have no room.", rows, (_T.FULL, _T.LOST_REPLIES), healthy_s=1.0),
        Scenario(
            "restarts", "The process dies and comes back, sometimes with other weights.", rows, (_T.SLOW, _T.RAISING),
            kill=0.03, close=0.01, reset=0.02,
        ),
        Scenario(
            "demotions", "Tiers get what the host tier evicts, or what is used again, and fail.",
            rows, (_T.SLOW, _T.HUNG, _T.RAISING, _T.FULL, _T.FLAPPING), host_slots=(8, 40), healthy_s=4.0,
            gpu_share=(1.0, 1.2), writes=("back", "back", "on_reuse", "on_reuse", "through"), close=0.01, caching=0.0,
        ),
        Scenario(
            "resets", "The cache is emptied all the time.", (("disk",), ("disk", "disk"), ("disk", "objects")),
            (_T.SLOW,), host_slots=(12, 40), gpu_share=(1.0, 1.2), disk_share=(1.0, 2.0, 5.0), reset=0.02,
            reset_all=0.7, changes=0.0, caching=0.1,
        ),
        Scenario(
            "changes", "Tiers are attached and detached in every state, hung ones too, and come back.",
            rows, (_T.HUNG, _T.STUCK, _T.SLOW, _T.RAISING, _T.LOST_REPLIES), healthy_s=2.0, host_slots=(12, 40),
            gpu_share=(1.0, 1.2), changes=0.12, reset=0.002, caching=0.1, lose=0.0,
        ),
        Scenario(
            "tenants", "Several users with quotas, who ask for the same and must get nothing of each other's.",
            (("disk",), ("disk", "objects"), ("disk", "disk")), (_T.SLOW, _T.PARTIAL), host_slots=(16, 48),
            gpu_share=(1.0, 1.2), disk_share=(1.0, 2.0, 5.0), tenants=1.0, blind=1.0, caching=0.1, lazy=0.05,
        ),
        Scenario(
            "rounded", "Tiers that round, beside others that must stay exact.",
            (("disk",), ("disk", "objects"), ("objects", "disk"), ("disk", "disk", "objects")),
            (_T.SLOW, _T.BAD_READS, _T.LOST_REPLIES), healthy_s=4.0, host_slots=(8, 32), gpu_share=(1.0, 1.2),
            disk_share=(1.0, 2.0, 5.0), back=0.7, caching=0.1, rot=0.05, lossy=1.0,
        ),
        Scenario(
            "fading", "Tiers become much slower than computing and recover, and no call is late.", menu=(_T.DEGRADED,),
            tiers=(("disk",), ("disk", "objects")), paces=(_QUICK,), tail=0.0, host_slots=(16, 40),
            prompt_share=(0.5, 1.5), gpu_share=(1.5, 3.0), disk_share=(20.0,), families=(8,), healthy_s=1.0,
            faulty_s=2.0, arrive=0.2, burst_max=8, waiting_max=16, stocked=True, caching=0.2, lazy=0.0,
        ),
        Scenario(
            "churn", "Requests are aborted and preempted in every state.", menu=(_T.SLOW, _T.PARTIAL),
            gpu_share=(1.0, 1.2), arrive=0.5, abort=0.3, preempt=0.15, refuses_first=0.3, caching=0.1,
        ),
    ]  # fmt: skip


def _steady_scenarios() -> list[Scenario]:
    """Days without faults under load."""
    base = Scenario(
        "steady", "", (("disk",), ("disk", "objects")), host_slots=(32, 64), prompt_share=(0.3, 0.6), tail=0.0,
        paces=(_QUICK, _UNHURRIED), disk_share=(20.0,), families=(8,), back=0.1, crowd=0.2, idle=0.0, abort=0.01,
        reset=0.0, kill=0.0, close=0.0, rot=0.0, lose=0.0, others=0.0, changes=0.0, lazy=0.0, tenants=0.0, caching=0.2,
        refuses_first=0.02, preempt=0.01, steady=True, stocked=True, loops=0.05,
    )  # fmt: skip
    return [
        replace(
            base, name="silent", summary="The engine is silent, or full, for longer than the deadline.",
            full=0.04, silent=0.06, head_only=0.3, caching=0.5, crowd=0.4,
        ),
        replace(
            base, name="overload", summary="Requests for many more chunks than there are slots, all at once.",
            paces=(_UNHURRIED,), arrive=0.1, burst_max=24, waiting_max=30, gpu_share=(1.5, 4.0), head_only=0.2,
        ),
        replace(
            base, name="probes", summary="A shared tier that takes milliseconds per key to say what it has.",
            tiers=(("objects",),), paces=(_QUICK,), arrive=0.2, burst_max=16, waiting_max=20,
            gpu_share=(1.5, 4.0), probe_key_s=0.007,
        ),
        replace(
            base, name="windows", summary="Hits that need more slots than requests may have, in models with windows.",
            host_slots=(16, 32), prompt_share=(0.8, 1.5), gpu_share=(1.5, 2.0), windows=True,
        ),
        replace(
            base, name="heads", summary="One long prompt that no disk has room for, again and again.",
            tiers=(("disk",),), host_slots=(12, 24), prompt_share=(1.5, 2.5), disk_share=(0.8, 1.2, 1.5),
            writes=("through",), families=(1,), back=0.0, crowd=0.0, arrive=0.05, burst_max=1, caching=0.0, loops=0.0,
            stocked=False, close=0.01,
        ),
    ]  # fmt: skip


SCENARIOS: dict[str, Scenario] = {scenario.name: scenario for scenario in [*_scenarios(), *_steady_scenarios()]}
"""Scenarios by name."""

"""I/O of the lower tiers: the only package that owns threads and event loops. It makes no placement decisions.

Nouns:

* :class:`Dispatcher`: takes operations from the engine's thread and returns their completions.
* *Ticket*: one operation in flight, with its deadline and, later, its result.
* *Lane*: path of one tier's tickets to its backend. A blocking backend has a thread lane, with threads of its own. An
  async backend has an async lane; all async lanes share one event loop on one thread.
* *Breaker*: refuses operations of a tier that failed too often, until a trial is answered.
* *Tier state*: record of one tier: lane, bounds, breaker, counters, progress of a detach.
* :class:`CopyPool`: threads for copies between slots and KV tensors. It is independent of the tiers.

Wings: :mod:`.lanes` has tickets and their ways to a backend, :mod:`.health` whether a tier is used and written to,
:mod:`.threads` how threads start.

Flow: ``submit`` turns a :class:`~tierkv.types.tier_ops.TierOp` into a ticket and offers it to the tier's lane. An I/O
thread claims the ticket, has the :class:`~tierkv.tiers.tier.Tier` perform it, and appends it to one shared deque.
``drain`` takes finished tickets from that deque and makes completions.

Threads: every method of the dispatcher runs on the engine's thread. Deadlines, breakers and counters belong to it and
need no lock. The only objects that two threads touch are the ticket queues, the deque of finished tickets and a
ticket's claim; all three rely on atomic operations of ``deque``, ``list`` and ``heapq``.

Invariants:

* ``submit`` and ``drain`` never wait.
* Every operation gets exactly one completion with ``ended=True``, unless :meth:`Dispatcher.close` abandons its call. A
  missed deadline is reported before that, with ``ended=False``: the slots stay leased until the I/O has ended.
* Data that arrives after the reported deadline is never accepted.
* Queues, threads, retries and waits are bounded, and threads are daemons: a backend that hangs blocks neither a step
  nor the exit of the interpreter.
"""

from __future__ import annotations

from tierkv.dispatch.dispatcher import Dispatcher
from tierkv.dispatch.scanning import ScanResult
from tierkv.dispatch.stats import DispatchStats, TierStats
from tierkv.dispatch.threads.copy_pool import CopyPool
from tierkv.dispatch.tier_state import TierLimits

__all__ = ["CopyPool", "DispatchStats", "Dispatcher", "ScanResult", "TierLimits", "TierStats"]

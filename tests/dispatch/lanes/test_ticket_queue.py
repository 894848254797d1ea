"""The queue of a tier: what requests wait for goes first, short loads before long ones, and none waits for ever."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

from dispatch_bench import KEYS

from tierkv.dispatch.lanes.ticket import Ticket, TicketQueue
from tierkv.types.tier_ops import TierOp, Verb

NUMBERS: Iterator[int] = itertools.count()


def ticket(verb: Verb = Verb.READ, turn_chunks: int = 0, keys: int = 4, submitted_s: float = 0.0) -> Ticket:
    """A ticket of four keys."""
    op = TierOp(next(NUMBERS), 0, verb, tuple(KEYS[:keys]), (), 1e9, turn_chunks=turn_chunks)
    return Ticket(op, submitted_s)


def put(queue: TicketQueue, tickets: Sequence[Ticket]) -> None:
    """Put them, in this order."""
    assert [queue.put(each) for each in tickets] == [True] * len(tickets)


def taken(queue: TicketQueue, count: int) -> list[Ticket]:
    """The next tickets."""
    found = [queue.take() for _ in range(count)]
    return [each for each in found if each is not None]


def test_a_short_load_passes_a_long_one() -> None:
    """A prompt of a few chunks waited for all reads of one of eight thousand that had come before it."""
    queue = TicketQueue(100)
    long, short = [ticket(turn_chunks=8191) for _ in range(8)], [ticket(turn_chunks=15) for _ in range(2)]
    put(queue, long[:8])
    assert taken(queue, 2) == long[:2]
    put(queue, short)
    assert taken(queue, 9) == [*short, *long[2:]]


def test_equal_loads_keep_their_order() -> None:
    """In a burst of equal prompts the first one is ready soonest if it is read whole before the next one."""
    queue = TicketQueue(100)
    tickets = [ticket(turn_chunks=63) for _ in range(20)]
    put(queue, tickets[:5])
    assert taken(queue, 2) == tickets[:2]
    put(queue, tickets[5:])
    assert taken(queue, 18) == tickets[2:]


def test_a_long_load_waits_for_a_bounded_number_of_keys() -> None:
    """Short loads come for ever. The long one is read when the tier has read about as much as it wants itself."""
    queue = TicketQueue(100)
    long = ticket(turn_chunks=255)
    put(queue, [long])
    served = 0
    while True:
        put(queue, [ticket(turn_chunks=3)])
        (first,) = taken(queue, 1)
        if first is long:
            break
        served += len(first.op.keys)
        assert served <= 255
    assert served >= 240


def test_what_requests_wait_for_goes_first() -> None:
    """Probes are in one order with reads: a request waits for either. Deletions free space for writes."""
    queue = TicketQueue(100)
    write, delete, read, probe = map(ticket, (Verb.WRITE, Verb.DELETE, Verb.READ, Verb.PROBE))
    put(queue, [write, delete, read, probe])
    assert taken(queue, 5) == [read, probe, delete, write]


def test_a_queue_full_of_writes_accepts_reads() -> None:
    """Many small writes must not refuse reads, for which requests wait. Writes behind as many reads are refused."""
    queue = TicketQueue(3)
    put(queue, [ticket(Verb.WRITE) for _ in range(3)])
    put(queue, [ticket(Verb.READ) for _ in range(3)])
    assert [queue.put(ticket(verb)) for verb in Verb] == [False] * 4
    taken(queue, 3)
    assert [queue.put(ticket(verb)) for verb in (Verb.WRITE, Verb.READ)] == [False, True]
    assert len(queue) == 4


def test_the_age_is_that_of_the_oldest() -> None:
    """The first in the order may be the youngest."""
    queue = TicketQueue(10)
    assert queue.age_s(7.0) == 0.0
    put(queue, [ticket(turn_chunks=100, submitted_s=1.0), ticket(turn_chunks=1, submitted_s=5.0)])
    assert queue.age_s(7.0) == 6.0
    put(queue, [ticket(Verb.WRITE, submitted_s=0.5)])
    assert queue.age_s(7.0) == 6.5


def test_threads_take_each_ticket_once() -> None:
    """One thread puts while others take; nothing is lost or given twice."""
    queue, found = TicketQueue(10_000), list[Ticket]()
    tickets = [ticket(turn_chunks=number % 7 * 100) for number in range(3000)]
    ended = threading.Event()

    def take() -> None:
        while not ended.is_set() or len(queue):
            if (each := queue.take()) is not None:
                found.append(each)

    threads = [threading.Thread(target=take) for _ in range(3)]
    for thread in threads:
        thread.start()
    put(queue, tickets)
    ended.set()
    for thread in threads:
        thread.join()
    assert sorted(each.op.op_id for each in found) == [each.op.op_id for each in tickets]

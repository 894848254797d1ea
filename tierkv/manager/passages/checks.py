"""Checks of passages and of their account: pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tierkv.errors import require
from tierkv.manager.host.host_tier import HostTier
from tierkv.manager.passages.passage import NOT_GRANTED, Passage
from tierkv.manager.passages.slot_account import SlotAccount, SlotUse


def check_account(
    account: SlotAccount, passages: Sequence[Passage], num_pins: int, pending: Iterable[tuple[SlotUse, Sequence[int]]]
) -> None:
    """Check the account against what it counts.

    Args:
        account: of all slots.
        passages: all of them.
        num_pins: chunks that are pinned ahead of a passage.
        pending: slots that later steps release, with their use.

    Raises:
        InvariantError: a count is wrong, or all together exceed the cap.
    """
    late = dict.fromkeys(SlotUse, 0)
    for use, slots in pending:
        late[use] += len(slots)
    held = num_pins + late[SlotUse.HELD] + sum(passage.num_granted for passage in passages if not passage.copies)
    gathered = late[SlotUse.GATHERED] + sum(passage.num_granted for passage in passages if passage.copies)
    require(account.held == held, f"{account.held} held slots are counted, not {held}")
    require(account.gathered == gathered, f"{account.gathered} gathered slots are counted, not {gathered}")
    require(account.copying >= late[SlotUse.COPIED], f"{account.copying} copied slots are counted wrong")
    account.validate(sum(late.values()))
    copied = sum(passage.copies for passage in passages)
    require(copied == account.num_copied, f"{account.num_copied} passages are copied, not {copied}")


def check_passage(passage: Passage, host: HostTier, *, queued: bool) -> None:
    """Check one passage. queued: whether it is in the queue of those that wait for slots.

    Raises:
        InvariantError: a granted chunk is not held, or a count is wrong.
    """
    what = f"the passage of {passage.owner!r}"
    require(len(passage.slots) == len(passage.keys), f"{what} holds what it does not want")
    require(queued or not passage.waits_for_slots, f"{what} waits for slots, but not in the queue")
    waiting = granted = 0
    for key, slot in zip(passage.keys, passage.slots, strict=True):
        if slot == NOT_GRANTED:
            continue
        granted += 1
        chunk = host.slots.owner(host.slots.refs([slot])[0])
        require(chunk is not None and chunk.pins > 0, f"{what}: chunk {key.hex()} is granted, but not held")
        require(chunk is None or chunk.key == key, f"{what}: the slot of chunk {key.hex()} has another owner")
        waiting += host.waiters.has(slot, passage)
    require(granted == passage.num_granted, f"{what}: its granted chunks are counted wrong")
    require(waiting == passage.outstanding, f"{what} waits for {passage.outstanding} chunks, not {waiting}")

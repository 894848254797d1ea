"""The table of free slots against a model."""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tierkv_disk.slots import Slot, SlotTable, slot_at


class SlotTableMachine(RuleBasedStateMachine):
    """Whatever the order of takes, frees and pins, no slot has two owners, and none is lost.

    None that is read is handed out, and none beyond a segment's end.
    """

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable()
        self.segments = 0
        self.ours: set[Slot] = set()
        self.owned: list[Slot] = []
        self.pinned: list[Slot] = []

    @rule(end=st.integers(0, 4), beyond=st.integers(0, 2))
    def add_segment(self, end: int, beyond: int) -> None:
        used = [slot_at(self.segments, number) for number in range(end, end + beyond)]
        self.table.add_segment(self.segments, end, used=set(used))
        self.ours |= {slot_at(self.segments, number) for number in range(end)}
        self.owned += used
        self.segments += 1

    @rule()
    def take(self) -> None:
        free = self.ours - set(self.owned) - set(self.pinned)
        slot = self.table.take()
        assert (slot in free) if free else slot is None
        if slot is not None:
            self.owned.append(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.owned))
        self.owned.remove(slot)
        self.table.free(slot)

    @precondition(lambda self: self.owned)
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.owned))
        self.pinned.append(slot)
        self.table.pin(slot)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(self.pinned))
        self.pinned.remove(slot)
        self.table.unpin(slot)

    @invariant()
    def counts_agree(self) -> None:
        assert len(self.table) == len(self.ours - set(self.owned) - set(self.pinned))


TestSlotTable = SlotTableMachine.TestCase

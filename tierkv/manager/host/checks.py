"""Check of the host tier: a pure function."""

from __future__ import annotations

from tierkv.errors import require
from tierkv.manager.host.chunk_state import CODES, FILLING, STATES, ChunkState
from tierkv.manager.host.slot_table import SlotTable
from tierkv.policies.eviction_list import EvictionList
from tierkv.structures.key_table import IdPool

_READY, _DOOMED = CODES[ChunkState.READY], CODES[ChunkState.DOOMED]


def check_slots(table: SlotTable, free: IdPool, listed: EvictionList) -> None:
    """Check every invariant of the slots. O(slots).

    Args:
        table: columns of the tier.
        free: free slots.
        listed: READY chunks that are not demoting.

    Raises:
        InvariantError: one is broken; names it.
    """
    owned = [slot for slot in range(table.num_slots) if table.states[slot]]
    require(len(owned) + free.left == table.num_slots, "slots free + owned differ from capacity")
    require(len(set(free)) == len(list(free)), "a slot is free twice")
    evictable = known = 0
    for slot in owned:
        key, code, pins = table.keys[slot], table.states[slot], table.pins[slot]
        what = f"chunk {key.hex()} ({STATES[code].value}, {pins} pins)"
        require(pins > 0 or code == _READY, f"{what}: it has no pins")
        demoting = slot in table.demoting
        write_pins = table.write_pins[slot]
        require(write_pins <= pins, f"{what}: {write_pins} of its pins are for writes")
        require(not demoting or (code == _READY and write_pins > 0), f"{what}: it is demoting without a write")
        known += code == _READY and not demoting
        evictable += code == _READY and not pins
        if table.is_stale(slot):
            require(slot < table.unswept, f"{what}: it is stale, and the sweep has passed slot {slot}")
        else:
            named = table.find(key)
            require((named == slot) == (code != _DOOMED), f"{what}, slot {slot}: its key names slot {named}")
        filling = slot in table.fills
        require(filling == (STATES[code] in FILLING.values()) or code == _DOOMED, f"{what}: filling is {filling}")
        require(pins >= filling, f"{what}: the I/O that fills it does not pin it")
    filled = sum(slot in table.fills for slot in range(table.num_slots))
    require(filled == len(table.fills), f"I/O fills {filled} slots, {len(table.fills)} are counted")
    ready = [slot for slot in owned if table.states[slot] == _READY and slot not in table.demoting]
    require(set(listed.order.ranked()) <= set(ready), "a slot has a rank in the policy that does not know it")
    require(evictable == listed.evictable, f"{evictable} chunks are evictable, {listed.evictable} are counted")
    require(known == len(listed.policy), f"{known} chunks were added to the policy, it has {len(listed.policy)}")
    named = len(table)
    require(named <= len(owned), f"{named} keys are visible, {len(owned)} slots are owned")

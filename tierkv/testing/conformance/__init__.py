"""The conformance kit: what every backend must do, as a test class to inherit from.

::

    from tierkv.testing import BackendConformance

    class TestFoo(BackendConformance):
        plugin = tierkv_foo.PLUGIN

        def make_options(self, place):
            return FooOptions(path=str(place))

        def raw(self, place, context):
            return FooFiles(place / context.namespace.fingerprint().hex())

The kit opens the backend itself, through the plugin, as the framework does: alone, and below a real small stack. Which
tests apply follows from the declared capabilities, never from a name. Blocking and async backends run the same tests.
``raw`` gives the kit a way to the stored bytes past the backend (:class:`~tierkv.testing.conformance.raw.RawAccess`).
What else an author may state (lengths, capacities) is in :class:`~tierkv.testing.conformance.kit.KitBase`.

A test of the kit that is overridden, taken out or skipped by anybody but the kit fails the suite.
"""

from __future__ import annotations

from tierkv.testing.conformance.batches import BatchTests
from tierkv.testing.conformance.buffers import BufferTests
from tierkv.testing.conformance.contract import ContractTests
from tierkv.testing.conformance.damage import DamageTests
from tierkv.testing.conformance.durability import DurabilityTests, PlaceTests
from tierkv.testing.conformance.event_loop import AsyncTests
from tierkv.testing.conformance.keys import KeyTests
from tierkv.testing.conformance.lifecycle import LifecycleTests
from tierkv.testing.conformance.load import CapacityTests, ConcurrencyTests
from tierkv.testing.conformance.processes import ProcessTests
from tierkv.testing.conformance.reopen import ReopenTests
from tierkv.testing.conformance.room import RoomTests
from tierkv.testing.conformance.rules import RuleTests
from tierkv.testing.conformance.stack_data import StackDataTests
from tierkv.testing.conformance.stack_faults import StackFaultTests
from tierkv.testing.conformance.stack_flow import StackFlowTests
from tierkv.testing.conformance.stack_room import StackRoomTests
from tierkv.testing.conformance.stack_wedged import StackWedgedTests


class BackendConformance(
    ContractTests,
    BatchTests,
    KeyTests,
    BufferTests,
    LifecycleTests,
    AsyncTests,
    DurabilityTests,
    ReopenTests,
    DamageTests,
    ProcessTests,
    PlaceTests,
    ConcurrencyTests,
    CapacityTests,
    RoomTests,
    StackDataTests,
    StackFaultTests,
    StackWedgedTests,
    StackRoomTests,
    StackFlowTests,
    RuleTests,
):
    """Inherit, set ``plugin``, define ``make_options`` and ``raw``."""

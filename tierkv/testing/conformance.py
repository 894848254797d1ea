"""The conformance kit: what every backend must do, as a test class to inherit from.

::

    from tierkv.testing import BackendConformance

    class TestFoo(BackendConformance):
        plugin = tierkv_foo.PLUGIN

        def make_options(self, place):
            return FooOptions(path=str(place))

The kit opens the backend itself, through the plugin, as the framework does. Which tests apply follows from the
declared capabilities, never from a name. Blocking and async backends run the same tests. What else an author may
state (lengths, capacities, raw access behind the backend's back) is in :class:`~tierkv.testing.kit.KitBase`.
"""

from __future__ import annotations

from tierkv.testing.suite_contract import ContractTests
from tierkv.testing.suite_durability import DurabilityTests, PlaceTests
from tierkv.testing.suite_load import CapacityTests, ConcurrencyTests


class BackendConformance(ContractTests, DurabilityTests, PlaceTests, ConcurrencyTests, CapacityTests):
    """Inherit, set ``plugin``, define ``make_options``; define ``damage`` and ``raw_remove`` where it can be done."""

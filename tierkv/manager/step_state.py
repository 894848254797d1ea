"""State of the current engine step that the parts of a manager share."""

from __future__ import annotations

from tierkv.manager.step_budget import STEP_KEYS_MAX, StepBudget


class StepState:
    """Time, budget and version of all answers. One per manager, held by every part that needs it.

    Args:
        keys_max: key operations per step.
    """

    __slots__ = (
        "_probes",
        "_probing_s",
        "answered_s",
        "budget",
        "delivered_s",
        "is_behind",
        "now",
        "probed_s",
        "speed_changes",
        "stored_s",
        "version",
    )

    def __init__(self, keys_max: int = STEP_KEYS_MAX) -> None:
        self.budget = StepBudget(keys_max)
        """Key operations of the current step."""
        self.now = 0.0
        """Time in seconds on the stack's clock. Constant from one ``begin_step`` to the next."""
        self.answered_s = float("-inf")
        """Time of the latest sign that a tier answers: a probe answered, a chunk read or written, a tier regained."""
        self.delivered_s: dict[str, float] = {}
        """Time of the latest chunk that was read, by the name of its tier."""
        self.probed_s = float("-inf")
        """Time of the latest answer of a shared tier about its chunks."""
        self.is_behind = False
        """Whether operations have ended that this step had no budget to apply: then no tier is late."""
        self.stored_s = float("-inf")
        """Time when a store of the engine last began. Until it ends, its slots are kept from others by no tier."""
        self.version = 0
        """Grows whenever an answer that was "not known yet" may have become known."""
        self.speed_changes = 0
        """Number of times that the speed of a tier became known, or quite another one."""
        self._probes = 0
        self._probing_s = 0.0

    def probe_began(self) -> None:
        """Note that a shared tier is asked about chunks."""
        if not self._probes:
            self._probing_s -= self.now
        self._probes += 1

    def probe_ended(self) -> None:
        """Note that a probe was answered, or is late."""
        self._probes -= 1
        if not self._probes:
            self._probing_s += self.now

    @property
    def probing_s(self) -> float:
        """Seconds since the start in which any shared tier was asked."""
        return self._probing_s + (self.now if self._probes else 0.0)

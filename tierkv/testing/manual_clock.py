"""Time and threads that a test or a simulation owns: a clock that moves when told, runners that run when told."""

from __future__ import annotations

from dataclasses import dataclass, field

from tierkv.dispatch.spawn import Runner


@dataclass
class ManualClock:
    """A clock that stands still until it is moved. Call it to read it, in seconds."""

    now_s: float = 1000.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now_s += seconds


@dataclass
class SteppedHandle:
    """A runner that runs when it is stepped."""

    name: str
    runner: Runner

    def is_alive(self) -> bool:
        """Whether it may still have something to do."""
        return not self.runner.done


@dataclass
class Stepper:
    """Stands in for threads: give it as ``spawn``, and its ``pause`` as ``pause``, to a dispatcher.

    Attributes:
        clock: moved by ``pause``.
        handles: what was started, in order.
        frozen: names of runners that hang: they are not stepped.
    """

    clock: ManualClock
    handles: list[SteppedHandle] = field(default_factory=list)
    frozen: set[str] = field(default_factory=set)

    def __call__(self, name: str, runner: Runner) -> SteppedHandle:
        """See :class:`tierkv.dispatch.spawn.Spawn`."""
        handle = SteppedHandle(name, runner)
        self.handles.append(handle)
        return handle

    def step(self, name: str) -> bool:
        """Let one runner do one thing; whether it had one."""
        return any(
            handle.runner.step() for handle in self.handles if handle.name == name and handle.name not in self.frozen
        )

    def step_all(self) -> None:
        """Let all do one thing each, in the order of their start."""
        for handle in list(self.handles):
            if handle.name not in self.frozen and handle.is_alive():
                handle.runner.step()

    def engine_sleep(self, seconds: float) -> None:
        """What the others do while the caller waits."""
        self.clock.advance(seconds)
        self.step_all()

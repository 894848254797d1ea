"""``tierkv demo``: serve conversations through a stack in one process, go on with them in another, and compare."""

from tierkv.cli.demo.command import demo

__all__ = ["demo"]

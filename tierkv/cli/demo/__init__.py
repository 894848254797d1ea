"""``tierkv demo``: serve conversations through a stack in one process, continue them in another, and compare.

Three phases run in new processes: without tierkv, with an empty stack, and with the filled tiers (:mod:`~.phases`,
:mod:`~.processes`, :mod:`~.serving`). :mod:`~.command` starts them and :mod:`~.report` compares every token.
"""

from tierkv.cli.demo.command import demo

__all__ = ["demo"]

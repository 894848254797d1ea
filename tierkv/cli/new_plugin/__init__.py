"""``tierkv new-plugin NAME``: write the distribution of a new backend, which passes the conformance kit at once.

A *template* is a text file of the folder ``templates`` with a few words between ``@`` signs. :func:`rendered` gives all
files of a new distribution as text, and the command writes them into a new folder. Nothing that exists is changed.

Invariants: a generated distribution needs tierkv and pytest alone; a test generates both kinds, installs them without a
network, and runs the kit on them.
"""

from __future__ import annotations

from tierkv.cli.new_plugin.command import new_plugin
from tierkv.cli.new_plugin.rendering import Kind, rendered

__all__ = ["Kind", "new_plugin", "rendered"]

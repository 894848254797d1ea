"""Real processes, files and system calls under faults: ``nox -s crash``, ``exhaust`` and ``soak``.

The simulation plays the core against faults of simulated storage. The harness plays the backends against faults of the
operating system. It is not part of the wheel.

Nouns. A *target* is a backend with options and sizes of its own. A *place* is a directory; a *room* is one namespace in
it. A *lane* is a thread that writes some keys of a room. A *ledger* knows the states in which each key may be after a
crash. A *play* is what one seed does.

Modes of ``crash``. ``kills``: several writers are ended at a random instant. ``calls``: one system call fails, writes
half, or ends the process. ``cuts``: from a journal of all calls, images of the disk after a power cut are built.

Two of them need a library between the program and the C library. It is compiled from ``system_calls.c`` at the start;
without a C compiler these modes are skipped, with the reason.
"""

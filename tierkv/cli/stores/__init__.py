"""Commands on stores at rest: ``ls``, ``du``, ``inspect``, ``verify``, ``rm``, ``gc``, ``copy``, ``warm``.

Each module holds one command or two, thin over :mod:`tierkv.stores`. :mod:`~.target` has the options that they share
and turns a command line into places and namespaces; :mod:`~.output` prints findings, progress, sizes and ages.

Exit code 0: done, and nothing is wrong; 1: damage was found, or work was left undone; 2: wrong input.
"""

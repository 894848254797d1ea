"""Distributions as a user gets them: each installed into an empty environment, and put to its main job there.

``python -m packages DIST`` takes the wheels and source archives that ``nox -s build`` has made. It collects them and
the wheels of what they require in one folder (:class:`~packages.environments.WheelHouse`), and from then on pip sees no
other place. Each environment (:class:`~packages.environments.Environment`) is new, holds what one install line brings,
and runs :mod:`packages.smoke`, a program that imports nothing of this checkout.

- Each distribution's wheel alone, with what it requires.
- ``tierkv[all,testing]``, which must bring every backend; the conformance kit is collected there.
- All source archives, from which pip builds the wheels.

None of these has torch: the core and every backend run without it.
"""

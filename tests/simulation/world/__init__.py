"""World of the simulation: simulated time and threads, storage with faults, and the process that may die.

``world`` plays the steps of one run; ``process`` is one stack with its engine; ``storage`` outlives both.
"""

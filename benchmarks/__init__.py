"""How fast tierkv is, each figure beside its limit: ``python -m benchmarks`` lists what can be measured.

Not part of any distribution. Every row is a ratio of two things that took turns in the same run, because absolute
numbers say more about the machine and its neighbours than about the code. Nothing here asserts a time.
"""

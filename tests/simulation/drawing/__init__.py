"""Draws of the simulation: everything that a seed decides.

Scenarios weight the draws; a run spec fixes engine, tiers and features; a workload draws requests step by step.
"""

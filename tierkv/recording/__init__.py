"""The record of a stack in service: one small line for each thing that happened, for ``tierkv explain``."""

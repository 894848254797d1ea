"""Lookups and jobs of engines that schedule themselves."""

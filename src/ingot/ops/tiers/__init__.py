"""Tiers of a Squish directory: the prepared forms of one model, from slow-and-small to fast-and-large.

Squish Architecture, sections 2, 4 and 7; our decisions in ``spec/tiers.md``.
"""

"""Deltas: made, applied, undone."""

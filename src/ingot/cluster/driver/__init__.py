"""Distribute conversions, deltas and checks over workers."""

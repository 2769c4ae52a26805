"""Conversions: planned, then executed."""

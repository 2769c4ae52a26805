"""Shared tools, the only copy of each. Imports nothing of Ingot but ``ingot.errors`` and the native core."""

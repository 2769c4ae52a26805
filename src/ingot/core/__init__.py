"""Tools that several packages share; each is implemented only once.

This package imports nothing of Ingot except ``ingot.errors`` and the native core.
"""

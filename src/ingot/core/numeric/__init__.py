"""Dtypes, blocks and checked arithmetic."""

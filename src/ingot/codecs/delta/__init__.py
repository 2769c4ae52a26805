"""Differences between two versions of a tensor."""

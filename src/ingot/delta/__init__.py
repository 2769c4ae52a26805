"""Differences between a base and its fine-tunes: diff, patch, chains."""

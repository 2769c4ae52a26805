"""Structured pruning: search for the blocks of feed-forward networks that matter least."""

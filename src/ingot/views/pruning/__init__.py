"""Structured pruning: find the least important blocks of channels in feed-forward networks."""

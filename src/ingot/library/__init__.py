"""The deduplicating library of checkpoints."""

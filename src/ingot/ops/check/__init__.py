"""Questions about a checkpoint: whole, equal, what is inside."""

"""Deltas between a base and a fine-tune: write them to files, apply them, and apply chains of them."""

"""Deltas: the difference between a base and a fine-tune as a file, its application, and chains of deltas."""

"""Palettes: weights as indices into codebooks."""

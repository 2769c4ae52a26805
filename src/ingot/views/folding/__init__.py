"""Folding of rotations and scales into weights: the model's outputs stay the same, and its weights round better."""

"""Folding of rotations and scales into weights: the model's outputs stay the same, its weights round better."""

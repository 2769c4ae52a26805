"""Collect statistics of a model's matrices."""

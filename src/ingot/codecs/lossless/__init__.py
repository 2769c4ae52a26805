"""Lossless compression of floats."""

"""Squish directories of ``.npy`` arrays, as containers."""

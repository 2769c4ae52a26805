"""Formats: parts to files and back, no arithmetic on weights. One folder each, listed in ``table.py``."""

"""Codecs convert numbers to parts and back, independent of files. Each is a small class, listed in ``table.py``."""

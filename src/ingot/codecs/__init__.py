"""Codecs: numbers to parts and back, independent of files. One small class per codec, listed in ``table.py``."""

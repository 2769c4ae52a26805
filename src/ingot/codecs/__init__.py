"""Codecs: numbers to parts and back. They know no file. One small class each, listed in ``table.py``."""

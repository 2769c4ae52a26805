"""Checksums, encodings and buffers."""

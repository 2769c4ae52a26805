"""Weights as textures."""

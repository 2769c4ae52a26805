"""Helpers that several formats use."""

"""Whole tensors into memory."""

"""Sparse tensors: elements, masks and blocks that are kept."""

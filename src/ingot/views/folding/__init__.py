"""Fold rotations and scales into weights before they are rounded."""

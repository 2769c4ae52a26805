"""Floats in fewer bits, exactly."""

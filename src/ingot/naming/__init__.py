"""Meaning of tensor names and of ``config.json``: roles, layers, families."""

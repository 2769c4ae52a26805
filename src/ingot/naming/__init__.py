"""The meaning of tensor names and of ``config.json``: roles, layers, families."""

"""Values stored unchanged."""

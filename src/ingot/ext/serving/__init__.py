"""Serving: packed KV caches and speculative drafting."""

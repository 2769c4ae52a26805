"""Examine checkpoints: verify, compare, inspect, seal, doctor."""

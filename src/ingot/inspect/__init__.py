"""Examine checkpoints and the installation: verify, compare, inspect, seal, doctor."""

"""Weights as windows of bit streams: neighbours share bits, so that few bits choose among many values."""

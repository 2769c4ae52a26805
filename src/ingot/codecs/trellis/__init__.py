"""Weights as windows of bit streams: neighbours share bits, so that few of them choose among many values."""

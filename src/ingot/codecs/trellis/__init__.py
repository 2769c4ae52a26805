"""Weights as windows of bit streams: neighbours share bits, so that few bits per weight select among many values."""

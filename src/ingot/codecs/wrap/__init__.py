"""Codecs around another codec: outliers stored apart, and low-rank factors."""

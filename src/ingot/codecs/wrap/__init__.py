"""Codecs around another codec: with outliers stored as separate values, or with low-rank factors."""

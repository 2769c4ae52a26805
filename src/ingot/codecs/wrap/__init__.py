"""Codecs around another codec, with separate outliers or a low-rank correction."""

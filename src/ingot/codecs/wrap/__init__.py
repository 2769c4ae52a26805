"""Codecs around another codec: outliers apart, thin factors."""

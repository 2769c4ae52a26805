"""Codecs whose values are entries of a table times the scale of a group."""

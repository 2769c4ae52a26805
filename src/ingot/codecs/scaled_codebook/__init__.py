"""Codecs whose values are entries of one table, times a scale for each group."""

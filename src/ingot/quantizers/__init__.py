"""Quantizers: the choice of a matrix's codes and scales under its statistics. Codecs define how these are stored."""

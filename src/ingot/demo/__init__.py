"""A small trained language model that ships with Ingot, to measure the effect of compression on real weights."""
